"""RMSNorm of rows, with the residual addition before it (Triton)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import DeviceFacts, device_facts, next_power_of_2
from .launch import Launcher
from .norm_spec import RMSNorm

#: Longer rows are read in pieces, twice: they would not fit in the registers.
MAX_COLUMNS_AT_ONCE = 16384

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class NormConfig:
    """How the kernel is compiled.

    Args:
        block: columns that a program holds at a time; a power of two.
        num_warps: Triton's.
        pdl: starts while the kernel before it still runs, and waits for it on the device (compute capability 9.0
            and above).
    """

    block: int
    num_warps: int
    pdl: bool


@lru_cache(maxsize=256)
def choose_config(num_columns: int, facts: DeviceFacts) -> NormConfig:
    """16 columns a thread: two loads of 16 bytes each of bf16, as much as a program can have in flight."""
    block = next_power_of_2(num_columns)
    if block > MAX_COLUMNS_AT_ONCE:
        block = 4096
    return NormConfig(block, num_warps=max(1, min(16, block // 512)), pdl=facts.capability >= 90)


# fmt: off


@triton.jit
def apply_norm_weight(
    n, weight, DTYPE: tl.constexpr, HAS_WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, ROUND_FIRST: tl.constexpr,
):
    """The normalized float32 `n` times its weight, in float32, still to be rounded to DTYPE."""
    if HAS_WEIGHT:
        factor = weight.to(tl.float32)
        if ROUND_FIRST:
            n = n.to(DTYPE).to(tl.float32)
        elif PLUS_ONE:
            factor += 1.0
        n = n * factor
    return n


@triton.jit
def _load_sum(x_ptr, residual_ptr, column, mask, HAS_RESIDUAL: tl.constexpr):
    """A piece of a row, the residual added and rounded, in float32; zeros outside the mask."""
    x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x = (residual + x).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, perm_ptr, eps, stride_x, stride_residual, stride_out,
    COLUMNS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_PERM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program: one row. `sum_ptr`: where x plus the residual goes, rows in a row; `perm_ptr`: which column each of
    the result's is."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    residual_ptr += row * stride_residual
    out_ptr += row * stride_out
    sum_ptr += row * COLUMNS
    first_columns = tl.arange(0, BLOCK)
    if BLOCK >= COLUMNS:
        mask = first_columns < COLUMNS
        weight = 1.0
        if HAS_WEIGHT:
            # A parameter: no kernel of the step writes it, so it need not wait for the kernel before.
            weight = tl.load(weight_ptr + first_columns, mask=mask, other=0.0)
        if HAS_PERM:
            perm = tl.load(perm_ptr + first_columns, mask=mask, other=0)
        if PDL:
            gdc_wait()
        x = _load_sum(x_ptr, residual_ptr, first_columns, mask, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(sum_ptr + first_columns, x.to(DTYPE), mask=mask)
        n = x * tl.rsqrt(tl.sum(x * x, 0) * (1.0 / COLUMNS) + eps)
        y = apply_norm_weight(n, weight, DTYPE, HAS_WEIGHT, PLUS_ONE, ROUND_FIRST)
        if HAS_PERM:
            y = tl.gather(y, perm, 0)
        tl.store(out_ptr + first_columns, y.to(DTYPE), mask=mask)
    else:
        if PDL:
            gdc_wait()
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            column = start + first_columns
            x = _load_sum(x_ptr, residual_ptr, column, column < COLUMNS, HAS_RESIDUAL)
            squares += x * x
        inverse = tl.rsqrt(tl.sum(squares, 0) * (1.0 / COLUMNS) + eps)
        for start in range(0, COLUMNS, BLOCK):
            column = start + first_columns
            mask = column < COLUMNS
            x = _load_sum(x_ptr, residual_ptr, column, mask, HAS_RESIDUAL)
            weight = 1.0
            if HAS_WEIGHT:
                weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
            if HAS_RESIDUAL:
                tl.store(sum_ptr + column, x.to(DTYPE), mask=mask)
            y = apply_norm_weight(x * inverse, weight, DTYPE, HAS_WEIGHT, PLUS_ONE, ROUND_FIRST)
            tl.store(out_ptr + column, y.to(DTYPE), mask=mask)


# fmt: on

_launch_norm = Launcher(_rms_norm_kernel)


def check_norm(norm: RMSNorm, num_columns: int) -> None:
    """Raises ValueError if the norm is not one of rows of `num_columns`."""
    if norm.weight is None:
        return
    if norm.weight.shape != (num_columns,) or norm.weight.stride(0) != 1:
        raise ValueError(
            f"the norm's weight must be [{num_columns}], contiguous, "
            f"got {list(norm.weight.shape)}, strides {norm.weight.stride()}"
        )


def norm_constants(norm: RMSNorm) -> tuple[bool, bool, bool]:
    """HAS_WEIGHT, PLUS_ONE and ROUND_FIRST of `apply_norm_weight`."""
    return norm.weight is not None, norm.plus_one, norm.round_first


def _check_rows(name: str, rows: torch.Tensor, x: torch.Tensor) -> None:
    if rows.shape != x.shape or rows.dtype != x.dtype or rows.stride(1) != 1:
        raise ValueError(
            f"{name} must be {list(x.shape)}, {x.dtype}, with a last stride of 1, "
            f"got {list(rows.shape)}, {rows.dtype}, strides {rows.stride()}"
        )


def rms_norm(
    x: torch.Tensor,
    norm: RMSNorm,
    *,
    residual: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: NormConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalizes the rows of `x`, or of `residual + x`, rounded to x's dtype.

    Args:
        x: `[rows, columns]`, bf16, fp16 or fp32; any row stride, the last stride 1.
        norm: the weight, `[columns]`, and how it is applied.
        residual: `[rows, columns]` in x's dtype, the last stride 1.
        perm: int32 `[columns]`, the order that the result's columns are to have; None: their own.
        out: where to write the result, `[rows, columns]` in x's dtype, the last stride 1; it may be `x` or
            `residual`. Allocated if None.
        config: overrides the table (for measuring).

    Returns:
        The normalized rows; with a residual, also the new residual, `residual + x`.
    """
    if x.dim() != 2 or x.dtype not in DTYPES or x.stride(1) != 1:
        raise ValueError(
            f"x must be [rows, columns], bf16, fp16 or fp32, with a last stride of 1, "
            f"got {list(x.shape)}, {x.dtype}, strides {x.stride()}"
        )
    rows, columns = x.shape
    check_norm(norm, columns)
    if residual is not None:
        _check_rows("residual", residual, x)
    if perm is not None and (perm.shape != (columns,) or perm.dtype != torch.int32):
        raise ValueError(f"perm must be int32 [{columns}], got {list(perm.shape)}, {perm.dtype}")
    if perm is not None and columns > MAX_COLUMNS_AT_ONCE:
        raise ValueError(f"perm takes rows of at most {MAX_COLUMNS_AT_ONCE} columns, got {columns}")
    if out is None:
        out = x.new_empty(rows, columns)
    else:
        _check_rows("out", out, x)
    total = out if residual is None else x.new_empty(rows, columns)
    if rows > 0:
        _launch(x, norm, residual, perm, out, total, config or choose_config(columns, device_facts(x.device)))
    return out if residual is None else (out, total)


def _launch(
    x: torch.Tensor,
    norm: RMSNorm,
    residual: torch.Tensor | None,
    perm: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
    config: NormConfig,
) -> None:
    rows, columns = x.shape
    # What is not there is not read either.
    addend = x if residual is None else residual
    weight = x if norm.weight is None else norm.weight
    strides = (x.stride(0), addend.stride(0), out.stride(0))
    constants = (
        columns, residual is not None, perm is not None, *norm_constants(norm), config.block, config.pdl,
    )  # fmt: skip
    tensors = (x, addend, weight, out, total, x if perm is None else perm)
    misaligned = tuple(tensor.data_ptr() % 16 for tensor in tensors)
    with torch.cuda.device_of(x):
        _launch_norm(
            (x.device, x.dtype, weight.dtype, strides, misaligned, constants, config.num_warps), (rows, 1, 1),
            *tensors, float(norm.eps), *strides, *constants,
            num_warps=config.num_warps, launch_pdl=config.pdl, enable_fp_fusion=True,
        )  # fmt: skip
