"""Every checkpoint that other tools wrote: weights as those tools read them, logits, and the same bytes back."""

import json

import pytest
import torch
from fixtures import (
    DATA,
    NAMES,
    checkpoint,
    dequantized_sha256,
    model_config,
    quantization_config,
    reference_logits,
    sha256,
    tensors,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from words import headers, same_bytes

from hf_turbo.quantization.formats import decode, encode, linear_specs, settle

TOLERANCE = 1e-5
# The same quantization as awq_gemm_g32's, in other layouts.
SAME_WEIGHTS = {"awq_gemv_g32": "awq_gemm_g32", "awq_gemv_fast_g32": "awq_gemm_g32"}
# Their reference took weights that no tool rounded to fp16.
UNROUNDED = {"awq_gemv_g32", "awq_marlin_g128"}
LAYOUTS = {
    "awq_gemm": "awq_gemm", "awq_gemv": "awq_gemv", "awq_gemv_fast": "awq_gemv_fast", "awq_marlin": "awq_marlin",
    "ct": "pack_quantized", "gptq": "gptq", "autogptq": "gptq", "ar": "gptq",
}  # fmt: skip


def modules(name):
    """Of each quantized module: its tensors by their short names, and its spec."""
    everything = tensors(name)
    specs = linear_specs(quantization_config(name), headers(everything))
    for module, spec in specs.items():
        own = {key.rpartition(".")[2]: t for key, t in everything.items() if key.rpartition(".")[0] == module}
        yield module, own, spec


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_the_tool_reads(name):
    expected = dequantized_sha256(SAME_WEIGHTS.get(name, name))
    decoded = {module: sha256(decode(own, spec).dequantize()) for module, own, spec in modules(name)}
    assert len(decoded) >= 12
    if name != "awq_marlin_g128":  # has no reference but its logits
        assert decoded == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes_are_written_back(name):
    for module, own, spec in modules(name):
        assert spec.layout == LAYOUTS[max((prefix for prefix in LAYOUTS if name.startswith(prefix)), key=len)]
        weight = decode(own, spec)
        assert same_bytes(encode(weight, settle(own, spec), own.get("bias")), own), module


def logits(name, decoded):
    """The last four positions' of a plain fp32 model with these weights, the rest from the checkpoint."""
    config = model_config(name)
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    state = {key: tensor for key, tensor in tensors(name).items() if key.rpartition(".")[2] in ("weight", "bias")}
    state |= {f"{module}.weight": weight for module, weight in decoded.items()}
    wanted = model.state_dict().keys()
    # auto-gptq's biases of nothing.
    assert not any(tensor.any() for key, tensor in state.items() if key not in wanted)
    model.load_state_dict({key: tensor.float() for key, tensor in state.items() if key in wanted})
    with torch.no_grad():
        return model.eval()(reference_logits(name)[0]).logits[:, -4:]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_decoded_weights(name):
    dtype = torch.float32 if name in UNROUNDED else torch.float16
    found = logits(name, {module: decode(own, spec).dequantize(dtype) for module, own, spec in modules(name)})
    # gemv_fast's own reference multiplies and adds products of zero points that are rounded; the weights are gemm's.
    expected = reference_logits("awq_gemm_g32" if name == "awq_gemv_fast_g32" else name)[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_one_other_code_shows():
    # What the hashes and the logits above can see.
    name = "gptq_sym_g32"
    decoded = {module: decode(own, spec).dequantize() for module, own, spec in modules(name)}
    module, own, spec = next(modules(name))
    own["qweight"] = own["qweight"].clone()
    own["qweight"][3, 5] ^= 4
    decoded[module] = decode(own, spec).dequantize()
    assert sha256(decoded[module]) != dequantized_sha256(name)[module]
    assert (logits(name, decoded) - reference_logits(name)[1]).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_rebuilt_folder_is_the_tools_own(name, tmp_path):
    folder = checkpoint(name, tmp_path)
    files = sorted(folder.glob("*.safetensors"))
    assert same_bytes(load_file(files[0]), tensors(name)) and len(files) == 1
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == quantization_config(name)
    assert files[0].name == "model.safetensors" or name.startswith("autogptq")


def test_the_data_stays_small():
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 5e6


@pytest.mark.parametrize("name, file", [
    ("autogptq_gm1_desc", "quantize_config.json"),
    ("gptq_v2_sym_desc_g64", "quantize_config.json"),
    ("ar_auto_gptq_g32", "quantization_config.json"),
])  # fmt: skip
def test_the_config_of_a_file_of_its_own(name, file):
    config = json.loads((DATA / name / file).read_text())
    assert linear_specs(config, headers(tensors(name))) == {module: spec for module, _, spec in modules(name)}


def test_a_gptq_config_without_a_method():
    # As auto-gptq wrote it before 0.5.
    config = quantization_config("autogptq_sym_g32")
    del config["quant_method"], config["is_marlin_format"]
    found = linear_specs(config, headers(tensors("autogptq_sym_g32")))
    assert found == {module: spec for module, _, spec in modules("autogptq_sym_g32")}


@pytest.mark.parametrize("name", ["awq_gemm_g32", "awq_gemv_g32", "awq_gemv_fast_g32"])
def test_old_spellings_of_awq(name):
    config = quantization_config(name)
    old = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": config["version"].upper()}
    assert linear_specs(old, headers(tensors(name))) == {module: spec for module, _, spec in modules(name)}


@pytest.mark.parametrize("how", [
    {"is_marlin_format": True}, {"checkpoint_format": "marlin"}, {"quant_method": "marlin"},
])  # fmt: skip
def test_ways_to_say_marlin(how):
    # autoawq's tensors under auto-gptq's names: the layout is the same.
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, **how}
    names = {"qweight": "B", "scales": "s"}
    for module, own, awq_spec in modules("awq_marlin_g128"):
        renamed = {names[short]: tensor for short, tensor in own.items()}
        found = linear_specs(config, headers({f"{module}.{short}": tensor for short, tensor in renamed.items()}))
        weight = decode(renamed, found[module])
        assert weight.dequantize().equal(decode(own, awq_spec).dequantize())
        assert same_bytes(encode(weight, found[module]), renamed)


@pytest.mark.parametrize("name, packing", [
    ("ar_auto_gptq_g32", "auto_round:auto_gptq"), ("awq_gemm_g32", "auto_round:auto_awq"),
])  # fmt: skip
def test_auto_rounds_own_method(name, packing):
    config = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "data_type": "int"}
    kept = {key: tensor for key, tensor in tensors(name).items() if not key.endswith("g_idx")}
    found = linear_specs(config, headers(kept))
    for module, own, spec in modules(name):
        plain = {short: tensor for short, tensor in own.items() if short != "g_idx"}
        weight = decode(plain, found[module])
        assert weight.dequantize().equal(decode(own, spec).dequantize())
        assert same_bytes(encode(weight, found[module]), plain)


def test_zero_biases_are_written_again():
    _, own, spec = next(modules("autogptq_sym_g32"))
    assert spec.has_bias and not own["bias"].any()
    assert same_bytes(encode(decode(own, spec), spec), own)
    assert encode(decode(own, spec), spec, own["bias"] + 1)["bias"].eq(1).all()


def test_a_bias_that_the_file_has_no_place_for():
    _, own, spec = next(modules("gptq_sym_g32"))
    with pytest.raises(ValueError, match="bias cannot be stored"):
        encode(decode(own, spec), spec, torch.zeros(spec.out_features))
