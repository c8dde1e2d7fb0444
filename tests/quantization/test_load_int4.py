"""from_pretrained of checkpoints of other tools: what is loaded, in which dtypes and where to, and what is saved."""

import copy
import json
import pickle
import warnings
import weakref

import fixtures
import pytest
import torch
from fixtures import checkpoint
from loaded import change_config, change_files, change_model_config, files_of, load, logits, quantized, rename
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_turbo.quantization.int4_linear import FileLinear, Int4Linear
from hf_turbo.quantization.lora import allow_int4

pytestmark = pytest.mark.usefixtures("registered")

# G01, G02, G08: every checkpoint.


@pytest.mark.parametrize("name", fixtures.NAMES)
def test_loads_as_its_own_tool_reads_it(name, tmp_path):
    model, info = load(checkpoint(name, tmp_path), output_loading_info=True)
    assert not any(info.values()), info
    layers = quantized(model)
    assert layers and not any(isinstance(module, FileLinear) for module in model.modules())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    hashes = fixtures.dequantized_sha256(name)
    assert hashes.keys() <= layers.keys()
    for module, digest in hashes.items():
        assert fixtures.sha256(layers[module].dequantize()) == digest, module

    # The reference rounds the weights to fp16 first, which moves logits by 3e-3 (6e-3 where zeros are rounded, too).
    _, reference = fixtures.reference_logits(name)
    fast = logits(model, name)
    torch.testing.assert_close(fast, reference, atol=8e-3 if "gemv_fast" in name else 4e-3, rtol=0)
    # With the same fp32 weights: exactly what plain linears compute.
    plain = dense(model, torch.float32)
    torch.testing.assert_close(fast, logits(plain, name), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in fixtures.NAMES if fixtures.dequantized_sha256(name)])
def test_dequantized_it_is_the_reference(name, tmp_path):
    model = load(checkpoint(name, tmp_path))
    plain = dense(model, torch.float16).float()
    _, reference = fixtures.reference_logits(name)
    torch.testing.assert_close(logits(plain, name), reference, atol=2e-5, rtol=0)


def dense(model, dtype):
    """A model of its own with plain linears of the dequantized weights."""
    with torch.device("cpu"):
        plain = type(model)(model.config).to(model.dtype).eval()
    weights = {}
    for name, tensor in model.state_dict().items():
        owner = name.rpartition(".")[0]
        if not isinstance(model.get_submodule(owner), Int4Linear):
            weights[name] = tensor
    for name, layer in quantized(model).items():
        weights[f"{name}.weight"] = layer.dequantize(dtype)
        if layer.bias is not None:
            weights[f"{name}.bias"] = layer.bias.detach()
    plain.load_state_dict(weights)
    return plain


@pytest.mark.parametrize("name", fixtures.NAMES)
def test_saves_what_it_read_and_reloads(name, tmp_path):
    folder = checkpoint(name, tmp_path)
    model = load(folder, dtype="auto")
    model.save_pretrained(tmp_path / "saved")
    saved, read = files_of(tmp_path / "saved"), fixtures.tensors(name)
    assert saved.keys() == read.keys()
    for key, tensor in read.items():
        if tensor.dtype == saved[key].dtype or not tensor.is_floating_point():
            assert saved[key].dtype == tensor.dtype and torch.equal(saved[key], tensor), key
        else:  # plain weights that the config's dtype is not that of
            assert torch.equal(saved[key], tensor.to(saved[key].dtype)), key
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"] == fixtures.quantization_config(name)
    assert "transformers_weights" not in config
    again = load(tmp_path / "saved", dtype="auto")
    assert torch.equal(logits(again, name), logits(model, name))


def test_saves_shards_as_asked(tmp_path):
    model = load(checkpoint("gptq_desc_act_g32", tmp_path), dtype="auto")
    model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    again = load(tmp_path / "saved", dtype="auto")
    assert torch.equal(logits(again), logits(model))
    read = fixtures.tensors("gptq_desc_act_g32")
    assert all(torch.equal(tensor, read[name]) for name, tensor in files_of(tmp_path / "saved").items())


def test_what_is_saved_need_not_be_on_the_models_device(tmp_path, monkeypatch):
    model = load(checkpoint("gptq_sym_g32", tmp_path))
    moved = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self.dtype) or cpu(self))
    state, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    assert torch.int32 in moved and state.keys() == fixtures.tensors("gptq_sym_g32").keys()
    moved.clear()
    model.state_dict()
    assert not moved


# G05: dtypes.


@pytest.mark.parametrize("name", ["gptq_qwen2_bias_g64", "awq_gemm_g32", "ct_gptq_asym_g32"])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 1e-3)])
def test_the_model_has_the_dtype_asked_for(name, dtype, bound, tmp_path):
    model = load(checkpoint(name, tmp_path), dtype=dtype)
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    read = fixtures.tensors(name)
    for module, layer in quantized(model).items():
        scales = read.get(f"{module}.scales", read.get(f"{module}.weight_scale"))
        assert layer.scales.dtype == scales.dtype
    _, reference = fixtures.reference_logits(name)
    out = logits(model, name)
    assert out.dtype == dtype
    assert (out.float() - reference).norm() <= bound * reference.norm()


def test_dtype_auto_is_the_configs(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    assert fixtures.model_config("gptq_sym_g32")["dtype"] == "float16"
    assert load(folder, dtype="auto").dtype == torch.float16


def test_generate(tmp_path):
    model = load(checkpoint("gptq_desc_act_g32", tmp_path))
    plain = dense(model, torch.float32)
    prompt = torch.arange(10, 20)[None]
    settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(prompt, **settings), plain.generate(prompt, **settings))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's, of newer Transformers
def test_lora_on_a_loaded_model(tmp_path):
    peft = pytest.importorskip("peft")
    model = load(checkpoint("gptq_qwen2_bias_g64", tmp_path))
    before = logits(model, "gptq_qwen2_bias_g64")
    config = allow_int4(peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False))
    adapted = peft.get_peft_model(model, config)
    after = logits(adapted, "gptq_qwen2_bias_g64")
    assert not torch.allclose(after, before, atol=1e-2)
    loss = adapted(torch.arange(12)[None]).logits.square().mean()
    loss.backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = peft.PeftModel.from_pretrained(
        load(checkpoint("gptq_qwen2_bias_g64", tmp_path / "2")),
        tmp_path / "adapter",
        config=allow_int4(peft.LoraConfig.from_pretrained(tmp_path / "adapter")),
    )
    torch.testing.assert_close(logits(fresh, "gptq_qwen2_bias_g64"), after)


# G06: what is quantized is decided by the tensors.


@pytest.mark.parametrize(
    "listed", [["o_proj"], ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"], ["self_attn."], []]
)
def test_modules_that_are_not_quantized_keep_their_weights(listed, tmp_path):
    folder = checkpoint("awq_gemm_g32_mtnc", tmp_path)
    change_config(folder, modules_to_not_convert=listed)
    model, info = load(folder, output_loading_info=True)
    assert not any(info.values())
    read = fixtures.tensors("awq_gemm_g32_mtnc")
    for layer in model.model.layers:
        assert type(layer.self_attn.o_proj) is nn.Linear
        assert isinstance(layer.self_attn.q_proj, Int4Linear)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, read[name].float()), name


def test_dynamic_bits_a_module(tmp_path):
    model = load(checkpoint("gptq_dynamic_g32", tmp_path))
    assert {layer.bits for layer in quantized(model).values()} == {4, 8}
    assert any(type(module) is nn.Linear for name, module in model.named_modules() if name != "lm_head")


def test_quantized_head(tmp_path):
    model = load(checkpoint("gptq_lmhead_g32", tmp_path))
    assert isinstance(model.lm_head, Int4Linear) and model.get_output_embeddings() is model.lm_head


def test_quantized_head_of_a_config_that_ties(tmp_path):
    folder = checkpoint("gptq_lmhead_g32", tmp_path)
    change_model_config(folder, tie_word_embeddings=True)
    model = load(folder)
    assert isinstance(model.lm_head, Int4Linear) and not model.config.tie_word_embeddings
    model.tie_weights()
    torch.testing.assert_close(
        logits(model, "gptq_lmhead_g32"), logits(load(checkpoint("gptq_lmhead_g32", tmp_path / "2")))
    )


def test_a_tied_head_stays_tied(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    change_files(folder, lambda tensors: tensors.pop("lm_head.weight"))
    change_model_config(folder, tie_word_embeddings=True)
    model, info = load(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_zero_biases_that_the_model_lacks_are_dropped(tmp_path):
    model = load(checkpoint("autogptq_sym_g32", tmp_path))
    assert any(key.endswith(".bias") for key in fixtures.tensors("autogptq_sym_g32"))
    assert all(layer.bias is None for layer in quantized(model).values())


# Names that Transformers changes.


def test_names_of_a_base_model(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    change_files(folder, rename("model.", ""))
    model, info = load(folder, output_loading_info=True)
    assert not any(info.values())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(logits(model), fixtures.reference_logits("gptq_sym_g32")[1], atol=4e-3, rtol=0)


def test_a_base_model_leaves_the_head_out(tmp_path):
    model, info = AutoModel.from_pretrained(
        checkpoint("gptq_lmhead_g32", tmp_path), dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and len(quantized(model)) == 14
    assert all(key.startswith("lm_head.") for key in info["unexpected_keys"])


def test_another_head_may_be_new(tmp_path):
    model, info = AutoModelForSequenceClassification.from_pretrained(
        checkpoint("gptq_sym_g32", tmp_path), dtype=torch.float32, output_loading_info=True
    )
    assert info["missing_keys"] == {"score.weight"} and len(quantized(model)) == 14


# G10: devices.


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}, None])
def test_device_maps(device_map, tmp_path):
    model = load(checkpoint("gptq_desc_act_g32", tmp_path), device_map=device_map)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    torch.testing.assert_close(logits(model), fixtures.reference_logits("gptq_desc_act_g32")[1], atol=4e-3, rtol=0)


def test_a_layer_on_disk(tmp_path):
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    folder = checkpoint("gptq_qwen2_bias_g64", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].input_layernorm.weight.is_meta
    expected = logits(load(folder), "gptq_qwen2_bias_g64")
    torch.testing.assert_close(logits(model, "gptq_qwen2_bias_g64"), expected)


def test_moves_and_casts(tmp_path):
    model = load(checkpoint("awq_gemm_qwen2_bias_g64", tmp_path))
    before = {name: layer.dequantize(torch.float32) for name, layer in quantized(model).items()}
    model.to("cpu").to(torch.bfloat16)
    assert all(torch.equal(layer.dequantize(torch.float32), before[name]) for name, layer in quantized(model).items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logits(model, "awq_gemm_qwen2_bias_g64").dtype == torch.bfloat16


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_copies_of_a_model(clone, tmp_path):
    model = load(checkpoint("gptq_desc_act_g32", tmp_path))
    other = clone(model)
    assert torch.equal(logits(other), logits(model))
    other.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


def test_dequantize(tmp_path):
    model = load(checkpoint("gptq_qwen2_bias_g64", tmp_path))
    expected = logits(model, "gptq_qwen2_bias_g64")
    plain = model.dequantize()
    assert not quantized(plain) and not hasattr(plain.config, "quantization_config")
    assert type(plain.model.layers[0].self_attn.q_proj) is nn.Linear
    torch.testing.assert_close(logits(plain, "gptq_qwen2_bias_g64"), expected, atol=2e-5, rtol=0)
    plain.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(load(tmp_path / "plain"), "gptq_qwen2_bias_g64"), logits(plain, "gptq_qwen2_bias_g64"))


def test_only_as_much_as_one_module_is_held_twice(tmp_path, monkeypatch):
    """While one module is packed, those before it have let their files' tensors go."""
    read, alive = [], []
    to_int4 = FileLinear.to_int4

    def watched(self):
        alive.append(sum(reference() is not None for reference in read))
        read.append(weakref.ref(self.qweight))
        return to_int4(self)

    monkeypatch.setattr(FileLinear, "to_int4", watched)
    load(checkpoint("gptq_sym_g32", tmp_path))
    assert len(alive) == 14 and max(alive) <= 1
