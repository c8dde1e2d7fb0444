"""Mixtures of experts: checkpoints have an expert's linears one by one, Transformers' classes hold them merged."""

import pytest
import torch
from combinations import few
from loaded import change_files, change_model_config, load
from quantized_models import write
from safetensors.torch import load_file
from tiny_models import build
from torch import nn

from hf_turbo.quantization.int4_experts import Int4Experts
from hf_turbo.quantization.int4_linear import FileLinear, Int4Linear

pytestmark = pytest.mark.usefixtures("registered")

LAYOUTS = ["gptq", "awq_gemm", "pack_quantized"]
IDS = torch.arange(3, 27).view(2, 12)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("name, layout", few(["mixtral", "qwen2_moe", "olmoe"], LAYOUTS))
def test_experts_are_those_of_the_checkpoint(name, layout, tmp_path):
    folder, twin = write(build(name), tmp_path, layout)
    model, info = load(folder, output_loading_info=True)
    assert not any(info.values()), info
    experts = [module for module in model.modules() if isinstance(module, Int4Experts)]
    assert len(experts) == 2
    for module in experts:
        linears = [layer for layer in module.modules() if isinstance(layer, Int4Linear)]
        assert len(linears) == 3 * module.num_experts
    assert not any(isinstance(module, FileLinear) for module in model.modules())
    torch.testing.assert_close(logits(model), logits(load(twin)), atol=1e-5, rtol=1e-5)

    model.save_pretrained(tmp_path / "saved")
    read, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert read.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in read.items())
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


def test_routers_stay_as_they_are(tmp_path):
    folder, _ = write(build("mixtral"), tmp_path)
    model = load(folder)
    read = load_file(folder / "model.safetensors")
    routers = {key: tensor for key, tensor in read.items() if key.endswith("gate.weight")}
    assert len(routers) == 2
    for (_, tensor), layer in zip(sorted(routers.items()), model.model.layers):
        assert torch.equal(layer.mlp.gate.weight, tensor)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_other_dtypes(dtype, bound, tmp_path):
    folder, twin = write(build("mixtral"), tmp_path)
    model = load(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    out, expected = logits(model), logits(load(twin, dtype=dtype))
    assert out.dtype == dtype
    # A near tie between two experts can fall the other way: most tokens, not all.
    error = (out.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert (error < bound).float().mean() > 0.9


def test_experts_of_some_layers_only(tmp_path):
    """The others stay merged, and are saved one by one as they came."""
    folder, twin = write(build("mixtral"), tmp_path, "pack_quantized", linears=r"layers\.0\..*\.w[123]\.weight$")
    model, info = load(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(model.model.layers[0].mlp.experts, Int4Experts)
    assert isinstance(model.model.layers[1].mlp.experts.gate_up_proj, nn.Parameter)
    torch.testing.assert_close(logits(model), logits(load(twin)), atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    read, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert read.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in read.items())


def test_experts_that_no_token_chose_are_not_run(tmp_path):
    folder, _ = write(build("mixtral"), tmp_path)
    experts = load(folder).model.layers[0].mlp.experts
    x = torch.randn(3, 32)
    chosen, weights = torch.tensor([[0, 2], [2, 0], [0, 7]]), torch.rand(3, 2)  # 7: no expert, left out
    experts.get_submodule("1.w2").qweight.fill_(-1)
    called = []
    for index in range(experts.num_experts):
        experts.get_submodule(f"{index}.w2").register_forward_hook(lambda *_, index=index: called.append(index))
    out = experts(x, chosen, weights)
    assert called == [0, 2] and out.isfinite().all()
    alone = experts(x[2:], chosen[2:, :1], weights[2:, :1])
    torch.testing.assert_close(out[2:], alone)


def merge_experts(tensors):
    """Renames the experts to something that no conversion of the model's knows."""
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name.replace(".experts.", ".specialists.")] = tensors.pop(name)


def one_short(tensors):
    for name in [name for name in tensors if ".0.block_sparse_moe.experts.1.w3." in name]:
        del tensors[name]


def plain_expert(tensors):
    one_short(tensors)
    tensors["model.layers.0.block_sparse_moe.experts.1.w3.weight"] = torch.ones(48, 32)


@pytest.mark.parametrize(
    "change, message", [(merge_experts, "specialists"), (one_short, "1.w3"), (plain_expert, "1.w3")]
)
def test_experts_that_do_not_fit_are_refused_by_name(change, message, tmp_path, monkeypatch):
    folder, _ = write(build("mixtral"), tmp_path)
    change_files(folder, change)
    monkeypatch.setattr(FileLinear, "__init__", lambda *_, **__: pytest.fail("a module was replaced"))
    with pytest.raises(NotImplementedError, match=message):
        load(folder)


def test_experts_of_another_size_are_refused(tmp_path):
    folder, _ = write(build("mixtral"), tmp_path)
    change_model_config(folder, intermediate_size=64)
    with pytest.raises(ValueError, match="in the checkpoint"):
        load(folder)


def test_dequantized_experts_are_saved_and_merged_again(tmp_path):
    folder, twin = write(build("mixtral"), tmp_path)
    plain = load(folder).dequantize()
    assert not any(isinstance(module, Int4Linear) for module in plain.modules())
    torch.testing.assert_close(logits(plain), logits(load(twin)), atol=1e-5, rtol=1e-5)
    plain.save_pretrained(tmp_path / "plain")
    assert torch.equal(
        load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.block_sparse_moe.experts.0.w1.weight"],
        load_file(twin / "model.safetensors")["model.layers.0.block_sparse_moe.experts.0.w1.weight"],
    )
    again, info = load(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values()) and isinstance(again.model.layers[0].mlp.experts.gate_up_proj, nn.Parameter)
    torch.testing.assert_close(logits(again), logits(plain), atol=1e-5, rtol=1e-5)
