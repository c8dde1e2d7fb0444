"""Linears with quantized weights on a CPU: the layout, every format against float64, and which way a product takes."""

import copy
import io

import pytest
import quantized
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_turbo.ops.int4  # noqa: F401  # defines the operators
from hf_turbo.ops import cpu_int4 as ops
from hf_turbo.ops import cpu_int4_layout as layout
from hf_turbo.ops.packed_weight import PackedWeight, has_layout_of, pack_for_device, pack_weight, unpack_weight
from hf_turbo.quantization.formats import gptq_spec
from hf_turbo.quantization.int4_linear import Int4Linear
from hf_turbo.quantization.weight import GroupedWeight

# Of the result's norm. bf16: rounding the weight to it and the result costs 0.23%, fp16 0.03%.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}

# (rows, columns, group size): the operator's own, groups that it takes as several, and what it does not take.
SHAPES = (
    (64, 128, 32), (192, 256, 64), (80, 256, 128), (144, 512, 256), (48, 192, 96), (16, 1024, 1024), (33, 64, 64),
    (64, 160, 128), (64, 96, 16), (40, 200, 48), (7, 50, 50), (1, 1, 1), (100, 33, 5),
)  # fmt: skip


def random_weight(*args, pack=pack_for_device, **kwargs):
    return quantized.random_weight(*args, pack=pack, **kwargs)


def random_x(rows, columns, dtype, mean=0.0):
    """Rows with NaN between them."""
    x = torch.full((rows, columns + 8), torch.nan, dtype=dtype)[:, :columns]
    return x.copy_(torch.randn(rows, columns) + mean)


def assert_near(out, expected, dtype):
    assert out.dtype == dtype and out.shape == expected.shape
    difference, size = (out.double() - expected).norm(), expected.norm()
    assert difference <= TOLERANCES[dtype] * size, f"off by {difference / size:.2g} of the norm"


@pytest.fixture
def multiplied(monkeypatch):
    """Shapes of x that torch's operator was called with."""
    shapes, real = [], ops._multiply

    def multiply(x, *args):
        shapes.append(tuple(x.shape))
        return real(x, *args)

    monkeypatch.setattr(ops, "_multiply", multiply)
    return shapes


@given(st.sampled_from((4, 8)), st.integers(1, 300), st.integers(1, 70), st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_the_layout_loses_nothing(bits, rows, columns, seed):
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed)).byte()
    packed = layout.pack_codes(codes, bits)
    assert packed.shape == layout.packed_shape(rows, columns, bits) and packed.dtype == torch.uint8
    assert packed.numel() == (rows + -rows % 16) * columns * bits // 8
    assert torch.equal(layout.unpack_codes(packed, bits, rows, columns), codes)


@pytest.mark.parametrize("rows", [16, 48, 64, 80, 256, 304])
def test_the_layout_is_the_operators(rows):
    codes = torch.randint(0, 16, (rows, 96), dtype=torch.uint8)
    assert torch.equal(layout.pack_codes(codes, 4), torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1))


def test_packing_in_slices(monkeypatch):
    codes = torch.randint(0, 16, (304, 32), dtype=torch.uint8)
    whole = layout.pack_codes(codes, 4)
    monkeypatch.setattr(layout, "_SLICE_CODES", 1)
    assert torch.equal(layout.pack_codes(codes, 4), whole)
    assert torch.equal(layout.unpack_codes(whole, 4, 304, 32), codes)
    sizes = [2 * part.data.numel() for part in layout.blocks_of(whole, 32, 4, 1)]
    assert max(sizes) == layout.block_rows() * 32 and sum(sizes) == codes.numel()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows, columns, group_size", SHAPES)
@pytest.mark.parametrize("zeros, perm", [(False, False), (True, False), (True, True)])
def test_every_format(rows, columns, group_size, bits, zeros, perm):
    weight, values = random_weight(rows, columns, group_size, bits, zeros, perm)
    for dtype in TOLERANCES:
        assert torch.equal(ops.dequantize(weight, columns, dtype), values.float().to(dtype))
        for count in (1, 5, 70):
            x = random_x(count, columns, dtype)
            assert_near(ops.linear(x, weight, None), x.double() @ values.t(), dtype)


@pytest.mark.parametrize("has_matrix_units", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_ways_of_bf16_agree(monkeypatch, has_matrix_units, bits):
    monkeypatch.setattr(ops, "_has_matrix_units", lambda: has_matrix_units)
    weight, values = random_weight(80, 256, 64, bits, zeros=True)
    for count in (0, 1, 16, 17, 40, 41, 64, 65, 128):
        x = random_x(count, 256, torch.bfloat16)
        assert_near(ops.linear(x, weight, None), x.double() @ values.t(), torch.bfloat16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_activations_with_a_mean(bits, zeros):
    weight, values = random_weight(256, 1024, 64, bits, zeros)
    for dtype in TOLERANCES:
        x = random_x(4, 1024, dtype, mean=3.0)
        assert_near(ops.linear(x, weight, None), x.double() @ values.t(), dtype)


def test_large_activations_stay_finite():
    weight, values = random_weight(64, 128, 64)
    for dtype, largest in ((torch.bfloat16, 1e5), (torch.float16, 6e3)):
        x = torch.full((1, 128), largest, dtype=dtype)
        expected = x.double() @ values.t()
        assert expected.to(dtype).isfinite().all()
        assert_near(ops.linear(x, weight, None), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_other_dtypes(dtype):
    weight, values = random_weight(64, 128, 32, zeros=True, dtype=dtype)
    x = random_x(3, 128, torch.float32)
    assert_near(ops.linear(x, weight, None), x.double() @ values.t(), torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("count", [1, 30, 100])
def test_tiles(monkeypatch, dtype, count):
    weight, values = random_weight(208, 96, 32, zeros=True)
    x = random_x(count, 96, dtype)
    monkeypatch.setattr(ops, "_TILE_VALUES", 1)
    assert_near(ops.linear(x, weight, None), x.double() @ values.t(), dtype)
    assert torch.equal(ops.dequantize(weight, 96, torch.float32), values.float())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_what_is_folded_in(dtype):
    (gate, gate_values), (up, up_values) = pair = [random_weight(48, 128, 64, zeros=True) for _ in range(2)]
    x, biases = random_x(3, 128, dtype), [torch.randn(48), torch.randn(48).to(dtype)]
    left = x.double() @ gate_values.t() + biases[0].double()
    right = x.double() @ up_values.t() + biases[1].double()
    weights = [weight for weight, _ in pair]
    assert_near(ops.int4_linear(x, weights, biases), torch.cat((left, right), 1), dtype)
    gated = torch.nn.functional.silu(left.to(dtype)) * right.to(dtype)  # rounded where torch would
    gated_by_us = ops.int4_linear(x, weights, biases, activation="silu")
    torch.testing.assert_close(gated_by_us, gated, rtol=4 * TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])
    residual = torch.randn(3, 48).to(dtype)
    assert_near(ops.int4_linear(x, [gate], biases[:1], residual=residual), left + residual.double(), dtype)
    assert_near(ops.int4_linear(x, [up], [biases[1]]), right, dtype)
    assert_near(ops.int4_linear(x, [up]), x.double() @ up_values.t(), dtype)


def test_outputs_in_other_places():
    weight, _ = random_weight(64, 128, 32)
    x, places = random_x(2, 128, torch.float32), torch.randperm(64).int()
    plain, placed = ops.int4_linear(x, [weight]), ops.int4_linear(x, [weight], places=places)
    assert torch.equal(placed[:, places.long()], plain) and not torch.equal(placed, plain)


def test_torchs_operator_is_for_few_rows_of_bf16(multiplied):
    weight, _ = random_weight(64, 128, 32)
    for dtype in TOLERANCES:
        for count in (1, 40, 500):
            ops.linear(random_x(count, 128, dtype), weight, None)
    assert multiplied == [(1, 128), (40, 128)]
    ops.linear(random_x(2, 128, torch.bfloat16), random_weight(64, 128, 32, bits=8)[0], None)
    assert multiplied.pop() == (2, 256)
    for shape in SHAPES:
        ops.linear(random_x(1, shape[1], torch.bfloat16), random_weight(*shape)[0], None)
    assert [columns for _, columns in multiplied[2:]] == [columns for _, columns, _ in SHAPES[:8]]


def test_scales_that_change_are_noticed(multiplied):
    weight, values = random_weight(64, 128, 32, zeros=True)
    x = random_x(1, 128, torch.bfloat16)
    ops.linear(x, weight, None)
    weight.scales.mul_(2)
    assert_near(ops.linear(x, weight, None), x.double() @ (2 * values).t(), torch.bfloat16)
    other = PackedWeight(weight.qweight, weight.scales / 2, weight.zeros.clone(), None, 4, 32)
    assert_near(ops.linear(x, other, None), x.double() @ values.t(), torch.bfloat16)
    other.zeros.fill_(0)
    shifted = ops.dequantize(other, 128, torch.float64)
    assert not torch.allclose(shifted, values)
    assert_near(ops.linear(x, other, None), x.double() @ shifted.t(), torch.bfloat16)
    assert len(multiplied) == 4


def test_the_kernels_layout_is_read_too():
    for bits in (4, 8):
        weight, values = random_weight(40, 200, 48, bits, zeros=True, perm=True, pack=pack_weight)
        assert weight.qweight.dtype == torch.int32
        x = random_x(3, 200, torch.float32)
        assert_near(ops.linear(x, weight, None), x.double() @ values.t(), torch.float32)
        assert torch.equal(ops.dequantize(weight, 200, torch.float32), values.float())


def test_unpack_weight_knows_both_layouts():
    torch.manual_seed(0)
    ours, _ = random_weight(40, 200, 48, zeros=True, perm=True)
    torch.manual_seed(0)
    kernels, _ = random_weight(40, 200, 48, zeros=True, perm=True, pack=pack_weight)
    assert has_layout_of(ours.qweight, torch.device("cpu")) and has_layout_of(kernels.qweight, torch.device("cuda"))
    assert not has_layout_of(ours.qweight, torch.device("cuda"))
    for one, other in zip(unpack_weight(ours, 200), unpack_weight(kernels, 200), strict=True):
        assert torch.equal(one, other)


def test_operators():
    weight, values = random_weight(24, 96, 32, zeros=True, perm=True)
    tensors = weight.qweight, weight.scales, weight.zeros, weight.perm
    x = torch.randn(2, 3, 96, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    out = torch.ops.hf_turbo.int4_linear(x, *tensors, bias, 4, 32)
    torch.testing.assert_close(out, (x.double() @ values.t() + bias).float(), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    slope = 2 * out.detach().double()
    torch.testing.assert_close(x.grad, (slope @ values).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias.grad, slope.sum((0, 1)).float(), rtol=1e-4, atol=1e-4)
    torch.library.opcheck(
        torch.ops.hf_turbo.int4_linear,
        (torch.randn(2, 96, requires_grad=True), *tensors, None, 4, 32),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def layer_of(rows=48, columns=128, group_size=32, bits=4):
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    scales = (torch.rand(columns // group_size, rows) / columns**0.5).half()
    weight = GroupedWeight(codes, scales, None, None, bits, group_size)
    layer = Int4Linear.from_grouped(weight, None, gptq_spec((rows, columns), bits, group_size))
    return layer, weight.dequantize(torch.float32).double()


@torch.no_grad()
def test_a_layer_gets_the_layout_of_its_device():
    layer, values = layer_of()
    file, codes = layer.state_dict(), layer.qweight
    assert codes.dtype == torch.uint8 and layer.double().qweight is codes
    grouped = layer.to_grouped()
    as_moved_here = pack_weight(grouped.codes, grouped.scales, grouped.zeros, grouped.perm, 4, 32)
    layer.qweight = as_moved_here.qweight
    layer.float()  # what ends a move between devices
    assert torch.equal(layer.qweight, codes)
    assert all(torch.equal(file[name], tensor) for name, tensor in layer.state_dict().items())
    x = random_x(2, 128, torch.bfloat16)
    assert_near(layer(x), x.double() @ values.t(), torch.bfloat16)
    assert layer.to("meta").qweight.is_meta


@torch.no_grad()
@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_a_layer_that_loads_other_tensors(in_inference_mode):
    with torch.inference_mode(in_inference_mode):
        (layer, _), (other, values) = layer_of(), layer_of()
        x = random_x(1, 128, torch.bfloat16)
        layer(x)
        layer.load_state_dict(other.state_dict())
        assert_near(layer(x), x.double() @ values.t(), torch.bfloat16)


@torch.no_grad()
def test_copies_of_a_layer_that_has_run(monkeypatch):
    layer, values = layer_of()
    x = random_x(1, 128, torch.bfloat16)
    layer(x)
    copied = copy.deepcopy(layer)
    copied.scales.mul_(2)
    assert_near(copied(x), x.double() @ (2 * values).t(), torch.bfloat16)
    assert_near(layer(x), x.double() @ values.t(), torch.bfloat16)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert_near(torch.load(file, weights_only=False)(x), x.double() @ values.t(), torch.bfloat16)
    file.seek(0)
    monkeypatch.setattr("hf_turbo.quantization.int4_linear.block_rows", lambda: 48)
    with pytest.raises(RuntimeError, match="CPU of another kind"):
        torch.load(file, weights_only=False)
