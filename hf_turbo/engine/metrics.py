"""`EngineMetrics`: what an engine did and does. Written by its thread, read by any."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from .request import Status

#: Upper bounds of a histogram's buckets in seconds, each twice the one before: 0.5 ms to 262 s.
_BOUNDS = [0.0005 * 2**i for i in range(20)]

#: Seconds that rates look back over.
_WINDOW = 10.0

#: Values that quantiles are taken of.
_LATEST = 4096

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Distribution:
    """Durations: quantiles of the latest ones, and a histogram of all.

    Quantiles are those of the latest 4,096 values, exactly: an operator asks how it is now, and a sample over an
    engine's whole life would hide it. The histogram is what Prometheus adds up over time and machines.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.counts = [0] * (len(_BOUNDS) + 1)
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def note(self, seconds: float, count: int = 1) -> None:
        """Counts a duration that so many had."""
        self.count += count
        self.sum += seconds * count
        self.counts[bisect_left(_BOUNDS, seconds)] += count
        self._latest.extend([seconds] * min(count, _LATEST))

    def quantile(self, part: float) -> float | None:
        """The value below which such a part of the latest ones lies, linear between neighbours; None without any."""
        values = sorted(self._latest)
        if not values:
            return None
        place = part * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return values[low] + (values[high] - values[low]) * (place - low)

    def as_dict(self) -> dict[str, float | None]:
        return {"count": self.count, **{name: self.quantile(part) for name, part in _QUANTILES.items()}}


class EngineMetrics:
    """Counters, gauges and durations of one engine.

    Args:
        clock: seconds; another one in tests.

    Attributes:
        waiting, running: requests.
        blocks_used, blocks_cached, blocks_total: of the cache; cached ones are held by the prefix cache alone.
        asked_tokens, hit_tokens: prompt tokens that were looked up in the prefix cache, and those found.
        preemptions: requests that had to give way.
        steps, rows: steps computed, and the sequences that took part, added up.
        step_seconds: of the clock, from a step's beginning to its end. What the engine's thread does between steps,
            where it takes requests in and sends results out, is no part of it.
        host_seconds: the part of these in which the engine's own code ran: plans, the choice of tokens (with the
            launches that it takes), transfers, tokens taken in, what is kept for other texts, the look at the model.
            That is time of the clock as well: a wait for the interpreter while another thread has it, or for a lock,
            counts. Left out are calls of the model's forward, with all that the cache does for them on the host and
            the likeliest tokens where captured steps say them, and the wait for a step's tokens. With a GPU it is
            mostly hidden: the next step's work is done while one runs.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waiting = self.running = 0
        self.blocks_used = self.blocks_cached = self.blocks_total = 0
        self.asked_tokens = self.hit_tokens = 0
        self.preemptions = 0
        self.steps = self.rows = 0
        self.prompt_tokens = 0
        self.decoded_tokens = 0
        self.step_seconds = 0.0
        self.host_seconds = 0.0
        self.ends: Counter[Status] = Counter()
        self.first_token = Distribution()
        self.token_gap = Distribution()
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._recent: deque[tuple[float, int, int]] = deque()  # when, prompt tokens, decoded tokens

    def note_step(
        self, num_prompt_tokens: int, num_decoded: int, num_rows: int, seconds: float, host_seconds: float
    ) -> None:
        """Counts a step.

        Args:
            num_prompt_tokens: of prompts, or of texts that are computed again.
            num_decoded: tokens that were said.
            num_rows: sequences that took part.
            seconds: that it took.
            host_seconds: of these, what the host needed beside forwards and waiting for them.
        """
        with self._lock:
            now = self._clock()
            self.steps += 1
            self.rows += num_rows
            self.prompt_tokens += num_prompt_tokens
            self.decoded_tokens += num_decoded
            self.step_seconds += seconds
            self.host_seconds += host_seconds
            self._recent.append((now, num_prompt_tokens, num_decoded))
            self._forget(now)

    def note_first_token(self, seconds: float) -> None:
        """Counts a request's first token, so long after it came."""
        with self._lock:
            self.first_token.note(seconds)

    def note_token_gap(self, seconds: float, count: int = 1) -> None:
        """Counts a token, so long after the one before it; or one in each of so many texts."""
        with self._lock:
            self.token_gap.note(seconds, count)

    def note_end(self, status: Status) -> None:
        """Counts a request that has ended so."""
        with self._lock:
            self.ends[status] += 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens said a second, over the last ten."""
        with self._lock:
            return self._rate(2)

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens that the prefix cache had."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it by name: whole numbers, seconds, tokens a second; durations as `{count, p50, p90, p99}`."""
        with self._lock:
            return {
                "waiting": self.waiting,
                "running": self.running,
                "finished": self.ends[Status.FINISHED],
                "failed": self.ends[Status.FAILED],
                "cancelled": self.ends[Status.CANCELLED],
                "preemptions": self.preemptions,
                "blocks": {"used": self.blocks_used, "cached": self.blocks_cached, "total": self.blocks_total},
                "prefix_hit_rate": self.hit_rate,
                "steps": self.steps,
                "rows_per_step": self.rows / self.steps if self.steps else 0.0,
                "step_seconds": self.step_seconds,
                "host_seconds": self.host_seconds,
                "prompt_tokens": self.prompt_tokens,
                "decoded_tokens": self.decoded_tokens,
                "prompt_tokens_per_second": self._rate(1),
                "tokens_per_second": self._rate(2),
                "first_token_seconds": self.first_token.as_dict(),
                "token_gap_seconds": self.token_gap.as_dict(),
            }

    def register_prometheus(self, registry: Any = None) -> Any:
        """Shows the metrics to Prometheus, under names that begin with `hf_turbo_`.

        Args:
            registry: of prometheus-client; None for its default one.

        Returns:
            The collector, for `registry.unregister`.

        Raises:
            ImportError: prometheus-client is missing.
        """
        try:
            from prometheus_client import REGISTRY
        except ImportError as error:
            raise ImportError(
                'register_prometheus() needs the prometheus-client package: pip install "hf-turbo[metrics]"'
            ) from error
        collector = _Collector(self)
        (REGISTRY if registry is None else registry).register(collector)
        return collector

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()

    def _rate(self, column: int) -> float:
        now = self._clock()
        self._forget(now)
        seconds = min(_WINDOW, now - self._began)
        return sum(step[column] for step in self._recent) / seconds if seconds > 0 else 0.0


class _Collector:
    """What prometheus-client asks at every scrape."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics
        with metrics._lock:
            requests = GaugeMetricFamily("hf_turbo_requests", "Requests under way.", labels=["state"])
            for state, number in (("waiting", metrics.waiting), ("running", metrics.running)):
                requests.add_metric([state], number)
            ends = CounterMetricFamily("hf_turbo_requests_ended", "Requests that have ended.", labels=["how"])
            for status in (Status.FINISHED, Status.FAILED, Status.CANCELLED):
                ends.add_metric([status.name.lower()], metrics.ends[status])
            blocks = GaugeMetricFamily("hf_turbo_cache_blocks", "Blocks of the cache.", labels=["state"])
            free = metrics.blocks_total - metrics.blocks_used - metrics.blocks_cached
            states = ("used", metrics.blocks_used), ("cached", metrics.blocks_cached), ("free", free)
            for state, number in states:
                blocks.add_metric([state], number)
            families = [requests, ends, blocks]
            counters: tuple[tuple[str, str, float], ...] = (
                ("preemptions", "Requests that had to give way.", metrics.preemptions),
                ("prefix_asked_tokens", "Prompt tokens looked up in the prefix cache.", metrics.asked_tokens),
                ("prefix_hit_tokens", "Prompt tokens that the prefix cache had.", metrics.hit_tokens),
                ("prompt_tokens", "Prompt tokens computed.", metrics.prompt_tokens),
                ("decoded_tokens", "Tokens said.", metrics.decoded_tokens),
                ("steps", "Steps computed.", metrics.steps),
                ("step_seconds", "Seconds that steps took.", metrics.step_seconds),
                ("host_seconds", "Seconds of these that the host needed.", metrics.host_seconds),
            )
            families += [CounterMetricFamily(f"hf_turbo_{name}", text, value=number) for name, text, number in counters]
            for name, text, values in (
                ("first_token_seconds", "From a request's arrival to its first token.", metrics.first_token),
                ("token_gap_seconds", "Between two tokens of a text.", metrics.token_gap),
            ):
                families.append(HistogramMetricFamily(f"hf_turbo_{name}", text, _buckets(values), values.sum))
        return families


def _buckets(values: Distribution) -> list[tuple[str, float]]:
    """(upper bound, number of values up to it), as Prometheus wants them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, _BOUNDS), "+Inf"], values.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
