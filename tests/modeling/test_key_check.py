"""Which layers' keys can take 4 bits: what is flagged, what is not, and what it takes to find out."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import build
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import AttentionInterface

from hf_turbo.modeling.key_check import LIMIT, MIN_TOKENS, SAMPLE_KEYS, SAMPLE_QUERIES, check_keys, divergence
from hf_turbo.ops.kv_codes import dequantize_keys, quantize_keys
from hf_turbo.ops.kv_format import KV_FORMATS

DIM, BLOCK = 64, 64
SCALE = DIM**-0.5


def rotary(x: torch.Tensor) -> torch.Tensor:
    """`[..., tokens, dim]` with positions, as Llama's."""
    dim = x.shape[-1]
    angles = torch.arange(x.shape[-2])[:, None] * 1e5 ** (-torch.arange(dim // 2) / (dim // 2))
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def states(tokens=300, rows=1, heads=6, kv_heads=2, times=0.0, channels=(10,), seed=0, device="cpu"):
    """Queries and keys of a layer, some channels of whose keys have a bias so many times their size."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads, tokens, DIM, generator=draw)
    key = torch.randn(rows, kv_heads, tokens, DIM, generator=draw)
    key[..., list(channels)] += times
    return rotary(query).to(device), rotary(key).to(device)


def of(query, key, name="int4", scale=SCALE, **more):
    return float(divergence(query[0], key[0], KV_FORMATS[name], BLOCK, scale, **more))


@pytest.mark.parametrize("tokens", [64, 100, 300, 1000])
def test_huge_biases_are_flagged_and_plain_keys_are_not(tokens):
    plain = check_keys(*states(tokens), "int4", BLOCK, SCALE)
    assert plain.format == "int4" and plain.fits and set(plain.divergences) == {"int4"}
    assert plain.divergences["int4"] < LIMIT / 3
    biased = check_keys(*states(tokens, times=1200.0), "int4", BLOCK, SCALE)
    assert biased.format == "int8" and biased.fits
    assert biased.divergences["int4"] > 2 * LIMIT > 10 * biased.divergences["int8"]


def test_a_bias_that_does_not_turn_costs_nothing():
    """It is the zero of its channel: how large keys are, or how large their error, does not decide."""
    assert check_keys(*states(times=1200.0, channels=(31,)), "int4", BLOCK, SCALE).format == "int4"


def test_an_error_counts_by_what_becomes_of_attention():
    """The same keys and the same error, and queries that look elsewhere."""
    query, key = states(times=1200.0)
    query[..., [10, 42]] = 0
    assert check_keys(query, key, "int4", BLOCK, SCALE).format == "int4"


def test_where_nothing_fits_the_better_one_is_taken_and_says_so():
    query, key = states(times=1e5)
    verdict = check_keys(query, key, "int4", BLOCK, SCALE)
    assert verdict.format == "int8" and not verdict.fits
    assert verdict.divergences["int4"] > verdict.divergences["int8"] > LIMIT


def test_formats_with_8_bits_are_judged_too():
    assert check_keys(*states(times=300.0), "int8", BLOCK, SCALE).format == "int8"
    worse = check_keys(*states(times=1000.0), "fp8", BLOCK, SCALE)
    assert worse.format == "int8" and set(worse.divergences) == {"fp8", "int8"}


def test_the_divergence_by_hand():
    tokens = BLOCK + 7
    query, key = states(tokens, times=30.0)
    q, k = query[0, :, 7:], key[0, :, 7:]
    coded = dequantize_keys(quantize_keys(k, KV_FORMATS["int4"]), KV_FORMATS["int4"], BLOCK, DIM)
    total, count = 0.0, 0
    for head in range(6):
        for place in range(BLOCK // 2, BLOCK):
            p, other = ((x[head // 3, : place + 1] @ q[head, place] * SCALE).log_softmax(0) for x in (k, coded))
            total += float((p.exp() * (p - other)).sum())
            count += 1
    assert of(query, key) == pytest.approx(total / count, rel=1e-3)


def test_query_heads_are_judged_by_their_own_keys():
    """One KV head's biases: the queries of the other one don't see them."""
    query, key = states()
    key[:, 1] = states(times=300.0)[1][:, 1]
    both = of(query, key)
    own = of(query[:, 3:], key[:, 1:])
    assert both == pytest.approx((of(query[:, :3], key[:, :1]) + own) / 2, rel=1e-4)
    assert own > 10 * of(query[:, :3], key[:, :1])


@pytest.mark.parametrize("filling", [0.0, 1e4, math.nan])
def test_padding_is_not_looked_at(filling):
    query, key = states(200, rows=3, times=20.0)
    lengths = [70, 150, 20]
    for row, length in enumerate(lengths):
        query[row, :, : 200 - length] = filling
        key[row, :, : 200 - length] = filling
    verdict = check_keys(query, key, "int4", BLOCK, SCALE, lengths)
    alone = check_keys(query[1:2, :, 50:], key[1:2, :, 50:], "int4", BLOCK, SCALE)
    assert verdict == alone and math.isfinite(verdict.divergences["int4"])


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_short_prompts_say_nothing(rows):
    query, key = states(200, rows=rows)
    lengths = [MIN_TOKENS - 1] * rows
    assert check_keys(query, key, "int4", BLOCK, SCALE, lengths) is None
    assert check_keys(query[:, :, :5], key[:, :, :5], "int4", BLOCK, SCALE) is None
    if rows:
        assert check_keys(query, key, "int4", BLOCK, SCALE, [MIN_TOKENS] * rows) is not None


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_sizes(block_size):
    """Also of a prompt that is shorter than a block."""
    for tokens in (MIN_TOKENS, 300):
        plain, biased = (check_keys(*states(tokens, times=t), "int4", block_size, SCALE) for t in (0.0, 1000.0))
        assert (plain.format, biased.format) == ("int4", "int8")


def test_windows_hide_keys():
    """Biases of a block that no query of the sample can see."""
    query, key = states(256)
    key[:, :, :BLOCK] = states(256, times=1000.0)[1][:, :, :BLOCK]
    plain = of(*(x[:, :, BLOCK:] for x in (query, key)), sliding_window=32)
    assert of(query, key, sliding_window=None) > 10 * plain
    assert of(query, key, sliding_window=32) < 2 * plain


def test_a_soft_cap_is_applied():
    query, key = states(times=300.0)
    assert of(query, key, softcap=0.01) < 1e-3 < of(query, key, softcap=50.0) < of(query, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2000.0, 1e-4, 0.0])
@pytest.mark.parametrize("name", list(KV_FORMATS))
def test_figures_are_finite(name, size, dtype):
    query, key = states()
    key = key * (size / key.abs().amax())
    found = of(query.to(dtype), key.to(dtype), name)
    assert math.isfinite(found) and found > -1e-6
    if size < 1:
        assert found < 1e-4


def test_scores_that_decide_everything_are_finite():
    query, key = states()
    assert math.isfinite(of(query * 2000, key * 2000)) and of(query * 2000, key * 2000) > LIMIT


class Sizes(TorchDispatchMode):
    """The largest tensor that is made, in numbers; views of what was given don't count."""

    def __init__(self, *given):
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.given:
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("tokens", [3000, SAMPLE_KEYS + 3, SAMPLE_KEYS - 60])
def test_memory_is_bounded(tokens):
    query, key = states(tokens, rows=2)
    with Sizes(query, key) as sizes:
        check_keys(query, key, "int4", BLOCK, SCALE, [tokens - 1, tokens])
    assert 0 < sizes.largest <= max(6 * SAMPLE_QUERIES * SAMPLE_KEYS, 2 * SAMPLE_KEYS * DIM)


def test_nothing_is_written_and_nothing_needs_a_gradient():
    query, key = (x.requires_grad_() for x in states(times=300.0))
    before = key.detach().clone()
    assert not divergence(query[0], key[0], KV_FORMATS["int4"], BLOCK, SCALE).requires_grad
    assert torch.equal(key, before)


def verdicts_of(model, tokens):
    """What the check says of each layer of a model at random tokens."""
    found = {}
    plain = AttentionInterface()["sdpa"]

    def look(module, query, key, value, mask, **kwargs):
        options = {"sliding_window": kwargs.get("sliding_window"), "softcap": kwargs.get("softcap")}
        found[module.layer_idx] = check_keys(query, key, "int4", BLOCK, kwargs["scaling"], **options)
        return plain(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("key_check_of_tests", look)
    model.config._attn_implementation = "key_check_of_tests"
    ids = torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids)
    return [found[layer] for layer in sorted(found)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_tiny_models_are_not_flagged(name):
    assert {verdict.format for verdict in verdicts_of(build(name), 150)} == {"int4"}


def test_the_layers_with_huge_biases_are_flagged():
    """A Qwen2 whose first and last layers have them."""
    model = build("qwen2", num_hidden_layers=4, head_dim=32, hidden_size=128)
    size = max(float(layer.self_attn.k_proj.weight.detach().std()) for layer in model.model.layers) * 128**0.5
    for layer in (0, 3):
        model.model.layers[layer].self_attn.k_proj.bias.data.view(2, -1)[:, 2] += 300 * size
    assert [verdict.format for verdict in verdicts_of(model, 300)] == ["int8", "int4", "int4", "int8"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_says_the_same():
    for times in (0.0, 300.0):
        here, there = (
            check_keys(*states(times=times, device=device), "int4", BLOCK, SCALE) for device in ("cpu", "cuda")
        )
        assert here.format == there.format
        assert here.divergences == pytest.approx(there.divergences, rel=1e-2, abs=1e-5)
