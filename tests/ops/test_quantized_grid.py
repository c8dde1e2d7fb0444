"""How many programs share the keys of a quantized cache out, and in how many pieces, by arithmetic for an H200."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from combinations import few
from test_work_items import items

from hf_turbo.ops.attention_config import MAX_PARTIALS, DeviceFacts, choose_num_splits
from hf_turbo.ops.metadata import AttentionMetadata
from hf_turbo.ops.quantized_attention import _grid
from hf_turbo.ops.quantized_attention_config import choose_config

H200 = DeviceFacts(132, 90, 232448)


def geometry(num_seqs, max_seqlen_q=1):
    """Without memory, for 8,192 tokens."""
    return AttentionMetadata(
        block_tables=torch.empty(num_seqs, 1, dtype=torch.int32, device="meta"),
        seq_lens=torch.empty(num_seqs, dtype=torch.int32, device="meta"),
        cu_seqlens_q=torch.empty(num_seqs + 1, dtype=torch.int32, device="meta"),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=8192,
        arrivals=torch.empty(AttentionMetadata.MAX_ARRIVALS, device="meta"),
    )


def on_h200(bits, seq_lens):
    """A step of 8 KV heads of 4 queries: pieces of each sequence, what a wide tile weighs, programs at once."""
    num_seqs, kv = len(seq_lens), SimpleNamespace(num_kv_heads=8, block_size=64)
    config = choose_config(4, num_seqs * 8, 128, 128, 64, torch.bfloat16, bits, H200)
    (num_items, _, _), max_splits, lookup = _grid(config, geometry(num_seqs), num_seqs, 4, kv, 132)
    assert lookup and max_splits == 16
    weight = 8 // bits + 1
    found = items(
        [1] * num_seqs, seq_lens, max_splits=max_splits, block_m=config.block_m, tile=64, num_items=num_items,
        wide_weight=weight,
    )  # fmt: skip
    assert list(found) == [(seq, 0) for seq in range(num_seqs)]
    return [len(pieces) for pieces in found.values()], weight, 132 * config.programs_per_sm


@pytest.mark.parametrize("bits, num_rows, splits", [(8, 16, 4), (4, 16, 6), (8, 64, 1)])
def test_rows_of_equal_length_have_as_many_splits_as_without(bits, num_rows, splits):
    """All of which run at once."""
    pieces, _, slots = on_h200(bits, [8192] * num_rows)
    assert pieces == [splits] * num_rows
    assert splits == choose_num_splits(num_rows * 8, 64, slots) and splits * num_rows * 8 <= slots


@pytest.mark.parametrize("num_short, bits", few([15, 32, 63, 100], [8, 4]))
def test_a_long_sequence_among_short_ones(num_short, bits):
    """No piece of it is much longer than an even share of what runs at once, or than 16 pieces of it are."""
    pieces, weight, slots = on_h200(bits, [600] * num_short + [8000])
    long = 125 + 3 * (weight - 1)
    total = long + num_short * (10 + 3 * (weight - 1))
    assert long / pieces[-1] <= max(1.5 * total * 8 / slots, long / 16) + 1
    assert sum(pieces) * 8 <= 1.7 * max(slots, 8 * len(pieces))


@pytest.mark.parametrize("num_tokens, num_splits", [(16, 16), (256, 8), (2048, 1), (3000, 1)])
def test_what_splits_write_is_bounded(num_tokens, num_splits):
    config = choose_config(4 * num_tokens, 128, 128, 128, 64, torch.bfloat16, 4, H200)
    kv = SimpleNamespace(num_kv_heads=8, block_size=64)
    metadata = geometry(16, num_tokens)
    _, splits, lookup = _grid(config, metadata, num_tokens, 4, kv, 132)
    assert lookup == 128 and splits == num_splits
    assert splits == 1 or splits * num_tokens <= MAX_PARTIALS
    too_few = dataclasses.replace(metadata, arrivals=metadata.arrivals[:100])
    assert _grid(config, too_few, num_tokens, 4, kv, 132)[2] == 0
