"""The cosines and sines of rotary embedding (Triton): one launch from positions and frequencies to both."""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import ceil_div, device_facts
from .launch import Launcher
from .norm import DTYPES

JOINS = ("halves", "neighbours", "alone")

_POSITION_DTYPES = (torch.int64, torch.int32, torch.float32)
#: Angles of a program: one a thread, as a sine takes long.
_BLOCK = 128

# fmt: off


@triton.jit
def _angles_kernel(
    frequency_ptr, position_ptr, cos_ptr, sin_ptr, scale, num_rows, num_tokens,
    stride_fb, stride_fj, stride_pb, stride_pt,
    SIZE: tl.constexpr, JOIN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK angles of all, row by row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, j = index // SIZE, index % SIZE
    mask = row < num_rows
    batch, token = row // num_tokens, row % num_tokens
    frequency = tl.load(frequency_ptr + batch * stride_fb + j * stride_fj, mask=mask, other=0.0)
    position = tl.load(position_ptr + batch * stride_pb + token * stride_pt, mask=mask, other=0)
    angle = frequency * position.to(tl.float32)
    cos = (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty)
    if JOIN == "alone":
        first = index
    elif JOIN == "halves":
        first = row * (2 * SIZE) + j
    else:
        first = 2 * index
    tl.store(cos_ptr + first, cos, mask=mask)
    tl.store(sin_ptr + first, sin, mask=mask)
    if JOIN != "alone":
        second = first + (SIZE if JOIN == "halves" else 1)
        tl.store(cos_ptr + second, cos, mask=mask)
        tl.store(sin_ptr + second, sin, mask=mask)


# fmt: on

_launch_angles = Launcher(_angles_kernel)


def rotary_angles(
    frequencies: torch.Tensor, positions: torch.Tensor, *, join: str, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cos(f) * scale` and `sin(f) * scale`, f the products of positions and frequencies (Su et al., 2021).

    Everything is computed in float32 and rounded once, as Transformers' rotary embeddings do; cosine and sine are
    libdevice's, as torch's are.

    Args:
        frequencies: fp32 `[batch, size]`, radians a position; any strides.
        positions: int64, int32 or fp32 `[batch, tokens]`; any strides.
        join: where the `size` numbers of a position stand: "halves" (all of them, then all again), "neighbours"
            (each of them twice) or "alone" (once).
        scale: the attention scaling of YaRN (Peng et al., 2023) and others; 1 for none.
        dtype: of the results: bf16, fp16 or fp32.

    Returns:
        Cosines and sines, both `[batch, tokens, size or 2 * size]`, contiguous.
    """
    if join not in JOINS:
        raise ValueError(f"join must be one of {', '.join(JOINS)}, got {join!r}")
    if frequencies.dim() != 2 or frequencies.dtype != torch.float32:
        got = f"{list(frequencies.shape)}, {frequencies.dtype}"
        raise ValueError(f"frequencies must be [batch, size], float32, got {got}")
    batch, size = frequencies.shape
    if positions.dim() != 2 or len(positions) != batch or positions.dtype not in _POSITION_DTYPES:
        got = f"{list(positions.shape)}, {positions.dtype}"
        raise ValueError(f"positions must be [{batch}, tokens], int64, int32 or float32, got {got}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be bf16, fp16 or fp32, got {dtype}")
    tokens = positions.shape[1]
    columns = size if join == "alone" else 2 * size
    cos, sin = (torch.empty(batch, tokens, columns, dtype=dtype, device=positions.device) for _ in range(2))
    rows = batch * tokens
    if rows * size == 0:
        return cos, sin
    strides = (*frequencies.stride(), *positions.stride())
    constants = (size, join, _BLOCK, device_facts(positions.device).capability >= 90)
    tensors = (frequencies, positions, cos, sin)
    special = tuple(t.data_ptr() % 16 for t in tensors), rows % 16, rows == 1, tokens % 16, tokens == 1
    with torch.cuda.device_of(positions):
        # No fused multiply-adds: torch rounds every product.
        _launch_angles(
            (positions.device, positions.dtype, dtype, strides, special, constants),
            (ceil_div(rows * size, _BLOCK), 1, 1),
            *tensors, float(scale), rows, tokens, *strides, *constants,
            num_warps=_BLOCK // 32, launch_pdl=constants[-1], enable_fp_fusion=False,
        )  # fmt: skip
    return cos, sin
