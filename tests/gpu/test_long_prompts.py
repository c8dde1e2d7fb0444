"""Long prompts through the fused forward, in bf16: as precise as the unpatched model's, in less memory."""

import gc

import pytest
import torch
from graph_cases import GPU, MiB, on_gpu
from helpers import assert_no_worse, forward, generate, prompt, ragged, stepped_aside
from transformers import LlamaConfig, LlamaForCausalLM

import hf_turbo
from hf_turbo import patched_class
from hf_turbo.modeling.prompt_forward import LONG_WORK, PromptFacts

pytestmark = GPU


def llama(dtype=torch.bfloat16, vocab_size=512, hidden_size=256, layers=4):
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_hidden_layers=layers,
        head_dim=64, num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 128,
        max_position_embeddings=32_768, eos_token_id=None, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cuda", dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def fused(monkeypatch):
    """Whether each forward since went through the fused layers."""
    seen = []

    def watched(*args):
        output = own(*args)
        seen.append(output is not None)
        return output

    own = patched_class.forward_prompt
    monkeypatch.setattr(patched_class, "forward_prompt", watched)
    # Small models: the host would take longer than they do.
    facts = PromptFacts(work=LONG_WORK / 4096, has_experts=False, together=False)
    monkeypatch.setattr(PromptFacts, "of", lambda model: facts)
    return seen


@pytest.mark.parametrize("lengths", [(4096,), (5000,), (3000, 1700), (17, 600, 1500, 1025)], ids=str)
@torch.no_grad()
def test_logits_are_as_precise(fused, lengths):
    batch = on_gpu(ragged(*lengths))
    ids, mask = batch.values()
    options = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    stock, model, exact = llama(), hf_turbo.patch(llama()), llama(torch.float32)
    exact.load_state_dict(stock.state_dict())  # the same weights, rounded
    got = forward(model, ids, hf_turbo.paged_cache(model), **options).logits
    assert fused == [True]
    real = mask.bool()
    rounded, wanted = (forward(one, ids, use_cache=False, **options).logits[real] for one in (stock, exact))
    assert got[real].isfinite().all()
    assert_no_worse(got[real], rounded, wanted)


@torch.no_grad()
def test_steps_after_a_long_prompt(fused):
    """What it has cached is as precise, too, and a graph reads it."""
    ids = on_gpu(prompt(1, 4608))
    stock, model, exact = llama(), hf_turbo.patch(llama()), llama(torch.float32)
    exact.load_state_dict(stock.state_dict())
    cache = hf_turbo.paged_cache(model)
    forward(model, ids[:, :-8], cache)
    got = torch.cat([forward(model, ids[:, i : i + 1], cache).logits for i in range(4600, 4608)], dim=1)
    rounded, wanted = (forward(one, ids, use_cache=False).logits[:, -8:] for one in (stock, exact))
    assert fused[0]
    assert hf_turbo.report(model).steps_replayed == 7
    assert_no_worse(got, rounded, wanted)


def peak(model, ids) -> int:
    """Bytes that the first new token takes at most, beyond what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    generate(model, ids, 1, return_dict_in_generate=False)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("shape", [(1, 16_384), (4, 4096), (1, 4608)], ids=str)
def test_peak_memory_is_below_the_unpatched_models(fused, shape):
    ids = on_gpu(prompt(*shape))
    model = llama()
    generate(model, ids[:, :64], 2)  # the libraries have their workspaces
    unpatched = peak(model, ids)
    hf_turbo.patch(model)
    generate(model, ids[:, :64], 2)
    generate(model, ids, 1)  # kernels are compiled
    hf_turbo.release(model)
    fused.clear()
    patched = peak(model, ids)
    assert fused == [True]
    assert patched < unpatched, f"{patched / MiB:.1f} MiB, unpatched {unpatched / MiB:.1f}"


def test_r03_no_logits_of_the_prompt(fused):
    """A vocabulary of 150,000 and 8,192 tokens: far less than `[1, tokens, vocabulary]`."""
    model = hf_turbo.patch(llama(vocab_size=150_000, hidden_size=128, layers=2))
    ids = on_gpu(prompt(1, 8192))
    generate(model, ids[:, :64], 2)
    generate(model, ids, 1)
    hf_turbo.release(model)
    fused.clear()
    used = peak(model, ids)
    assert fused == [True]
    assert used < 8192 * 150_000 * 2 / 10, f"{used / MiB:.1f} MiB"


@pytest.mark.parametrize("cuda_graphs", [True, False])
@torch.no_grad()
def test_autocast(fused, cuda_graphs):
    """Steps after a long prompt find nothing of it among the weights that autocast has copied."""
    ids = on_gpu(prompt(1, 4608))
    stock, model = llama(torch.float32), hf_turbo.patch(llama(torch.float32), cuda_graphs=cuda_graphs)
    wanted = forward(stock, ids, use_cache=False).logits[:, -8:]
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            rounded = forward(stock, ids, use_cache=False).logits[:, -8:]
            cache = hf_turbo.paged_cache(model)
            forward(model, ids[:, :-8], cache)
            got = torch.cat([forward(model, ids[:, i : i + 1], cache).logits for i in range(4600, 4608)], dim=1)
        assert_no_worse(got, rounded, wanted)


def test_options_and_short_prompts(fused):
    model = hf_turbo.patch(llama(), fused_layers=False)
    generate(model, on_gpu(prompt(1, 4608)), 2)
    assert not fused
    hf_turbo.patch(model)
    generate(model, on_gpu(prompt(1, 1000)), 2)
    assert fused
    assert not any(fused)
    assert not stepped_aside(model)
