"""Short prompts as captured steps, on a CPU: computed through the deferred mode, but not recorded."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_pool_accounts, fill_free_blocks, generate, new_text, prompt, ragged, twins, used_blocks
from steps import capture_prompts
from tiny_models import build, in_this_transformers

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import prompt_steps
from hf_turbo.modeling.head_input import HeadInput, make_watchable
from hf_turbo.modeling.prompt_forward import PromptFacts
from hf_turbo.patching import handle_of

NAMES = ["llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "phi", "qwen3", "qwen3_moe", "cohere2"]


@pytest.fixture
def captured(monkeypatch):
    return capture_prompts(monkeypatch)


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


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_prompts_that_begin_alike(captured, name, options):
    """What is kept of the first is found by the others; the rest is a prompt of rows that are there already."""
    stock, model = twins(name, 4)
    hf_turbo.patch(model, block_size=4, prefix_cache=True)
    steps, found = captured(model), []
    for inputs in (ragged(9, 13, 6), ragged(9, 13, 6), ragged(9, 13, 6, seed=1)):
        assert torch.equal(new_text(model, inputs, 6, **options), new_text(stock, inputs, 6, **options))
        found.append(hf_turbo.report(model).prefix_tokens_found)
    assert found == [0, 22, 22] and steps.num_rows == [28, 6 * options.get("num_beams", 1), 28]
    assert used_blocks(model) == 0


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


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("takes_blocks", [False, True])
def test_a_prompt_that_fails_goes_the_models_own_way(captured, monkeypatch, name, takes_blocks):
    """With the rows and blocks that it had: as where the model has changed since the capture."""
    stock, model = twins(name, 4)
    captured(model)
    num_failed = 0

    def fails(model, forward, kwargs):
        nonlocal num_failed
        cache = kwargs[CACHE_NAME]
        if cache.layout.packed is not None:
            num_failed += 1
            if takes_blocks:
                cache.advance()

    monkeypatch.setattr(handle_of(model).steps, "run", fails)
    for inputs, options in ((ragged(9, 13, 6), {"num_beams": 3}), (ragged(9, 13), {})):
        assert torch.equal(new_text(model, inputs, 6, **options), new_text(stock, inputs, 6, **options))
    assert num_failed == 2 and used_blocks(model) == 0
    assert_pool_accounts(model)


@torch.no_grad()
def test_a_prompt_that_is_stopped_leaves_an_empty_cache(captured, monkeypatch):
    stock, model = twins("llama", 4)
    captured(model)

    def stopped(model, forward, kwargs):
        if kwargs[CACHE_NAME].layout.packed is not None:
            kwargs[CACHE_NAME].advance()
            raise KeyboardInterrupt

    ids, cache = prompt(2, 9).repeat_interleave(2, 0), handle_of(model).new_cache(copies_per_row=2)
    with monkeypatch.context() as patch:
        patch.setattr(handle_of(model).steps, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            model(ids, logits_to_keep=1, **{CACHE_NAME: cache})
    assert cache.batch_size == used_blocks(model) == 0
    assert cache.layout.packed is None and cache.layout.wanted == []
    for keep in (1, 2):  # captured, and its own way
        logits = model(ids, logits_to_keep=keep, **{CACHE_NAME: cache}).logits
        torch.testing.assert_close(logits, stock(ids, logits_to_keep=keep).logits, rtol=1e-4, atol=1e-4)
        cache.reset()
        cache.layout.copies_per_row = 2


def test_a_model_of_another_dtype_since(captured):
    """Its keys lie elsewhere than those of the prompts before."""
    stock, model = twins("llama", 4)
    steps, ids = captured(model), prompt(2, 9)
    for dtype in (torch.float32, torch.float64, torch.float32):
        stock.to(dtype), model.to(dtype)
        steps.graphs.clear()  # as where weights have moved
        assert torch.equal(new_text(model, ids, 6), new_text(stock, ids, 6)), dtype
    assert steps.num_prompts == 3


@torch.no_grad()
def test_a_cache_with_tokens_stays_where_they_are():
    _, model = twins("llama", 4)
    cache, ids = hf_turbo.paged_cache(model), prompt(1, 5)
    model(ids, **{CACHE_NAME: cache})
    before = cache.layers[0].store
    model.double()
    model(ids, **{CACHE_NAME: hf_turbo.paged_cache(model)})
    cache.adopt_stores()
    assert cache.layers[0].store is before and before.dtype == torch.float32
    cache.reset()
    cache.adopt_stores()
    assert cache.layers[0].store.dtype == torch.float64


def test_tokens_of_copies_are_counted(captured):
    """As they are where the prompt goes the model's own way."""
    counts = []
    for is_captured in (False, True):
        _, model = twins("llama", 4)
        if is_captured:
            captured(model)
        new_text(model, ragged(9, 13, 6), 1, num_beams=3)
        report = hf_turbo.report(model)
        counts.append((report.tokens_stored, report.tokens_shared))
    assert counts[0] == counts[1] == (28, 56)


@torch.no_grad()
def test_positions_that_are_not_given(captured):
    """A model counts them as it likes: by the mask, or on from a picture. From 0 on all count alike."""
    stock, model = twins("llama", 4)
    steps, ids, padded = captured(model), prompt(2, 9), ragged(9, 5)
    cache = hf_turbo.paged_cache(model)
    expected = stock(ids, logits_to_keep=1, use_cache=True)
    got = model(ids, logits_to_keep=1, **{CACHE_NAME: cache})
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert steps.num_prompts == 1
    more = {"input_ids": prompt(2, 4), "logits_to_keep": 1}
    expected = stock(**more, **{CACHE_NAME: expected[CACHE_NAME]})
    torch.testing.assert_close(model(**more, **{CACHE_NAME: cache}).logits, expected.logits, rtol=1e-4, atol=1e-4)
    got = model(**padded, logits_to_keep=1, **{CACHE_NAME: hf_turbo.paged_cache(model)})
    torch.testing.assert_close(got.logits, stock(**padded, logits_to_keep=1).logits, rtol=1e-4, atol=1e-4)
    assert steps.num_prompts == 1


@pytest.mark.parametrize("copies", [1, 2])
@torch.no_grad()
def test_what_the_head_is_given(captured, copies):
    """Of each row's last token alone, as where the model computes the last logits itself."""
    stock, model = twins("llama", 4)
    steps = captured(model)
    make_watchable(model)
    inputs = ragged(9, 3, 14)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    inputs = {name: x.repeat_interleave(copies, 0) for name, x in inputs.items()}
    hidden = stock(**inputs, output_hidden_states=True).hidden_states[-1][:, -1:]
    cache = handle_of(model).new_cache(copies_per_row=copies)
    cache.head_input = HeadInput()
    model(**inputs, logits_to_keep=1, **{CACHE_NAME: cache})
    torch.testing.assert_close(cache.head_input.take(), hidden, rtol=1e-4, atol=1e-4)
    assert steps.num_rows == [26]


def test_prompts_that_go_the_models_own_way(captured, monkeypatch):
    stock, model = twins("llama", 4)
    steps = captured(model)
    holes, empty = ragged(9, 12), ragged(9, 12)
    holes["attention_mask"][1, 5] = 0
    empty["attention_mask"][0] = 0
    ids = {"input_ids": prompt(2, 9)}
    for x in (holes, empty):
        x["position_ids"] = (x["attention_mask"].cumsum(1) - 1).clamp_min(0)
    others = [(ids, {}), *((ids, {"logits_to_keep": keep}) for keep in (2, torch.tensor([0]), torch.tensor(1)))]
    others += [({"input_ids": prompt(2, 1)}, {"logits_to_keep": 1})]  # a step
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


@torch.no_grad()
def test_what_encoders_have_made_of_a_text(captured):
    """Nothing: newer releases of Transformers say so by an empty dict, others do not."""
    stock, model = twins("llama", 4)
    steps, ids = captured(model), prompt(2, 9)
    for given, num_graphs in (({"said": True}, 0), ({}, 1)):
        cache = hf_turbo.paged_cache(model)
        logits = model(ids, logits_to_keep=1, encoder_outputs=given, **{CACHE_NAME: cache}).logits
        torch.testing.assert_close(logits, stock(ids, logits_to_keep=1).logits, rtol=1e-4, atol=1e-4)
        assert len(steps.graphs) == num_graphs


def test_what_an_ordinary_prompt_is():
    _, model = twins("llama", 4)
    cache = hf_turbo.paged_cache(model)
    plain = {"input_ids": prompt(2, 9), "logits_to_keep": 1, "use_cache": True, CACHE_NAME: cache}
    assert prompt_steps._is_plain(cache, plain)
    assert prompt_steps._is_plain(cache, plain | {"position_ids": torch.zeros(3, 2, 9)})
    for name, x in (
        ("logits_to_keep", True), ("logits_to_keep", torch.tensor(1)), ("logits_to_keep", 0), ("logits_to_keep", None),
        ("position_ids", torch.zeros(1, 3, 2, 9)), ("position_ids", [[0]]), ("attention_mask", torch.ones(2, 1, 9, 9)),
        ("attention_mask", {}), ("inputs_embeds", torch.zeros(2, 9, 32)), ("token_type_ids", torch.zeros(2, 9)),
    ):  # fmt: skip
        assert not prompt_steps._is_plain(cache, plain | {name: x}), name
    cache.layout.only_ones_follow = True
    assert not prompt_steps._is_plain(cache, plain)


def test_models_whose_prompts_are_not_captured(captured):
    """Where that is not wanted, and those whose frequencies follow the longest text."""
    stock, model = twins("llama", 16)
    counts = []
    for options in ({}, {"cuda_graphs": False}):
        hf_turbo.patch(model, block_size=32, **options)
        steps = captured(model)
        assert torch.equal(new_text(model, prompt(2, 9), 5), new_text(stock, prompt(2, 9), 5))
        counts.append(steps.num_prompts)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    stock, model = twins("llama", 4, rope_parameters=rope)
    dynamic = captured(model)
    assert torch.equal(new_text(model, ragged(2, 9), 5), new_text(stock, ragged(2, 9), 5))
    assert counts == [1, 0] and dynamic.num_prompts == 0


def test_what_a_models_prompts_cost():
    """Weights of 4 bits are as many as others; looked at once."""
    stock, model = build("llama"), hf_turbo.quantize(build("llama"), group_size=16)
    matrices = sum(p.numel() for p in stock.parameters() if p.dim() == 2)
    hf_turbo.patch(model)
    facts = PromptFacts.of(model)
    assert facts == PromptFacts(work=matrices / 2, has_experts=False, together=True)
    assert PromptFacts.of(model) is facts


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_masks_of_ones_own(captured, name):
    """Of four dimensions, for a model whose layers differ in a dict of them."""
    stock, model = twins(name, 4)
    steps, mask = captured(model), torch.full((3, 3), -1e9).triu(1)
    mask[2, 1] = -1e9
    mask = mask.expand(2, 4, 3, 3)  # as many heads as columns, and more
    masks = mask if name == "llama" else {"full_attention": mask, "sliding_attention": mask}
    inputs = {"input_ids": prompt(2, 3), "attention_mask": masks, "logits_to_keep": 1}
    got = model(**inputs, **{CACHE_NAME: hf_turbo.paged_cache(model)}).logits
    torch.testing.assert_close(got, stock(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert steps.num_prompts == 0


def test_many_tokens_of_experts_are_not_captured(captured, monkeypatch):
    stock, model = twins("qwen3_moe", 4)
    steps = captured(model)
    monkeypatch.setattr(prompt_steps, "MAX_PACKED_EXPERTS", 17)
    for inputs in (prompt(2, 9), prompt(1, 9)):
        assert torch.equal(new_text(model, inputs, 5), new_text(stock, inputs, 5))
    assert steps.num_prompts == 1
    assert not hf_turbo.report(model).stepped_aside
    model.bfloat16()
    steps.graphs.clear()
    for kind, num_prompts in (("grouped_mm", 2), ("batched_mm", 2)):  # they read weights once, and once a token
        model.set_experts_implementation(kind)
        new_text(model, prompt(2, 9), 5)
        assert steps.num_prompts == num_prompts


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


@torch.no_grad()
def test_a_prompt_after_one_that_was_stored_in_part(captured):
    """All of it is stored: what is within the window of an earlier token can be had, however long the one before was.
    """
    stock, model = twins("mistral", 16)
    steps, cache, ids = captured(model), hf_turbo.paged_cache(model), prompt(1, 12)
    for length in (9, 15):  # by the first it is known that prompts are not read from blocks
        model(prompt(1, length), **{CACHE_NAME: cache})
        cache.crop(-length)
    model(ids, logits_to_keep=1, **{CACHE_NAME: cache})
    cache.crop(-1)
    got = model(ids[:, 11:], **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(got, stock(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)
    assert steps.num_prompts == 1
