"""Requests together with drafts: each has the text of its own plain `generate()`, whatever is drafted for others."""

from __future__ import annotations

import random

import pytest
import torch
from asks import (
    DRAFTERS,
    Ask,
    KnowingRows,
    ask_greedy,
    asks_of,
    assert_all_right,
    assert_idle,
    both_ways,
    knowing,
    serve,
    serve_all,
)
from combinations import few
from drafting import TREES, Knowing, heads_of, pair, random_model, stats, tree_of, truncated
from helpers import generate, poison_what_is_freed, prompt, stepped_aside
from steps import CapturedSteps
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

import hf_turbo
from hf_turbo.engine import row_drafts as row_drafts_module
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.forwards import RowForwards
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.engine.request import Status
from hf_turbo.generation.drafts import Draft
from hf_turbo.generation.tree_steps import TreeSteps
from hf_turbo.patching import handle_of


@pytest.fixture(autouse=True)
def no_grad_and_poison(monkeypatch):
    """No gradients; every block that nobody holds says NaN, codes 0xFF."""
    poison_what_is_freed(monkeypatch)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


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
