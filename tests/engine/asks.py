"""Requests with drafts, what they must say, and engines that serve them."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

import torch
from helpers import assert_pool_accounts, generate, groups, prompt, stepped_aside, used_blocks
from transformers import LogitsProcessorList

import hf_turbo
from hf_turbo.engine import drafted as drafted_module
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.engine.options import RequestOptions
from hf_turbo.engine.request import Request, Status
from hf_turbo.generation.drafts import Draft

sys.path.append(str(Path(__file__).parents[1] / "speculation"))

from drafting import TREES, Knowing, heads_of, letters, pair, random_model, truncated

LETTERS = letters()
EOS = [5, 17, *range(40, 46)]


DRAFTERS = {
    "lookup": lambda one, folder: hf_turbo.PromptLookup(num_tokens=7),
    "lookup, always 3": lambda one, folder: hf_turbo.PromptLookup(num_tokens=3, adaptive=False),
    "same model": lambda one, folder: hf_turbo.DraftModel(one.stock, num_tokens=3, adaptive=False),
    "truncated": lambda one, folder: hf_turbo.DraftModel(truncated(one.stock.tiny_name), num_tokens=3),
    "other model": lambda one, folder: hf_turbo.DraftModel(random_model("llama"), num_tokens=1, adaptive=False),
    "chain of heads": lambda one, folder: hf_turbo.Medusa(heads_of(one.model, folder), tree=[[0], [0, 0]]),
    "2x2x2": lambda one, folder: hf_turbo.Medusa(heads_of(one.model, folder), tree=TREES["full 2x2x2"], adaptive=False),
}


class Ask:
    """A request, and what it must say.

    Args:
        tokens: the prompt.
        options: of `generate()`, and its seed.
    """

    def __init__(self, tokens, processors=(), **options):
        self.tokens, self.options, self.processors = list(tokens), {"max_new_tokens": 12, **options}, processors

    @property
    def tokenizer(self):
        return LETTERS if "stop_strings" in self.options else None

    def request(self, model, name=""):
        options = {"do_sample": False, **self.options}
        processors = LogitsProcessorList(self.processors)
        own = RequestOptions.of(model, self.tokens, None, options, processors, tokenizer=self.tokenizer)
        return Request(name, self.tokens, own.max_new_tokens, own.num_sequences, options=own)

    def alone(self, model):
        """The new tokens of its texts by `generate()`, without the padding after an end."""
        options = dict(self.options, tokenizer=self.tokenizer, logits_processor=LogitsProcessorList(self.processors))
        torch.manual_seed(options.pop("seed", 0))
        ids = generate(model, torch.tensor([self.tokens]), options.pop("max_new_tokens"), **options).sequences
        return [cut(row, self.options.get("eos_token_id", ())) for row in ids[:, len(self.tokens) :].tolist()]


def cut(tokens, ends):
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: place + 1]


def random_ask(rng, one):
    """Prompts that repeat themselves or not, of all kinds of choice and all kinds of ends."""
    length = rng.choice([1, 2, 5, 9, 14, 25])
    tokens = prompt(1, length, seed=rng.randrange(8))[0].tolist() * rng.choice([1, 1, 2])
    options = {"max_new_tokens": rng.choice([1, 2, 7, 12, 20])}
    if rng.random() < 0.4:
        options |= {"do_sample": True, "temperature": 1.2, "seed": rng.randrange(100), "top_k": rng.choice([0, 1, 20])}
    if rng.random() < 0.2:
        options["repetition_penalty"] = 1.4
    if rng.random() < 0.3:
        options["eos_token_id"] = EOS
    ask = Ask(tokens, **options)
    if rng.random() < 0.25:
        said = ask.alone(one.stock)[0]
        start = rng.randrange(len(said))
        options["stop_strings"] = [LETTERS.decode(said[start : start + 2])]
        ask = Ask(tokens, **options)
    return ask


@cache
def asks_of(name, seed, count):
    """Requests, and what each says alone on the stock model."""
    rng, one = random.Random(seed), pair(name)
    asks = [random_ask(rng, one) for _ in range(count)]
    return [(ask, ask.alone(one.stock)) for ask in asks]


def serve(model, asks, rng, cancel=0.0, **limits):
    """Runs requests that come at any time, some of which are cancelled at any time; the engine is idle afterwards."""
    limits = EngineLimits(**{"max_tokens": 64, "max_rows": 6, **limits})
    engine, coming = Engine(model, limits), [ask.request(model, str(i)) for i, ask in enumerate(asks)]
    requests = list(coming)
    for _ in range(3000):
        if not (engine.has_work or coming):
            break
        while coming and rng.random() < 0.5:
            engine.add(coming.pop(0))
        engine.step()
        assert engine._memory.used <= engine._memory.capacity
        if rng.random() < cancel:
            engine.cancel(rng.choice(requests[: len(requests) - len(coming)] or requests[:1]))
    assert not engine.has_work
    if len(groups(model)) == 1:  # the peaks of several need not be at one time
        assert hf_turbo.report(model).peak_kv_bytes <= engine._memory.capacity
    return engine, requests


def assert_all_right(requests, wanted):
    """Finished requests say what is wanted, cancelled ones a part of it from its beginning."""
    for request, texts in zip(requests, wanted, strict=True):
        said = [sequence.new_tokens for sequence in request.sequences]
        if request.status is Status.CANCELLED:
            texts = [text[: len(tokens)] for text, tokens in zip(texts, said)]
        else:
            assert request.status is Status.FINISHED, request.error
        assert said == texts, (request.id, request.options.generation_config)


def assert_idle(model, *others):
    assert not stepped_aside(model)
    for each in (model, *others):
        assert used_blocks(each) == 0
        assert_pool_accounts(each)


class KnowingRows:
    """Knows what each request will say, and says a random part of it somewhere in a tree of rubbish.

    Args:
        texts: by a request's name, its new tokens.
    """

    def __init__(self, tree, texts, seed=0):
        self.tree, self.texts, self.random = tree, texts, random.Random(seed)

    def propose(self, size, sequences, pace):
        drafts = []
        for sequence in sequences:
            tokens = [self.random.randrange(-1, 128) for _ in self.tree.parents]
            tokens[0] = sequence.tokens[-1]
            path = self.tree.paths[self.random.randrange(self.tree.num_nodes)]
            coming = self.texts[sequence.request.id][len(sequence.new_tokens) :]
            for node, token in zip(path[1:], coming):
                tokens[node] = token
            drafts.append(tokens)
        return Draft(self.tree, torch.tensor(drafts), self.tree.max_depth * len(drafts))

    def ignore(self, *args):
        pass

    learn = saw = forget = close = ignore


def knowing(monkeypatch, one, tree, wanted, block_size=4, **options):
    """The pair's patched model, which drafts what it is going to say."""
    texts = {str(i): texts[0] for i, texts in enumerate(wanted)}
    monkeypatch.setattr(drafted_module, "row_drafts", lambda *args: KnowingRows(tree, texts))
    speculation = Knowing(torch.zeros(1, 1), tree)
    return hf_turbo.patch(one.model, block_size=block_size, speculation=speculation, **options)


def ask_greedy(length, new_tokens, seed=0, **options):
    return Ask(prompt(1, length, seed)[0].tolist(), max_new_tokens=new_tokens, **options)


def both_ways(one, asks):
    return asks, [ask.alone(one.stock) for ask in asks]


def serve_all(model, asks, **limits):
    """Runs requests that come at once."""
    engine = Engine(model, EngineLimits(**{"max_tokens": 512, "max_rows": 16, **limits}))
    requests = [ask.request(model, str(i)) for i, ask in enumerate(asks)]
    for request in requests:
        engine.add(request)
    for _ in range(1000):
        if engine.has_work:
            engine.step()
    assert not engine.has_work
    return engine, requests
