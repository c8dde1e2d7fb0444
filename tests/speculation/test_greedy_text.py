"""Greedy text with drafts is the unpatched model's, token for token: S01, S02, S04, S06 and M01 of the cases."""

from __future__ import annotations

import copy

import pytest
import torch
from drafting import (
    RAGGED,
    SINGLE,
    TREES,
    Knowing,
    assert_drafted,
    assert_same_text,
    drafted,
    heads_of,
    pair,
    random_model,
    stats,
    tree_of,
    truncated,
)
from helpers import generate, new_text, prompt, ragged

from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.prompt_lookup import PromptLookup

#: name -> (architecture, overrides). Windows of 8 and of 3, which is less than trees are deep.
MODELS = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "window of 8": ("gemma3_text", {}),
    "window of 3": ("mistral", {"sliding_window": 3}),
}
DRAFTS = {"same": lambda name, **o: copy.deepcopy(pair(name, **o).stock), "random": random_model, "first layer": truncated}
PROMPTS = {"one token": prompt(1, 1), "40 tokens": prompt(1, 40), "several rows": RAGGED}


@pytest.fixture(params=MODELS)
def one(request):
    name, overrides = MODELS[request.param]
    return pair(name, **overrides)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 20])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", MODELS)
def test_s01_draft_models(name, kind, num_tokens):
    architecture, overrides = MODELS[name]
    one, draft = pair(architecture, **overrides), DRAFTS[kind](architecture, **overrides)
    drafted(one, DraftModel(draft, num_tokens, adaptive=False))
    for label, inputs in PROMPTS.items():
        if (kind, num_tokens) == ("random", 20) and label != "one token":
            continue  # 1,300 forwards of the draft a row, for nothing
        seen = assert_same_text(one, inputs)
    if kind == "same":
        assert seen.acceptance_rate > 0.9
    if kind == "random":
        assert seen.acceptance_rate < 0.1


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_s01_prompt_lookup(one, block_size):
    for num_tokens in (1, 3, 20):
        drafted(one, PromptLookup(num_tokens, min_match=1, adaptive=False), block_size)
        for inputs in PROMPTS.values():
            seen = assert_same_text(one, inputs)
        assert 0 < seen.accepted < seen.drafted


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("tree", TREES)
def test_m01_any_tree_of_which_any_part_is_right(one, tree, block_size):
    """Nodes of rubbish around those that are right, at every place of the tree."""
    for inputs in (prompt(1, 1), RAGGED):
        known = Knowing(one.plain(inputs, 64), tree_of(tree))
        drafted(one, known, block_size)
        seen = assert_same_text(one, inputs)
        assert 0 < seen.accepted < seen.drafted
        assert seen.rounds < 64


@pytest.mark.parametrize("tree", TREES)
def test_m01_random_heads(one, tree, tmp_path):
    heads = heads_of(one.model, tmp_path, num_heads=5)
    drafted(one, Medusa(heads, tree=TREES[tree], adaptive=False))
    for inputs in (SINGLE, RAGGED):
        assert_same_text(one, inputs)


@pytest.mark.parametrize("length", [3, 4, 5, 15, 16, 17])
@pytest.mark.parametrize("block_size", [4, 16])
def test_prompts_that_end_at_a_blocks_edge(one, length, block_size):
    inputs = prompt(1, length)
    for tree in ("full 2x2x2", "chain of 5"):
        drafted(one, Knowing(one.plain(inputs, 32), tree_of(tree)), block_size)
        assert_same_text(one, inputs, 32)
