"""Architectures whose names or linears are not a decoder's usual ones."""

import pytest
import torch
from loaded import load, quantized
from quantized_models import write
from safetensors.torch import load_file
from tiny_models import build
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.core_model_loading import Concatenate, WeightConverter

from hf_turbo.quantization import load_plan
from hf_turbo.quantization.int4_linear import FileLinear, Int4Linear

pytestmark = pytest.mark.usefixtures("registered")

IDS = torch.arange(3, 27).view(2, 12)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def llava():
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=32,
    )
    text = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=128,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    ).eval()


@pytest.mark.parametrize(
    "linears, count", [(r"language_model.*_proj\.weight$", 14), (r"(_proj|fc[12]|linear_[12])\.weight$", 28)]
)
def test_a_language_model_inside_another(linears, count, tmp_path):
    """Files have names of old releases, which Transformers changes while loading and changes back while saving."""
    folder, twin = write(llava(), tmp_path, linears=linears)
    read = load_file(folder / "model.safetensors")
    assert "language_model.model.layers.0.mlp.up_proj.qweight" in read
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert len(quantized(model)) == count and "model.language_model.layers.0.mlp.up_proj" in quantized(model)
    inputs = {"input_ids": torch.tensor([[1, 5, 5, 5, 5, 7, 8, 9]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    plain = LlavaForConditionalGeneration.from_pretrained(twin, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == read.keys() and all(torch.equal(saved[name], tensor) for name, tensor in read.items())


def test_dtypes_where_names_change(tmp_path):
    folder, _ = write(llava(), tmp_path)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {layer.scales.dtype for layer in quantized(model).values()} == {torch.float16}


def test_linears_that_a_class_merges_are_refused_by_name(tmp_path, monkeypatch):
    folder, _ = write(build("llama"), tmp_path)
    merge = WeightConverter(
        ["self_attn.q_proj.weight", "self_attn.k_proj.weight"], "self_attn.o_proj.weight", [Concatenate(dim=0)]
    )
    monkeypatch.setattr(load_plan, "get_model_conversion_mapping", lambda model: [merge])
    monkeypatch.setattr(FileLinear, "__init__", lambda *_, **__: pytest.fail("a module was replaced"))
    with pytest.raises(
        NotImplementedError, match=r"self_attn\.[qk]_proj is quantized.*part of model\.layers\.0\.self_attn\.o_proj"
    ):
        load(folder)


def test_linears_that_are_stored_the_other_way_round(tmp_path):
    folder, twin = write(build("gpt2"), tmp_path, linears=r"(c_attn|c_proj|c_fc)\.weight$", transposed=True)
    model, info = load(folder, output_loading_info=True)
    assert not any(info.values()) and isinstance(model.transformer.h[0].attn.c_attn, Int4Linear)
    torch.testing.assert_close(logits(model), logits(load(twin)), atol=1e-5, rtol=1e-5)
    plain = model.dequantize()
    torch.testing.assert_close(logits(plain), logits(load(twin)), atol=1e-5, rtol=1e-5)


def test_inputs_that_fill_no_word(tmp_path):
    """compressed-tensors packs whole words; how many inputs there are is in the model, and in weight_shape."""
    model = build("llama", hidden_size=36, num_attention_heads=3, num_key_value_heads=3, head_dim=12)
    folder, twin = write(model, tmp_path, "pack_quantized")
    loaded = load(folder)
    assert loaded.model.layers[0].self_attn.q_proj.in_features == 36
    torch.testing.assert_close(logits(loaded), logits(load(twin)), atol=1e-5, rtol=1e-5)
