"""When a loop stops: Transformers' criteria without a wait for the device where they don't need one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class StopRules:
    """Stopping criteria, by what they need.

    Args:
        criteria: what `generate()` made of its arguments.
        device: where the tokens are.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device) -> None:
        self._lengths = [c for c in criteria if type(c) is MaxLengthCriteria]
        self._eos = [c.eos_token_id.to(device) for c in criteria if type(c) is EosTokenCriteria]
        self._others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        #: Rows that are done go on with padding.
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        #: Columns at which everything stops; None without a limit.
        self.max_length = min((c.max_length for c in self._lengths), default=None)

    @property
    def reads_sequences(self) -> bool:
        """Whether a criterion looks at more than the last token."""
        return bool(self._others)

    def is_last(self, length: int) -> bool:
        """Whether a text of so many columns is as long as it may be."""
        return self.max_length is not None and length >= self.max_length

    def remind(self, length: int) -> None:
        """Lets Transformers say once that a text of so many columns is longer than the model was made for."""
        for c in self._lengths:
            if c.max_position_embeddings is not None and length == c.max_position_embeddings + 1:
                c(torch.zeros(1, 1, dtype=torch.long).expand(1, length), None)

    def done(
        self, tokens: torch.Tensor, sequences: Callable[[], torch.Tensor], scores: list[torch.Tensor] | None
    ) -> torch.Tensor | None:
        """Which rows stop here, bool `[rows]`; None where no criterion can say so of a single row.

        Args:
            tokens: the newest tokens, int64 `[rows]`.
            sequences: makes int64 `[rows, length]`, for the criteria that read it.
            scores: of the steps so far, where they are kept.
        """
        done: torch.Tensor | None = None
        for eos in self._eos:
            hit = tokens == eos if eos.numel() == 1 else (tokens.unsqueeze(1) == eos).any(1)
            done = hit if done is None else done | hit
        if self._others:
            ids = sequences()
            done = torch.zeros_like(tokens, dtype=torch.bool) if done is None else done
            for criterion in self._others:
                done = done | criterion(ids, None if scores is None else tuple(scores))
        return done
