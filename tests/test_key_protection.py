"""`kv_cache_dtype="int4"`: which layers are kept in int8 after all, from the first prompt that can tell on."""

import logging

import pytest
import torch
from helpers import assert_pool_accounts, generate, prompt, ragged, used_blocks
from kv_policy import follow_policy, whole_cache
from tiny_models import build

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import attention
from hf_turbo.patching import handle_of

B = 32


def model_with_outliers(layer):
    """A tiny Qwen2; one layer's keys have a channel that is far larger than the rest (CASES Q01)."""
    model = build("qwen2", max_position_embeddings=2048)
    if layer is not None:
        weights = model.model.layers[layer].self_attn
        weights.k_proj.bias.data[::4] = 30 * weights.k_proj.weight.std() * model.config.hidden_size**0.5
        weights.q_proj.weight.data *= 3
    return model


def patched(layer=0, kind="int4"):
    return hf_turbo.patch(model_with_outliers(layer), block_size=B, kv_cache_dtype=kind)


def test_q01_the_layer_that_needs_it(caplog):
    """Text is that of a cache whose first layer is in int8 and whose others are in int4, from the first prompt on."""
    model, policy = patched(), follow_policy(model_with_outliers(0), "int4", B)
    policy.config.kv_policy.kinds[0] = "int8"
    inputs = ragged(110, 140)
    with caplog.at_level(logging.WARNING, "hf_turbo"):
        for _ in range(2):
            expected = generate(policy, {**inputs, **whole_cache()}, 40).sequences
            assert torch.equal(generate(model, inputs, 40).sequences, expected)
    assert policy.config.kv_policy.queries_with_codes
    report = hf_turbo.report(model)
    assert report.protected_layers == {0: "int8"}
    assert "can't take int4: layers 0" in str(report)
    assert sum("keys and values of layer 0 in int8" in record.message for record in caplog.records) == 1
    assert used_blocks(model) == 0
    assert_pool_accounts(model)


def test_what_it_costs():
    """The report's bytes a token count the layer in int8."""
    bytes_per_token = []
    for layer in (None, 0):
        model = patched(layer)
        generate(model, prompt(1, 110), 4)
        bytes_per_token.append(hf_turbo.report(model).kv_bytes_per_token)
    assert bytes_per_token[0] < bytes_per_token[1] < 1.5 * bytes_per_token[0]


def test_a_plain_model_is_not_asked_again(monkeypatch):
    model = patched(None)
    generate(model, prompt(1, 110), 4)
    assert hf_turbo.report(model).protected_layers == {}
    assert set(handle_of(model).pool.formats.values()) == {"int4"}
    monkeypatch.setattr(attention, "check_keys", lambda *args: pytest.fail("asked again"))
    generate(model, prompt(1, 110), 4)


def test_until_a_prompt_can_tell():
    """Layers are in int8 after prompts too short for a verdict, also where the text grows beyond; then in int4."""
    model, policy = patched(None), follow_policy(model_with_outliers(None), "int8", B)
    ids = prompt(1, 20)
    for _ in range(2):
        expected = generate(policy, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **whole_cache()}, 130)
        first = generate(model, ids, 130)
        assert torch.equal(first.sequences, expected.sequences)
    assert policy.config.kv_policy.queries_with_codes
    assert "kept in int8 until" in str(hf_turbo.report(model))
    cache = first[CACHE_NAME]
    keys = [layer.keys.clone() for layer in cache.layers]
    generate(model, prompt(1, 110), 4)
    assert "kept in int8 until" not in str(hf_turbo.report(model))
    assert set(handle_of(model).pool.formats.values()) == {"int4"}
    assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, keys)), "a cache in int8 changed"
    again = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences), CACHE_NAME: cache}
    assert generate(model, again, 3).sequences.shape[1] == first.sequences.shape[1] + 3


def test_int8_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(attention, "check_keys", lambda *args: pytest.fail("nothing to settle"))
    model = patched(0, "int8")
    generate(model, prompt(1, 110), 4)
    assert hf_turbo.report(model).protected_layers == {}


def test_fp8_is_checked_as_well():
    """A layer that can't take it is in int8, at the same size."""
    bytes_per_token = []
    for layer in (None, 0):
        model = patched(layer, "fp8")
        if layer is not None:
            model.model.layers[0].self_attn.k_proj.bias.data *= 10
        generate(model, prompt(1, 110), 4)
        report = hf_turbo.report(model)
        assert report.protected_layers == ({} if layer is None else {0: "int8"})
        bytes_per_token.append(report.kv_bytes_per_token)
    assert bytes_per_token[0] == bytes_per_token[1]


def test_when_nothing_suffices(caplog):
    """The better format is taken, and it is said that it does not suffice."""
    model = patched(0)
    model.model.layers[0].self_attn.k_proj.bias.data *= 1000
    with caplog.at_level(logging.WARNING, "hf_turbo"):
        generate(model, prompt(1, 110), 4)
    assert hf_turbo.report(model).protected_layers[0] == "int8"
    assert any("too little, too" in record.message for record in caplog.records)


@pytest.mark.parametrize("kind, window, short", [("int4", 110, True), ("int4", 1030, False), ("fp8", 110, True)])
def test_layers_that_see_few_tokens(kind, window, short):
    """They are in int8 from the beginning: codes would cost as much as elsewhere and spare next to nothing."""
    options = dict(sliding_window=window, max_position_embeddings=2048)
    model = hf_turbo.patch(build("gemma3_text", **options), block_size=B, kv_cache_dtype=kind)
    windows = handle_of(model).sliding_windows
    few = {i: "int8" for i, w in enumerate(windows) if w == window} if short else {}
    assert hf_turbo.report(model).protected_layers == few and (not short or 0 < len(few) < len(windows))
    assert hf_turbo.report(model).unsettled_layers == len(windows) - len(few)
    policy = follow_policy(build("gemma3_text", **options), kind, B)
    policy.config.kv_policy.kinds.update(few)
    inputs = ragged(110, 140)
    expected = generate(policy, {**inputs, **whole_cache()}, 70).sequences
    assert torch.equal(generate(model, inputs, 70).sequences, expected)
    report = hf_turbo.report(model)
    assert report.protected_layers == few and report.unsettled_layers == 0
    assert ("see few tokens" in str(report)) == short
    assert used_blocks(model) == 0
