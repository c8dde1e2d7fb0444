"""Drafts with every architecture of the zoo: the plain text, or a reason why there are none."""

from __future__ import annotations

import copy

import pytest
import torch
from drafting import Knowing, tree_of
from helpers import assert_pool_accounts, generate, ragged, stepped_aside, used_blocks
from tiny_models import ACCELERATED, THOROUGH, ZOO, build, expectation, in_this_transformers

import hf_turbo
from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.prompt_lookup import PromptLookup
from hf_turbo.patching import handle_of

NEW_TOKENS = 20
#: Beside the thorough ones: other kinds of positions, norms and layers.
QUICK = THOROUGH | {"cohere", "deepseek_v3", "exaone4", "gpt_neox", "jamba", "opt", "qwen3", "qwen3_moe"}
#: Of those that are accelerated: whose `prepare_inputs_for_generation` no loop of ours knows.
WITHOUT = {"ctrl", "phi3", "phimoe"}
NAMES = [name for name in ZOO if in_this_transformers(name)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_plain_text(name):
    stock, model = build(name), build(name)
    batch = ragged(3, 7, 12, 19)
    want = generate(stock, batch, NEW_TOKENS).sequences
    for speculation in (
        PromptLookup(5, min_match=1, adaptive=False),
        DraftModel(copy.deepcopy(stock), 5, adaptive=False),
        Knowing(want, tree_of("full 2x2x2")),
    ):
        hf_turbo.patch(model, block_size=4, speculation=speculation)
        got = generate(model, batch, NEW_TOKENS, return_dict_in_generate=False)
        assert torch.equal(got, want), repr(speculation)
        has_drafts = expectation(model, name) == ACCELERATED and name not in WITHOUT
        assert any(pace.stats().rounds for pace in handle_of(model).drafters.values()) == has_drafts
        assert bool(stepped_aside(model)) == (not has_drafts)
        assert used_blocks(model) == 0
        assert_pool_accounts(model)
