"""Drafts over quantized caches and quantized weights: the text that the same model gives without drafts."""

from __future__ import annotations

import copy

import pytest
import torch
from combinations import few
from drafting import TREES, Knowing, heads_of, random_model, tree_of
from helpers import assert_pool_accounts, generate, groups, prompt, ragged, stepped_aside, used_blocks
from kv_policy import follow_policy, whole_cache
from tiny_models import build

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.prompt_lookup import PromptLookup
from hf_turbo.patching import handle_of

LONG = {"max_position_embeddings": 1024}
#: name -> (architecture, overrides). Windows wider and narrower than a block of 32.
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "wide window": ("mistral", {"sliding_window": 70}),
    "narrow window": ("gemma3_text", {}),
    "window and full": ("gemma3_text", {"sliding_window": 70}),
}


def policy_and_model(name, kind, block_size):
    """A stock model that follows the policy of quantized caches, and the same one to patch."""
    architecture, overrides = MODELS[name]
    models = [build(architecture, **{**LONG, **overrides}) for _ in range(2)]
    return follow_policy(models[0], kind, block_size), models[1]


def patch(model, kind, block_size, speculation):
    hf_turbo.patch(model, block_size=block_size, kv_cache_dtype=kind, speculation=speculation)
    handle = handle_of(model)  # what a prompt's keys would have to say of it is not asked
    handle.pool.formats |= dict.fromkeys(range(len(handle.sliding_windows)), kind)


def as_inputs(batch):
    return batch if isinstance(batch, dict) else {"input_ids": batch, "attention_mask": torch.ones_like(batch)}


def policy_text(policy, batch, new_tokens):
    """What the policy says; some query has seen codes."""
    before = policy.config.kv_policy.queries_with_codes
    text = generate(policy, {**as_inputs(batch), **whole_cache()}, new_tokens).sequences
    assert policy.config.kv_policy.queries_with_codes > before, "nothing was read as codes: the test shows nothing"
    return text


def assert_is_text(model, batch, want, needs_drafts=True):
    got = generate(model, as_inputs(batch), want.shape[1] - as_inputs(batch)["input_ids"].shape[1])
    assert torch.equal(got.sequences, want)
    del got
    assert used_blocks(model) == 0 and not stepped_aside(model)
    assert_pool_accounts(model)
    for group in groups(model).values():
        manager = group.codes.manager
        assert manager.num_free + manager.num_used == manager.num_blocks == sum(manager.segment_sizes)
    assert not needs_drafts or any(pace.stats().accepted for pace in handle_of(model).drafters.values())


@pytest.mark.parametrize(
    "name, kind", [*((name, "int4") for name in MODELS), ("qwen2", "int8"), ("window and full", "fp8")]
)
def test_any_tree(name, kind):
    """Rounds whose tokens cross the ends of blocks, from every place within one."""
    policy, model = policy_and_model(name, kind, 32)
    batch = ragged(66, 97)
    want = policy_text(policy, batch, 48)
    for i, tree in enumerate(TREES):
        patch(model, kind, 32, Knowing(want, tree_of(tree), seed=i))
        assert_is_text(model, batch, want)


@pytest.mark.parametrize("name, length", few(["llama", "window and full"], [95, 96, 97, 127, 128, 129]))
def test_prompts_that_end_at_a_blocks_edge(name, length):
    policy, model = policy_and_model(name, "int4", 32)
    batch = prompt(1, length)
    want = policy_text(policy, batch, 40)
    for tree in ("chain of 5", "64 nodes"):
        patch(model, "int4", 32, Knowing(want, tree_of(tree)))
        assert_is_text(model, batch, want)


def test_blocks_of_64():
    policy, model = policy_and_model("llama", "int4", 64)
    batch = ragged(120, 190)
    want = policy_text(policy, batch, 70)
    for tree in ("chain of 5", "63 nodes", "64 nodes"):
        patch(model, "int4", 64, Knowing(want, tree_of(tree)))
        assert_is_text(model, batch, want)


@pytest.mark.parametrize("name", ["llama", "window and full"])
def test_s01_drafters(name, tmp_path):
    """Those that there are; a draft model's own cache may be quantized, too."""
    policy, model = policy_and_model(name, "int4", 32)
    batch = ragged(66, 97)
    want = policy_text(policy, batch, 40)
    same, other = build(MODELS[name][0], **LONG, **MODELS[name][1]), random_model(MODELS[name][0], **LONG)
    quantized = hf_turbo.patch(copy.deepcopy(same), block_size=32, kv_cache_dtype="int8")
    for draft, num_tokens in ((same, 5), (same, 31), (quantized, 20), (other, 5)):
        patch(model, "int4", 32, DraftModel(draft, num_tokens, adaptive=False))
        assert_is_text(model, batch, want, needs_drafts=draft is not other)
    patch(model, "int4", 32, PromptLookup(20, min_match=1, adaptive=False))
    assert_is_text(model, batch, want)
    patch(model, "int4", 32, Medusa(heads_of(model, tmp_path), adaptive=False))
    assert_is_text(model, batch, want, needs_drafts=False)
    assert used_blocks(quantized) == 0


def test_a_cache_that_is_gone_on_with():
    """What is kept of rejected drafts is not in the codes that the next turn reads."""
    policy, model = policy_and_model("llama", "int4", 32)
    batch = ragged(66, 97)
    texts = []
    for one in (policy, model):
        own = whole_cache() if one is policy else {}
        if one is model:
            patch(model, "int4", 32, Knowing(texts[0], tree_of("full 2x2x2")))
        first = generate(one, {**batch, **own}, 40)
        turn = torch.cat([first.sequences, prompt(2, 30)], 1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, 70), value=1)
        given = {"input_ids": turn, "attention_mask": mask, CACHE_NAME: first[CACHE_NAME]}
        texts.append(generate(one, given, 40).sequences)
    assert torch.equal(*texts)
    del first, given
    assert used_blocks(model) == 0
