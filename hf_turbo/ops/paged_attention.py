"""Attention of packed queries over a paged KV cache (Triton): decode steps and prompt chunks in one op.

The rows of one tile are query tokens times the query heads of one KV head, so each key is read once for its
whole group. A sequence's keys are split over programs when there are too few (sequence, KV head) pairs to
fill the device; each split writes a normalized output and its log-sum-exp, and a second kernel merges them.
Where lengths may differ much, programs share the keys of all sequences evenly instead (`work_items.py`), and
the last one of a tile of rows merges.
The grid depends on the batch, the heads and an upper bound of the lengths; everything else about length is
read on the device, so a captured CUDA graph stays valid at every length.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import (
    AttentionConfig,
    ceil_div,
    choose_config,
    choose_num_splits,
    device_facts,
    most_splits,
)
from .attention_masks import seen_nodes, seen_positions
from .block_ids import MAX_SEGMENTS
from .launch import Launcher
from .linear_config import MAX_GEMV_ROWS
from .merge_splits import join_if_last, merge_splits, padded, rows_positions, split_share
from .metadata import AttentionMetadata, LayerKV
from .store_kv import block_offset
from .work_items import find_item, most_items, seqs_looked_at, shared_splits

_LOG2E = tl.constexpr(math.log2(math.e))
_MAX_SEGMENTS = tl.constexpr(MAX_SEGMENTS)
#: Columns of an output that are joined at once.
_JOIN = tl.constexpr(32)

# Strides of the cache come as constants (block, head, row) of a model: their alignment is then known, and the
# addresses need no multiplications. Signatures and launches are laid out by kind of argument.
# fmt: off


@triton.jit
def soft_cap(x, CAP: tl.constexpr, PRECISE: tl.constexpr):
    """`CAP * tanh(x)`, through exp2: Triton's tanh is a device library's, which its interpreter lacks."""
    exp = tl.exp2(tl.abs(x) * (-2 * _LOG2E))
    tanh = (1 - exp) / (1 + exp)
    tanh = tl.where(x < 0, -tanh, tanh)
    if PRECISE:
        # Near zero `1 - exp` cancels; the series to x^9 is exact to fp32 below a quarter.
        x2 = x * x
        series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
        tanh = tl.where(tl.abs(x) < 0.25, series, tanh)
    return tanh * CAP


@triton.jit
def _locate_tile(
    tile, first_live, end_live, table_ptr, segment_offsets_ptr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr, TILE: tl.constexpr,
):
    """Where a tile's keys and values are, int64 elements: two scalars (of its first row) if a tile lies in
    one block, else two vectors (of each row). For a tile past the end, the first block, which nobody reads.
    """
    if BLOCK_SIZE % TILE == 0:
        position = tile * TILE
        found = position < end_live
    else:
        position = tile * TILE + tl.arange(0, TILE)
        found = (position >= first_live) & (position < end_live)
    block_id = tl.load(table_ptr + position // BLOCK_SIZE, mask=found, other=0)
    row = position % BLOCK_SIZE
    k_base = block_offset(block_id, segment_offsets_ptr, K_STRIDES[0], SEGMENTED)
    v_base = block_offset(block_id, segment_offsets_ptr + _MAX_SEGMENTS, V_STRIDES[0], SEGMENTED)
    return k_base + row * K_STRIDES[2], v_base + row * V_STRIDES[2]


@triton.jit
def _load_rows(
    ptr, base, live, ROW_STRIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):
    """Loads `[TILE, DIM]`, padded to a power of two with zeros; if MASKED, zeros where rows are not live."""
    DIM_PAD: tl.constexpr = padded(DIM)
    offs_d = tl.arange(0, DIM_PAD)
    if BLOCK_SIZE % TILE == 0:
        # All but a scalar of each address is the same for every tile.
        ptrs = ptr + base + (tl.arange(0, TILE) * ROW_STRIDE)[:, None] + offs_d[None, :]
    else:
        ptrs = ptr + base[:, None] + offs_d[None, :]
    if MASKED and DIM != DIM_PAD:
        return tl.load(ptrs, mask=live[:, None] & (offs_d < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=live[:, None], other=0.0)
    elif DIM != DIM_PAD:
        return tl.load(ptrs, mask=(offs_d < DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _attend_tiles(
    acc, row_max, row_sum, q, q_position, first_node, node_mask, scale,
    tile, num_tiles, jump_at, jump, first_live, end_live,
    k_ptr, v_ptr, segment_offsets_ptr, table_ptr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    TREE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):
    """The online softmax over `num_tiles` tiles of keys from `tile`, jumping over `jump` tiles at `jump_at`.

    MASKED: some row does not see some of these positions, or some are outside `[first_live, end_live)`; the
    slots of the latter are not read (they may be NaN, and 0 * NaN is NaN).
    """
    tile += tl.where(tile == jump_at, jump, 0)
    k_base, v_base = _locate_tile(
        tile, first_live, end_live, table_ptr, segment_offsets_ptr,
        K_STRIDES, V_STRIDES, BLOCK_SIZE, SEGMENTED, TILE,
    )
    for _ in range(num_tiles):
        position = tile * TILE + tl.arange(0, TILE)
        live = (position >= first_live) & (position < end_live)
        k = _load_rows(k_ptr, k_base, live, K_STRIDES[2], K_DIM, BLOCK_SIZE, TILE, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scale
        if SOFT_CAP > 0:
            scores = soft_cap(scores * scale, SOFT_CAP * _LOG2E, q.dtype == tl.float32)
            factor = 1.0
        if MASKED:
            if TREE:
                seen = seen_nodes(
                    tile * TILE, q_position, first_node, node_mask, first_live, end_live, WINDOW, TILE
                )
            else:
                seen = seen_positions(position, live, q_position, first_node, node_mask, WINDOW, TREE)
            scores = tl.where(seen, scores, float("-inf"))

        # The scale is positive, so it may wait until after the maximum and then fuse with the subtraction.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(scores * factor - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v = _load_rows(v_ptr, v_base, live, V_STRIDES[2], V_DIM, BLOCK_SIZE, TILE, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")

        # The next tile is looked up here and not where it is used: the compiler would give each of two
        # dependent loads a pipeline stage of its own, and one tile fewer would be in flight.
        tile += 1
        tile += tl.where(tile == jump_at, jump, 0)
        k_base, v_base = _locate_tile(
            tile, first_live, end_live, table_ptr, segment_offsets_ptr,
            K_STRIDES, V_STRIDES, BLOCK_SIZE, SEGMENTED, TILE,
        )
    return acc, row_max, row_sum


# Nothing is gained by compiling for the alignment of what is read entry by entry.
@triton.jit(
    do_not_specialize=["num_splits", "num_seqs", "stride_tb"],
    do_not_specialize_on_alignment=[
        "block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "sinks_ptr", "node_masks_ptr", "node_depths_ptr",
        "arrived_ptr",
    ],
)
def _paged_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr,
    segment_offsets_ptr, block_tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr, node_masks_ptr, node_depths_ptr, arrived_ptr,
    softmax_scale, num_splits, num_seqs, stride_qt, stride_qh, stride_ot, stride_oh, stride_tb,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, TREE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, PEEL: tl.constexpr, SHARED_OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of one sequence and KV head over one split of its keys.

    Row r of a sequence is query token `r // GROUP`, head `r % GROUP` of the group, so a tile wastes no row
    whatever the group size is. TREE: query tokens are the nodes of a tree, stored from slot `first_query` on. As
    parents come before their children, a node's position is from there to its own slot, and it sees no slot behind.
    SHARED_OUT: 0, or how many sequences at most `find_item` looks at.
    """
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    if SHARED_OUT > 0:
        seq, row_tile, split, live_splits, first_item = find_item(
            tl.program_id(0), seq_lens_ptr, cu_seqlens_q_ptr, num_seqs, tl.num_programs(0), num_splits,
            GROUP, BLOCK_M, TILE, WINDOW, SHARED_OUT,
        )
        if seq >= num_seqs:
            return
    else:
        seq = tl.program_id(2)
        split = tl.program_id(0) % num_splits
    seq_len = tl.load(seq_lens_ptr + seq)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    num_rows = (tl.load(cu_seqlens_q_ptr + seq + 1) - q_start) * GROUP
    if SHARED_OUT == 0:
        # The last tile of a prompt sees the most keys: it starts first.
        row_tile = tl.cdiv(num_rows, BLOCK_M) - 1 - tl.program_id(0) // num_splits
        if row_tile < 0:
            return

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first_query = seq_len - num_rows // GROUP
    q_position = first_query + row // GROUP
    # Positions that some row sees, the tiles that hold them, and this split's share of those tiles.
    first_position, last_position, first_live, end_live = rows_positions(
        first_query, num_rows, row_tile, GROUP, BLOCK_M, WINDOW, TREE
    )
    first_tile = first_live // TILE
    end_tile = tl.cdiv(end_live, TILE)
    if SPLIT:
        share, _ = split_share(end_tile - first_tile, live_splits if SHARED_OUT > 0 else num_splits)
        first_tile = first_tile + split * share
        end_tile = tl.minimum(first_tile + share, end_tile)
    token = (q_start + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    row_mask = row < num_rows

    offs_k = tl.arange(0, padded(K_DIM))
    offs_v = tl.arange(0, padded(V_DIM))
    q_mask = row_mask[:, None] & (offs_k < K_DIM)[None, :]
    if PDL:
        # The geometry was written before the keys were; they, and q, may have been just now.
        gdc_wait()
    q_ptrs = q_ptr + (token * stride_qt + head * stride_qh)[:, None] + offs_k[None, :]
    q = tl.load(q_ptrs, mask=q_mask, other=0.0)
    node_mask = token
    if TREE:
        node_mask = tl.load(node_masks_ptr + token, mask=row_mask, other=0)
        q_position = first_query + tl.load(node_depths_ptr + token, mask=row_mask, other=0)

    scale = softmax_scale / SOFT_CAP if SOFT_CAP > 0 else softmax_scale * _LOG2E
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # The sink is a first key with no value; only one split may count it.
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * _LOG2E
        row_max = tl.where(split == 0, sink, row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)
    acc = tl.zeros([BLOCK_M, padded(V_DIM)], tl.float32)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
    k_ptr = k_cache_ptr + kv_head.to(tl.int64) * K_STRIDES[1]
    v_ptr = v_cache_ptr + kv_head.to(tl.int64) * V_STRIDES[1]

    first_full = end_tile
    num_full = 0
    if PEEL:
        # Tiles that every row sees in full need no mask. They go first; the order is free.
        first_full = first_tile
        if WINDOW > 0:
            first_full = tl.maximum(first_full, tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE))
            first_full = tl.minimum(first_full, end_tile)
        end_full = first_query if TREE else first_position + 1
        num_full = tl.maximum(tl.minimum(end_full // TILE, end_tile) - first_full, 0)
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, q, q_position, first_query, node_mask, scale,
            first_full, num_full, -1, 0, first_live, end_live,
            k_ptr, v_ptr, segment_offsets_ptr, table_ptr,
            K_STRIDES, V_STRIDES, K_DIM, V_DIM, BLOCK_SIZE, SEGMENTED, WINDOW, SOFT_CAP, TREE, TILE,
            MASKED=False,
        )
    num_masked = end_tile - first_tile - num_full
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q, q_position, first_query, node_mask, scale,
        first_tile, num_masked, first_full, num_full, first_live, end_live,
        k_ptr, v_ptr, segment_offsets_ptr, table_ptr,
        K_STRIDES, V_STRIDES, K_DIM, V_DIM, BLOCK_SIZE, SEGMENTED, WINDOW, SOFT_CAP, TREE, TILE,
        MASKED=True,
    )

    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_mask = row_mask[:, None] & (offs_v < V_DIM)[None, :]
    out_ptrs = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_v[None, :]
    if SPLIT:
        partial_row = (token * (tl.num_programs(1) * GROUP) + head) * num_splits
        partial_ptrs = partial_ptr + partial_row[:, None] * V_DIM + offs_v[None, :]
        if SHARED_OUT > 0 and live_splits == 1:
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
            return
        tl.store(lse_ptr + partial_row + split, row_max + tl.log2(row_sum), mask=row_mask)
        # The merge makes nothing of the partial output of a split whose log-sum-exp is -inf.
        if HAS_SINKS | (end_tile > first_tile):
            tl.store(partial_ptrs + split * V_DIM, acc, mask=out_mask)
        if SHARED_OUT > 0:
            join_if_last(
                arrived_ptr + first_item * tl.num_programs(1) + kv_head, partial_ptr, lse_ptr, out_ptr,
                partial_row, token * stride_ot + head * stride_oh, row_mask, live_splits,
                V_DIM, min(padded(V_DIM), _JOIN), BLOCK_M,
            )
    else:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


# fmt: on

_launch_attention = Launcher(_paged_attention_kernel)


def _check(q: torch.Tensor, kv: LayerKV, softmax_scale: float, sinks: torch.Tensor | None) -> None:
    k_cache, v_cache = kv.k_segments[0], kv.v_segments[0]
    num_heads, num_kv_heads, k_dim = q.shape[1], k_cache.shape[1], k_cache.shape[3]
    if num_heads % num_kv_heads or q.shape[2] != k_dim:
        raise ValueError(
            f"q must be [total_q, a multiple of {num_kv_heads}, {k_dim}] for this cache, got {list(q.shape)}"
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"q must have the cache's dtype, got {q.dtype}, {k_cache.dtype} and {v_cache.dtype}")
    if q.stride(2) != 1:
        raise ValueError("the last dimension of q must have stride 1")
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale must be positive, got {softmax_scale}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [{num_heads}], one a head, got {list(sinks.shape)}")


def paged_attention(
    q: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Attends packed queries to the cached keys of their sequences, causally, within any sliding window.

    Args:
        q: `[total_q, num_heads, k_head_dim]`, packed by `metadata.cu_seqlens_q`, in the cache's dtype (fp32,
            fp16 or bf16); any strides with the last one 1. Its own keys must be stored already.
        kv: the layer's blocks.
        metadata: the geometry of this forward. A sequence may have no queries, or be the nodes of a tree.
        softmax_scale: scores are `q.k * softmax_scale`.
        logit_softcap: scores become `cap * tanh(scores / cap)`.
        sinks: `[num_heads]`, one more logit a head, in the denominator only.
        out: where to write the result; allocated if None.
        config: overrides the table (for measuring).

    Returns:
        `[total_q, num_heads, v_head_dim]` in q's dtype. Rows that see no key are zeros.
    """
    k_cache, v_cache = kv.k_segments[0], kv.v_segments[0]
    _, num_kv_heads, block_size, k_dim = k_cache.shape
    v_dim = v_cache.shape[3]
    total_q, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    _check(q, kv, softmax_scale, sinks)
    if out is None:
        out = q.new_empty(total_q, num_heads, v_dim)
    elif out.shape != (total_q, num_heads, v_dim) or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(
            f"out must be {[total_q, num_heads, v_dim]}, {q.dtype}, with a last stride of 1, "
            f"got {list(out.shape)}, {out.dtype}, strides {out.stride()}"
        )
    num_seqs, rows, tree = metadata.num_seqs, metadata.max_seqlen_q * group, metadata.tree
    if num_seqs == 0 or rows == 0:
        return out

    facts = device_facts(q.device)
    if config is None:
        pairs, max_seqlen_q, beside_gemv = num_kv_heads * num_seqs, metadata.max_seqlen_q, total_q <= MAX_GEMV_ROWS
        config = choose_config(rows, pairs, k_dim, v_dim, q.dtype, facts, tree is not None, max_seqlen_q, beside_gemv)
    grid, num_splits, lookup = _grid(config, metadata, q.shape, num_kv_heads, facts.num_sms)
    partial = lse = out
    if num_splits > 1:
        partial = torch.empty(total_q, num_heads, num_splits, v_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(total_q, num_heads, num_splits, dtype=torch.float32, device=q.device)
    k_strides, v_strides = k_cache.stride()[:3], v_cache.stride()[:3]
    strides = (q.stride(0), q.stride(1), out.stride(0), out.stride(1))
    constants = (
        k_strides, v_strides, k_dim, v_dim, block_size, kv.segmented,
        metadata.sliding_window or 0, logit_softcap or 0.0, group, sinks is not None, num_splits > 1,
        tree is not None, config.block_m, config.tile, config.peel, lookup, config.pdl,
    )  # fmt: skip
    misaligned = tuple(t.data_ptr() % 16 for t in (q, out, k_cache, v_cache))
    specialised = (q.device, q.dtype, None if sinks is None else sinks.dtype, strides, misaligned)
    # fmt: off
    with torch.cuda.device_of(q):
        _launch_attention(
            (specialised, constants, config.num_warps, config.num_stages),
            grid,
            q, k_cache, v_cache, out, partial, lse, q if sinks is None else sinks,
            kv.segment_offsets, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q,
            None if tree is None else tree.masks, None if tree is None else tree.depths,
            metadata.arrivals if lookup else None,
            float(softmax_scale), num_splits, num_seqs, *strides, metadata.block_tables.stride(0), *constants,
            num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.pdl, enable_fp_fusion=True,
        )
    # fmt: on
    if num_splits > 1 and not lookup:
        rows_of_programs = (group, config.block_m)
        merge_splits(partial, lse, out, metadata, config.tile, specialised, config.pdl, rows=rows_of_programs)
    return out


def _grid(
    config: AttentionConfig, metadata: AttentionMetadata, q_shape: torch.Size, num_kv_heads: int, num_sms: int
) -> tuple[tuple[int, int, int], int, int]:
    """The grid, splits of a sequence at most, and sequences that `find_item` looks at; 0: each has as many splits."""
    total_q, num_heads, dim = q_shape
    num_seqs, group = metadata.num_seqs, num_heads // num_kv_heads
    seen = min(metadata.max_seqlen_k, (metadata.sliding_window or 2**30) + metadata.max_seqlen_q)
    slots = num_sms * config.programs_per_sm
    # 64 rows of 600 tokens: 51 us, with half of the items 59; of fewer rows it is worse.
    wanted = 2 * slots if num_seqs * num_kv_heads > slots else slots
    num_items = most_items(total_q, num_seqs, num_kv_heads, group, config.block_m, wanted)
    if lookup := seqs_looked_at(metadata, num_items, num_kv_heads):
        splits = config.num_splits or shared_splits(most_splits(seen, 1, dim), total_q)
        return (num_items, num_kv_heads, 1), splits, lookup
    row_tiles = ceil_div(metadata.max_seqlen_q * group, config.block_m)
    num_splits = config.num_splits
    if num_splits is None:
        max_splits = most_splits(seen, metadata.max_seqlen_q, dim)
        num_splits = choose_num_splits(row_tiles * num_kv_heads * num_seqs, max_splits, slots)
    return (row_tiles * num_splits, num_kv_heads, num_seqs), num_splits, 0
