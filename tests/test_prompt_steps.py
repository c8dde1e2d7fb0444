"""Short prompts as captured steps, on a CPU: computed through the deferred mode, but not recorded."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_pool_accounts, fill_free_blocks, generate, new_text, prompt, ragged, twins, used_blocks
from steps import CapturedSteps
from tiny_models import in_this_transformers

import hf_turbo
from hf_turbo.cache.paged_cache import PagedCache
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import prompt_steps
from hf_turbo.modeling.head_input import HeadInput, make_watchable
from hf_turbo.ops import dispatch
from hf_turbo.patching import handle_of

NAMES = ["llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "phi", "qwen3", "qwen3_moe", "cohere2"]


class PromptSteps(CapturedSteps):
    """Captured steps that leave decode steps alone, and count prompts."""

    def __init__(self, model):
        super().__init__(model)
        self.num_rows = []

    @property
    def num_prompts(self):
        return len(self.num_rows)

    def run(self, model, forward, kwargs):
        cache = kwargs.get(CACHE_NAME)
        if not isinstance(cache, PagedCache) or cache.layout.packed is None:
            return None
        self.num_rows.append(len(kwargs["input_ids"]))
        return super().run(model, forward, kwargs)


@pytest.fixture
def captured(monkeypatch):
    """A function that has a patched model's prompts go through captured steps."""
    monkeypatch.setattr(prompt_steps, "uses_triton", lambda device: True)
    # The kernels' table has no CPU in it: take what it says of a GPU.
    monkeypatch.setattr(dispatch, "serves_linear", lambda rows, *args, **options: rows <= 64)

    def make(model):
        steps = PromptSteps(model)
        monkeypatch.setattr(handle_of(model).steps, "run", steps.run)
        return steps

    return make


@pytest.mark.parametrize("name", [name for name in NAMES if in_this_transformers(name)])
def test_text_of_short_prompts(name, captured):
    """Left-padded prompts of other lengths go through the same step; what a step leaves is gone on from."""
    stock, model = twins(name, 4)
    steps = captured(model)
    fill_free_blocks(model, float("nan"))
    for lengths in ((5,), (9, 3, 14), (7, 7, 1)):
        inputs = ragged(*lengths)
        assert torch.equal(new_text(model, inputs, 6), new_text(stock, inputs, 6)), lengths
        fill_free_blocks(model, float("nan"))
    assert steps.num_prompts == 3 and len(steps.graphs) == 1
    assert_pool_accounts(model)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_logits_and_the_cache_are_the_models_own(name, captured):
    stock, model = twins(name, 4)
    steps = captured(model)
    inputs = ragged(9, 3, 14)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    expected = stock(**inputs, logits_to_keep=1, use_cache=True)
    cache = hf_turbo.paged_cache(model)
    output = model(**inputs, logits_to_keep=1, **{CACHE_NAME: cache})
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert output[CACHE_NAME] is cache and steps.num_prompts == 1
    assert cache.get_seq_length() == 14 and cache.lengths == [9, 3, 14]
    mask = inputs["attention_mask"].bool()
    for layer, own in zip(cache.layers, expected[CACHE_NAME].layers, strict=True):
        real = mask[:, -own.keys.shape[2] :, None]
        for mine, theirs in ((layer.keys, own.keys), (layer.values, own.values)):
            close = torch.where(real[:, None], theirs, 0.0)
            torch.testing.assert_close(mine[:, :, -close.shape[2] :], close, rtol=1e-4, atol=1e-4)


def test_a_second_turn(captured):
    """What follows a text that is cached is a prompt, too."""
    stock, model = twins("gemma3_text", 4)
    steps = captured(model)
    first, more = ragged(9, 14), prompt(2, 5, seed=7)
    texts = []
    for one in (stock, model):
        out = generate(one, first, 6)
        ids = torch.cat([out["sequences"], more], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 11, dtype=torch.long)], dim=1)
        second = {"input_ids": ids, "attention_mask": mask}
        texts.append(new_text(one, second, 6, **{CACHE_NAME: out[CACHE_NAME]}))
    assert torch.equal(*texts) and steps.num_prompts == 2


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"samples": 3}])
def test_copies_of_a_prompt_are_computed_once(options, captured):
    """Beams and samples hold its blocks together until they write to them."""
    stock, model = twins("llama", 4)
    steps = captured(model)
    if copies := options.get("samples"):
        options = {"num_return_sequences": copies, "do_sample": True, "top_k": 3}
    for inputs in (ragged(9, 13, 6), prompt(1, 11)):
        texts = []
        for one in (stock, model):
            torch.manual_seed(0)
            texts.append(new_text(one, inputs, 6, **options))
        assert torch.equal(*texts)
    assert steps.num_prompts == 2 and steps.num_rows == [28, 11]
    assert used_blocks(model) == 0


def test_a_prompt_that_fails_goes_the_models_own_way(captured, monkeypatch):
    """With the rows and blocks that it had."""
    stock, model = twins("llama", 4)
    captured(model)
    monkeypatch.setattr(handle_of(model).steps, "run", lambda *call: None)
    for inputs, options in ((ragged(9, 13, 6), {"num_beams": 3}), (ragged(9, 13), {})):
        assert torch.equal(new_text(model, inputs, 6, **options), new_text(stock, inputs, 6, **options))


def test_what_the_head_is_given(captured):
    """Of each row's last token alone, as where the model computes the last logits itself."""
    stock, model = twins("llama", 4)
    steps = captured(model)
    make_watchable(model)
    inputs = ragged(9, 3, 14)
    hidden = stock(**inputs, output_hidden_states=True).hidden_states[-1][:, -1:]
    cache = hf_turbo.paged_cache(model)
    cache.head_input = HeadInput()
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        hidden = stock(**inputs, position_ids=positions, output_hidden_states=True).hidden_states[-1][:, -1:]
        model(**inputs, position_ids=positions, logits_to_keep=1, **{CACHE_NAME: cache})
    torch.testing.assert_close(cache.head_input.take(), hidden, rtol=1e-4, atol=1e-4)
    assert steps.num_prompts == 1


def test_prompts_that_go_the_models_own_way(captured, monkeypatch):
    stock, model = twins("llama", 4)
    steps = captured(model)
    holes, empty = ragged(9, 12), ragged(9, 12)
    holes["attention_mask"][1, 5] = 0
    empty["attention_mask"][0] = 0
    ids = {"input_ids": prompt(2, 9)}
    others = [(ids, {}), (ids, {"logits_to_keep": 2}), (ids, {"logits_to_keep": torch.tensor([0])})]
    with torch.no_grad():
        for inputs, options in ((holes, {"logits_to_keep": 1}), (empty, {"logits_to_keep": 1}), *others):
            logits = model(**inputs, **options, **{CACHE_NAME: hf_turbo.paged_cache(model)}).logits
            torch.testing.assert_close(logits[1:], stock(**inputs, **options).logits[1:], rtol=1e-4, atol=1e-4)
    assert steps.num_prompts == 0
    inputs = prompt(2, 9)
    for limit, value in (("MAX_PACKED_ROWS", 17), ("MAX_PACKED_SEQS", 1), ("SHORT_WORK", 1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(prompt_steps, limit, value)
            assert torch.equal(new_text(model, inputs, 5), new_text(stock, inputs, 5))
    assert steps.num_prompts == 0
    new_text(model, inputs, 5)
    assert steps.num_prompts == 1


def test_many_tokens_of_experts_are_not_captured(captured, monkeypatch):
    stock, model = twins("qwen3_moe", 4)
    steps = captured(model)
    monkeypatch.setattr(prompt_steps, "MAX_PACKED_EXPERTS", 17)
    for inputs in (prompt(2, 9), prompt(1, 9)):
        assert torch.equal(new_text(model, inputs, 5), new_text(stock, inputs, 5))
    assert steps.num_prompts == 1
    assert not hf_turbo.report(model).stepped_aside


@torch.no_grad()
def test_a_past_that_is_recorded_stays(captured):
    """A prompt can be taken back to before the window of its end."""
    stock, model = twins("mistral", 4)
    steps = captured(model)
    ids = prompt(1, 60)
    cache = hf_turbo.paged_cache(model)
    for layer in cache.layers:
        layer.activate_past_recording()
    model(ids, logits_to_keep=1, **{CACHE_NAME: cache})
    assert steps.num_prompts == 1
    cache.crop(-20)
    got = model(ids[:, 40:41], **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(got, stock(ids[:, :41]).logits[:, -1:], rtol=1e-4, atol=1e-4)
