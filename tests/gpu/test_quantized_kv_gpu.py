"""Quantized caches on a GPU, captured steps and all: in fp32 the text that the same cache gives on a CPU."""

import pytest
import torch
from graph_cases import GPU, on_gpu, replays, steps
from helpers import assert_pool_accounts, generate, groups, prompt, ragged, used_blocks
from test_quantized_kv import MODELS, MODES
from tiny_models import build

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.ops.kv_format import KV_FORMATS
from hf_turbo.patching import handle_of

pytestmark = GPU
B = 32


def pair(name, kind="int4", dtype=torch.float32, **options):
    """The same model twice, on a CPU and on the GPU, both with such a cache."""
    architecture, overrides = MODELS[name]
    overrides = {"max_position_embeddings": 2048, **overrides}
    models = build(architecture, **overrides).to(dtype), build(architecture, **overrides).to(dtype).cuda()
    for model in models:
        hf_turbo.patch(model, block_size=B, kv_cache_dtype=kind, **options)
        handle_of(model).pool.formats |= dict.fromkeys(range(model.config.num_hidden_layers), kind)
    return models


def same_text(models, inputs, new_tokens, seed=None, **options):
    """Greedy text, or by beams; with a seed only the caches' accounts are compared."""
    texts = []
    for model, given in zip(models, (inputs, on_gpu(inputs))):
        if seed is not None:
            torch.manual_seed(seed)
        texts.append(generate(model, given, new_tokens, **options).sequences.cpu())
        assert used_blocks(model) == 0
        assert_pool_accounts(model)
        if any(window is None or window > B for window in groups(model)):
            assert any(group.codes.peak_blocks > 0 for group in groups(model).values()), "nothing was read as codes"
    if seed is None:
        assert torch.equal(*texts)


@pytest.mark.parametrize("kind", KV_FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_steps(name, kind):
    models = pair(name, kind)
    with replays(models[1]):
        for _ in range(2):
            same_text(models, ragged(80, 150), 80)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "window and full"])
def test_modes(name, mode):
    models = pair(name)
    inputs = prompt(1, 150) if mode == "lookup" else ragged(80, 150)
    for _ in range(2):
        same_text(models, inputs, 70, **MODES[mode])


@pytest.mark.parametrize("kind", KV_FORMATS)
@pytest.mark.parametrize("chunk", [32, 100])
def test_chunks_of_a_prompt(kind, chunk):
    same_text(pair("llama", kind), ragged(181, 350), 6, prefill_chunk_size=chunk)


@pytest.mark.parametrize("kind", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision(kind, dtype):
    """About as near to those of the same weights in float32 as on a CPU; codes flip by rounding on both."""
    ids = prompt(2, 300)
    on_cpu, on_device = pair("qwen2", kind, dtype)
    exact = hf_turbo.unpatch(pair("qwen2", kind, dtype)[0]).float()
    hf_turbo.patch(exact, block_size=B, kv_cache_dtype=kind)
    logits = []
    for model, given in ((exact, ids), (on_cpu, ids), (on_device, ids.cuda())):
        cache = hf_turbo.paged_cache(model)
        pieces = given.split([200, 40] + [1] * 60, 1)
        with torch.no_grad():
            parts = [model(piece, **{CACHE_NAME: cache}).logits.float().cpu() for piece in pieces]
        logits.append(torch.cat(parts, 1))
    assert not logits[2].isnan().any()
    cpu_error, gpu_error = ((x - logits[0]).pow(2).mean().sqrt().item() for x in logits[1:])
    assert gpu_error < 2 * cpu_error, f"{gpu_error:.2e} on the GPU, {cpu_error:.2e} on the CPU"


def test_steps_replay_at_every_length():
    """One graph serves from before there are codes on, while blocks fill, and another cache, too."""
    _, model = pair("llama")
    generate(model, on_gpu(prompt(1, 40)), 4)
    captured = steps(model).num_captured
    with replays(model):
        generate(model, on_gpu(prompt(1, 60)), 120)
    assert steps(model).num_captured == captured


@pytest.mark.parametrize("kind", KV_FORMATS)
def test_q06_less_memory(kind):
    """Peak memory with a long prompt, and bytes a token, below those of the model's dtype."""
    peaks = {}
    for dtype in (None, kind):
        model = build("llama", max_position_embeddings=8192, head_dim=64, num_key_value_heads=4, num_attention_heads=8)
        model = model.to(torch.bfloat16).cuda()
        hf_turbo.patch(model, kv_cache_dtype=dtype)
        generate(model, on_gpu(prompt(2, 70)), 4)
        hf_turbo.release(model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        generate(model, on_gpu(prompt(4, 4096)), 4)
        report = hf_turbo.report(model)
        peaks[dtype] = torch.cuda.max_memory_allocated() - start, report.peak_kv_bytes
        hf_turbo.unpatch(model)
    assert peaks[kind][0] < peaks[None][0]
    assert peaks[kind][1] < {"int4": 0.4, "int8": 0.6, "fp8": 0.6}[kind] * peaks[None][1]
