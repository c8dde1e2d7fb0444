"""Rotary embedding of a long prompt's heads (Triton): read once, written once."""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_config import ceil_div, device_facts
from .launch import Launcher
from .rotary import choose_config, load_rotated, store_pieces

# fmt: off


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_tokens,
    stride_xb, stride_xt, stride_xh, stride_cb, stride_ct, stride_sb, stride_st, stride_ob, stride_ot, stride_oh,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """One program: BLOCK_T tokens of one row times BLOCK_H heads."""
    batch = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    token = (tl.program_id(1) * BLOCK_T + row // BLOCK_H).to(tl.int64)
    head = tl.program_id(0) * BLOCK_H + row % BLOCK_H
    mask = (token < num_tokens) & (head < HEADS)
    first, second, rest = load_rotated(
        x_ptr + batch * stride_xb + token * stride_xt + head * stride_xh,
        cos_ptr + batch * stride_cb + token * stride_ct, sin_ptr + batch * stride_sb + token * stride_st,
        mask, x_ptr, 0.0, DIM, ROTARY_DIM, INTERLEAVED, None,
    )
    out_ptrs = out_ptr + batch * stride_ob + token * stride_ot + head * stride_oh
    store_pieces(out_ptrs, mask, first, second, rest, DIM, ROTARY_DIM, INTERLEAVED)


# fmt: on

_launch_rotate = Launcher(_rotate_kernel)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, rotary_dim: int, interleaved: bool = False
) -> torch.Tensor:
    """Rotates the first `rotary_dim` elements of each head, and copies the others.

    Args:
        x: `[batch, tokens, heads, head_dim]`, bf16, fp16 or fp32; any strides with the last one 1.
        cos, sin: `[batch or 1, tokens, rotary_dim]` in x's dtype or float32, as for `rotary_store_kv`.
        rotary_dim, interleaved: as for `rotary_store_kv`.

    Returns:
        The same shape, contiguous.
    """
    batch, tokens, heads, dim = x.shape
    if not 0 < rotary_dim <= dim or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even, from 2 to the head size {dim}, got {rotary_dim}")
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.shape not in ((batch, tokens, rotary_dim), (1, tokens, rotary_dim)) or angle.stride(2) != 1:
            raise ValueError(f"{name} must be [{batch} or 1, {tokens}, {rotary_dim}], got {list(angle.shape)}")
    if x.stride(3) != 1:
        raise ValueError("the last dimension of x must have stride 1")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = choose_config(tokens, dim, device_facts(x.device))
    strides = (
        *x.stride()[:3], *(s for a in (cos, sin) for s in (a.stride(0) if len(a) > 1 else 0, a.stride(1))),
        *out.stride()[:3],
    )  # fmt: skip
    constants = (heads, dim, rotary_dim, interleaved, config.block_t, config.block_h)
    tensors = (x, cos, sin, out)
    alignment = tuple(t.data_ptr() % 16 for t in tensors), tokens % 16, tokens == 1
    with torch.cuda.device_of(x):
        # No fused multiply-adds: torch rounds every product.
        _launch_rotate(
            (x.device, x.dtype, cos.dtype, strides, alignment, constants, config.num_warps),
            (ceil_div(heads, config.block_h), ceil_div(tokens, config.block_t), batch),
            *tensors, tokens, *strides, *constants, num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out
