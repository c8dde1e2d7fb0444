"""Int4Linear by itself: what it computes, what moving and casting leave as it is, and its state dict."""

import copy
import io
import pickle

import fixtures
import pytest
import torch
from quantized_models import grouped, spec_of
from torch import nn
from torch.nn import functional

from hf_turbo.quantization.formats import decode, encode, gptq_spec, linear_specs, settle
from hf_turbo.quantization.int4_linear import FileLinear, Int4Linear, weight_tensors
from hf_turbo.quantization.lora import allow_int4
from hf_turbo.quantization.spec import TensorHeader
from hf_turbo.quantization.weight import GroupedWeight

N, K = 24, 64


def weight(bits=4, group_size=32, act_order=False, symmetric=False, scales_dtype=torch.float16):
    groups = -(-K // group_size)
    return GroupedWeight(
        codes=torch.randint(2**bits, (N, K), dtype=torch.uint8),
        scales=(torch.rand(groups, N) / 2**bits + 0.01).to(scales_dtype),
        zeros=None if symmetric else torch.randint(2**bits, (groups, N), dtype=torch.uint8),
        perm=torch.randperm(K, dtype=torch.int32) if act_order else None,
        bits=bits,
        group_size=group_size,
    )


def layer_of(given, bias=None):
    spec = gptq_spec(
        (N, K),
        given.bits,
        given.group_size,
        scales_dtype=given.scales.dtype,
        bias_dtype=None if bias is None else bias.dtype,
    )
    return Int4Linear.from_grouped(given, bias, spec)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits, group_size", [(2, 32), (3, 64), (4, 32), (4, 16), (4, 48), (4, K), (8, 32)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_forward_is_that_of_the_weight(bits, group_size, act_order, symmetric):
    given = weight(bits, group_size, act_order, symmetric)
    bias = torch.randn(N)
    x = torch.randn(2, 3, K)
    expected = functional.linear(x, given.dequantize(torch.float32), bias)
    torch.testing.assert_close(layer_of(given, bias)(x), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, functional.linear(x, given.dequantize(torch.float32)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_weight_comes_back_as_it_was_given(bits, act_order, symmetric):
    given = weight(bits, 48, act_order, symmetric)
    back = layer_of(given).to_grouped()
    for name in ("codes", "scales", "zeros", "perm"):
        old, new = getattr(given, name), getattr(back, name)
        assert (old is None) == (new is None) and (old is None or torch.equal(old, new)), name
    assert (back.bits, back.group_size) == (bits, 48)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_is_the_weight_rounded_once(dtype):
    given = weight(act_order=True)
    assert torch.equal(layer_of(given).dequantize(dtype), given.dequantize(dtype))


# G05: dtypes.


@pytest.mark.parametrize("scales_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype, bound", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_result_has_the_dtype_of_x(dtype, bound, scales_dtype):
    given = weight(scales_dtype=scales_dtype)
    bias = torch.randn(N, dtype=torch.float16)  # of yet another dtype
    x = torch.randn(5, K).to(dtype)
    y = layer_of(given, bias)(x)
    expected = functional.linear(x.float(), given.dequantize(torch.float32), bias.float())
    assert y.dtype == dtype
    assert (y.float() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_activations_stay_finite_where_the_result_is(dtype):
    # Each product is beyond fp16's 65504; their sum is not.
    given = GroupedWeight(
        codes=torch.tensor([[9, 7] * (K // 2)] * N, dtype=torch.uint8),
        scales=torch.full((K // 32, N), 4.0, dtype=torch.float16),
        zeros=None,
        perm=None,
        bits=4,
        group_size=32,
    )
    x = torch.full((1, K), 60000.0).to(dtype)
    y = layer_of(given)(x)
    assert y.dtype == dtype and y.isfinite().all()
    torch.testing.assert_close(y.float(), torch.zeros(1, N), atol=1.0, rtol=0)


def test_bf16_activations_of_1e5():
    given = weight()
    x = (torch.randn(4, K) * 1e5).bfloat16()
    y = layer_of(given)(x)
    expected = x.float() @ given.dequantize(torch.float32).T
    assert y.isfinite().all() and (y.float() - expected).norm() <= 1e-2 * expected.norm()


CASTS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "to": lambda module: module.to(torch.bfloat16),
    "to device and dtype": lambda module: module.to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casting_a_model_leaves_the_weight_alone(cast):
    given = weight(act_order=True)
    model = nn.Sequential(layer_of(given, torch.randn(N)), nn.Linear(N, N))
    cast(model)
    layer = model[0]
    assert layer.scales.dtype == torch.float16 and torch.equal(layer.scales, given.scales)
    assert layer.bias.dtype == model[1].weight.dtype
    assert torch.equal(layer.dequantize(torch.float32), given.dequantize(torch.float32))


def test_meta_and_back():
    given = weight()
    layer = layer_of(given, torch.randn(N))
    files = layer.state_dict()
    layer.to("meta")
    assert all(tensor.is_meta for tensor in (*layer.buffers(), *layer.parameters()))
    layer.to_empty(device="cpu")
    assert not any(tensor.is_meta for tensor in (*layer.buffers(), *layer.parameters()))
    layer.load_state_dict(files)
    assert torch.equal(layer.dequantize(torch.float32), given.dequantize(torch.float32))


def torch_saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled, torch_saved])
def test_copies(clone):
    layer = layer_of(weight(act_order=True), torch.randn(N))
    other = clone(layer)
    x = torch.randn(3, K)
    assert torch.equal(other(x), layer(x))
    assert other.qweight.data_ptr() != layer.qweight.data_ptr()
    assert other.state_dict().keys() == layer.state_dict().keys()


def test_compiles_without_a_break():
    layer = layer_of(weight(act_order=True), torch.randn(N))
    x = torch.randn(3, K)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_gradients_reach_x_and_the_bias():
    given = weight(act_order=True)
    layer = layer_of(given, torch.randn(N))
    x = torch.randn(3, K, requires_grad=True)
    layer(x).square().sum().backward()
    plain, bias = x.detach().clone().requires_grad_(), layer.bias.detach().clone().requires_grad_()
    functional.linear(plain, given.dequantize(torch.float32), bias).square().sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)
    torch.testing.assert_close(layer.bias.grad, bias.grad)


def test_there_is_no_weight():
    layer = layer_of(weight())
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match="dequantize"):
        layer.weight  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        layer.wieght  # noqa: B018


def test_repr_says_what_it_is():
    assert "in_features=64, out_features=24, bits=3, group_size=32, layout='gptq', bias=False" in repr(
        layer_of(weight(bits=3))
    )


# The state dict.


def modules_of(name):
    tensors = fixtures.tensors(name)
    headers = {key: TensorHeader(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    for module, spec in linear_specs(fixtures.quantization_config(name), headers).items():
        own = {short: tensors[f"{module}.{short}"] for short in spec.tensors}
        yield own, settle(own, spec)


@pytest.mark.parametrize("name", fixtures.NAMES)
def test_state_dict_is_the_files_and_loads(name):
    modules = list(modules_of(name))[:7]  # one decoder layer
    assert modules
    for own, spec in modules:
        bias = own.get("bias")
        layer = Int4Linear.from_grouped(decode(own, spec), bias, spec)
        saved = layer.state_dict()
        assert saved.keys() == own.keys()
        for short, tensor in own.items():
            assert saved[short].dtype == tensor.dtype and torch.equal(saved[short], tensor), short

        other = Int4Linear.from_grouped(scrambled(decode(own, spec)), None if bias is None else bias + 1, spec)
        assert not torch.equal(other.dequantize(), layer.dequantize())
        other.load_state_dict(own, strict=True)
        assert torch.equal(other.dequantize(torch.float32), layer.dequantize(torch.float32))
        assert bias is None or torch.equal(other.bias, bias)


def scrambled(given):
    perm = given.perm if given.perm is None else given.perm.flip(0)
    top = 2**given.bits - 1
    return GroupedWeight(top - given.codes, given.scales * 2, given.zeros, perm, given.bits, given.group_size)


def test_loading_writes_into_the_memory_that_is_there():
    layer, other = layer_of(weight()), layer_of(weight())
    places = [layer.qweight.data_ptr(), layer.scales.data_ptr(), layer.zeros.data_ptr()]
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.dequantize(), other.dequantize())
    assert places == [layer.qweight.data_ptr(), layer.scales.data_ptr(), layer.zeros.data_ptr()]


def test_loading_an_act_order_weight_into_one_without():
    layer, other = layer_of(weight()), layer_of(weight(act_order=True))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.dequantize(), other.dequantize())
    layer.load_state_dict(layer_of(weight()).state_dict())
    assert layer.perm is None


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda files: files.pop("0.scales"), "Missing.*0.scales"),
        (lambda files: files.update({"0.weight": torch.ones(N, K)}), "Unexpected.*0.weight"),
        (lambda files: files.update({"0.qweight": files["0.qweight"][1:]}), "0.qweight: .*belongs"),
        (lambda files: files.update({"0.scales": files["0.scales"].float()}), "0.scales: torch.float32.*belongs"),
        (lambda files: files.pop("0.bias"), "Missing.*0.bias"),
        (lambda files: files.update({"0.bias": torch.ones(N + 1)}), "0.bias: .*belongs"),
    ],
)
def test_wrong_state_dicts_are_refused(change, message):
    model = nn.Sequential(layer_of(weight(), torch.randn(N)))
    before = model[0].dequantize()
    files = nn.Sequential(layer_of(weight(), torch.randn(N))).state_dict()
    change(files)
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        model.load_state_dict(files)
    if "bias" not in message and "Unexpected" not in message:
        assert torch.equal(model[0].dequantize(), before)


# What waits for a file.


def filled(given, bias=None, **kwargs):
    layer = layer_of(given, bias)
    module = FileLinear(layer.spec, torch.float32, **kwargs)
    for name, tensor in layer.state_dict().items():
        setattr(module, name, nn.Parameter(tensor) if name == "bias" else tensor)
    return module


def test_a_file_that_was_read_becomes_the_layer():
    given, bias = weight(act_order=True), torch.randn(N)
    layer = filled(given, bias).to_int4()
    assert torch.equal(layer.dequantize(torch.float32), given.dequantize(torch.float32))
    assert torch.equal(layer.bias, bias)


def test_a_file_that_was_not_read_does_not():
    module = FileLinear(layer_of(weight()).spec, torch.float32)
    with pytest.raises(RuntimeError, match="has not been read"):
        module(torch.randn(1, K))
    with pytest.raises(RuntimeError, match="not read: qweight, qzeros"):
        module.to_int4()


def test_a_bias_of_zeros_that_the_model_lacks_is_dropped_and_saved():
    module = filled(weight(), torch.zeros(N, dtype=torch.float16), drops_zero_bias=True)
    layer = module.to_int4()
    assert layer.bias is None
    assert torch.equal(layer.state_dict()["bias"], torch.zeros(N, dtype=torch.float16))
    assert copy.deepcopy(layer).load_state_dict(layer.state_dict())
    bias = torch.randn(N, dtype=torch.float16)
    layer.load_state_dict({**layer.state_dict(), "bias": bias})
    assert torch.equal(layer.bias, bias)


def test_a_bias_that_is_not_zero_is_kept_though_the_model_lacks_one():
    bias = torch.zeros(N)
    bias[-1] = 0.5
    assert torch.equal(filled(weight(), bias, drops_zero_bias=True).to_int4().bias, bias)


def test_scales_that_a_model_keeps_in_fp32_are_stored_as_the_file_has_them():
    given = weight()
    module = filled(given)
    module.scales = module.scales.float()
    layer = module.to_int4()
    assert layer.scales.dtype == torch.float16 and torch.equal(layer.scales, given.scales)


def test_specs_of_other_layouts_are_saved_in_them():
    given = grouped(torch.randn(N, K))
    for layout in ("awq_gemm", "pack_quantized"):
        spec = spec_of(given, layout)
        layer = Int4Linear.from_grouped(given, None, spec)
        assert layer.state_dict().keys() == weight_tensors(spec).keys()
        for name, tensor in encode(given, spec).items():
            assert torch.equal(layer.state_dict()[name], tensor)


# LoRA.


@pytest.mark.filterwarnings("error:Unsupported layer type")
def test_lora_runs_and_trains():
    peft = pytest.importorskip("peft")
    base = nn.Sequential(layer_of(weight()), nn.ReLU(), nn.Linear(N, 4))
    x = torch.randn(5, K)
    before = base(x).detach()
    config = allow_int4(peft.LoraConfig(target_modules=["0"], r=2))
    model = peft.get_peft_model(copy.deepcopy(base), config)
    torch.testing.assert_close(model(x), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    assert not torch.allclose(model(x), before, atol=1e-3)
    with pytest.raises(AttributeError, match="dequantize"):
        model.merge_and_unload()


def test_lora_config_must_be_told():
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="not supported"):
        peft.get_peft_model(nn.Sequential(layer_of(weight()), nn.Linear(N, 4)), peft.LoraConfig(target_modules=["0"]))


def layer_in_order(perm):
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    weight = GroupedWeight(codes, torch.rand(2, 32).half(), None, perm.clone(), 4, 32)
    return Int4Linear.from_grouped(weight, None, gptq_spec((32, 64), 4, 32)), weight.dequantize()


def test_equal_orders_are_one_tensor_that_is_not_written_to():
    """Kernels multiply weights of one order together; a layer that loads another order leaves the others theirs."""
    # As files give them: channels of a group in order.
    perm, other = (torch.randperm(64).view(2, 32).sort(1).values.flatten().int() for _ in range(2))
    (first, _), (second, value), (third, _) = layer_in_order(perm), layer_in_order(perm), layer_in_order(other)
    assert first.perm is second.perm is not third.perm
    assert first.to(torch.bfloat16).perm is second.perm
    places = second.packed.places
    first.load_state_dict(third.state_dict())
    assert first.perm is third.perm and torch.equal(second.dequantize(), value)
    assert torch.equal(first.packed.places[first.perm.long()], torch.arange(64).int())
    assert second.packed.places is places
