"""Where a request's texts end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import StoppingCriteriaList

from ..generation.known import criteria_are_known
from ..generation.stopping import StopRules, TokenStops


class Stops(TokenStops):
    """The stopping criteria of one request. Each of its texts is looked at alone, as one row without scores.

    A text that has ended gets no more tokens. (Where several texts are asked for and there is no end-of-text token,
    `generate()` gives those that have ended more of them, which mean nothing.)

    Args:
        criteria: what `generate()` would make of the request.
        device: where the texts are.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device) -> None:
        super().__init__(criteria)
        self._rules = StopRules(criteria, device)
        #: An extra call of every criterion goes unnoticed.
        self.are_known = criteria_are_known(criteria)

    @property
    def read_text(self) -> bool:
        """Whether a criterion looks at more than the last token and the length."""
        return self._rules.reads_sequences

    def keep(self, new: list[int], length: int, text: Callable[[int], torch.Tensor]) -> tuple[list[int], bool]:
        """Those of a text's new tokens that are before its end, its last one included, and whether it has ended.

        Args:
            length: tokens of the text before them, the prompt's included.
            text: makes the text's first so many tokens, int64 `[1, columns]`; called only where `read_text`.
        """
        kept, has_ended = self.cut(new, length, text, lambda count: None)
        for end in range(length + 1, length + len(kept) + 1):
            self._rules.remind(end)
        return kept, has_ended
