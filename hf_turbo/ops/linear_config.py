"""How the linear kernels are compiled and spread over a device, and where they beat cuBLAS: a static table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .attention_config import DeviceFacts, ceil_div, next_power_of_2

#: The most rows of x that the kernels take.
MAX_ROWS = 64
#: The most rows that are multiplied on the CUDA cores.
MAX_GEMV_ROWS = 2
#: The most rows and columns of x of a direct configuration.
MAX_DIRECT_ROWS, MAX_DIRECT_COLUMNS = 32, 2048
#: Rows of x a program of a direct configuration with weights first.
DIRECT_GROUP = 8
#: The most columns of x whose norm every program repeats.
MAX_NORM_COLUMNS = 1024

#: Programs of a GEMV that a multiprocessor surely runs at once.
_GEMVS_AT_ONCE = 8
_MEASURED_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LinearConfig:
    """How one linear is compiled and spread over the device.

    Args:
        block_n: rows of a weight (output features) a program.
        block_k: columns a step; a power of two, like `block_n`.
        num_warps, num_stages: Triton's; a GEMV has no stages.
        dot: multiply on the tensor cores; otherwise on the CUDA cores.
        split_k: programs that share the columns of one tile; a second kernel adds their sums in order (dot only).
        prefetch: columns whose weights a program asks the L2 cache for before it waits for x (dot with pdl only).
        pdl: start while the kernel before is still running (compute capability 9.0 and above).
        direct: every warp loads a share of the columns of its own straight into registers, all at once; `block_k`,
            `num_stages`, `split_k` and `prefetch` mean nothing then (dot only, not of fp32).
        ring: weights are asked for before x is there, as `linear_ring` does it: `num_stages - 1` stages of `block_k`
            columns; `prefetch` means nothing then (dot only, of two-byte dtypes on compute capability 9.0, columns that
            are a multiple of `block_k * split_k`).
        weights_first: the product is [features, rows], of 8 rows a program and `block_n` from 16 on; otherwise it is
            [rows, features], of all rows and `block_n` from 8 on (direct only).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    dot: bool = False
    split_k: int = 1
    prefetch: int = 0
    pdl: bool = False
    direct: bool = False
    ring: bool = False
    weights_first: bool = True


@lru_cache(maxsize=4096)
def choose_config(
    rows: int,
    features: int,
    k: int,
    gated: bool,
    dtype: torch.dtype,
    facts: DeviceFacts,
    norm: bool = False,
    rings: bool = False,
) -> LinearConfig:
    """The table, by rows of x, output features (of the gate alone when gated), columns, dtype, device, whether an RMS
    norm before is taken along, and whether there are rings and the tensors suit them.

    Measured on an H200 within a chain of a layer's kernels, not alone: what one leaves in flight the next one meets.
    """
    pdl = facts.capability >= 90
    config = _direct_config(rows, features, k, gated, dtype, facts, norm) if rows > 1 else None
    if config is None and rings and rows > 1 and not norm:  # a ring's programs never have whole rows of x
        config = _ring_config(rows, features, k, gated, dtype, facts)
    if config is None and rows <= MAX_GEMV_ROWS:
        config = _gemv_config(rows, features, k, gated, dtype)
    if config is None:
        config = _dot_config(rows, features, k, gated, dtype, facts)
    return replace(config, pdl=pdl)


def takes_norm(config: LinearConfig, k: int) -> bool:
    """Whether a program of this configuration has whole rows of x at once, as an RMS norm needs them."""
    return config.direct or (not config.dot and config.block_k >= k)


def norm_is_faster_within(
    rows: int, features: int, k: int, gated: bool, dtype: torch.dtype, facts: DeviceFacts
) -> bool:
    """Whether to take an RMS norm along instead of launching it before, by the same things as `choose_config`.

    Every program waits for its norm: of longer rows, or in programs that don't all run at once, that takes more than a
    launch (8B's linears at one row: 4.34 ms a step for 4.01).
    """
    config = choose_config(rows, features, k, gated, dtype, facts, norm=True)
    at_once = config.direct or ceil_div(features, config.block_n) <= facts.num_sms * _GEMVS_AT_ONCE
    return k <= MAX_NORM_COLUMNS and takes_norm(config, k) and at_once


def choose_expert_config(k: int, dtype: torch.dtype, facts: DeviceFacts) -> LinearConfig:
    """The table for one row a program with an expert of its own."""
    if k > 1024:
        config = LinearConfig(block_n=2, block_k=1024, num_warps=4)
    else:
        config = LinearConfig(block_n=4, block_k=512, num_warps=2)
    return replace(_for_dtype(config, dtype), pdl=facts.capability >= 90)


def _gemv_config(rows: int, features: int, k: int, gated: bool, dtype: torch.dtype) -> LinearConfig:
    if k <= 1024 and features > 16384:
        config = LinearConfig(block_n=4, block_k=512, num_warps=2)
    elif k <= 1024:
        config = LinearConfig(block_n=2 if gated or features > 600 else 4, block_k=1024, num_warps=4)
    elif k <= 2048:
        config = LinearConfig(block_n=1, block_k=2048, num_warps=8)
    elif features > 65536:
        config = LinearConfig(block_n=rows, block_k=2048, num_warps=4 * rows)
    elif gated or features > 4096:
        config = LinearConfig(block_n=rows, block_k=2048, num_warps=8)
    elif rows == 1:
        config = LinearConfig(block_n=2, block_k=1024, num_warps=4)
    else:
        config = LinearConfig(block_n=4, block_k=512, num_warps=2)
    return _for_dtype(config, dtype)


def _for_dtype(config: LinearConfig, dtype: torch.dtype) -> LinearConfig:
    """The table is of two-byte dtypes; wider ones load the same number of bytes a thread and step."""
    return replace(config, block_k=config.block_k * 2 // dtype.itemsize)


def _direct_config(
    rows: int, features: int, k: int, gated: bool, dtype: torch.dtype, facts: DeviceFacts, norm: bool
) -> LinearConfig | None:
    """None for columns that registers do not hold, or that are no loads of 16 bytes, and for too many programs.

    Groups of 8 rows read the weights again, from the L2 cache, but have registers for several sums; more rows in a
    program, where they make too many.
    """
    if rows > MAX_DIRECT_ROWS or k > MAX_DIRECT_COLUMNS or k % 8 or dtype not in _MEASURED_DTYPES:
        return None
    # Registers of a thread for x and weights, as measured: up to 8 rows are quicker with more warps than they need, and
    # from 17 on more programs share a multiprocessor.
    most = 144 if norm else {1: 104, 2: 192}.get(ceil_div(rows, DIRECT_GROUP), 128)
    for block_n, rows_each in ((16, DIRECT_GROUP), (8, max(16, next_power_of_2(rows)))):
        # A slice: 32 columns of two bytes. A norm has x in four bytes, and its weight in the threads of each of 8 rows.
        per_slice = (rows_each + block_n * (2 if gated else 1) + (rows_each + 8 if norm else 0)) // 2
        num_warps = next((w for w in (2, 4) if ceil_div(k, 32 * w) * per_slice <= most), 8)
        registers = ceil_div(k, 32 * num_warps) * per_slice
        programs = ceil_div(features, block_n) * ceil_div(rows, rows_each)
        if programs <= facts.num_sms * _direct_programs_at_once(registers, num_warps):
            return LinearConfig(block_n, 32, num_warps, dot=True, direct=True, weights_first=rows_each == DIRECT_GROUP)
    return None


def _direct_programs_at_once(registers: int, num_warps: int) -> int:
    """Programs a multiprocessor that run at once, at most 2: more were slower, a second wave waits for memory again.

    A multiprocessor has 2,048 registers for each thread of a warp, and the kernel takes 40 more than are given here.
    """
    return min(2, 2048 // ((registers + 40) * num_warps))


def _dot_config(rows: int, features: int, k: int, gated: bool, dtype: torch.dtype, facts: DeviceFacts) -> LinearConfig:
    if dtype == torch.float32:
        # Dots on the CUDA cores hold their operands in registers.
        return LinearConfig(block_n=32, block_k=32, num_warps=8, num_stages=2, dot=True)
    if k < 2048 and features <= 8192:
        config = LinearConfig(block_n=16, block_k=64, num_warps=2, num_stages=5)
    elif gated:
        if rows <= 8:
            config = LinearConfig(block_n=64, block_k=128, num_warps=4, num_stages=3)
        else:
            config = LinearConfig(block_n=64, block_k=128, num_warps=8 if rows <= 32 else 4, num_stages=4)
    elif features > 8192:
        if rows <= 32 and k >= 2048:
            config = LinearConfig(block_n=64, block_k=128, num_warps=4, num_stages=4)
        else:
            config = LinearConfig(block_n=128, block_k=64, num_warps=4, num_stages=4)
    elif rows > 16:
        split_k = 1 if features > 4096 else 2
        config = LinearConfig(block_n=64, block_k=128, num_warps=4, num_stages=5, split_k=split_k)
    else:
        config = LinearConfig(block_n=64, block_k=128, num_warps=4, num_stages=4, split_k=4)
    return _fit(replace(config, dot=True, prefetch=256), rows, gated, dtype, facts)


def ring_rows(rows: int) -> int:
    """Rows of x in a ring's stage."""
    return max(8, next_power_of_2(rows))


def multiplies_together(config: LinearConfig, rows: int) -> bool:
    """Whether the four warps of a ring's program are one warp group, which takes tiles straight from shared memory."""
    return config.num_warps == 4 and ring_rows(rows) > 8


def _ring_config(
    rows: int, features: int, k: int, gated: bool, dtype: torch.dtype, facts: DeviceFacts
) -> LinearConfig | None:
    """None where the columns are not whole steps, and for what was no faster.

    A multiprocessor needs some 100 KB on their way to read at full speed. Half of its shared memory for a kernel leaves
    the other half to the next one, which is faster for kernels that are soon over; long ones take more.
    """
    if facts.capability != 90 or dtype not in _MEASURED_DTYPES:
        return None
    each = ring_rows(rows)
    # By rows: features, columns, stages, shares of the columns.
    if gated:
        shapes = {8: (32, 128, 3, 1), 16: (32, 128, 4, 1), 32: (64, 128, 3, 1), 64: (64, 128, 4, 1)}
    elif features > 128 * facts.num_sms:
        shapes = {8: (128, 128, 3, 1), 16: (128, 128, 3, 1), 32: (64, 128, 3, 1), 64: (128, 128, 3, 1)}
    elif features > 64 * facts.num_sms or features < 10 * facts.num_sms:
        shapes = {}  # not measured
    elif features > 32 * facts.num_sms:
        # Attention of 16 rows over long texts takes a third longer after it: its programs find multiprocessors free at
        # different times, it seems, and crowd on some.
        shapes = {8: (32, 128, 8, 1), 32: (64, 128, 8, 1), 64: (64, 128, 6, 1)}
    elif k > 8192:
        shapes = {8: (16, 256, 8, 1), 16: (64, 128, 10, 2), 32: (64, 128, 8, 2), 64: (128, 128, 4, 4)}
    else:
        shapes = {8: (16, 256, 6, 1), 16: (64, 128, 5, 4), 32: (64, 128, 4, 2)}
    if each not in shapes:
        return None
    block_n, block_k, num_stages, split_k = shapes[each]
    steps, left = divmod(k, block_k * split_k)
    if left or steps < 2:
        return None
    num_warps = min(block_n // 16, 4 if each > 16 else 8)
    return LinearConfig(block_n, block_k, num_warps, min(num_stages, steps), dot=True, split_k=split_k, ring=True)


def _fit(config: LinearConfig, rows: int, gated: bool, dtype: torch.dtype, facts: DeviceFacts) -> LinearConfig:
    """As many stages as the device's shared memory holds, at least two."""
    tile_rows = max(16, next_power_of_2(rows)) + config.block_n * (2 if gated else 1)
    stage_bytes = tile_rows * config.block_k * dtype.itemsize
    return replace(config, num_stages=max(2, min(config.num_stages, facts.shared_memory // stage_bytes)))


def is_faster(dtype: torch.dtype, facts: DeviceFacts) -> bool:
    """Whether the table's kernels beat cuBLAS and what comes after it, where both were measured: on an H200.

    After cuBLAS, an activation or a residual is a kernel of its own; it is folded into ours.
    """
    return facts.capability == 90 and dtype in _MEASURED_DTYPES
