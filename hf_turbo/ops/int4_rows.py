"""The Triton kernel for INT4 weights and up to 16 rows: every warp by itself, straight from memory to the tensor cores.

Each warp of a program takes its own share of the columns, so many bytes are on their way at once though a step has few
programs, and the sums meet once, at the end. The first weights are asked for before the kernel before has ended.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .int4_kernels import (
    codes_minus_zeros,
    load_zeros,
    middle_zeros,
    pick_quantized,
    row_scales,
    slices,
    thread_index,
    unit_zeros,
)
from .linear_kernels import finish, load_bias

# Signatures are laid out by kind of argument: weights, biases, other tensors, sizes, strides, constants.
# fmt: off


@triton.jit
def _after_loads(step, ASM: tl.constexpr):
    """Loads before this line are sent before it: the assembler would put each next to its use, to save registers."""
    if ASM:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [step + 0], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _load_units(
    word_ptrs, first_unit, UNITS: tl.constexpr, TOTAL: tl.constexpr, EVEN: tl.constexpr, LAST_FIRST: tl.constexpr,
):
    """Words [A, STRIPS, 128] of UNITS units from `first_unit` [A] on; zeros beyond the last."""
    words = ()
    for u in tl.static_range(UNITS):
        if EVEN:
            part = tl.load(word_ptrs + u * 128, eviction_policy="evict_first")
        else:
            inside = (first_unit + u < TOTAL)[None, :, None] if LAST_FIRST else (first_unit + u < TOTAL)[:, None, None]
            part = tl.load(word_ptrs + u * 128, mask=inside, other=0, eviction_policy="evict_first")
        if LAST_FIRST:
            part = tl.permute(part, (1, 0, 2))
        words = words + (part,)  # noqa: RUF005
    return words


@triton.jit
def _load_x(x_ptrs, row_inside, column, offset: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """x at 8 (fp32: 4) columns a thread; 0 beyond x."""
    if EVEN:
        return tl.load(x_ptrs + (column + offset), mask=row_inside, other=0.0)
    else:
        inside = row_inside & (column + offset < COLUMNS)
        return tl.load(x_ptrs + (column + offset), mask=inside, other=0.0)


@triton.jit
def _load_slices(
    x_ptrs, row_inside, column, SLICES: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    LAST_FIRST: tl.constexpr,
):
    """x of SLICES slices of 32 columns, [4 threads, 8 rows, A, rows / 8, 8]: what threads multiply their codes with."""
    xs = ()
    for s in tl.static_range(SLICES):
        x = _load_x(x_ptrs, row_inside, column, s * 32, COLUMNS, EVEN)
        if x.dtype == tl.float32:  # a load holds 16 bytes
            rest = _load_x(x_ptrs, row_inside, column, s * 32 + 4, COLUMNS, EVEN)
            x = tl.permute(tl.join(x, rest), (0, 1, 2, 3, 5, 4))
            x = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], x.shape[3], 8))
        if LAST_FIRST:
            x = tl.permute(x, (3, 2, 1, 0, 4))
        xs = xs + (x,)  # noqa: RUF005
    return xs


@triton.jit
def _columns_first(x, A: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """x of a slice as [A, 32, ROWS], columns in the order of `slices`."""
    x = tl.reshape(x, (4, 8, A, ROWS // 8, 2, 2, 2))  # thread, row, a, rows / 8, third, second, first bit of the column
    if PAIRS:
        return tl.reshape(tl.permute(x, (2, 4, 5, 0, 6, 3, 1)), (A, 32, ROWS))
    else:
        return tl.reshape(tl.permute(x, (2, 4, 0, 5, 6, 3, 1)), (A, 32, ROWS))


@triton.jit
def multiply(numbers, x, acc, ASM: tl.constexpr):
    """`acc + numbers @ x`. fp32 is the sum of three bf16, which the small integers multiply exactly."""
    if not ASM:
        return tl.dot(numbers, x.to(tl.float32), acc, input_precision="ieee")
    elif x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(numbers, low, acc)
        acc = tl.dot(numbers, middle, acc)
        return tl.dot(numbers, high, acc)
    else:
        return tl.dot(numbers, x, acc)


@triton.jit
def load_step_zeros(
    zero_ptr, column, first_row, size, GROUPS: tl.constexpr, A: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, STRIPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    LAST_FIRST: tl.constexpr,
):
    """`load_zeros` of both halves of the rows, in GROUPS groups."""
    zeros = ()
    if HAS_ZEROS:
        for g in tl.static_range(GROUPS):
            a = load_zeros(zero_ptr, column, first_row, size, g, 0, A, WIDTH, GROUP, NUM_GROUPS, STRIPS, LAST_FIRST)
            b = load_zeros(zero_ptr, column, first_row, size, g, 1, A, WIDTH, GROUP, NUM_GROUPS, STRIPS, LAST_FIRST)
            zeros = zeros + (a, b)  # noqa: RUF005
    return zeros


@triton.jit
def _add_step(
    acc, words, xs, zeros, scale_ptr, first_row, size, first_column,
    UNITS: tl.constexpr, STRIPS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    SLICES_IN_GROUP: tl.constexpr, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr,
):
    """acc [A, 16 STRIPS, ROWS] and the products of UNITS units, whose first column is `first_column` [A]."""
    A: tl.constexpr = acc.shape[0]
    SLICES: tl.constexpr = 256 // BITS // 32
    TWO_GROUPS: tl.constexpr = SLICES_IN_GROUP < SLICES
    part = tl.zeros([A, STRIPS * 16, ROWS], tl.float32)
    for u in tl.static_range(UNITS):
        if not HAS_ZEROS:
            zero_a = middle_zeros(A, STRIPS, BITS, DTYPE, ASM)
            zero_b = zero_a
        else:
            # Zero points of the groups of the unit's first and last slice.
            zero_a = unit_zeros(
                zeros[u * SLICES // SLICES_IN_GROUP * 2], zeros[(u * SLICES + SLICES - 1) // SLICES_IN_GROUP * 2],
                TWO_GROUPS, BITS, DTYPE, ASM,
            )
            zero_b = unit_zeros(
                zeros[u * SLICES // SLICES_IN_GROUP * 2 + 1],
                zeros[(u * SLICES + SLICES - 1) // SLICES_IN_GROUP * 2 + 1],
                TWO_GROUPS, BITS, DTYPE, ASM,
            )
        tiles = slices(codes_minus_zeros(words[u], zero_a, zero_b, BITS, DTYPE, ASM), BITS, PAIRS)
        for s in tl.static_range(SLICES):
            part = multiply(tiles[s], _columns_first(xs[u * SLICES + s], A, ROWS, PAIRS), part, ASM)
            if (u * SLICES + s + 1) % SLICES_IN_GROUP == 0:
                group = tl.minimum((first_column + (u * SLICES + s) * 32) // GROUP, NUM_GROUPS - 1)
                acc += part * row_scales(scale_ptr, group, first_row, size, STRIPS)[:, :, None]
                part = tl.zeros([A, STRIPS * 16, ROWS], tl.float32)
    return acc


# Nothing is gained by compiling for sizes that only bound rows.
@triton.jit(do_not_specialize=["num_rows", "n_0", "n_1", "n_2", "bias_n_0", "bias_n_1", "bias_n_2"])
def int4_rows_kernel(
    x_ptr, w_0, w_1, w_2, s_0, s_1, s_2, z_0, z_1, z_2, b_0, b_1, b_2, residual_ptr, places_ptr, out_ptr,
    num_rows, n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, stride_x, stride_res, stride_out,
    COLUMNS: tl.constexpr, TOTAL_UNITS: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_PLACES: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, STRIPS: tl.constexpr, UNITS: tl.constexpr,
    AHEAD: tl.constexpr, PAIRS: tl.constexpr, LAST_FIRST: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):
    """One program: 16 STRIPS output features (of gate and up when gated), all rows of x, a share of the columns a warp.

    A step is UNITS units of every strip of every share. Weights are loaded a step ahead, x with AHEAD as well.
    With HAS_PLACES output column n (of one weight, or gated) is stored at `places_ptr[n]`.
    """
    if PDL:
        gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION is not None
    DTYPE: tl.constexpr = tl.float16 if x_ptr.dtype.element_ty == tl.float16 else tl.bfloat16
    WIDTH: tl.constexpr = 256 // BITS
    SLICES: tl.constexpr = UNITS * WIDTH // 32
    SLICES_IN_GROUP: tl.constexpr = GROUP // 32 if GROUP < UNITS * WIDTH else SLICES
    GROUPS: tl.constexpr = SLICES // SLICES_IN_GROUP
    STEPS: tl.constexpr = (TOTAL_UNITS + SHARES * UNITS - 1) // (SHARES * UNITS)
    EVEN_UNITS: tl.constexpr = TOTAL_UNITS % (SHARES * UNITS) == 0
    SHARE_WIDTH: tl.constexpr = STEPS * UNITS * WIDTH
    EVEN: tl.constexpr = EVEN_UNITS and TOTAL_UNITS * WIDTH == COLUMNS
    tile, w_ptr, scale_ptr, zero_ptr, bias_ptr, size, bias_size, column = pick_quantized(
        tl.program_id(0), w_0, w_1, w_2, s_0, s_1, s_2, z_0, z_1, z_2, b_0, b_1, b_2,
        n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, STRIPS * 16, 1 if GATED else NUM_WEIGHTS,
    )
    first_row = tile * (STRIPS * 16)
    share = tl.arange(0, SHARES)
    first_unit = share * (STEPS * UNITS)
    word = tl.arange(0, 128)[None, None, :]
    if LAST_FIRST:  # see `thread_index`
        strip = tl.minimum(tile * STRIPS + tl.arange(0, STRIPS), (size + 15) // 16 - 1).to(tl.int64)[:, None, None]
        word_offset = strip * (TOTAL_UNITS * 128) + first_unit[None, :, None] * 128 + word
    else:
        strip = tl.minimum(tile * STRIPS + tl.arange(0, STRIPS), (size + 15) // 16 - 1).to(tl.int64)[None, :, None]
        word_offset = strip * (TOTAL_UNITS * 128) + first_unit[:, None, None] * 128 + word
    m = thread_index(8, 1, LAST_FIRST) + thread_index(ROWS // 8, 3, LAST_FIRST) * 8
    row_inside = (m < num_rows)[:, :, :, :, None]
    x_ptrs = x_ptr + (m * stride_x)[:, :, :, :, None]
    PIECE: tl.constexpr = 4 if x_ptr.dtype.element_ty == tl.float32 else 8
    x_column = thread_index(4, 0, LAST_FIRST) * 8 + thread_index(SHARES, 2, LAST_FIRST) * SHARE_WIDTH
    x_column = x_column[:, :, :, :, None] + tl.arange(0, PIECE)[None, None, None, None, :]

    words = _load_units(w_ptr + word_offset, first_unit, UNITS, TOTAL_UNITS, EVEN_UNITS, LAST_FIRST)
    zeros = load_step_zeros(
        zero_ptr, 0, first_row, size, GROUPS, SHARES, SHARE_WIDTH, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST
    )
    up_words, up_zeros = words, zeros
    if GATED:
        up_words = _load_units(w_1 + word_offset, first_unit, UNITS, TOTAL_UNITS, EVEN_UNITS, LAST_FIRST)
        up_zeros = load_step_zeros(
            z_1, 0, first_row, size, GROUPS, SHARES, SHARE_WIDTH, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST
        )
    _after_loads(tile, ASM)
    if PDL:
        gdc_wait()
    acc = tl.zeros([SHARES, STRIPS * 16, ROWS], tl.float32)
    up_acc = acc
    xs = _load_slices(x_ptrs, row_inside, x_column, SLICES, COLUMNS, EVEN, LAST_FIRST)
    _after_loads(tile, ASM)
    for step in range(STEPS - 1):
        unit = first_unit + (step + 1) * UNITS
        next_offset = word_offset + (step + 1) * (UNITS * 128)
        next_words = _load_units(w_ptr + next_offset, unit, UNITS, TOTAL_UNITS, EVEN_UNITS, LAST_FIRST)
        at, after = (first_unit + step * UNITS) * WIDTH, (step + 1) * (UNITS * WIDTH)
        next_zeros = load_step_zeros(
            zero_ptr, after, first_row, size,
            GROUPS, SHARES, SHARE_WIDTH, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST,
        )
        next_up, next_up_zeros = next_words, next_zeros
        if GATED:
            next_up = _load_units(w_1 + next_offset, unit, UNITS, TOTAL_UNITS, EVEN_UNITS, LAST_FIRST)
            next_up_zeros = load_step_zeros(
                z_1, after, first_row, size,
                GROUPS, SHARES, SHARE_WIDTH, GROUP, NUM_GROUPS, STRIPS, HAS_ZEROS, LAST_FIRST,
            )
        next_column = x_column + after
        next_xs = xs
        if AHEAD:
            next_xs = _load_slices(x_ptrs, row_inside, next_column, SLICES, COLUMNS, EVEN, LAST_FIRST)
        _after_loads(step, ASM)
        acc = _add_step(
            acc, words, xs, zeros, scale_ptr, first_row, size, at,
            UNITS, STRIPS, ROWS, GROUP, NUM_GROUPS, SLICES_IN_GROUP, BITS, HAS_ZEROS, DTYPE, PAIRS, ASM,
        )
        if GATED:
            up_acc = _add_step(
                up_acc, up_words, xs, up_zeros, s_1, first_row, size, at,
                UNITS, STRIPS, ROWS, GROUP, NUM_GROUPS, SLICES_IN_GROUP, BITS, HAS_ZEROS, DTYPE, PAIRS, ASM,
            )
        if not AHEAD:
            next_xs = _load_slices(x_ptrs, row_inside, next_column, SLICES, COLUMNS, EVEN, LAST_FIRST)
        words, zeros, up_words, up_zeros, xs = next_words, next_zeros, next_up, next_up_zeros, next_xs
    at = (first_unit + (STEPS - 1) * UNITS) * WIDTH
    acc = _add_step(
        acc, words, xs, zeros, scale_ptr, first_row, size, at,
        UNITS, STRIPS, ROWS, GROUP, NUM_GROUPS, SLICES_IN_GROUP, BITS, HAS_ZEROS, DTYPE, PAIRS, ASM,
    )
    if GATED:
        up_acc = _add_step(
            up_acc, up_words, xs, up_zeros, s_1, first_row, size, at,
            UNITS, STRIPS, ROWS, GROUP, NUM_GROUPS, SLICES_IN_GROUP, BITS, HAS_ZEROS, DTYPE, PAIRS, ASM,
        )

    n = first_row + tl.arange(0, STRIPS * 16)[:, None]
    m_out = tl.arange(0, ROWS)[None, :]
    mask = (n < size) & (m_out < num_rows)
    bias = load_bias(bias_ptr, n, bias_size, HAS_BIAS)
    up_bias = load_bias(b_1, n, bias_n_1, HAS_BIAS and GATED)
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m_out * stride_res + n, mask=mask, other=0.0)
    place = n
    if HAS_PLACES:
        place = tl.load(places_ptr + n, mask=n < size, other=0)
    finish(
        tl.sum(acc, 0), tl.sum(up_acc, 0) if GATED else 0.0, bias, up_bias, residual,
        out_ptr + column + m_out * stride_out + place, mask, HAS_RESIDUAL, ACTIVATION,
    )

# fmt: on
