"""What the engine keeps of texts for others that begin alike: the same text, sooner and in less memory."""

from __future__ import annotations

import random

import pytest
import torch
from combinations import few
from helpers import fill_free_blocks, groups, prompt, twins, used_blocks
from mixes import Ask, check, check_idle, random_asks, run
from peft import LoraConfig, get_peft_model

import hf_turbo
from hf_turbo.cache.block_group import GROWTH
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.modeling import model_version
from hf_turbo.patching import handle_of


def engine_of(model, **options) -> Engine:
    return Engine(model, EngineLimits(**{"max_tokens": 32, "max_rows": 8, **options}))


def greedy(tokens, new=8, **options) -> Ask:
    return Ask(list(tokens), {"max_new_tokens": new, "do_sample": False}, **options)


def words(count, seed=0) -> list[int]:
    return prompt(1, count, seed=seed)[0].tolist()


def held_bytes(model) -> int:
    """Of blocks that are used or kept."""
    all_groups = handle_of(model).pool.all_groups()
    return sum((group.manager.num_used + group.manager.num_cached) * group.block_bytes for group in all_groups)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 12 else pytest.mark.slow) for n in range(100)])
def test_random_mixes(seed):
    """Pools from one and a half texts up; what is kept and used together stays within what the engine may have."""
    values = random.Random(1000 + seed)
    block_size = values.choice([1, 4, 16])
    stock, model = twins(["llama", "mistral", "gemma2"][seed % 3], block_size)
    asks = random_asks(stock, values, shared=33)
    longest = max(3 * (len(ask.prompt) + ask.options["max_new_tokens"]) for ask in asks)
    num_blocks = values.choice([None, -(-longest // block_size) + 4])
    engine = engine_of(model, num_blocks=num_blocks, goes_ahead=values.random() < 0.5)
    fill_free_blocks(model, float("nan"))

    def look():
        memory = engine._memory
        if num_blocks is not None:
            assert held_bytes(model) <= memory.capacity
        assert memory.costs(memory.rows) == [memory.cost(sequence, 1) for sequence in memory.rows]

    for _ in range(2):
        check(stock, asks, run(engine, model, asks, look))
    assert engine.metrics.hit_tokens > 0
    check_idle(engine, model)
    assert held_bytes(model) == 0, "what the engine had kept was not given up with it"


@pytest.mark.parametrize("name, block_size", few(("llama", "mistral", "gemma2"), (1, 4, 16)))
def test_a_second_turn_computes_what_is_new(name, block_size):
    stock, model = twins(name, block_size)
    engine = engine_of(model)
    [first] = run(engine, model, [greedy(words(40))])
    turn = first.sequences[0].tokens + words(5, seed=1)
    [second] = run(engine, model, [greedy(turn)])
    check(stock, [greedy(turn)], [second])
    assert second.num_found == (len(first.sequences[0].tokens) - 1) // block_size * block_size
    [again] = run(engine, model, [greedy(turn)])
    assert again.num_found == (len(turn) - 1) // block_size * block_size, "one token is computed at least"
    check(stock, [greedy(turn)], [again])
    check_idle(engine, model)


@pytest.mark.parametrize("max_tokens", [16, 64, 400])
def test_requests_that_come_together_share(max_tokens):
    """Of those that are there at once the first computes what all begin with; memory is one copy and the tails."""
    stock, model = twins("llama", 4)
    system = words(40)
    asks = [greedy(system + words(3, seed=i), 6) for i in range(8)]
    engine = engine_of(model, max_tokens=max_tokens)
    most = []
    requests = run(engine, model, asks, lambda: most.append(used_blocks(model)))
    check(stock, asks, requests)
    assert [request.num_found for request in requests] == [0] + [40] * 7
    assert max(most) <= 10 + 8 * 3
    off = engine_of(model, max_tokens=64, prefix_cache=False)
    requests = run(off, model, asks, lambda: most.append(used_blocks(model)))
    assert not any(request.num_found for request in requests) and max(most) > 80
    check_idle(engine, model)


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8", "block_size": 32}])
def test_memory_goes_back_with_the_engine(options):
    """What the pool had before stays, with what is captured of it; all that was taken since is given back."""
    _, model = twins("llama", 4, max_position_embeddings=1024)
    hf_turbo.patch(model, **{"block_size": 4, **options})
    greedy(words(100)).alone(model)
    pool = handle_of(model).pool
    before = pool.size
    engine = engine_of(model, max_tokens=200)
    assert {group.growth for group in pool.all_groups()} == {0.5}
    run(engine, model, [greedy(words(150, seed=i), 20) for i in range(8)])
    assert any(len(pool.size[group]) > len(sizes) for group, sizes in before.items())
    engine.close()
    assert pool.size == before
    assert {group.growth for group in pool.all_groups()} == {GROWTH}
    assert greedy(words(100)).alone(model)


def test_b01_what_changes_keys_is_part_of_the_key():
    """CASES B01: other weights, another salt: nothing is found; nor where nothing may be kept."""
    stock, model = twins("llama", 4)
    engine = engine_of(model)
    ask = greedy(words(30))

    def found(salt=""):
        request = ask.request(model, "0")
        request.salt = salt
        with torch.no_grad():
            engine.add(request)
            while engine.has_work:
                engine.step()
        check(stock, [ask], [request])
        return request.num_found

    assert [found(), found(), found("tenant"), found("tenant"), found("other"), found()] == [0, 28, 0, 28, 0, 28]
    with torch.no_grad():
        for one in (stock, model):
            one.model.layers[0].mlp.down_proj.weight[3] *= 2
    assert [found(), found()] == [0, 28]
    check_idle(engine, model)


def test_b01_a_running_engine_looks_without_a_wait(monkeypatch):
    """Weights written to unseen, while texts go on: found a second and two steps later, though nothing had to wait."""
    stock, model = twins("llama", 4)
    engine = engine_of(model)
    now, read, come = [0.0], model_version._Elements.read, [True]
    monkeypatch.setattr("hf_turbo.engine.memory.time.monotonic", lambda: now[0])
    monkeypatch.setattr(model_version._Elements, "are_there", property(lambda elements: come[0]))

    def found():
        request = greedy(words(30), 2).request(model, "new")
        engine.add(request)
        while not request.is_over:
            engine.step()
        return request

    with torch.no_grad():
        engine.add(greedy(words(5, seed=1), 200).request(model, "long"))
        assert [found().num_found, found().num_found] == [0, 28]
        for one in (stock, model):
            one.model.layers[0].mlp.down_proj.weight.data[:, :] *= 2
        assert found().num_found == 28, "nobody has looked"
        come[0] = False
        monkeypatch.setattr(model_version._Elements, "read", None)
        now[0] += 1.0
        engine.step()
        assert found().num_found == 28, "nothing has come"
        come[0] = True
        monkeypatch.setattr(model_version._Elements, "read", read)
        engine.step()
        request = found()
        assert request.num_found == 0 and found().num_found == 28
        check(stock, [greedy(words(30), 2)], [request])
        engine.cancel(engine.scheduler.running[0])
    check_idle(engine, model)


def test_a_constant_hash_changes_nothing_but_speed(monkeypatch):
    stock, model = twins("llama", 4)
    monkeypatch.setattr(handle_of(model).pool.index, "_hash", lambda parent, content: 0)
    asks = random_asks(stock, random.Random(3), shared=20)
    engine = engine_of(model)
    for _ in range(2):
        check(stock, asks, run(engine, model, asks))
    assert engine.metrics.hit_tokens > 0
    check_idle(engine, model)


def test_who_gave_way_finds_what_it_had():
    """A request that was preempted computes what others have taken since, and no more."""
    stock, model = twins("llama", 4)
    asks = [greedy(words(30, seed=i), 40, arrives=i) for i in range(3)]
    engine = engine_of(model, num_blocks=36)
    found: list[int] = []
    find = engine._memory.find

    def noted(request):
        tokens = find(request)
        found.append(tokens if request.num_preempted else 0)
        return tokens

    engine._memory.find = noted
    requests = run(engine, model, asks)
    check(stock, asks, requests)
    assert sum(request.num_preempted for request in requests) > 0
    assert max(found) > 0
    check_idle(engine, model)


def test_generate_shares_with_an_engine():
    """With `prefix_cache` on the model, both find what the other has computed; without, `generate()` finds nothing."""
    for option in (False, True):
        stock, model = twins("llama", 4)
        if option:
            hf_turbo.patch(model, block_size=4, prefix_cache=2**20)
        engine = engine_of(model)
        ask = greedy(words(30))
        index = handle_of(model).pool.index
        run(engine, model, [ask])
        before = index.tokens_found
        assert ask.alone(model) == ask.alone(stock)
        assert index.tokens_found - before == (28 if option else 0)
        other = greedy(words(30, seed=1))
        assert other.alone(model) == other.alone(stock)
        [request] = run(engine, model, [other])
        assert request.num_found == (28 if option else 0)
        check(stock, [other], [request])
        check_idle(engine, model)
        kept = sum(group.manager.num_cached for group in groups(model).values())
        assert bool(kept) == option, "what the model keeps by itself outlives the engine"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_blocks(kind):
    """A second turn is that of an engine that never forgot the first."""
    _, model = twins("llama", 32, max_position_embeddings=1024)
    hf_turbo.patch(model, block_size=32, kv_cache_dtype=kind)
    run(engine_of(model, max_tokens=64), model, [greedy(words(70))])  # settles the layers' formats
    kept, plain = engine_of(model, max_tokens=64), engine_of(model, max_tokens=64, prefix_cache=False)
    [first] = run(kept, model, [greedy(words(150), 30)])
    turn = first.sequences[0].tokens + words(20, seed=1)
    [second] = run(kept, model, [greedy(turn, 30)])
    assert second.num_found >= 128
    [alone] = run(plain, model, [greedy(turn, 30)])
    assert second.sequences[0].new_tokens == alone.sequences[0].new_tokens
    check_idle(kept, model)
    check_idle(plain, model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_b01_adapters():
    """CASES B01: texts under one adapter find nothing of those under another, or under none."""
    stock, model = twins("llama", 4)
    ask, expected, found = greedy(words(30)), [], []
    config = LoraConfig(target_modules=["k_proj", "v_proj"], r=4, init_lora_weights=False)
    wrapped = []
    for one in (stock, model):
        torch.manual_seed(3)
        both = get_peft_model(one, config, adapter_name="first")
        both.add_adapter("second", config)
        wrapped.append(both.eval())
    engine = engine_of(model)
    for name in ("first", "second", None):
        for both in wrapped:
            if name is None:
                both.base_model.disable_adapter_layers()
            else:
                both.set_adapter(name)
        for _ in range(2):
            [request] = run(engine, model, [ask])
            check(stock, [ask], [request])
            found.append(request.num_found)
        expected.append(request.sequences[0].new_tokens)
    assert expected[0] != expected[1] != expected[2] != expected[0]
    assert found == [0, 28] * 3
    check_idle(engine, model)
