"""Which blocks `generate()` takes, shares and gives back."""

import copy
import gc
import weakref

import pytest
import torch
from helpers import (
    accelerated,
    assert_pool_accounts,
    forward,
    generate,
    groups,
    new_text,
    probed,
    prompt,
    ragged,
    twins,
    used_blocks,
)  # fmt: skip

import hf_turbo
from hf_turbo.cache.paged_cache import PagedCache
from hf_turbo.compat import CACHE_NAME
from hf_turbo.ops.block_ids import SEGMENT_BITS
from hf_turbo.patching import handle_of


def blocks_for(tokens: int, block_size: int = 16) -> int:
    return -(-tokens // block_size)


def test_padding_is_not_stored():
    stock, model = twins("llama", block_size=4)
    batch = ragged(1, 5, 64)
    with accelerated(model):
        output = generate(model, batch, 4)
    # the last token of a text is never fed back: a prompt of n tokens and 4 new ones store n + 3
    assert used_blocks(model) == sum(blocks_for(n + 3, 4) for n in (1, 5, 64))
    keys = output[CACHE_NAME].layers[0].keys
    reference = generate(stock, batch, 4)[CACHE_NAME].layers[0].keys
    real = torch.cat([batch["attention_mask"], torch.ones(3, 3, dtype=torch.long)], dim=1).bool()
    assert (keys.transpose(1, 2)[~real] == 0).all()
    torch.testing.assert_close(keys.transpose(1, 2)[real], reference.transpose(1, 2)[real])


def test_blocks_are_free_after_the_call():
    _, model = twins("gemma2")
    for options in ({}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=3), dict(max_length=40)):
        generate(model, prompt(2, 20), **options)
        assert used_blocks(model) == 0
        assert_pool_accounts(model)


def test_returned_cache_holds_its_blocks_until_it_dies():
    _, model = twins("llama")
    output = generate(model, prompt(2, 20))
    assert used_blocks(model) == output[CACHE_NAME].num_blocks == 2 * blocks_for(35)
    del output
    assert used_blocks(model) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_next_turn_on_a_cropped_cache(name):
    """The user takes the last 10 tokens of a returned cache back and goes on from there."""
    stock, model = twins(name, block_size=4)
    texts = []
    for one in (stock, model):
        output = generate(one, prompt(2, 20))
        cache, ids = output[CACHE_NAME], output.sequences
        cache.crop(-10)
        kept = cache.get_seq_length()
        turn = torch.cat([ids[:, :kept], prompt(2, 5, seed=3)], dim=1)
        mask = torch.ones_like(turn)
        texts.append(generate(one, {"input_ids": turn, "attention_mask": mask, CACHE_NAME: cache}).sequences)
    assert torch.equal(*texts)
    assert used_blocks(model) == cache.num_blocks == 2 * blocks_for(kept + 5 + 15, 4)
    del output, cache
    assert used_blocks(model) == 0


def test_prompt_that_left_its_window_is_not_cropped():
    """What a window of 8 does not see of a prompt was not stored: an error, not a text from what lies in its place."""
    _, model = twins("gemma3_text")
    generate(model, prompt(1, 40), 1)  # learns that no prompt is attended to through its blocks
    cache = hf_turbo.paged_cache(model)
    forward(model, prompt(1, 40), cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    forward(model, prompt(1, 1), cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 40


def test_beams_share_the_prompt(capsys, monkeypatch):
    """Four beams on 1,000 tokens hold the whole prompt once, and beside it what each beam wrote by itself."""
    stock, model = twins("llama", max_position_embeddings=2048)
    # per beam: block -> who wrote to it last
    beams = [dict.fromkeys(range(blocks_for(1000)), "prompt") for _ in range(4)]
    seen = []
    select = PagedCache.select_rows

    def select_and_look(cache, rows):
        length = cache.get_seq_length()
        for beam, blocks in enumerate(beams):
            if length > 1000:
                blocks[(length - 1) // 16] = (length, beam)
        select(cache, rows)
        beams[:] = [dict(beams[i]) for i in rows]
        expected = len({item for blocks in beams for item in blocks.items()})
        assert used_blocks(model) == expected, f"at {length} tokens"
        seen.append(expected)

    monkeypatch.setattr(PagedCache, "select_rows", select_and_look)
    with accelerated(model):
        sequences = generate(model, prompt(1, 1000), 32, num_beams=4).sequences
    assert torch.equal(sequences, generate(stock, prompt(1, 1000), 32, num_beams=4).sequences)
    assert len(seen) >= 31 and used_blocks(model) == 0
    each = blocks_for(1000 + 31) - 1000 // 16
    at_most, at_stock = 1000 // 16 + 4 * each, 4 * blocks_for(1000 + 31)
    assert seen[0] == blocks_for(1000) and max(seen) <= at_most
    peak = hf_turbo.report(model).peak_blocks
    assert peak <= at_most
    with capsys.disabled():
        print(f"\nbeam-4 on 1,000 tokens: {peak} blocks of 16; the tokens of a stock cache fill {at_stock}")


def test_return_sequences_store_the_prompt_once():
    """C03: 2 prompts x 4 sequences; the prompt's blocks have 4 owners, and all are freed afterwards."""
    stock, model = twins("llama", block_size=4)
    owners = []

    def look():
        manager = groups(model)[None].manager
        blocks = (s << SEGMENT_BITS | i for s, n in enumerate(manager.segment_sizes) for i in range(n))
        owners.append([n for n in map(manager.owners, blocks) if n])
        return len(owners[-1])

    torch.manual_seed(3)
    options = dict(do_sample=True, num_return_sequences=4)
    output, seen = probed(model, prompt(2, 22), look, 12, **options)
    torch.manual_seed(3)
    assert torch.equal(output.sequences, generate(stock, prompt(2, 22), 12, **options).sequences)
    assert owners[0] == [4] * (2 * blocks_for(22, 4)), "the prompt alone: every block once, with 4 owners"
    assert seen[-1] == 2 * (22 // 4) + 8 * (blocks_for(22 + 11, 4) - 22 // 4)
    assert owners[-1].count(4) == 2 * (22 // 4)
    del output
    assert used_blocks(model) == 0
    assert_pool_accounts(model)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("mode", ["plain", "chunks", "beams", "lookup"])
def test_windows_hold_little(name, block_size, mode):
    """C07: a layer with a window of 8 holds at most window + block_size (+ drafted) tokens a row."""
    options = {
        "plain": {}, "chunks": dict(prefill_chunk_size=3), "beams": dict(num_beams=3),
        "lookup": dict(prompt_lookup_num_tokens=4),
    }[mode]  # fmt: skip
    _, model = twins(name, block_size)
    rows, drafted = (3 if mode == "beams" else 1), (4 if mode == "lookup" else 0)

    def look():
        return groups(model)[8].manager.num_used

    # the first call learns whether a prompt is attended to through its blocks
    generate(model, prompt(1, 40), 1)
    with accelerated(model):
        _, seen = probed(model, prompt(1, 40), look, 20, **options)
    most = rows * blocks_for(8 + block_size - 1 + drafted, block_size)
    after_prompt = seen[1:] if groups(model)[8].prompts_read_blocks or mode == "lookup" else seen
    assert max(after_prompt) <= most, f"{max(after_prompt)} blocks of {block_size}"


def test_reset_cache_serves_other_prompts():
    """A cache of 4 equal rows is reset and given 4 different ones: what was equal is so no more."""
    stock, model = twins("llama")
    output = generate(model, prompt(1, 20), 4, do_sample=True, num_return_sequences=4)
    cache = output[CACHE_NAME]
    cache.reset()
    others = prompt(4, 12, seed=5)
    got = forward(model, others, cache).logits
    torch.testing.assert_close(got, forward(stock, others).logits, atol=5e-5, rtol=5e-5)
    step = prompt(4, 1, seed=6)
    both = forward(stock, torch.cat([others, step], dim=1)).logits[:, -1:]
    torch.testing.assert_close(forward(model, step, cache).logits, both, atol=1e-4, rtol=1e-4)


def test_cropped_to_nothing_serves_other_prompts():
    """The same for a cache of which all tokens are taken back."""
    stock, model = twins("llama")
    cache = generate(model, prompt(1, 20), 4, num_beams=4, num_return_sequences=4)[CACHE_NAME]
    cache.crop(-cache.get_seq_length())
    others, step = prompt(4, 12, seed=5), prompt(4, 1, seed=6)
    forward(model, others, cache)
    both = forward(stock, torch.cat([others, step], dim=1)).logits[:, -1:]
    torch.testing.assert_close(forward(model, step, cache).logits, both, atol=1e-4, rtol=1e-4)


def test_release_spares_what_a_cache_holds():
    """A cache that lies in a later segment goes on after the pool gave back the first ones."""
    stock, model = twins("llama", block_size=4)
    big = generate(model, prompt(2, 60))
    held = generate(model, prompt(1, 100, seed=2))
    cache, ids = held[CACHE_NAME], held.sequences
    assert len(groups(model)[None].manager.segment_sizes) > 1
    del big, held
    before = hf_turbo.report(model).pool_bytes
    hf_turbo.release(model)
    assert hf_turbo.report(model).pool_bytes < before
    turn = torch.cat([ids, prompt(1, 3)], dim=1)
    inputs = {"input_ids": turn, "attention_mask": torch.ones_like(turn), CACHE_NAME: cache}
    assert torch.equal(new_text(model, inputs), new_text(stock, turn))
    del cache, inputs
    hf_turbo.release(model)
    assert hf_turbo.report(model).pool_bytes == hf_turbo.report(model).blocks_total == 0
    assert torch.equal(new_text(model, prompt(2, 30)), new_text(stock, prompt(2, 30)))


def test_deepcopied_cache_of_a_call_goes_its_own_way():
    """One prompt, two continuations: the user copies the cache as one does a DynamicCache."""
    stock, model = twins("gemma2", block_size=4)
    prefix = prompt(1, 21)
    cache = hf_turbo.paged_cache(model)
    forward(model, prefix, cache)
    held = used_blocks(model)
    caches = [copy.deepcopy(cache) for _ in range(3)]
    assert used_blocks(model) == held
    for seed, own in enumerate(caches):
        ids = torch.cat([prefix, prompt(1, 4, seed=seed + 9)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_NAME: own}
        assert torch.equal(new_text(model, inputs), new_text(stock, ids))
    assert torch.equal(new_text(model, prefix), new_text(stock, prefix))


def test_cache_survives_a_forward_that_failed():
    """An interrupted forward has taken blocks and written some layers; the same tokens may be sent again."""
    stock, model = twins("llama", block_size=4)
    ids, step = prompt(2, 11), prompt(2, 5, seed=1)
    cache = hf_turbo.paged_cache(model)
    forward(model, ids, cache)

    def fail(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward(model, step, cache)
    hook.remove()
    cache.crop(-(cache.get_seq_length() - 11))
    logits = forward(model, step, cache).logits
    expected = forward(stock, torch.cat([ids, step], dim=1)).logits[:, 11:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert used_blocks(model) == 2 * blocks_for(16, 4)
    del cache
    assert used_blocks(model) == 0


def test_generation_that_raises_gives_its_blocks_back():
    _, model = twins("llama")

    def stop():
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        probed(model, prompt(2, 20), stop)
    assert used_blocks(model) == 0


def test_cache_knows_its_model_no_more_than_its_pool():
    """A cache that outlives its model keeps its own blocks alive, not the model."""
    _, model = twins("llama")
    cache = generate(model, prompt(1, 20), 4)[CACHE_NAME]
    assert isinstance(cache, PagedCache) and cache.pool is handle_of(model).pool
    ref = weakref.ref(model.model.layers[0])
    del model
    gc.collect()
    assert ref() is None
    assert cache.layers[0].keys.shape[2] == 23
