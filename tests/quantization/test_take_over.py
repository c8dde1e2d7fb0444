"""Modules of other libraries, known by what they hold: here stand-ins for gptqmodel's and compressed-tensors'."""

from types import SimpleNamespace

import fixtures
import pytest
import torch
from foreign import ForeignLinear, K, N, foreign
from torch import nn
from torch.nn import functional

from hf_turbo.quantization import take_over as module_of_take_over
from hf_turbo.quantization.formats import decode, gptq_spec
from hf_turbo.quantization.int4_linear import Int4Linear
from hf_turbo.quantization.take_over import take_over


def model_of(module):
    return nn.ModuleDict({"block": nn.ModuleDict({"proj": module}), "head": nn.Linear(4, 4)})


CASES = {
    "v2": dict(v2=True),
    "v1": dict(v2=False),
    "act_order": dict(act_order=True),
    "awq": dict(layout="awq_gemm"),
    "gemv": dict(layout="awq_gemv"),
    "bf16 only": dict(dtype=torch.bfloat16),
    "fp32 only": dict(dtype=torch.float32),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_what_computes_the_same_is_replaced(case, bias):
    module = foreign(**case, bias=nn.Parameter(torch.randn(N)) if bias else None)
    wanted, held = module.weight_now(), {name: tensor.clone() for name, tensor in module.named_buffers()}
    model = model_of(module)
    taken = take_over(model)
    layer = model["block"]["proj"]
    assert taken.layers == {"block.proj": layer} and isinstance(layer, Int4Linear) and not taken.left
    assert torch.equal(layer.dequantize(torch.float32), wanted)
    assert (layer.bias is module.bias) if bias else layer.bias is None
    assert all(tensor.numel() == 0 for tensor in module.buffers())  # nothing is held twice

    taken.undo(model)
    assert model["block"]["proj"] is module and not taken.layers
    back = dict(module.named_buffers())
    assert back.keys() == held.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in held.items())


def test_random_numbers_are_the_users():
    model = model_of(foreign())
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    take_over(model)
    assert torch.equal(torch.random.get_rng_state(), before)


def rebinds(module):
    module.qweight, module.scales = module.qweight.flip(0).to(torch.int64), module.scales.bfloat16()
    del module.qzeros
    module.rearranged = module.qweight * 2


def sets_data(module):
    module.qweight.data = module.qweight.flip(0)
    module.ready = True


class Rearranges(ForeignLinear):
    """As gptqmodel's for a CPU does when it is first called."""

    ready = False

    def forward(self, x):
        if not self.ready:
            self.dense = self.weight_now()
            self.ready = True
            self.rearrange()
        return functional.linear(x.float(), self.dense).to(x.dtype)


@pytest.mark.parametrize("rearrange", [rebinds, sets_data])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_what_the_first_call_does_is_undone(rearrange, left, hooked):
    module = foreign()
    module.__class__ = Rearranges
    module.rearrange = lambda: rearrange(module)
    if hooked:  # a forward that has a module of its own
        module.forward = module.forward
    if left:
        shifted(module)
    held, attributes = {name: x.clone() for name, x in module.named_buffers()}, set(vars(module))
    model, x = model_of(module), torch.randn(3, K)
    taken = take_over(model)
    assert bool(taken.left) == left
    taken.undo(model)
    back = dict(module.named_buffers())
    assert back.keys() == held.keys() and all(torch.equal(back[name], tensor) for name, tensor in held.items())
    assert set(vars(module)) == attributes and not module.ready
    wanted = x @ module.weight_now().T
    torch.testing.assert_close(model["block"]["proj"](x), wanted)


def shuffled(module):
    """As kernels lay codes out: the same shape, another order."""
    module.qweight = module.qweight.flip(1)


def shifted(module):
    module.weight_now = lambda: type(module).weight_now(module).roll(1, dims=0)


def without_sizes(module):
    del module.group_size


def onto_meta(module):
    module.to("meta")


def adapted(module):
    forward = module.forward
    module.forward = lambda x: forward(x) * 1.1


@pytest.mark.parametrize(
    "change, reason",
    [
        (shifted, "does not compute what it computes itself"),
        (adapted, "does not compute what it computes itself"),
        (without_sizes, "how many bits"),
        (onto_meta, "meta device"),
    ],
)
def test_what_does_not_is_left_with_a_reason(change, reason):
    module = foreign()
    change(module)
    model = model_of(module)
    held = dict(module.named_buffers())
    taken = take_over(model)
    assert not taken.layers and model["block"]["proj"] is module
    assert reason in taken.left["block.proj"]
    assert all(tensor is held[name] for name, tensor in module.named_buffers())


def test_codes_in_a_kernels_order_are_not_believed():
    module = foreign()
    weight = module.weight_now()
    shuffled(module)
    module.weight_now = lambda: weight
    assert "block.proj" in take_over(model_of(module)).left


UP = "model.layers.0.mlp.up_proj"


class Kernel(ForeignLinear):
    """Computes what it should from tensors in an order of its own."""

    def __init__(self, name, gain=1.0):
        own = {key[len(UP) + 1 :]: value for key, value in fixtures.tensors(name).items() if key.startswith(f"{UP}.")}
        spec = gptq_spec((256, 128), 4, 32)
        dense = decode(own, spec).dequantize(torch.float32) * gain
        super().__init__({**own, "qweight": own["qweight"].flip(1)}, spec)
        self.weight_now = lambda: dense


def model_in(folder, module):
    model = nn.Module()
    model.config = SimpleNamespace(name_or_path=str(folder))
    model.add_module("model", nn.Module())
    model.model.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": module})})])
    return model


@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_read_in_memory_is_read_from_the_folder(named, tmp_path):
    name = "gptq_sym_g32"
    folder = fixtures.checkpoint(name, tmp_path)
    module = Kernel(name)
    model = model_in("no folder" if named else folder, module)
    held = {key: tensor.clone() for key, tensor in module.named_buffers()}
    taken = take_over(model, folder if named else None)
    assert not taken.left
    assert fixtures.sha256(model.get_submodule(UP).dequantize()) == fixtures.dequantized_sha256(name)[UP]
    taken.undo(model)
    assert model.get_submodule(UP) is module
    assert all(torch.equal(tensor, held[key]) for key, tensor in module.named_buffers())


@pytest.mark.parametrize("fault", ["other weights", "no folder", "not quantized", "damaged"])
def test_folders_that_do_not_help(fault, tmp_path):
    folder = fixtures.checkpoint("gptq_sym_g32", tmp_path)
    if fault == "no folder":
        folder = tmp_path / "nowhere"
    elif fault == "not quantized":
        (folder / "config.json").write_text("{}")
        (folder / "quantize_config.json").unlink()
    elif fault == "damaged":
        (folder / "model.safetensors").write_bytes(b"12345678901234567890")
    module = Kernel("gptq_sym_g32", gain=1.2 if fault == "other weights" else 1.0)
    model = model_in(folder, module)
    taken = take_over(model)
    assert taken.left.keys() == {UP} and model.get_submodule(UP) is module


def test_other_modules_are_not_looked_at():
    plain = nn.Linear(4, 4)
    plain.forward = lambda x: pytest.fail("was called")
    taken = take_over(nn.Sequential(plain))
    assert not taken.layers and not taken.left


@pytest.mark.parametrize("name", ["ct_gptq_asym_g32", "ct_gptq_sym_g32", "ct_rtn_channel"])
def test_packed_tensors_of_compressed_tensors(name):
    """A linear whose weight is still packed; calling it would unpack it."""
    module = "model.layers.0.mlp.up_proj"
    given = fixtures.quantization_config(name)["config_groups"]["group_0"]["weights"]
    linear = nn.Linear(128, 256, bias=False)
    del linear.weight
    for key, tensor in fixtures.tensors(name).items():
        if key.startswith(f"{module}."):
            linear.register_parameter(key[len(module) + 1 :], nn.Parameter(tensor, requires_grad=False))
    linear.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(**given))
    linear.forward = lambda x: pytest.fail("was called")
    model = nn.Sequential(linear)
    held = dict(linear.named_parameters())
    taken = take_over(model)
    assert not taken.left
    assert fixtures.sha256(model[0].dequantize()) == fixtures.dequantized_sha256(name)[module]
    taken.undo(model)
    assert model[0] is linear
    assert all(torch.equal(tensor, held[key]) for key, tensor in linear.named_parameters())
    assert all(tensor.numel() for tensor in linear.parameters())


def test_under_two_names():
    """PEFT holds the layer that it adapts under two."""
    module = foreign()
    model = nn.ModuleDict({"a": nn.ModuleDict({"base": module, "same": module}), "b": module})
    taken = take_over(model)
    assert list(taken.layers) == ["a.base"]
    assert model["a"]["base"] is model["a"]["same"] is model["b"] is taken.layers["a.base"]
    taken.undo(model)
    assert model["a"]["base"] is model["a"]["same"] is model["b"] is module


def test_undone_where_the_layer_is_by_now():
    module, gone = foreign(), foreign()
    held = {name: tensor.clone() for name, tensor in gone.named_buffers()}
    model = nn.ModuleDict({"proj": module, "other": gone})
    taken = take_over(model)
    wrapper = nn.Sequential(model["proj"], nn.ReLU())
    model["proj"], model["other"] = wrapper, nn.Identity()
    taken.undo(model)
    assert model["proj"] is wrapper and wrapper[0] is module and isinstance(model["other"], nn.Identity)
    assert all(torch.equal(tensor, held[name]) for name, tensor in gone.named_buffers())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_on_the_way_is_undone(error, monkeypatch):
    modules = [foreign(), foreign(bias=nn.Parameter(torch.randn(N)))]
    held = [{name: tensor.clone() for name, tensor in module.named_buffers()} for module in modules]
    model, calls = nn.ModuleList(modules), []
    read = module_of_take_over._read

    def second_fails(module):
        calls.append(module)
        if len(calls) == 2:
            raise error
        return read(module)

    monkeypatch.setattr(module_of_take_over, "_read", second_fails)
    with pytest.raises(error):
        take_over(model)
    assert calls == modules and list(model) == modules
    for module, tensors in zip(modules, held):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in module.named_buffers())
