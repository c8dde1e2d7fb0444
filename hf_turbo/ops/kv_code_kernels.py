"""A block's keys and values to codes and back, for Triton kernels: `kv_codes` step by step, to the last bit.

A tile of tokens is `[BLOCK_SIZE, PARTS, WIDTH]`: a 16-bit word holds a code of each part of a head. WIDTH is a power of
two: `part_of_dim` gives the dimensions and a mask.

Kernels are compiled without fused multiply-adds (`enable_fp_fusion=False`), divide by `tl.div_rn`, and put e4m3
together from integers: so every step is rounded alike everywhere, also on GPUs without float8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kv_codes import STEPS, UPPER_BITS
from .kv_format import E4M3_MAX, KEY_STEP, KEY_TRIES, LARGEST_KEY

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_LARGEST_KEY = tl.constexpr(LARGEST_KEY)
_KEY_STEP = tl.constexpr(KEY_STEP)
_KEY_TRIES = tl.constexpr(KEY_TRIES)
_UPPER_BITS = tl.constexpr(UPPER_BITS)
_STEPS = tl.constexpr(STEPS)
_FP16_MAX = tl.constexpr(65504.0)
#: 1.5 * 2**23: a number of up to 22 bits added to it ends up, rounded half to even, in the sum's low bits.
_TO_INTEGER = tl.constexpr(12582912.0)
#: Float8 without a leading one counts in steps of 2**-9, as float32 does from here on.
_TO_SUBNORMAL = tl.constexpr(16384.0)
_E4M3_LAST_BIT = tl.constexpr(2.0**-9)
#: By how much float32's exponents are larger, whose bias is 127 and not 7.
_E4M3_BIAS = tl.constexpr(120)


@triton.jit
def part_of_dim(DIM: tl.constexpr, BITS: tl.constexpr):
    """The dimensions of a tile, int32 `[PARTS, WIDTH]`, and which of them there are."""
    PARTS: tl.constexpr = 16 // BITS
    WIDTH: tl.constexpr = DIM // PARTS
    column = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    part = tl.arange(0, PARTS)[:, None]
    return part * WIDTH + column, (column < WIDTH) & (part < PARTS)


@triton.jit
def _half(x):
    return tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX).to(tl.float16)


@triton.jit
def _half_up(x):
    """fp16, rounded up, of numbers from 0."""
    x = tl.minimum(x, _FP16_MAX)
    half = x.to(tl.float16)
    return (half.to(tl.int16, bitcast=True) + (half.to(tl.float32) < x).to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def _not_zero(scale):
    scale = scale.to(tl.float32)
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _power_of_two(x):
    """The smallest power of two that is not below x, float32; 1 where x is 0."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7F000000)
    return tl.where(x == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _to_e4m3(x):
    """Codes, int32, of float32 up to the largest e4m3: rounded half to even."""
    x = tl.minimum(tl.maximum(x, -_E4M3_MAX), _E4M3_MAX)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (_E4M3_BIAS << 3)
    shifted = tl.abs(x) + _TO_SUBNORMAL
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xFF  # the bits of 2**14 end in zeros
    return tl.where(size < (_E4M3_BIAS + 1 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(code):
    size = code & 0x7F
    normal = ((size << 20) + (_E4M3_BIAS << 23)).to(tl.float32, bitcast=True)
    x = tl.where(size < 8, size.to(tl.float32) * _E4M3_LAST_BIT, normal)
    return tl.where(code > 0x7F, -x, x)


@triton.jit
def _to_codes(x, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, SIGNED: tl.constexpr):
    """Unsigned codes, int32, of scaled numbers."""
    if IS_FLOAT:
        return _to_e4m3(x)
    if SIGNED:
        x = tl.minimum(tl.maximum(x, -127.0), 127.0) + _TO_INTEGER
        return (x.to(tl.int32, bitcast=True) + 128) & 0xFF
    x = tl.minimum(tl.maximum(x, 0.0), 2.0**BITS - 1) + _TO_INTEGER
    return x.to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _from_codes(code, IS_FLOAT: tl.constexpr, SIGNED: tl.constexpr):
    if IS_FLOAT:
        return _from_e4m3(code)
    return ((code - 128) if SIGNED else code).to(tl.float32)


@triton.jit
def _pack(codes, BITS: tl.constexpr):
    """`[BLOCK_SIZE, PARTS, WIDTH]` -> words, int16 `[BLOCK_SIZE, WIDTH]`."""
    return tl.sum(codes << (tl.arange(0, 16 // BITS) * BITS)[None, :, None], 1).to(tl.int16)


@triton.jit
def _unpack(words, BITS: tl.constexpr):
    """Words, int16 `[BLOCK_SIZE, WIDTH]` -> int32 `[BLOCK_SIZE, PARTS, WIDTH]`."""
    return (words.to(tl.int32)[:, None, :] >> (tl.arange(0, 16 // BITS) * BITS)[None, :, None]) & ((1 << BITS) - 1)


@triton.jit
def _float_scales(x, low, high):
    least = tl.full(low.shape, float("inf"), tl.float32)
    best = tl.zeros(low.shape, tl.int32)
    for number in tl.range(0, _KEY_TRIES, num_stages=1):
        scale, zero = _tried_scales(tl.full(low.shape, number, tl.int32), low, high)
        step = _not_zero(scale)
        error = _float_error(x - zero.to(tl.float32)[None, :, :], tl.div_rn(1.0, step)).to(tl.float32) * step * step
        best = tl.where(error < least, number, best)
        least = tl.minimum(error, least)
    return _tried_scales(best, low, high)


@triton.jit
def _tried_scales(number, low, high):
    nearer = _LARGEST_KEY - (number + 1) // 2 * _KEY_STEP
    above, below = tl.where(number % 2 == 1, _LARGEST_KEY, nearer), tl.where(number % 2 == 1, nearer, _LARGEST_KEY)
    zero = _half(low + tl.div_rn(high * 0.5 - low * 0.5, (above + below) * 0.5) * below)
    up, down = high - zero.to(tl.float32), zero.to(tl.float32) - low
    return _half_up(tl.maximum(tl.div_rn(up, above), tl.div_rn(down, below))), zero


@triton.jit
def _float_error(x, to_float8):
    scaled = x * to_float8[None, :, :]
    scaled = tl.minimum(tl.maximum(scaled, -_E4M3_MAX), _E4M3_MAX)
    upper = scaled * _UPPER_BITS
    error = scaled - (upper - (upper - scaled))
    steps = (error * _STEPS).to(tl.int32)
    return tl.sum(steps * steps, 0)


@triton.jit
def store_key_codes(
    x, target, group, SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Writes the bytes of keys, a float32 tile: of a block's tokens that share their scales, one of GROUPS groups.

    `target`: uint8 pointer to the block. SCALES: where its scales begin.
    """
    x = x + 0.0  # no negative zeros, as in `kv_codes`
    low, high = tl.min(x, 0), tl.max(x, 0)
    if IS_FLOAT:
        scale, zero = _float_scales(x, low, high)
    else:
        zero = _half(low)
        scale = _half_up(tl.div_rn(tl.maximum(high - zero.to(tl.float32), 0.0), 2.0**BITS - 1))
    scaled = tl.div_rn(x - zero.to(tl.float32)[None, :, :], _not_zero(scale)[None, :, :])

    dim, mask = part_of_dim(DIM, BITS)
    codes, scales = _of_group(target, group, SCALES, BLOCK_SIZE // GROUPS, DIM, BITS)
    tl.store(scales + dim, scale, mask=mask)
    tl.store(scales + GROUPS * DIM + dim, zero, mask=mask)
    place, there = _places(DIM, BITS, BLOCK_SIZE // GROUPS, TRANSPOSED=False)
    tl.store(codes + place, _pack(_to_codes(scaled, BITS, IS_FLOAT, SIGNED=False), BITS), mask=there)


@triton.jit
def store_value_codes(
    x, target, SCALES: tl.constexpr, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, ZERO_VALUES: tl.constexpr,
):  # fmt: skip
    """The same of values, 0 where a dimension is not there. UNIT: where the unit lies."""
    unit = _power_of_two(tl.max(tl.max(tl.max(tl.abs(x), 2), 1), 0))
    x = tl.div_rn(x, unit) + 0.0
    scales = (target + SCALES).to(tl.pointer_type(tl.float16)) + tl.arange(0, BLOCK_SIZE)
    if ZERO_VALUES:
        _, mask = part_of_dim(DIM, BITS)
        low = tl.min(tl.min(tl.where(mask[None, :, :], x, float("inf")), 2), 1)
        high = tl.max(tl.max(tl.where(mask[None, :, :], x, float("-inf")), 2), 1)
        zero = _half(low)
        scale = _half_up(tl.div_rn(tl.maximum(high - zero.to(tl.float32), 0.0), 2.0**BITS - 1))
        x = x - zero.to(tl.float32)[:, None, None]
        tl.store(scales + BLOCK_SIZE, zero)
    else:
        scale = _half_up(tl.max(tl.max(tl.abs(x), 2), 1))
        x = x * (_E4M3_MAX if IS_FLOAT else 127.0)
    tl.store(scales, scale)
    scaled = tl.div_rn(x, _not_zero(scale)[:, None, None])
    place, there = _places(DIM, BITS, BLOCK_SIZE, TRANSPOSED=True)
    words = _pack(_to_codes(scaled, BITS, IS_FLOAT, SIGNED=not ZERO_VALUES), BITS)
    tl.store(target.to(tl.pointer_type(tl.int16)) + place, words, mask=there)
    # With the zeros that pad it to 16 bytes.
    word = tl.arange(0, 4)
    units = (target + UNIT).to(tl.pointer_type(tl.int32))
    tl.store(units + word, tl.where(word == 0, unit.to(tl.int32, bitcast=True), 0))


@triton.jit
def load_keys(
    source, group, SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The keys of a group of a block's tokens, a float32 tile, from their bytes."""
    codes, scales = _of_group(source, group, SCALES, BLOCK_SIZE // GROUPS, DIM, BITS)
    place, there = _places(DIM, BITS, BLOCK_SIZE // GROUPS, TRANSPOSED=False)
    numbers = _from_codes(_unpack(_load_words(codes, place, there), BITS), IS_FLOAT, SIGNED=False)
    dim, mask = part_of_dim(DIM, BITS)
    scale = tl.load(scales + dim, mask=mask, other=0).to(tl.float32)
    zero = tl.load(scales + GROUPS * DIM + dim, mask=mask, other=0).to(tl.float32)
    return numbers * scale[None, :, :] + zero[None, :, :]


@triton.jit
def _of_group(block, group, SCALES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr):
    """Where the words of a group's keys begin, and its scales."""
    codes = block.to(tl.pointer_type(tl.int16)) + group * (TOKENS * DIM * BITS // 16)
    return codes, (block + SCALES).to(tl.pointer_type(tl.float16)) + group * DIM


@triton.jit
def load_values(
    source, SCALES: tl.constexpr, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, ZERO_VALUES: tl.constexpr,
):  # fmt: skip
    """The same of values."""
    place, there = _places(DIM, BITS, BLOCK_SIZE, TRANSPOSED=True)
    numbers = _from_codes(_unpack(_load_words(source, place, there), BITS), IS_FLOAT, SIGNED=not ZERO_VALUES)
    scales = (source + SCALES).to(tl.pointer_type(tl.float16)) + tl.arange(0, BLOCK_SIZE)
    scale = tl.load(scales).to(tl.float32)
    unit = tl.load((source + UNIT).to(tl.pointer_type(tl.float32)))
    if ZERO_VALUES:
        return (numbers * scale[:, None, None] + tl.load(scales + BLOCK_SIZE).to(tl.float32)[:, None, None]) * unit
    return numbers * tl.div_rn(scale, _E4M3_MAX if IS_FLOAT else 127.0)[:, None, None] * unit


@triton.jit
def _load_words(source, place, there):
    return tl.load(source.to(tl.pointer_type(tl.int16)) + place, mask=there, other=0)


@triton.jit
def _places(DIM: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Where the words of a block's codes lie, `[BLOCK_SIZE, WIDTH]`, and which of them there are."""
    ROW_WORDS: tl.constexpr = DIM * BITS // 16
    token = tl.arange(0, BLOCK_SIZE)[:, None]
    word = tl.arange(0, triton.next_power_of_2(ROW_WORDS))[None, :]
    there = (word < ROW_WORDS) & (token < BLOCK_SIZE)
    if TRANSPOSED:
        return word * BLOCK_SIZE + token, there
    return token * ROW_WORDS + word, there
