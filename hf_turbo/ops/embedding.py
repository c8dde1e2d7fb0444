"""Rows of an embedding (Triton): all of them at once, where torch's kernel goes through few of them one by one."""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .attention_config import ceil_div, device_facts
from .launch import Launcher
from .norm import DTYPES

#: Columns of a program: 16 bytes a thread.
_BLOCK = 512

# fmt: off


@triton.jit
def _embedding_kernel(
    weight_ptr, id_ptr, out_ptr, num_embeddings, stride_weight,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    if PDL:
        gdc_launch_dependents()  # it is a step's first kernel: nothing is there to wait for
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(id_ptr + row).to(tl.int64)
    is_there = (i >= 0) & (i < num_embeddings)
    tl.device_assert(is_there, "an index of an embedding is out of range")
    numbers = tl.load(weight_ptr + i * stride_weight + column, mask=column < tl.where(is_there, COLUMNS, 0), other=0.0)
    tl.store(out_ptr + row * COLUMNS + column, numbers, mask=column < COLUMNS)


# fmt: on

_launch_embedding = Launcher(_embedding_kernel)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`weight[ids]`.

    An index that is out of range fails an assertion on the device, as torch's own kernel has it; nothing outside of
    the weight is read.

    Args:
        weight: `[num_embeddings, columns]`, bf16, fp16 or fp32; any row stride, the last stride 1.
        ids: int64 or int32, of any shape.

    Returns:
        `[*ids.shape, columns]` in the weight's dtype, contiguous.
    """
    if weight.dim() != 2 or weight.dtype not in DTYPES or weight.stride(1) != 1:
        got = f"{list(weight.shape)}, {weight.dtype}, strides {weight.stride()}"
        raise ValueError(
            f"weight must be [num_embeddings, columns], bf16, fp16 or fp32, with a last stride of 1, got {got}"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be int64 or int32, got {ids.dtype}")
    num_embeddings, columns = weight.shape
    out = weight.new_empty(*ids.shape, columns)
    if out.numel() == 0:
        return out
    ids = ids.contiguous()
    constants = (columns, _BLOCK, device_facts(weight.device).capability >= 90)
    special = tuple(t.data_ptr() % 16 for t in (weight, ids, out)), weight.stride(0), num_embeddings
    with torch.cuda.device_of(weight):
        # `debug` is what keeps the assertion; overflows are none of its business.
        _launch_embedding(
            (weight.device, weight.dtype, ids.dtype, special, constants),
            (ids.numel() * ceil_div(columns, _BLOCK), 1, 1),
            weight, ids, out, num_embeddings, weight.stride(0), *constants,
            num_warps=_BLOCK // 256, debug=True, sanitize_overflow=False,
        )  # fmt: skip
    return out
