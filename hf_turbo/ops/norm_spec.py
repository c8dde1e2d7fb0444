"""What an RMS norm computes, for ops that fold one into their own work."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """`n = x * rsqrt(mean(x^2) + eps)` in float32, then times the weight, in x's dtype.

    Args:
        weight: `[K]` in x's dtype or float32, or None for no weight.
        eps: added to the mean of the squares.
        plus_one: the factor is `1 + weight`, in float32 (Gemma).
        round_first: `n` is rounded to x's dtype before it is multiplied (Llama); otherwise only the product is.

    Raises:
        ValueError: for `plus_one` together with `round_first`; no model means that, and where `1 + weight` would be
            rounded is not defined.
    """

    weight: torch.Tensor | None
    eps: float
    plus_one: bool = False
    round_first: bool = True

    def __post_init__(self) -> None:
        if self.plus_one and self.round_first:
            raise ValueError("RMSNorm with plus_one multiplies in float32: pass round_first=False")
