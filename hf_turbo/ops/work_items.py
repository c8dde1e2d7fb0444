"""Shares the keys of sequences of very different lengths out over the programs of a fixed grid, on the device (Triton).

A grid of so many splits for every sequence leaves a long one among short ones to a few programs, and has as many idle
programs as the longest would need. Here a program looks its piece up: all tiles of keys are counted, a piece has at
most an even share of them, and the pieces are numbered through. (The idea of FlashInfer's plan, arXiv:2501.01005,
without a host.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_config import MAX_PARTIALS, MAX_SHARED_SPLITS, ceil_div
from .merge_splits import split_weights
from .metadata import AttentionMetadata

# Signatures are laid out by kind of argument.
# fmt: off


@triton.jit
def find_item(
    item, seq_lens_ptr, cu_seqlens_q_ptr, num_seqs, num_items, max_splits,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SEQS: tl.constexpr,
    WIDE_WEIGHT: tl.constexpr = 1,
):
    """Which piece of work a program has: BLOCK_M rows of a sequence over one split of the keys that they see.

    Args:
        item: the program, from 0 to `num_items`, which is at least the number of all tiles of rows.
        max_splits: of a sequence.
        SEQS: a power of two, at least `num_seqs`.
        WIDE_WEIGHT: as of `split_weights`: tiles are shared out by what they weigh.

    Returns:
        The sequence (`num_seqs` or more: there is nothing to do), its tile of rows, the split, how many splits
        it has, and the first item of this tile.
    """
    seq = tl.arange(0, SEQS)
    is_seq = seq < num_seqs
    seq_len = tl.load(seq_lens_ptr + seq, mask=is_seq, other=0)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1, mask=is_seq, other=0)
    q_len -= tl.load(cu_seqlens_q_ptr + seq, mask=is_seq, other=0)
    row_tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
    # Of a window the rows of a tile see a little more than one row does.
    keys = tl.minimum(seq_len, WINDOW + tl.minimum(q_len, BLOCK_M // GROUP + 2)) if WINDOW > 0 else seq_len
    tiles = tl.maximum(tl.cdiv(keys, TILE), 1)
    if WIDE_WEIGHT > 1:
        tiles, _, _ = split_weights(tiles, keys == seq_len, WIDE_WEIGHT)
    tiles = tl.where(row_tiles > 0, tiles, 0)
    spare = tl.maximum(num_items - tl.sum(row_tiles, 0), 1)
    share = tl.maximum(tl.cdiv(tl.sum(row_tiles * tiles, 0), spare), tl.cdiv(tl.max(tiles, 0), max_splits))
    splits = tl.cdiv(tiles, tl.maximum(share, 1))
    ends = tl.cumsum(row_tiles * splits, 0)
    is_before = (ends <= item).to(tl.int32)
    found = tl.sum(is_before, 0)
    within = item - tl.max(ends * is_before, 0)
    num_splits = tl.maximum(tl.sum(tl.where(seq == found, splits, 0), 0), 1)
    split = within % num_splits
    return found, within // num_splits, split, num_splits, item - split


# fmt: on


def most_items(num_tokens: int, num_seqs: int, num_kv_heads: int, group: int, block_m: int, slots: int) -> int:
    """Items of each KV head: as many as there can be tiles of rows, and so many more that long ones are split.

    Args:
        num_tokens, num_seqs: of the packed batch.
        slots: programs that the device runs at once.
    """
    return _most_row_tiles(num_tokens, num_seqs, group, block_m) + ceil_div(slots, num_kv_heads)


def items_of_a_wave(
    num_tokens: int, num_seqs: int, max_seqlen_q: int, num_kv_heads: int, group: int, block_m: int, slots: int
) -> int:
    """The same for programs that take all of a multiprocessor: rather no more than run at once.

    A few more than that of equal length would take twice the time. But a piece is at most half again as long as an even
    share of one wave, so where tiles of rows fill most of it there are more.

    Args:
        max_seqlen_q: queries of a sequence at most; with one each the tiles of rows are known.
    """
    even = num_seqs * ceil_div(max_seqlen_q * group, block_m)
    row_tiles = min(even, _most_row_tiles(num_tokens, num_seqs, group, block_m))
    wave = slots // num_kv_heads
    return max(wave, row_tiles + ceil_div(2 * wave, 3))


def _most_row_tiles(num_tokens: int, num_seqs: int, group: int, block_m: int) -> int:
    # Of sequences with several tiles of rows each one's last may be short.
    return ceil_div(num_tokens * group, block_m) + min(num_seqs, num_tokens)


def seqs_looked_at(metadata: AttentionMetadata, num_items: int, num_kv_heads: int) -> int:
    """The `SEQS` of a forward whose programs share keys out; 0: they don't, as there are no counters, or too few."""
    if metadata.arrivals is None or metadata.tree is not None or num_items * num_kv_heads > len(metadata.arrivals):
        return 0
    return seqs_of_a_lookup(metadata.num_seqs)


def shared_splits(max_splits: int, num_tokens: int) -> int:
    """Splits of a sequence at most, of `max_splits`: what they write of all tokens is bounded."""
    return max(min(max_splits, MAX_PARTIALS // num_tokens, MAX_SHARED_SPLITS), 1)


def seqs_of_a_lookup(num_seqs: int) -> int:
    """The `SEQS` that the kernel is compiled for, few for all numbers of sequences; 0: there are too many."""
    return next((seqs for seqs in (128, 512) if seqs >= num_seqs), 0)
