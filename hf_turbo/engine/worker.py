"""The thread that runs an engine: takes requests between its steps, and sends out what they say."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from queue import Full
from typing import Any

import torch

from .metrics import EngineMetrics
from .outputs import Outbox, Submission
from .request import Request, Status

logger = logging.getLogger("hf_turbo")

#: Seconds that a full queue lets a caller wait, as Transformers does.
_PATIENCE = 10.0

#: Seconds after which an idle thread looks whether it was abandoned.
_NAP = 1.0


class Stop(IntEnum):
    """Whether a thread is to end."""

    NO = 0
    WHEN_DONE = 1
    NOW = 2


class Worker:
    """Runs an engine in a thread of its own. Its methods are for any thread.

    Args:
        make_engine: makes the engine, in the thread, when it starts.
        outbox: where outputs go.
        device: of the model.
        max_queue_size: requests that may wait to be taken by the thread; 0 without a limit.
    """

    def __init__(
        self, make_engine: Callable[[], Any], outbox: Outbox, device: torch.device, max_queue_size: int = 0
    ) -> None:
        self.engine: Any = None
        self.metrics: EngineMetrics | None = None
        self.fatal_error: Exception | None = None
        self._make_engine, self._outbox, self._device = make_engine, outbox, device
        self._max_queue_size = max_queue_size
        self._changed = threading.Condition()
        self._new: deque[list[Submission]] = deque()
        self._cancelled: deque[Submission] = deque()
        self._under_way: dict[str, Submission] = {}
        self._stop = Stop.NO
        self._accepts = True
        self._keeps_engine = False
        self._pausing: list[int] = []  # threads that hold a pause or wait for one
        self._is_paused = False
        self._has_ended = True
        self._autocast: torch.dtype | None = None  # of the thread that started this one
        self._thread: threading.Thread | None = None

    # ---- life

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def was_started(self) -> bool:
        return self._thread is not None

    def build(self) -> None:
        """Makes the engine, if there is none, in the caller's thread: before `start`."""
        if self.engine is None and not self.is_alive:
            self._build()

    def start(self) -> None:
        if self.is_alive:
            if not self._stop:
                logger.warning("the manager's thread is running already")
                return
            self.join()
        self._stop, self._accepts, self._keeps_engine, self.fatal_error = Stop.NO, True, False, None
        kind = self._device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._has_ended = False
        self._outbox.open()
        self._thread = threading.Thread(target=self._run, name="hf_turbo-engine", daemon=True)
        _running.add(self)
        self._thread.start()

    def stop(self, how: Stop, keep_engine: bool = False) -> None:
        """Asks the thread to end; `join` waits for it.

        Raises:
            RuntimeError: the caller holds a pause, so the thread could not end.
        """
        with self._changed:
            if threading.get_ident() in self._pausing:
                raise RuntimeError("stop() within pause(): leave the pause first, the thread can't end while it lasts")
            self._accepts = False
            self._stop = max(self._stop, how)
            self._keeps_engine = keep_engine
            self._changed.notify_all()
        if not self.is_alive:
            self._end(None)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread to end; whether it has."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self.is_alive

    def abandon(self) -> None:
        """Lets the thread end soon, whatever is under way: for the garbage collector, so it takes no lock."""
        self._stop = Stop.NOW

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is computed within the block. What is under way goes on afterwards.

        Raises:
            RuntimeError: there is no thread, or it ended before it could pause.
        """
        me = threading.get_ident()
        with self._changed:
            if self._has_ended:
                raise RuntimeError("pause() needs a manager that has been started")
            self._pausing.append(me)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._is_paused or self._has_ended)
                if not self._is_paused:
                    raise RuntimeError("the manager's thread ended before it could pause") from self.fatal_error
            except BaseException:
                self._resume(me)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._resume(me)

    def _resume(self, thread: int) -> None:
        self._pausing.remove(thread)
        self._changed.notify_all()

    # ---- requests

    def submit(self, group: list[Submission]) -> None:
        """Queues requests that begin together: where one of them can't be served at all, none is.

        Raises:
            RuntimeError: there is no thread to serve them, or none any more.
            queue.Full: the queue was full for ten seconds.
        """
        with self._changed:
            self._check()
            if self._max_queue_size:
                self._changed.wait_for(lambda: self._has_room() or not self._accepts, _PATIENCE)
                self._check()
                if not self._has_room():
                    raise Full(f"{self._max_queue_size} requests are waiting already (max_queue_size)")
            self._new.append(group)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Cancels a request. One that is not under way is no error."""
        with self._changed:
            if request_id in self._under_way:
                self._cancelled.append(self._under_way[request_id])
                self._changed.notify_all()
                return
            for group in self._new:
                for submission in group:
                    if submission.request.id == request_id:
                        group.remove(submission)
                        submission.request.status = Status.CANCELLED
                        self._outbox.deliver(submission.news())
                        return

    def stream(self, name: str) -> None:
        """Lets the request of a sequence tell its tokens as they come."""
        with self._changed:
            waiting = [submission for group in self._new for submission in group]
            for submission in [*waiting, *self._under_way.values()]:
                if name in submission.names:
                    submission.streaming = True

    def _has_room(self) -> bool:
        return sum(map(len, self._new)) < self._max_queue_size

    def _check(self) -> None:
        if self.fatal_error is not None:
            raise RuntimeError(f"the engine has failed and takes no requests: {self.fatal_error}") from self.fatal_error
        if not self._accepts:
            raise RuntimeError("the manager has been stopped and takes no requests; start() it again")

    # ---- the thread

    def _run(self) -> None:
        error: Exception | None = None
        try:
            if self.engine is None:
                self._build()
            while self._turn():
                pass
        except Exception as raised:
            logger.error("the engine has failed", exc_info=True)
            error = raised
        finally:
            self._end(error)
            _running.discard(self)

    def _build(self) -> None:
        with self._computing():
            self.engine = self._make_engine()
            self.metrics = self.engine.metrics

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Not inference mode: what the cache's pool takes here serves other calls of generate(), too.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            if self._device.type == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._device.type, self._autocast))
            yield

    def _turn(self) -> bool:
        """Takes what has been asked for and computes a step; False when the thread is to end."""
        with self._changed:
            if not self._wait_for_work():
                return False
            groups, self._new = self._new, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            self._under_way |= {one.request.id: one for group in groups for one in group}
            self._changed.notify_all()  # there is room in the queue
        with self._computing():  # anew each time: autocast keeps copies of weights, which a pause may have changed
            for group in groups:
                self._add(group)
            for submission in cancelled:
                self.engine.cancel(submission.request)
                self._tell([submission.request])
            if self.engine.has_work:
                self._tell(self.engine.step())
        return True

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when the thread is to end."""
        while True:
            if self._pausing:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self._is_paused = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._pausing)
                self._is_paused = False
                self.engine.model_may_have_changed()
            if self._stop is Stop.NOW:
                return False
            if self._new or self._cancelled or self.engine.has_work:
                return True
            if self._stop:
                return False
            self._changed.wait(_NAP)

    def _add(self, group: list[Submission]) -> None:
        requests = [submission.request for submission in group]
        for submission in group:
            self.engine.add(submission.request)
            submission.was_refused = submission.request.status == Status.FAILED
        if any(submission.was_refused for submission in group):
            for request in requests:
                if not request.is_over:
                    self.engine.cancel(request)
        self._tell([request for request in requests if request.is_over])

    def _tell(self, requests: list[Request]) -> None:
        """Sends out what is new of requests."""
        outputs = []
        for request in requests:
            submission = self._under_way.get(request.id)
            if submission is None or submission.request is not request:
                continue
            if request.is_over:
                with self._changed:
                    del self._under_way[request.id]
            outputs += submission.news()
        self._outbox.deliver(outputs)

    def _end(self, error: Exception | None) -> None:
        """Lets go of everything: whoever still waits is told that nothing comes."""
        reason = error or RuntimeError("the manager was stopped before this request had ended")
        with self._changed:
            self._accepts = False
            self.fatal_error = error or self.fatal_error
            rest = [*self._under_way.values(), *(submission for group in self._new for submission in group)]
            self._under_way, self._new, self._cancelled = {}, deque(), deque()
            engine = self.engine
            if error is not None or not self._keeps_engine:
                self.engine = None
        if engine is not None and rest:
            _quietly(lambda: engine.fail_all(reason))
        for submission in rest:
            if not submission.request.is_over:
                submission.request.status, submission.request.error = Status.FAILED, reason
            self._outbox.deliver(submission.news())
        if engine is not None and self.engine is None:
            _quietly(engine.close)
        self._outbox.close()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()  # callers that wait for room or a pause


def _quietly(act: Callable[[], object]) -> None:
    """Does what must not keep the rest of an end from happening."""
    try:
        act()
    except Exception:
        logger.error("the engine could not be ended cleanly", exc_info=True)


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that computes while the interpreter goes away may crash: ends those that nobody has stopped."""
    for worker in list(_running):
        with worker._changed:
            worker.abandon()
            worker._changed.notify_all()
        worker.join(timeout=5)
