"""The promise about a text, as a check: `hf_turbo.bench.promise` has the rule."""

from __future__ import annotations

import torch

from hf_turbo.bench.promise import differences, rounding

__all__ = ["assert_promise", "rounding"]


def assert_promise(
    got: torch.Tensor,
    reference: torch.Tensor,
    logits: torch.Tensor,
    dtype: torch.dtype,
    context: str = "",
    noise: torch.Tensor | None = None,
) -> int:
    """Checks new tokens `[rows, steps]` against the reference's and its logits `[rows, steps, vocab]`.

    Args:
        noise: `[rows, steps]`, how far the reference's own logits are from those in fp32, where that was
            measured: a deep or a peaked model multiplies rounding.

    Returns:
        How many rows differ, each at a near tie.
    """
    found = differences(got, reference, logits.unbind(1), dtype, noise)
    for difference in found:
        assert difference.is_rounding, (
            f"{context}: row {difference.row} differs first at step {difference.step}, where the reference prefers "
            f"its token by {difference.gap:.4f}; rounding explains {difference.limit:.4f}"
        )
    return len(found)
