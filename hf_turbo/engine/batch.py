"""Who gets a token in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from .choice import RequestChoice, Taker
from .request import Sequence


@dataclass
class Batch:
    """The sequences that get a token in a step, in the order of the logits.

    Args:
        takers: whose they are, as the chooser wants it.
        goes_on: they are all rows of the cache in order, so the tokens chosen are what the next step computes.
        traced: of the takers, those whose choices leave traces.
    """

    sequences: list[Sequence]
    takers: list[Taker]
    goes_on: bool = False
    traced: list[RequestChoice] = field(default_factory=list)

    def num_steps_left(self) -> int | None:
        """Steps until one of the texts is as long as it may be; None without a limit."""
        left = [sequence.num_left for sequence in self.sequences]
        return min((n for n in left if n is not None), default=None)
