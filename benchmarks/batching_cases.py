"""Requests for `benchmarks.batching`: how long they are, when they come, and what came of them."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from hf_turbo.bench.promise import differences
from hf_turbo.engine.metrics import EngineMetrics
from hf_turbo.engine.outputs import CANCELLED

#: By category of Spec-Bench: its questions, and tokens of the shortest, the quartiles and the longest. Measured on
#: the first turn of each of the 480 questions as a chat for SmolLM2-135M-Instruct, its template's system prompt
#: included. Their mean is 310 tokens.
SPEC_BENCH = {
    "writing": (10, (52, 60, 62, 78, 126)),
    "roleplay": (10, (64, 71, 85, 106, 138)),
    "reasoning": (10, (49, 52, 66, 106, 243)),
    "math": (10, (50, 54, 60, 99, 106)),
    "coding": (10, (47, 52, 56, 63, 227)),
    "extraction": (10, (188, 210, 243, 373, 402)),
    "stem": (10, (48, 54, 68, 73, 92)),
    "humanities": (10, (42, 44, 47, 56, 86)),
    "translation": (80, (46, 64, 83, 97, 170)),
    "summarization": (80, (193, 522, 690, 1029, 1598)),
    "qa": (80, (39, 40, 41, 43, 49)),
    "math_reasoning": (80, (57, 71, 85, 104, 147)),
    "rag": (80, (650, 716, 772, 810, 904)),
}

#: What `counted` looks at.
COUNTERS = ("steps", "rows", "step_seconds", "host_seconds", "preemptions", "asked_tokens", "hit_tokens")


@dataclass(frozen=True)
class Job:
    """A request: its prompt, how many tokens it gets, and when it comes, in seconds after the first one could."""

    prompt: list[int]
    new: int
    due: float = 0.0


@dataclass(frozen=True)
class Load:
    """Requests that were served, what was measured, and how many tokens of each text are to be compared."""

    case: str
    figures: dict[str, Any]
    jobs: Sequence[Job]
    outputs: Sequence[Any]
    longest: int = 512


def tokens(count: int, vocabulary: int, seed: str) -> list[int]:
    """Random token ids; 0 is padding and left out."""
    return random.Random(seed).choices(range(1, vocabulary), k=count)


def same_length(count: int, prompt: int, new: int, vocabulary: int, seed: str) -> list[Job]:
    """Distinct prompts of one length, all there at once."""
    return [Job(tokens(prompt, vocabulary, f"{seed}/{i}"), new) for i in range(count)]


def same_start(count: int, shared: int, own: int, new: int, vocabulary: int) -> list[Job]:
    """Prompts that begin with the same tokens, all there at once."""
    start = tokens(shared, vocabulary, "shared")
    return [Job(start + tokens(own, vocabulary, f"own{i}"), new) for i in range(count)]


def mixed(
    count: int, mean_new: float, most_new: int, vocabulary: int, seed: str, rate: float | None = None
) -> list[Job]:
    """Requests with the prompt lengths of Spec-Bench.

    Args:
        mean_new, most_new: as of `new_tokens`.
        seed: of the token ids alone: lengths and arrivals are the same for every seed.
        rate: of a Poisson process, requests a second; None: all are there at once.
    """
    lengths, news, gaps = random.Random("lengths"), random.Random("new"), random.Random("gaps")
    dues = [0.0] * count if rate is None else list(accumulate(gaps.expovariate(rate) for _ in range(count)))
    return [
        Job(tokens(prompt_length(lengths), vocabulary, f"{seed}/{i}"), new_tokens(news, mean_new, most_new), due)
        for i, due in enumerate(dues)
    ]


def prompt_length(source: random.Random) -> int:
    """A length of Spec-Bench's: a category by how many questions it has, then linear between its quartiles."""
    counts = [count for count, _ in SPEC_BENCH.values()]
    ((_, lengths),) = source.choices(list(SPEC_BENCH.values()), counts)
    quarter, part = divmod(source.random() * 4, 1)
    low, high = lengths[int(quarter)], lengths[int(quarter) + 1]
    return round(low + (high - low) * part)


def new_tokens(source: random.Random, mean: float, most: int) -> int:
    """How long a text gets: exponential, cut off at `most`, and of that mean with the cut.

    Raises:
        ValueError: the mean is not between 1 and half of `most`; beyond that hardly anything is left to chance.
    """
    if not 1 <= mean <= most / 2:
        raise ValueError(f"a mean of {mean} new tokens of at most {most}: it is from 1 to half of that")
    scale = mean
    for _ in range(50):  # a cut exponential's mean is scale * (1 - exp(-most / scale))
        scale = mean / (1 - math.exp(-most / scale))
    return max(1, min(most, round(source.expovariate(1 / scale))))


def serve(manager: Any, jobs: Sequence[Job], streaming: bool = False) -> tuple[float, list[Any]]:
    """Has a manager serve requests: a thread adds each when it is due, this one takes the results.

    Returns:
        When it began (`time.perf_counter`), and the `GenerationOutput`s in the order of the requests.

    Raises:
        RuntimeError: a request has failed or is too short, or the manager has failed; or a request of another load
            has ended meanwhile.
    """
    began = time.perf_counter()

    def add(job: Job) -> str:
        time.sleep(max(began + job.due - time.perf_counter(), 0.0))
        return manager.add_request(job.prompt, max_new_tokens=job.new, record_timestamps=True, streaming=streaming)

    pool = ThreadPoolExecutor(1)
    futures = [pool.submit(add, job) for job in jobs]
    try:
        ended = collect(manager, len(jobs), futures)
        names = [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
    if others := ended.keys() - names:
        raise RuntimeError(f"{len(others)} other texts ended while these were served: they need more tokens")
    outputs = [ended[name] for name in names]
    check_lengths(jobs, outputs)
    return began, outputs


def check_lengths(jobs: Sequence[Job], outputs: Sequence[Any]) -> None:
    """Looks whether every text is as long as it was to be.

    Raises:
        RuntimeError: one is not.
    """
    for job, output in zip(jobs, outputs, strict=True):
        if len(output.generated_tokens) != job.new:
            raise RuntimeError(f"{output.request_id} has {len(output.generated_tokens)} tokens, not {job.new}")


def collect(manager: Any, count: int, futures: Sequence[Future[str]] = ()) -> dict[str, Any]:
    """The last results of so many requests, whichever end first, by their names. Cancelled ones count.

    Args:
        futures: that add requests; what they raise is raised here.

    Raises:
        RuntimeError: a request has failed, or the manager has.
    """
    ended: dict[str, Any] = {}
    while len(ended) < count:
        output = manager.get_result(timeout=1)
        if output is None:
            for future in futures:
                if future.done():
                    future.result()
            if not manager.is_running():
                raise RuntimeError(f"the manager ended before {count - len(ended)} requests had")
        elif output.error not in (None, CANCELLED):
            raise RuntimeError(f"request {output.request_id} has failed: {output.error}")
        elif output.is_finished():
            ended[output.request_id] = output
    return ended


@dataclass(frozen=True)
class Turn:
    """A request that was served alone; `ttft` is its time to the first token in seconds."""

    job: Job
    output: Any
    ttft: float
    hit_rate: float


def two_turns(manager: Any, prompt: int, new: int, more: int, vocabulary: int, seed: str) -> tuple[Turn, Turn]:
    """A prompt; then the same with its text and a few more tokens."""
    first = _turn(manager, Job(tokens(prompt, vocabulary, seed), new))
    second = first.job.prompt + first.output.generated_tokens + tokens(more, vocabulary, f"{seed}/more")
    return first, _turn(manager, Job(second, new))


def _turn(manager: Any, job: Job) -> Turn:
    before = counts(manager)
    began, (output,) = serve(manager, [job])
    return Turn(job, output, output.timestamps[0] - began, counted(manager, before)["hit_rate"])


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which such a part of them lies, linear between neighbours."""
    return torch.tensor(values, dtype=torch.float64).quantile(part).item()


def gaps(outputs: Sequence[Any], begin: float = -math.inf, end: float = math.inf) -> list[float]:
    """Seconds between two tokens of a text, of all texts: those of tokens that came between two times."""
    found = []
    for output in outputs:
        times = output.timestamps[bisect(output.timestamps, begin) : bisect(output.timestamps, end)]
        found += [later - earlier for earlier, later in pairwise(times)]
    return found


def gap_figures(seconds: Sequence[float]) -> dict[str, float]:
    """Of the time between tokens."""
    p50, p99 = quantile(seconds, 0.5), quantile(seconds, 0.99)
    return {"gap_p50_ms": p50 * 1e3, "gap_p99_ms": p99 * 1e3, "gap_p99_over_p50": p99 / p50}


def first_token_figures(jobs: Sequence[Job], began: float, outputs: Sequence[Any]) -> dict[str, float]:
    """Of the time from when a request was due to its first token: waiting to be added counts."""
    pairs = zip(jobs, outputs, strict=True)
    seconds = [output.timestamps[0] - began - job.due for job, output in pairs]
    return {"ttft_p50_s": quantile(seconds, 0.5), "ttft_p99_s": quantile(seconds, 0.99)}


def speed(began: float, outputs: Sequence[Any]) -> float:
    """New tokens a second of all requests together, up to the last token."""
    last = max(output.timestamps[-1] for output in outputs)
    return sum(len(output.generated_tokens) for output in outputs) / (last - began)


def counts(manager: Any) -> dict[str, float] | None:
    """What an engine has counted so far; None where it is Transformers'."""
    metrics = getattr(manager, "metrics", None)
    return {name: getattr(metrics, name) for name in COUNTERS} if isinstance(metrics, EngineMetrics) else None


def counted(manager: Any, before: dict[str, float] | None) -> dict[str, Any]:
    """Figures of what an engine has counted since."""
    after = counts(manager)
    if before is None or after is None:
        return {}
    since = {name: after[name] - before[name] for name in COUNTERS}
    return {
        "host_share": since["host_seconds"] / since["step_seconds"],
        "rows_per_step": since["rows"] / since["steps"],
        "preemptions": since["preemptions"],
        "hit_rate": since["hit_tokens"] / since["asked_tokens"] if since["asked_tokens"] else 0.0,
    }


def checked(model: Any, load: Load, count: int) -> dict[str, int]:
    """Compares some of the texts with plain `generate()`, each alone.

    Args:
        model: patched.
        count: texts to compare, spread over all.

    Returns:
        `texts`: how many were compared; `same_texts`: how many are the same, in bf16 and fp16 up to rounding.
    """
    jobs, outputs = load.jobs, load.outputs
    count = min(count, len(jobs))
    places = [i * len(jobs) // count for i in range(count)]
    same = sum(_is_same(model, jobs[i].prompt, outputs[i].generated_tokens[: load.longest]) for i in places)
    return {"texts": count, "same_texts": same}


def _is_same(model: Any, prompt: list[int], text: list[int]) -> bool:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(text), do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    reference = out.sequences[:, len(prompt) :].cpu()
    return all(found.is_rounding for found in differences(torch.tensor([text]), reference, out.logits, model.dtype))
