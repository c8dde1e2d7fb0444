"""What users of neighbouring projects hit, by number. fp32, token for token against the unpatched model."""

from functools import cache

import pytest
import torch
from combinations import few
from helpers import (
    accelerated,
    assert_no_worse,
    assert_pool_accounts,
    fill_free_blocks,
    forward,
    generate,
    groups,
    new_text,
    prompt,
    ragged,
    rows_alone,
    stepped_aside,
    twins,
    used_blocks,
)  # fmt: skip

import hf_turbo
from hf_turbo.compat import CACHE_NAME


@cache
def pair(name: str, block_size: int = 16):
    """Twins that several tests use; what they leave in the pool is part of the test."""
    return twins(name, block_size)


# C01: a padded row equals the same prompt alone


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_c01_left_padded_rows_equal_rows_alone(name, block_size):
    stock, model = pair(name, block_size)
    batch = ragged(3, 7, 12, 30)
    with accelerated(model):
        text = new_text(model, batch)
    for row, alone in zip(text, rows_alone(batch), strict=True):
        assert torch.equal(row[None], new_text(stock, alone))


def _mask_with_holes():
    batch = ragged(9, 12, 12)
    batch["attention_mask"][1, 4:7] = 0
    batch["attention_mask"][2, [0, 5]] = 0
    return batch


C01_OTHERS = {
    "right padding": ragged(3, 7, 12, side="right"),
    "holes": _mask_with_holes(),
    "no mask": {"input_ids": ragged(3, 7, 12)["input_ids"]},
    "no mask, right padding": {"input_ids": ragged(3, 7, 12, side="right")["input_ids"]},
    "row without tokens": {"input_ids": prompt(2, 6), "attention_mask": torch.tensor([[1] * 6, [0] * 6])},
}


@pytest.mark.parametrize("kind", C01_OTHERS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_c01_other_masks(name, kind):
    stock, model = pair(name, 4)
    assert torch.equal(new_text(model, C01_OTHERS[kind]), new_text(stock, C01_OTHERS[kind]))


# C02: queries at padding see nothing, and spoil nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_c02_padding_spreads_no_nan(dtype, implementation):
    stock, model = twins("llama")
    for one in (stock, model):
        one.to(dtype)
    hf_turbo.unpatch(model).set_attn_implementation(implementation)
    hf_turbo.patch(model)
    batch = ragged(1, 64)
    output = generate(model, batch, 8, output_logits=True)
    assert torch.stack(output.logits).isfinite().all()
    ids, mask = batch.values()
    logits = forward(model, ids, hf_turbo.paged_cache(model), attention_mask=mask).logits
    real = mask.bool()
    assert logits[real].isfinite().all()
    same_dtype = forward(stock, ids, attention_mask=mask).logits[real]
    assert_no_worse(logits[real], same_dtype, forward(stock.float(), ids, attention_mask=mask).logits[real])


# C03 and C04: several sequences a prompt, and beams


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_c03_return_sequences(name):
    stock, model = pair(name, 4)
    batch = ragged(5, 19)
    texts = []
    for one in (stock, model):
        torch.manual_seed(11)
        texts.append(generate(one, batch, do_sample=True, num_return_sequences=4).sequences)
    assert torch.equal(*texts) and len(texts[0]) == 8
    for i, row in enumerate(texts[1]):
        assert torch.equal(row[:19], batch["input_ids"][i // 4])
    assert len({tuple(row.tolist()) for row in texts[1][:4]}) == 4, "the sequences of a prompt should differ"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("options", [dict(do_sample=True, num_return_sequences=4), dict(num_beams=4)], ids=str)
def test_c03_given_cache_of_fewer_rows(name, options):
    """A cache of 2 rows goes into a call that makes 8: it is widened, sharing its blocks."""
    stock, model = pair(name, 4)
    ids = prompt(2, 21)
    cache = hf_turbo.paged_cache(model)
    forward(model, ids[:, :15], cache)
    texts = []
    for one, given in ((stock, {}), (model, {CACHE_NAME: cache})):
        torch.manual_seed(11)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}
        texts.append(generate(one, inputs, **options).sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_c04_beams(name):
    stock, model = pair(name, 4)
    batch = ragged(4, 9, 17)
    options = dict(num_beams=4, num_return_sequences=2, output_scores=True)
    expected = generate(stock, batch, **options)
    with accelerated(model):
        got = generate(model, batch, **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)
    del got
    assert used_blocks(model) == 0
    assert_pool_accounts(model)


def test_c04_beams_without_reordering_are_wrong(monkeypatch):
    """The check above can fail: beams that keep their own past give another text."""
    stock, model = pair("llama", 4)
    batch = ragged(4, 9, 17)
    expected = generate(stock, batch, num_beams=4).sequences
    monkeypatch.setattr(hf_turbo.PagedCache, "select_rows", lambda self, rows: None)
    assert not torch.equal(generate(model, batch, num_beams=4).sequences, expected)


# C06: crop, then go on


@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize("removed, kept", [(1, 2), (3, 0), (5, 0), (0, 3)])
def test_c06_text_after_crop(block_size, removed, kept):
    stock, model = pair("llama", block_size)
    ids, more = prompt(1, 3), prompt(1, 2, seed=4)
    cache = hf_turbo.paged_cache(model)
    forward(model, ids, cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == kept
    whole = torch.cat([ids[:, :kept], more], dim=1)
    inputs = {"input_ids": whole, "attention_mask": torch.ones_like(whole), CACHE_NAME: cache}
    assert torch.equal(new_text(model, inputs), new_text(stock, whole))


# C07: sliding windows of 8


C07_MODES = {
    "plain": {},
    "chunks of 3": dict(prefill_chunk_size=3),
    "prompt lookup 4": dict(prompt_lookup_num_tokens=4),
    "beams": dict(num_beams=3),
}


@pytest.mark.parametrize("name, mode", few(["mistral", "gemma2", "gemma3_text"], C07_MODES))
def test_c07_windows(name, mode):
    stock, model = pair(name, 4)
    for length in (7, 8, 9, 20):
        fill_free_blocks(model, float("nan"))
        # what unpatched eager gives; its own chunks and lookup over windows are not the reference
        options = C07_MODES[mode] if mode == "beams" else {}
        expected = generate(stock, prompt(1, length), 20, output_logits=True, **options)
        with accelerated(model):
            got = generate(model, prompt(1, length), 20, output_logits=True, **C07_MODES[mode])
        assert torch.equal(got.sequences, expected.sequences), length
        if mode != "beams":
            torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text"])
def test_c07_without_the_window_is_wrong(name, monkeypatch):
    """The check above can fail: attention over all that is stored gives another text."""
    from hf_turbo.ops import reference

    stock, model = pair(name, 4)
    expected = generate(stock, prompt(1, 20), 2, output_logits=True).logits
    attend = reference.attend
    monkeypatch.setattr(
        reference,
        "attend",
        lambda q, k, v, scale, window=None, *others: attend(q, k, v, scale, None, *others),
    )
    got = generate(model, prompt(1, 20), 2, output_logits=True).logits
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() > 1e-2


# C08: what is not written is not read


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_c08_stale_blocks(name, poison):
    stock, clean = twins(name)
    _, model = twins(name)
    batch, longer = ragged(3, 33), prompt(3, 70)
    expected = generate(clean, batch, output_logits=True)
    assert torch.equal(expected.sequences, generate(stock, batch).sequences)
    generate(model, longer)  # its blocks are freed with what is in them
    for _ in range(2):
        got = generate(model, batch, output_logits=True)
        assert torch.equal(got.sequences, expected.sequences)
        for mine, theirs in zip(got.logits, expected.logits, strict=True):
            assert torch.equal(mine, theirs)
        del got
        fill_free_blocks(model, poison)


def test_c08_poison_would_show(monkeypatch):
    """The check above can fail: attention that reads the unwritten end of a block gives NaN."""
    from hf_turbo.ops import reference

    _, model = twins("llama")
    generate(model, prompt(1, 20))
    fill_free_blocks(model, float("nan"))
    read = reference._read
    monkeypatch.setattr(reference, "_read", lambda kv, runs, start, stop: read(kv, runs, start, stop + 1))
    monkeypatch.setattr(reference, "_visible", lambda *args: None)
    logits = generate(model, prompt(1, 20), output_logits=True).logits
    assert not torch.stack(logits).isfinite().all()


@pytest.mark.parametrize("options", [{}, dict(num_beams=4), dict(do_sample=True, num_return_sequences=3)], ids=str)
def test_c08_pool_is_used_again(options):
    _, model = twins("gemma2")
    generate(model, prompt(2, 40), 16, **options)
    before = {window: group.manager.segment_sizes for window, group in groups(model).items()}
    pool_bytes = hf_turbo.report(model).pool_bytes
    for new_tokens in (16, 9, 2):
        torch.manual_seed(0)
        generate(model, prompt(2, 40), new_tokens, **options)
    assert {window: group.manager.segment_sizes for window, group in groups(model).items()} == before
    assert hf_turbo.report(model).pool_bytes == pool_bytes


# C10: a prompt in chunks


CHUNKS = [1, 7, 16, 33, 34, 999_999]
C10_BATCHES = {"one row": prompt(1, 33), "left padded": ragged(3, 17, 33), "mostly padding": ragged(1, 33)}


@pytest.mark.parametrize("kind", C10_BATCHES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2"])
def test_c10_chunked_prefill(name, kind):
    stock, model = pair(name)
    batch = C10_BATCHES[kind]
    expected = generate(stock, batch, 6, output_logits=True)
    for chunk in CHUNKS:
        fill_free_blocks(model, float("nan"))
        with accelerated(model):
            got = generate(model, batch, 6, output_logits=True, prefill_chunk_size=chunk)
        assert torch.equal(got.sequences, expected.sequences), f"chunks of {chunk}"
        torch.testing.assert_close(got.logits[0], expected.logits[0], atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_c10_chunks_by_hand(name):
    """Every position's logits, not the last alone; with masks as a user writes them."""
    stock, model = pair(name)
    batch = ragged(3, 17, 33)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    real = batch["attention_mask"].bool()
    expected = forward(stock, batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions)
    for chunk in CHUNKS:
        cache, parts = hf_turbo.paged_cache(model), []
        for start in range(0, 33, chunk):
            columns = slice(start, min(start + chunk, 33))
            parts.append(
                forward(
                    model, batch["input_ids"][:, columns], cache, position_ids=positions[:, columns],
                    attention_mask=batch["attention_mask"][:, : columns.stop],
                ).logits
            )  # fmt: skip
        torch.testing.assert_close(torch.cat(parts, dim=1)[real], expected.logits[real], atol=1e-4, rtol=1e-4)
    assert not stepped_aside(model)
