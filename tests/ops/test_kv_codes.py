"""Codes of keys and values: how near they come, that bytes are what `kv_format` says, and how many there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_turbo.ops import kv_codes
from hf_turbo.ops.kv_format import E4M3_MAX, KV_BLOCK_SIZES, KV_FORMATS, end_of_codes

FORMATS = list(KV_FORMATS)
DIMS = [64, 80, 96, 112, 128, 256]
SIZE = 64
#: Tokens that share a channel's scale.
KEY_TOKENS = {"int8": SIZE, "fp8": SIZE, "int4": 32}
#: What is tried for a channel of float8 keys: what its largest and, below zero, its smallest key become.
ENDS = [(256, b) for b in range(256, 127, -16)] + [(a, 256) for a in range(240, 127, -16)]


def fake_keys(x, fmt):
    fmt = KV_FORMATS[fmt]
    return kv_codes.dequantize_keys(kv_codes.quantize_keys(x, fmt), fmt, *x.shape[-2:])


def fake_values(x, fmt):
    fmt = KV_FORMATS[fmt]
    return kv_codes.dequantize_values(kv_codes.quantize_values(x, fmt), fmt, *x.shape[-2:])


def half(x):
    """What rounding a zero, or a scale, to fp16 may change."""
    return x.abs() * 2**-11 + 2**-25


def allowed(x, fmt, along, is_value):
    """How far from `x` its codes' numbers may be. `along`: the dimension whose numbers share a scale."""
    unit = 2.0 ** x.abs().amax((-1, -2), keepdim=True).clamp(min=1e-30).log2().ceil() if is_value else 1.0
    x = x / unit
    low, high = x.amin(along, keepdim=True), x.amax(along, keepdim=True)
    is_signed = is_value and fmt != "int4"
    zero = torch.zeros_like(low) if is_signed else (low + high) / 2 if fmt == "fp8" else low
    shift = 0 if is_signed or fmt != "fp8" else (high - low) / 6  # the most that a zero is beside that
    reach = (x - zero).abs() + shift + half(zero)
    largest = reach.amax(along, keepdim=True)
    codes = {"fp8": E4M3_MAX if is_value else 256, "int4": 15, "int8": 127 if is_value else 255}[fmt]
    step = (largest + half(largest) * 2) / codes if is_signed else largest / codes + half(largest / codes) * 2
    # Of e4m3: half of the last of three bits, or half of the smallest number.
    bound = reach * 2**-4 + step * 2**-10 if fmt == "fp8" else step / 2
    return (bound + half(zero) + x.abs() * 1e-6) * unit


def inputs():
    torch.manual_seed(1)
    x = torch.randn(3, 4, SIZE, 80)
    huge = x.clone()
    huge[:, 1:3] *= 2000 / x[:, 1:3].abs().max()  # two heads
    outlier = x.clone()
    outlier[0, 0, 17, 5] = 30000.0
    biased = x + 40 * torch.randn(80)
    constant = x.clone()
    constant[..., ::3] = 1.2345
    return {
        "normal": x,
        "2000 in two heads": huge,
        "1e-4": x * 1e-4,
        "zeros": torch.zeros_like(x),
        "one zero token": torch.where(torch.arange(SIZE)[:, None] == 9, 0.0, x),
        "constant channels": constant,
        "constant": torch.full_like(x, -3.3),
        "one outlier": outlier,
        "biases": biased,
        "one sign": x.abs() + 1,
        "tokens that grow": x * torch.logspace(-3, 3, SIZE)[:, None],
    }


INPUTS = inputs()


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_error(name, fmt):
    """Half a step of the numbers that share a scale, and what fp16 takes from scales and zeros."""
    x = INPUTS[name]
    groups = x.double().unflatten(-2, (-1, KEY_TOKENS[fmt]))
    bounds = allowed(groups, fmt, -2, False).flatten(-3, -2), allowed(x.double(), fmt, -1, True)
    for fake, bound, near in zip((fake_keys, fake_values), bounds, (0.5 if fmt == "fp8" else 0.8, 0.8), strict=True):
        error = (fake(x, fmt).double() - x.double()).abs()
        assert error.isfinite().all()
        assert (error <= bound).all(), (error / bound).max()
        if name in ("normal", "biases", "one sign"):  # the bound is not far from what happens
            assert (error / bound).max() > near
    if name in ("zeros", "one zero token"):
        tokens = x.abs().amax(-1) == 0
        assert (fake_values(x, fmt)[tokens] == 0).all()


def tries_of_float8_keys(x):
    """The numbers that each of the zeros and scales makes of keys, `[..., tokens, dim]`."""
    low, high = x.min(-2, keepdims=True), x.max(-2, keepdims=True)
    for above, below in ENDS:
        zero = ((low * above + high * below) / (above + below)).astype(np.float16).astype(np.float32)
        wanted = np.maximum((high - zero) / above, (zero - low) / below)
        scale = wanted.astype(np.float16)
        scale = np.where(scale < wanted, np.nextafter(scale, np.float16("inf")), scale).astype(np.float32)
        codes = torch.from_numpy((x - zero) / scale).to(torch.float8_e4m3fn).float().numpy()
        yield codes * scale + zero


@pytest.mark.parametrize("name", ["normal", "2000 in two heads", "one outlier", "biases", "one sign"])
def test_float8_keys_are_the_best_of_some_tries(name):
    """For each channel, by the sum of squares; errors count in 1/128 of float8's."""
    x = INPUTS[name]
    errors = [np.square(tried - x.numpy()).sum(-2) for tried in tries_of_float8_keys(x.numpy())]
    found, least = (fake_keys(x, "fp8") - x).square().sum(-2).numpy(), np.min(errors, 0)
    assert (found <= least * 1.01).all() and (found >= least * 0.999).all()
    if name in ("normal", "biases"):  # any of them can be the best, and no single one comes near
        assert len(set(np.argmin(errors, 0).flatten())) == len(ENDS)
        assert found.mean() < 0.85 * np.mean(errors, (1, 2, 3)).min()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_values_of_any_size(fmt, size):
    """A block's values have a unit: what is lost does not depend on their size."""
    x = torch.randn(2, SIZE, 64)
    error = (fake_values(x, fmt) - x).abs().max()
    assert ((fake_values(x * size, fmt) - x * size).abs().max() / size) < error * 1.5


@pytest.mark.parametrize("fmt", FORMATS)
def test_without_a_scale_codes_are_zero(fmt):
    """Nothing is divided by zero: what became of that would depend on the machine."""
    fmt, x = KV_FORMATS[fmt], torch.zeros(SIZE, 64)
    keys, values = kv_codes.quantize_keys(x, fmt), kv_codes.quantize_values(x, fmt)
    assert not keys.any()
    assert (values[: fmt.value_scales(SIZE, 64)] == (128 if fmt.name == "int8" else 0)).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [1e5, 1e9, 1e30])
def test_keys_beyond_fp16_stay_numbers(fmt, size):
    x, fmt = torch.randn(SIZE, 64) * size, KV_FORMATS[fmt]
    data = kv_codes.quantize_keys(x, fmt)
    assert kv_codes.dequantize_keys(data, fmt, SIZE, 64).isfinite().all()
    if fmt.is_float:
        assert data[: SIZE * 64].view(torch.float8_e4m3fn).float().isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_are_on_their_own(fmt):
    """What a block's codes are does not depend on its neighbours, or on how it lies in memory."""
    x = torch.randn(3, 2, SIZE, 64)
    x[1] *= 1000
    x[2, 0, :, 3] = torch.tensor([0.0, -0.0]).repeat(SIZE // 2)
    for quantize in (kv_codes.quantize_keys, kv_codes.quantize_values):
        together = quantize(x, KV_FORMATS[fmt])
        strided = quantize(x.transpose(1, 2).contiguous().transpose(1, 2), KV_FORMATS[fmt])
        alone = torch.stack([quantize(block, KV_FORMATS[fmt]) for block in x])
        assert torch.equal(together, alone) and torch.equal(together, strided)


@pytest.mark.parametrize("fmt", FORMATS)
def test_negative_zero_is_zero(fmt):
    """Which of the two is the minimum would be anybody's guess."""
    x = torch.randn(SIZE, 64)
    x[:, 3], x[9] = 0, 0
    for quantize in (kv_codes.quantize_keys, kv_codes.quantize_values):
        assert torch.equal(quantize(x, KV_FORMATS[fmt]), quantize(torch.where(x == 0, -x.abs(), x), KV_FORMATS[fmt]))


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantizing_twice(fmt):
    """Codes in any layout give the same numbers, and values in a row are the blocks' one after another."""
    fmt = KV_FORMATS[fmt]
    x = torch.randn(2, 3, SIZE, 80)
    keys, values = kv_codes.quantize_keys(x, fmt), kv_codes.quantize_values(x, fmt)
    for dequantize, data in ((kv_codes.dequantize_keys, keys), (kv_codes.dequantize_values, values)):
        wanted = dequantize(data, fmt, SIZE, 80)
        assert wanted.dtype == torch.float32 and wanted.shape == x.shape
        assert torch.equal(dequantize(data.transpose(0, 1), fmt, SIZE, 80), wanted.transpose(0, 1))
    in_a_row = kv_codes.dequantize_values_in_a_row(values, fmt, SIZE, 80)
    assert in_a_row.is_contiguous()
    assert torch.equal(in_a_row.transpose(-1, -2), wanted.flatten(-3, -2))


def test_every_e4m3_code():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    numbers = kv_codes._from_e4m3(codes.to(torch.int16) << 8).float() * 256
    assert torch.equal(numbers, codes.view(torch.float8_e4m3fn).float())
    assert numbers.max() == E4M3_MAX
    fp8 = KV_FORMATS["fp8"]
    assert torch.equal(kv_codes._codes(numbers, fp8), codes)


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_lie_as_said(fmt):
    """Word `i` has, from its lowest bits on, the codes of dimension `i` of each part of a head; values by dimension."""
    fmt, dim = KV_FORMATS[fmt], 32
    largest = 2**fmt.bits - 1
    if fmt.is_float:
        codes = torch.randint(0, 0x78, (SIZE, dim))
        of_keys, of_values = codes.clone(), codes.clone()
        of_keys[0], of_keys[1] = 0x78, 0xF8  # 256 and -256
        of_values[:, 0] = 0x7E  # 448
        keys, values = (x.to(torch.uint8).view(torch.float8_e4m3fn).float() for x in (of_keys, of_values))
    else:
        of_keys = of_values = codes = torch.randint(0, largest + 1, (SIZE, dim))
        codes[::32], codes[1::32] = 0, largest  # so every channel's scale is 1
        codes[:, 0], codes[:, 1] = 0, largest  # and every token's is that of a power of two
        codes[1::32, :2] = torch.tensor([largest, 0])
        keys = values = codes.float()
    words = dim // fmt.parts
    found = [(of_keys, kv_codes.quantize_keys(keys, fmt).view(torch.int16)[: SIZE * words].view(SIZE, words))]
    if fmt.name != "int8":  # whose values have no zero, so that these are not their codes
        packed = kv_codes.quantize_values(values, fmt).view(torch.int16)[: SIZE * words].view(words, SIZE).T
        found.append((of_values, packed))
    for codes, packed in found:
        for part in range(fmt.parts):
            of_part = (packed.int() >> part * fmt.bits) & largest
            assert torch.equal(of_part, codes[:, part * words : (part + 1) * words].int())


def test_where_scales_lie():
    """Behind the codes: fp16 scales and zeros by group and channel; scales, zeros and a unit by token."""
    x = torch.randn(SIZE, 80) * 3
    x[32:] *= 2
    for fmt in KV_FORMATS.values():
        keys, values = kv_codes.quantize_keys(x, fmt), kv_codes.quantize_values(x, fmt)
        assert len(keys) == fmt.key_bytes(SIZE, 80) and len(values) == fmt.value_bytes(SIZE, 80)
        start = SIZE * 80 * fmt.bits // 8
        groups = x.view(-1, KEY_TOKENS[fmt.name], 80)
        scale, zero = keys[start:][: len(groups) * 320].view(torch.float16).view(2, -1, 80).float()
        low, high = groups.amin(1), groups.amax(1)
        near = {"rtol": 2e-3, "atol": 1e-3}
        if fmt.is_float:
            ends = torch.stack([(high - zero) / scale, (zero - low) / scale], -1)
            assert ((ends[..., None, :] - torch.tensor(ENDS)).abs().amax(-1).amin(-1) < 0.3).all()
        else:
            torch.testing.assert_close(zero, low, **near)
            torch.testing.assert_close(scale, (high - low) / (2**fmt.bits - 1), **near)
        unit = values[fmt.value_unit(SIZE, 80) :][:4].view(torch.float32)
        assert unit.item() == 2.0 ** torch.ceil(torch.log2(x.abs().max()))
        scales = values[start : start + SIZE * (4 if fmt.zero_values else 2)].view(torch.float16).view(-1, SIZE).float()
        if fmt.zero_values:
            torch.testing.assert_close(scales[1] * unit, x.amin(1), **near)
            torch.testing.assert_close(scales[0] * unit, (x.amax(1) - x.amin(1)) / 15, **near)
        else:
            torch.testing.assert_close(scales[0] * unit, x.abs().amax(1), **near)


@pytest.mark.parametrize("fmt, tokens", KEY_TOKENS.items())
@pytest.mark.parametrize("block_size", KV_BLOCK_SIZES)
def test_groups_of_keys_are_coded_on_their_own(fmt, tokens, block_size):
    """As in blocks of so many tokens: 32 for int4, a block's for the others."""
    fmt, dim = KV_FORMATS[fmt], 80
    tokens = block_size if tokens == SIZE else tokens
    x = torch.randn(2, block_size, dim) * torch.logspace(-2, 2, block_size)[:, None]
    whole, alone = kv_codes.quantize_keys(x, fmt), kv_codes.quantize_keys(x.unflatten(1, (-1, tokens)), fmt)
    codes, numbers = fmt.row_bytes(dim) * tokens, 2 * dim
    for start, length in ((0, codes), (codes, numbers), (codes + numbers, numbers)):  # codes, scales, zeros
        count = block_size // tokens
        wanted = alone[..., start : start + length].flatten(1)
        assert torch.equal(whole[:, start * count : (start + length) * count], wanted)
    back = kv_codes.dequantize_keys(alone, fmt, tokens, dim).flatten(1, 2)
    assert torch.equal(kv_codes.dequantize_keys(whole, fmt, block_size, dim), back)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("fmt, bar", [("int8", 0.53), ("fp8", 0.53), ("int4", 0.30)])
def test_bytes_per_token(fmt, bar, dim):
    assert KV_FORMATS[fmt].bytes_per_token(64, dim, dim) <= bar * 2 * 2 * dim


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block_size", KV_BLOCK_SIZES)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_bytes_are_what_the_format_says(fmt, block_size, dim):
    fmt, x = KV_FORMATS[fmt], torch.randn(block_size, dim)
    keys, values = kv_codes.quantize_keys(x, fmt), kv_codes.quantize_values(x, fmt)
    assert len(keys) == fmt.key_bytes(block_size, dim) and len(keys) % 16 == 0
    assert len(values) == fmt.value_bytes(block_size, dim) and len(values) % 16 == 0
    assert len(keys) + len(values) == fmt.bytes_per_token(block_size, dim, dim) * block_size


@pytest.mark.parametrize("length, end", [(1, 1), (64, 1), (128, 1), (129, 1), (192, 1), (193, 2), (256, 2), (257, 3)])
def test_end_of_codes(length, end):
    assert end_of_codes(length, 64) == end


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_q07_scales_are_each_block_s_own(name, size):
    """Two heads up to 2,000, tiny numbers, and later tokens ten times as large as all before them."""
    fmt, x = KV_FORMATS[name], torch.randn(4, 3, SIZE, 64) * size
    x[1:3] *= 2000 / x[1:3].abs().max()
    x[:, 2] *= 10
    for back, data in ((fake_keys(x, name), kv_codes.quantize_keys(x, fmt)), (fake_values(x, name), None)):
        assert back.isfinite().all()
        errors = (back - x).flatten(2).norm(dim=2) / x.flatten(2).norm(dim=2)
        assert errors.max() <= 0.07
        if data is not None:
            scales = data.view(torch.float16)[..., SIZE * 32 : SIZE * 32 + 64]
            assert (scales != 1).all() and (scales > 0).all()
