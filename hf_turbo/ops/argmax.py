"""The largest of each row of logits (Triton): many programs a row, where torch has one block of threads."""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import ceil_div, device_facts, next_power_of_2
from .launch import Launcher

_COLUMNS = 4096


@triton.jit
def _load(x_ptr, column, mask):
    """Numbers as float32, NaN above all others, as torch orders them."""
    x = tl.load(x_ptr + column, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _chunk_argmax_kernel(
    x_ptr, values_ptr, indices_ptr, num_columns, stride_x, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    """One program: COLUMNS columns of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    x = _load(x_ptr + row.to(tl.int64) * stride_x, column, column < num_columns)
    value, index = tl.max(x, 0, return_indices=True)
    place = row * tl.num_programs(0) + chunk
    tl.store(values_ptr + place, value)
    tl.store(indices_ptr + place, chunk * COLUMNS + index)


@triton.jit
def _merge_argmax_kernel(values_ptr, indices_ptr, out_ptr, num_chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """One program: the best of one row's chunks, the first of equals."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < num_chunks
    values = tl.load(values_ptr + row * num_chunks + chunk, mask=mask, other=float("-inf"))
    _, best = tl.max(values, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(indices_ptr + row * num_chunks + best).to(tl.int64))


_launch_chunks = Launcher(_chunk_argmax_kernel)
_launch_merge = Launcher(_merge_argmax_kernel)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the largest of each row, the first of equals; int64 `[rows]`.

    Args:
        x: `[rows, columns]`, bf16, fp16 or fp32; the last stride 1.
    """
    values, indices = chunk_argmax(x)
    (rows, chunks), device = values.shape, x.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    pdl, padded = device_facts(device).capability >= 90, next_power_of_2(chunks)
    with torch.cuda.device_of(x):
        _launch_merge(
            (device, chunks, pdl), (rows, 1, 1), values, indices, out, chunks, padded, pdl,
            num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out


def chunk_argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each part of each row and its column, the first of equals; fp32 and int32 `[rows, parts]`.

    NaN counts as infinity.

    Args:
        x: as of `argmax`.
    """
    if x.dim() != 2 or x.stride(1) != 1 or not x.shape[1]:
        raise ValueError(f"x must be [rows, columns] with a last stride of 1, got {list(x.shape)}, {x.stride()}")
    rows, columns = x.shape
    chunks = ceil_div(columns, _COLUMNS)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
    indices = torch.empty(rows, chunks, dtype=torch.int32, device=x.device)
    if not rows:
        return values, indices
    pdl = device_facts(x.device).capability >= 90
    stride = x.stride(0) if rows > 1 else columns
    key = (x.device, x.dtype, columns, stride, x.data_ptr() % 16, pdl)
    with torch.cuda.device_of(x):
        _launch_chunks(
            key, (chunks, rows, 1), x, values, indices, columns, stride, _COLUMNS, pdl, num_warps=8, launch_pdl=pdl
        )
    return values, indices
