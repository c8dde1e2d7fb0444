"""A residual block of all Medusa heads in one launch (Triton): in torch it is three or four.

What a block takes is reading its weights, `heads * H * H` numbers, and waiting: for the launch, and for memory once. So
products, bias, activation and sum are one kernel, whose first weights are on their way before the one in front has
ended. One row is multiplied on the CUDA cores, more on the tensor cores.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import ceil_div, device_facts, next_power_of_2
from .launch import Launcher
from .linear_kernels import activate, load_columns, prefetch

#: The most rows: a program holds the sums of all of them.
MAX_ROWS = 64
DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _finish(x, acc, bias, out_ptrs, mask):
    """`x + SiLU(acc + bias)`. It rounds where torch, op by op, would."""
    dtype = out_ptrs.dtype.element_ty
    y = activate((acc + bias).to(dtype).to(tl.float32), "silu").to(dtype)
    tl.store(out_ptrs, (x.to(tl.float32) + y.to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def _one_row_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, stride_xh,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N features of one head; everything is [1, features, columns]."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Features beyond the last read it again: cheaper than a mask on every load.
    feature = head * SIZE + tl.minimum(n, SIZE - 1)
    w_rows = w_ptr + (feature.to(tl.int64) * SIZE)[None, :, None]
    w = load_columns(w_rows, 0, "evict_first", SIZE, BLOCK_K).to(tl.float32)
    bias = tl.load(bias_ptr + feature).to(tl.float32)
    if PDL:
        gdc_wait()
    x_ptr += head * stride_xh
    x_rows = x_ptr + tl.zeros([1, 1, 1], tl.int32)
    own = tl.load(x_ptr + tl.minimum(n, SIZE - 1))
    acc = w * load_columns(x_rows, 0, "evict_last", SIZE, BLOCK_K).to(tl.float32)
    for step in range(1, (SIZE + BLOCK_K - 1) // BLOCK_K):
        w = load_columns(w_rows, step, "evict_first", SIZE, BLOCK_K).to(tl.float32)
        acc += w * load_columns(x_rows, step, "evict_last", SIZE, BLOCK_K).to(tl.float32)
    total = tl.sum(tl.reshape(tl.sum(acc, 2), (1, BLOCK_N)), 0)
    _finish(own, total, bias, out_ptr + head * SIZE + n, n < SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, stride_xr, stride_xh,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N features of one head, all rows; the tile is [features, rows]."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = head * SIZE + tl.minimum(n, SIZE - 1)
    w_rows = w_ptr + (feature.to(tl.int64) * SIZE)[:, None]
    m = tl.arange(0, ROWS)
    x_rows = x_ptr + head * stride_xh + m.to(tl.int64)[:, None] * stride_xr
    bias = tl.load(bias_ptr + feature).to(tl.float32)
    if PDL:
        prefetch(w_rows, 0, SIZE, PREFETCH)
        gdc_wait()
    is_row = m < num_rows
    mask = (n < SIZE)[:, None] & is_row[None, :]
    own = tl.load(tl.trans(x_rows) + n[:, None], mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for step in range((SIZE + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + k, mask=is_row[:, None] & (k < SIZE), other=0.0)
        if SIZE % BLOCK_K == 0:
            w = tl.load(w_rows + k, eviction_policy="evict_first")
        else:
            w = tl.load(w_rows + k, mask=k < SIZE, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, tl.trans(x), acc)
    place = (m.to(tl.int64)[None, :] * tl.num_programs(1) + head) * SIZE + n[:, None]
    _finish(own, acc, bias[:, None], out_ptr + place, mask)


_launch_one_row = Launcher(_one_row_kernel)
_launch_few_rows = Launcher(_few_rows_kernel)


@dataclass(frozen=True)
class BlockConfig:
    """Features a program, columns a step, and Triton's numbers of warps and stages."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


@lru_cache(maxsize=256)
def choose_config(rows: int, size: int) -> BlockConfig:
    """The table, which follows that of linears of the same sizes (`linear_config.py`)."""
    if rows == 1:
        if size <= 1024:
            return BlockConfig(2, next_power_of_2(max(size, 128)), 4)
        return BlockConfig(1, 2048, 8)
    if size < 2048:
        return BlockConfig(16, 64, 2, 5)
    return BlockConfig(64, 64, 4, 4)


def head_block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `reference_heads.head_block`; 1 to 64 rows of bf16 or fp16, the last stride of x 1, the others contiguous.

    The weights must not be written by work that is still under way on the device: on GPUs that can, they are read
    before the kernel in front has ended.

    Raises:
        ValueError: for other shapes, strides or dtypes.
    """
    _check(x, weight, bias)
    (heads, size), rows, device = bias.shape, len(x), x.device
    out = torch.empty(rows, heads, size, dtype=x.dtype, device=device)
    config, pdl = choose_config(rows, size), device_facts(device).capability >= 90
    stride_xh = x.stride(1) if x.dim() == 3 else 0
    grid = (ceil_div(size, config.block_n), heads, 1)
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, bias))
    constants: tuple[object, ...]
    with torch.cuda.device_of(x):
        if rows == 1:
            constants = (size, config.block_n, config.block_k, pdl)
            _launch_one_row(
                (device, x.dtype, stride_xh, aligned, constants), grid, x, weight, bias, out, stride_xh, *constants,
                num_warps=config.num_warps, launch_pdl=pdl, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            padded = max(16, next_power_of_2(rows))
            constants = (size, padded, config.block_n, config.block_k, 256, pdl)
            _launch_few_rows(
                (device, x.dtype, x.stride(0), stride_xh, aligned, constants), grid,
                x, weight, bias, out, rows, x.stride(0), stride_xh, *constants,
                num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl, enable_fp_fusion=True,
            )  # fmt: skip
    return out


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    if bias.dim() != 2 or weight.shape != (*bias.shape, bias.shape[1]):
        raise ValueError(
            f"weight must be [heads, H, H] and bias [heads, H], got {list(weight.shape)} and {list(bias.shape)}"
        )
    shapes = (bias.shape[1:], bias.shape)
    if not 1 <= len(x) <= MAX_ROWS or x.shape[1:] not in shapes or x.stride(-1) != 1:
        raise ValueError(
            f"x must be 1 to {MAX_ROWS} rows of {list(shapes[0])} or {list(shapes[1])} with a last stride of 1, got "
            f"{list(x.shape)}, {x.stride()}"
        )
    if x.dtype not in DTYPES or weight.dtype != x.dtype or bias.dtype != x.dtype:
        raise ValueError(f"all must be bf16 or all fp16, got {x.dtype}, {weight.dtype} and {bias.dtype}")
    if not weight.is_contiguous() or not bias.is_contiguous():
        raise ValueError(f"weight and bias must be contiguous, got strides {weight.stride()} and {bias.stride()}")
