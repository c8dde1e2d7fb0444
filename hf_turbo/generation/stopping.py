"""When a loop stops: Transformers' criteria without a wait for the device where they don't need one."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class TokenStops:
    """The same for a row whose tokens are on the host, several at a time.

    Args:
        criteria: what `generate()` made of its arguments.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._eos = {token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.tolist()}
        self._others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        #: Columns of a text at most; None without a limit.
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)

    def ends_with(self, token: int, length: int) -> bool:
        """Whether a text of so many columns ends with its last token, whatever the others are."""
        return token in self._eos or (self.max_length is not None and length >= self.max_length)

    def cut(
        self,
        tokens: list[int],
        length: int,
        text: Callable[[int], torch.Tensor],
        scores: Callable[[int], tuple[torch.Tensor, ...] | None],
    ) -> tuple[list[int], bool]:
        """Those of a row's new tokens that are before its end, and whether that is among them.

        Args:
            length: columns of the row before them.
            text: makes the row's first so many columns, int64 `[1, columns]`.
            scores: of so many new tokens, where they are kept.
        """
        for i, token in enumerate(tokens):
            end = length + i + 1
            ends = self.ends_with(token, end)
            for criterion in self._others:
                ends |= bool(criterion(text(end), scores(i + 1)).item())  # each is asked, as Transformers asks them
            if ends:
                return tokens[: i + 1], True
        return tokens, False


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

    @property
    def next_notice(self) -> float:
        """Columns of the shortest text for which `remind` does something; infinite where it never does."""
        limits = (c.max_position_embeddings for c in self._lengths)
        return min((limit + 1 for limit in limits if limit is not None), default=inf)

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
