"""What the kernel over quantized blocks does with a tile, which is a block (Triton).

Codes become fp16 numbers in registers, on their way from shared memory to the tensor cores: keys by their channel's
scale and zero, values without any, as a token's scale goes into its probability and the block's unit into the sum.
Tokens are the rows of these products and queries their columns, of which there may be as few as 8. A 16-bit word holds
a code of each half or quarter of a head, so heads are read in such parts throughout.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .block_ids import MAX_SEGMENTS
from .kv_code_numbers import key_numbers_4, key_numbers_8, value_numbers_4, value_numbers_8
from .kv_format import WIDE_BEHIND
from .merge_splits import padded
from .paged_attention import seen_positions, soft_cap
from .store_kv import block_offset

_LOG2E = tl.constexpr(math.log2(math.e))
_MAX_SEGMENTS = tl.constexpr(MAX_SEGMENTS)
_WIDE_BEHIND = tl.constexpr(WIDE_BEHIND)
#: Of the loop over wide blocks, which has few turns: more would take the memory that a further program could use.
_WIDE_STAGES = tl.constexpr(2)

# Signatures are laid out by kind of argument.
# fmt: off


@triton.jit
def _locate_block(
    tile, end_tile, table_ptr, segment_offsets_ptr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    """Where a block's keys and values begin, int64 elements; past the end, the first block's, which nobody uses."""
    block_id = tl.load(table_ptr + tile, mask=tile < end_tile, other=0)
    k_base = block_offset(block_id, segment_offsets_ptr, K_STRIDE, SEGMENTED)
    v_base = block_offset(block_id, segment_offsets_ptr + _MAX_SEGMENTS, V_STRIDE, SEGMENTED)
    return k_base, v_base


@triton.jit
def _load_part(
    ptr, base, live, ROW_STRIDE: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A part of each row, `[ROWS, DIM / PARTS]`, padded with zeros; zeros where rows are not live."""
    WIDTH: tl.constexpr = DIM // PARTS
    offs = tl.arange(0, padded(WIDTH))
    ptrs = ptr + base + (tl.arange(0, ROWS) * ROW_STRIDE)[:, None] + (PART * WIDTH + offs)[None, :]
    if padded(WIDTH) != WIDTH:
        return tl.load(ptrs, mask=live[:, None] & (offs < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(ptrs, mask=live[:, None], other=0.0)


@triton.jit
def _load_codes(ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`[ROWS, COLUMNS]` 16-bit words, both padded to powers of two with 0: whatever that is, it meets a zero."""
    rows = tl.arange(0, padded(ROWS))
    columns = tl.arange(0, padded(COLUMNS))
    ptrs = ptr.to(tl.pointer_type(tl.int16)) + (rows * COLUMNS)[:, None] + columns[None, :]
    if padded(ROWS) != ROWS and padded(COLUMNS) != COLUMNS:
        return tl.load(ptrs, mask=(rows < ROWS)[:, None] & (columns < COLUMNS)[None, :], other=0)
    elif padded(ROWS) != ROWS:
        return tl.load(ptrs, mask=(rows < ROWS)[:, None], other=0)
    elif padded(COLUMNS) != COLUMNS:
        return tl.load(ptrs, mask=(columns < COLUMNS)[None, :], other=0)
    else:
        return tl.load(ptrs)


@triton.jit
def _load_key_numbers(ptr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """Scales and zeros of each token's keys, fp16 `[BLOCK_SIZE, DIM / PARTS, PARTS]`, padded with zeros.

    With one group `[1, DIM / PARTS, PARTS]`. They come in one load, as one for each part takes as many more copies and
    waits; groups become tokens in registers, where a thread has the same columns of all of its tokens.
    """
    WIDTH: tl.constexpr = padded(DIM // PARTS)
    offs = tl.arange(0, WIDTH)[None, :]
    ptrs = ptr + (tl.arange(0, 2 * GROUPS * PARTS) * (DIM // PARTS))[:, None] + offs
    numbers = tl.load(ptrs) if WIDTH * PARTS == DIM else tl.load(ptrs, mask=offs < DIM // PARTS, other=0.0)
    numbers = tl.permute(tl.reshape(numbers, [2, GROUPS, PARTS, WIDTH]), (1, 3, 2, 0))
    if GROUPS > 1:
        numbers = tl.broadcast_to(numbers[:, None], [GROUPS, BLOCK_SIZE // GROUPS, WIDTH, PARTS, 2])
        numbers = tl.reshape(numbers, [BLOCK_SIZE, WIDTH, PARTS, 2])
    return tl.split(numbers)


@triton.jit
def _split_parts(x):
    """`[rows, columns, 4]` as four tensors."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _load_value_numbers(ptr, BLOCK_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Scale and zero of each token's values, float32 `[BLOCK_SIZE]`, and their unit; without zeros, the scale again."""
    scales_ptr = ptr.to(tl.pointer_type(tl.float16)) + tl.arange(0, BLOCK_SIZE)
    scale = tl.load(scales_ptr).to(tl.float32)
    zero = tl.load(scales_ptr + BLOCK_SIZE).to(tl.float32) if HAS_ZEROS else scale
    unit = tl.load((ptr + (4 if HAS_ZEROS else 2) * BLOCK_SIZE).to(tl.pointer_type(tl.float32)))
    return scale, zero, unit


@triton.jit
def _scores(q0, q1, q2, q3, k0, k1, k2, k3, PARTS: tl.constexpr):
    scores = tl.dot(k0, tl.trans(q0), input_precision="ieee")
    scores = tl.dot(k1, tl.trans(q1), scores, input_precision="ieee")
    if PARTS == 4:
        scores = tl.dot(k2, tl.trans(q2), scores, input_precision="ieee")
        scores = tl.dot(k3, tl.trans(q3), scores, input_precision="ieee")
    return scores


@triton.jit
def _softmax_step(scores, factor, row_max, sums, MASKED: tl.constexpr):
    """The online softmax's next tile: probabilities, and what the sums so far are multiplied by.

    sums: of probabilities, by row and place in a tile; to be summed over the places at the end only, as that takes
    the warps to wait for each other.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 0) * factor)
    # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    p = tl.exp2(scores * factor - shift[None, :])
    rescale = tl.exp2(row_max - shift)[None, :]
    return p, rescale, new_max, sums * rescale + p


@triton.jit
def attend_wide(
    acc0, acc1, acc2, acc3, row_max, sums, q0, q1, q2, q3, q_position, code_position, first_node, node_mask, scale,
    tile, num_tiles, jump, end_tile, first_live, end_live, k_ptr, v_ptr, segment_offsets_ptr, table_ptr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ONE_TOKEN: tl.constexpr, TREE: tl.constexpr, PARTS: tl.constexpr,
):
    """Over `num_tiles` blocks in the model's dtype from `tile`; after block 0, `jump` blocks are left out.

    code_position: of each row, that by which its wide blocks go. first_node, node_mask: as of `seen_positions`.
    """
    k_base, v_base = _locate_block(
        tile, end_tile, table_ptr, segment_offsets_ptr, K_STRIDES[0], V_STRIDES[0], SEGMENTED
    )
    for _ in tl.range(0, num_tiles, num_stages=_WIDE_STAGES):
        position = tile * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        live = (position >= first_live) & (position < end_live)
        k0 = _load_part(k_ptr, k_base, live, K_STRIDES[2], K_DIM, 0, PARTS, BLOCK_SIZE)
        k1 = _load_part(k_ptr, k_base, live, K_STRIDES[2], K_DIM, 1, PARTS, BLOCK_SIZE)
        k2 = k0
        k3 = k1
        if PARTS == 4:
            k2 = _load_part(k_ptr, k_base, live, K_STRIDES[2], K_DIM, 2, PARTS, BLOCK_SIZE)
            k3 = _load_part(k_ptr, k_base, live, K_STRIDES[2], K_DIM, 3, PARTS, BLOCK_SIZE)
        scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
        if PARTS == 4:
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
            scores = tl.dot(q3, tl.trans(k3), scores, input_precision="ieee")
        factor = scale
        if SOFT_CAP > 0:
            scores = soft_cap(scores * scale, SOFT_CAP * _LOG2E, q0.dtype == tl.float32)
            factor = 1.0
        seen = seen_positions(position, live, q_position, first_node, node_mask, WINDOW, TREE)
        if not ONE_TOKEN:
            seen = seen & ((tile == 0) | (tile >= code_position // BLOCK_SIZE - _WIDE_BEHIND))[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * factor - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        sums = sums * rescale + tl.sum(p, 1)
        rescale = rescale[:, None]
        row_max = new_max
        v0 = _load_part(v_ptr, v_base, live, V_STRIDES[2], V_DIM, 0, PARTS, BLOCK_SIZE)
        v1 = _load_part(v_ptr, v_base, live, V_STRIDES[2], V_DIM, 1, PARTS, BLOCK_SIZE)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * rescale, input_precision="ieee")
        acc1 = tl.dot(p, v1, acc1 * rescale, input_precision="ieee")
        if PARTS == 4:
            v2 = _load_part(v_ptr, v_base, live, V_STRIDES[2], V_DIM, 2, PARTS, BLOCK_SIZE)
            v3 = _load_part(v_ptr, v_base, live, V_STRIDES[2], V_DIM, 3, PARTS, BLOCK_SIZE)
            acc2 = tl.dot(p, v2, acc2 * rescale, input_precision="ieee")
            acc3 = tl.dot(p, v3, acc3 * rescale, input_precision="ieee")
        tile += tl.where(tile == 0, jump + 1, 1)
        k_base, v_base = _locate_block(
            tile, end_tile, table_ptr, segment_offsets_ptr, K_STRIDES[0], V_STRIDES[0], SEGMENTED
        )
    return acc0, acc1, acc2, acc3, row_max, sums


@triton.jit
def attend_codes(
    acc0, acc1, acc2, acc3, shifts, row_max, sums, q0, q1, q2, q3, q_position, code_position, scale,
    tile, end_tile, k_ptr, v_ptr, segment_offsets_ptr, table_ptr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SEGMENTED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ONE_TOKEN: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr, CAPABILITY: tl.constexpr,
):
    """Over the blocks of codes from `tile` to `end_tile`.

    q: parts of `[BLOCK_M, K_DIM]`, in fp16 (or float32: then everything is). shifts: what the values' zeros come to, by
    row and place in a tile. code_position: as of `attend_wide`.
    """
    K_WORDS: tl.constexpr = K_DIM // PARTS
    V_WORDS: tl.constexpr = V_DIM // PARTS
    HAS_ZEROS: tl.constexpr = FORMAT[2]
    GROUPS: tl.constexpr = FORMAT[4]
    k_base, v_base = _locate_block(
        tile, end_tile, table_ptr, segment_offsets_ptr, K_BLOCK, V_BLOCK, SEGMENTED
    )
    v_scale, v_zero, unit = _load_value_numbers(v_ptr + v_base + 2 * BLOCK_SIZE * V_WORDS, BLOCK_SIZE, HAS_ZEROS)
    for _ in range(tile, end_tile):
        scales_ptr = (k_ptr + k_base + 2 * BLOCK_SIZE * K_WORDS).to(tl.pointer_type(tl.float16))
        k_codes = _load_codes(k_ptr + k_base, BLOCK_SIZE, K_WORDS)
        k_scale, k_zero = _load_key_numbers(scales_ptr, BLOCK_SIZE, K_DIM, PARTS, GROUPS)
        if PARTS == 4:
            s0, s1, s2, s3 = _split_parts(k_scale)
            z0, z1, z2, z3 = _split_parts(k_zero)
            k0, k1, k2, k3 = key_numbers_4(k_codes, s0, s1, s2, s3, z0, z1, z2, z3, q0.dtype, CAPABILITY)
        else:
            s0, s1 = tl.split(k_scale)
            z0, z1 = tl.split(k_zero)
            k0, k1 = key_numbers_8(k_codes, s0, s1, z0, z1, FORMAT[1], q0.dtype, CAPABILITY)
            k2 = k0
            k3 = k1
        scores = _scores(q0, q1, q2, q3, k0, k1, k2, k3, PARTS)
        factor = scale
        if SOFT_CAP > 0:
            scores = soft_cap(scores * scale, SOFT_CAP * _LOG2E, q0.dtype == tl.float32)
            factor = 1.0
        if not ONE_TOKEN:
            seen = (tile < code_position // BLOCK_SIZE - _WIDE_BEHIND)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        if WINDOW > 0:
            position = tile * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            scores = tl.where(position[:, None] > q_position[None, :] - WINDOW, scores, float("-inf"))
        p, rescale, row_max, sums = _softmax_step(scores, factor, row_max, sums, (not ONE_TOKEN) or WINDOW > 0)

        if HAS_ZEROS:
            shifts = shifts * rescale + p * (v_zero * unit)[:, None]
        else:
            unit = unit / FORMAT[3]
        p = (p * v_scale[:, None]).to(q0.dtype)
        v_codes = _load_codes(v_ptr + v_base, V_WORDS, BLOCK_SIZE)
        if PARTS == 4:
            v0, v1, v2, v3 = value_numbers_4(v_codes, q0.dtype, CAPABILITY)
            acc2 = acc2 * rescale + tl.dot(v2, p, input_precision="ieee") * unit
            acc3 = acc3 * rescale + tl.dot(v3, p, input_precision="ieee") * unit
        else:
            v0, v1 = value_numbers_8(v_codes, FORMAT[1], q0.dtype, CAPABILITY)
        acc0 = acc0 * rescale + tl.dot(v0, p, input_precision="ieee") * unit
        acc1 = acc1 * rescale + tl.dot(v1, p, input_precision="ieee") * unit

        # Looked up here and not where it is used, so that it is no pipeline stage of its own.
        tile += 1
        k_base, v_base = _locate_block(
            tile, end_tile, table_ptr, segment_offsets_ptr, K_BLOCK, V_BLOCK, SEGMENTED
        )
        v_scale, v_zero, unit = _load_value_numbers(v_ptr + v_base + 2 * BLOCK_SIZE * V_WORDS, BLOCK_SIZE, HAS_ZEROS)
    return acc0, acc1, acc2, acc3, shifts, row_max, sums


@triton.jit
def load_queries(ptrs, row_mask, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """A part of the queries, `[BLOCK_M, DIM / PARTS]`, padded with zeros."""
    WIDTH: tl.constexpr = DIM // PARTS
    offs = tl.arange(0, padded(WIDTH))
    return tl.load(
        ptrs[:, None] + (PART * WIDTH + offs)[None, :], mask=row_mask[:, None] & (offs < WIDTH)[None, :], other=0.0
    )


@triton.jit
def store_part(ptrs, row_mask, x, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    WIDTH: tl.constexpr = DIM // PARTS
    offs = tl.arange(0, padded(WIDTH))
    mask = row_mask[:, None] & (offs < WIDTH)[None, :]
    tl.store(ptrs[:, None] + (PART * WIDTH + offs)[None, :], x.to(ptrs.dtype.element_ty), mask=mask)
