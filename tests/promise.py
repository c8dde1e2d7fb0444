"""What hf_turbo promises of a text, as a check.

In fp32 the tokens equal those of the unpatched model. In bf16 and fp16 they equal it up to rounding: at the
first step that differs, the reference's top-1 to top-2 gap is within rounding. No more can be asked there:
the shape of a batch alone changes how sums are rounded, and a near tie flips. After that step the texts have
different pasts, so nothing about them can be compared.
"""

from __future__ import annotations

import torch

#: "Within rounding" is this many units in the last place of the largest logit.
UNITS = 4


def rounding(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """How far two logits of one step may be apart and still change places in this dtype."""
    return UNITS * torch.finfo(dtype).eps * logits.float().abs().max().item()


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
    assert got.shape == reference.shape == logits.shape[:2], f"{context}: {got.shape}, {reference.shape}"
    if dtype == torch.float32:
        differing = (got != reference).nonzero().tolist()
        assert not differing, f"{context}: fp32 texts differ at {differing[0]}"
        return 0
    differing = 0
    for row in range(len(got)):
        steps = (got[row] != reference[row]).nonzero()
        if not len(steps):
            continue
        differing += 1
        step = steps[0].item()
        here = logits[row, step].float()
        best = here.max() - here[got[row, step]]  # no less than the gap of top-1 to top-2
        limit = rounding(here, dtype) + (0.0 if noise is None else 2 * noise[row, step].item())
        assert best <= limit, (
            f"{context}: row {row} differs first at step {step}, where the reference prefers its token "
            f"by {best:.4f}; rounding explains {limit:.4f}"
        )
    return differing
