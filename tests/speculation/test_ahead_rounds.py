"""Rounds with the host one behind, on a CPU: the graphs are computed through the deferred mode, but not recorded."""

import pytest
import torch
from combinations import few
from helpers import generate, new_text, prompt, ragged, twins, used_blocks

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation import speculation
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.modeling.graphs import StepGraphs

NEW = 24


def drafters(stock, tmp_path):
    size = (stock.config.hidden_size, stock.config.vocab_size)
    heads = MedusaHeads(3, 1, *size)
    for p in heads.parameters():
        torch.nn.init.normal_(p, std=0.2)
    heads.save_pretrained(tmp_path)
    tree = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    return {
        "medusa": hf_turbo.Medusa(tmp_path, tree=tree, adaptive=False),
        "chain": hf_turbo.Medusa(tmp_path, tree=[[0], [0, 0]], adaptive=False),
        "adaptive": hf_turbo.Medusa(tmp_path, tree=tree),
        "lookup": hf_turbo.PromptLookup(5, 1, adaptive=False),
        "adaptive lookup": hf_turbo.PromptLookup(7, 1),
        "draft model": hf_turbo.DraftModel(stock, 3),
    }


KINDS = ["medusa", "chain", "adaptive", "lookup", "adaptive lookup", "draft model"]


@pytest.mark.parametrize("name, kind", few(["llama", "gemma3_text"], KINDS))
def test_same_text(ahead, tmp_path, name, kind):
    counts, register = ahead
    stock, model = twins(name, block_size=4)
    speculation = drafters(stock, tmp_path)[kind]
    for batch, place in ((prompt(1, 9), None), (ragged(3, 9, 6, 12), 7)):
        plain = new_text(stock, batch, NEW)
        for eos in [None] if place is None else [int(plain[-1, place])]:
            options = {} if eos is None else dict(eos_token_id=eos, pad_token_id=0)
            expected = new_text(stock, batch, NEW, **options)
            hf_turbo.patch(model, block_size=4, speculation=speculation)
            register(model)
            inputs = batch if isinstance(batch, dict) else dict(input_ids=batch, attention_mask=torch.ones_like(batch))
            got = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
            assert torch.equal(got[:, inputs["input_ids"].shape[1] :], expected)
            assert used_blocks(model) == 0
    assert counts["loaded"]
    assert counts["gone on"] or kind == "draft model"


@pytest.mark.parametrize("kind", ["medusa", "lookup", "adaptive lookup"])
def test_rounds_that_can_not_be_recorded(ahead, tmp_path, monkeypatch, kind):
    """They have been computed, and tokens moved, when memory runs out: the host takes them up where it was."""
    _, register = ahead
    stock, model = twins("llama", block_size=4)
    speculation = drafters(stock, tmp_path)[kind]
    run, counts = StepGraphs.run_drafts, {"asked": 0, "failed": 0}

    def fails_often(*args):
        counts["asked"] += 1
        result = run(*args)
        if counts["asked"] % 3 == 1:
            return result
        counts["failed"] += result is not None
        return None

    monkeypatch.setattr(StepGraphs, "run_drafts", fails_often)
    for batch in (prompt(1, 9), ragged(3, 9, 6, 12)):
        hf_turbo.patch(model, block_size=4, speculation=speculation)
        register(model)
        assert torch.equal(new_text(model, batch, NEW), new_text(stock, batch, NEW))
        assert used_blocks(model) == 0
    assert counts["failed"] > 1


def test_cache_afterwards(ahead, tmp_path):
    """A returned cache is that of plain steps."""
    counts, register = ahead
    stock, model = twins("llama", block_size=4)
    hf_turbo.patch(model, block_size=4, speculation=drafters(stock, tmp_path)["medusa"])
    register(model)
    batch = ragged(3, 9, 6, 12)
    got, expected = generate(model, batch, NEW), generate(stock, batch, NEW)
    assert torch.equal(got.sequences, expected.sequences) and counts["gone on"]
    for mine, theirs in zip(got[CACHE_NAME].layers, expected[CACHE_NAME].layers, strict=True):
        real = batch["attention_mask"].bool()
        assert mine.keys.shape == theirs.keys.shape
        for row in range(len(real)):
            pad = int((~real[row]).sum())
            torch.testing.assert_close(mine.keys[row, :, pad:], theirs.keys[row, :, pad:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "lookup"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_rows_that_have_ended_go_on_until_half_have(ahead, tmp_path, monkeypatch, name, kind):
    """What they go on with is nobody's; their own tokens are kept for texts that begin alike."""
    stock, model = twins(name, block_size=4)
    batch = ragged(3, 9, 6, 12, 7)
    plain = new_text(stock, batch, NEW)
    # A token that ends several rows, one after another.
    eos = max(plain.unique().tolist(), key=lambda token: (plain == token).any(1).sum().item())
    options = dict(eos_token_id=eos, pad_token_id=0)
    expected = new_text(stock, batch, NEW, **options)
    hf_turbo.patch(model, block_size=4, prefix_cache=True, speculation=drafters(stock, tmp_path)[kind])
    ahead[1](model)
    launched, launch_next = [], speculation._Rounds._launch_next

    def launching(rounds, one):
        num_done, is_launched = rounds._rows.done.count(True), launch_next(rounds, one)
        if is_launched:
            launched.append((num_done, len(rounds._rows.done)))
        return is_launched

    monkeypatch.setattr(speculation._Rounds, "_launch_next", launching)
    for _ in range(2):
        got = model.generate(**batch, max_new_tokens=NEW, do_sample=False, **options)
        assert torch.equal(got[:, batch["input_ids"].shape[1] :], expected)
        assert used_blocks(model) == 0
    assert any(done > 0 for done, _ in launched) and all(2 * done < rows for done, rows in launched)
    full = torch.cat([batch["input_ids"], expected], dim=1)
    before = hf_turbo.report(model).prefix_tokens_found
    for row in range(len(full)):
        text = full[row, int((batch["attention_mask"][row] == 0).sum()) :]
        text = text[: len(text) - int((expected[row] == 0).sum())].unsqueeze(0)
        inputs = dict(input_ids=text, attention_mask=torch.ones_like(text))
        got = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(got[:, text.shape[1] :], new_text(stock, text, 6))
    assert hf_turbo.report(model).prefix_tokens_found > before
