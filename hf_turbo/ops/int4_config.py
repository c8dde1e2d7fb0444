"""How the INT4 kernels are compiled and spread over a device: a static table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .attention_config import DeviceFacts, ceil_div, next_power_of_2
from .int4_layout import unit_columns

#: The most rows of x that warps can take by themselves.
MAX_STREAM_ROWS = 16
#: The most rows of x that the kernels take; with more, unpacking the weight for cuBLAS is faster.
MAX_ROWS = 64


@dataclass(frozen=True)
class Int4Config:
    """How one linear is compiled and spread over the device.

    Args:
        stream: each warp reads by itself and x more than once; else warps share x, in tiles.
        strips: sixteens of rows of a weight (output features) a program: 1, 2 or 4.
        units: units of columns a step; see `int4_layout`.
        shares: warps of a program, each with its own columns (stream), or programs that share the columns of one
            tile, whose sums a second kernel adds in order.
        num_warps, num_stages: Triton's.
        ahead: load x a step ahead, like the weights (stream).
        pdl: start while the kernel before is still running (compute capability 9.0 and above).
    """

    stream: bool
    strips: int
    units: int
    shares: int
    num_warps: int
    num_stages: int = 1
    ahead: bool = False
    pdl: bool = False


@lru_cache(maxsize=4096)
def choose_config(
    rows: int,
    features: int,
    columns: int,
    gated: bool,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    facts: DeviceFacts,
) -> Int4Config:
    """The table, by rows of x, output features (of the gate alone when gated), columns, format, dtype and device.

    Measured on an H200 with 4 bits, groups of 128 and bf16.
    """
    pdl = facts.capability >= 90
    units = ceil_div(columns, unit_columns(bits))
    if rows <= MAX_STREAM_ROWS:
        strips, shares, step, ahead = _stream(rows, features * (2 if gated else 1), units)
        step = min(step, next_power_of_2(ceil_div(units, shares)))
        if dtype == torch.float32:
            step = max(2, step // 2)  # x takes twice the registers
        return Int4Config(True, strips, _fit_step(step, bits, group_size), shares, shares, ahead=ahead, pdl=pdl)
    shares = 1 if gated else _fill(features // 64, units, facts.num_sms)
    step = _fit_step(1 if gated or dtype == torch.float32 else 2, bits, group_size)
    return Int4Config(False, 4, step, shares, 4, num_stages=2 if dtype == torch.float32 else 4, pdl=pdl)


def _stream(rows: int, features: int, units: int) -> tuple[int, int, int, bool]:
    """Strips and warps of a program, units of a step, and whether x is loaded ahead."""
    if features > 8192:
        return (1, 4, 2, True) if rows <= 8 else (2, 2, 2, True)
    if units > 128:
        return (1, 8, 4, False) if rows <= 8 else (1, 8, 2, True)
    if features > 4096:
        return (1, 4, 8, True) if rows <= 8 else (1, 4, 2, True)
    return 1, 4, 4, True


def _fit_step(step: int, bits: int, group_size: int) -> int:
    """The largest number of units up to `step`, a power of two, that groups divide or are divided by."""
    width = unit_columns(bits)
    while step > 1 and group_size % (step * width) and (step * width) % group_size:
        step //= 2
    return step


def _fill(tiles: int, units: int, num_sms: int) -> int:
    """How many programs share a tile's columns, so that there are two or more programs a multiprocessor."""
    shares = 1
    while shares < 4 and tiles * shares * 2 <= 4 * num_sms and units // (shares * 2) >= 8:
        shares *= 2
    return shares
