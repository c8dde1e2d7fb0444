"""Greedy text with drafts is the unpatched model's, token for token: S01, S02, S04, S06 and M01 of the cases."""

from __future__ import annotations

import copy

import pytest
import torch
from combinations import few
from drafting import (
    RAGGED,
    SINGLE,
    TREES,
    Knowing,
    assert_drafted,
    assert_same_output,
    assert_same_text,
    drafted,
    heads_of,
    pair,
    random_model,
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
DRAFTS = {
    "same": lambda name, **overrides: copy.deepcopy(pair(name, **overrides).stock),
    "random": random_model,
    "first layer": truncated,
}
PROMPTS = {"one token": prompt(1, 1), "40 tokens": prompt(1, 40), "several rows": RAGGED}
#: Drafts that are wrong take many forwards: the others are tried where there is time.
QUICK = {
    *(("llama", "same", num_tokens) for num_tokens in (1, 2, 5, 20)),
    ("gpt2", "same", 5),
    ("window of 8", "same", 2),
    ("window of 8", "same", 20),
    ("window of 3", "same", 5),
    ("window of 3", "same", 20),
    ("llama", "first layer", 5),
    ("window of 8", "random", 5),
    ("window of 3", "random", 2),
}


def draft_cases():
    for name in MODELS:
        for kind in DRAFTS:
            for num_tokens in (1, 2, 5, 20):
                marks = [] if (name, kind, num_tokens) in QUICK else pytest.mark.slow
                yield pytest.param(name, kind, num_tokens, id=f"{name}-{kind}-{num_tokens}", marks=marks)


@pytest.fixture(params=MODELS)
def one(request):
    name, overrides = MODELS[request.param]
    return pair(name, **overrides)


@pytest.mark.parametrize("name, kind, num_tokens", [*draft_cases()])
def test_s01_draft_models(name, kind, num_tokens):
    architecture, overrides = MODELS[name]
    one, draft = pair(architecture, **overrides), DRAFTS[kind](architecture, **overrides)
    drafted(one, DraftModel(draft, num_tokens, adaptive=False))
    for inputs in PROMPTS.values():
        seen = assert_same_text(one, inputs)
    if kind == "same":
        assert seen.acceptance_rate > 0.9
    if kind == "random":
        assert seen.acceptance_rate < 0.1


@pytest.mark.parametrize("one, lookup", few(MODELS, [(1, 16), (3, 1), (20, 4)]), indirect=["one"])
def test_s01_prompt_lookup(one, lookup):
    num_tokens, block_size = lookup
    drafted(one, PromptLookup(num_tokens, min_match=1, adaptive=False), block_size)
    for inputs in PROMPTS.values():
        seen = assert_same_text(one, inputs)
    assert 0 < seen.accepted < seen.drafted


@pytest.mark.parametrize("block_size", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))])
@pytest.mark.parametrize("tree", TREES)
def test_m01_any_tree_of_which_any_part_is_right(one, tree, block_size):
    """Nodes of rubbish around those that are right, at every place of the tree."""
    for inputs in (prompt(1, 1), RAGGED):
        known = Knowing(one.plain(inputs, 64), tree_of(tree))
        drafted(one, known, block_size)
        seen = assert_same_text(one, inputs)
        assert 0 < seen.accepted < seen.drafted
        assert seen.rounds < 64


@pytest.mark.parametrize("one, tree", few(MODELS, TREES), indirect=["one"])
def test_m01_random_heads(one, tree, tmp_path):
    heads = heads_of(one.model, tmp_path, num_heads=5)
    drafted(one, Medusa(heads, tree=TREES[tree], adaptive=False))
    assert_same_text(one, RAGGED, 32)


@pytest.mark.parametrize(
    "one, edge", few(MODELS, [(4, 3), (4, 4), (4, 5), (16, 15), (16, 16), (16, 17)]), indirect=["one"]
)
def test_prompts_that_end_at_a_blocks_edge(one, edge):
    block_size, length = edge
    inputs = prompt(1, length)
    for tree in ("full 2x2x2", "chain of 5"):
        drafted(one, Knowing(one.plain(inputs, 24), tree_of(tree)), block_size)
        assert_same_text(one, inputs, 24)


# Where texts end: S02 and S04


def ways(one, inputs, tmp_path, truth=None):
    """Ways of drafting, by name."""
    truth = one.plain(inputs, 64) if truth is None else truth
    return {
        "draft model": DraftModel(copy.deepcopy(one.stock), 7, adaptive=False),
        "prompt lookup": PromptLookup(3, min_match=1, adaptive=False),
        "tree": Knowing(truth, tree_of("full 2x2x2")),
        "chain": Knowing(truth, tree_of("chain of 5")),
        "heads": Medusa(heads_of(one.model, tmp_path), adaptive=False),
    }


def assert_same_dict(one, inputs, new_tokens, **options):
    """Also what is cached, and the scores."""
    options = {"output_scores": True, "output_logits": True, **options}
    mask = torch.ones_like(inputs) if isinstance(inputs, torch.Tensor) else inputs["attention_mask"]
    want, got = (generate(model, inputs, new_tokens, **options) for model in (one.stock, one.model))
    assert_same_output(want, got, mask, options["eos_token_id"])
    del got
    assert_drafted(one.model, needs_drafts=False)
    return want


@pytest.mark.parametrize("name, batch", [("llama", SINGLE), ("window of 8", RAGGED)], ids=["one row", "several"])
def test_s02_an_end_within_a_draft(name, batch, tmp_path):
    """Nothing comes after it: not in the text, the scores or the cache."""
    one = pair(*MODELS[name][:1])
    text = one.plain(batch, 64)[:, -64:]
    for speculation in ways(one, batch, tmp_path).values():
        drafted(one, speculation)
        for place in (3, 4, 5):
            ends = [text[-1, place].item(), text[0, 9].item()]
            assert_same_text(one, batch, 16, needs_drafts=False, eos_token_id=text[0, place].item())
            stock = assert_same_dict(one, batch, 16, eos_token_id=ends)
            assert torch.isin(stock.sequences[:, -16:], torch.tensor(ends)).any()


def test_s02_an_end_that_only_the_draft_says():
    """It is no end of the text."""
    one = pair("llama")
    [end] = sorted(set(range(3, 128)) - set(one.plain(RAGGED, 64).flatten().tolist()))[:1]
    for tree in TREES:
        drafted(one, Knowing(torch.full((4, 96), end), tree_of(tree)))
        assert assert_same_text(one, RAGGED, 32, eos_token_id=end).acceptance_rate < 0.1
        assert one.plain(RAGGED, 32, eos_token_id=end).shape[1] == 12 + 32


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [SINGLE, RAGGED], ids=["one row", "several"])
def test_s04_a_limit_within_a_draft(batch, new_tokens, tmp_path):
    one = pair("gemma3_text")
    columns = (batch if isinstance(batch, torch.Tensor) else batch["input_ids"]).shape[1]
    for name, speculation in ways(one, batch, tmp_path).items():
        drafted(one, speculation)
        for limit in ({"max_new_tokens": new_tokens}, {"max_new_tokens": None, "max_length": columns + new_tokens}):
            want, got = (generate(model, batch, **limit) for model in (one.stock, one.model))
            assert torch.equal(got.sequences, want.sequences), name
            assert got.sequences.shape[1] == columns + new_tokens
            assert got[CACHE_NAME].get_seq_length() == columns + new_tokens - 1
        del got


def test_s04_no_end_before_so_many_tokens():
    one = pair("llama")
    end = one.plain(SINGLE, 64)[0, -60].item()
    for num_tokens in (3, 10):
        drafted(one, DraftModel(copy.deepcopy(one.stock), num_tokens, adaptive=False))
        assert_same_text(one, SINGLE, 24, eos_token_id=end)
        assert_same_text(one, SINGLE, 24, eos_token_id=end, min_new_tokens=15)
        assert one.plain(SINGLE, 24, eos_token_id=end, min_new_tokens=15).shape[1] >= 9 + 15


# Rows of a batch: S06


class SilentOfOne(Knowing):
    """Says nothing of the second row, and of the first all that it knows."""

    def propose(self, size, texts, num_unknown=0):
        draft = super().propose(size, texts)
        for i, row in enumerate(self.rows):
            if row == 1:
                draft.tokens[i, 1:] = -1
            if row == 0:
                coming = self.texts[0][texts.lengths[i] :]
                for node, token in zip(self.tree.paths[-1][1:], coming):
                    draft.tokens[i, node] = token
        return draft


@pytest.mark.parametrize("name, tree", few(["llama", "window of 8"], ["full 2x2x2", "chain of 5"]))
def test_s06_rows_that_accept_differently(name, tree):
    """One is always right, one never, one ends early: each as if it were alone, with padding after its end."""
    one = pair(MODELS[name][0], **MODELS[name][1])
    text = one.plain(RAGGED, 64)[:, -64:]
    end = text[2, 5].item()
    drafted(one, SilentOfOne(one.plain(RAGGED, 64, eos_token_id=end), tree_of(tree)))
    assert_same_text(one, RAGGED, 64, eos_token_id=end)
    got = new_text(one.model, RAGGED, 64, eos_token_id=end)
    for row, (ids, mask) in enumerate(zip(RAGGED["input_ids"], RAGGED["attention_mask"])):
        alone = new_text(one.stock, ids[mask.bool()][None], 64, eos_token_id=end)[0]
        assert got[row, : len(alone)].tolist() == alone.tolist()
        assert (got[row, len(alone) :] == 0).all()


def test_s06_rows_in_another_order():
    """A batch of many rows that end one after another."""
    one = pair("gemma3_text")
    batch = ragged(*range(2, 14))
    ends = one.plain(batch, 64)[:, -64:].diagonal(3)[:8].tolist()
    for tree in ("full 2x2x2", "chain of 5"):
        drafted(one, Knowing(one.plain(batch, 64, eos_token_id=ends), tree_of(tree)))
        assert_same_text(one, batch, 64, eos_token_id=ends)
    drafted(one, DraftModel(truncated("gemma3_text"), 3, adaptive=False))
    assert_same_text(one, batch, 64, eos_token_id=ends)
