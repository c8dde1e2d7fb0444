"""A patched model's drafters, each with its pace for each number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from ..modeling.step_graph import bucket_of
from .draft_model import DraftModelDrafter
from .drafts import MAX_DRAFTED, Drafter, Speculation
from .pace import Pace, PaceStats


class Steady(Pace):
    """Always the largest draft."""

    def choose(self) -> int:
        return self._sizes[-1]

    def stats(self) -> PaceStats:
        return replace(super().stats(), is_on=True)


class Nominal(Pace):
    """Knows nothing of the clock: a round takes what it would where each token of a draft costs a part of a step."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.sizes, drafter.expectation())
        self._costs = {0: 1.0} | {size: drafter.cost(size) for size in drafter.sizes}

    def note(self, size: int, drafted: int, accepted: int, seconds: float | None, rows: int = 1) -> None:
        super().note(size, drafted, accepted, self._costs[size], rows)


class SteadyNominal(Steady, Nominal):
    """Always the largest draft, which takes what it would."""


class Paced:
    """A drafter, and how much it is asked for: what pays for one row may not for eight."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._paces: dict[int | None, Pace] = {}
        self._seeded: list[Pace] = []  # of calls under way
        self._of_seeded_calls = PaceStats()

    @contextmanager
    def pace(self, num_rows: int, is_sampled: bool) -> Iterator[Pace]:
        """The pace of a call with so many rows.

        Sampled text must be the same again with the same seed, and how much is drafted decides which random numbers are
        drawn: such a call has a pace of its own, which goes by what is accepted and by nominal durations.
        """
        chooses = self.drafter.adaptive and not self.drafter.decides
        if not is_sampled:
            bucket = bucket_of(num_rows)
            if bucket not in self._paces:
                kind = Pace if chooses else Steady
                self._paces.setdefault(bucket, kind(self.drafter.sizes, self.drafter.expectation()))
            yield self._paces[bucket]
            return
        pace = Nominal(self.drafter) if chooses else SteadyNominal(self.drafter)
        self._seeded.append(pace)
        try:
            yield pace
        finally:
            self._seeded.remove(pace)
            self._of_seeded_calls = _sum([self._of_seeded_calls, pace.stats()])

    def stats(self) -> PaceStats:
        """Of all numbers of rows together; on where one of them is."""
        each = [pace.stats() for pace in self._paces.values()]
        seeded = [pace.stats() for pace in self._seeded] + [self._of_seeded_calls]
        return replace(_sum([*each, *seeded]), is_on=not each or any(stats.is_on for stats in each))


def _sum(each: Sequence[PaceStats]) -> PaceStats:
    names = [f.name for f in fields(PaceStats) if f.name != "is_on"]
    return PaceStats(**{name: sum(getattr(stats, name) for stats in each) for name in names})


def paced(model: Any, speculation: Speculation) -> Paced:
    """A patched model's drafter of this kind, the same again for one that is asked for again.

    Raises:
        ValueError: it does not fit the model.
    """
    handle = model._hf_turbo
    known = handle.drafters.get(repr(speculation))
    if known is None or not known.drafter.serves(speculation):
        drafter = speculation.attach(model)
        longest, most = drafter.tree_of(drafter.sizes[-1]).max_depth, most_drafted(model)
        if longest > most:
            raise ValueError(
                f"{speculation!r} drafts {longest} tokens in a row; with kv_cache_dtype a block must hold them and one "
                f"more: draft {most} at most, or patch with a larger block_size"
            )
        if isinstance(drafter, DraftModelDrafter):
            drafter.borrowed = handle.borrow(drafter.model)
        known = handle.drafters[repr(speculation)] = Paced(drafter)
    return known


def most_drafted(model: Any) -> int:
    """Tokens that can be drafted in a row for a patched model."""
    pool = model._hf_turbo.pool
    return MAX_DRAFTED if pool.kv_cache_dtype is None else min(MAX_DRAFTED, pool.block_size - 1)
