"""The Triton kernels for INT4 weights and 17 to 64 rows, and for unpacking a weight: tiles of rows a program.

x passes through shared memory, once for all warps of a program; weights still go from memory to registers as they are.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .int4_kernels import (
    codes_minus_zeros,
    column_of,
    middle_zeros,
    pick_quantized,
    slices,
    unit_zeros,
)
from .int4_rows import load_step_zeros, multiply
from .linear_kernels import finish, load_bias

# Signatures are laid out by kind of argument: weights, biases, other tensors, sizes, strides, constants.
# fmt: off


@triton.jit
def _scales(scale_ptr, group, first_row, size, STRIPS: tl.constexpr):
    """Scales [16 STRIPS, 1] in fp32 of rows `first_row` on, for one group."""
    row = tl.minimum(first_row + tl.arange(0, STRIPS * 16), size - 1)
    return tl.load(scale_ptr + group * size + row).to(tl.float32)[:, None]


@triton.jit
def _unit_tiles(
    words, zeros, u: tl.constexpr, SLICES_IN_GROUP: tl.constexpr, STRIPS: tl.constexpr, BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr,
):
    """The numbers of unit `u` of a step whose zero points are `zeros`, by slices [1, 16 STRIPS, 32]."""
    SLICES: tl.constexpr = 256 // BITS // 32
    if HAS_ZEROS:
        # Zero points of the groups of the unit's first and last slice.
        zero_a = unit_zeros(
            zeros[u * SLICES // SLICES_IN_GROUP * 2], zeros[(u * SLICES + SLICES - 1) // SLICES_IN_GROUP * 2],
            SLICES_IN_GROUP < SLICES, BITS, DTYPE, ASM,
        )
        zero_b = unit_zeros(
            zeros[u * SLICES // SLICES_IN_GROUP * 2 + 1], zeros[(u * SLICES + SLICES - 1) // SLICES_IN_GROUP * 2 + 1],
            SLICES_IN_GROUP < SLICES, BITS, DTYPE, ASM,
        )
    else:
        zero_a = middle_zeros(1, STRIPS, BITS, DTYPE, ASM)
        zero_b = zero_a
    return slices(codes_minus_zeros(words[None, :, :], zero_a, zero_b, BITS, DTYPE, ASM), BITS, PAIRS)


@triton.jit
def _add_units(
    acc, zeros, word_ptrs, x_rows, row_inside, scale_ptr, first_unit, first_row, size,
    COLUMNS: tl.constexpr, TOTAL_UNITS: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    SLICES_IN_GROUP: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr,
    UNITS: tl.constexpr, STRIPS: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):
    """acc [16 STRIPS, rows] and the products of UNITS units, the first of them `first_unit`."""
    WIDTH: tl.constexpr = 256 // BITS
    SLICES: tl.constexpr = WIDTH // 32
    part = tl.zeros(acc.shape, tl.float32)
    one = tl.zeros([1], tl.int32)
    k = column_of(tl.arange(0, 32), PAIRS)[None, :]
    for u in tl.static_range(UNITS):
        unit = first_unit + u
        if EVEN:
            words = tl.load(word_ptrs + unit * 128, eviction_policy="evict_first")
        else:
            inside = (one + unit < TOTAL_UNITS)[:, None]
            words = tl.load(word_ptrs + unit * 128, mask=inside, other=0, eviction_policy="evict_first")
        tiles = _unit_tiles(words, zeros, u, SLICES_IN_GROUP, STRIPS, BITS, HAS_ZEROS, DTYPE, PAIRS, ASM)
        for s in tl.static_range(SLICES):
            column = unit * WIDTH + s * 32 + k
            if EVEN:
                x = tl.load(x_rows + column, mask=row_inside, other=0.0)
            else:
                x = tl.load(x_rows + column, mask=row_inside & (column < COLUMNS), other=0.0)
            part = multiply(tl.reshape(tiles[s], (STRIPS * 16, 32)), tl.trans(x), part, ASM)
            if (u * SLICES + s + 1) % SLICES_IN_GROUP == 0:
                group = tl.minimum((unit * WIDTH + s * 32) // GROUP, NUM_GROUPS - 1)
                acc += part * _scales(scale_ptr, group, first_row, size, STRIPS)
                part = tl.zeros(acc.shape, tl.float32)
    return acc


# Nothing is gained by compiling for sizes that only bound rows.
@triton.jit(do_not_specialize=["num_rows", "n_0", "n_1", "n_2", "bias_n_0", "bias_n_1", "bias_n_2"])
def int4_tiles_kernel(
    x_ptr, w_0, w_1, w_2, s_0, s_1, s_2, z_0, z_1, z_2, b_0, b_1, b_2, residual_ptr, out_ptr, partial_ptr,
    num_rows, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, stride_x, stride_res, stride_out,
    COLUMNS: tl.constexpr, TOTAL_UNITS: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, SPLIT_K: tl.constexpr, STRIPS: tl.constexpr, UNITS: tl.constexpr,
    PAIRS: tl.constexpr, LAST_FIRST: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):
    """One program: 16 STRIPS output features (of gate and up when gated), all rows of x, a share of the columns."""
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION is not None
    DTYPE: tl.constexpr = tl.float16 if x_ptr.dtype.element_ty == tl.float16 else tl.bfloat16
    WIDTH: tl.constexpr = 256 // BITS
    SLICES: tl.constexpr = UNITS * WIDTH // 32
    SLICES_IN_GROUP: tl.constexpr = GROUP // 32 if GROUP < UNITS * WIDTH else SLICES
    GROUPS: tl.constexpr = SLICES // SLICES_IN_GROUP
    STEPS: tl.constexpr = (TOTAL_UNITS + SPLIT_K * UNITS - 1) // (SPLIT_K * UNITS)
    EVEN: tl.constexpr = TOTAL_UNITS % (SPLIT_K * UNITS) == 0 and TOTAL_UNITS * WIDTH == COLUMNS
    tile, w_ptr, scale_ptr, zero_ptr, bias_ptr, size, bias_size, out_column = pick_quantized(
        tl.program_id(0), w_0, w_1, w_2, s_0, s_1, s_2, z_0, z_1, z_2, b_0, b_1, b_2,
        n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, STRIPS * 16, 1 if GATED else NUM_WEIGHTS,
    )
    split = tl.program_id(1)
    first_row = tile * (STRIPS * 16)
    strip = tl.minimum(tile * STRIPS + tl.arange(0, STRIPS), (size + 15) // 16 - 1).to(tl.int64)
    word_offset = strip[:, None] * (TOTAL_UNITS * 128) + tl.arange(0, 128)[None, :]
    m = tl.arange(0, ROWS)
    x_rows = x_ptr + m[:, None] * stride_x
    row_inside = (m < num_rows)[:, None]
    if PDL:
        gdc_wait()
    acc = tl.zeros([STRIPS * 16, ROWS], tl.float32)
    up_acc = acc
    column = split * (STEPS * UNITS * WIDTH)
    zeros = load_step_zeros(
        zero_ptr, column, first_row, size, GROUPS, 1, 0, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST
    )
    up_zeros = zeros
    if GATED:
        up_zeros = load_step_zeros(
            z_1, column, first_row, size, GROUPS, 1, 0, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST
        )
    for step in range(STEPS):
        unit = (split * STEPS + step) * UNITS
        after = (unit + UNITS) * WIDTH
        next_zeros = load_step_zeros(
            zero_ptr, after, first_row, size, GROUPS, 1, 0, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST
        )
        next_up = next_zeros
        acc = _add_units(
            acc, zeros, w_ptr + word_offset, x_rows, row_inside, scale_ptr, unit, first_row, size,
            COLUMNS, TOTAL_UNITS, GROUP, NUM_GROUPS, SLICES_IN_GROUP, BITS, HAS_ZEROS, DTYPE,
            UNITS, STRIPS, PAIRS, EVEN, ASM,
        )
        if GATED:
            next_up = load_step_zeros(
                z_1, after, first_row, size, GROUPS, 1, 0, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST
            )
            up_acc = _add_units(
                up_acc, up_zeros, w_1 + word_offset, x_rows, row_inside, s_1, unit, first_row, size,
                COLUMNS, TOTAL_UNITS, GROUP, NUM_GROUPS, SLICES_IN_GROUP, BITS, HAS_ZEROS, DTYPE,
                UNITS, STRIPS, PAIRS, EVEN, ASM,
            )
        zeros, up_zeros = next_zeros, next_up

    m, n = m[None, :], first_row + tl.arange(0, STRIPS * 16)[:, None]
    mask = (n < size) & (m < num_rows)
    if SPLIT_K > 1:
        width = n_0 + n_1 + n_2
        partial_ptrs = partial_ptr + (split * num_rows + m) * width + out_column + n
        tl.store(partial_ptrs, acc, mask=mask)
        if GATED:
            tl.store(partial_ptrs + n_0, up_acc, mask=mask)
    else:
        bias = load_bias(bias_ptr, n, bias_size, HAS_BIAS)
        up_bias = load_bias(b_1, n, bias_n_1, HAS_BIAS and GATED)
        residual = 0.0
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + m * stride_res + n, mask=mask, other=0.0)
        finish(
            acc, up_acc, bias, up_bias, residual,
            out_ptr + out_column + m * stride_out + n, mask, HAS_RESIDUAL, ACTIVATION,
        )


@triton.jit(do_not_specialize=["size", "first_strip"])
def int4_dequantize_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, size, first_strip, stride_out,
    COLUMNS: tl.constexpr, TOTAL_UNITS: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, STRIPS: tl.constexpr, UNITS: tl.constexpr,
    LAST_FIRST: tl.constexpr, ASM: tl.constexpr,
):
    """One program: UNITS units across of STRIPS strips, columns in order. Row 0 of out is `first_strip`'s first."""
    WIDTH: tl.constexpr = 256 // BITS
    SLICES: tl.constexpr = WIDTH // 32
    SLICES_IN_GROUP: tl.constexpr = GROUP // 32 if GROUP < UNITS * WIDTH else SLICES * UNITS
    DTYPE: tl.constexpr = tl.float16 if out_ptr.dtype.element_ty == tl.float16 else tl.bfloat16
    first_unit = tl.program_id(0) * UNITS
    first_row = (first_strip + tl.program_id(1) * STRIPS) * 16
    last_strip = (size + 15) // 16 - 1
    strip = tl.minimum(first_row // 16 + tl.arange(0, STRIPS), last_strip).to(tl.int64)
    zeros = load_step_zeros(
        zero_ptr, first_unit * WIDTH, first_row, size, SLICES * UNITS // SLICES_IN_GROUP, 1, 0, GROUP, NUM_GROUPS,
        STRIPS, HAS_ZEROS, LAST_FIRST,
    )
    row = first_row + tl.arange(0, STRIPS * 16)[:, None]
    out_rows = out_ptr + (row - first_strip * 16).to(tl.int64) * stride_out
    scales = tl.zeros([STRIPS * 16, 1], tl.float32)
    for u in tl.static_range(UNITS):
        unit = first_unit + u
        words = tl.load(w_ptr + (strip[:, None] * TOTAL_UNITS + unit) * 128 + tl.arange(0, 128)[None, :])
        tiles = _unit_tiles(words, zeros, u, SLICES_IN_GROUP, STRIPS, BITS, HAS_ZEROS, DTYPE, True, ASM)
        for s in tl.static_range(SLICES):
            if (u * SLICES + s) % SLICES_IN_GROUP == 0:
                group = tl.minimum((unit * WIDTH + s * 32) // GROUP, NUM_GROUPS - 1)
                scales = _scales(scale_ptr, group, first_row, size, STRIPS)
            # From the order of k of a product to the columns' own.
            numbers = tl.reshape(tiles[s], (STRIPS * 16, 2, 2, 4, 2))
            numbers = tl.reshape(tl.permute(numbers, (0, 3, 1, 2, 4)), (STRIPS * 16, 32))
            column = unit * WIDTH + s * 32 + tl.arange(0, 32)[None, :]
            values = numbers.to(tl.float32) * scales
            tl.store(out_rows + column, values.to(out_ptr.dtype.element_ty), mask=(row < size) & (column < COLUMNS))

# fmt: on
