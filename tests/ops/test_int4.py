"""Linears with quantized weights: the layout, the kernels against float64, and what torch sees of the operators."""

import dataclasses
import itertools

import pytest
import quantized
import torch
from combinations import few
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_turbo.ops.int4  # noqa: F401  # defines the operators
from hf_turbo.ops import int4_linear as ops
from hf_turbo.ops import reference_int4 as reference
from hf_turbo.ops.attention_config import DeviceFacts
from hf_turbo.ops.int4_config import Int4Config, choose_config
from hf_turbo.ops.int4_layout import pack_codes, packed_shape, unit_columns, unpack_codes
from hf_turbo.ops.packed_weight import PackedWeight, pack_weight, unpack_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
H200 = DeviceFacts(132, 90, 232448)


def random_weight(*args, **kwargs):
    return quantized.random_weight(*args, pack=pack_weight, device=DEVICE, **kwargs)


def check(rows, weights, dtype, biases=None, residual=False, activation=None, config=None):
    columns = weights[0][1].shape[1]
    x = torch.full((rows, columns + 8), torch.nan, dtype=dtype, device=DEVICE)[:, :columns]
    x.copy_(torch.randn(rows, columns))
    packed, values = [w[0] for w in weights], [w[1] for w in weights]
    vectors = None if biases is None else [torch.randn(len(v), device=DEVICE).to(dtype) if b == "y" else None
                                           for v, b in zip(values, biases, strict=True)]  # fmt: skip
    added = torch.randn(rows, len(values[0]), device=DEVICE).to(dtype) if residual else None
    out = ops.int4_linear(x, packed, vectors, residual=added, activation=activation, config=config)
    expected = rounded_where_torch_would(linear_in_float64(x, values, vectors, dtype), added, activation)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def linear_in_float64(x, values, biases, dtype):
    biases = [None] * len(values) if biases is None else biases
    products = (x.double() @ v.t() for v in values)
    return [(p if b is None else p + b.double()).to(dtype) for p, b in zip(products, biases, strict=True)]


def rounded_where_torch_would(parts, residual, activation):
    if activation is not None:
        return torch.nn.functional.silu(parts[0]) * parts[1]
    out = torch.cat(parts, 1)
    return out if residual is None else residual + out


@given(st.sampled_from((4, 8)), st.integers(1, 70), st.integers(1, 200), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_the_layout_loses_nothing(bits, rows, columns, seed):
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed)).byte()
    packed = pack_codes(codes, bits)
    assert packed.shape == packed_shape(rows, columns, bits) and packed.dtype == torch.int32
    assert torch.equal(unpack_codes(packed, bits, rows, columns), codes)


def test_a_code_lies_where_the_page_says():
    codes = torch.randint(0, 16, (32, 128), dtype=torch.uint8)
    words = pack_codes(codes, 4)
    bits = itertools.product(range(2), range(2), range(8), range(4), *[range(2)] * 5)
    for down, across, row, thread, third, second, first, half, part in bits:
        word = int(words[down, across, (row * 4 + thread) * 4 + 2 * part + third])
        code = word >> (16 * first + 4 * (2 * second + half)) & 15
        column = 64 * across + 32 * part + 8 * thread + 4 * third + 2 * second + first
        assert code == codes[16 * down + 8 * half + row, column]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [5, 16, 32, 48, 64, 96, 100, 128, 200, 256])
@pytest.mark.parametrize("zeros, perm", [(False, False), (True, True)])
def test_pack_weight(bits, group_size, zeros, perm):
    weight, values = random_weight(24, 200, group_size, bits, zeros, perm)
    columns = weight.stored_columns(200)
    assert weight.group_size in (32, 64) or weight.group_size % 128 == 0
    assert columns <= weight.group_size * len(weight.scales)
    torch.testing.assert_close(reference.dequantize(weight, 200, torch.float64), values, rtol=1e-6, atol=1e-9)
    codes, order = unpack_weight(weight, 200)
    again = pack_weight(codes, weight.scales, weight.zeros, order, bits, group_size)
    assert torch.equal(again.qweight, weight.qweight)
    assert (order is not None) == perm


@pytest.mark.parametrize("dtype, bits, group_size", few(TOLERANCES, [4, 8], [32, 64, 128, 256], together=2), ids=str)
def test_dequantize(dtype, bits, group_size):
    for zeros in (False, True):
        weight, _ = random_weight(40, 200, group_size, bits, zeros)
        expected = reference.dequantize(weight, 200, dtype)
        # Triton's interpreter cuts bf16 off in place of rounding.
        inexact = dtype == torch.bfloat16 and DEVICE == "cpu"
        torch.testing.assert_close(ops.dequantize(weight, 200, dtype), expected, rtol=2**-7 if inexact else 0, atol=0)


def test_dequantize_orders_columns():
    weight, _ = random_weight(40, 200, 40, zeros=True, perm=True)
    assert torch.equal(ops.dequantize(weight, 200, torch.float16), reference.dequantize(weight, 200, torch.float16))


STREAM = Int4Config(stream=True, strips=1, units=2, shares=2, num_warps=2, ahead=True)


#: Bits, group size, with zero points, in an order of their own.
FORMATS_OF_FEW_ROWS = [
    (4, 32, False, False), (4, 32, True, False), (4, 64, True, True), (4, 128, False, False), (4, 128, True, False),
    (4, 48, False, True), (4, 300, True, False), (8, 32, False, True), (8, 64, True, False), (8, 128, False, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype, quantization", few(TOLERANCES, FORMATS_OF_FEW_ROWS), ids=str)
def test_few_rows(dtype, quantization):
    bits, group_size, zeros, perm = quantization
    cases = [(1, 256, True), (11, 300, False), (11, 256, True), (1, 300, False)]
    # Triton's interpreter is slow: half of the cases there.
    for rows, columns, ahead in cases if DEVICE == "cuda" else cases[:2]:
        weight = random_weight(24, columns, group_size, bits, zeros, perm)
        step = 2 if group_size > 64 or bits == 4 else 1
        check(rows, [weight], dtype, config=dataclasses.replace(STREAM, ahead=ahead, units=step))


@pytest.mark.parametrize("strips, shares, units", [(1, 4, 1), (2, 2, 2), (4, 1, 4), (1, 8, 2)])
def test_shapes_of_programs(strips, shares, units):
    weights = [random_weight(n, 640, group_size=128, zeros=True) for n in (40, 16, 33)]
    config = Int4Config(True, strips, units, shares, num_warps=shares)
    check(3, weights, torch.float16, biases="yny", config=config)


FORMATS_OF_MORE_ROWS = [
    (4, 32, True, False), (4, 64, False, True), (4, 128, True, False), (8, 32, False, False), (8, 128, True, True),
]  # fmt: skip


@pytest.mark.parametrize("dtype, quantization", few(TOLERANCES, FORMATS_OF_MORE_ROWS), ids=str)
def test_more_rows(dtype, quantization):
    bits, group_size, zeros, perm = quantization
    for columns, shares in ((256, 1), (300, 3))[:: 1 if DEVICE == "cuda" or zeros else -2]:
        weight = random_weight(70, columns, group_size, bits, zeros, perm)
        check(20, [weight], dtype, config=Int4Config(False, 4, 1, shares, 4, num_stages=2))


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_what_is_folded_in(rows):
    pair = [random_weight(48, 128, zeros=True) for _ in range(2)]
    check(rows, pair, torch.float16, activation="silu")
    check(rows, pair, torch.float16, biases="yy", activation="silu")
    check(rows, pair[:1], torch.float16, biases="y", residual=True)
    check(rows, [*pair, random_weight(20, 128, zeros=True)], torch.float16, biases="nyn")


@pytest.mark.parametrize("last_first, pairs", few([False, True], [False, True]))
def test_what_other_versions_of_triton_prefer(monkeypatch, pairs, last_first):
    monkeypatch.setattr(ops, "K_IN_PAIRS", pairs)
    monkeypatch.setattr(ops, "LAST_FIRST", last_first)
    weight = random_weight(40, 300, 32, zeros=True)
    check(3, [weight], torch.float16, config=Int4Config(True, 2, 2, 2, 2))
    check(11, [weight], torch.float32, config=STREAM)
    check(20, [weight], torch.float16, config=Int4Config(False, 4, 1, 2, 4, num_stages=2))
    check(70, [weight], torch.float16)


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_weights_with_orders_of_their_own(rows):
    check(rows, [random_weight(32, 128, perm=True) for _ in range(3)], torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_other_dtypes(dtype):
    check(2, [random_weight(32, 128, dtype=dtype)], torch.float32, config=STREAM)


def test_large_activations_stay_finite():
    weight, values = random_weight(32, 128)
    x = torch.full((1, 128), 6e4, device=DEVICE)
    expected = (x.double() @ values.t()).to(torch.bfloat16)
    assert expected.isfinite().all()
    torch.testing.assert_close(ops.int4_linear(x.bfloat16(), [weight]), expected, rtol=2e-2, atol=2e-2 * 6e4 / 128)


@pytest.mark.parametrize("change, message", [
    (dict(residual=torch.zeros(1, 3)), "a residual takes one weight"),
    (dict(activation="relu"), "activation must be None or one of"),
    (dict(activation="silu"), "two weights of one size"),
    (dict(biases=[torch.zeros(3)]), "a bias must be"),
    (dict(x=torch.zeros(1, 128).double()), "fp32, fp16 or bf16"),
    (dict(weights=[]), "1 to 3 weights"),
    (dict(x=torch.zeros(1, 300)), "x has 300 columns"),
])  # fmt: skip
def test_bad_input(change, message):
    weight, _ = random_weight(32, 128)
    x = torch.zeros(1, 128, device=DEVICE)
    options = {"x": x, "weights": [weight]} | change
    with pytest.raises(ValueError, match=message):
        ops.int4_linear(**options)


def test_weights_of_two_formats():
    weights = [random_weight(32, 128)[0], random_weight(32, 128, group_size=64)[0]]
    with pytest.raises(ValueError, match="same bits, groups"):
        ops.int4_linear(torch.zeros(1, 128, device=DEVICE), weights)


def arguments(weight):
    return weight.qweight, weight.scales, weight.zeros, weight.perm


def test_operators():
    weight, values = random_weight(24, 96, zeros=True, perm=True)
    x = torch.randn(2, 3, 96, device=DEVICE, requires_grad=True)
    bias = torch.randn(24, device=DEVICE, requires_grad=True)
    out = torch.ops.hf_turbo.int4_linear(x, *arguments(weight), bias, 4, weight.group_size)
    torch.testing.assert_close(out, (x.double() @ values.t() + bias).float(), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    slope = 2 * out.detach().double()
    torch.testing.assert_close(x.grad, (slope @ values).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias.grad, slope.sum((0, 1)).float(), rtol=1e-4, atol=1e-4)
    dense = torch.ops.hf_turbo.int4_dequantize(*arguments(weight), 4, weight.group_size, 96, torch.float32)
    torch.testing.assert_close(dense, values.float(), rtol=1e-6, atol=1e-9)


def test_operators_have_shapes_without_data():
    weight, _ = random_weight(24, 96)
    fake = PackedWeight(weight.qweight.to("meta"), weight.scales.to("meta"), None, None, 4, 32)
    x = torch.empty(2, 3, 96, device="meta", dtype=torch.bfloat16)
    out = torch.ops.hf_turbo.int4_linear(x, *arguments(fake), None, 4, 32)
    assert out.shape == (2, 3, 24) and out.dtype == torch.bfloat16
    torch.library.opcheck(
        torch.ops.hf_turbo.int4_linear,
        (torch.randn(2, 96, device=DEVICE, requires_grad=True), *arguments(weight), None, 4, 32),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64])
@pytest.mark.parametrize("bits, group_size", [(4, 32), (4, 64), (4, 128), (4, 384), (8, 32), (8, 128)])
def test_the_table_has_steps_that_groups_fit(rows, bits, group_size):
    shapes = ((4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (576, 1536, False))
    for features, columns, gated in shapes:
        config = choose_config(rows, features, columns, gated, bits, group_size, torch.bfloat16, H200)
        step = config.units * unit_columns(bits)
        assert step % group_size == 0 or group_size % step == 0
        assert config.num_warps <= 8 and config.pdl
