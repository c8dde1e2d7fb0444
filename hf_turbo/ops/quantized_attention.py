"""Attention of packed queries over a cache whose older blocks are codes (Triton).

As `paged_attention`, whose rows, splits and merge these are; what differs is a tile (`quantized_tiles`). The blocks of
codes and the wide ones each come to an output, a sum and a maximum of their own, which are joined at the end. As wide
blocks take longer, splits have even shares of what tiles weigh (`split_weights`) and not of their number.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import (
    MIN_KEYS_PER_SPLIT,
    AttentionConfig,
    ceil_div,
    choose_num_splits,
    device_facts,
)
from .kv_format import WIDE_BEHIND
from .launch import Launcher
from .merge_splits import join_if_last, merge_splits, padded, rows_positions, split_weights
from .metadata import AttentionMetadata, QuantizedKV
from .quantized_attention_config import choose_config
from .quantized_tiles import attend_codes, attend_wide, load_queries, store_part
from .work_items import find_item, items_of_a_wave, seqs_looked_at, shared_splits

_LOG2E = tl.constexpr(math.log2(math.e))
_WIDE_BEHIND = tl.constexpr(WIDE_BEHIND)
#: Numbers of an output that are joined at once. All programs of a step come to their ends together, so waits count.
_JOIN = tl.constexpr(1024)

# Signatures and launches are laid out by kind of argument.
# fmt: off


@triton.jit
def _tiles_in(weight, num_first, num_codes, num_last, WIDE_WEIGHT: tl.constexpr):
    """How many of a sequence's tiles begin within its first `weight`: those that splits before this weight have."""
    left = weight - num_first * WIDE_WEIGHT
    num_last = tl.minimum(tl.maximum(tl.cdiv(left - num_codes, WIDE_WEIGHT), 0), num_last)
    return tl.where(weight > 0, num_first + tl.minimum(tl.maximum(left, 0), num_codes) + num_last, 0)


@triton.jit
def _store_output(
    ptrs, row_mask, acc0, acc1, acc2, acc3, zeros, code_share, wide0, wide1, wide2, wide3, wide_share,
    V_DIM: tl.constexpr, PARTS: tl.constexpr,
):
    """What codes and wide blocks come to together, part by part."""
    store_part(ptrs, row_mask, tl.trans((acc0 + zeros) * code_share) + wide0 * wide_share, V_DIM, 0, PARTS)
    store_part(ptrs, row_mask, tl.trans((acc1 + zeros) * code_share) + wide1 * wide_share, V_DIM, 1, PARTS)
    if PARTS == 4:
        store_part(ptrs, row_mask, tl.trans((acc2 + zeros) * code_share) + wide2 * wide_share, V_DIM, 2, PARTS)
        store_part(ptrs, row_mask, tl.trans((acc3 + zeros) * code_share) + wide3 * wide_share, V_DIM, 3, PARTS)


# Nothing is gained by compiling for the alignment of what is read entry by entry.
@triton.jit(
    do_not_specialize=["num_splits", "num_seqs", "stride_tb", "stride_tc"],
    do_not_specialize_on_alignment=[
        "block_tables_ptr", "code_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "sinks_ptr",
        "node_masks_ptr", "node_depths_ptr", "arrived_ptr",
    ],
)
def _quantized_attention_kernel(
    q_ptr, k_wide_ptr, v_wide_ptr, k_codes_ptr, v_codes_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr,
    wide_offsets_ptr, code_offsets_ptr, block_tables_ptr, code_tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    node_masks_ptr, node_depths_ptr, arrived_ptr,
    softmax_scale, num_splits, num_seqs, stride_qt, stride_qh, stride_ot, stride_oh, stride_tb, stride_tc,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, K_CODES: tl.constexpr, V_CODES: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SEGMENTED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, ONE_TOKEN: tl.constexpr,
    TREE: tl.constexpr, FORMAT: tl.constexpr, WIDE_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
    SHARED_OUT: tl.constexpr, PDL: tl.constexpr, CAPABILITY: tl.constexpr,
):
    """One program: BLOCK_M rows of one sequence and KV head over one split of its blocks; see `paged_attention`."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    if SHARED_OUT > 0:
        seq, row_tile, split, live_splits, first_item = find_item(
            tl.program_id(0), seq_lens_ptr, cu_seqlens_q_ptr, num_seqs, tl.num_programs(0), num_splits,
            GROUP, BLOCK_M, BLOCK_SIZE, WINDOW, SHARED_OUT, WIDE_WEIGHT,
        )
        if seq >= num_seqs:
            return
        if FORMAT[0] == 4 and ONE_TOKEN and GROUP <= BLOCK_M:
            # The loop over int4 codes has no register to spare: what is known here makes it 13 instructions shorter.
            row_tile = 0
    else:
        seq = tl.program_id(2)
        split = tl.program_id(0) % num_splits
        live_splits = num_splits
    seq_len = tl.load(seq_lens_ptr + seq)
    q_start = tl.load(cu_seqlens_q_ptr + seq)
    # Of an item that exists, one token a sequence at most is one.
    q_len = 1 if SHARED_OUT > 0 and ONE_TOKEN else tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    num_rows = q_len * GROUP
    if SHARED_OUT == 0:
        row_tile = tl.cdiv(num_rows, BLOCK_M) - 1 - tl.program_id(0) // num_splits
        if row_tile < 0:
            return

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first_query = seq_len - num_rows // GROUP
    q_position = first_query + row // GROUP
    token = (q_start + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    row_mask = row < num_rows

    # Positions that some row sees, their blocks, this split's share of those.
    first_position, last_position, first_live, end_live = rows_positions(
        first_query, num_rows, row_tile, GROUP, BLOCK_M, WINDOW, TREE
    )
    first_tile = first_live // BLOCK_SIZE
    end_tile = tl.cdiv(end_live, BLOCK_SIZE)
    last_tile = end_tile
    if SPLIT:
        weight, num_first, num_last = split_weights(end_tile - first_tile, first_tile == 0, WIDE_WEIGHT)
        share = tl.cdiv(weight, live_splits)
        num_codes = end_tile - first_tile - num_first - num_last
        end_tile = first_tile + _tiles_in(share * (split + 1), num_first, num_codes, num_last, WIDE_WEIGHT)
        first_tile += _tiles_in(share * split, num_first, num_codes, num_last, WIDE_WEIGHT)

    scale = softmax_scale / SOFT_CAP if SOFT_CAP > 0 else softmax_scale * _LOG2E
    PARTS: tl.constexpr = 16 // FORMAT[0]
    q_ptrs = q_ptr + token * stride_qt + head * stride_qh
    if PDL:
        # The geometry was written before the keys were; they, and q, may have been just now.
        gdc_wait()
    q0 = load_queries(q_ptrs, row_mask, K_DIM, 0, PARTS)
    q1 = load_queries(q_ptrs, row_mask, K_DIM, 1, PARTS)
    q2 = q0
    q3 = q1
    if PARTS == 4:
        q2 = load_queries(q_ptrs, row_mask, K_DIM, 2, PARTS)
        q3 = load_queries(q_ptrs, row_mask, K_DIM, 3, PARTS)
    node_mask = token
    code_position = q_position  # that by which a row's codes and wide blocks go
    if TREE:
        node_mask = tl.load(node_masks_ptr + token, mask=row_mask, other=0)
        q_position = first_query + tl.load(node_depths_ptr + token, mask=row_mask, other=0)
        # Blocks with nodes are never codes.
        code_position = tl.minimum(q_position, (first_query // BLOCK_SIZE + _WIDE_BEHIND) * BLOCK_SIZE)
    NUMBER: tl.constexpr = tl.float32 if q0.dtype == tl.float32 else tl.float16

    head_offset = kv_head.to(tl.int64)
    end_codes = tl.maximum((tl.max(code_position, 0) if TREE else last_position) // BLOCK_SIZE - _WIDE_BEHIND, 1)
    nothing = tl.zeros([padded(V_DIM // PARTS), BLOCK_M], tl.float32)
    no_sums = tl.zeros([BLOCK_SIZE, BLOCK_M], tl.float32)
    lowest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc0, acc1, acc2, acc3, shifts, row_max, sums = attend_codes(
        nothing, nothing, nothing, nothing, no_sums, lowest, no_sums,
        q0.to(NUMBER), q1.to(NUMBER), q2.to(NUMBER), q3.to(NUMBER), q_position, code_position, scale,
        tl.maximum(first_tile, 1), tl.minimum(end_tile, end_codes),
        k_codes_ptr + head_offset * K_CODES[1], v_codes_ptr + head_offset * V_CODES[1],
        code_offsets_ptr, code_tables_ptr + seq.to(tl.int64) * stride_tc,
        K_CODES[0], V_CODES[0], K_DIM, V_DIM, BLOCK_SIZE, SEGMENTED, WINDOW, SOFT_CAP, ONE_TOKEN, FORMAT, PARTS,
        CAPABILITY,
    )
    row_sum = tl.sum(sums, 0)

    # Of the wide blocks, the first and those from the one before the first row's on.
    tail_tile = tl.maximum(tl.maximum(first_position, 0) // BLOCK_SIZE - _WIDE_BEHIND, 1)
    tail_tile = tl.maximum(tail_tile, first_tile)
    num_tail = tl.maximum(end_tile - tail_tile, 0)
    has_first = ((first_tile == 0) & (end_tile > 0)).to(tl.int32)
    wide_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    wide_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # The sink is a first key with no value; only one split may count it.
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * _LOG2E
        wide_max = tl.where(split == 0, sink, wide_max)
        wide_sum = tl.where(split == 0, 1.0, wide_sum)
    nothing = tl.zeros([BLOCK_M, padded(V_DIM // PARTS)], tl.float32)
    wide0, wide1, wide2, wide3, wide_max, wide_sum = attend_wide(
        nothing, nothing, nothing, nothing, wide_max, wide_sum, q0, q1, q2, q3,
        q_position, code_position, first_query, node_mask, scale,
        tl.where(has_first > 0, 0, tail_tile), has_first + num_tail, tail_tile - 1, last_tile, first_live, end_live,
        k_wide_ptr + head_offset * K_STRIDES[1], v_wide_ptr + head_offset * V_STRIDES[1],
        wide_offsets_ptr, block_tables_ptr + seq.to(tl.int64) * stride_tb,
        K_STRIDES, V_STRIDES, K_DIM, V_DIM, BLOCK_SIZE, SEGMENTED, WINDOW, SOFT_CAP, ONE_TOKEN, TREE, PARTS,
    )

    both_max = tl.maximum(row_max, wide_max)
    shift = tl.where(both_max == float("-inf"), 0.0, both_max)
    code_share = tl.exp2(row_max - shift)
    wide_share = tl.exp2(wide_max - shift)
    row_sum = row_sum * code_share + wide_sum * wide_share
    row_max = both_max
    inverse = 1.0 / tl.where(row_sum > 0, row_sum, 1.0)
    code_share = (code_share * inverse)[None, :]
    wide_share = (wide_share * inverse)[:, None]
    zeros = tl.sum(shifts, 0)[None, :] if FORMAT[2] else tl.zeros_like(code_share)
    out_row = token * stride_ot + head * stride_oh
    if SPLIT:
        if SHARED_OUT > 0 and live_splits == 1:
            _store_output(
                out_ptr + out_row, row_mask, acc0, acc1, acc2, acc3, zeros, code_share,
                wide0, wide1, wide2, wide3, wide_share, V_DIM, PARTS,
            )
            return
        partial_row = (token * (tl.num_programs(1) * GROUP) + head) * num_splits + split
        tl.store(lse_ptr + partial_row, row_max + tl.log2(row_sum), mask=row_mask)
        # The merge makes nothing of the partial output of a split whose log-sum-exp is -inf.
        is_written = row_mask & (HAS_SINKS | (end_tile > first_tile))
        partial_ptrs = partial_ptr + partial_row * V_DIM
        _store_output(
            partial_ptrs, is_written, acc0, acc1, acc2, acc3, zeros, code_share,
            wide0, wide1, wide2, wide3, wide_share, V_DIM, PARTS,
        )
        if SHARED_OUT > 0:
            join_if_last(
                arrived_ptr + first_item * tl.num_programs(1) + kv_head, partial_ptr, lse_ptr, out_ptr,
                partial_row - split, out_row, row_mask, live_splits,
                V_DIM, min(padded(V_DIM), max(_JOIN // BLOCK_M, 16)), BLOCK_M,
            )
    else:
        _store_output(
            out_ptr + out_row, row_mask, acc0, acc1, acc2, acc3, zeros, code_share,
            wide0, wide1, wide2, wide3, wide_share, V_DIM, PARTS,
        )


# fmt: on

_launch_attention = Launcher(_quantized_attention_kernel)


def paged_attention(
    q: torch.Tensor,
    kv: QuantizedKV,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Attends packed queries to the cached keys of their sequences; see `paged_attention.paged_attention`.

    Which blocks are read as codes and which wide says `kv_format.end_of_codes`. Numbers that codes stand for are fp16
    where q is fp16 or bf16, and float32 where q is.
    """
    wide_k, wide_v, codes_k, codes_v = (s[0] for kv_ in (kv.wide, kv.codes) for s in (kv_.k_segments, kv_.v_segments))
    block_size, group, (total_q, num_heads, _) = kv.block_size, q.shape[1] // kv.num_kv_heads, q.shape
    code_tables = metadata.code_tables
    if code_tables is None:
        raise ValueError("the metadata of a quantized cache needs code_tables")
    _check(q, kv, softmax_scale, sinks)
    if out is None:
        out = q.new_empty(total_q, num_heads, kv.v_dim)
    elif out.shape != (total_q, num_heads, kv.v_dim) or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(f"out must be {[total_q, num_heads, kv.v_dim]}, {q.dtype}, with a last stride of 1")
    num_seqs, rows, tree = metadata.num_seqs, metadata.max_seqlen_q * group, metadata.tree
    if num_seqs == 0 or rows == 0:
        return out

    facts = device_facts(q.device)
    if config is None:
        config = choose_config(
            rows,
            kv.num_kv_heads * num_seqs,
            kv.k_dim,
            kv.v_dim,
            block_size,
            q.dtype,
            kv.format.bits,
            facts,
            tree is not None,
        )
    grid, num_splits, lookup = _grid(config, metadata, total_q, group, kv, facts.num_sms)
    if num_splits > 1:
        partial = torch.empty(total_q, num_heads, num_splits, kv.v_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(total_q, num_heads, num_splits, dtype=torch.float32, device=q.device)
    else:
        partial = lse = out
    strides = (q.stride(0), q.stride(1), out.stride(0), out.stride(1))
    fmt = kv.format
    wide_weight = 8 // fmt.bits + 1  # about what a wide block takes longer than one of codes
    constants = (
        wide_k.stride()[:3], wide_v.stride()[:3], codes_k.stride()[:2], codes_v.stride()[:2],
        kv.k_dim, kv.v_dim, block_size, kv.wide.segmented or kv.codes.segmented,
        metadata.sliding_window or 0, logit_softcap or 0.0, group, sinks is not None, num_splits > 1,
        metadata.max_seqlen_q == 1 and tree is None, tree is not None,
        (fmt.bits, fmt.is_float, fmt.zero_values, 448.0 if fmt.is_float else 127.0, fmt.key_groups(block_size)),
        wide_weight, config.block_m, lookup, config.pdl, 0 if q.dtype == torch.float32 else facts.capability,
    )  # fmt: skip
    misaligned = tuple(t.data_ptr() % 16 for t in (q, out, wide_k, wide_v, codes_k, codes_v))
    specialised = (q.device, q.dtype, None if sinks is None else sinks.dtype, strides, misaligned)
    # fmt: off
    with torch.cuda.device_of(q):
        _launch_attention(
            (specialised, constants, config.num_warps, config.num_stages, config.max_registers),
            grid,
            q, wide_k, wide_v, codes_k, codes_v, out, partial, lse, q if sinks is None else sinks,
            kv.wide.segment_offsets, kv.codes.segment_offsets, metadata.block_tables, code_tables,
            metadata.seq_lens, metadata.cu_seqlens_q, None if tree is None else tree.masks,
            None if tree is None else tree.depths, metadata.arrivals if lookup else None,
            float(softmax_scale), num_splits, num_seqs, *strides,
            metadata.block_tables.stride(0), code_tables.stride(0), *constants,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
            launch_pdl=config.pdl, enable_fp_fusion=True,
        )
    # fmt: on
    if num_splits > 1 and not lookup:
        merge_splits(partial, lse, out, metadata, block_size, specialised, config.pdl, wide_weight)
    return out


def _grid(
    config: AttentionConfig, metadata: AttentionMetadata, total_q: int, group: int, kv: QuantizedKV, num_sms: int
) -> tuple[tuple[int, int, int], int, int]:
    """As of `paged_attention`: the grid, splits of a sequence at most, and sequences that `find_item` looks at."""
    num_seqs, heads, max_seqlen_q = metadata.num_seqs, kv.num_kv_heads, metadata.max_seqlen_q
    seen = min(metadata.max_seqlen_k, (metadata.sliding_window or 2**30) + max_seqlen_q)
    max_splits = ceil_div(seen, max(MIN_KEYS_PER_SPLIT, kv.block_size))
    slots = num_sms * config.programs_per_sm
    num_items = items_of_a_wave(total_q, num_seqs, max_seqlen_q, heads, group, config.block_m, slots)
    if lookup := seqs_looked_at(metadata, num_items, heads):
        return (num_items, heads, 1), config.num_splits or shared_splits(max_splits, total_q), lookup
    row_tiles = ceil_div(max_seqlen_q * group, config.block_m)
    num_splits = config.num_splits or choose_num_splits(row_tiles * heads * num_seqs, max_splits, slots)
    return (row_tiles * num_splits, heads, num_seqs), num_splits, 0


def _check(q: torch.Tensor, kv: QuantizedKV, softmax_scale: float, sinks: torch.Tensor | None) -> None:
    if q.shape[1] % kv.num_kv_heads or q.shape[2] != kv.k_dim:
        raise ValueError(
            f"q must be [total_q, a multiple of {kv.num_kv_heads}, {kv.k_dim}] for this cache, got {list(q.shape)}"
        )
    if q.dtype != kv.wide.k_segments[0].dtype or q.stride(2) != 1:
        raise ValueError(
            f"q must have the cache's dtype {kv.wide.k_segments[0].dtype} and a last stride of 1, got {q.dtype} and "
            f"strides {q.stride()}"
        )
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale must be positive, got {softmax_scale}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be [{q.shape[1]}], one a head, got {list(sinks.shape)}")
