"""Times calls of `generate()` without slowing what it measures."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..patching import patched
from .cases import Case, Variant

#: A step runs at full speed when it takes no more than this times a steady one, and so do the two after it.
FULL_SPEED = 1.3
_STEPS_IN_A_ROW = 3


@dataclass(frozen=True)
class Sample:
    """One turn of a variant: seconds of a steady step and to the first token; the text, `[rows, new]`, on the CPU."""

    step_s: float
    ttft_s: float
    text: torch.Tensor


@dataclass(frozen=True)
class FirstCall:
    """What the first call after patching showed.

    Args:
        ready_s: seconds from before `patch` until the first step at full speed began; None if none did.
        step_s: median step of the call's second half, while each token was handed to the host.
        peak_bytes: the most memory in use beyond what was there before; None on a CPU.
    """

    ready_s: float | None
    step_s: float
    peak_bytes: int | None
    text: torch.Tensor


def clock(device: torch.device) -> Callable[[], float]:
    """The clock of this device: `time.perf_counter`, or `time.thread_time` on a CPU where torch uses one thread.

    The work is all in this thread then, and its time does not grow when other programs want the same core.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def active(model: Any, variant: Variant) -> AbstractContextManager[Any]:
    """A block in which the model is as the variant wants it."""
    return nullcontext() if variant.options is None else patched(model, **variant.options)


def prompts(case: Case, vocab_size: int, device: torch.device) -> torch.Tensor:
    """The case's seeded random prompts, `[batch, prompt]`. Token 0 is padding and left out."""
    seeded = torch.Generator().manual_seed(1)
    return torch.randint(1, vocab_size, (case.batch, case.prompt), generator=seeded).to(device)


def generate(model: Any, ids: torch.Tensor, case: Case, variant: Variant, new: int | None = None, **more: Any) -> Any:
    """One greedy or beam call with exactly `new` (the case's) tokens a row."""
    new = new or case.new
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        num_beams=case.beams,
        **variant.generate_options,
        **more,
    )


def first_call(model: Any, ids: torch.Tensor, case: Case, variant: Variant, began: float) -> FirstCall:
    """The first call after patching, which began at `began` on the device's clock."""
    stamps = Stamps(clock(ids.device))
    text = new_text(generate(model, ids, case, variant, **stamps.options(case)), ids)
    ready, step = full_speed([stamp - began for stamp in stamps.times])
    return FirstCall(ready, step, peak_memory(ids.device), text)


def turn(model: Any, ids: torch.Tensor, case: Case, variant: Variant) -> Sample:
    """One sample from a model that is warm."""
    way = whole_call_turn if ids.device.type == "cuda" else stamped_turn
    return way(model, ids, case, variant)


def whole_call_turn(model: Any, ids: torch.Tensor, case: Case, variant: Variant) -> Sample:
    """For a GPU, where the host may run ahead, and asking for the time of each token would hold it up.

    Only whole calls are timed. A step is what a call of all tokens takes more than one of a few, by the tokens between.
    """
    generate(model, ids, case, variant, case.settled)  # what a call of this length sets up isn't to be timed
    long_s, text = _timed(model, ids, case, variant, case.new)
    short_s, _ = _timed(model, ids, case, variant, case.settled)
    ttft_s, _ = _timed(model, ids, case, variant, 1)
    return Sample((long_s - short_s) / (case.new - case.settled), ttft_s, text)


def stamped_turn(model: Any, ids: torch.Tensor, case: Case, variant: Variant) -> Sample:
    """For a CPU, where nothing runs ahead: a step is the median time between tokens of one call."""
    stamps = Stamps(clock(ids.device))
    start = stamps.now()
    text = new_text(generate(model, ids, case, variant, **stamps.options(case)), ids)
    steps = _between(stamps.times[case.settled - 1 :])
    return Sample(statistics.median(steps), stamps.times[0] - start, text)


def full_speed(stamps: Sequence[float]) -> tuple[float | None, float]:
    """When steps began to run at full speed, and the steady step, from when each token came.

    The steady step is the median of the second half; at full speed are three steps in a row that take at most 1.3
    times as long (or as many as there are).
    """
    steps = _between(stamps)
    steady = statistics.median(steps[len(steps) // 2 :])
    quick = [step <= FULL_SPEED * steady for step in steps]
    in_a_row = min(_STEPS_IN_A_ROW, len(steps))
    starts = range(len(steps) - in_a_row + 1)
    return next((stamps[i] for i in starts if all(quick[i : i + in_a_row])), None), steady


def new_text(sequences: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What follows the prompts, on the CPU."""
    return sequences[:, ids.shape[1] :].cpu()


def clean(device: torch.device) -> None:
    """On a GPU: gives back what nothing holds, and measures the peak from here."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def used_memory(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_memory(device: torch.device) -> int | None:
    """The most bytes in use since `clean`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(model: Any, ids: torch.Tensor, case: Case, variant: Variant, new: int) -> tuple[float, torch.Tensor]:
    now = clock(ids.device)
    synchronize(ids.device)
    start = now()
    sequences = generate(model, ids, case, variant, new)
    synchronize(ids.device)
    return now() - start, new_text(sequences, ids)


def _between(stamps: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(stamps)]


class Stamps(BaseStreamer, StoppingCriteria):
    """Notes when each token comes: as a streamer, or with beams, which can't stream, as a stopping criterion."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.times: list[float] = []
        self._prompt_seen = False

    def options(self, case: Case) -> dict[str, Any]:
        """Arguments for `generate()`."""
        return {"streamer": self} if case.beams == 1 else {"stopping_criteria": StoppingCriteriaList([self])}

    def put(self, value: torch.Tensor) -> None:
        """A streamer is given the prompt first, then each new token."""
        if self._prompt_seen:
            self.times.append(self.now())
        self._prompt_seen = True

    def end(self) -> None: ...

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        synchronize(input_ids.device)
        self.times.append(self.now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
