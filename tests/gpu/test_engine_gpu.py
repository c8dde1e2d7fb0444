"""Many requests on a GPU, by captured steps and a step ahead of the host: each gets its own text, in fp32."""

import random
import time

import pytest
import torch
from engine.mixes import Ask, check, check_idle, random_asks, run
from graph_cases import GPU, patched_model, steps, stock_model
from helpers import fill_free_blocks, prompt

import hf_turbo
from hf_turbo.engine.choice import Chooser
from hf_turbo.engine.engine import Engine
from hf_turbo.engine.limits import EngineLimits
from hf_turbo.generation.prompt_lookup import PromptLookup

pytestmark = GPU


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("seed", range(4))
def test_random_mixes(name, seed, goes_ahead):
    values = random.Random(seed)
    stock, model = stock_model(name), patched_model(name)
    asks = random_asks(stock, values, count=24, shared=48)
    limits = EngineLimits(
        max_tokens=values.choice([32, 700]), max_rows=16, max_chunk=values.choice([None, 24]), goes_ahead=goes_ahead,
        num_blocks=values.choice([None, 24]),
    )  # fmt: skip
    engine = Engine(model, limits)
    fill_free_blocks(model, float("nan"))
    check(stock, asks, run(engine, model, asks))
    assert steps(model).num_replayed > 20
    assert any(key[1][-1] for key in steps(model)._graphs), "no step was captured to which rows bring several tokens"
    check_idle(engine, model)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_quantized_blocks(kind):
    """Text does not depend on what is computed beside it."""
    model = patched_model("llama", torch.bfloat16, 64, {"kv_cache_dtype": kind}, max_position_embeddings=1024)
    lengths = (300, 20, 190, 130)
    asks = [Ask(prompt(1, n)[0].tolist(), {"max_new_tokens": 70, "do_sample": False}, n // 50) for n in lengths]
    engine = Engine(model, EngineLimits(max_tokens=128, max_rows=16))
    alone = [run(engine, model, [ask])[0].sequences[0].new_tokens for ask in asks]
    together = [request.sequences[0].new_tokens for request in run(engine, model, asks)]
    agree = sum(a == b for one, other in zip(alone, together) for a, b in zip(one, other))
    assert agree > 0.7 * 4 * 70  # bf16: other sums of other batches
    assert any(graph.is_packed for graph in steps(model)._graphs.values()), "prompts beside texts were not captured"
    check_idle(engine, model)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_quantized_blocks_in_fp32(kind):
    """Prompts beside texts by captured steps say what they say the model's own way, and not a token else."""
    asks = [Ask(prompt(1, n, seed=n)[0].tolist(), {"max_new_tokens": 50, "do_sample": False}, i) for i, n in enumerate(
        (300, 20, 190, 130, 64, 65)
    )]  # fmt: skip
    texts = []
    for cuda_graphs in (False, True):
        turbo = {"kv_cache_dtype": kind, "cuda_graphs": cuda_graphs}
        model = patched_model("llama", block_size=64, turbo=turbo, max_position_embeddings=1024)
        engine = Engine(model, EngineLimits(max_tokens=128, max_rows=16))
        run(engine, model, asks[:1])  # it says what the layers' codes are
        fill_free_blocks(model, float("nan"))
        texts.append([request.sequences[0].new_tokens for request in run(engine, model, asks)])
        assert cuda_graphs == any(graph.is_packed for graph in steps(model)._graphs.values())
        check_idle(engine, model)
    same = sum(a == b for one, other in zip(*texts) for a, b in zip(one, other))
    assert same > 0.95 * 6 * 50  # a number between two codes may become either


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_the_likeliest_tokens(goes_ahead, monkeypatch):
    """They come from captured steps, of all but the first ones; beside a request that samples they do not."""
    said, choose = [], Chooser.choose

    def seen(self, logits, takers):
        said.append(logits.dim() == 1)
        return choose(self, logits, takers)

    monkeypatch.setattr(Chooser, "choose", seen)
    stock, model = stock_model("llama"), patched_model("llama")
    options = {"max_new_tokens": 40, "do_sample": False}
    asks = [Ask(prompt(1, 5 + n, seed=n)[0].tolist(), options, 2 * n) for n in range(12)]
    engine = Engine(model, EngineLimits(max_tokens=64, max_rows=16, max_chunk=24, goes_ahead=goes_ahead))
    fill_free_blocks(model, float("nan"))
    check(stock, asks, run(engine, model, asks))
    assert said.count(False) <= steps(model).num_captured + 1
    asks.append(Ask(asks[0].prompt, {"max_new_tokens": 9, "do_sample": True, "seed": 3}, 6))
    said.clear()
    check(stock, asks, run(engine, model, asks))
    assert said.count(False) >= 9 and said.count(True) >= 9
    check_idle(engine, model)


def test_drafts():
    stock, model = stock_model("llama"), patched_model("llama", turbo={"speculation": PromptLookup()})
    asks = [Ask(prompt(1, n)[0].tolist() * 3, {"max_new_tokens": 40, "do_sample": False}, n // 9) for n in (5, 9, 20)]
    asks.append(Ask(prompt(1, 30)[0].tolist(), {"max_new_tokens": 30, "do_sample": True, "seed": 3}))
    engine = Engine(model, EngineLimits(max_tokens=256, max_rows=16))
    check(stock, asks, run(engine, model, asks))
    assert next(iter(hf_turbo.report(model).drafts.values())).rounds
    check_idle(engine, model)


def test_manager():
    """In the manager's thread, beside calls of `generate()` in this one."""
    stock, model = stock_model("llama"), patched_model("llama")
    asks = [Ask(prompt(1, 5 + n)[0].tolist(), {"max_new_tokens": 20, "do_sample": False}) for n in range(20)]
    expected = [ask.alone(stock)[0] for ask in asks]
    with model.continuous_batching_context_manager() as manager:
        names = [manager.add_request(ask.prompt, **ask.options) for ask in asks]
        for ask, text in zip(asks, expected):
            assert ask.alone(model)[0] == text
        assert [manager.get_result(name, timeout=60).generated_tokens for name in names] == expected


def test_the_host_keeps_up():
    """Of a step with 64 rows the host's own part is short. (Prints it; a bound that only a fault passes.)"""
    model = patched_model("llama", torch.bfloat16, 64, max_position_embeddings=1024)
    engine = Engine(model, EngineLimits(max_tokens=2048))
    asks = [Ask(prompt(1, 20)[0].tolist(), {"max_new_tokens": 300, "do_sample": False}) for _ in range(64)]
    for i, ask in enumerate(asks):
        engine.add(ask.request(model, str(i)))
    for _ in range(50):
        engine.step()
    began, host = time.perf_counter(), engine.metrics.host_seconds
    for _ in range(100):
        engine.step()
    torch.cuda.synchronize()
    host = engine.metrics.host_seconds - host
    print(f"a step {(time.perf_counter() - began) * 10:.2f} ms, the host's part {host * 10:.2f} ms")
    assert host < 1.0
    engine.close()
