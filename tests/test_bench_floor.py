"""The least time of a step: the bytes that it must read."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_turbo
from hf_turbo.bench import floor, models
from hf_turbo.bench.cases import Case

CPU = torch.device("cpu")


def test_floor_of_llama_3_8b():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.preset_config("llama-3-8b"), dtype=torch.bfloat16)
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    layer = attention + 3 * 4096 * 14336 + 2 * 4096
    weights = 32 * layer + 4096 + 128256 * 4096  # the head; the embedding is not read
    kv = 32 * 2 * 8 * 128
    context = 128 + (8 + 127) / 2
    assert floor.step_bytes(model, Case(1, 128, 128)) == 2 * (weights + kv * context)
    assert floor.step_bytes(model, Case(16, 128, 128)) == 2 * (weights + 16 * kv * context)
    # Four beams read their prompt once.
    assert floor.step_bytes(model, Case(1, 128, 128, beams=4)) == 2 * (weights + kv * (128 + 4 * (8 + 127) / 2))


def test_floor_counts_a_tied_embedding_as_the_head():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.preset_config("smollm2-135m"), dtype=torch.float32)
    assert floor.weight_bytes(model, 1) == 4 * 134_515_008


def test_floor_counts_quantized_weights_as_they_are_held():
    model = models.load_model("tiny", torch.float32, CPU)
    whole = floor.weight_bytes(model, 1)
    linears = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
    hf_turbo.quantize(model, group_size=32)
    codes, scales = linears // 2, linears // 32 * 2
    assert floor.weight_bytes(model, 1) == whole - 4 * linears + codes + scales


def test_floor_counts_experts_that_a_batch_can_choose():
    config = AutoConfig.for_model(**{**models.PRESETS["qwen3-30b-a3b"], "num_hidden_layers": 1})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    expert = 2 * 3 * 2048 * 768
    one = floor.weight_bytes(model, 1)
    assert floor.weight_bytes(model, 2) - one == 8 * expert
    assert floor.weight_bytes(model, 16) - one == floor.weight_bytes(model, 99) - one == 120 * expert


def test_floor_ends_at_a_sliding_window():
    config = models.preset_config("gemma-3-1b")
    a_token = 2 * 1 * 256 * 2
    full, sliding = 4, 22
    new = (8 + 31) / 2
    assert floor.kv_bytes(config, Case(3, 4096, 32), 2) == 3 * a_token * (full * (4096 + new) + sliding * 512)
    assert floor.kv_bytes(config, Case(3, 100, 32), 2) == 3 * a_token * (full + sliding) * (100 + new)


def test_bandwidth_of_a_cpu():
    assert 1e8 < floor.bandwidth(CPU) < 1e12
