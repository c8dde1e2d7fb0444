"""How many tokens to draft next, and whether to draft at all: decided by what the last rounds gave and took."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .expectation import Expectation, OfChains

# Seconds are those of the last 8 rounds of a size, and known after 4: the lower quartile, of the first 4 the least, as
# some may include compilation, capture or what else the machine has to do.
_KEPT_SECONDS = 8
_KNOWN_AFTER = 4
_LEAST_SECONDS = 1e-9
# One step in 32 is of the next smaller or larger size or a plain step, whose seconds may have changed or been measured
# badly.
_LOOK_ASIDE = 32
# A draft must be expected to be this much faster than plain steps.
_MARGIN = 1.02
# Speculation stays on for at least 3 rounds.
_LEAST_ROUNDS = 3
# Plain steps between two probes: doubled up to the last, as long as probes fail.
_FIRST_WAIT = 16
_LAST_WAIT = 512
# A new text begins with speculation unless as long a wait has been reached.
_LONG_WAIT = 128


@dataclass(frozen=True)
class PaceStats:
    """What speculation has come to, summed over rows and texts."""

    #: Rounds with a draft, and steps without.
    rounds: int = 0
    plain_steps: int = 0
    #: Tokens that were drafted, those of them that were accepted, and all that were generated.
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    #: Tokens that would have been generated had every round been a plain step.
    row_steps: int = 0
    #: Whether drafts are being made now.
    is_on: bool = True

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were accepted, 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row got from each forward of the model, 0 before the first."""
        return self.tokens / self.row_steps if self.row_steps else 0.0


class Pace:
    """Chooses the length of the next draft for the most tokens a second.

    What a draft is expected to bring (`expectation`), by the seconds that a round of its size takes, is compared with a
    plain step. Where that is better, speculation is switched off, and tried again after 16 plain steps, then after 32
    and so on up to 512 as long as it does not pay.

    Args:
        sizes: how many tokens a draft may have, ascending.
        expectation: of them; None: that of chains.

    Raises:
        ValueError: without sizes, or for ones that do not ascend from 1 or more.
    """

    def __init__(self, sizes: Sequence[int], expectation: Expectation | None = None) -> None:
        self._sizes = tuple(sizes)
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"Draft sizes must ascend from at least 1, not {list(sizes)}.")
        self._first_size = self._sizes[(len(self._sizes) - 1) // 2]
        self._expectation = expectation or OfChains(self._sizes[-1])
        self._seconds: dict[int, deque[float]] = {n: deque(maxlen=_KEPT_SECONDS) for n in (0, *self._sizes)}
        self._is_on = True
        # Since it was switched on: rounds, and by how many plain steps they were faster.
        self._rounds_on = 0
        self._gain = 0.0
        # Since it was switched off: plain steps. How many probes in a row have not paid.
        self._steps_off = 0
        self._failed = 0
        self._counts = PaceStats()

    def choose(self) -> int:
        """How many tokens to draft in the next round; 0: none, a plain step."""
        if not self._is_on:
            return 0
        if not self._is_known(self._first_size):
            return self._first_size
        if not self._is_known(0):
            return 0
        best = self._best()
        turn, place = divmod(self._counts.rounds + self._counts.plain_steps, _LOOK_ASIDE)
        return best if place else self._beside(best, turn)

    def note(self, size: int, drafted: int, accepted: int, seconds: float | None, rows: int = 1) -> None:
        """Takes in what a round gave.

        Args:
            size: how many tokens were asked for; 0 for a plain step, also where nothing could be drafted.
            drafted: how many there were, at most `size` a row, summed over the rows. Those that were asked for and not
                there count as not accepted.
            accepted: how many of them were accepted, summed over the rows.
            seconds: how long the round took; None: that is not known.
            rows: how many rows it had.

        Raises:
            ValueError: for a size that is not one of the sizes, or counts that cannot be.
        """
        if size not in self._seconds:
            raise ValueError(f"A round's size is 0 or one of {list(self._sizes)}, not {size}.")
        if rows < 1 or not 0 <= accepted <= drafted <= size * rows or not 0 <= (seconds or 0) < math.inf:
            what = f"drafted {drafted}, accepted {accepted}, {seconds} seconds, {rows} rows"
            raise ValueError(f"No round of size {size} can have this: {what}.")
        if seconds is not None:
            self._seconds[size].append(seconds)
        self._count(size, drafted, accepted, rows)
        if size:
            self._expectation.learn(size, accepted / rows, rows)
            self._rounds_on += 1
            if self._is_known(size) and self._is_known(0):
                self._gain += 1 + accepted / rows - self._duration(size) / max(self._duration(0), _LEAST_SECONDS)
        elif not self._is_on:
            self._steps_off += 1
        self._switch()

    def new_text(self) -> None:
        """Call where another text begins: durations stay as they are, acceptance is half forgotten."""
        self._expectation.half_forget()
        if self._wait < _LONG_WAIT:
            self._turn_on()

    def stats(self) -> PaceStats:
        """What has been noted so far."""
        return replace(self._counts, is_on=self._is_on)

    def relative_cost(self, size: int) -> float | None:
        """What a round of this size takes, in plain steps; None where either is not known yet."""
        if not self._is_known(size) or not self._is_known(0):
            return None
        return self._duration(size) / max(self._duration(0), _LEAST_SECONDS)

    @property
    def _wait(self) -> int:
        """Plain steps to the next probe."""
        return min(_FIRST_WAIT << max(self._failed - 1, 0), _LAST_WAIT)

    def _count(self, size: int, drafted: int, accepted: int, rows: int) -> None:
        so_far = self._counts
        self._counts = PaceStats(
            rounds=so_far.rounds + (size > 0),
            plain_steps=so_far.plain_steps + (size == 0),
            drafted=so_far.drafted + drafted,
            accepted=so_far.accepted + accepted,
            tokens=so_far.tokens + accepted + rows,
            row_steps=so_far.row_steps + rows,
        )

    def _switch(self) -> None:
        """Off where plain steps are faster, on where the wait is over."""
        if not self._is_on:
            if self._steps_off >= self._wait:
                self._expectation.half_forget()
                self._turn_on()
        elif self._rounds_on >= _LEAST_ROUNDS and not self._pays():
            self._failed = 0 if self._gain > 0 else self._failed + 1
            self._steps_off = 0
            self._is_on = False

    def _turn_on(self) -> None:
        if not self._is_on:
            self._is_on = True
            self._rounds_on, self._gain = 0, 0.0

    def _pays(self) -> bool:
        """Whether drafts are expected to be faster than plain steps, or that is not known yet."""
        if not self._is_known(self._first_size) or not self._is_known(0):
            return True
        return self._speed(self._best()) > self._speed(0) * _MARGIN

    def _best(self) -> int:
        """The fastest of the sizes whose durations are known, those between them and the next one."""
        largest = max(n for n in self._sizes if self._is_known(n))
        beyond = [n for n in self._sizes if n > largest][:1]
        return max([n for n in self._sizes if n <= largest] + beyond, key=self._speed)

    def _beside(self, size: int, turn: int) -> int:
        """The next smaller size, the next larger one and a plain step, with which all are compared, by turns."""
        sizes = (0, *self._sizes)
        place = sizes.index(size)
        return (sizes[place - 1], sizes[min(place + 1, len(sizes) - 1)], 0)[turn % 3]

    def _speed(self, size: int) -> float:
        """Expected tokens a second of a row."""
        return self._expectation.tokens(size) / max(self._duration(size), _LEAST_SECONDS)

    def _is_known(self, size: int) -> bool:
        return len(self._seconds[size]) >= _KNOWN_AFTER

    def _duration(self, size: int) -> float:
        """Expected seconds of a round: as known, or on a line between known sizes, or that of the largest known."""
        if self._is_known(size):
            seconds = sorted(self._seconds[size])
            return seconds[(len(seconds) - 1) // 4]
        below = max(n for n in self._seconds if n < size and self._is_known(n))
        above = min((n for n in self._seconds if n > size and self._is_known(n)), default=None)
        start = self._duration(below)
        if above is None:
            return start
        return start + (self._duration(above) - start) * (size - below) / (above - below)
