"""Drafts for texts whose beginning is found in the prefix cache."""

import pytest
import torch
from drafting import heads_of
from helpers import assert_pool_accounts, generate, prompt, ragged, stepped_aside, used_blocks
from tiny_models import build

import hf_turbo


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", ["lookup", "model", "heads"])
def test_drafts_after_what_was_found(kind, name, tmp_path):
    """The text is the unpatched model's; what was drafted and accepted is found in the next turn."""
    stock, model = build(name), build(name)
    drafters = {
        "lookup": lambda: hf_turbo.PromptLookup(adaptive=False),
        "model": lambda: hf_turbo.DraftModel(build(name, noise=0.1), adaptive=False),
        "heads": lambda: hf_turbo.Medusa(heads_of(stock, tmp_path), tree=[[0], [1], [0, 0]], adaptive=False),
    }
    hf_turbo.patch(model, block_size=4, prefix_cache=True, speculation=drafters[kind]())
    batch, found = ragged(9, 22), 0
    for expected in (0, 20):
        text = generate(model, batch, 12).sequences
        assert torch.equal(text, generate(stock, batch, 12).sequences)
        report = hf_turbo.report(model)
        assert report.prefix_tokens_found - found >= expected
        found = report.prefix_tokens_found
    turn = torch.cat([text[1:], prompt(1, 6)], dim=1)
    assert torch.equal(generate(model, turn, 12).sequences, generate(stock, turn, 12).sequences)
    report = hf_turbo.report(model)
    assert report.prefix_tokens_found - found == 32
    assert not stepped_aside(model) and all(stats.drafted for stats in report.drafts.values())
    assert used_blocks(model) == 0
    assert_pool_accounts(model)
