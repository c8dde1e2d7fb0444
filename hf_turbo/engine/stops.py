"""Where a request's texts end."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

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
        #: Whether a criterion looks at more than the last token and the length.
        self.read_text = self._rules.reads_sequences
        #: Shorter texts go on unless their last token ends them.
        self._quiet_below = 0.0 if self.read_text else min(self._rules.next_notice, self.max_length or inf)

    def surely_goes_on(self, token: int, length: int) -> bool:
        """Whether a text of so many tokens, this one the last, goes on, and `keep` has nothing to say of it.

        The quick way for the many tokens of which that is so.
        """
        return length < self._quiet_below and token not in self._eos

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
