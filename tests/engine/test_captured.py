"""The engine's steps as a GPU captures them, on a CPU: computed through the deferred mode, but not recorded."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from combinations import few
from helpers import fill_free_blocks, poison_what_is_freed, prompt, twins
from kv_policy import follow_policy, text_by_steps
from mixes import Ask, check, check_idle, random_asks, run
from steps import serve_without_gpu
from tiny_models import build

import hf_turbo
from hf_turbo.engine import forwards
from hf_turbo.engine.choice import Chooser
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.modeling import step_graph
from hf_turbo.modeling.head_input import HeadInput, make_watchable
from hf_turbo.patching import handle_of

B = 32


@dataclass
class Counts:
    """Choices whose tokens captured steps had said, and the others."""

    said: int = 0
    chosen: int = 0


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    """Models on a CPU are served as on a GPU; what was freed is no number."""
    serve_without_gpu(monkeypatch)
    monkeypatch.setattr(forwards, "uses_triton", lambda device: True)
    poison_what_is_freed(monkeypatch)
    counts, choose = Counts(), Chooser.choose

    def counted(self, logits, takers):
        counts.said += logits.dim() == 1
        counts.chosen += logits.dim() > 1
        return choose(self, logits, takers)

    monkeypatch.setattr(Chooser, "choose", counted)
    return counts


def limits(**options) -> EngineLimits:
    return EngineLimits(**{"max_tokens": 64, "max_rows": 8, **options})


def greedy(*lengths: int, new: int = 12, every: int = 3) -> list[Ask]:
    """Requests of prompts of such lengths, one in so many steps."""
    options = {"max_new_tokens": new, "do_sample": False}
    return [Ask(prompt(1, n, seed=n)[0].tolist(), dict(options), i * every) for i, n in enumerate(lengths)]


def packed_graphs(model) -> int:
    return sum(graph.is_packed for graph in handle_of(model).steps._graphs.values())


# Tokens that captured steps say


@pytest.mark.parametrize("name, goes_ahead", few(("llama", "mistral", "gemma2", "gpt2"), (False, True)))
def test_the_likeliest_tokens(counts, name, goes_ahead):
    """Of all steps but those that are just being captured: prompts beside texts, rows that come and rows that go."""
    stock, model = twins(name, 4)
    asks = greedy(9, 20, 3, 17, 1, 30, 12, 5)
    engine = Engine(model, limits(max_chunk=7, goes_ahead=goes_ahead))
    fill_free_blocks(model, float("nan"))
    check(stock, asks, run(engine, model, asks))
    steps = handle_of(model).steps
    assert packed_graphs(model) and counts.said > 15
    assert counts.chosen <= steps.num_captured + 1  # and the first prompt, the model's own way
    check_idle(engine, model)


@pytest.mark.parametrize("seed", range(4))
def test_random_mixes(counts, seed):
    """Beside requests that need logits nobody's tokens come from captured steps."""
    values = random.Random(seed)
    stock, model = twins("llama", 4)
    asks = random_asks(stock, values)
    engine = Engine(model, limits(goes_ahead=values.random() < 0.5, max_chunk=values.choice([None, 5])))
    fill_free_blocks(model, float("nan"))
    check(stock, asks, run(engine, model, asks))
    assert counts.chosen and handle_of(model).steps.num_replayed
    check_idle(engine, model)


def test_one_that_samples_beside_others(counts):
    """While it is there logits are needed, and not afterwards."""
    stock, model = twins("llama", 4)
    asks = greedy(9, 14, new=30, every=0)
    asks.insert(1, Ask(asks[0].prompt, {"max_new_tokens": 9, "do_sample": True, "seed": 3}, 6))
    engine, seen = Engine(model, limits()), []

    def note():
        seen.append((bool(engine._need_logits), counts.said, counts.chosen))

    check(stock, asks, run(engine, model, asks, note))
    during = [(said, chosen) for needs, said, chosen in seen if needs]
    assert during[0][0] == during[-1][0] > 0 and during[-1][1] - during[0][1] >= 7
    assert counts.said - during[-1][0] > 10
    check_idle(engine, model)


def test_log_probabilities_need_logits(counts):
    _, model = twins("llama", 4)
    engine = Engine(model, limits(return_logprobs=True))
    requests = run(engine, model, greedy(9, 14))
    assert counts.said == 0 and all(len(request.sequences[0].logprobs) == 12 for request in requests)
    check_idle(engine, model)


def test_no_memory_for_what_follows(counts, monkeypatch):
    """It is tried once; logits are taken from then on."""
    stock, model = twins("llama", 4)
    tried = []

    def fails(function, *where):
        tried.append(function)
        raise torch.OutOfMemoryError("all is taken")

    monkeypatch.setattr(step_graph, "record", fails)
    asks = greedy(9, 14, 5)
    engine = Engine(model, limits(max_chunk=7))
    check(stock, asks, run(engine, model, asks))
    assert len(tried) == 1 and counts.said == 0
    assert any("too little memory" in reason for reason in handle_of(model).stepped_aside)
    check_idle(engine, model)


def test_a_model_that_changes_meanwhile(counts, monkeypatch):
    """A step by graphs of what the model was is computed again, and then by new ones."""
    monkeypatch.setattr(forwards, "_LOOK_EVERY", 1)
    stock, model = twins("llama", 4)
    asks = greedy(9, 14, new=24, every=0)
    engine, steps = Engine(model, limits(goes_ahead=False)), handle_of(model).steps
    told = [0]

    def change():
        told[0] += 1
        if told[0] == 12:
            assert counts.said > 4
            for one in (stock, model):  # what a capture has read: no weight, so no address says it
                one.model.norm.variance_epsilon = 0.5

    requests = run(engine, model, asks, change)
    assert steps.num_dropped
    for ask, request in zip(asks, requests, strict=True):
        said = request.sequences[0].new_tokens
        alone = Ask(ask.prompt + said[:12], {"max_new_tokens": 12, "do_sample": False}).alone(stock)[0]
        assert said[12:] == alone
    check_idle(engine, model)


def test_what_reads_hidden_states_goes_the_other_way(counts):
    """Where heads are to guess from what the model's head is given, every step leaves that."""
    stock, model = twins("llama", 4)
    make_watchable(model)
    engine = Engine(model, limits(max_chunk=7))
    watch = engine._forwards.watch = engine._forwards.cache.head_input = HeadInput()
    seen = []
    asks = greedy(9, 14, new=20)
    check(stock, asks, run(engine, model, asks, lambda: seen.append(watch.value)))
    assert counts.said == 0 and handle_of(model).steps.num_replayed > 10
    assert all(x is not None and x.shape[-1] == model.config.hidden_size for x in seen)
    check_idle(engine, model)


# Quantized caches


@pytest.mark.parametrize("kind, name, goes_ahead", few(("int8", "fp8", "int4"), ("llama", "mistral"), (False, True)))
def test_quantized_blocks(counts, kind, name, goes_ahead):
    """Text does not depend on what is computed beside it, nor on chunks: prompts beside texts are captured, too."""
    wide = {"sliding_window": 100} if name == "mistral" else {}
    model = hf_turbo.patch(build(name, max_position_embeddings=1024, **wide), block_size=B, kv_cache_dtype=kind)
    asks = greedy(180, 20, 90, new=24, every=1)
    engine = Engine(model, limits(goes_ahead=goes_ahead))
    alone = [[sequence.new_tokens for sequence in run(engine, model, [ask])[0].sequences] for ask in asks]
    fill_free_blocks(model, float("nan"))
    together = [[s.new_tokens for s in request.sequences] for request in run(engine, model, asks)]
    assert together == alone
    assert packed_graphs(model) and counts.said > 50
    check_idle(engine, model)


@pytest.mark.parametrize("kind, name", few(("int8", "fp8"), ("llama", "mistral")))
def test_quantized_blocks_say_what_the_policy_says(counts, kind, name):
    """As if every token had been computed alone, from a cache whose older blocks are codes."""
    wide = {"sliding_window": 100} if name == "mistral" else {}
    policy, model = (build(name, max_position_embeddings=1024, **wide) for _ in range(2))
    model.load_state_dict(policy.state_dict())
    hf_turbo.patch(model, block_size=B, kv_cache_dtype=kind)
    asks = greedy(140, 20, new=20)
    engine = Engine(model, limits(max_chunk=48))
    said = [request.sequences[0].new_tokens for request in run(engine, model, asks)]
    assert packed_graphs(model) and counts.said > 15
    follow_policy(policy, kind, B).config.kv_policy.kinds.update(hf_turbo.report(model).protected_layers)
    for ask, tokens in zip(asks, said, strict=True):
        assert text_by_steps(policy, ask.prompt, len(tokens)) == tokens
    assert policy.config.kv_policy.queries_with_codes > 100
    check_idle(engine, model)


def test_a_prompt_that_tells_the_formats_goes_the_models_own_way(counts, monkeypatch):
    """It does where the cache has no tokens, also when it had some; beside others' tokens no prompt tells anything."""
    ways = []
    packed = forwards.RowForwards.packed

    def seen(self, tokens, *rest):
        ways.append(self._captures(len(tokens)))
        return packed(self, tokens, *rest)

    monkeypatch.setattr(forwards.RowForwards, "packed", seen)
    model = hf_turbo.patch(build("llama", max_position_embeddings=1024), block_size=B, kv_cache_dtype="int4")
    engine, pool = Engine(model, limits(max_tokens=256)), handle_of(model).pool
    short, long = greedy(40, new=10), greedy(40, 150, new=10)
    run(engine, model, short)  # too short to tell
    run(engine, model, long)  # one that could comes when there are tokens
    assert ways[-1] and not any(pool.is_settled(i) for i in range(len(engine._forwards.cache.layers)))
    ways.clear()
    run(engine, model, greedy(151, new=3))
    assert ways == [False] and all(pool.is_settled(i) for i in range(len(engine._forwards.cache.layers)))
    run(engine, model, greedy(130, new=3))
    assert ways == [False, True]
    check_idle(engine, model)


# The first forwards


def test_what_is_not_known_of_a_model_yet_is_seen_in_its_own_way(counts, monkeypatch):
    """Whether rows can share its forwards, also where `generate()` was there before. What comes next is captured."""
    stock, model = twins("llama", 4)
    model.generate(prompt(1, 9), max_new_tokens=3)
    ways = []
    captures = forwards.RowForwards._captures

    def seen(self, num_tokens):
        ways.append(captures(self, num_tokens))
        return ways[-1]

    monkeypatch.setattr(forwards.RowForwards, "_captures", seen)
    engine = Engine(model, limits())
    assert ways == [False]
    for length in (20, 21):  # each with nothing before it in the cache
        check(stock, greedy(length, new=2), run(engine, model, greedy(length, new=2)))
    assert ways == [False, True, True] and (counts.chosen, counts.said) == (2, 2)
    check_idle(engine, model)
