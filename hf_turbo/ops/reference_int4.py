"""What the INT4 kernels compute, in plain torch: the oracle of their tests."""

from __future__ import annotations

import torch

from .int4_layout import unpack_codes
from .packed_weight import PackedWeight


def dequantize(weight: PackedWeight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`[N, columns]` in `dtype`: products in fp32, rounded once."""
    perm = weight.perm
    stored = columns if perm is None else len(perm)
    codes = unpack_codes(weight.qweight, weight.bits, weight.out_features, stored)
    groups = torch.arange(stored, device=codes.device) // weight.group_size
    zeros: torch.Tensor | int = 1 << (weight.bits - 1)
    if weight.zeros is not None:
        zeros = weight.zeros.float().t()[:, groups]
    values = (weight.scales.float().t()[:, groups] * (codes.float() - zeros)).to(dtype)
    if perm is None:
        return values
    out = values.new_empty(weight.out_features, columns)
    out[:, perm[perm >= 0].long()] = values[:, perm >= 0]
    return out


def int4_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ W.T + bias` with sums in fp32: x `[M, K]`, the result `[M, N]` in x's dtype."""
    product = x.float() @ dequantize(weight, x.shape[1], torch.float32).t()
    return (product if bias is None else product + bias.float()).to(x.dtype)
