"""The gated activation of an MLP, `act(gate) * up` (Triton)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import DeviceFacts, ceil_div, device_facts, next_power_of_2
from .launch import Launcher
from .norm import DTYPES

KINDS = ("silu", "gelu_tanh", "gelu")

_MINUS_GELU_SCALE = tl.constexpr(-2 * math.sqrt(2 / math.pi))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))


@dataclass(frozen=True)
class GatedConfig:
    """How the kernel is compiled.

    Args:
        block: columns of a program; a power of two.
        num_warps: Triton's.
        pdl: starts while the kernel before it still runs, and waits for it on the device (compute capability 9.0
            and above).
    """

    block: int
    num_warps: int
    pdl: bool


@lru_cache(maxsize=4096)
def choose_config(rows: int, columns: int, facts: DeviceFacts) -> GatedConfig:
    """16 columns a thread; programs of one warp where there are too few columns to fill the device."""
    small = rows * columns < 4096 * facts.num_sms
    block = min(512 if small else 2048, max(32, next_power_of_2(columns)))
    return GatedConfig(block, num_warps=max(1, block // 512), pdl=facts.capability >= 90)


# fmt: off


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """The activation of float32 numbers."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is the sigmoid of 2u.
        return x / (1.0 + tl.exp((x + 0.044715 * x * x * x) * _MINUS_GELU_SCALE))
    else:
        return x * 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))


@triton.jit
def _gated_kernel(
    gate_ptr, up_ptr, out_ptr, stride_gate, stride_up, stride_out,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < COLUMNS
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0.0)
    activated = _activate(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * stride_out + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


# fmt: on

_launch_gated = Launcher(_gated_kernel)


def gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    *,
    out: torch.Tensor | None = None,
    config: GatedConfig | None = None,
) -> torch.Tensor:
    """`act(gate) * up`; the activation is computed in float32 and rounded before it is multiplied, as torch does.

    Args:
        gate, up: `[rows, columns]`, bf16, fp16 or fp32; any row stride, the last stride 1 (often the halves of one
            projection).
        kind: "silu", "gelu_tanh" (the approximation by tanh) or "gelu" (by erf).
        out: where to write the result, the same shape and dtype, the last stride 1; it may be `gate` or `up`.
            Allocated if None.
        config: overrides the table (for measuring).

    Returns:
        `[rows, columns]` in the dtype of `gate`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if gate.dim() != 2 or gate.dtype not in DTYPES:
        raise ValueError(f"gate must be [rows, columns], bf16, fp16 or fp32, got {list(gate.shape)}, {gate.dtype}")
    if out is None:
        out = gate.new_empty(gate.shape)
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        if tensor.shape != gate.shape or tensor.dtype != gate.dtype or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be {list(gate.shape)}, {gate.dtype}, with a last stride of 1, "
                f"got {list(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
            )
    rows, columns = gate.shape
    if rows == 0:
        return out
    if config is None:
        config = choose_config(rows, columns, device_facts(gate.device))
    strides = (gate.stride(0), up.stride(0), out.stride(0))
    constants = (columns, kind, config.block, config.pdl)
    misaligned = (gate.data_ptr() % 16, up.data_ptr() % 16, out.data_ptr() % 16)
    with torch.cuda.device_of(gate):
        _launch_gated(
            (gate.device, gate.dtype, strides, misaligned, constants, config.num_warps),
            (rows * ceil_div(columns, config.block), 1, 1),
            gate, up, out, *strides, *constants,
            num_warps=config.num_warps, launch_pdl=config.pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return out
