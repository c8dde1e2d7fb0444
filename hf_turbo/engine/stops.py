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
        criteria: what `generate()` would make of the request; end-of-text tokens best on the host, which reads them.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self._rules = StopRules(criteria, torch.device("cpu"))
        #: An extra call of every criterion goes unnoticed.
        self.are_known = criteria_are_known(criteria)
        #: Whether a criterion looks at more than the last token and the length.
        self.read_text = self._rules.reads_sequences
        #: Shorter texts go on, and `keep` has nothing to say of them, unless their last token is one of `ends`.
        self.quiet_below = 0.0 if self.read_text else min(self._rules.next_notice, self.max_length or inf)

    @property
    def ends(self) -> set[int]:
        """Tokens that end a text."""
        return self._eos

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
