"""Loading onto a GPU: where tensors end up, what is computed there, and how much memory it takes on the way."""

import gc
import warnings

import fixtures
import pytest
import torch
from fixtures import checkpoint
from loaded import files_of, load, logits, quantized
from quantized_models import write
from safetensors.torch import load_file
from tiny_models import build
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("registered")]

NAMES = ["gptq_desc_act_g32", "gptq_3bit_g32", "gptq_8bit_g32", "gptq_lmhead_g32", "awq_gemm_qwen2_bias_g64"]
NAMES += ["awq_gemv_fast_g32", "awq_marlin_g128", "ct_gptq_asym_g32", "autogptq_gm1_desc"]


@pytest.mark.parametrize("name", NAMES)
def test_loads_onto_the_gpu(name, tmp_path):
    folder = checkpoint(name, tmp_path)
    model = load(folder, device_map="cuda")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    for module, digest in fixtures.dequantized_sha256(name).items():
        assert fixtures.sha256(quantized(model)[module].dequantize().cpu()) == digest, module
    # fp32 on both sides; the GPU's kernels may use TF32
    torch.testing.assert_close(logits(model, name).cpu(), logits(load(folder), name), atol=2e-2, rtol=0)

    model.save_pretrained(tmp_path / "saved")
    saved = files_of(tmp_path / "saved")
    assert saved.keys() == fixtures.tensors(name).keys()
    for key, tensor in fixtures.tensors(name).items():
        assert torch.equal(saved[key], tensor.to(saved[key].dtype)), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, tmp_path):
    model = load(checkpoint("gptq_desc_act_g32", tmp_path), dtype=dtype, device_map="cuda")
    _, reference = fixtures.reference_logits("gptq_desc_act_g32")
    out = logits(model).cpu()
    assert out.dtype == dtype and (out.float() - reference).norm() <= 3e-2 * reference.norm()


def test_moves_there_and_back(tmp_path):
    model = load(checkpoint("gptq_desc_act_g32", tmp_path))
    before = logits(model)
    model.to("cuda")
    torch.testing.assert_close(logits(model).cpu(), before, atol=2e-2, rtol=0)
    model.to("cpu")
    assert torch.equal(logits(model), before)


def test_a_layer_in_main_memory(tmp_path):
    folder = checkpoint("gptq_qwen2_bias_g64", tmp_path)
    device_map = {"model.embed_tokens": 0, "model.layers.0": "cpu", "model.layers.1": 0, "model.norm": 0, "lm_head": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(folder, device_map={**device_map, "model.rotary_emb": 0})
    expected = logits(load(folder), "gptq_qwen2_bias_g64")
    torch.testing.assert_close(logits(model, "gptq_qwen2_bias_g64").cpu(), expected, atol=2e-2, rtol=0)


def test_experts(tmp_path):
    folder, twin = write(build("mixtral"), tmp_path)
    model, plain = load(folder, device_map="cuda"), load(twin, device_map="cuda")
    ids = torch.arange(3, 27, device="cuda").view(2, 12)
    with torch.no_grad():
        error = (model(ids).logits - plain(ids).logits).norm(dim=-1) / plain(ids).logits.norm(dim=-1)
    assert (error < 2e-2).float().mean() > 0.9  # a near tie between experts may fall the other way


def test_no_second_copy_while_loading(tmp_path):
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=256,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder, _ = write(model.cpu(), tmp_path, group_size=128)
    size = sum(tensor.numel() * tensor.element_size() for tensor in load_file(folder / "model.safetensors").values())
    del model
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loaded = load(folder, dtype=torch.bfloat16, device_map="cuda")
    final = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert len(quantized(loaded)) == 28
    assert final <= 1.1 * size
    # What one module's conversion takes does not grow with the model; 15% of an 8B model are 700 MB.
    assert peak <= final + 256 * 2**20
