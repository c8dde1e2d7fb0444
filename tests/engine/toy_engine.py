"""An engine that computes nothing: known tokens, at the pace and with the failures that a test asks for."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from unittest.mock import patch

from transformers import GenerationConfig

from hf_turbo.engine import manager as manager_module
from hf_turbo.engine.manager import Manager
from hf_turbo.engine.metrics import EngineMetrics
from hf_turbo.engine.request import Status

#: Nothing here takes seconds; a wait that does is one for ever.
SOON = 30.0
PROMPT = [5, 6, 7]


def toy_tokens(prompt, count, index=0):
    """What the toy says after a prompt, in the sequence of that index."""
    return [(sum(prompt) + 7 * k + 31 * index) % 97 + 3 for k in range(count)]


class ToyEngine:
    """Serves up to `max_rows` requests at once, one token each a step.

    Args:
        seconds: that a step takes.
        fails_at: the step that raises.
        bad_id: the request that fails alone, at its second token.
        too_long: a prompt of more tokens than that never fits.
        gate: a semaphore that lets one step through each time it is released; None: all go.
        gap: each sequence of a request ends so many tokens earlier than the one before it.
    """

    def __init__(self, model, limits, seconds=0.0, fails_at=None, bad_id=None, too_long=1000, gate=None, gap=1):
        self.limits = limits
        self.seconds, self.fails_at, self.bad_id, self.too_long, self.gate = seconds, fails_at, bad_id, too_long, gate
        self.gap = gap
        self.metrics = EngineMetrics()
        self.requests = []
        self.num_steps = 0
        self.num_closed = self.num_looks = 0
        self.most_at_once = 0
        self.threads = set()

    @property
    def has_work(self):
        return bool(self.requests)

    def add(self, request):
        if len(request.prompt) > self.too_long:
            request.status, request.error = Status.FAILED, ValueError(f"{len(request.prompt)} tokens never fit")
        else:
            self.requests.append(request)

    def cancel(self, request):
        if not request.is_over:
            self._end(request, Status.CANCELLED)

    def step(self):
        self.threads.add(threading.current_thread())
        if self.gate is not None:
            self.gate.acquire()
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise ArithmeticError("the toy broke")
        time.sleep(self.seconds)
        news = self.requests[: self.limits.max_rows]
        self.most_at_once = max(self.most_at_once, len(news))
        for request in news:
            self._advance(request)
        self.metrics.note_step(0, len(news), len(news), self.seconds, 0.0)
        return news

    def fail_all(self, error):
        failed = self.requests
        for request in list(failed):
            self._end(request, Status.FAILED, error)
        return failed

    def model_may_have_changed(self):
        self.num_looks += 1

    def close(self):
        assert not self.requests
        self.num_closed += 1

    def _advance(self, request):
        request.status = Status.RUNNING
        if len(request.sequences) < request.num_sequences:
            request.fork()
        for sequence in request.live:
            said = len(sequence.new_tokens)
            if said == 1 and request.id == self.bad_id:
                self._end(request, Status.FAILED, KeyError("its processor"))
                return
            sequence.append(toy_tokens(request.prompt, said + 1, sequence.index)[-1], -0.5, time.perf_counter())
            sequence.is_done = said + 1 + self.gap * sequence.index >= request.max_new_tokens
        if all(sequence.is_done for sequence in request.sequences):
            self._end(request, Status.FINISHED)

    def _end(self, request, status, error=None):
        request.status, request.error = status, error
        self.requests = [one for one in self.requests if one is not request]


@contextmanager
def toys_instead(**toy):
    """Engines within the block are toys; gives those that were made."""
    made = []

    def make(model, limits):
        made.append(ToyEngine(model, limits, **toy))
        return made[-1]

    with patch.object(manager_module, "_new_engine", make):
        yield made


def no_thread_left():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("hf_turbo-engine")]


@contextmanager
def managed(model, config=None, start=True, **toy):
    """A started manager over a toy engine, which is `manager.toys[-1]`; ended afterwards, whatever happens."""
    toys = []

    def make(model, limits):
        toys.append(ToyEngine(model, limits, **toy))
        return toys[-1]

    manager = Manager(model, GenerationConfig(max_new_tokens=4), config, make_engine=make)
    manager.toys = toys
    if start:
        manager.start()
    try:
        yield manager
    finally:
        if toy.get("gate") is not None:
            toy["gate"].release(10_000)
        manager.stop(hard_stop=True, timeout=SOON)
        assert not manager.is_running()
        assert all(toy.num_closed == 1 and not toy.requests for toy in toys)


def collect(manager, num):
    """The next results that say a request has ended, by id."""
    ended = {}
    while len(ended) < num:
        output = manager.get_result(timeout=SOON)
        assert output is not None, f"only {sorted(ended)} came"
        if output.is_finished():
            assert output.request_id not in ended
            ended[output.request_id] = output
    return ended
