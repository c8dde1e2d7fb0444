"""Which sequences get how many tokens in the next step. Plain Python: no torch, no threads.

The policy in short: there is one order, higher priority first and then first come, first served. Memory is taken from
the end of that order and given to its beginning, and nothing waiting is overtaken. So the first running request gets on
in every step, whatever happens, and every request ends.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .request import Request, Sequence, Status


class Memory(Protocol):
    """What the scheduler needs to know of the cache. Units are whatever the cache counts in."""

    @property
    def available(self) -> int:
        """Units that are free, or held only by what may be evicted."""

    def cost(self, sequence: Sequence, num_tokens: int) -> int:
        """Units to be taken for so many more tokens of a sequence, from 0 on; never less for more tokens.

        0 where its last block has room. Of a block that several sequences share and are all about to write to, each
        takes a copy but one.
        """

    def costs(self, sequences: Many[Sequence]) -> list[int]:
        """What `cost` says of one more token of each of these."""

    def can_ever_hold(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether so many texts, each of so many tokens, would fit with nothing else there and nothing shared."""

    def is_being_computed(self, request: Request) -> bool:
        """Whether more of a waiting request's beginning is about to be cached, by the prompt of one that runs."""

    def find(self, request: Request) -> int:
        """Takes what is cached of a request's beginning into its sequences; returns tokens found, never all of them.

        Sets their `num_cached`. Called when a request is about to be admitted; `release` follows where it does not fit.
        """

    def release(self, request: Request) -> None:
        """Gives up all that a request holds, if anything, and sets its sequences' `num_cached` to 0."""


class Share(NamedTuple):
    """What a sequence gets to compute in a step."""

    sequence: Sequence
    num_tokens: int


@dataclass
class Plan:
    """One step.

    Args:
        shares: at most one a sequence. Empty only where nothing is left to do but to read the last tokens, or where
            something has failed.
        preempted: what has lost its memory, and waits again.
        failed: what ran out of memory with nothing else there; its `error` says so.
    """

    shares: list[Share] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)


class Scheduler:
    """Requests that wait and requests that run, and the next step of those that run.

    The engine's thread alone calls it. After a plan, and before the next, the engine computes the plan's shares: it
    adds to `num_cached` and to the tokens of sequences that miss none any more.

    Args:
        memory: of which `plan` takes nothing but what `find` finds.
        max_tokens: that a step computes.
        max_rows: sequences that run at once; a request counts as all of those it asks for from the beginning.
        max_chunk: tokens of prompts that a step computes while anything decodes, so that nobody who reads along waits
            for another's long prompt; None without a limit.

    Raises:
        ValueError: for limits with which some request could not go on: below 1, or more rows than tokens.
    """

    def __init__(self, memory: Memory, max_tokens: int, max_rows: int, max_chunk: int | None = None) -> None:
        if not 1 <= max_rows <= max_tokens:
            raise ValueError(f"max_rows is from 1 to max_tokens, {max_tokens}: each row gets a token; not {max_rows}")
        if max_chunk is not None and max_chunk < 1:
            raise ValueError(f"max_chunk is at least 1, or None for no limit; not {max_chunk}")
        self._memory = memory
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._max_chunk = max_chunk
        self._waiting: list[Request] = []  # both in order
        self._running: list[Request] = []
        #: What was refused last, how many prompts were under way, and the memory that there was for it.
        self._refused: tuple[Request, int, int] | None = None

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Those that hold no memory, in order."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Those that have been admitted, in order."""
        return tuple(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Lets a request wait; one that could never run fails at once, with a ValueError as its `error`."""
        problem = self._never_fits(request)
        if problem is not None:
            request.status, request.error = Status.FAILED, ValueError(problem)
        else:
            insort(self._waiting, request, key=_place)

    def remove(self, request: Request) -> None:
        """Forgets a request, in whatever state, and gives up what it holds; nothing happens where it is unknown."""
        for requests in (self._waiting, self._running):
            if request in requests:
                requests.remove(request)
                self._memory.release(request)

    def plan(self) -> Plan:
        """The next step: first those that decode, then prompts that have begun, then new ones.

        Who decodes comes first because a token each costs little and somebody reads along. Nothing is admitted in a
        step that had to preempt: what it would take is what was lacking.

        Raises:
            RuntimeError: where a request must give way or fail of which tokens have not been read yet. Nothing is lost:
                read them and plan again.
        """
        draft = _Draft(self._memory, budget=self._max_tokens)
        decoding: list[Sequence] = []
        behind: list[Request] = []
        for request in self._running:
            if len(request.sequences) == 1:  # as `live` and `_decode_next` say; most are so, in every plan
                [sequence] = request.sequences
                length = len(sequence.tokens) + sequence.num_unknown
                if length >= request.max_length or sequence.is_done:
                    continue
                if length - sequence.num_cached == 1:
                    decoding.append(sequence)
                else:
                    behind.append(request)
            elif _decode_next(live := request.live):
                decoding += live
            else:
                behind.append(request)
        if not draft.give_one_each(decoding):
            for request in dict.fromkeys([sequence.request for sequence in decoding]):
                if request.status is Status.RUNNING:  # or it was preempted on the way
                    self._decode(request, request.live, draft)
        if draft.shares and self._max_chunk is not None:
            draft.budget = min(draft.budget, self._max_chunk)
        for request in behind:
            # Whatever is preempted on the way comes later in this loop.
            if request.status is Status.RUNNING:
                self._catch_up(request, draft)
        if not draft.preempted:
            self._admit(sum(request.status is Status.RUNNING for request in behind), draft)
        return Plan(draft.shares, draft.preempted, draft.failed)

    def _decode(self, request: Request, live: list[Sequence], draft: _Draft) -> None:
        """One token for each of a request's live sequences, all or none.

        Where memory lacks, the last in order give theirs, down to the request itself.
        """
        while (cost := draft.cost(live, 1)) > draft.memory_left:
            if self._is_alone(request):
                self._fail(request, cost, draft)
                return
            last = self._running[-1]
            self._preempt(last, draft)
            if last is request:
                return
        draft.give(request, live, 1, cost)

    def _catch_up(self, request: Request, draft: _Draft) -> None:
        """Chunks of what a request's sequences miss, as the budget and the memory allow.

        Where there is no memory for a single token, those after it in order give theirs. Without any after it, it
        keeps what it has and waits.
        """
        live = request.live
        for sequence in live:
            # Of several, each stops one token short: the step that chooses their next tokens takes all of them.
            wanted = min(sequence.num_missing - (len(live) > 1), draft.budget)
            if wanted < 1:
                continue
            while not (num_tokens := draft.fitting(sequence, wanted)) and self._running[-1] is not request:
                self._preempt(self._running[-1], draft)
            if num_tokens:
                draft.give(request, [sequence], num_tokens, draft.cost([sequence], num_tokens))
        if self._is_alone(request) and not draft.shares:
            needed = min(self._memory.cost(sequence, 1) for sequence in live if sequence.num_missing > 1)
            self._fail(request, needed, draft)

    def _admit(self, num_behind: int, draft: _Draft) -> None:
        """Lets waiting requests run, in order, until one does not fit.

        Nothing overtakes that one: it might wait for ever. Where nothing runs the first is let in even if it fits in
        part only, as no more memory will come: a text without a limit may yet end in time. One whose beginning is just
        being computed waits for that, too: what it would gain by running now is computed anyway.

        Args:
            num_behind: running requests of which a prompt is under way.
        """
        while self._waiting and draft.budget:
            request = self._waiting[0]
            if self._num_rows() + request.num_sequences > self._max_rows:
                return
            if num_behind and self._memory.is_being_computed(request):
                return
            if not self._finds_room(request, num_behind, draft):
                return
            self._waiting.remove(request)
            insort(self._running, request, key=_place)
            request.status = Status.RUNNING
            live = request.live
            if not _decode_next(live):
                num_behind += 1
                self._catch_up(request, draft)
            elif live and len(live) <= draft.budget:  # or in the next step
                self._decode(request, live, draft)
            if request.status is Status.RUNNING:
                draft.keep(request, self._needed(request))

    def _finds_room(self, request: Request, num_behind: int, draft: _Draft) -> bool:
        """Whether a waiting request may run; if so, it holds what has been found of its beginning.

        What was refused is looked up again only when there is more memory, or when another prompt has been done, that
        might begin like it.

        Args:
            num_behind: running requests of which a prompt is under way.
        """
        room = draft.memory_left
        if self._running and self._refused is not None:
            refused, num_behind_then, room_then = self._refused
            if request is refused and num_behind == num_behind_then and room <= room_then:
                return False
        found = self._memory.find(request)
        draft.look_again()  # what was found is no part of the memory left any more
        if self._running and self._needed(request) > draft.memory_left:
            self._memory.release(request)
            draft.look_again()
            self._refused = request, num_behind, room
            return False
        self._refused = None
        if not request.num_preempted:
            request.num_found = found
        return True

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Takes a running request's memory; it waits, in its old place in the order, and keeps its tokens."""
        _check_read(request)
        draft.take_back(request)
        self._memory.release(request)
        draft.look_again()
        self._running.remove(request)
        insort(self._waiting, request, key=_place)
        request.status = Status.WAITING
        request.num_preempted += 1
        draft.preempted.append(request)

    def _fail(self, request: Request, cost: int, draft: _Draft) -> None:
        """Ends a request that needs `cost` units more than nothing but itself leaves it."""
        _check_read(request)
        length = max(sequence.length for sequence in request.live)
        request.error = RuntimeError(
            f"request {request.id} has outgrown the cache: {len(request.live)} sequences of up to {length} tokens need "
            f"{cost} more units, {self._memory.available} are available, and no other request holds any; give the "
            "cache more memory, or set max_new_tokens"
        )
        request.status = Status.FAILED
        self.remove(request)
        draft.look_again()
        draft.failed.append(request)

    def _never_fits(self, request: Request) -> str | None:
        """Why a request could not run even alone; None where it could."""
        if request.num_sequences > self._max_rows:
            return f"request {request.id} asks for {request.num_sequences} sequences; {self._max_rows} can run at once"
        num_prompt, num_new = len(request.prompt), request.max_new_tokens or 0
        if self._memory.can_ever_hold(num_prompt + num_new, request.num_sequences):
            return None
        return (
            f"request {request.id} never fits into the cache: {request.num_sequences} sequences of {num_prompt} prompt "
            f"tokens and {num_new} new ones; ask for less, or give the cache more memory"
        )

    def _needed(self, request: Request) -> int:
        """Units for all that a request misses and a token more of each sequence, or the next step might preempt it."""
        return sum(self._memory.cost(sequence, sequence.num_missing + 1) for sequence in request.live)

    def _is_alone(self, request: Request) -> bool:
        return self._running == [request]

    def _num_rows(self) -> int:
        return sum(request.num_sequences for request in self._running)


class _Draft:
    """A plan while it is made: its shares, what they will take of the memory, and what is left of the step.

    Args:
        budget: tokens that may yet be given. Those that are taken back do not return to it: a step may be short, and a
            limit on chunks stays one.
    """

    def __init__(self, memory: Memory, budget: int) -> None:
        self.budget = budget
        self.shares: list[Share] = []
        self.preempted: list[Request] = []
        self.failed: list[Request] = []
        self._memory = memory
        self._costs: dict[Request, int] = {}
        #: Units that are available and neither taken by a share nor kept for a request.
        self.memory_left = memory.available

    def look_again(self) -> None:
        """Memory has been taken or given up."""
        self.memory_left = self._memory.available - sum(self._costs.values())

    def cost(self, sequences: list[Sequence], num_tokens: int) -> int:
        """Units that so many tokens of each sequence will take."""
        if len(sequences) == 1:
            return self._memory.cost(sequences[0], num_tokens)
        return sum([self._memory.cost(sequence, num_tokens) for sequence in sequences])

    def fitting(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of so many tokens the memory left has room for."""
        left = self.memory_left
        if self._memory.cost(sequence, num_tokens) <= left:
            return num_tokens
        return bisect_right(range(1, num_tokens + 1), left, key=lambda number: self._memory.cost(sequence, number))

    def give(self, request: Request, sequences: list[Sequence], num_tokens: int, cost: int) -> None:
        """Gives so many tokens to each of these sequences of a request."""
        for sequence in sequences:
            self.shares.append(Share(sequence, num_tokens))
        self.budget -= num_tokens * len(sequences)
        if cost:
            self._costs[request] = self._costs.get(request, 0) + cost
            self.memory_left -= cost

    def give_one_each(self, sequences: list[Sequence]) -> bool:
        """Gives each of these a token if there is memory for all of them; False: nothing is given."""
        costs = self._memory.costs(sequences)
        total = sum(costs)
        if total > self.memory_left:
            return False
        self.shares += [Share(sequence, 1) for sequence in sequences]
        self.budget -= len(sequences)
        self.memory_left -= total
        for sequence, cost in zip(sequences, costs, strict=True):
            if cost:
                self._costs[sequence.request] = self._costs.get(sequence.request, 0) + cost
        return True

    def keep(self, request: Request, cost: int) -> None:
        """Leaves a request so much of the memory, of which its shares are a part."""
        self.memory_left -= cost - self._costs.get(request, 0)
        self._costs[request] = cost

    def take_back(self, request: Request) -> None:
        """Undoes what a request was given, except for the budget."""
        self.shares = [share for share in self.shares if share.sequence.request is not request]
        self.memory_left += self._costs.pop(request, 0)


def _place(request: Request) -> tuple[int, int]:
    """Sorts requests into their order."""
    return -request.priority, request.order


def _decode_next(live: list[Sequence]) -> bool:
    """Whether each of a request's live sequences misses one token only, the last, after which the next is chosen."""
    return all(sequence.num_missing == 1 for sequence in live)


def _check_read(request: Request) -> None:
    """A request can't be computed again, and may have ended, while the host does not know all of its tokens."""
    num_unknown = sum(sequence.num_unknown for sequence in request.sequences if not sequence.is_done)
    if num_unknown:
        raise RuntimeError(
            f"no memory is left for request {request.id}, and {num_unknown} of its tokens have not been read from the "
            "device; read them, then plan again"
        )
