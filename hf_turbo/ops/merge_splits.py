"""Joins what the splits of a sequence's keys came to (Triton)."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import next_power_of_2
from .launch import Launcher
from .metadata import AttentionMetadata

#: Splits that a single warp joins.
_SPLITS_OF_A_WARP = 8


@triton.constexpr_function
def padded(dim):
    """What a head size takes in a tile: a power of two that `tl.dot` accepts."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def split_weights(num_tiles, has_first, WIDE_WEIGHT: tl.constexpr):
    """What the tiles of a sequence weigh, and how many of them weigh WIDE_WEIGHT, not 1: at the beginning and the end.

    Of a quantized cache the first block and the last two are wide; of any other all tiles are alike (WIDE_WEIGHT 1).
    """
    num_last = tl.minimum(num_tiles, 2)
    num_first = tl.where(has_first & (num_tiles > 2), 1, 0)
    return num_tiles + (WIDE_WEIGHT - 1) * (num_first + num_last), num_first, num_last


# Signatures and launches are laid out by kind of argument.
# fmt: off


@triton.jit
def rows_positions(
    first_query, num_rows, row_tile,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
):
    """Of a tile of rows: its lowest position, the last slot that it sees, and the range of slots that some row sees."""
    # No position of a tree is behind its slot, and its root's comes first.
    first_position = first_query if TREE else first_query + (row_tile * BLOCK_M) // GROUP
    last_position = first_query + (tl.minimum((row_tile + 1) * BLOCK_M, num_rows) - 1) // GROUP
    first_live = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    return first_position, last_position, first_live, tl.maximum(last_position + 1, 0)


@triton.jit
def split_share(num_tiles, num_splits):
    """Tiles of a split, of which the last may have fewer, and how many splits have any (one, where there are none)."""
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    return share, tl.maximum(tl.cdiv(num_tiles, share), 1)


@triton.jit
def join_splits(
    partial_ptrs, lse_ptrs, row_mask, out_mask, num_splits,
    V_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """WIDTH columns of the splits' outputs of a tile of rows, weighted by the exponential of their log-sum-exps."""
    lse_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in tl.range(num_splits, loop_unroll_factor=2):
        lse_max = tl.maximum(lse_max, tl.load(lse_ptrs + split, mask=row_mask, other=float("-inf")))
    shift = tl.where(lse_max == float("-inf"), 0.0, lse_max)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for split in tl.range(num_splits, loop_unroll_factor=2):
        weight = tl.exp2(tl.load(lse_ptrs + split, mask=row_mask, other=float("-inf")) - shift)
        partial = tl.load(partial_ptrs + split * V_DIM, mask=out_mask, other=0.0)
        acc += tl.where((weight > 0)[:, None], partial, 0.0) * weight[:, None]
        weight_sum += weight
    return acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]


@triton.jit
def join_if_last(
    arrived_ptr, partial_ptr, lse_ptr, out_ptr, partial_row, out_row, row_mask, num_splits,
    V_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """The last of a tile's splits to arrive finds what all have written, joins it, and leaves the counter as it was.

    Args:
        partial_row, out_row: `[BLOCK_M]`, a row's first split among all, and where its output begins, in elements.
        WIDTH: columns that are joined at once: more of them, beside the main loop's numbers, would be spilled.
    """
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == num_splits - 1:
        tl.store(arrived_ptr, 0)
        offs = tl.arange(0, WIDTH)
        for column in tl.range(0, V_DIM, WIDTH, loop_unroll_factor=1):
            mask = row_mask[:, None] & (column + offs < V_DIM)[None, :]
            partial_ptrs = partial_ptr + column + partial_row[:, None] * V_DIM + offs[None, :]
            joined = join_splits(
                partial_ptrs, lse_ptr + partial_row, row_mask, mask, num_splits, V_DIM, WIDTH, BLOCK_M
            )
            out_ptrs = out_ptr + column + out_row[:, None] + offs[None, :]
            tl.store(out_ptrs, joined.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _merge_splits_kernel(
    partial_ptr, lse_ptr, out_ptr, seq_lens_ptr, num_splits, stride_ot, stride_oh,
    V_DIM: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr, EVEN_QUERIES: tl.constexpr, WIDE_WEIGHT: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program: one query token and head; the splits' outputs weighted by the exponential of their lse."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_row = (token * tl.num_programs(1) + head) * num_splits
    offs_v = tl.arange(0, padded(V_DIM))
    v_mask = offs_v < V_DIM
    lse_max = float("-inf")
    weight_sum = 0.0
    acc = tl.zeros([padded(V_DIM)], tl.float32)
    num_live = num_splits
    if EVEN_QUERIES > 0:
        # The splits of a short sequence that have tiles at all, counted as the attention kernel shares them out.
        first_query = tl.load(seq_lens_ptr + token // EVEN_QUERIES) - EVEN_QUERIES
        row_tile = ((tl.program_id(0) % EVEN_QUERIES) * GROUP + head % GROUP) // BLOCK_M
        _, _, first_live, end_live = rows_positions(
            first_query, EVEN_QUERIES * GROUP, row_tile, GROUP, BLOCK_M, WINDOW, TREE
        )
        first_tile = first_live // TILE
        total, _, _ = split_weights(tl.cdiv(end_live, TILE) - first_tile, first_tile == 0, WIDE_WEIGHT)
        _, num_live = split_share(total, num_splits)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in range(0, num_live, SPLIT_BLOCK):
        split = start + tl.arange(0, SPLIT_BLOCK)
        lse = tl.load(lse_ptr + first_row + split, mask=split < num_live, other=float("-inf"))
        new_max = tl.maximum(lse_max, tl.max(lse, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - shift)
        rescale = tl.exp2(lse_max - shift)
        partial_ptrs = partial_ptr + (first_row + split)[:, None] * V_DIM + offs_v[None, :]
        # An empty split wrote no output. Read it anyway, so that this load need not wait for the other.
        partial = tl.load(partial_ptrs, mask=(split < num_live)[:, None] & v_mask[None, :], other=0.0)
        partial = tl.where((weight > 0)[:, None], partial, 0.0)
        acc = acc * rescale + tl.sum(partial * weight[:, None], 0)
        weight_sum = weight_sum * rescale + tl.sum(weight, 0)
        lse_max = new_max
    acc = acc / tl.where(weight_sum > 0, weight_sum, 1.0)
    out_ptrs = out_ptr + token * stride_ot + head * stride_oh + offs_v
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=v_mask)


# fmt: on

_launch_merge = Launcher(_merge_splits_kernel)


def even_queries(metadata: AttentionMetadata, total_q: int) -> int:
    """Queries of each sequence if all have as many, else 0.

    Sequences whose queries a captured step divides anew each time are not even: each may have all of them.
    """
    return metadata.max_seqlen_q if total_q == metadata.num_seqs * metadata.max_seqlen_q else 0


def merge_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    metadata: AttentionMetadata,
    tile: int,
    specialised: Hashable,
    pdl: bool,
    wide_weight: int = 1,
    *,
    rows: tuple[int, int] | None = None,
) -> None:
    """Writes the splits' outputs, weighted by the exponential of their log-sum-exps, to `out`.

    Args:
        partial: float32 `[total_q, num_heads, num_splits, v_head_dim]`; anything where `lse` is -inf.
        lse: float32 `[total_q, num_heads, num_splits]`, base 2.
        out: `[total_q, num_heads, v_head_dim]`.
        tile: keys of a tile; the tiles of a sequence were shared out evenly, the last splits' share may be empty.
        specialised: the part of the launch's key that its attention kernel had.
        pdl: start while the attention kernel is still running.
        wide_weight: as of `split_weights`.
        rows: heads of a group and rows of a program, by which the tiles of several queries were shared out; None if
            only those of one query are known.
    """
    total_q, num_heads, num_splits, v_dim = partial.shape
    queries = even_queries(metadata, total_q)
    if rows is None:
        queries, rows = (1, (1, 1)) if queries == 1 else (0, (1, 1))
    constants = (
        v_dim, metadata.sliding_window or 0, metadata.tree is not None, *rows, tile, queries, wide_weight,
        min(32, next_power_of_2(num_splits)), pdl,
    )  # fmt: skip
    # A warp reads so few splits without an exchange with others: 10 us for 14, attention of 64 nodes included.
    num_warps = 1 if num_splits <= _SPLITS_OF_A_WARP else 4
    with torch.cuda.device_of(out):
        _launch_merge(
            (specialised, constants, num_warps), (total_q, num_heads, 1),
            partial, lse, out, metadata.seq_lens, num_splits, out.stride(0), out.stride(1), *constants,
            num_warps=num_warps, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
