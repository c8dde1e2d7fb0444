"""How the linear kernels are compiled and spread over a device, and where they beat cuBLAS: a static table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .attention_config import DeviceFacts, ceil_div, next_power_of_2

#: The most rows of x that the kernels take.
MAX_ROWS = 64
#: The most rows that the kernel on the CUDA cores takes, and the only one that folds a norm in.
MAX_GEMV_ROWS = 8


@dataclass(frozen=True)
class LinearConfig:
    """How one linear is compiled and spread over the device.

    Args:
        block_n: rows of a weight (output features) a program.
        block_k: columns a step; a power of two, like `block_n`.
        num_warps, num_stages: Triton's; a GEMV has no stages.
        dot: multiply on the tensor cores; otherwise on the CUDA cores, which takes up to `MAX_GEMV_ROWS` rows.
        split_k: programs that share the columns of one tile; a second kernel adds their sums in order (dot only).
        prefetch: columns whose weights a program asks the L2 cache for before it waits for x (dot with pdl only).
        pdl: start while the kernel before is still running (compute capability 9.0 and above).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    dot: bool = False
    split_k: int = 1
    prefetch: int = 0
    pdl: bool = False


@lru_cache(maxsize=4096)
def choose_config(
    rows: int, features: int, k: int, gated: bool, norm: bool, dtype: torch.dtype, facts: DeviceFacts
) -> LinearConfig:
    """The table, by rows of x, output features (of the gate alone when gated), columns, dtype and device."""
    pdl = facts.capability >= 90
    if rows <= (MAX_GEMV_ROWS if norm else 4):
        return replace(_gemv_config(rows, k, gated, dtype), pdl=pdl)
    return replace(_dot_config(rows, features, k, gated, dtype, facts), pdl=pdl)


def choose_expert_config(k: int, dtype: torch.dtype, facts: DeviceFacts) -> LinearConfig:
    """The table for one row a program with an expert of its own."""
    return replace(_gemv_config(1, k, False, dtype), pdl=facts.capability >= 90)


def _gemv_config(rows: int, k: int, gated: bool, dtype: torch.dtype) -> LinearConfig:
    """Each thread loads 16 bytes of a weight's row a step."""
    columns_per_warp = 32 * (16 // dtype.itemsize)
    if k <= 1024:
        # The whole row in one step.
        block_k = max(next_power_of_2(k), columns_per_warp)
        return LinearConfig(block_n=2, block_k=block_k, num_warps=block_k // columns_per_warp)
    num_warps = 8 if k % (8 * columns_per_warp) == 0 else 4
    block_n = 2 if rows > 1 and not gated else 1
    return LinearConfig(block_n=block_n, block_k=num_warps * columns_per_warp, num_warps=num_warps)


def _dot_config(rows: int, features: int, k: int, gated: bool, dtype: torch.dtype, facts: DeviceFacts) -> LinearConfig:
    if dtype == torch.float32:
        # Dots on the CUDA cores hold their operands in registers.
        return LinearConfig(block_n=32, block_k=32, num_warps=8, num_stages=2, dot=True)
    block_m = max(16, next_power_of_2(rows))
    block_n = 32 if gated or ceil_div(features, 64) < facts.num_sms else 64
    config = LinearConfig(block_n=block_n, block_k=128, num_warps=4, num_stages=4, dot=True, prefetch=256)
    tiles = ceil_div(features, block_n)
    if not gated and tiles < facts.num_sms // 2:
        config = replace(config, split_k=min(8, max(1, facts.num_sms // tiles), ceil_div(k, 4 * config.block_k)))
    tile_rows = block_m + block_n * (2 if gated else 1)

    def shared_memory() -> int:
        return config.num_stages * tile_rows * config.block_k * dtype.itemsize

    while shared_memory() > facts.shared_memory and config.num_stages > 2:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def is_faster(
    rows: int, features: int, k: int, gated: bool, norm: bool, dtype: torch.dtype, facts: DeviceFacts
) -> bool:
    """Whether the table's kernel beat cuBLAS where both were measured (an H200); elsewhere the answer is no."""
    return facts.capability == 90 and dtype.itemsize == 2 and rows <= 4
