"""What callers see of requests, and the way there: Transformers' own output objects, to whoever waits for them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .request import Request, Sequence, Status

logger = logging.getLogger("hf_turbo")

#: The error of a request that was cancelled. Transformers has no status for it.
CANCELLED = "the request was cancelled"


@dataclass(eq=False)
class Submission:
    """A request, and how much of it has been told.

    Args:
        request: what the engine works on.
        prompt_ids: the prompt as its caller gave it.
        streaming: whether each new token is told, or only the end.
        record_timestamps: whether outputs say when each token came.
        was_refused: the engine could not take the request at all.
    """

    request: Request
    prompt_ids: list[int]
    streaming: bool = False
    record_timestamps: bool = False
    was_refused: bool = False
    #: The ids of the request's sequences, as Transformers names them.
    names: list[str] = field(init=False)
    _num_told: list[int] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)
    _began_at: float = -1.0

    def __post_init__(self) -> None:
        first = self.request.id
        self.names = [first, *(f"{first}__child#{i}" for i in range(self.request.num_sequences - 1))]
        self._num_told = [0 for _ in self.names]

    def news(self) -> list[GenerationOutput]:
        """What there is to tell since the last call: new tokens where they are streamed, and ends."""
        request = self.request
        if self._began_at < 0 and request.status != Status.WAITING:
            self._began_at = time.perf_counter()
        outputs: list[GenerationOutput] = []
        if not (self.streaming or request.is_over or (request.num_sequences > 1 and self._has_ends())):
            return outputs  # as for most, after most steps
        now = time.perf_counter()
        for index, name in enumerate(self.names):
            if index in self._ended:
                continue
            sequence = request.sequences[index] if index < len(request.sequences) else None
            num_tokens = 0 if sequence is None else len(sequence.tokens) - len(request.prompt)
            num_new = num_tokens - self._num_told[index]
            self._num_told[index] = num_tokens
            has_ended = request.is_over or (sequence is not None and sequence.is_done)
            if has_ended:
                self._ended.add(index)
            if has_ended or (self.streaming and num_new):
                outputs.append(self._output(index, name, sequence, now if has_ended else -1.0))
        return outputs

    def _has_ends(self) -> bool:
        return any(sequence.is_done for sequence in self.request.sequences)

    def _output(self, index: int, name: str, sequence: Sequence | None, ended_at: float) -> GenerationOutput:
        request, error = self.request, None
        status = RequestStatus.DECODING if ended_at < 0 else RequestStatus.FINISHED
        if request.status in (Status.FAILED, Status.CANCELLED) and not (sequence is not None and sequence.is_done):
            status = RequestStatus.FAILED
            error = CANCELLED if request.status == Status.CANCELLED else _words(request.error)
        return GenerationOutput(
            request_id=name,
            prompt_ids=list(self.prompt_ids),
            generated_tokens=[] if sequence is None else sequence.new_tokens,
            logprobs=[] if sequence is None else list(sequence.logprobs),
            error=error,
            status=status,
            created_time=request.arrived_at,
            lifespan=(self._began_at, ended_at),
            timestamps=(list(sequence.times) if sequence else []) if self.record_timestamps else None,
        )


def _words(error: Exception | None) -> str:
    """An error as a line; never empty, as that would read as no error."""
    return "" if error is None else str(error) or type(error).__name__


class Handler(NamedTuple):
    """Who gets the outputs of a sequence: called on the event loop, or by the engine's thread where there is none."""

    call: Callable[[GenerationOutput], object]
    loop: asyncio.AbstractEventLoop | None = None


class _Box:
    """Outputs of one sequence that nobody has taken yet."""

    def __init__(self, lock: threading.Lock) -> None:
        self.numbers: deque[int] = deque()
        self.is_over = False
        self.changed = threading.Condition(lock)


class Outbox:
    """Brings outputs to whoever asked for them: a handler, else whoever takes them first. For many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._waiting: OrderedDict[int, GenerationOutput] = OrderedDict()  # oldest first
        self._boxes: dict[str, _Box] = {}
        self._handlers: dict[str, Handler] = {}
        self._is_open = False

    def open(self) -> None:
        """From here on, whoever takes waits for what is still to come."""
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        """Nothing comes any more, as all ends have been delivered. What has come can still be taken."""
        with self._lock:
            self._is_open = False
            self._changed.notify_all()

    def expect(self, names: Iterable[str], handler: Handler | None = None) -> None:
        """Makes places for the outputs of sequences.

        Raises:
            ValueError: a sequence of that name is under way.
        """
        names = list(names)
        with self._lock:
            for name in names:
                if name in self._boxes and not self._boxes[name].is_over:
                    raise ValueError(f"request id {name!r} is taken by a request that is under way")
            for name in names:
                self._boxes.setdefault(name, _Box(self._lock)).is_over = False
                if handler is not None:
                    self._handlers[name] = handler

    def withdraw(self, names: Iterable[str]) -> None:
        """Takes back what `expect` did: the request did not come about. Results of one before it stay."""
        with self._lock:
            for name in names:
                if self._boxes[name].numbers:
                    self._boxes[name].is_over = True
                    self._handlers.pop(name, None)
                else:
                    self._forget(name)

    def knows(self, name: str) -> bool:
        """Whether a sequence of that name is under way, or has outputs that nobody has taken."""
        with self._lock:
            return name in self._boxes

    def handle(self, name: str, handler: Handler) -> None:
        """Lets a handler have the outputs of a sequence, those first that nobody has taken yet."""
        with self._lock:
            self._handle(name, handler)

    def drop(self, name: str) -> bool:
        """Drops the outputs of a sequence, those to come as well; False: there are none, and none will come."""
        with self._lock:
            is_known = name in self._boxes
            if is_known:
                self._handle(name, Handler(_drop))
            return is_known

    def deliver(self, outputs: list[GenerationOutput]) -> None:
        """Brings outputs on their way, each sequence's in their order."""
        handed: list[tuple[Handler, GenerationOutput]] = []
        with self._lock:
            for output in outputs:
                name = output.request_id
                box, handler = self._boxes[name], self._handlers.get(name)
                box.is_over = output.is_finished()
                if handler is not None:
                    handed.append((handler, output))
                    if box.is_over:
                        self._forget(name)
                    continue
                number = next(self._numbers)
                self._waiting[number] = output
                box.numbers.append(number)
                box.changed.notify_all()
            self._hand_over(handed)
            if len(handed) < len(outputs):  # else a thread that waits would take the interpreter from the engine's
                self._changed.notify_all()

    def take(self, name: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest output, or the oldest one of a sequence; None where none comes.

        Args:
            name: of the sequence; None for any.
            timeout: seconds to wait; None for as long as something may come.
        """
        with self._lock:
            number = self._await_any(timeout) if name is None else self._await_one(name, timeout)
            if number is None:
                return None
            output = self._waiting.pop(number)
            box = self._boxes[output.request_id]
            box.numbers.popleft()
            if box.is_over and not box.numbers:
                self._forget(output.request_id)
            return output

    def _await_any(self, timeout: float | None) -> int | None:
        self._changed.wait_for(lambda: self._waiting or not self._is_open, timeout)
        return next(iter(self._waiting), None)

    def _await_one(self, name: str, timeout: float | None) -> int | None:
        box = self._boxes.get(name)
        if box is None:
            return None

        def is_settled() -> bool:  # there is one, or none will come here
            is_gone = self._boxes.get(name) is not box or name in self._handlers
            return bool(box.numbers) or not self._is_open or is_gone

        box.changed.wait_for(is_settled, timeout)
        return box.numbers[0] if box.numbers else None

    def _handle(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler
        box = self._boxes.get(name)
        if box is not None:
            missed = [self._waiting.pop(number) for number in box.numbers]
            box.numbers.clear()
            self._hand_over([(handler, output) for output in missed])
            if box.is_over:
                self._forget(name)
            box.changed.notify_all()

    def _forget(self, name: str) -> None:
        self._handlers.pop(name, None)
        self._boxes.pop(name).changed.notify_all()

    def _hand_over(self, handed: list[tuple[Handler, GenerationOutput]]) -> None:
        """Calls handlers; an event loop is woken once for all that its handlers get."""
        for_loops: dict[asyncio.AbstractEventLoop, list[tuple[Handler, GenerationOutput]]] = {}
        for handler, output in handed:
            if handler.loop is None:
                handler.call(output)
            else:
                for_loops.setdefault(handler.loop, []).append((handler, output))
        for loop, calls in for_loops.items():
            try:
                loop.call_soon_threadsafe(_call_all, loop, calls)
            except RuntimeError:  # it has been closed, and whoever waited there with it
                logger.warning("outputs of %d requests had no event loop left to go to", len(calls))
                for _, output in calls:
                    if output.request_id in self._handlers:  # what is still to come is not told of again
                        self._handlers[output.request_id] = Handler(_drop)


def _call_all(loop: asyncio.AbstractEventLoop, calls: list[tuple[Handler, GenerationOutput]]) -> None:
    for handler, output in calls:
        try:
            handler.call(output)
        except Exception as error:
            loop.call_exception_handler({"message": f"a handler of {output.request_id!r} failed", "exception": error})


def _drop(output: GenerationOutput) -> None:
    """Handles outputs that nobody wants."""
