"""Scatters a forward's new keys and values into the blocks of the cache (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .block_ids import MAX_SEGMENTS, SEGMENT_BITS, SEGMENT_MASK
from .launch import Launcher
from .metadata import AttentionMetadata, LayerKV
from .packed_tokens import sequence_of

_SEGMENT_BITS = tl.constexpr(SEGMENT_BITS)
_SEGMENT_MASK = tl.constexpr(SEGMENT_MASK)
_MAX_SEGMENTS = tl.constexpr(MAX_SEGMENTS)


@triton.jit
def block_offset(block_id, segment_offsets_ptr, STRIDE: tl.constexpr, SEGMENTED: tl.constexpr):
    """Elements from the first segment's start to block `block_id`'s, int64; `block_id` any shape.

    `segment_offsets_ptr` points at this tensor's row of `LayerKV.segment_offsets`; not read with one segment.
    """
    offset = (block_id & _SEGMENT_MASK).to(tl.int64) * STRIDE
    if SEGMENTED:
        # A loaded number has no known alignment, and without one every access behind it would be a scalar.
        offset += tl.multiple_of(tl.load(segment_offsets_ptr + (block_id >> _SEGMENT_BITS)), 16)
    return offset


# Nothing is gained by compiling for the alignment of what is read entry by entry.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "stride_tb", "keep_last"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def _store_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr,
    segment_offsets_ptr, block_tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_tokens, num_seqs,
    keep_last, stride_kt, stride_kh, stride_vt, stride_vh, stride_tb,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T new tokens, one KV head."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    seq = sequence_of(token, cu_seqlens_q_ptr, num_seqs)
    live = (token < num_tokens) & (seq < num_seqs)
    seq_len = tl.load(seq_lens_ptr + seq, mask=live, other=0)
    position = seq_len - tl.load(cu_seqlens_q_ptr + seq + 1, mask=live, other=0) + token
    # A position below zero is a padding row of a fixed-shape batch: it belongs to no sequence.
    stored = live & (position >= 0) & (position >= seq_len - keep_last)
    block_id = tl.load(block_tables_ptr + seq.to(tl.int64) * stride_tb + position // BLOCK_SIZE, mask=stored, other=0)
    row = position % BLOCK_SIZE
    k_offset = block_offset(block_id, segment_offsets_ptr, K_STRIDES[0], SEGMENTED) + row * K_STRIDES[2]
    v_offset = block_offset(block_id, segment_offsets_ptr + _MAX_SEGMENTS, V_STRIDES[0], SEGMENTED)
    v_offset += row * V_STRIDES[2]

    source_row = token.to(tl.int64)
    k_dim = tl.arange(0, triton.next_power_of_2(K_DIM))
    k_mask = stored[:, None] & (k_dim < K_DIM)[None, :]
    k = tl.load(k_ptr + (source_row * stride_kt + head * stride_kh)[:, None] + k_dim[None, :], mask=k_mask)
    tl.store(k_cache_ptr + (k_offset + head * K_STRIDES[1])[:, None] + k_dim[None, :], k, mask=k_mask)
    v_dim = tl.arange(0, triton.next_power_of_2(V_DIM))
    v_mask = stored[:, None] & (v_dim < V_DIM)[None, :]
    v = tl.load(v_ptr + (source_row * stride_vt + head * stride_vh)[:, None] + v_dim[None, :], mask=v_mask)
    tl.store(v_cache_ptr + (v_offset + head * V_STRIDES[1])[:, None] + v_dim[None, :], v, mask=v_mask)


_launch_store = Launcher(_store_kv_kernel)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv: LayerKV, metadata: AttentionMetadata, keep_last: int | None = None
) -> None:
    """Writes the new keys and values of one layer to their blocks.

    Token `j` of sequence `b` goes to position `seq_lens[b] - q_len[b] + j`: block
    `block_tables[b, position // block_size]`, row `position % block_size`. A position below zero (a padding
    row of a fixed-shape batch, whose `seq_lens` is 0) is not stored.

    Args:
        k: `[total_q, num_kv_heads, k_head_dim]`, packed by `metadata.cu_seqlens_q`, in the cache's dtype; any
            strides with the last one 1.
        v: `[total_q, num_kv_heads, v_head_dim]`, the same.
        kv: the layer's blocks, written in place.
        metadata: the geometry of this forward; `seq_lens` include the new tokens.
        keep_last: of each sequence only the last `keep_last` tokens are stored (a fresh prompt longer than a
            sliding window). The table entries of the others are not read.
    """
    k_cache, v_cache = kv.k_segments[0], kv.v_segments[0]
    _, num_kv_heads, block_size, k_dim = k_cache.shape
    v_dim = v_cache.shape[3]
    if k.shape[1:] != (num_kv_heads, k_dim) or v.shape[1:] != (num_kv_heads, v_dim):
        raise ValueError(
            f"k and v must be [total_q, {num_kv_heads}, {k_dim}] and [total_q, {num_kv_heads}, {v_dim}] "
            f"for this cache, got {list(k.shape)} and {list(v.shape)}"
        )
    if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
        raise ValueError(f"k and v must have the cache's dtype {k_cache.dtype}, got {k.dtype} and {v.dtype}")
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the last dimension of k and v must have stride 1")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, or None to store every token, got {keep_last}")
    num_seqs, max_seqlen_q = metadata.num_seqs, metadata.max_seqlen_q
    if num_seqs == 0 or max_seqlen_q == 0:
        return

    # A decode step copies one row a head; in a prompt four warps move 32 rows by 16-byte accesses.
    # (Plain arithmetic: Triton's own helpers take microseconds on the host.)
    block_t = min(1 << (max_seqlen_q - 1).bit_length(), 32)
    k_strides, v_strides = k_cache.stride()[:3], v_cache.stride()[:3]
    segmented = kv.segmented
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    misaligned = tuple(t.data_ptr() % 16 for t in (k, v, k_cache, v_cache))
    key = (k.device, k.dtype, k_strides, v_strides, k_dim, v_dim, block_size, segmented, block_t, strides, misaligned)
    with torch.cuda.device_of(k):
        _launch_store(
            key, (-(-len(k) // block_t), num_kv_heads, 1),
            k, v, k_cache, v_cache,
            kv.segment_offsets, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q, len(k), num_seqs,
            2**30 if keep_last is None else keep_last, *strides, metadata.block_tables.stride(0),
            k_strides, v_strides, k_dim, v_dim, block_size, segmented, block_t,
            num_warps=1 if block_t < 8 else 4, enable_fp_fusion=True,
        )  # fmt: skip
