"""The engine: each of many requests gets what it gets from `generate()` alone, whatever else is computed with it."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from combinations import few
from helpers import fill_free_blocks, prompt, twins, used_blocks
from kv_policy import follow_policy, text_by_steps
from mixes import Ask, check, check_idle, random_asks, run
from steps import CapturedSteps
from tiny_models import ACCELERATED, ZOO, build, in_this_transformers
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_turbo
from hf_turbo.cache.forward_plan import PackedUnsuited
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.engine.options import RequestOptions
from hf_turbo.engine.request import Request, Status
from hf_turbo.patching import handle_of

MODELS = ("llama", "mistral", "gemma2", "gpt2")


def limits(**options) -> EngineLimits:
    return EngineLimits(**{"max_tokens": 24, "max_rows": 8, **options})


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 24 else pytest.mark.slow) for n in range(200)])
def test_b05_random_mixes(seed):
    """CASES B03, B04, B05: lengths, parameters, arrivals, cancels and pools at random; the pool adds up throughout."""
    values = random.Random(seed)
    block_size = values.choice([1, 16])
    stock, model = twins(MODELS[seed % len(MODELS)], block_size)
    asks = random_asks(stock, values)
    most = blocks_for(max(3 * (len(ask.prompt) + ask.options["max_new_tokens"]) for ask in asks), block_size) + 8
    engine = Engine(
        model,
        limits(
            goes_ahead=values.random() < 0.5,
            num_blocks=values.choice([None, most, 2 * most]),
            max_chunk=values.choice([None, 5]),
            max_tokens=values.choice([8, 24, 200]),
        ),
    )
    fill_free_blocks(model, float("nan"))
    check(stock, asks, run(engine, model, asks))
    check_idle(engine, model)


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize("block_size", [1, 16])
def test_b04_a_pool_of_one_and_a_half(block_size, goes_ahead):
    """CASES B04: six texts in room for one and a half of them: all are done, those preempted say the same again."""
    stock, model = twins("llama", block_size)
    asks = [Ask(prompt(1, 33, seed=i)[0].tolist(), {"max_new_tokens": 31, "do_sample": False}) for i in range(6)]
    asks += [Ask(asks[0].prompt, {"max_new_tokens": 9, "do_sample": True, "seed": 3, "num_return_sequences": 2})]
    room = blocks_for(96, block_size) + 1
    engine = Engine(model, limits(num_blocks=room, goes_ahead=goes_ahead))

    def no_more_is_taken():
        assert used_blocks(model) <= room

    requests = run(engine, model, asks, no_more_is_taken)
    check(stock, asks, requests)
    assert sum(request.num_preempted for request in requests) > 0
    assert max(request.num_preempted for request in requests) <= len(asks)
    check_idle(engine, model)


def test_b04_one_that_never_fits_fails_alone():
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(num_blocks=4))
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 8, "do_sample": False}) for n in (20, 90, 30)]
    small, large, other = (ask.request(model, str(i)) for i, ask in enumerate(asks))
    for request in (small, large, other):
        engine.add(request)
    assert large.status is Status.FAILED and isinstance(large.error, ValueError) and "never fits" in str(large.error)
    with torch.no_grad():
        while engine.has_work:
            engine.step()
    check(stock, [asks[0], asks[2]], [small, other])
    check_idle(engine, model)


class Raises(LogitsProcessor):
    """Takes two tokens, then no more."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls > 2:
            raise ZeroDivisionError("that was one too many")
        return scores


class MakesNoNumbers(Raises):
    """The same, of probabilities."""

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores * torch.nan if self.calls > 2 else scores


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize("processor, told", [(Raises, "one too many"), (MakesNoNumbers, "probability tensor contains")])
def test_one_that_raises_fails_alone(processor, told, goes_ahead):
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(goes_ahead=goes_ahead))
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 8, "do_sample": False}) for n in (5, 9, 12)]
    asks[1].options |= {"do_sample": processor is MakesNoNumbers, "seed": 1}
    requests = [ask.request(model, str(i)) for i, ask in enumerate(asks)]
    requests[1].options.processors = LogitsProcessorList([processor()])
    with torch.no_grad():
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
    bad = requests.pop(1)
    assert bad.status is Status.FAILED and told in str(bad.error)
    assert bad.sequences[0].new_tokens == asks.pop(1).alone(stock)[0][:2]
    check(stock, asks, requests)
    check_idle(engine, model)


class AtNine(StoppingCriteria):
    """Ends a text at nine tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_criteria_of_the_callers_own_see_every_token(goes_ahead):
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(goes_ahead=goes_ahead))
    ask = Ask([5, 6, 7], {"max_new_tokens": 20, "do_sample": False})
    requests = [ask.request(model, str(i)) for i in range(2)]
    own = StoppingCriteriaList([AtNine()])
    requests[1].options = RequestOptions.of(model, ask.prompt, None, ask.options, stopping_criteria=own)
    with torch.no_grad():
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
    assert all(request.status is Status.FINISHED for request in requests)
    [whole] = ask.alone(stock)
    assert [request.sequences[0].new_tokens for request in requests] == [whole, whole[:6]]
    check_idle(engine, model)


def test_b03_everything_fails_with_a_step():
    """What the model raises is the step's; nothing is held afterwards, and the engine goes on with others."""
    stock, model = twins("llama", 16)
    engine = Engine(model, limits())
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 8, "do_sample": False}) for n in (5, 40)]
    requests = [ask.request(model, str(i)) for i, ask in enumerate(asks)]
    error = RuntimeError("the model is tired")

    def tired(*args):
        raise error

    with torch.no_grad():
        for request in requests:
            engine.add(request)
        engine.step()
        hook = model.model.layers[1].register_forward_pre_hook(tired)
        with pytest.raises(RuntimeError, match="tired"):
            engine.step()
        hook.remove()
        assert set(engine.fail_all(error)) == set(requests)
    assert all(request.status is Status.FAILED and request.error is error for request in requests)
    assert used_blocks(model) == 0
    check(stock, asks, run(engine, model, asks))
    check_idle(engine, model)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_a_model_that_is_not_patched_any_more_is_named(anew, within):
    """Between two steps, or by another thread while a step's layers are computed; everything is given back."""
    _, model = twins("llama", 4)
    engine, pool = Engine(model, limits()), handle_of(model).pool
    requests = [Ask(prompt(1, 9, seed=i)[0].tolist(), {"max_new_tokens": 9}).request(model, str(i)) for i in range(3)]

    def change(*_):
        hf_turbo.unpatch(model)
        if anew:
            hf_turbo.patch(model, block_size=4)

    with torch.no_grad():
        for request in requests:
            engine.add(request)
        engine.step()
        if within:
            model.model.layers[1].register_forward_pre_hook(change)
        else:
            change()
        with pytest.raises(RuntimeError, match="unpatched, or patched anew"):
            engine.step()
    engine.fail_all(RuntimeError("it failed"))
    engine.close()
    assert all(request.status is Status.FAILED for request in requests)
    assert all(group.manager.num_used == 0 for group in pool.all_groups())


def test_priority_comes_first():
    _, model = twins("llama", 16)
    engine = Engine(model, limits(max_rows=1))
    ended = []
    with torch.no_grad():
        for i, priority in enumerate([0, 0, 5, 1]):
            ask = Ask(prompt(1, 6)[0].tolist(), {"max_new_tokens": 3, "do_sample": False}, priority=priority)
            engine.add(ask.request(model, str(i)))
        while engine.has_work:
            ended += [request.id for request in engine.step() if request.is_over]
    assert ended == ["2", "3", "0", "1"]
    check_idle(engine, model)


def test_texts_of_one_prompt_share_its_blocks():
    _, model = twins("llama", 4)
    engine = Engine(model, limits(max_tokens=64))
    options = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 4, "seed": 1}
    request = Ask(prompt(1, 33)[0].tolist(), options).request(model, "0")
    with torch.no_grad():
        engine.add(request)
        engine.step()
        assert used_blocks(model) == 9  # 8 full ones, and what they have begun
        engine.step()
        assert used_blocks(model) == 8 + 4
        while engine.has_work:
            engine.step()
    check_idle(engine, model)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_steps_of_running_texts_go_on_beside_a_long_prompt(goes_ahead):
    """A prompt comes in chunks; whoever is being answered gets a token in each step."""
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(max_tokens=32, max_chunk=8, goes_ahead=goes_ahead))
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 20, "do_sample": False}) for n in (5, 100)]
    short, long = (ask.request(model, str(i)) for i, ask in enumerate(asks))
    with torch.no_grad():
        engine.add(short)
        engine.step()
        engine.add(long)
        for step in range(2, 12):
            engine.step()
            assert len(short.sequences[0].new_tokens) == step - goes_ahead
            assert long.sequences[0].num_cached == 8 * (step - 1)
        while engine.has_work:
            engine.step()
    check(stock, asks, [short, long])
    # All but the last token of each, and two steps and a few tokens to see whether rows can be packed.
    assert hf_turbo.report(model).tokens_stored == 24 + 119 + 5
    check_idle(engine, model)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_the_next_prompt_follows_at_once(goes_ahead):
    """Where one has taken all of a step, those that wait do not wait for its text, too."""
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(max_tokens=21, goes_ahead=goes_ahead))
    asks = [Ask(prompt(1, 21, seed=i)[0].tolist(), {"max_new_tokens": 30, "do_sample": False}) for i in range(3)]
    requests = [ask.request(model, str(i)) for i, ask in enumerate(asks)]
    with torch.no_grad():
        for request in requests:
            engine.add(request)
        for _ in range(3):
            engine.step()
        assert [request.sequences[0].num_cached for request in requests] == [23, 21, 19]
        while engine.has_work:
            engine.step()
    check(stock, asks, requests)
    check_idle(engine, model)


@pytest.mark.parametrize("waiting", [0, 2])
def test_nothing_is_computed_after_the_last_token(waiting):
    """Whether others wait for the row or not, and though the host has not read that token yet."""
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(max_rows=2, goes_ahead=True))
    asks = [Ask([i + 1, 2, 3], {"max_new_tokens": 2 + 9 * (i == 1), "do_sample": False}) for i in range(2 + waiting)]
    saw, full = engine._saw, []
    engine._saw = lambda ready, is_step: (full.extend(s for s in ready if s.is_full), saw(ready, is_step))
    requests = run(engine, model, asks)
    check(stock, asks, requests)
    assert not full


#: Accelerated under `generate()`, but not here: their forwards can't be shared by rows that differ in length.
UNSUITED = {"biogpt", "ctrl", "opt", "phi3", "phimoe"}
NAMES = [name for name in ZOO if in_this_transformers(name)]
QUICK = ("llama", "qwen2", "gemma3_text", "gpt_oss", "gpt_neox", "mixtral")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_every_architecture(name):
    stock = build(name)
    model = build(name)
    model.load_state_dict(stock.state_dict())
    hf_turbo.patch(model, block_size=4)
    if model._hf_turbo.model_reason is not None:
        pytest.skip(model._hf_turbo.model_reason)
    try:
        engine = Engine(model, limits())
    except PackedUnsuited:
        assert name in UNSUITED or ZOO[name].expect != ACCELERATED
        return
    assert name not in UNSUITED
    asks = [
        Ask(prompt(1, n, seed=n)[0].tolist(), {"max_new_tokens": 9, "do_sample": False, "use_cache": True}, n // 8)
        for n in (1, 9, 14, 22, 40)
    ]
    check(stock, asks, run(engine, model, asks))
    check_idle(engine, model)


def test_frequencies_that_follow_the_length_are_refused():
    """A long text beside it would change a short one."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    _, model = twins("llama", 16, rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(PackedUnsuited, match="frequencies"):
        Engine(model, limits())
    assert used_blocks(model) == 0


@pytest.mark.parametrize("name, goes_ahead", few(("llama", "mistral", "gemma2", "qwen3_moe"), (False, True)))
def test_captured_steps(name, goes_ahead, monkeypatch):
    """Steps and short chunks of prompts go through one graph for each number of rows, whatever lengths they have."""
    stock, model = twins(name, 4)
    engine = Engine(model, limits(max_tokens=100, max_chunk=20, goes_ahead=goes_ahead))
    steps = CapturedSteps(model)
    monkeypatch.setattr(handle_of(model).steps, "run", steps.run)
    engine._forwards.captures = True
    asks = random_asks(stock, random.Random(5), count=16)
    fill_free_blocks(model, float("nan"))
    check(stock, asks, run(engine, model, asks))
    packed = [key for key in steps.graphs if key[1][-1]]
    assert packed and len(packed) <= 2 < len(steps.graphs) < 8 < 24 < steps.num_replayed
    check_idle(engine, model)


@pytest.mark.parametrize("limit, value", [("MAX_PACKED_SEQS", 3), ("MAX_PACKED_ROWS", 8), (None, 0)])
def test_too_many_for_a_captured_step(limit, value, monkeypatch):
    """Chunks then go side by side as one row of the batch, of which a model computes the wanted logits only."""
    stock, model = twins("llama", 4)
    engine = Engine(model, limits(max_tokens=100))
    steps = CapturedSteps(model)
    monkeypatch.setattr(handle_of(model).steps, "run", steps.run)
    engine._forwards.captures = True
    if limit is not None:
        monkeypatch.setattr(f"hf_turbo.engine.forwards.{limit}", value)
    options = {"max_new_tokens": 9, "do_sample": False}
    asks = [Ask(prompt(1, 9 + n, seed=n)[0].tolist(), options, max(n - 3, 0)) for n in range(6)]
    check(stock, asks, run(engine, model, asks))
    assert any(key[1][-1] for key in steps.graphs) == (limit is None)


@pytest.mark.parametrize("kind, name, goes_ahead", few(("int8", "fp8", "int4"), ("llama", "mistral"), (False, True)))
def test_quantized_blocks(kind, name, goes_ahead):
    """Text does not depend on what is computed beside it, nor on the chunks of its prompt."""
    stock = build(name, max_position_embeddings=1024)
    model = build(name, max_position_embeddings=1024)
    model.load_state_dict(stock.state_dict())
    hf_turbo.patch(model, block_size=32, kv_cache_dtype=kind)
    asks = [
        Ask(prompt(1, n, seed=n)[0].tolist(), {"max_new_tokens": 40, "do_sample": False}, n // 50)
        for n in (180, 20, 90, 130)
    ]
    engine = Engine(model, limits(max_tokens=64, goes_ahead=goes_ahead))
    alone = [[sequence.new_tokens for sequence in run(engine, model, [ask])[0].sequences] for ask in asks]
    together = [[s.new_tokens for s in request.sequences] for request in run(engine, model, asks)]
    assert together == alone
    other = Engine(model, limits(max_tokens=300, goes_ahead=goes_ahead))
    assert [[s.new_tokens for s in request.sequences] for request in run(other, model, asks)] == alone
    check_idle(engine, model)
    check_idle(other, model)


@pytest.mark.parametrize("kind, name", few(("int8", "fp8"), ("llama", "mistral")))
def test_quantized_blocks_say_what_the_policy_says(kind, name):
    """As if every token had been computed alone, from a cache whose older blocks are codes."""
    wide = {"sliding_window": 100} if name == "mistral" else {}
    models = [build(name, max_position_embeddings=1024, **wide) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    policy, model = models[0], hf_turbo.patch(models[1], block_size=32, kv_cache_dtype=kind)
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 24, "do_sample": False}, n // 50) for n in (140, 101)]
    engine = Engine(model, limits(max_tokens=64))
    said = [request.sequences[0].new_tokens for request in run(engine, model, asks)]
    follow_policy(policy, kind, 32).config.kv_policy.kinds.update(hf_turbo.report(model).protected_layers)
    for ask, tokens in zip(asks, said, strict=True):
        assert text_by_steps(policy, ask.prompt, len(tokens)) == tokens
    assert policy.config.kv_policy.queries_with_codes > 100
    check_idle(engine, model)


def test_engines_and_generate_share_a_model():
    """Two engines and a call of `generate()` at once, on one pool."""
    stock, model = twins("llama", 4)
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 10, "do_sample": False}) for n in (5, 17)]
    engines = [Engine(model, limits()) for _ in asks]
    requests: list[Request] = [ask.request(model, "0") for ask in asks]
    with torch.no_grad():
        for engine, request in zip(engines, requests):
            engine.add(request)
        while any(engine.has_work for engine in engines):
            for engine in engines:
                engine.step()
            check(stock, asks[:1], run(engines[0], model, asks[:1])) if not engines[0].has_work else None
            assert asks[1].alone(model) == asks[1].alone(stock)
    check(stock, asks, requests)
    for engine in engines:
        check_idle(engine, model)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_texts_of_one_prompt_fit_to_the_last_block(goes_ahead):
    """What two texts share is copied for one of them only."""
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(num_blocks=2, goes_ahead=goes_ahead))
    options = {"max_new_tokens": 8, "do_sample": True, "seed": 1, "num_return_sequences": 2}
    asks = [Ask(prompt(1, 5)[0].tolist(), options)]
    check(stock, asks, run(engine, model, asks))
    check_idle(engine, model)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_a_prompt_takes_the_memory_of_who_came_later(goes_ahead):
    """Also of one whose newest token has not been read."""
    stock, model = twins("llama", 16)
    engine = Engine(model, limits(num_blocks=8, max_tokens=16, max_chunk=16, goes_ahead=goes_ahead))
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 20, "do_sample": False}, n // 50) for n in (12, 100)]
    asks[1].priority = 1
    requests = run(engine, model, asks)
    check(stock, asks, requests)
    assert [request.num_preempted for request in requests] == [1, 0]
    check_idle(engine, model)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_every_token_is_counted_once(goes_ahead):
    stock, model = twins("llama", 16)
    asks = [
        Ask(prompt(1, 5 + i, seed=i)[0].tolist(), {"max_new_tokens": 3 + 4 * i, "do_sample": False}) for i in (0, 1, 2)
    ]
    asks += [
        Ask(asks[0].prompt, {"max_new_tokens": 6, "do_sample": True, "seed": 3, "num_return_sequences": n})
        for n in (1, 2)
    ]
    engine = Engine(model, limits(goes_ahead=goes_ahead))

    def nothing_is_kept_to_be_taken_back():
        assert all(len(choice._before) <= 2 for choice in engine._choices.values())

    requests = run(engine, model, asks, nothing_is_kept_to_be_taken_back)
    check(stock, asks, requests)
    texts = [sequence.new_tokens for request in requests for sequence in request.sequences]
    metrics = engine.metrics
    assert metrics.decoded_tokens == sum(map(len, texts))
    assert metrics.first_token.count == len(requests)
    assert metrics.token_gap.count == sum(len(text) - 1 for text in texts)
    assert not (engine._chooser._party.takers or engine._ends or engine._held_back)  # nothing of who is gone
    check_idle(engine, model)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_texts_that_part_take_no_more_than_there_is(goes_ahead):
    """Each needs a block of its own when it goes on after the prompt that it shares."""
    stock, model = twins("llama", 16)
    sampled = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    asks = [Ask(prompt(1, 9, seed=i)[0].tolist(), {**sampled, "seed": i}) for i in range(3)]
    engine = Engine(model, limits(goes_ahead=goes_ahead, num_blocks=4, max_rows=9))

    def fits():
        assert engine._memory.used <= engine._memory.capacity

    check(stock, asks, run(engine, model, asks, fits))
    check_idle(engine, model)


def test_int4_weights():
    """A quantized model's texts are those that it gives alone."""
    model = build("llama", hidden_size=64, intermediate_size=128)
    hf_turbo.quantize(model, bits=4, group_size=32)
    alone = copy.deepcopy(model)
    hf_turbo.patch(alone)
    hf_turbo.patch(model)
    asks = random_asks(alone, random.Random(2))
    engine = Engine(model, limits())
    check(alone, asks, run(engine, model, asks))
    check_idle(engine, model)
