"""What stands between a layer's q/k/v projection and its attention, in one launch (Triton): the norms of the
heads, the rotary embedding, and the new keys' and values' way into the blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import DeviceFacts, ceil_div, device_facts, next_power_of_2
from .block_ids import MAX_SEGMENTS
from .launch import Launcher
from .metadata import AttentionMetadata, LayerKV
from .norm import DTYPES, apply_norm_weight, check_norm, norm_constants
from .norm_spec import RMSNorm
from .packed_tokens import sequence_of
from .store_kv import block_offset

_MAX_SEGMENTS = tl.constexpr(MAX_SEGMENTS)


@dataclass(frozen=True)
class RotaryConfig:
    """How the kernel is compiled.

    Args:
        block_t, block_h: tokens, and heads, that a program takes; powers of two.
        num_warps: Triton's.
        pdl: starts while the kernel before it still runs, and waits for it on the device (compute capability 9.0
            and above).
    """

    block_t: int
    block_h: int
    num_warps: int
    pdl: bool


@lru_cache(maxsize=4096)
def choose_config(max_seqlen_q: int, dim: int, facts: DeviceFacts) -> RotaryConfig:
    """16 elements a thread. Heads share a program because they share the cosines, which are as large as a head."""
    block_t = min(8, next_power_of_2(max_seqlen_q))
    block_h = 4
    num_warps = max(1, min(16, block_t * block_h * next_power_of_2(dim) // 512))
    return RotaryConfig(block_t, block_h, num_warps, pdl=facts.capability >= 90)


# Rows are (token, head) pairs, and come as one pointer each. A head is read in up to three pieces: the two members
# of the pairs that are rotated against each other, and the rest that passes through.
# fmt: off


@triton.jit
def _load_pairs(row_ptrs, row_mask, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second members of the pairs, `[ROWS, ROTARY_DIM // 2]` each, padded, in float32."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    HALF_PAD: tl.constexpr = triton.next_power_of_2(HALF)
    if INTERLEAVED:
        dim = tl.arange(0, 2 * HALF_PAD)
        mask = row_mask[:, None] & (dim < ROTARY_DIM)[None, :]
        both = tl.load(row_ptrs[:, None] + dim[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, [row_ptrs.shape[0], HALF_PAD, 2]))
    else:
        dim = tl.arange(0, HALF_PAD)
        mask = row_mask[:, None] & (dim < HALF)[None, :]
        first = tl.load(row_ptrs[:, None] + dim[None, :], mask=mask, other=0.0)
        second = tl.load(row_ptrs[:, None] + (HALF + dim)[None, :], mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(
    row_ptrs, row_mask, first, second, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY_DIM // 2
    HALF_PAD: tl.constexpr = triton.next_power_of_2(HALF)
    if INTERLEAVED:
        dim = tl.arange(0, 2 * HALF_PAD)
        mask = row_mask[:, None] & (dim < ROTARY_DIM)[None, :]
        both = tl.reshape(tl.join(first, second), [row_ptrs.shape[0], 2 * HALF_PAD])
        tl.store(row_ptrs[:, None] + dim[None, :], both, mask=mask)
    else:
        dim = tl.arange(0, HALF_PAD)
        mask = row_mask[:, None] & (dim < HALF)[None, :]
        tl.store(row_ptrs[:, None] + dim[None, :], first, mask=mask)
        tl.store(row_ptrs[:, None] + (HALF + dim)[None, :], second, mask=mask)


@triton.jit
def _load_span(row_ptrs, row_mask, START: tl.constexpr, END: tl.constexpr):
    """Elements START to END of each row, padded to a power of two."""
    dim = START + tl.arange(0, triton.next_power_of_2(END - START))
    return tl.load(row_ptrs[:, None] + dim[None, :], mask=row_mask[:, None] & (dim < END)[None, :], other=0.0)


@triton.jit
def _store_span(row_ptrs, row_mask, x, START: tl.constexpr, END: tl.constexpr):
    dim = START + tl.arange(0, triton.next_power_of_2(END - START))
    tl.store(row_ptrs[:, None] + dim[None, :], x, mask=row_mask[:, None] & (dim < END)[None, :])


@triton.jit
def _norm_pieces(
    first, second, rest, weight_ptr, eps, DTYPE: tl.constexpr,
    DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTING: tl.constexpr,
):
    """The RMSNorm of whole heads, rounded to DTYPE; WEIGHTING as `norm_constants` gives it."""
    squares = tl.zeros([first.shape[0]], tl.float32)
    if ROTARY_DIM > 0:
        squares += tl.sum(first * first + second * second, 1)
    if ROTARY_DIM < DIM:
        squares += tl.sum(rest * rest, 1)
    inverse = tl.rsqrt(squares * (1.0 / DIM) + eps)[:, None]
    weight_ptrs = weight_ptr + tl.zeros([1], tl.int32)
    every = tl.full([1], 1, tl.int1)
    if ROTARY_DIM > 0:
        w1 = first
        w2 = second
        if WEIGHTING[0]:
            w1, w2 = _load_pairs(weight_ptrs, every, ROTARY_DIM, INTERLEAVED)
        first = apply_norm_weight(first * inverse, w1, DTYPE, WEIGHTING[0], WEIGHTING[1], WEIGHTING[2])
        second = apply_norm_weight(second * inverse, w2, DTYPE, WEIGHTING[0], WEIGHTING[1], WEIGHTING[2])
        first = first.to(DTYPE).to(tl.float32)
        second = second.to(DTYPE).to(tl.float32)
    if ROTARY_DIM < DIM:
        w = rest
        if WEIGHTING[0]:
            w = _load_span(weight_ptrs, every, ROTARY_DIM, DIM)
        rest = apply_norm_weight(rest * inverse, w, DTYPE, WEIGHTING[0], WEIGHTING[1], WEIGHTING[2])
        rest = rest.to(DTYPE).to(tl.float32)
    return first, second, rest


@triton.jit
def load_rotated(
    row_ptrs, cos_ptrs, sin_ptrs, row_mask, weight_ptr, eps,
    DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTING: tl.constexpr,
):
    """Heads, normalized unless WEIGHTING is None, and rotated: the pieces, in float32, to be rounded as stored.

    A piece that there is none of is a copy of another.
    """
    DTYPE: tl.constexpr = row_ptrs.dtype.element_ty
    if ROTARY_DIM > 0:
        first, second = _load_pairs(row_ptrs, row_mask, ROTARY_DIM, INTERLEAVED)
        cos1, cos2 = _load_pairs(cos_ptrs, row_mask, ROTARY_DIM, INTERLEAVED)
        sin1, sin2 = _load_pairs(sin_ptrs, row_mask, ROTARY_DIM, INTERLEAVED)
        rest = first
    if ROTARY_DIM < DIM:
        rest = _load_span(row_ptrs, row_mask, ROTARY_DIM, DIM).to(tl.float32)
    if ROTARY_DIM == 0:
        first = rest
        second = rest
    if WEIGHTING is not None:
        first, second, rest = _norm_pieces(
            first, second, rest, weight_ptr, eps, DTYPE, DIM, ROTARY_DIM, INTERLEAVED, WEIGHTING
        )
    if ROTARY_DIM > 0:
        # Torch rounds the products to the dtype of both factors: to that of the cosines, float32 or DTYPE.
        PRODUCT: tl.constexpr = cos_ptrs.dtype.element_ty
        left = (first * cos1).to(PRODUCT).to(tl.float32) - (second * sin1).to(PRODUCT).to(tl.float32)
        right = (second * cos2).to(PRODUCT).to(tl.float32) + (first * sin2).to(PRODUCT).to(tl.float32)
        first = left
        second = right
    return first, second, rest


@triton.jit
def store_pieces(
    row_ptrs, row_mask, first, second, rest,
    DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    DTYPE: tl.constexpr = row_ptrs.dtype.element_ty
    if ROTARY_DIM > 0:
        _store_pairs(row_ptrs, row_mask, first.to(DTYPE), second.to(DTYPE), ROTARY_DIM, INTERLEAVED)
    if ROTARY_DIM < DIM:
        _store_span(row_ptrs, row_mask, rest.to(DTYPE), ROTARY_DIM, DIM)


@triton.jit
def _cache_slots(
    token, row_mask, seq, keep_last,
    segment_offsets_ptr, block_tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr, stride_tb,
    STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr,
):
    """Where the cache holds each token, without its head, int64 elements; and which tokens are stored at all."""
    seq_len = tl.load(seq_lens_ptr + seq, mask=row_mask, other=0)
    position = seq_len - tl.load(cu_seqlens_q_ptr + seq + 1, mask=row_mask, other=0) + token
    # A position below zero is a padding row of a fixed-shape batch: it belongs to no sequence.
    stored = row_mask & (position >= 0) & (position >= seq_len - keep_last)
    block_id = tl.load(block_tables_ptr + seq.to(tl.int64) * stride_tb + position // BLOCK_SIZE, mask=stored, other=0)
    offset = block_offset(block_id, segment_offsets_ptr, STRIDES[0], SEGMENTED)
    return offset + position % BLOCK_SIZE * STRIDES[2], stored


# Nothing is gained by compiling for the alignment of what is read entry by entry.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "stride_tb", "keep_last"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def _rotary_store_kv_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, q_weight_ptr, k_weight_ptr,
    segment_offsets_ptr, block_tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_tokens, num_seqs,
    q_eps, k_eps, keep_last,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin, stride_ot, stride_oh,
    stride_tb,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    Q_WEIGHTING: tl.constexpr, K_WEIGHTING: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr,
    ONE_QUERY_EACH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK_T tokens times BLOCK_H heads, of q, of k or of v."""
    if PDL:
        gdc_launch_dependents()
        # The metadata too may have been written not long before.
        gdc_wait()
    Q_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_TILES: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    head_tile = tl.program_id(0)
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    token = tl.program_id(1) * BLOCK_T + row // BLOCK_H
    live = token < num_tokens
    source = token.to(tl.int64)
    cos_ptrs = cos_ptr + source * stride_cos
    sin_ptrs = sin_ptr + source * stride_sin
    if head_tile < Q_TILES:
        head = head_tile * BLOCK_H + row % BLOCK_H
        mask = live & (head < HEADS)
        first, second, rest = load_rotated(
            q_ptr + source * stride_qt + head * stride_qh, cos_ptrs, sin_ptrs, mask, q_weight_ptr, q_eps,
            K_DIM, ROTARY_DIM, INTERLEAVED, Q_WEIGHTING,
        )
        out_ptrs = q_out_ptr + source * stride_ot + head * stride_oh
        store_pieces(out_ptrs, mask, first, second, rest, K_DIM, ROTARY_DIM, INTERLEAVED)
    elif head_tile < Q_TILES + KV_TILES:
        head = (head_tile - Q_TILES) * BLOCK_H + row % BLOCK_H
        mask = live & (head < KV_HEADS)
        first, second, rest = load_rotated(
            k_ptr + source * stride_kt + head * stride_kh, cos_ptrs, sin_ptrs, mask, k_weight_ptr, k_eps,
            K_DIM, ROTARY_DIM, INTERLEAVED, K_WEIGHTING,
        )
        seq = token if ONE_QUERY_EACH else sequence_of(token, cu_seqlens_q_ptr, num_seqs)
        slot, stored = _cache_slots(
            token, mask & (seq < num_seqs), seq, keep_last, segment_offsets_ptr, block_tables_ptr, seq_lens_ptr,
            cu_seqlens_q_ptr, stride_tb, K_STRIDES, BLOCK_SIZE, SEGMENTED,
        )
        k_slots = k_cache_ptr + slot + head.to(tl.int64) * K_STRIDES[1]
        store_pieces(k_slots, stored, first, second, rest, K_DIM, ROTARY_DIM, INTERLEAVED)
    else:
        head = (head_tile - Q_TILES - KV_TILES) * BLOCK_H + row % BLOCK_H
        mask = live & (head < KV_HEADS)
        v = _load_span(v_ptr + source * stride_vt + head * stride_vh, mask, 0, V_DIM)
        seq = token if ONE_QUERY_EACH else sequence_of(token, cu_seqlens_q_ptr, num_seqs)
        slot, stored = _cache_slots(
            token, mask & (seq < num_seqs), seq, keep_last, segment_offsets_ptr + _MAX_SEGMENTS, block_tables_ptr,
            seq_lens_ptr, cu_seqlens_q_ptr, stride_tb, V_STRIDES, BLOCK_SIZE, SEGMENTED,
        )
        _store_span(v_cache_ptr + slot + head.to(tl.int64) * V_STRIDES[1], stored, v, 0, V_DIM)


# fmt: on

_launch_rotary = Launcher(_rotary_store_kv_kernel)


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_out: torch.Tensor, kv: LayerKV) -> None:
    k_cache, v_cache = kv.k_segments[0], kv.v_segments[0]
    tokens, num_kv_heads = q.shape[0], kv.num_kv_heads
    k_dim, v_dim = k_cache.shape[3], v_cache.shape[3]
    shapes = {
        "q": (q, (tokens, q.shape[1], k_dim)),
        "k": (k, (tokens, num_kv_heads, k_dim)),
        "v": (v, (tokens, num_kv_heads, v_dim)),
        "q_out": (q_out, (tokens, q.shape[1], k_dim)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or tensor.dtype != k_cache.dtype or tensor.stride(2) != 1:
            raise ValueError(
                f"{name} must be {list(shape)} in the cache's dtype {k_cache.dtype}, with a last stride of 1, "
                f"got {list(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
            )
    if v_cache.dtype != k_cache.dtype or k_cache.dtype not in DTYPES:
        raise ValueError(f"the cache must be bf16, fp16 or fp32, got {k_cache.dtype} and {v_cache.dtype}")


def _check_angles(q: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, rotary_dim: int) -> None:
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("cos and sin must both be given, or both be None")
        return
    if not 0 < rotary_dim <= q.shape[2] or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even, from 2 to the head size {q.shape[2]}, got {rotary_dim}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.shape not in ((q.shape[0], rotary_dim), (1, rotary_dim)) or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be [{q.shape[0]} or 1, {rotary_dim}], with a last stride of 1, "
                f"got {list(tensor.shape)}, strides {tensor.stride()}"
            )
    if cos.dtype != sin.dtype or cos.dtype not in (q.dtype, torch.float32):
        raise ValueError(f"cos and sin must both be {q.dtype} or float32, got {cos.dtype} and {sin.dtype}")


def rotary_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv: LayerKV,
    metadata: AttentionMetadata,
    *,
    rotary_dim: int,
    interleaved: bool = False,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    keep_last: int | None = None,
    q_out: torch.Tensor | None = None,
    config: RotaryConfig | None = None,
) -> torch.Tensor:
    """Normalizes and rotates the heads of q and k; writes the new keys and values to their blocks.

    Rounds where torch does: after a norm; each product and their sum if cos is in q's dtype; once if it is float32
    (models that rotate in float32 by cosines that were rounded before give `cos.float()`).

    Args:
        q: `[total_q, num_heads, k_head_dim]`, packed by `metadata.cu_seqlens_q`, in the cache's dtype (bf16, fp16
            or fp32); any strides with the last one 1.
        k: `[total_q, num_kv_heads, k_head_dim]`, the same.
        v: `[total_q, num_kv_heads, v_head_dim]`, the same.
        cos, sin: `[total_q, rotary_dim]`, or `[1, rotary_dim]` for all, in q's dtype or float32; None: no rotation.
        kv: the layer's blocks, written in place as `store_kv` writes them.
        metadata: the geometry of this forward; `seq_lens` include the new tokens.
        rotary_dim: how many elements of a head are rotated, the first ones; not looked at without cos.
        interleaved: element `2i` is rotated against `2i + 1`, and cos and sin hold each angle twice in a row;
            otherwise `i` against `i + rotary_dim // 2`.
        q_norm, k_norm: the norms over each head, weights `[k_head_dim]`, before the rotation.
        keep_last: of each sequence only the last `keep_last` keys and values are stored (a fresh prompt longer than
            a sliding window). The table entries of the others are not read.
        q_out: where to write the rotated q, its shape and dtype; it may be `q`. Allocated if None.
        config: overrides the table (for measuring).

    Returns:
        The rotated q.
    """
    if q.dim() != 3:
        raise ValueError(f"q must be [total_q, num_heads, k_head_dim], got {list(q.shape)}")
    if q_out is None:
        q_out = q.new_empty(q.shape)
    _check_heads(q, k, v, q_out, kv)
    _check_angles(q, cos, sin, rotary_dim)
    for norm in (q_norm, k_norm):
        if norm is not None:
            check_norm(norm, q.shape[2])
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, or None to store every token, got {keep_last}")
    if metadata.num_seqs == 0 or metadata.max_seqlen_q == 0:
        return q_out

    # What is not there is not read either.
    angles = (q[:, 0], q[:, 0]) if cos is None or sin is None else (cos, sin)
    weights = [q if norm is None or norm.weight is None else norm.weight for norm in (q_norm, k_norm)]
    k_cache, v_cache = kv.k_segments[0], kv.v_segments[0]
    tensors = (q, k, v, *angles, q_out, k_cache, v_cache, *weights)
    if config is None:
        config = choose_config(metadata.max_seqlen_q, max(k_cache.shape[3], v_cache.shape[3]), device_facts(q.device))
    strides = (
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *(angle.stride(0) if angle.shape[0] > 1 else 0 for angle in angles), *q_out.stride()[:2],
    )  # fmt: skip
    constants = (
        k_cache.stride()[:3], v_cache.stride()[:3], q.shape[1], kv.num_kv_heads, k_cache.shape[3], v_cache.shape[3],
        0 if cos is None else rotary_dim, interleaved,
        None if q_norm is None else norm_constants(q_norm), None if k_norm is None else norm_constants(k_norm),
        kv.block_size, kv.segmented,
        metadata.max_seqlen_q == 1 and q.shape[0] == metadata.num_seqs, config.block_t, config.block_h, config.pdl,
    )  # fmt: skip
    head_tiles = ceil_div(q.shape[1], config.block_h) + 2 * ceil_div(kv.num_kv_heads, config.block_h)
    dtypes = tuple(tensor.dtype for tensor in (q, angles[0], *weights))
    misaligned = tuple(tensor.data_ptr() % 16 for tensor in tensors)
    with torch.cuda.device_of(q):
        # No fused multiply-adds: torch rounds every product.
        _launch_rotary(
            (q.device, dtypes, strides, misaligned, constants, config.num_warps),
            (head_tiles, ceil_div(q.shape[0], config.block_t), 1),
            *tensors, kv.segment_offsets, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q,
            q.shape[0], metadata.num_seqs,
            0.0 if q_norm is None else float(q_norm.eps), 0.0 if k_norm is None else float(k_norm.eps),
            2**30 if keep_last is None else keep_last, *strides, metadata.block_tables.stride(0), *constants,
            num_warps=config.num_warps, launch_pdl=config.pdl, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out
