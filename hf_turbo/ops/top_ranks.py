"""The columns of each row's few largest values (Triton): two launches, where `torch.topk` has a dozen."""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import ceil_div, device_facts, next_power_of_2
from .launch import Launcher
from .reference_drafts import check_ranks

#: Columns of a program: each of its 128 threads has 16 of them in registers.
_COLUMNS = 2048
#: Below the key of any value.
_LEAST = tl.constexpr(-(2**63))
_MAX_INT32 = tl.constexpr(2**31 - 1)


@triton.jit
def _keys(x, column):
    """One int64 a value, greater for greater values (float32), and among equals for lower columns; never equal.

    A float's bits, as an integer, are in order where it is positive and in reverse where it is negative.
    """
    x = tl.where(x == 0, 0.0, x)  # both zeros are equal
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ _MAX_INT32, bits)
    bits = tl.where(x != x, _MAX_INT32, bits)
    return (bits.to(tl.int64) << 32) + (column ^ _MAX_INT32)  # a lower column, a greater number


@triton.jit
def _chunk_ranks_kernel(
    x_ptr, keys_ptr, num_columns, stride_x, NUM: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    """One program: the greatest keys of COLUMNS columns of one row, in order; the least possible where it has fewer."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < num_columns
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0).to(tl.float32)
    keys = tl.where(mask, _keys(x, column), _LEAST)
    keys_ptr += (row * tl.num_programs(0) + chunk) * NUM
    for rank in tl.static_range(NUM):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + rank, best)
        keys = tl.where(keys == best, _LEAST, keys)


@triton.jit
def _merge_ranks_kernel(keys_ptr, out_ptr, num_keys, NUM: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr):
    """One program: the columns of the greatest of one row's keys."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * num_keys + place, mask=place < num_keys, other=_LEAST)
    for rank in tl.static_range(NUM):
        best = tl.max(keys, 0)
        tl.store(out_ptr + row * NUM + rank, (best & _MAX_INT32) ^ _MAX_INT32)
        keys = tl.where(keys == best, _LEAST, keys)


_launch_chunks = Launcher(_chunk_ranks_kernel)
_launch_merge = Launcher(_merge_ranks_kernel)


def top_ranks(x: torch.Tensor, num: int) -> torch.Tensor:
    """See `reference_drafts.top_ranks`."""
    check_ranks(x, num)
    rows, columns = x.shape
    out = torch.empty(rows, num, dtype=torch.int64, device=x.device)
    if not rows:
        return out
    chunks = ceil_div(columns, _COLUMNS)
    keys = torch.empty(rows, chunks * num, dtype=torch.int64, device=x.device)
    pdl = device_facts(x.device).capability >= 90
    stride = x.stride(0) if rows > 1 else columns
    key = (x.device, x.dtype, columns, stride, x.data_ptr() % 16, num, pdl)
    with torch.cuda.device_of(x):
        _launch_chunks(
            key, (chunks, rows, 1), x, keys, columns, stride, num, _COLUMNS, pdl,
            num_warps=4, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
        padded = next_power_of_2(chunks * num)
        _launch_merge(
            (x.device, chunks, num, pdl), (rows, 1, 1), keys, out, chunks * num, num, padded, pdl,
            num_warps=min(max(padded // 256, 1), 8), launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return out
