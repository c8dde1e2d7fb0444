"""What a step has brought a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Sequence


@dataclass
class News:
    """Tokens that a sequence has got.

    Args:
        sequence: whose they are.
        tokens: in order. Those after its end count for nothing.
        logprobs: of each; None where they are not asked for.
        failures: by a token's place among them: why its request fails with it, if it stays.
        num_choices: that its request has made for them; those of tokens that do not stay are to be taken back. Fewer
            than tokens where there is nothing to take back.
    """

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float] | None = None
    failures: dict[int, Exception] = field(default_factory=dict)
    num_choices: int = 0
