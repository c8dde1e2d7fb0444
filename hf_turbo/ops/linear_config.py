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
    """The table, by rows of x, output features (of the gate alone when gated), columns, dtype and device.

    Measured on an H200 within a chain of a layer's kernels, not alone: what one leaves in flight the next one meets.
    """
    pdl = facts.capability >= 90
    if rows <= (MAX_GEMV_ROWS if norm else 2):
        return replace(_gemv_config(rows, features, k, gated, dtype), pdl=pdl)
    return replace(_dot_config(rows, features, k, gated, dtype, facts), pdl=pdl)


def choose_expert_config(k: int, dtype: torch.dtype, facts: DeviceFacts) -> LinearConfig:
    """The table for one row a program with an expert of its own."""
    config = LinearConfig(2, 1024, 4) if k > 1024 else LinearConfig(4, 512, 2)
    return replace(_for_dtype(config, dtype), pdl=facts.capability >= 90)


def _gemv_config(rows: int, features: int, k: int, gated: bool, dtype: torch.dtype) -> LinearConfig:
    """Each thread loads 16 bytes of a weight's row a step."""
    if k <= 1024 and features > 16384:
        config = LinearConfig(4, 512, 2)
    elif k <= 1024:
        config = LinearConfig(block_n=2 if gated or features > 600 else 4, block_k=1024, num_warps=4)
    elif k <= 2048:
        config = LinearConfig(block_n=1, block_k=2048, num_warps=8)
    elif features > 65536:
        config = LinearConfig(1, 2048, 4) if rows == 1 else LinearConfig(2, 2048, 8)
    elif gated or features > 4096:
        config = LinearConfig(rows, 2048, 8)
    else:
        config = LinearConfig(2, 1024, 4) if rows == 1 else LinearConfig(4, 512, 2)
    return _for_dtype(config, dtype)


def _for_dtype(config: LinearConfig, dtype: torch.dtype) -> LinearConfig:
    """The same number of bytes a thread for wider dtypes."""
    return replace(config, block_k=config.block_k * 2 // dtype.itemsize)


def _dot_config(rows: int, features: int, k: int, gated: bool, dtype: torch.dtype, facts: DeviceFacts) -> LinearConfig:
    if dtype == torch.float32:
        # Dots on the CUDA cores hold their operands in registers.
        return LinearConfig(block_n=32, block_k=32, num_warps=8, num_stages=2, dot=True)
    block_m = max(16, next_power_of_2(rows))
    if k < 2048 and features <= 8192:
        config = LinearConfig(16, 64 if gated else 128, 2 if gated else 4, 5 if gated else 4)
    elif gated:
        config = LinearConfig(64, 128, 8, 4) if rows > 8 else LinearConfig(64, 128, 4, 3)
    elif features > 65536:
        config = LinearConfig(64, 128, 4, 4) if rows <= 32 else LinearConfig(128, 64, 4, 4)
    elif rows > 16:
        config = LinearConfig(64, 128, 4, 5, split_k=1 if features > 4096 else 2)
    else:
        config = LinearConfig(64, 128, 4, 4, split_k=4)
    config = replace(config, dot=True, prefetch=256)
    tile_rows = block_m + config.block_n * (2 if gated else 1)

    def shared_memory() -> int:
        return config.num_stages * tile_rows * config.block_k * dtype.itemsize

    while shared_memory() > facts.shared_memory and config.num_stages > 2:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def is_faster(
    rows: int, features: int, k: int, gated: bool, norm: bool, dtype: torch.dtype, facts: DeviceFacts
) -> bool:
    """Whether the table's kernel beat cuBLAS where both were measured (an H200); elsewhere the answer is no.

    With what comes before and after it: a norm's kernel of its own, and folded-in activations and residuals.
    """
    return facts.capability == 90 and dtype.itemsize == 2 and not norm
