"""What a request is, and how far it has come. Plain Python: no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Any


class Status(IntEnum):
    """Where a request is."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    FAILED = 3
    CANCELLED = 4


@dataclass(eq=False)
class Sequence:
    """One text of a request: the prompt and what has been said.

    Args:
        request: whose it is.
        index: which of the request's.
        tokens: that the host knows.
        num_unknown: tokens after those that have been chosen on the device and not been read yet.
        num_cached: tokens, from the first on, whose keys and values are in the cache, or will be once what has been
            launched is done.
        is_done: it has ended.
        row: of the cache; None where it holds none.
        logprobs: of the new tokens, where they are asked for.
        times: when the host knew each new token, by `time.perf_counter`.
    """

    request: Request
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    num_unknown: int = 0
    num_cached: int = 0
    is_done: bool = False
    row: int | None = None
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens, those included that the host does not know yet."""
        return len(self.tokens) + self.num_unknown

    @property
    def num_missing(self) -> int:
        """Tokens that must be computed before the next one can be chosen; 1 for a text that is being continued."""
        return len(self.tokens) + self.num_unknown - self.num_cached

    @property
    def held_row(self) -> int:
        """The row of the cache that it holds.

        Raises:
            RuntimeError: it holds none.
        """
        if self.row is None:
            raise RuntimeError(f"sequence {self.index} of request {self.request.id} holds no row of the cache")
        return self.row

    @property
    def num_left(self) -> int | None:
        """Tokens that it may yet get; None without a limit."""
        limit = self.request.max_new_tokens
        return None if limit is None else limit - (self.length - len(self.request.prompt))

    @property
    def is_full(self) -> bool:
        """Whether it has as many tokens as it may get, the last of which may not be known yet."""
        return len(self.tokens) + self.num_unknown >= self.request.max_length

    def append(self, token: int, logprob: float | None, when: float) -> None:
        """Takes in one more token that has been said."""
        self.tokens.append(token)
        self.times.append(when)
        if logprob is not None:
            self.logprobs.append(logprob)

    @property
    def new_tokens(self) -> list[int]:
        """What has been said after the prompt."""
        return self.tokens[len(self.request.prompt) :]


@dataclass(eq=False)
class Request:
    """A prompt, and what is asked for.

    A request begins as one sequence. Where several are asked for it becomes so many once its prompt has been computed;
    they share the prompt's blocks, and a step continues all of them that have not ended, or none.

    Args:
        id: the caller's name for it.
        prompt: token ids, at least one.
        max_new_tokens: that each sequence may get; None without a limit.
        num_sequences: texts that are asked for.
        priority: requests with a larger one come first.
        options: how tokens are chosen; the scheduler does not look at it.
        salt: prompts share cached blocks only with those of the same salt.
    """

    id: str
    prompt: list[int]
    max_new_tokens: int | None = 20
    num_sequences: int = 1
    priority: int = 0
    options: Any = None
    salt: str = ""
    status: Status = Status.WAITING
    error: Exception | None = None
    sequences: list[Sequence] = field(default_factory=list)
    #: Requests that came before it, over an engine's life.
    order: int = 0
    num_preempted: int = 0
    #: Prompt tokens that were found in the cache.
    num_found: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    #: A text of fewer tokens goes on, unless its last one is an end token. (For the engine's quick way.)
    quiet_below: float = 0.0
    #: Tokens of each text at most, the prompt's included; infinite without a limit.
    max_length: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt has at least one token")
        if self.num_sequences < 1:
            raise ValueError(f"num_sequences is at least 1, not {self.num_sequences}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is at least 1, or None for no limit; not {self.max_new_tokens}")
        self.max_length = inf if self.max_new_tokens is None else len(self.prompt) + self.max_new_tokens
        if not self.sequences:
            self.sequences = [Sequence(self, tokens=list(self.prompt))]

    @property
    def live(self) -> list[Sequence]:
        """The sequences that go on."""
        return [sequence for sequence in self.sequences if not (sequence.is_done or sequence.is_full)]

    @property
    def is_over(self) -> bool:
        return self.status >= Status.FINISHED

    def fork(self) -> None:
        """Makes the one sequence the first of as many as are asked for, each with the same tokens."""
        first = self.sequences[0]
        for index in range(1, self.num_sequences):
            self.sequences.append(Sequence(self, index, list(first.tokens), first.num_unknown, first.num_cached))
