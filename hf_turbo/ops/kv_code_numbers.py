"""Codes of keys and values to numbers, in registers (Triton).

A word of 16 bits holds a code of each part of a head: two of 8 bits, or four of 4. With a few instructions of PTX where
the numbers are fp16: a code becomes the low bits of 1024.0, whose step is 1. Without, the same in plain Triton, for its
interpreter and for float32. CAPABILITY: of the device, 0 for no PTX.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _asm(*lines: str) -> str:
    """Instructions, and the registers that they work in."""
    registers = [".reg .b32 one, x, y, off, part;", ".reg .b16 h0, h1;"]
    return "\n".join(["{", *registers, *(f"{line};" for line in lines), "}"])


def _int8(low: str, high: str, words: str, offset: str) -> list[str]:
    return [
        "mov.b32 one, 0x64006400",
        f"mov.b32 off, {offset}",
        f"prmt.b32 {low}, {words}, one, 0x5250",
        f"prmt.b32 {high}, {words}, one, 0x5351",
        f"sub.rn.f16x2 {low}, {low}, off",
        f"sub.rn.f16x2 {high}, {high}, off",
    ]


def _e4m3(low: str, high: str, words: str) -> list[str]:
    """By the instruction that compute capability 8.9 brought."""
    return [
        f"prmt.b32 x, {words}, 0, 0x3120",
        "mov.b32 {h0, h1}, x",
        f"cvt.rn.f16x2.e4m3x2 {low}, h0",
        f"cvt.rn.f16x2.e4m3x2 {high}, h1",
    ]


def _e4m3_by_bits(low: str, high: str, words: str) -> list[str]:
    """Sign, exponent and mantissa moved to where fp16 has them, which makes 1/256 of the number."""
    lines = ["mov.b32 part, 0x5c005c00"]
    for out, shift in ((low, 8), (high, 0)):
        lines += [
            f"shl.b32 x, {words}, {shift}",
            "and.b32 y, x, 0x80008000",
            "shr.u32 x, x, 1",
            "and.b32 x, x, 0x3f803f80",
            "or.b32 x, x, y",
            f"mul.rn.f16x2 {out}, x, part",
        ]
    return lines


def _int4(outs: tuple[str, str, str, str], words: str) -> list[str]:
    """Of the second and fourth the number is 1024 + 16 n at first; a sixteenth of it less 64 is n."""
    return [
        "mov.b32 one, 0x64006400",
        "mov.b32 part, 0x2c002c00",
        "mov.b32 off, 0xd400d400",
        f"shr.u32 x, {words}, 8",
        f"lop3.b32 {outs[0]}, {words}, 0x000f000f, one, 0xea",
        f"lop3.b32 {outs[1]}, {words}, 0x00f000f0, one, 0xea",
        f"lop3.b32 {outs[2]}, x, 0x000f000f, one, 0xea",
        f"lop3.b32 {outs[3]}, x, 0x00f000f0, one, 0xea",
        *(f"sub.rn.f16x2 {out}, {out}, one" for out in outs[::2]),
        *(f"fma.rn.f16x2 {out}, {out}, part, off" for out in outs[1::2]),
    ]


def _scaled(count: int) -> list[str]:
    """Each output times its scale plus its zero; these are the operands after the words."""
    first = count + 1
    return [f"fma.rn.f16x2 ${i}, ${i}, ${first + i}, ${first + count + i}" for i in range(count)]


_KEYS_INT8 = tl.constexpr(_asm(*_int8("$0", "$1", "$2", "0x64006400"), *_scaled(2)))
_KEYS_E4M3 = tl.constexpr(_asm(*_e4m3("$0", "$1", "$2"), *_scaled(2)))
_KEYS_E4M3_BY_BITS = tl.constexpr(_asm(*_e4m3_by_bits("$0", "$1", "$2"), *_scaled(2)))
_KEYS_INT4 = tl.constexpr(_asm(*_int4(("$0", "$1", "$2", "$3"), "$4"), *_scaled(4)))
_VALUES_INT8 = tl.constexpr(_asm(*_int8("$0", "$1", "$2", "0x64806480")))
_VALUES_E4M3 = tl.constexpr(_asm(*_e4m3("$0", "$1", "$2")))
_VALUES_E4M3_BY_BITS = tl.constexpr(_asm(*_e4m3_by_bits("$0", "$1", "$2")))
_VALUES_INT4 = tl.constexpr(_asm(*_int4(("$0", "$1", "$2", "$3"), "$4")))
# Outputs are written before all inputs are read.
_KEY_REGISTERS_8 = tl.constexpr("=&r,=&r,r,r,r,r,r")
_KEY_REGISTERS_4 = tl.constexpr("=&r,=&r,=&r,=&r" + 9 * ",r")
_VALUE_REGISTERS_8 = tl.constexpr("=&r,=&r,r")
_VALUE_REGISTERS_4 = tl.constexpr("=&r,=&r,=&r,=&r,r")


@triton.jit
def key_numbers_8(
    words, s0, s1, z0, z1, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """Keys of 8-bit codes, in DTYPE: both halves of a head.

    Args:
        words: int16 `[tokens, dim / 2]`.
        s0, s1, z0, z1: scales and zeros of each half, fp16 `[tokens or 1, dim / 2]`.
    """
    if CAPABILITY == 0:
        k0 = _plain_8(words, 0, 0, IS_FLOAT) * s0.to(tl.float32) + z0.to(tl.float32)
        k1 = _plain_8(words, 8, 0, IS_FLOAT) * s1.to(tl.float32) + z1.to(tl.float32)
        return k0.to(DTYPE), k1.to(DTYPE)
    else:
        ASM: tl.constexpr = _KEYS_INT8 if not IS_FLOAT else _KEYS_E4M3 if CAPABILITY >= 89 else _KEYS_E4M3_BY_BITS
        return tl.inline_asm_elementwise(
            ASM, _KEY_REGISTERS_8, [words, s0, s1, z0, z1], dtype=(tl.float16,) * 2, is_pure=True, pack=2
        )


@triton.jit
def key_numbers_4(
    words, s0, s1, s2, s3, z0, z1, z2, z3, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr
):  # fmt: skip
    """Keys of 4-bit codes, in DTYPE: the quarters of a head.

    Args:
        words: int16 `[tokens, dim / 4]`.
        s0 to z3: scales and zeros of each quarter, fp16 `[tokens or 1, dim / 4]`.
    """
    if CAPABILITY == 0:
        k0 = _plain_4(words, 0) * s0.to(tl.float32) + z0.to(tl.float32)
        k1 = _plain_4(words, 4) * s1.to(tl.float32) + z1.to(tl.float32)
        k2 = _plain_4(words, 8) * s2.to(tl.float32) + z2.to(tl.float32)
        k3 = _plain_4(words, 12) * s3.to(tl.float32) + z3.to(tl.float32)
        return k0.to(DTYPE), k1.to(DTYPE), k2.to(DTYPE), k3.to(DTYPE)
    else:
        return tl.inline_asm_elementwise(
            _KEYS_INT4, _KEY_REGISTERS_4, [words, s0, s1, s2, s3, z0, z1, z2, z3], dtype=(tl.float16,) * 4,
            is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def value_numbers_8(words, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """Values of 8-bit codes before their scale, in DTYPE: both halves, of words int16 `[dim / 2, tokens]`."""
    if CAPABILITY == 0:
        return _plain_8(words, 0, 128, IS_FLOAT).to(DTYPE), _plain_8(words, 8, 128, IS_FLOAT).to(DTYPE)
    else:
        ASM: tl.constexpr = (
            _VALUES_INT8 if not IS_FLOAT else _VALUES_E4M3 if CAPABILITY >= 89 else _VALUES_E4M3_BY_BITS
        )
        return tl.inline_asm_elementwise(
            ASM, _VALUE_REGISTERS_8, [words], dtype=(tl.float16,) * 2, is_pure=True, pack=2
        )


@triton.jit
def value_numbers_4(words, DTYPE: tl.constexpr, CAPABILITY: tl.constexpr):
    """Values of 4-bit codes before scale and zero, in DTYPE: the quarters, of words int16 `[dim / 4, tokens]`."""
    if CAPABILITY == 0:
        v0, v1 = _plain_4(words, 0).to(DTYPE), _plain_4(words, 4).to(DTYPE)
        return v0, v1, _plain_4(words, 8).to(DTYPE), _plain_4(words, 12).to(DTYPE)
    else:
        return tl.inline_asm_elementwise(
            _VALUES_INT4, _VALUE_REGISTERS_4, [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )


@triton.jit
def _plain_8(words, SHIFT: tl.constexpr, OFFSET: tl.constexpr, IS_FLOAT: tl.constexpr):
    codes = (words >> SHIFT) & 0xFF
    if IS_FLOAT:
        half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return (codes - OFFSET).to(tl.float32)


@triton.jit
def _plain_4(words, SHIFT: tl.constexpr):
    return ((words >> SHIFT) & 15).to(tl.float32)
