"""What the linear kernels compute, in plain torch: the oracle of their tests, and what a CPU runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from . import reference_layers
from .norm_spec import RMSNorm

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def apply_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation of this name."""
    return _ACTIVATIONS[kind](x)


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    norm: RMSNorm | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `linear.linear`; any number of rows and weights."""
    if biases is None:
        biases = [None] * len(weights)
    if norm is not None:
        x = reference_layers.normalize(x, norm)
    parts = []
    for weight, bias in zip(weights, biases, strict=True):
        product = x.float() @ weight.float().T
        parts.append((product if bias is None else product + bias.float()).to(x.dtype))
    if activation is not None:
        gate, up = parts
        result = apply_activation(gate, activation) * up
    else:
        result = torch.cat(parts, 1)
    if residual is not None:
        result = residual + result
    return result if out is None else out.copy_(result)


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    repeat: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `linear.expert_linear`."""
    num_experts = len(weight)
    real = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = torch.where(real, expert_ids, 0).long()
    rows = x.repeat_interleave(repeat, 0).float()
    product = torch.einsum("rk,rnk->rn", rows, weight[ids].float())
    if bias is not None:
        product = product + bias[ids].float()
    result = torch.where(real[:, None], product, 0.0).to(x.dtype)
    return result if out is None else out.copy_(result)
