"""Drafts that repeat the text: what followed the last time that it said what it says now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..cache.token_tree import TokenTree
from ..ops.transfer import to_device
from .acceptance import Accepted
from .device_texts import SpareTexts
from .drafts import Draft, DraftContext, DraftSession, chain_sizes, check_num_tokens, cost_to_verify
from .expectation import OfChains
from .lookup_ahead import LookupAhead
from .match_gain import MatchGain, OpenGuesses
from .pace import Pace
from .suffix_index import SuffixIndex
from .texts import Texts


class PromptLookup:
    """Proposes what followed the longest piece of the row's text that is also its end, the most recent one of several.

    For texts that quote: summaries, answers from documents, code that is edited. Costs nothing where nothing repeats.
    (Prompt lookup decoding, A. Saxena 2023; Transformers' `prompt_lookup_num_tokens` takes the first match of a
    fixed length.)

    Args:
        num_tokens: drafted at most, 1 to 63.
        min_match: tokens that a repeated piece has at least.
        adaptive: how many tokens are drafted, if any, follows what has been right after pieces as long as this one.

    Raises:
        ValueError: a number is not allowed.
    """

    reads_hidden = False
    decides = True

    def __init__(self, num_tokens: int = 15, min_match: int = 1, adaptive: bool = True) -> None:
        self.sizes = chain_sizes(check_num_tokens(num_tokens), adaptive)
        if not isinstance(min_match, int) or min_match < 1:
            raise ValueError(f"min_match={min_match!r}: a repeated piece has at least 1 token")
        self.min_match, self.adaptive = min_match, adaptive
        #: What greedy text has taught so far.
        self.gain = MatchGain()
        self._ahead_gain = MatchGain(ahead=True)
        self._spare = SpareTexts(self.sizes[-1], min_match)

    def __repr__(self) -> str:
        return f"PromptLookup(num_tokens={self.sizes[-1]}, min_match={self.min_match}, adaptive={self.adaptive})"

    def attach(self, model: Any) -> PromptLookup:
        """Any model will do; what is right there is learnt for each."""
        return PromptLookup(self.sizes[-1], self.min_match, self.adaptive)

    def cost(self, size: int) -> float:
        """Of verifying it."""
        return cost_to_verify(size + 1)

    def expectation(self) -> OfChains:
        """Of the longest chain."""
        return OfChains(self.sizes[-1])

    def tree_of(self, size: int) -> TokenTree:
        """A chain."""
        return TokenTree.chain(size)

    def serves(self, speculation: Any) -> bool:
        """All of the same numbers do."""
        return True

    def release(self) -> None:
        """Of texts on the device."""
        self._spare.clear()

    def begin(self, context: DraftContext) -> DraftSession:
        """Reads the prompts, left padding left out."""
        if context.goes_ahead and self._spare.can_serve:
            return LookupAhead(context, self, self._ahead_gain, self._spare)
        # What depends on earlier calls would draw other random numbers with the same seed.
        gain = MatchGain() if context.samples else self.gain
        return _Session(context, self, gain)

    def repeats(
        self, rows: Sequence[LookupRow], gain: MatchGain, pace: Pace, size: int
    ) -> list[list[int]]:
        """What followed the last time in each row: as many tokens as promise most; empty where nothing does.

        Args:
            rows: with all of their texts that is known.
            gain: what longer and shorter matches have come to.
            pace: what rounds with as many rows take.
            size: tokens a row at most.

        Returns:
            Lists of one of the drafter's sizes, filled up with -1.
        """
        size = self.choose([row.match if row.match >= self.min_match else 0 for row in rows], gain, pace, size)
        if size == 0:
            return []
        proposals = [row.propose(size, self.min_match) for row in rows]
        return [found or [-1] * size for found in proposals] if any(proposals) else []

    def choose(self, matches: Sequence[int], gain: MatchGain, pace: Pace, size: int) -> int:
        """How many tokens to draft, up to `size`, after matches of so many tokens, one a row; 0: a plain step."""
        if not self.adaptive:
            return size
        costs = {n: pace.relative_cost(n) or self.cost(n) for n in self.sizes if n <= size}
        return gain.best_size([gain.expected(match) for match in matches], costs)


class _Session:
    is_stale = False

    def __init__(self, context: DraftContext, drafter: PromptLookup, gain: MatchGain) -> None:
        self._drafter, self._gain, self._pace = drafter, gain, context.pace
        self._rows = [LookupRow(row) for row in context.prompts()]

    def propose(self, size: int, texts: Texts) -> Draft | None:
        for row, new in zip(self._rows, texts.new, strict=True):
            row.read(new, self._drafter.sizes[-1], self._gain)
        tokens = self._drafter.repeats(self._rows, self._gain, self._pace, size)
        return chain_of(tokens, texts.last) if tokens else None

    def begin_ahead(self, newest: torch.Tensor | None = None) -> None:
        pass

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        pass

    def miss(self) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def close(self) -> None:
        pass


class LookupRow:
    """One row's text, and what would have been drafted lately.

    What would have been right is learnt at each token, drafted or not: it costs a comparison.

    Args:
        tokens: the prompt's.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._index = SuffixIndex(tokens)
        self._num_read = 0
        self._guesses = OpenGuesses()
        #: Tokens of the longest piece that is the text's end and was there before.
        self.match = self._index.match()[0]

    def read(self, new: list[int], num_guessed: int, gain: MatchGain) -> None:
        """Takes in new tokens, and tells how many of those were right that would have been drafted before each.

        Args:
            new: all after the prompt, those included that have been taken in before.
            num_guessed: tokens that would have been drafted.
            gain: learns from it.
        """
        for token in new[self._num_read :]:
            self._guesses.read(token, gain)
            self._index.append(token)
            self._num_read += 1
            self.match = self._index.match()[0]
            if self.match:
                self._guesses.add(self.match, self._index.propose(num_guessed))

    def propose(self, num_tokens: int, min_match: int) -> list[int]:
        """What followed the last time; nothing without a match of so many tokens."""
        return self._index.propose(num_tokens, min_match)


def chain_of(tokens: Sequence[Sequence[int]], last: torch.Tensor) -> Draft:
    """A draft of what `PromptLookup.repeats` has found, after each row's newest token, int64 `[rows]`."""
    chains = torch.cat([last.unsqueeze(1), to_device(tokens, last.device, torch.int64)], dim=1)
    return Draft(TokenTree.chain(len(tokens[0])), chains, sum(token >= 0 for row in tokens for token in row))
