"""What a draft is expected to bring, by what was accepted lately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

# What is thought of a draft before it is known: this rate, as if seen in so many tries.
_PRIOR_RATE = 0.7
_PRIOR_TRIES = 3.0
# The weight of earlier tries after each new one: about 20 count.
_MEMORY = 0.95
# How far the rate of a depth that is no longer drafted moves to that of the depth before, each round.
_DRIFT = 0.05


class Expectation(Protocol):
    """What drafts of some sizes bring."""

    def tokens(self, size: int) -> float:
        """Tokens that a row gets from a round of this size, the model's own one included."""

    def learn(self, size: int, accepted: float, rows: int) -> None:
        """Takes in a round.

        Args:
            accepted: the drafted tokens that were accepted, a row.
        """

    def half_forget(self) -> None:
        """Goes half of the way back to what was thought before anything was known."""


class OfChains:
    """A rate for each depth: of the tokens there once those before them were right.

    A draft of n tokens is expected to give 1 + r1 + r1 r2 + ... tokens, the rates being running averages.

    Args:
        longest: tokens of the longest chain.
    """

    def __init__(self, longest: int) -> None:
        # By depth, from 1 on: the tries that count, and what was accepted of them.
        self._tries = [_PRIOR_TRIES] * longest
        self._hits = [_PRIOR_TRIES * _PRIOR_RATE] * longest

    @property
    def rates(self) -> list[float]:
        return [hits / tries for hits, tries in zip(self._hits, self._tries, strict=True)]

    def tokens(self, size: int) -> float:
        tokens, reached = 1.0, 1.0
        for rate in self.rates[:size]:
            reached *= rate
            tokens += reached
        return tokens

    def learn(self, size: int, accepted: float, rows: int) -> None:
        # Of one row it is known what was tried; of several only the mean, which one rate for all depths explains.
        common = _common_rate(size, accepted) if rows > 1 else None
        tried = 1.0
        for i in range(size):
            hit = tried * common if common is not None else float(i < accepted)
            # A depth that few rows have come to has little to say.
            kept = 1 - (1 - _MEMORY) * tried
            self._tries[i] = self._tries[i] * kept + tried
            self._hits[i] = self._hits[i] * kept + hit
            tried = hit
        for i in range(size, len(self._tries)):
            self._hits[i] += _DRIFT * (self._hits[i - 1] / self._tries[i - 1] * self._tries[i] - self._hits[i])

    def half_forget(self) -> None:
        for i, rate in enumerate(self.rates):
            self._tries[i] = _PRIOR_TRIES
            self._hits[i] = _PRIOR_TRIES * (rate + _PRIOR_RATE) / 2


class OfTrees:
    """What is promised of each tree, times the part of their promises that trees have kept lately.

    Args:
        promised: by size, how many drafted tokens a round is said to accept on average.
    """

    def __init__(self, promised: Mapping[int, float]) -> None:
        self._promised = dict(promised)
        self._tries = _PRIOR_TRIES
        self._kept = _PRIOR_TRIES * _PRIOR_RATE

    @property
    def rate(self) -> float:
        """The part that is kept."""
        return self._kept / self._tries

    def tokens(self, size: int) -> float:
        return 1.0 + self._promised[size] * self.rate if size else 1.0

    def learn(self, size: int, accepted: float, rows: int) -> None:
        self._tries = self._tries * _MEMORY + 1
        self._kept = self._kept * _MEMORY + accepted / self._promised[size]

    def half_forget(self) -> None:
        rate, self._tries = self.rate, _PRIOR_TRIES
        self._kept = _PRIOR_TRIES * (rate + _PRIOR_RATE) / 2


def _common_rate(size: int, accepted: float) -> float:
    """The rate with which a chain of so many tokens has so many accepted on average, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        rate = (low + high) / 2
        expected = rate * (1 - rate**size) / (1 - rate)
        low, high = (rate, high) if expected < accepted else (low, rate)
    return high
