"""Draft models of an engine: what they know of the texts, their memory, and what they are while nothing runs."""

from __future__ import annotations

import random

import pytest
import torch
from asks import Ask, ask_greedy, assert_all_right, both_ways, serve_all
from drafting import pair, random_model, stats, truncated
from helpers import poison_what_is_freed, prompt, stepped_aside, used_blocks

import hf_turbo
from hf_turbo.cache.forward_plan import PackedUnsuited
from hf_turbo.engine import memory as memory_module
from hf_turbo.engine import row_drafts as row_drafts_module
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.engine.request import Request, Status
from hf_turbo.engine.row_drafts import DraftModelRows
from hf_turbo.generation.acceptance import Accepted
from hf_turbo.generation.pace import Pace
from hf_turbo.patching import handle_of, is_patched


@pytest.fixture(autouse=True)
def no_grad_and_poison(monkeypatch):
    """No gradients; every block that nobody holds says NaN, codes 0xFF."""
    poison_what_is_freed(monkeypatch)
    with torch.no_grad():
        yield


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
