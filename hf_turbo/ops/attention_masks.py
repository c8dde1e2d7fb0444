"""Which positions the rows of an attention kernel see (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

# Signatures and launches are laid out by kind of argument.
# fmt: off


@triton.jit
def seen_positions(
    position, live, q_position, first_node, node_mask, WINDOW: tl.constexpr, TREE: tl.constexpr,
):
    """Which positions rows see, `[rows, positions]`, of those that are live.

    TREE: positions are slots; from `first_node` on those of a tree's nodes, seen by the bits of a row's `node_mask`.
    """
    if TREE:
        node = position - first_node
        is_node = node >= 0
        bits = (node_mask[:, None] >> tl.maximum(node, 0).to(tl.int64)[None, :]) & 1
        seen = (live & (is_node == 0))[None, :]
        if WINDOW > 0:
            seen = seen & (position[None, :] > q_position[:, None] - WINDOW)
        seen = seen | ((live & is_node)[None, :] & (bits != 0))
    else:
        seen = live[None, :] & (position[None, :] <= q_position[:, None])
        if WINDOW > 0:
            seen = seen & (position[None, :] > q_position[:, None] - WINDOW)
    return seen


@triton.jit
def _ones(count):
    """An int64 whose lowest `count` bits are set: none if that is negative, all from 64 on."""
    return tl.where(count >= 64, -1, (tl.full((), 1, tl.int64) << (tl.minimum(tl.maximum(count, 0), 63))) - 1)


@triton.jit
def _seen_word(start, q_position, first_node, node_mask, first_live, end_live, WINDOW: tl.constexpr):
    """Which of 64 positions from `start` on rows see, as the bits of an int64 `[rows]`; of trees, see `seen_positions`.

    A word a row is a few operations; what `seen_positions` computes for each row and position takes more than the
    softmax does.
    """
    node = start - first_node
    later = node_mask >> tl.minimum(tl.maximum(node, 0), 63)
    sooner = node_mask << tl.minimum(tl.maximum(-node, 0), 63)
    committed = _ones(-node)
    nodes = tl.where(node >= 0, later, sooner) & ~committed
    if WINDOW > 0:
        committed = committed & ~_ones(q_position - WINDOW + 1 - start)
    return (committed | nodes) & (_ones(end_live - start) & ~_ones(first_live - start))


@triton.jit
def _word_of(word, offset):
    """The half of a `[rows]` of words that holds the bit of each offset, `[rows, offsets]`."""
    low = word.to(tl.int32)[:, None]
    high = (word >> 32).to(tl.int32)[:, None]
    return tl.where(((offset & 32) != 0)[None, :], high, low)


@triton.jit
def seen_nodes(
    start, q_position, first_node, node_mask, first_live, end_live, WINDOW: tl.constexpr, TILE: tl.constexpr,
):
    """Which of TILE positions from `start` on the nodes of a tree see, `[rows, TILE]`; TILE is at most 128."""
    tl.static_assert(TILE <= 128)
    offset = tl.arange(0, TILE)
    word = _seen_word(start, q_position, first_node, node_mask, first_live, end_live, WINDOW)
    words = _word_of(word, offset)
    if TILE > 64:
        word = _seen_word(start + 64, q_position, first_node, node_mask, first_live, end_live, WINDOW)
        words = tl.where(((offset & 64) != 0)[None, :], _word_of(word, offset), words)
    return (words & (1 << (offset & 31))[None, :]) != 0
