"""`prefix_cache` with `kv_cache_dtype`: a found beginning gives what a cache that was kept gives, token for token."""

import pytest
import torch
from combinations import few
from helpers import generate, groups, poison_what_is_freed, prompt, used_blocks
from kv_policy import follow_policy, whole_cache
from tiny_models import build

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.patching import handle_of


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_what_is_freed(monkeypatch)


B = 32
QUANTIZED = {
    "llama": ("llama", {}),
    "wide window": ("mistral", {"sliding_window": 110}),
    "window and full": ("gemma3_text", {"sliding_window": 110}),
    "narrow window": ("gemma3_text", {"sliding_window": 8}),
}


def found(model) -> int:
    return hf_turbo.report(model).prefix_tokens_found


def quantized_pair(name: str):
    architecture, overrides = QUANTIZED[name]
    overrides = {"max_position_embeddings": 2048, **overrides}
    policy, model = build(architecture, **overrides), build(architecture, **overrides)
    hf_turbo.patch(model, block_size=B, kv_cache_dtype="int4", prefix_cache=True)
    handle = handle_of(model)
    handle.pool.formats |= dict.fromkeys(range(len(handle.sliding_windows)), "int4")
    return follow_policy(policy, "int4", B), model


@pytest.mark.parametrize("name, length", few(QUANTIZED, [95, 96, 97, 140]))
def test_quantized_turns(name, length):
    """A turn that finds its beginning gives what it gives over a cache that was kept and cropped to that."""
    policy, model = quantized_pair(name)
    ids = prompt(2, length)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    first = generate(policy, {**inputs, **whole_cache()}, 40)
    assert torch.equal(generate(model, inputs, 40).sequences, first.sequences)
    turn = torch.cat([first.sequences, prompt(2, 70, seed=8)], dim=1)
    cache, common = first[CACHE_NAME], (length + 39) // B * B
    cache.crop(common - cache.get_seq_length())
    inputs = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    expected = generate(policy, {**inputs, CACHE_NAME: cache}, 40).sequences
    assert torch.equal(generate(model, inputs, 40).sequences, expected)
    assert found(model) == 2 * common
    assert used_blocks(model) == 0
    for group in groups(model).values():
        manager = group.codes.manager
        assert manager.num_free + manager.num_cached == manager.num_blocks


def test_quantized_texts_that_part_within_one():
    """Blocks that the next token sees wide are only there where a text has ended: there alone it is found."""
    policy, model = quantized_pair("llama")
    system = prompt(1, 100)
    generate(model, torch.cat([system, prompt(1, 60, seed=1)], dim=1), 5)
    turn = torch.cat([system, prompt(1, 60, seed=2)], dim=1)
    generate(model, turn, 5)
    assert found(model) == B, "the first block is always wide"
    generate(model, system, 1)
    handle_of(model).pool.index.tokens_found = 0
    turn = torch.cat([system, prompt(1, 60, seed=3)], dim=1)
    cache = whole_cache()
    generate(policy, {"input_ids": system[:, :96], "attention_mask": torch.ones(1, 96, dtype=torch.long), **cache}, 1)
    inputs = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    expected = generate(policy, {**inputs, **cache}, 20).sequences
    assert torch.equal(generate(model, inputs, 20).sequences, expected)
    assert found(model) == 96
