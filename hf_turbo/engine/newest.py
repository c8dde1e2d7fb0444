"""The tokens that were chosen last. The host may not know them when the next step is launched."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

import torch

from ..ops.transfer import ints_to_device
from .request import Sequence


class Newest:
    """What a step has chosen, as the next one needs it.

    Args:
        device: where tokens are chosen.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: Int64 `[sequences]`; None before the first step.
        self.tokens: torch.Tensor | None = None
        self._sequences: Many[Sequence] = []

    def put(self, tokens: torch.Tensor, sequences: Many[Sequence]) -> None:
        """Takes in what has been chosen for these sequences."""
        self.tokens, self._sequences = tokens, sequences

    def tokens_of(self, shares: Iterable[tuple[Sequence, int]]) -> torch.Tensor:
        """So many tokens of each sequence after those that are cached, int64 `[total]`.

        Those that the host does not know come from the last choice.
        """
        known: list[int] = []
        order: list[int] = []  # of each token: its place among the newest with the known ones after them
        num_newest = len(self._sequences)
        newest = dict(zip(self._sequences, range(num_newest), strict=True))
        for sequence, num_tokens in shares:
            start, num_known = sequence.num_cached, len(sequence.tokens)
            if start < num_known:
                before = num_newest + len(known)
                known += sequence.tokens[start : start + num_tokens]
                order += range(before, num_newest + len(known))
            if start + num_tokens > num_known:
                order.append(newest[sequence])
        if self.tokens is None or len(known) == len(order):
            return ints_to_device(known, self._device)
        if order == list(range(num_newest)):
            return self.tokens
        sent = ints_to_device(order + known, self._device)  # at once: each transfer costs
        return torch.cat((self.tokens, sent[len(order) :])).index_select(0, sent[: len(order)])
