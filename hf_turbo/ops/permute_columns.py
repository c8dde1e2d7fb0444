"""Columns of rows in another order (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import ceil_div, device_facts, next_power_of_2
from .launch import Launcher

#: Columns a program.
_BLOCK = 1024
#: The longest rows that a program takes whole, and the number of rows from which on that is faster.
_MAX_ROW = 16384
_MANY_ROWS = 16


@triton.jit(do_not_specialize=["num_columns"])
def _permute_columns_kernel(x_ptr, perm_ptr, out_ptr, num_columns, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: BLOCK columns of one row of the result, whose rows lie in a row."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    source = tl.load(perm_ptr + column, mask=inside, other=-1)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + source, mask=source >= 0, other=0.0)
    tl.store(out_ptr + row * num_columns + column, x, mask=inside)


@triton.jit(do_not_specialize=["num_sources", "num_columns"])
def _permute_rows_kernel(
    x_ptr, perm_ptr, out_ptr, num_sources, num_columns, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a whole row, read in its order and put into the other one in shared memory."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    source = tl.load(perm_ptr + column, mask=column < num_columns, other=-1)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + column, mask=column < num_sources, other=0.0)
    taken = tl.where(source >= 0, tl.gather(x, tl.maximum(source, 0), 0), 0.0)
    tl.store(out_ptr + row * num_columns + column, taken.to(out_ptr.dtype.element_ty), mask=column < num_columns)


_launch_columns = Launcher(_permute_columns_kernel)
_launch_rows = Launcher(_permute_rows_kernel)


def permute_columns(x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """`x[:, perm]`, with zeros where `perm` is -1.

    Args:
        x: `[M, K]`, the last stride 1.
        perm: int32 `[N]`, contiguous.

    Returns:
        `[M, N]` in x's dtype, contiguous.
    """
    if x.ndim != 2 or x.stride(1) != 1 or perm.ndim != 1 or perm.dtype != torch.int32:
        raise ValueError(
            f"x must be [M, K] with a last stride of 1 and perm [N] in int32, got {list(x.shape)}, {x.stride()} and "
            f"{list(perm.shape)}, {perm.dtype}"
        )
    rows, columns = len(x), len(perm)
    out = x.new_empty(rows, columns)
    pdl = device_facts(x.device).capability >= 90
    aligned = tuple(t.data_ptr() % 16 == 0 for t in (x, perm, out))
    longest = max(columns, x.shape[1])
    key = (x.device, x.dtype, x.stride(0), aligned)
    with torch.cuda.device_of(x):
        if rows >= _MANY_ROWS and longest <= _MAX_ROW:
            block = next_power_of_2(longest)
            _launch_rows(
                (*key, block), (rows, 1, 1), x, perm, out, x.shape[1], columns, x.stride(0), block, pdl,
                num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
            )  # fmt: skip
        else:
            _launch_columns(
                key, (ceil_div(columns, _BLOCK), rows, 1), x, perm, out, columns, x.stride(0), _BLOCK, pdl,
                num_warps=4, launch_pdl=pdl,
            )  # fmt: skip
    return out
