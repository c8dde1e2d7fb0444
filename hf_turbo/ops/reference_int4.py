"""What the INT4 kernels compute, in plain torch: the oracle of their tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .int4_layout import unpack_codes
from .packed_weight import PackedWeight
from .reference_linear import linear


def dequantize(weight: PackedWeight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`[N, columns]` in `dtype`: products in fp32, rounded once."""
    perm, stored = weight.perm, weight.stored_columns(columns)
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


def int4_linear(
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `int4_linear.int4_linear`; any number of weights."""
    dense = [dequantize(weight, x.shape[1], torch.float32) for weight in weights]
    out = linear(x, dense, biases, residual=residual, activation=activation)
    return out if places is None else torch.empty_like(out).index_copy_(1, places.long(), out)


def permute_columns(x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """See `permute_columns.permute_columns`."""
    return x.index_select(1, perm.clamp(min=0)).masked_fill_(perm < 0, 0)
