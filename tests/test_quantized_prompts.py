"""Short prompts of quantized caches as captured steps, on a CPU: stored wide, and codes made of them afterwards."""

import pytest
import torch
from combinations import few
from helpers import assert_pool_accounts, generate, groups, poison_what_is_freed, prompt, ragged, used_blocks
from kv_policy import follow_policy, whole_cache
from steps import capture_prompts
from test_quantized_kv import MODELS, MODES, B, content, pair, same_text
from tiny_models import build

import hf_turbo
from hf_turbo.cache.coded_group import CodedGroup
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import prompt_steps
from hf_turbo.ops.kv_format import KV_FORMATS
from hf_turbo.patching import handle_of


@pytest.fixture
def captured(monkeypatch):
    poison_what_is_freed(monkeypatch)
    return capture_prompts(monkeypatch)


@pytest.mark.parametrize("name, kind", few(MODELS, KV_FORMATS))
def test_text(captured, monkeypatch, name, kind):
    """Prompts of which some become codes, and texts that go on from those; a prompt sees itself as it is."""
    monkeypatch.setattr(prompt_steps, "MAX_PACKED_EXPERTS", 1024)
    policy, model = pair(name, kind)
    steps = captured(model)
    for inputs in (ragged(200, 97, 20), ragged(96, 150)):
        same_text(policy, model, inputs, 40)
    assert steps.num_prompts == 2
    assert used_blocks(model) == 0


@pytest.mark.parametrize("mode, name", few(MODES, ["llama", "window and full"]))
def test_modes(captured, mode, name):
    """Copies of a prompt hold its codes together."""
    policy, model = pair(name)
    steps = captured(model)
    inputs = prompt(1, 140) if mode == "lookup" else ragged(110, 140)
    same_text(policy, model, inputs, 25, **MODES[mode])
    assert steps.num_rows == [140 if mode == "lookup" else 250]
    assert used_blocks(model) == 0


@pytest.mark.parametrize("name", ["llama", "window and full", "narrow window"])
@torch.no_grad()
def test_the_cache_is_the_same_as_without(captured, name):
    """Of all lengths around those at which a block becomes codes: what is held, wide or as codes, and its numbers."""
    caches = []
    for is_captured in (False, True):
        _, model = pair(name)
        steps = captured(model) if is_captured else None
        ours = []
        for length in (1, B, 2 * B + 1, 3 * B - 1, 3 * B, 3 * B + 1, 4 * B, 4 * B + 1, 200):
            cache = hf_turbo.paged_cache(model)
            inputs = ragged(length, 2, length + 3)
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
            model(**inputs, logits_to_keep=1, **{CACHE_NAME: cache})
            ours.append(cache)
        caches.append(ours)
    assert steps.num_prompts == len(ours)
    for own, stepwise in zip(*caches, strict=True):
        for window, group in own.groups.items():
            one, other = group.table, stepwise.groups[window].table
            assert list(map(len, one.rows)) == list(map(len, other.rows)) and one.first == other.first
            assert [x is None for x in one.anchors] == [x is None for x in other.anchors]
            assert list(map(len, one.codes.rows)) == list(map(len, other.codes.rows))
        assert own.lengths == stepwise.lengths and own.num_blocks == stepwise.num_blocks
        for x, y in zip(content(own), content(stepwise), strict=True):
            torch.testing.assert_close(y, x, rtol=0, atol=0.05)  # a code may flip, as sums are in another order
            assert (x - y).abs().mean() < 1e-4


@pytest.mark.parametrize("name, length", few(["llama", "window and full", "sinks"], [3, 60, 200]))
def test_what_follows_a_text(captured, monkeypatch, name, length):
    """Its tokens see codes by their positions, those included that earlier ones of them have become."""
    monkeypatch.setattr(prompt_steps, "MAX_PACKED_EXPERTS", 1024)
    policy, model = pair(name)
    steps, texts, batch = captured(model), [], ragged(80, 110)
    for one, own in ((policy, whole_cache()), (model, {})):
        first = generate(one, {**batch, **own}, 20)
        turn = torch.cat([first.sequences, prompt(2, length, seed=8)], 1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, 20 + length), value=1)
        again = {"input_ids": turn, "attention_mask": mask, CACHE_NAME: first[CACHE_NAME]}
        texts.append(generate(one, again, 40).sequences)
    assert torch.equal(*texts)
    assert steps.num_rows == [190, 2 * length + 2]  # the last new token had not been computed
    del first, again
    assert used_blocks(model) == 0


@pytest.mark.parametrize("name", ["llama", "window and full", "narrow window"])
@pytest.mark.parametrize(
    "num_rows, lengths",
    # The last few tokens are more edges than they would fill blocks.
    [(2, (4 * B, 40, B - 8, 2, B, 3 * B + 5, B - 1, 2, 70)), (5, (3 * B - 1, 2))],
)
@torch.no_grad()
def test_the_cache_after_several_turns(captured, name, num_rows, lengths):
    """As without: over all edges, and with rows that are taken back in between."""
    caches, logits = [], []
    for is_captured in (False, True):
        _, model = pair(name)
        steps = captured(model) if is_captured else None
        cache, start, outputs = hf_turbo.paged_cache(model), 0, []
        cache.activate_past_recording()
        for length in lengths:
            ids = prompt(num_rows, length, seed=length)
            places = torch.arange(start, start + length).repeat(num_rows, 1)
            outputs.append(model(ids, position_ids=places, logits_to_keep=1, **{CACHE_NAME: cache}).logits)
            start += length
            if length == B:
                cache.crop(-3)
                start -= 3
        caches.append(cache)
        logits.append(torch.cat(outputs))
    assert steps.num_prompts == len(outputs)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    own, stepwise = caches
    assert own.lengths == stepwise.lengths
    for x, y in zip(content(own), content(stepwise), strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0.05)  # a code may flip, as sums are in another order
        assert (x - y).abs().mean() < 1e-4


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_the_first_prompt_that_tells_the_formats(captured, kind):
    """Goes the model's own way, where its keys are looked at. Shorter ones have nothing to say before it."""
    stock, model = (build("llama", max_position_embeddings=2048) for _ in range(2))
    hf_turbo.patch(model, block_size=B, kv_cache_dtype=kind)
    steps, until = captured(model), follow_policy(stock, "int8", B)
    ids = prompt(1, 63)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(2):
        assert torch.equal(
            generate(model, given, 90).sequences, generate(until, {**given, **whole_cache()}, 90).sequences
        )
    assert until.config.kv_policy.queries_with_codes and steps.num_rows == [63, 63]
    assert hf_turbo.report(model).unsettled_layers == 2
    generate(model, prompt(1, 64), 2)
    assert steps.num_rows == [63, 63] and hf_turbo.report(model).unsettled_layers == 0
    until.config.kv_policy.kind = kind
    steps.graphs.clear()  # those of stores that are no more
    same_text(until, model, prompt(1, 140), 20)
    assert steps.num_rows == [63, 63, 140]


@pytest.mark.parametrize("name", ["llama", "window and full", "narrow window"])
def test_prompts_that_begin_alike(captured, name):
    """What is kept of a captured prompt is found as ever, out of its window, too, and the rest goes on from that."""
    found, texts = [], []
    for is_captured in (False, True):
        _, model = pair(name, prefix_cache=True)
        steps = captured(model) if is_captured else None
        texts.append([generate(model, prompt(2, 270, seed), 20).sequences for seed in (0, 0, 1)])
        found.append(hf_turbo.report(model).prefix_tokens_found)
        assert used_blocks(model) == 0
    assert all(map(torch.equal, *texts))
    assert found[0] == found[1] == 512
    assert steps.num_rows == [540, 28, 540]


def test_a_prompt_that_fails_goes_the_models_own_way(captured, monkeypatch):
    policy, model = pair("window and full")
    captured(model)
    num_failed = 0

    def step(model, forward, kwargs):
        nonlocal num_failed
        if kwargs[CACHE_NAME].layout.packed is not None:
            num_failed += 1
            kwargs[CACHE_NAME].advance()

    monkeypatch.setattr(handle_of(model).steps, "run", step)
    same_text(policy, model, ragged(140, 200), 40, num_beams=2)
    assert num_failed == 1 and used_blocks(model) == 0
    assert_pool_accounts(model)


def test_a_prompt_for_which_there_is_no_memory(captured, monkeypatch):
    """What it has taken in wide blocks is given back before the model's own way, which needs few of them."""
    policy, model = pair("llama")
    captured(model)
    quantize, num_failed = CodedGroup.quantize_blocks, 0

    def fails_once(self, stores, pairs):
        nonlocal num_failed
        num_failed += 1
        if num_failed == 1:
            raise torch.OutOfMemoryError("all is taken")
        quantize(self, stores, pairs)

    monkeypatch.setattr(CodedGroup, "quantize_blocks", fails_once)
    same_text(policy, model, prompt(1, 400), 40)
    assert num_failed > 1 and used_blocks(model) == 0
    assert list(hf_turbo.report(model).stepped_aside) == ["there was too little memory for a captured prompt"]
    wide = groups(model)[None].manager
    assert wide.num_blocks < 400 // B


def test_what_a_failed_prompt_took_is_given_back(captured, monkeypatch):
    """Too little memory to capture it, for one, is no reason to have less for the model's own way."""
    policy, model = pair("llama")

    def step(model, forward, kwargs):
        if kwargs[CACHE_NAME].layout.packed is not None:
            kwargs[CACHE_NAME].advance()

    monkeypatch.setattr(handle_of(model).steps, "run", step)
    sizes = []
    for length in (400, 100, 700):
        same_text(policy, model, prompt(1, length), 20)
        sizes.append(groups(model)[None].manager.num_blocks)
    assert max(sizes) < 400 // B


def test_wide_blocks_are_given_back_at_once(captured):
    """Those of which codes have been made."""
    _, model = pair("llama")
    captured(model)
    cache = generate(model, prompt(1, 400), 1)[CACHE_NAME]
    wide, codes = groups(model)[None].manager, groups(model)[None].codes.manager
    assert (wide.num_used, codes.num_used) == (3, 10) and cache.num_blocks == 13
