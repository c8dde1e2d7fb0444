"""Metrics against closed forms, numpy, and what Prometheus reads."""

import sys
from unittest.mock import patch

import numpy
import pytest

from hf_turbo.engine.metrics import _BOUNDS, _LATEST, Distribution, EngineMetrics
from hf_turbo.engine.request import Status


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000])
def test_quantiles_are_numpys(count):
    values = numpy.random.default_rng(count).exponential(0.02, count)
    distribution = Distribution()
    for value in values:
        distribution.note(value)
    for part in (0, 0.5, 0.9, 0.99, 1):
        assert distribution.quantile(part) == pytest.approx(numpy.quantile(values, part), rel=1e-12)


def test_quantiles_are_of_the_latest_values_and_the_histogram_of_all():
    distribution = Distribution()
    distribution.note(100.0, 10)
    for _ in range(_LATEST):
        distribution.note(0.001)
    assert distribution.quantile(1) == 0.001
    assert distribution.count == sum(distribution.counts) == _LATEST + 10
    assert distribution.sum == pytest.approx(1000 + 0.001 * _LATEST)


def test_nothing_noted():
    assert Distribution().as_dict() == {"count": 0, "p50": None, "p90": None, "p99": None}
    metrics = EngineMetrics(Clock()).as_dict()
    assert metrics["tokens_per_second"] == metrics["prefix_hit_rate"] == metrics["rows_per_step"] == 0


def test_several_tokens_at_once_count_as_so_many():
    one, many = Distribution(), Distribution()
    for _ in range(5):
        one.note(0.25)
    many.note(0.25, 5)
    assert (one.count, one.sum, one.counts, one.quantile(0.5)) == (many.count, many.sum, many.counts, 0.25)


def test_rates_look_back_ten_seconds():
    clock = Clock()
    metrics = EngineMetrics(clock)
    clock.now += 2
    metrics.note_step(60, 10, 5, 0.5, 0.1)
    assert metrics.tokens_per_second == 10 / 2
    assert metrics.as_dict()["prompt_tokens_per_second"] == 60 / 2
    clock.now += 8
    metrics.note_step(0, 30, 7, 0.5, 0.1)
    assert metrics.tokens_per_second == (10 + 30) / 10
    clock.now += 5
    assert metrics.tokens_per_second == 30 / 10  # the first is older than ten seconds
    clock.now += 100
    assert metrics.tokens_per_second == 0
    seen = metrics.as_dict()
    assert (seen["steps"], seen["decoded_tokens"], seen["prompt_tokens"], seen["rows_per_step"]) == (2, 40, 60, 6)
    assert (seen["step_seconds"], seen["host_seconds"]) == (1.0, 0.2)


def test_as_dict_has_what_was_noted():
    metrics = EngineMetrics()
    metrics.waiting, metrics.running, metrics.preemptions = 3, 4, 5
    metrics.blocks_used, metrics.blocks_cached, metrics.blocks_total = 6, 2, 20
    metrics.asked_tokens, metrics.hit_tokens = 200, 50
    for status in (Status.FINISHED, Status.FINISHED, Status.CANCELLED):
        metrics.note_end(status)
    metrics.note_first_token(0.5)
    metrics.note_token_gap(0.25, 4)
    seen = metrics.as_dict()
    assert (seen["waiting"], seen["running"], seen["preemptions"]) == (3, 4, 5)
    assert seen["blocks"] == {"used": 6, "cached": 2, "total": 20}
    assert seen["prefix_hit_rate"] == 0.25
    assert (seen["finished"], seen["failed"], seen["cancelled"]) == (2, 0, 1)
    assert seen["first_token_seconds"] == {"count": 1, "p50": 0.5, "p90": 0.5, "p99": 0.5}
    assert seen["token_gap_seconds"] == {"count": 4, "p50": 0.25, "p90": 0.25, "p99": 0.25}


def test_prometheus_reads_all_of_it():
    prometheus_client = pytest.importorskip("prometheus_client")
    registry, metrics = prometheus_client.CollectorRegistry(), EngineMetrics()
    collector = metrics.register_prometheus(registry)
    metrics.waiting, metrics.blocks_total, metrics.blocks_used, metrics.blocks_cached = 3, 20, 6, 2
    metrics.note_step(60, 10, 5, 0.5, 0.1)
    metrics.note_end(Status.FAILED)
    for seconds in (0.0004, _BOUNDS[3], 1000.0):
        metrics.note_first_token(seconds)

    def value(name, **labels):
        return registry.get_sample_value(f"hf_turbo_{name}", labels)

    assert value("requests", state="waiting") == 3
    assert value("cache_blocks", state="free") == 12
    assert value("requests_ended_total", how="failed") == 1
    assert value("decoded_tokens_total") == 10 and value("step_seconds_total") == 0.5
    assert value("first_token_seconds_bucket", le=str(_BOUNDS[0])) == 1
    assert value("first_token_seconds_bucket", le=str(_BOUNDS[2])) == 1
    assert value("first_token_seconds_bucket", le=str(_BOUNDS[3])) == 2
    assert value("first_token_seconds_bucket", le="+Inf") == value("first_token_seconds_count") == 3
    assert value("first_token_seconds_sum") == pytest.approx(1000 + 0.0004 + _BOUNDS[3])
    assert b"hf_turbo_token_gap_seconds_bucket" in prometheus_client.generate_latest(registry)
    registry.unregister(collector)
    assert value("decoded_tokens_total") is None


def test_prometheus_missing_is_a_sentence():
    with patch.dict(sys.modules, {"prometheus_client": None}), pytest.raises(ImportError, match=r"hf-turbo\[metrics\]"):
        EngineMetrics().register_prometheus()
