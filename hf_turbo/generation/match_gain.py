"""How much a repeated piece of text promises: the longer it is, the more of what followed it follows again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens of a match, from so many on, and how many of 15 tokens that followed it were right on average in texts that a
#: small model wrote to questions of all kinds, each counted as so many observations to begin with.
_PRIOR = ((1, 0.5), (2, 1.9), (3, 3.0), (4, 3.7), (5, 4.8), (7, 6.0), (10, 8.5))
#: The same where a match is known that was there one round ago, 0: none. What follows it may have been said since.
_PRIOR_AHEAD = ((0, 0.35), (1, 0.6), (2, 1.8), (3, 2.0), (4, 2.8), (5, 3.0), (7, 3.2), (10, 6.1))
_PRIOR_WEIGHT = 8.0
#: The weight of what has been seen, after each new observation: about 50 count.
_MEMORY = 0.98
#: A draft must be expected to be so much faster than a plain step.
_MARGIN = 1.02


class MatchGain:
    """Learns how many tokens are accepted after a match of some length.

    Args:
        ahead: in the round after the next, whose own match is not known yet.
    """

    def __init__(self, ahead: bool = False) -> None:
        prior = _PRIOR_AHEAD if ahead else _PRIOR
        self._starts = [start for start, _ in prior]
        self._weights = [_PRIOR_WEIGHT] * len(prior)
        self._sums = [_PRIOR_WEIGHT * accepted for _, accepted in prior]

    def note(self, length: int, accepted: int) -> None:
        """Takes in that so many tokens that had followed a match were right."""
        i = self._bucket(length)
        self._weights[i] = self._weights[i] * _MEMORY + 1
        self._sums[i] = self._sums[i] * _MEMORY + accepted

    def expected(self, length: int) -> float:
        """Tokens that will be right after a match of so many, if enough are drafted; 0 where nothing is known."""
        if length < self._starts[0]:
            return 0.0
        i = self._bucket(length)
        return self._sums[i] / self._weights[i]

    def best_size(self, expected: Sequence[float], costs: dict[int, float]) -> int:
        """The size of draft that promises most tokens a second; 0 where a plain step does.

        Args:
            expected: of each row, tokens that will be right if enough are drafted.
            costs: of rounds by size, in plain steps.
        """
        best, speed = 0, _MARGIN
        for size, cost in costs.items():
            tokens = sum(1 + _of_at_most(size, mean) for mean in expected) / len(expected)
            if tokens / cost > speed:
                best, speed = size, tokens / cost
        return best

    def _bucket(self, length: int) -> int:
        return bisect_right(self._starts, length) - 1


@dataclass
class OpenGuess:
    """What followed a match, while it is not known how much of it is right."""

    match: int
    tokens: list[int]
    num_right: int = 0

    def ends_with(self, token: int) -> bool:
        """Takes in the next token; whether no more can be right."""
        if self.tokens[self.num_right] != token:
            return True
        self.num_right += 1
        return self.num_right == len(self.tokens)


class OpenGuesses:
    """Those of one row."""

    def __init__(self) -> None:
        self._open: list[OpenGuess] = []

    def add(self, match: int, tokens: list[int]) -> None:
        """What would be drafted now, after a match."""
        self._open.append(OpenGuess(match, tokens))

    def read(self, token: int, gain: MatchGain) -> None:
        """Takes in the row's next token; what is known of a guess then goes into the gain."""
        still_open = []
        for guess in self._open:
            if guess.ends_with(token):
                gain.note(guess.match, guess.num_right)
            else:
                still_open.append(guess)
        self._open = still_open


def _of_at_most(size: int, mean: float) -> float:
    """The mean of what is right of `size` tokens, where it is `mean` of any number, each as likely as the next."""
    rate = mean / (1 + mean)
    return rate * (1 - rate**size) / (1 - rate)
