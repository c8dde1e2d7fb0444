"""The Triton kernels of `int4.py`: products with weights of 4 or 8 bits, whose codes lie as `int4_layout` puts them.

A thread's codes become, in registers, its elements of a tensor core's operand: no shared memory, no shuffles. An offset
keeps the conversion exact: `0x43 | q` is 128 + q in bf16, `0x64 | q` is 1024 + q in fp16, and the zero point goes away
with it in one subtraction, so what is multiplied is the small integer q - z. Scales are applied to sums, in fp32.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import triton
import triton.language as tl

# Signatures are laid out by kind of argument: weights, biases, other tensors, sizes, strides, constants.
# fmt: off


def _unpack_4(magic: str, one: str, fma: str) -> str:
    """PTX: word $8 holds 8 codes, in each half four; $0 to $7 become q - z, those of a pair of halves together.

    $9 and $10 hold minus the offset and the zero points of a thread's two rows, twice each.
    """
    lines = ["{", ".reg .b32 t, one;", f"mov.b32 one, {one};"]
    for i in range(4):
        lines += [
            f"shr.b32 t, $8, {4 * i};",
            f"lop3.b32 t, t, 0x000f000f, {magic}, 0xea;",
            f"{fma} t, t, one, ${9 + i % 2};",
            f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, t;",
        ]
    return "\n".join([*lines, "}"])


def _unpack_8_fp16() -> str:
    """PTX: word $4 holds 4 codes; $0 to $3 become q - z; $5 and $6 hold the offsets as for 4 bits."""
    lines = ["{", ".reg .b32 t, one;", "mov.b32 one, 0x3c003c00;"]
    for i, selected in enumerate(("0x4140", "0x4342")):
        lines += [
            f"prmt.b32 t, $4, 0x64646464, {selected};",
            f"fma.rn.f16x2 t, t, one, ${5 + i};",
            f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, t;",
        ]
    return "\n".join([*lines, "}"])


def _unpack_8_bf16() -> str:
    """The same; through fp32, since 8 bits and an offset are more than bf16 holds. $5 and $6 are fp32."""
    lines = ["{", ".reg .b32 lo, hi;"]
    for i in range(2):
        lines += [
            f"prmt.b32 lo, $4, 0x4b000000, {0x7440 + 2 * i};",
            f"prmt.b32 hi, $4, 0x4b000000, {0x7441 + 2 * i};",
            f"sub.rn.f32 lo, lo, ${5 + i};",
            f"sub.rn.f32 hi, hi, ${5 + i};",
            "cvt.rn.bf16x2.f32 lo, hi, lo;",
            f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, lo;",
        ]
    return "\n".join([*lines, "}"])


_UNPACK_4_BF16 = tl.constexpr(_unpack_4("0x43004300", "0x3f803f80", "fma.rn.bf16x2"))
_UNPACK_4_FP16 = tl.constexpr(_unpack_4("0x64006400", "0x3c003c00", "fma.rn.f16x2"))
_UNPACK_8_BF16 = tl.constexpr(_unpack_8_bf16())
_UNPACK_8_FP16 = tl.constexpr(_unpack_8_fp16())
_REGISTERS_4 = tl.constexpr("=h," * 8 + "r,r,r")
_REGISTERS_8 = tl.constexpr("=h," * 4 + "r,r,r")


@triton.jit
def zero_operand(zero, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """What the conversion subtracts of codes with these zero points (int32), as bits."""
    if BITS == 8 and tl.bfloat16 == DTYPE:
        return zero | 0x4B000000
    elif tl.bfloat16 == DTYPE:
        return (zero | 0xC300) * 0x10001
    else:
        return (zero | 0xE400) * 0x10001


@triton.jit
def codes_minus_zeros(words, zero_a, zero_b, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words [A, B, 128] of units: their numbers q - z in DTYPE, [A, B, 128] + (4 bits: [column's second bit,] row's
    half, column's lowest bit].

    zero_a, zero_b: [A, B, 128], `zero_operand` of rows 0 to 7 and 8 to 15 of a unit; without ASM the zero points.
    """
    if BITS == 4:
        o_0, o_1, o_2, o_3, o_4, o_5, o_6, o_7 = _numbers_4(words, zero_a, zero_b, DTYPE, ASM)
        low_a, low_b = tl.join(o_0, o_1), tl.join(o_2, o_3)
        high_a, high_b = tl.join(o_4, o_5), tl.join(o_6, o_7)
        low, high = tl.join(low_a, low_b), tl.join(high_a, high_b)
        return tl.join(low, high)  # column's lowest bit, row's half, column's second bit
    else:
        o_0, o_1, o_2, o_3 = _numbers_8(words, zero_a, zero_b, DTYPE, ASM)
        return tl.join(tl.join(o_0, o_1), tl.join(o_2, o_3))  # column's lowest bit, row's half


@triton.jit
def _numbers_4(words, zero_a, zero_b, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The 8 numbers of words of 4-bit codes, from the lowest bits; in plain operations for Triton's interpreter."""
    if not ASM:
        return (
            _number(words, 0, 4, zero_a), _number(words, 16, 4, zero_a),
            _number(words, 4, 4, zero_b), _number(words, 20, 4, zero_b),
            _number(words, 8, 4, zero_a), _number(words, 24, 4, zero_a),
            _number(words, 12, 4, zero_b), _number(words, 28, 4, zero_b),
        )
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _UNPACK_4_BF16, _REGISTERS_4, [words, zero_a, zero_b], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_4_FP16, _REGISTERS_4, [words, zero_a, zero_b], dtype=(tl.float16,) * 8, is_pure=True, pack=1
        )


@triton.jit
def _numbers_8(words, zero_a, zero_b, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The 4 numbers of words of 8-bit codes, from the lowest bits."""
    if not ASM:
        return (
            _number(words, 0, 8, zero_a), _number(words, 8, 8, zero_a),
            _number(words, 16, 8, zero_b), _number(words, 24, 8, zero_b),
        )
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _UNPACK_8_BF16, _REGISTERS_8, [words, zero_a, zero_b], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _UNPACK_8_FP16, _REGISTERS_8, [words, zero_a, zero_b], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )


@triton.jit
def _number(words, SHIFT: tl.constexpr, BITS: tl.constexpr, zero):
    return (((words >> SHIFT) & ((1 << BITS) - 1)) - zero).to(tl.float32)


@triton.jit
def slices(numbers, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """`codes_minus_zeros` of units [A, B, 128, ...] as tiles [A, 16 B, 32] of 32 columns, one (8 bits) or two.

    Their columns are in the order in which the compiler gives a product's k to threads: two at a time (PAIRS, as the
    instructions have it, and a warpgroup's always) or four. Another order than the compiler's costs shuffles, not
    correctness.
    """
    A: tl.constexpr = numbers.shape[0]
    B: tl.constexpr = numbers.shape[1]
    if BITS == 4:  # a, b, row, thread, slice, third bit, first bit, half, second bit
        numbers = tl.reshape(numbers, (A, B, 8, 4, 2, 2, 2, 2, 2))
        if PAIRS:
            numbers = tl.permute(numbers, (0, 1, 7, 2, 5, 8, 3, 6, 4))
        else:
            numbers = tl.permute(numbers, (0, 1, 7, 2, 5, 3, 8, 6, 4))
        return tl.split(tl.reshape(numbers, (A, B * 16, 32, 2)))
    else:  # a, b, row, thread, third bit, second bit, first bit, half
        numbers = tl.reshape(numbers, (A, B, 8, 4, 2, 2, 2, 2))
        if PAIRS:
            numbers = tl.permute(numbers, (0, 1, 7, 2, 4, 5, 3, 6))
        else:
            numbers = tl.permute(numbers, (0, 1, 7, 2, 4, 3, 5, 6))
        return (tl.reshape(numbers, (A, B * 16, 32)),)


@triton.jit
def column_of(k, PAIRS: tl.constexpr):
    """The column within a slice that k of the product is, in the same order."""
    if PAIRS:
        return tl.max_contiguous(tl.multiple_of(((k & 6) << 2) | ((k & 24) >> 2) | (k & 1), 2), 2)
    else:
        return tl.max_contiguous(tl.multiple_of(((k & 12) << 1) | ((k & 16) >> 2) | (k & 3), 4), 4)


@triton.jit
def pick_quantized(
    tile, w_0, w_1, w_2, s_0, s_1, s_2, z_0, z_1, z_2, b_0, b_1, b_2,
    n_0, n_1, n_2, bias_n_0, bias_n_1, bias_n_2, BLOCK_N: tl.constexpr, NUM_WEIGHTS: tl.constexpr,
):
    """The weight that output tile `tile` belongs to: (tile within it, codes, scales, zeros, bias, rows, rows
    with a bias, the column of the output at which it starts)."""
    w, s, z, b, n, bias_n = w_0, s_0, z_0, b_0, n_0, bias_n_0
    column = n_0 * 0
    if NUM_WEIGHTS > 1:
        tiles_0 = tl.cdiv(n_0, BLOCK_N)
        if tile >= tiles_0:
            tile = tile - tiles_0
            w, s, z, b, n, bias_n = w_1, s_1, z_1, b_1, n_1, bias_n_1
            column = n_0
            if NUM_WEIGHTS > 2:
                tiles_1 = tl.cdiv(n_1, BLOCK_N)
                if tile >= tiles_1:
                    tile = tile - tiles_1
                    w, s, z, b, n, bias_n = w_2, s_2, z_2, b_2, n_2, bias_n_2
                    column = n_0 + n_1
    return tile, w, s, z, b, n, bias_n, column


@triton.jit
def row_scales(scale_ptr, group, first_row, size, STRIPS: tl.constexpr):
    """Scales [A, 16 STRIPS] in fp32 of rows `first_row` on, for groups [A].

    One small load a strip: small enough for the compiler to load each thread's own, without shared memory.
    """
    A: tl.constexpr = group.shape[0]
    row = first_row + tl.arange(0, 16)[None, :]
    base = scale_ptr + group[:, None] * size
    s_0 = tl.load(base + tl.minimum(row, size - 1))
    if STRIPS == 1:
        return s_0.to(tl.float32)
    else:
        s_1 = tl.load(base + tl.minimum(row + 16, size - 1))
        if STRIPS == 2:
            joined = tl.permute(tl.join(s_0, s_1), (0, 2, 1))
        else:
            s_2 = tl.load(base + tl.minimum(row + 32, size - 1))
            s_3 = tl.load(base + tl.minimum(row + 48, size - 1))
            joined = tl.permute(tl.join(tl.join(s_0, s_2), tl.join(s_1, s_3)), (0, 2, 3, 1))
        return tl.reshape(joined, (A, STRIPS * 16)).to(tl.float32)


@triton.jit
def thread_index(size: tl.constexpr, dim: tl.constexpr, LAST_FIRST: tl.constexpr):
    """0 to size - 1 along dimension `dim` of four, for a tensor whose dimensions go to threads in that order.

    Of dimensions that are no different to memory, the compiler gives threads the first (up to Triton 3.6) or the last
    (LAST_FIRST) before the others; `threads_first` puts the dimensions into one order again.
    """
    index = tl.arange(0, size)
    if (3 - dim if LAST_FIRST else dim) == 0:
        return index[:, None, None, None]
    elif (3 - dim if LAST_FIRST else dim) == 1:
        return index[None, :, None, None]
    elif (3 - dim if LAST_FIRST else dim) == 2:
        return index[None, None, :, None]
    else:
        return index[None, None, None, :]


@triton.jit
def load_zeros(
    zero_ptr, column, first_row, size, G: tl.constexpr, HALF: tl.constexpr, A: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, STRIPS: tl.constexpr, LAST_FIRST: tl.constexpr,
):
    """Zero points of rows 0 to 7 (HALF 0) or 8 to 15 of strips, two in each number, [4, 8, A, STRIPS], of the G-th
    group from that of `column` + WIDTH a on: the same for all 4 threads of a row, since each needs them.

    Read two bytes at a time: a load of single bytes among a product's inputs makes Triton pick another order of k.
    """
    group = (column + thread_index(A, 2, LAST_FIRST) * WIDTH) // GROUP + G
    group = tl.minimum(group, NUM_GROUPS - 1)
    row = first_row + HALF * 8 + thread_index(8, 1, LAST_FIRST) + thread_index(STRIPS, 3, LAST_FIRST) * 16
    row = tl.minimum(row, size - 1) + thread_index(4, 0, LAST_FIRST) * 0
    pairs = tl.load(zero_ptr + (group * ((size + 1) // 2) + row // 2))
    if LAST_FIRST:
        return tl.permute(pairs, (3, 2, 1, 0))
    else:
        return pairs


@triton.jit
def unit_zeros(
    pairs, next_pairs, TWO_GROUPS: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):
    """`zero_operand` [A, STRIPS, 128] of a unit from `load_zeros` of its group, or of those of its two slices."""
    A: tl.constexpr = pairs.shape[2]
    STRIPS: tl.constexpr = pairs.shape[3]
    of_words = tl.broadcast_to(_odd_or_even(pairs, BITS, DTYPE, ASM)[:, :, :, :, None], (A, STRIPS, 8, 4, 4))
    if TWO_GROUPS:  # a thread's last two words are of the second slice
        of_next = _odd_or_even(next_pairs, BITS, DTYPE, ASM)[:, :, :, :, None]
        of_words = tl.where(tl.arange(0, 4)[None, None, None, None, :] < 2, of_words, of_next)
    return tl.reshape(of_words, (A, STRIPS, 128))


@triton.jit
def _odd_or_even(pairs, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Of each pair the zero point of the row it was loaded for, as an operand, [A, STRIPS, 8, 4]."""
    zero = (pairs.to(tl.int32) >> ((tl.arange(0, 8) & 1) * 8)[None, :, None, None]) & 255
    zero = tl.permute(zero, (2, 3, 1, 0))
    if ASM:
        return zero_operand(zero, BITS, DTYPE)
    else:
        return zero


@triton.jit
def middle_zeros(A: tl.constexpr, STRIPS: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The same where all zero points are `2**(BITS - 1)`."""
    middle = tl.full([A, STRIPS, 128], 1 << (BITS - 1), tl.int32)
    if ASM:
        return zero_operand(middle, BITS, DTYPE)
    else:
        return middle

# fmt: on
