"""P05 and P06: soft caps, sinks, scales and head sizes reach the kernels in every phase of a text.

Every check is shown to fail when its feature is forced off.
"""

import importlib.util
import subprocess
import sys

import pytest
import torch
from helpers import forward, prompt, twins
from tiny_models import build

import hf_turbo
from hf_turbo.ops import reference
from hf_turbo.patching import handle_of

IDS = prompt(2, 30)


def by_phases(model, ids=IDS) -> dict[str, torch.Tensor]:
    """A text in a paged cache: a fresh prompt, a step, a chunk of several tokens, a step."""
    cache, logits, start = hf_turbo.paged_cache(model), {}, 0
    for phase, stop in (("prefill", 12), ("decode", 13), ("chunk", 29), ("decode again", 30)):
        logits[phase] = forward(model, ids[:, start:stop], cache).logits
        start = stop
    return logits


def errors(model, stock, ids=IDS) -> dict[str, float]:
    """The largest difference from the unpatched model's eager attention over the whole text, by phase."""
    expected, start, found = forward(stock, ids).logits, 0, {}
    for phase, logits in by_phases(model, ids).items():
        stop = start + logits.shape[1]
        found[phase] = (logits - expected[:, start:stop]).abs().max().item()
        start = stop
    return found


VARIANTS = {
    "soft cap": ("gemma2", dict(attn_logit_softcapping=50.0, query_pre_attn_scalar=1)),
    "sinks": ("gpt_oss", {}),
    "attention multiplier": ("granite", {}),
    "query_pre_attn_scalar": ("gemma3_text", {}),
}


def variant_twins(variant: str):
    """Unpatched and patched; sinks take most of the attention, raw scores of gemma2 pass 100."""
    name, overrides = VARIANTS[variant]
    pair = twins(name, 4, **overrides)
    for parameters in map(dict, (one.named_parameters() for one in pair)):
        for key, parameter in parameters.items():
            if key.endswith("sinks"):
                parameter.data.add_(2.0)
            elif variant == "soft cap" and key.endswith("q_proj.weight"):
                parameter.data.mul_(3.0)
    return pair


def _force_off(variant: str, monkeypatch) -> None:
    attend = reference.attend

    def without(q, k, v, scale, window=None, cap=None, sinks=None):
        if variant in ("attention multiplier", "query_pre_attn_scalar"):
            scale = q.shape[-1] ** -0.5
        cap = None if variant == "soft cap" else cap
        return attend(q, k, v, scale, window, cap, None if variant == "sinks" else sinks)

    monkeypatch.setattr(reference, "attend", without)


@pytest.mark.parametrize("variant", VARIANTS)
def test_p05_variant(variant, monkeypatch):
    stock, model = variant_twins(variant)
    found = errors(model, stock)
    assert max(found.values()) < 1e-4, found
    _force_off(variant, monkeypatch)
    for phase, error in errors(model, stock).items():
        assert error > 1e-2, f"{phase} does not depend on {variant}: the check above shows nothing"


def test_p05_scores_pass_the_cap(monkeypatch):
    largest = 0.0
    by_hand = reference._softmax_by_hand

    def look(scores, *others):
        nonlocal largest
        largest = max(largest, scores.abs().max().item())
        return by_hand(scores, *others)

    monkeypatch.setattr(reference, "_softmax_by_hand", look)
    _, model = variant_twins("soft cap")
    by_phases(model)
    assert largest > 100


def test_p05_unknown_argument_is_not_ignored(monkeypatch):
    """An argument that the kernels don't know makes the model's own attention run, in every phase."""
    stock, model = twins("llama", 4)
    from transformers.models.llama import modeling_llama

    seen = []
    eager = modeling_llama.eager_attention_forward

    def spy(*args, **kwargs):
        seen.append(kwargs.pop("attention_bias_of_tomorrow", None))
        return eager(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", spy)
    cache = hf_turbo.paged_cache(model)
    parts = [
        forward(model, ids, cache, attention_bias_of_tomorrow=torch.ones(1)).logits for ids in IDS.split([12, 1, 17], 1)
    ]
    assert len(seen) == 3 * 2 and all(x is not None for x in seen)
    torch.testing.assert_close(torch.cat(parts, 1), forward(stock, IDS).logits, atol=1e-4, rtol=1e-4)


HEAD_DIMS = [32, 40, 64, 72, 80, 96, 112, 128, 192, 224, 256]
BLOCK_SIZES = [8, 16, 48, 64, 192, 256]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_p06_head_and_block_sizes(head_dim):
    """A text that crosses the end of a block of each size, in a prompt, a chunk and single steps."""
    options = dict(head_dim=head_dim, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512)
    stock, ids = build("llama", **options), prompt(1, 264)
    expected = forward(stock, ids).logits
    model = build("llama", **options)
    for block_size in BLOCK_SIZES:
        hf_turbo.patch(model, block_size=block_size)
        cache = hf_turbo.paged_cache(model)
        logits = [forward(model, part, cache).logits for part in ids.split([63, 2, 126, 1, 1, 62, 1, 8], dim=1)]
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-3, rtol=1e-3)
        assert cache.num_blocks == -(-264 // block_size)


@pytest.mark.parametrize("block_size", [0, -16, 3, 12, 20, 100, 257, 512, 16.0, "16", True])
def test_p06_illegal_block_size(block_size):
    model = build("llama")
    config, cls = model.config, type(model)
    with pytest.raises(ValueError, match="block_size"):
        hf_turbo.patch(model, block_size=block_size)
    assert model.config is config and type(model) is cls and not hf_turbo.is_patched(model)


def test_p06_illegal_option_leaves_the_old_patch():
    model = hf_turbo.patch(build("llama"), block_size=32)
    handle = handle_of(model)
    for wrong in (dict(block_size=7), dict(no_such_option=1), dict(prompt_attention="fast")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            hf_turbo.patch(model, **wrong)
    assert handle_of(model) is handle and hf_turbo.report(model).block_size == 32


def test_p06_missing_flash_attn_is_an_error_where_asked_for(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "flash_attn" else find_spec(name, *rest),
    )
    model = build("llama")
    with pytest.raises(ImportError, match="flash-attn"):
        hf_turbo.patch(model, prompt_attention="flash_attn")
    assert not hf_turbo.is_patched(model)
    hf_turbo.patch(model)


WITHOUT_KERNEL_PACKAGES = """
import sys
for name in ("triton", "flash_attn"):
    sys.modules[name] = None
import hf_turbo, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = hf_turbo.patch(LlamaForCausalLM(config).eval())
model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, do_sample=False)
assert hf_turbo.report(model).peak_blocks == 1
"""


def test_p06_kernel_packages_are_not_needed_to_import():
    subprocess.run([sys.executable, "-c", WITHOUT_KERNEL_PACKAGES], check=True, timeout=120)
