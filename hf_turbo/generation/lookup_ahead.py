"""Prompt lookup in greedy rounds with the host one behind: drafts are found on the device, the host says how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..cache.token_tree import TokenTree
from .acceptance import Accepted
from .device_texts import CallTexts, DeviceTexts, SpareTexts
from .drafts import Draft, DraftContext
from .match_gain import MatchGain, OpenGuesses
from .texts import Texts

if TYPE_CHECKING:
    from .prompt_lookup import PromptLookup


class LookupAhead:
    """A session whose drafts are the device's; see `DraftSession`.

    When a round is launched, the round before it is still under way. So how much is drafted goes by what has been right
    one round after pieces as long as the last known one, and that is learnt at each round, drafted or not.

    Args:
        context: of the call.
        drafter: says how much is drafted.
        gain: what pieces have come to, one round later.
        spare: where texts on the device come from, and go to afterwards.
    """

    def __init__(self, context: DraftContext, drafter: PromptLookup, gain: MatchGain, spare: SpareTexts) -> None:
        self._drafter, self._gain, self._pace, self._texts = drafter, gain, context.pace, context.texts
        self._held = CallTexts(spare, context.texts, context.lengths, context.max_new)
        self._rows = [_Row() for _ in context.lengths]
        self._is_known = False

    @property
    def is_stale(self) -> bool:
        """Whether the texts have outgrown their room."""
        return self._held.are_outgrown

    def choose(self, size: int) -> int:
        """How many tokens to draft in a round that follows one under way, up to `size`; 0: a plain step.

        What is best for the rows that are furthest behind: the call takes as long as they do.
        """
        rows = [(len(new), row.match) for new, row in zip(self._texts.new, self._rows, strict=True) if not row.is_over]
        behind = min(length for length, _ in rows)
        matches = [match for length, match in rows if length == behind]
        return self._drafter.choose(matches, self._gain, self._pace, size)

    @property
    def num_found(self) -> int:
        """Rows in which something was there before, as far as is known."""
        return sum(row.match > 0 and not row.is_over for row in self._rows)

    def hear(self, following: Sequence[Sequence[int]], done: Sequence[bool]) -> None:
        """Takes in what a round's follower has left, as of `DeviceTexts.find`; the texts have its tokens.

        Args:
            done: rows that have ended.
        """
        for row, new, (_, *tokens, match), is_over in zip(self._rows, self._texts.new, following, done, strict=True):
            row.is_over = is_over
            if not is_over:
                row.read(new, tokens, match, self._gain)
        self._is_known = True

    def propose(self, size: int, texts: Texts) -> Draft | None:
        """A draft of what the device finds; it knows the texts then, also where the answer is none."""
        self._held.fit()
        found = self._held.load()
        if not self._is_known:
            done = [row.is_over or row.has_read(new) for row, new in zip(self._rows, texts.new, strict=True)]
            self.hear(found.tolist(), done)
        size = self.choose(size)
        return Draft(TokenTree.chain(size), found[:, : size + 1], size * self.num_found) if size else None

    def begin_ahead(self, newest: torch.Tensor | None = None) -> DeviceTexts:
        if newest is not None:
            self._held.load(newest)
        return self._held.on_device

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        self._is_known = False
        self._held.fit()

    def miss(self) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._held.select(rows)

    def close(self) -> None:
        self._held.close()


class _Row:
    """What the host has heard of a row."""

    def __init__(self) -> None:
        #: Tokens of the last known piece that was there before.
        self.match = 0
        self.is_over = False
        self._num_read = 0
        self._guesses = OpenGuesses()
        self._is_first = True

    def has_read(self, new: Sequence[int]) -> bool:
        """Whether a round has brought nothing: the row has ended."""
        return len(new) == self._num_read

    def read(self, new: Sequence[int], tokens: list[int], match: int, gain: MatchGain) -> None:
        """Takes in a row's new tokens, all since the prompt, and what the device found after them."""
        for token in new[self._num_read :]:
            self._guesses.read(token, gain)
        self._num_read = len(new)
        if not self._is_first:  # of the first it is not known what there was one round ago
            if match:
                self._guesses.add(self.match, tokens)
            else:
                gain.note(self.match, 0)
        self.match, self._is_first = match, False
