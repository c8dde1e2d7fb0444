"""The rule that says whether two greedy texts of one model are the same.

In fp32 the tokens are equal. In bf16 and fp16 they are equal up to rounding: at the first step that differs, the
reference prefers its own token by no more than rounding explains. No more can be asked there: the shape of a batch
alone changes how sums are rounded, and a near tie flips. After that step the texts have different pasts, so nothing
about them can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: "Within rounding" is this many units in the last place of the largest logit.
UNITS = 4


@dataclass(frozen=True)
class Difference:
    """The first difference of one row.

    Args:
        row, step: where; steps count new tokens from 0.
        gap: by how much the reference prefers its own choice; at least its top-1 to top-2 gap.
        limit: a gap that rounding does not explain; 0 where nothing is forgiven.
    """

    row: int
    step: int
    gap: float
    limit: float

    @property
    def is_rounding(self) -> bool:
        return self.gap < self.limit


def rounding(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """How far two logits of one step may be apart and still change places in this dtype; 0 in fp32 and wider."""
    info = torch.finfo(dtype)
    return 0.0 if info.bits >= 32 else UNITS * info.eps * logits.float().abs().max().item()


def differences(
    got: torch.Tensor,
    reference: torch.Tensor,
    logits: Sequence[torch.Tensor],
    dtype: torch.dtype,
    noise: torch.Tensor | None = None,
) -> list[Difference]:
    """The first difference of each row that has one.

    Args:
        got, reference: new tokens, `[rows, steps]`, on one device.
        logits: the reference's, `[rows, vocab]` for each step.
        dtype: what the models compute in.
        noise: `[rows, steps]`, how far the reference's own logits are from those in fp32, where that was measured: a
            deep or a peaked model multiplies rounding.

    Raises:
        ValueError: the texts' shapes differ.
    """
    found = []
    for row, step in first_steps(got, reference):
        here = logits[step][row].float()
        limit = rounding(here, dtype)
        if noise is not None and limit:
            limit += 2 * noise[row, step].item()
        found.append(Difference(row, step, (here.max() - here[got[row, step]]).item(), limit))
    return found


def first_steps(got: torch.Tensor, reference: torch.Tensor) -> list[tuple[int, int]]:
    """(row, first step that differs) of each row that has one.

    Raises:
        ValueError: the texts' shapes differ.
    """
    if got.shape != reference.shape:
        raise ValueError(f"the text has the shape {list(got.shape)}, the reference {list(reference.shape)}")
    different = got != reference
    rows = different.any(1).nonzero().flatten().tolist()
    return [(row, int(different[row].nonzero()[0])) for row in rows]


def worst(found: Sequence[Difference]) -> Difference | None:
    """The difference that rounding explains least; None if there is none."""
    return max(found, key=lambda difference: difference.gap - difference.limit, default=None)
