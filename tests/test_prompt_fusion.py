"""Long prompts computed through the deferred mode, on a CPU: every rule that a GPU would use, on 11 tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import stepped_aside
from tiny_models import ACCELERATED, COMMON, ZOO, build, expectation, in_this_transformers
from transformers import LlamaConfig, LlamaForCausalLM

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import prompt_forward, prompt_fusion
from hf_turbo.modeling.head_input import HeadInput, make_watchable
from hf_turbo.modeling.prompt_forward import LONG_WORK, PromptFacts
from hf_turbo.modeling.prompt_fusion import PROMPT_RULES, TRANSIENT
from hf_turbo.modeling.prompt_steps import SHORT_WORK
from hf_turbo.ops import dispatch
from hf_turbo.ops.deferred import DeferredMode

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_prompts_are_long(monkeypatch):
    monkeypatch.setattr(prompt_fusion, "_MANY", 2)
    monkeypatch.setattr(prompt_fusion, "_PIECE", 8)


def left_padded():
    prompt = torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    return prompt, mask, mask.cumsum(1).sub(1).clamp(min=0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in COMMON else pytest.mark.slow)
        for name in ZOO
        if in_this_transformers(name)
    ],
)
def test_a_prompt_equals_the_models_own(name):
    """Its logits, and those of a step after it: what was cached is right, too."""
    model = build(name)
    if expectation(model, name) != ACCELERATED:
        pytest.skip("steps aside")
    prompt, mask, positions = left_padded()
    token = torch.full((3, 1), 7)
    grown = torch.nn.functional.pad(mask, (0, 1), value=1)
    with torch.no_grad():
        expected = model(prompt, attention_mask=mask, position_ids=positions, use_cache=True)
        step = {"attention_mask": grown, "position_ids": positions[:, -1:] + 1}
        expected_step = model(token, **step, **{CACHE_NAME: expected[CACHE_NAME]})
        hf_turbo.patch(model, block_size=4)
        cache = hf_turbo.paged_cache(model)
        mode = DeferredMode(PROMPT_RULES, CPU, TRANSIENT)
        with mode:
            output = model(prompt, attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache})
        logits = mode.tensor(output.logits)
        real = mask.bool()
        torch.testing.assert_close(logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)
        step_logits = model(token, **step, **{CACHE_NAME: cache}).logits
        torch.testing.assert_close(step_logits, expected_step.logits, rtol=1e-4, atol=1e-4)


def test_what_a_llama_comes_to():
    """Nothing of a layer but its attention is left to single operations of torch."""
    model = build("llama")
    prompt, _, _ = left_padded()
    hf_turbo.patch(model, block_size=4)
    mode = DeferredMode(PROMPT_RULES, CPU, TRANSIENT)
    plain = DeferredMode((), CPU)
    for each in (mode, plain):
        with torch.no_grad(), each:
            output = model(prompt, **{CACHE_NAME: hf_turbo.paged_cache(model)}, logits_to_keep=1)
            each.tensor(output.logits)
    assert mode.num_launched <= 8 < plain.num_launched // 8


def test_only_prompts_that_keep_a_gpu_busy():
    """Sixteen thousand tokens of an 8B model do, four thousand don't, and no prompt of a small model does.

    Of the others those that keep the host busier than the GPU are captured.
    """
    sizes = {"vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8}
    large = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, **sizes)
    small = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, **sizes)
    with torch.device("meta"):
        large, small = LlamaForCausalLM(large), LlamaForCausalLM(small)
    for model, num_layers in ((large, 32), (small, 30)):
        model._hf_turbo = SimpleNamespace(prompt_facts=None, sliding_windows=[None] * num_layers)
    of_large, of_small = PromptFacts.of(large).work, PromptFacts.of(small).work
    assert 4096 * of_large < LONG_WORK <= 16384 * of_large and 131072 * of_small < LONG_WORK
    assert 2048 * of_large < SHORT_WORK < 2560 * of_large and 2048 * of_small < SHORT_WORK


def test_what_fails_goes_the_models_own_way(monkeypatch):
    """Code that can't do with tensors without numbers: the same logits, a reason, and a cache to go on with."""
    model = build("llama")
    prompt, mask, positions = left_padded()
    inputs = {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        expected = model(prompt, **inputs).logits
        hf_turbo.patch(model, block_size=4)
        cache = hf_turbo.paged_cache(model)
        monkeypatch.setattr(prompt_forward, "uses_triton", lambda device: True)
        monkeypatch.setattr(prompt_forward, "LONG_WORK", 0)
        down = model.model.layers[1].mlp.down_proj
        monkeypatch.setattr(down, "forward", lambda x: torch.from_numpy(x.numpy()) @ down.weight.t())
        monkeypatch.setattr(prompt_forward, "why_not_captured", lambda model: None)
        logits = model(prompt, **inputs, **{CACHE_NAME: cache}).logits
    real = mask.bool()
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == prompt.shape[1]
    assert any(reason.startswith("long prompts are not fused") for reason in stepped_aside(model))


def test_odd_norms_and_rotations_are_left_alone():
    """A weight that is spread over the row, and cosines wider than the heads: torch's own result, and its dtype."""
    x, cos = torch.randn(1, 2, 3, 8).half(), torch.randn(1, 1, 3, 8)
    mode = DeferredMode(PROMPT_RULES, CPU)

    def compute():
        f = x.float()
        normed = torch.ones(1).half() * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).half()
        crossed = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
        return normed, x * cos + crossed * cos

    expected = compute()
    with mode:
        got = compute()
    for a, b in zip(got, expected):
        a = mode.tensor(a)
        assert a.dtype == b.dtype and torch.equal(a, b)


def same_as_torch(compute, rules=PROMPT_RULES):
    """Holds what `compute()` returns through the deferred mode against torch's own results."""
    expected, mode = compute(), DeferredMode(rules, CPU)
    with torch.no_grad(), mode:
        got = compute()
    for a, b in zip(map(mode.tensor, got), expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("has_weight", [True, False])
def test_a_norm_over_groups_is_no_norm_of_the_row(has_weight):
    """Cast first, then looked at as groups: each group has a mean of its own."""
    x, weight = torch.randn(3, 8).half(), torch.randn(8).half()

    def compute():
        groups = x.float().view(3, 2, 4)
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)
        return [weight * groups.view(3, 8).half() if has_weight else groups.half()]

    same_as_torch(compute)


def test_a_norm_without_an_epsilon():
    """Torch has one of its own."""
    x = torch.randn(3, 8).half() / 64
    same_as_torch(lambda: [F.rms_norm(x, (8,))])


def test_one_heads_rotation_keeps_its_shape():
    """Of one token, cast before heads and tokens change places."""
    x, cos, sin = torch.randn(2, 1, 3, 8).half(), torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8)

    def compute():
        f = x.float().transpose(1, 2)
        return [(f * cos + torch.cat((-f[..., 4:], f[..., :4]), dim=-1) * sin).half()]

    same_as_torch(compute)


def test_products_of_one_input_in_two_shapes(monkeypatch):
    monkeypatch.setattr(dispatch, "serves_linear", lambda *args, activation: True)
    x, wide, narrow = torch.randn(3, 8), torch.randn(5, 8), torch.randn(6, 4)

    def compute():
        y = x * 2
        return [F.linear(y, wide), F.linear(y.view(3, 2, 4), narrow)]

    same_as_torch(compute)


def test_gates_that_are_parts_of_heads(monkeypatch):
    monkeypatch.setattr(dispatch, "serves_linear", lambda *args, activation: True)
    x, weight = torch.randn(3, 8), torch.randn(16, 8)

    def compute():
        gate, up = F.linear(x, weight).view(3, 2, 8).chunk(2, dim=-1)
        return [F.silu(gate) * up]

    same_as_torch(compute)


def test_memory_is_laid_out_as_was_said(monkeypatch):
    """A product that is part of another's result is not in one piece; who reads memory by strides sees one that is."""
    monkeypatch.setattr(dispatch, "serves_linear", lambda *args, activation: True)
    x, a, b = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4, 8)

    def compute():
        y = x * 2
        first, second = F.linear(y, a), F.linear(y, b)
        return [first + 0, torch.as_strided(second, (3, 4), (4, 1))]

    same_as_torch(compute)


def test_no_address_before_there_are_numbers():
    """A kernel that is launched by hand fails, rather than read from address 0."""
    x = torch.randn(3, 8)
    with DeferredMode(PROMPT_RULES, CPU):
        y = x * 2
        with pytest.raises(RuntimeError, match="data pointer"):
            y.data_ptr()


@torch.no_grad()
def test_what_the_head_is_given(monkeypatch):
    """Who asks for it gets numbers, though the norm before the head was computed for the head alone."""
    monkeypatch.setattr(prompt_forward, "uses_triton", lambda device: True)
    monkeypatch.setattr(prompt_forward, "LONG_WORK", 0)
    model = build("llama")
    ids = torch.randint(3, 60, (2, 11))
    expected = model.model(ids).last_hidden_state
    make_watchable(model)
    hf_turbo.patch(model, block_size=4)
    cache = hf_turbo.paged_cache(model)
    cache.head_input = watch = HeadInput()
    for keep in (0, 1):
        cache.reset()
        model(ids, logits_to_keep=keep, **{CACHE_NAME: cache})
        torch.testing.assert_close(watch.take(), expected[:, -keep:], atol=1e-5, rtol=1e-4)
    assert not stepped_aside(model)
