"""Requests together with drafts: each has the text of its own plain `generate()`, whatever is drafted for others."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from combinations import few
from helpers import assert_pool_accounts, generate, groups, poison_what_is_freed, prompt, stepped_aside, used_blocks
from steps import CapturedSteps
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import hf_turbo
from hf_turbo.cache.forward_plan import PackedUnsuited
from hf_turbo.engine import drafted as drafted_module
from hf_turbo.engine import memory as memory_module
from hf_turbo.engine import row_drafts as row_drafts_module
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.forwards import RowForwards
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.engine.options import RequestOptions
from hf_turbo.engine.request import Request, Status
from hf_turbo.engine.row_drafts import DraftModelRows
from hf_turbo.generation.acceptance import Accepted
from hf_turbo.generation.drafts import Draft
from hf_turbo.generation.pace import Pace
from hf_turbo.generation.tree_steps import TreeSteps
from hf_turbo.patching import handle_of, is_patched

sys.path.append(str(Path(__file__).parents[1] / "speculation"))

from drafting import TREES, Knowing, heads_of, letters, pair, random_model, stats, tree_of, truncated

LETTERS = letters()
EOS = [5, 17, *range(40, 46)]


@pytest.fixture(autouse=True)
def no_grad_and_poison(monkeypatch):
    """No gradients; every block that nobody holds says NaN, codes 0xFF."""
    poison_what_is_freed(monkeypatch)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


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


@pytest.mark.parametrize(
    "name, kind, block_size, num_sequences, seed",
    few(["llama", "gemma3_text"], DRAFTERS, [1, 16], [None, 4.0, 1.5], range(4)),
)
def test_any_mix_of_requests(name, kind, block_size, num_sequences, seed, folder):
    """With room for any number of sequences, or for so many of the longest one."""
    one, both = pair(name), asks_of(name, seed, 8)
    asks, wanted = zip(*both, strict=True)
    model = hf_turbo.patch(one.model, block_size=block_size, speculation=DRAFTERS[kind](one, folder))
    longest = max(len(ask.tokens) + ask.options["max_new_tokens"] for ask in asks)
    num_blocks = None if num_sequences is None else int(num_sequences * -(-longest // block_size)) + 1
    rng = random.Random(seed)
    engine, requests = serve(model, asks, rng, cancel=0.03, num_blocks=num_blocks, return_logprobs=seed % 2 == 1)
    assert_all_right(requests, wanted)
    assert stats(model).rounds
    engine.close()
    assert_idle(model)


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


@pytest.mark.parametrize(
    "name, tree, block_size, num_sequences, seed",
    few(["llama", "gemma3_text"], ["full 2x2x2", "chain of 5", "63 nodes"], [1, 16], [None, 1.5], range(8, 11)),
)
def test_any_part_of_a_tree(name, tree, block_size, num_sequences, seed, monkeypatch):
    one, both = pair(name), asks_of(name, seed, 8)
    asks, wanted = zip(*both, strict=True)
    model = knowing(monkeypatch, one, tree_of(tree), wanted, block_size)
    longest = max(len(ask.tokens) + ask.options["max_new_tokens"] for ask in asks)
    num_blocks = None if num_sequences is None else int(num_sequences * -(-longest // block_size)) + 1
    rng = random.Random(seed)
    engine, requests = serve(model, asks, rng, cancel=0.03, num_blocks=num_blocks, max_tokens=512)
    assert_all_right(requests, wanted)
    assert num_blocks or stats(model).accepted  # a large tree may find no room
    engine.close()
    assert_idle(model)


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


@pytest.fixture
def forwards(monkeypatch):
    """By model: the tokens of each forward."""
    seen = {}
    original = RowForwards._forward

    def counting(self, kwargs):
        seen.setdefault(id(self._model), []).append(kwargs["input_ids"].numel())
        return original(self, kwargs)

    monkeypatch.setattr(RowForwards, "_forward", counting)
    return seen


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_right_drafts_save_forwards(goes_ahead, forwards, monkeypatch):
    """13 tokens: one after the prompts, then three rounds of four; the draft model does a step for each drafted one."""
    monkeypatch.setattr(row_drafts_module, "_MAX_CHUNK", 8)
    one = pair("llama")
    asks, wanted = both_ways(one, [ask_greedy(9, 13), ask_greedy(14, 13, seed=1)])
    draft = hf_turbo.DraftModel(one.stock, num_tokens=3, adaptive=False)
    model = hf_turbo.patch(one.model, speculation=draft)
    engine = Engine(model, EngineLimits())
    engine.close()  # both models have been tried
    forwards.clear()
    engine, requests = serve_all(model, asks, goes_ahead=goes_ahead)
    assert_all_right(requests, wanted)
    assert forwards[id(model)] == [9 + 14, 2 * 4, 2 * 4, 2 * 4]
    assert [n for n in forwards[id(one.stock)] if n > 4] == [8, 8, 5], "8 + 13 tokens before the last two, in chunks"
    assert forwards[id(one.stock)][-9:] == [4, 2, 2] * 3
    assert stats(model).drafted == stats(model).accepted == 2 * 9
    assert stats(model).plain_steps == 0


@pytest.mark.parametrize("kind", ["lookup, always 3", "same model", "truncated, always", "2x2x2"])
def test_drafts_are_those_of_generate(kind, folder, monkeypatch):
    """The same nodes are verified for the same rows, round by round; in which order rows are is the engine's."""
    always = hf_turbo.DraftModel(truncated("llama"), num_tokens=3, adaptive=False)
    one, seen = pair("llama"), []

    def record(cls, name):
        original = getattr(cls, name)

        def recording(self, tree, tokens, *args):
            if self._model is one.model:
                seen.append(sorted(tokens.clamp_min(0).tolist()))
            return original(self, tree, tokens, *args)

        monkeypatch.setattr(cls, name, recording)

    record(TreeSteps, "forward")
    record(RowForwards, "verify")
    speculation = DRAFTERS[kind](one, folder) if kind in DRAFTERS else always
    model = hf_turbo.patch(one.model, speculation=speculation)
    ids = prompt(3, 12)
    wanted = generate(model, ids, 40, return_dict_in_generate=False)[:, 12:].tolist()
    of_generate, seen[:] = seen[1:], []  # without the first look at whether it can be done
    before = stats(model)
    requests = serve_all(model, [Ask(row, max_new_tokens=40) for row in ids.tolist()])[1]
    assert_all_right(requests, [[text] for text in wanted])
    of_generate, seen = ([nodes for nodes in each if len(nodes[0]) > 1] for each in (of_generate, seen))
    count = min(len(seen), 8 if kind == "same model" else 20)  # near the end positions may differ
    assert seen[:count] == of_generate[:count] and count >= 8
    assert before.accepted


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_what_a_draft_model_knows_follows_the_texts(name):
    """Its drafts are those of one that reads all texts anew, whatever was accepted and whoever came, left or moved."""
    one, rng = pair(name), random.Random(1)
    model = hf_turbo.patch(one.model, speculation=hf_turbo.DraftModel(one.stock, num_tokens=3, adaptive=False))
    drafter, memory = handle_of(model).speculation.drafter, Engine(model, EngineLimits(num_blocks=1000))._memory
    rows, there, away = DraftModelRows(drafter, model, memory), [], []
    for _ in range(30):
        if not there or rng.random() < 0.25:
            ids = prompt(1, rng.randrange(2, 30), rng.randrange(99))[0].tolist()
            there.append(away.pop() if away and rng.random() < 0.5 else Request("", ids, None).sequences[0])
        if len(there) > 1 and rng.random() < 0.25:
            gone = there.pop()
            if rng.random() < 0.5:
                rows.forget(gone)
            else:
                away.append(gone)  # preempted
        rng.shuffle(there)
        size, fresh = rng.choice([1, 3]), DraftModelRows(drafter, model, memory)
        draft = rows.propose(size, there, Pace([1]))
        assert torch.equal(draft.tokens, fresh.propose(size, there, Pace([1])).tokens)
        fresh.close()
        counts = torch.tensor([rng.randint(0, size) for _ in there])
        rows.learn(Accepted(counts, counts, counts), size + 1)
        num_plain = rng.choice([0, 0, 1, 2, 5])
        for sequence, count, tokens in zip(there, counts.tolist(), draft.tokens.tolist()):
            sequence.tokens += tokens[1 : count + 1] + [rng.randrange(3, 128) for _ in range(1 + num_plain)]
    rows.close()
    assert not is_patched(one.stock)


def test_the_draft_model_is_itself_while_nothing_runs():
    one = pair("llama")
    asks, wanted = both_ways(one, [ask_greedy(9, 8), ask_greedy(5, 30)])
    model = hf_turbo.patch(one.model, speculation=hf_turbo.DraftModel(one.stock, num_tokens=3, adaptive=False))
    engine = Engine(model, EngineLimits())
    requests = [ask.request(model) for ask in asks]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        assert not is_patched(one.stock) or requests[1].status is Status.RUNNING
        engine.step()
        if requests[0].is_over and engine.has_work:
            assert is_patched(one.stock)
            blocks = -(-requests[1].sequences[0].length // hf_turbo.report(one.stock).block_size)
            assert used_blocks(one.stock) <= blocks + 1, "what has ended holds none"
    assert_all_right(requests, wanted)
    assert not is_patched(one.stock)
    with hf_turbo.patched(one.stock):
        assert used_blocks(one.stock) == 0


def test_a_draft_model_whose_config_has_changed_gives_its_memory_back():
    """It is patched anew then, with other blocks."""
    one, draft = pair("llama"), truncated("llama")
    [ask], wanted = both_ways(one, [ask_greedy(9, 8)])
    model = hf_turbo.patch(one.model, speculation=hf_turbo.DraftModel(draft, num_tokens=3, adaptive=False))
    engine, pools = Engine(model, EngineLimits()), []
    for seen in range(2):
        draft.config.seen = seen
        engine.add(request := ask.request(model))
        while engine.has_work:
            engine.step()
            if is_patched(draft):
                pools.append(handle_of(draft).pool)
        assert_all_right([request], wanted)
    engine.close()
    assert pools[0] is not pools[-1]
    assert not any(pools[-1].size.values()), "blocks are left"


def kv_bytes(model):
    return hf_turbo.report(model).kv_bytes


def pool_bytes(model):
    return hf_turbo.report(model).pool_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_draft_model_has_a_part_of_the_memory(name, monkeypatch):
    """Both caches together keep within it, also where texts share blocks in one of them only."""
    one, draft = pair(name), hf_turbo.patch(truncated(name), block_size=4)
    size = 4 * 2 * one.stock.config.num_key_value_heads * one.stock.config.head_dim * 4  # of a layer's block
    num_layers = one.stock.config.num_hidden_layers
    asks, wanted = both_ways(one, [ask_greedy(41, n) for n in (20, 20, 6, 6)])
    model = hf_turbo.patch(one.model, block_size=4, speculation=hf_turbo.DraftModel(draft, 3, adaptive=False))
    Engine(model, EngineLimits()).close()
    before = pool_bytes(model)
    assert pool_bytes(draft) == 0, "an engine gives back what it has taken"
    room = 34 * (num_layers + 1) * size  # the prompt is 10 blocks, a text up to 6 more: of two there is room for drafts
    left = lambda device: 2 * (room - pool_bytes(model) - pool_bytes(draft))  # noqa: E731
    monkeypatch.setattr(memory_module, "_free_memory", left)
    engine = Engine(model, EngineLimits(max_memory_percent=0.5))
    requests, most = [ask.request(model) for ask in asks], 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert kv_bytes(model) <= 34 * num_layers * size and kv_bytes(draft) <= 34 * size
        most = max(most, kv_bytes(draft))
    assert_all_right(requests, wanted)
    assert most and stats(model).rounds
    engine.close()
    assert (pool_bytes(model), pool_bytes(draft)) == (before, 0)


@pytest.mark.parametrize("num_blocks", [None, 10])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}])
def test_the_parts_of_both_hold_as_many_tokens(options, num_blocks, monkeypatch):
    """Blocks of other sizes, and codes, which long texts mostly are; so many blocks are so many of the model's own."""
    one, draft = pair("llama"), hf_turbo.patch(truncated("llama"), block_size=4)
    model = hf_turbo.patch(one.model, block_size=32, speculation=hf_turbo.DraftModel(draft, 3), **options)
    Engine(model, EngineLimits(num_blocks=1))  # has its first blocks
    monkeypatch.setattr(memory_module, "_free_memory", lambda device: 2**24)
    engine = Engine(model, EngineLimits(num_blocks=num_blocks, max_memory_percent=0.5))
    groups = [handle_of(m).pool.all_groups() for m in (model, draft)]
    there = sum(group.manager.num_blocks * group.block_bytes for group in [*groups[0], *groups[1]])
    capacities = engine._memory.capacity, engine._drafted._drafts._capacity
    tokens = [size / (of[-1].block_bytes / of[-1].block_size) for size, of in zip(capacities, groups)]
    assert tokens[0] == pytest.approx(tokens[1], rel=1e-3)
    if num_blocks is None:
        assert sum(capacities) == pytest.approx(there + 2**23, rel=1e-3)
    else:
        assert capacities[0] == 10 * sum(group.block_bytes for group in groups[0])
    engine.close()


@pytest.mark.parametrize("vocabulary", [100, 150])
def test_vocabularies_that_differ_by_padding(vocabulary):
    one = pair("llama")
    asks, wanted = both_ways(one, [ask_greedy(9, 13), Ask(range(9, 20), do_sample=True, temperature=3.0, seed=2)])
    draft = random_model("llama", vocab_size=vocabulary)
    model = hf_turbo.patch(one.model, speculation=hf_turbo.DraftModel(draft, num_tokens=3, adaptive=False))
    assert_all_right(serve_all(model, asks)[1], wanted)
    assert stats(model).rounds


@pytest.mark.parametrize("kind", ["lookup, always 3", "same model", "2x2x2"])
def test_positions_end_where_the_text_must(kind, folder):
    """The last positions that the models have are the texts' own."""
    one = pair("gpt2", n_positions=24, max_position_embeddings=24)
    asks, wanted = both_ways(one, [Ask([7, 8, 9] * 4, max_new_tokens=12), ask_greedy(14, 10)])
    if kind == "2x2x2":
        heads = heads_of(one.model, folder / "gpt2")
        speculation = hf_turbo.Medusa(heads, tree=TREES["full 2x2x2"], adaptive=False)
    else:
        speculation = DRAFTERS[kind](one, folder)
    model = hf_turbo.patch(one.model, speculation=speculation)
    assert_all_right(serve_all(model, asks)[1], wanted)
    assert stats(model).rounds
    assert not stepped_aside(model)


def test_a_step_is_no_larger_than_it_may_be(forwards):
    one = pair("llama")
    asks, wanted = both_ways(one, [ask_greedy(5, 14, seed) for seed in range(5)])
    draft = hf_turbo.DraftModel(one.stock, num_tokens=7)
    model = hf_turbo.patch(one.model, speculation=draft)
    assert_all_right(serve_all(model, asks, max_tokens=18, max_rows=8)[1], wanted)
    assert max(forwards[id(model)]) <= 18
    assert stats(model).rounds


class Odd(LogitsProcessor):
    """Unknown: may be called once a token and in order only."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores + (torch.arange(scores.shape[1]) == input_ids.shape[1])


@pytest.mark.parametrize("kind", ["lookup, always 3", "same model", "2x2x2"])
def test_requests_that_no_draft_suits(kind, folder):
    """While they run there are plain steps for all, then drafts."""
    one, odd = pair("llama"), Odd()
    late, several = ask_greedy(6, 30), Ask([3, 4, 5], max_new_tokens=5, do_sample=True, num_return_sequences=2, seed=1)
    alone = Ask([9, 8, 7], [Odd()], max_new_tokens=6).alone(one.stock)
    wanted = [late.alone(one.stock), several.alone(one.stock), alone]
    model = hf_turbo.patch(one.model, speculation=DRAFTERS[kind](one, folder))
    engine = Engine(model, EngineLimits())
    requests = [ask.request(model) for ask in (late, several, Ask([9, 8, 7], [odd], max_new_tokens=6))]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        if not requests[2].is_over:
            assert stats(model).rounds == 0
    assert_all_right(requests, wanted)
    assert odd.lengths == list(range(3, 9))
    assert stats(model).rounds or "lookup" in kind
    assert not stepped_aside(model)


def test_what_goes_wrong_after_a_draft_ends_one_request(monkeypatch):
    """A token whose probabilities are no numbers, a processor that raises: the tokens before them have been said."""
    one = pair("llama")
    drawn = dict(do_sample=True, temperature=1.1, seed=3, max_new_tokens=12)
    fine, spoilt = Ask(range(20, 29), **drawn), Ask(range(30, 39), **drawn)
    raising = Ask(range(40, 49), repetition_penalty=1.3, max_new_tokens=12)
    wanted = [ask.alone(one.stock) for ask in (fine, spoilt, raising)]
    said = wanted[1][0]
    place = next(i for i in range(3, 12) if said.index(said[i]) == i)  # its first time
    spoilt.options["sequence_bias"] = [[[said[place], 50], float("inf")]]
    original = RepetitionPenaltyLogitsProcessor.__call__

    def call(self, input_ids, scores):
        if input_ids.shape[1] == 9 + 6:
            raise ArithmeticError("no")
        return original(self, input_ids, scores)

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", call)
    model = knowing(monkeypatch, one, tree_of("chain of 5"), wanted)
    monkeypatch.setattr(KnowingRows, "propose", all_right)
    requests = serve_all(model, [fine, spoilt, raising])[1]
    assert [request.status for request in requests] == [Status.FINISHED, Status.FAILED, Status.FAILED]
    assert requests[0].sequences[0].new_tokens == wanted[0][0]
    assert "nan" in str(requests[1].error) and isinstance(requests[2].error, ArithmeticError)
    assert requests[1].sequences[0].new_tokens == said[: place + 1]
    assert requests[2].sequences[0].new_tokens == wanted[2][0][:6]
    assert_idle(model)


def all_right(self, size, sequences, pace):
    """All of what comes, in a chain."""
    coming = [self.texts[s.request.id][len(s.new_tokens) :][: self.tree.max_depth] for s in sequences]
    filled = [tokens + [-1] * (self.tree.max_depth - len(tokens)) for tokens in coming]
    drafts = [[s.tokens[-1], *tokens] for s, tokens in zip(sequences, filled)]
    return Draft(self.tree, torch.tensor(drafts), sum(map(len, coming)))


def test_log_probabilities_are_those_of_plain_steps(monkeypatch):
    one = pair("llama")
    asks, wanted = both_ways(one, [ask_greedy(5, 30), Ask(range(9, 20), do_sample=True, temperature=1.4, seed=2)])
    _, plain = serve_all(hf_turbo.patch(one.model, block_size=4), asks, return_logprobs=True)
    model = knowing(monkeypatch, one, tree_of("full 2x2x2"), wanted)
    _, drafted = serve_all(model, asks, return_logprobs=True)
    assert_all_right(drafted, wanted)
    assert stats(model).accepted
    for mine, theirs in zip(drafted, plain, strict=True):
        have, want = (torch.tensor(x.sequences[0].logprobs) for x in (mine, theirs))
        assert len(have) == len(mine.sequences[0].new_tokens)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("samples", [False, True])
def test_the_report_shows_drafts_while_the_engine_lives(samples):
    one = pair("llama")
    sampling = dict(do_sample=True, seed=1, temperature=1.3) if samples else {}
    asks = [Ask(range(9, 20), max_new_tokens=13, **sampling)]
    model = hf_turbo.patch(one.model, speculation=hf_turbo.DraftModel(one.stock, num_tokens=3, adaptive=False))
    engine, _ = serve_all(model, asks)
    [alive] = hf_turbo.report(model).drafts.values()
    assert 12 <= alive.tokens == alive.accepted + alive.rounds <= 12 + 3
    assert alive.drafted == 3 * alive.rounds and alive.plain_steps == 0
    engine.close()
    [closed] = hf_turbo.report(model).drafts.values()
    assert closed == alive


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_drafts_that_do_not_pay_are_switched_off_and_tried_again(goes_ahead):
    """By nominal durations, as tokens are drawn: every step counts, those with the host ahead, too."""
    one = pair("llama")
    asks, wanted = both_ways(one, [Ask(range(9, 20), max_new_tokens=90, do_sample=True, seed=1, temperature=1.3)])
    model = hf_turbo.patch(one.model, speculation=hf_turbo.DraftModel(random_model("llama"), num_tokens=3))
    _, requests = serve_all(model, asks, goes_ahead=goes_ahead)
    assert_all_right(requests, wanted)
    seen = stats(model)
    assert 89 <= seen.rounds + seen.plain_steps + seen.accepted <= 89 + 3
    assert seen.plain_steps > 60 and seen.rounds >= 6


def test_a_drafter_of_one_call_steps_aside():
    one = pair("llama")
    asks, wanted = both_ways(one, [ask_greedy(9, 6), ask_greedy(3, 9)])
    model = hf_turbo.patch(one.model, speculation=Knowing(torch.zeros(1, 1), tree_of("chain of 5")))
    assert_all_right(serve_all(model, asks)[1], wanted)
    [(reason, count)] = stepped_aside(model).items()
    assert "Knowing" in reason and count == 1


def test_a_draft_model_that_can_not_share_forwards_steps_aside(monkeypatch):
    one = pair("llama")
    asks, wanted = both_ways(one, [ask_greedy(9, 6), ask_greedy(3, 9)])
    draft = truncated("llama")
    monkeypatch.setattr(row_drafts_module, "RowForwards", refuse)
    model = hf_turbo.patch(one.model, speculation=hf_turbo.DraftModel(draft, num_tokens=3))
    assert_all_right(serve_all(model, asks)[1], wanted)
    [(reason, _)] = stepped_aside(model).items()
    assert "not with this one" in reason
    assert not is_patched(draft) and stats(model).rounds == 0


def refuse(model):
    raise PackedUnsuited("not with this one")


@pytest.mark.parametrize(
    "name, kind", few(["llama", "gemma3_text"], ["lookup, always 3", "truncated", "2x2x2", "knowing"], together=1)
)
def test_a_quantized_cache(name, kind, folder, monkeypatch):
    """Text equals that of the engine without drafts."""
    one = pair(name)
    drawn = Ask(prompt(1, 90)[0].tolist(), max_new_tokens=40, do_sample=True, seed=3)
    asks = [ask_greedy(110, 30), drawn, ask_greedy(130, 9), ask_greedy(3, 30)]
    model = hf_turbo.patch(one.model, block_size=32, kv_cache_dtype="int8")
    _, plain = serve_all(model, asks, max_tokens=64)
    wanted = [[request.sequences[0].new_tokens] for request in plain]
    if kind == "knowing":
        model = knowing(monkeypatch, one, tree_of("full 2x2x2"), wanted, 32, kv_cache_dtype="int8")
    else:
        speculation = DRAFTERS[kind](one, folder)
        model = hf_turbo.patch(one.model, block_size=32, kv_cache_dtype="int8", speculation=speculation)
    _, requests = serve_all(model, asks, max_tokens=64)
    assert_all_right(requests, wanted)
    assert stats(model).rounds
    assert_idle(model)


@pytest.mark.parametrize(
    "name, kind, goes_ahead",
    few(["llama", "gemma3_text"], ["lookup, always 3", "same model", "2x2x2", "knowing"], [False, True]),
)
def test_captured_rounds(name, kind, goes_ahead, folder, monkeypatch):
    """Rounds, steps and short chunks by way of captured graphs."""
    one, both = pair(name), asks_of(name, 3, 8)
    asks, wanted = zip(*both, strict=True)
    if kind == "knowing":
        model = knowing(monkeypatch, one, tree_of("full 2x2x2"), wanted)
    else:
        model = hf_turbo.patch(one.model, block_size=4, speculation=DRAFTERS[kind](one, folder))
    steps = CapturedSteps(model)
    monkeypatch.setattr(handle_of(model).steps, "run", steps.run)
    monkeypatch.setattr(
        RowForwards, "captures", property(lambda self: self._model is model, lambda self, x: None), False
    )
    engine, requests = serve(model, asks, random.Random(1), max_tokens=100, goes_ahead=goes_ahead)
    assert_all_right(requests, wanted)
    assert stats(model).rounds and steps.num_replayed
    engine.close()
    assert_idle(model)
