"""The operators `torch.ops.hf_turbo.int4_linear` and `int4_dequantize`: a linear whose weight is quantized.

They are operators of torch so that a captured step, `torch.compile` and autograd see one operation with tensors as its
arguments, on any device: `int4_mm`, a product of two dimensions, which a linear is made of as torch's own is of `mm`.
"""

from __future__ import annotations

from typing import Any

import torch

from . import dispatch
from .packed_weight import PackedWeight

_ARGUMENTS = "Tensor qweight, Tensor scales, Tensor? zeros, Tensor? perm"

_library = torch.library.Library("hf_turbo", "DEF")
_library.define(f"int4_linear(Tensor x, {_ARGUMENTS}, Tensor? bias, int bits, int group_size) -> Tensor")
_library.define(
    f"int4_mm(Tensor x, {_ARGUMENTS}, Tensor? bias, int bits, int group_size) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(
    f"int4_dequantize({_ARGUMENTS}, int bits, int group_size, int in_features, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _int4_linear(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    """`x[..., K] @ W.T + bias`: `[..., N]` in x's dtype; see `_int4_mm` for the rest."""
    out = torch.ops.hf_turbo.int4_mm(x.reshape(-1, x.shape[-1]), *weight)
    return out.view(*x.shape[:-1], out.shape[1])


def _int4_mm(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """`x[M, K] @ W.T + bias`: `[M, N]` in x's dtype; see `PackedWeight` for the weight."""
    return dispatch.int4_linear(x, [PackedWeight(qweight, scales, zeros, perm, bits, group_size)], [bias])


def _int4_dequantize(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bits: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`[N, in_features]` in `dtype`."""
    weight = PackedWeight(qweight, scales, zeros, perm, bits, group_size)
    return dispatch.int4_dequantize(weight, in_features, dtype)


_library.impl("int4_linear", _int4_linear, "CompositeImplicitAutograd")
for _key in ("CPU", "CUDA"):
    _library.impl("int4_mm", _int4_mm, _key)
    _library.impl("int4_dequantize", _int4_dequantize, _key)


@torch.library.register_fake("hf_turbo::int4_mm", lib=_library)
def _fake_mm(x, qweight, scales, zeros, perm, bias, bits, group_size):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], scales.shape[1])


@torch.library.register_fake("hf_turbo::int4_dequantize", lib=_library)
def _fake_dequantize(qweight, scales, zeros, perm, bits, group_size, in_features, dtype):  # type: ignore[no-untyped-def]
    return scales.new_empty(scales.shape[1], in_features, dtype=dtype)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, *weight, _, bits, group_size = inputs
    ctx.save_for_backward(*weight)
    ctx.format = bits, group_size, x.shape[-1]


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    """The gradient of x and of the bias; a quantized weight has none."""
    weight = torch.ops.hf_turbo.int4_dequantize(*ctx.saved_tensors, *ctx.format, grad.dtype)
    grad_bias = grad.sum(0) if ctx.needs_input_grad[5] else None
    return grad @ weight, None, None, None, None, grad_bias, None, None


torch.library.register_autograd("hf_turbo::int4_mm", _backward, setup_context=_setup, lib=_library)
