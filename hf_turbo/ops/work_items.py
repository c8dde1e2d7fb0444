"""Shares the keys of sequences of very different lengths out over the programs of a fixed grid, on the device (Triton).

A grid of so many splits for every sequence leaves a long one among short ones to a few programs, and has as many idle
programs as the longest would need. Here a program looks its piece up: all tiles of keys are counted, a piece has at
most an even share of them, and the pieces are numbered through. (The idea of FlashInfer's plan, arXiv:2501.01005,
without a host.)
"""

from __future__ import annotations

import triton
import triton.language as tl

# Signatures are laid out by kind of argument.
# fmt: off


@triton.jit
def find_item(
    item, seq_lens_ptr, cu_seqlens_q_ptr, num_seqs, num_items, max_splits,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SEQS: tl.constexpr,
):
    """Which piece of work a program has: BLOCK_M rows of a sequence over one split of the keys that they see.

    Args:
        item: the program, from 0 to `num_items`, which is at least the number of all tiles of rows.
        max_splits: of a sequence.
        SEQS: a power of two, at least `num_seqs`.

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
    tiles = tl.where(row_tiles > 0, tl.maximum(tl.cdiv(keys, TILE), 1), 0)
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
    # Of sequences with several tiles of rows each one's last may be short.
    row_tiles = -(-num_tokens * group // block_m) + min(num_seqs, num_tokens)
    return row_tiles + -(-slots // num_kv_heads)


def seqs_of_a_lookup(num_seqs: int) -> int:
    """The `SEQS` that the kernel is compiled for, few for all numbers of sequences; 0: there are too many."""
    return next((seqs for seqs in (128, 512) if seqs >= num_seqs), 0)
