"""`benchmarks.batching` with a tiny shape on a CPU: how its figures relate, and when it gives none."""

import json
import random
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_turbo.bench.models import load_model
from hf_turbo.patching import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
batching = pytest.importorskip("benchmarks.batching", reason="there are benchmarks in a checkout alone")
cases = pytest.importorskip("benchmarks.batching_cases")

FIGURES = [
    "tokens_per_s", "ready_s", "ttft_p50_s", "gap_p50_ms", "host_share", "rows_per_step", "second_over_first", "blocks",
]  # fmt: skip


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs a subcommand; its rows by case and variant. What is printed last is a table of them."""

    def run(*arguments):
        out = tmp_path / "rows.jsonl"
        batching.main([*map(str, arguments), "--model", "tiny", "--device", "cpu", "--out", str(out)])
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split()[:2] == ["case", "variant"]
        assert [line.startswith(row["case"]) for line, row in zip(lines, rows)] == [True] * len(rows)
        return {(row["case"].removeprefix("tiny/"), row["variant"]): row for row in rows}

    return run


def is_right(row, texts=4):
    return row["error"] is None and row["texts"] == row["same_texts"] == texts and row["dtype"] == "fp32"


def test_throughput_beside_transformers(bench):
    rows = bench("throughput", "--requests", 5, "--prompt", 24, "--new", 6, "--max-chunk", "default,16")
    assert [variant for _, variant in rows] == ["transformers", "hf_turbo", "hf_turbo:max_chunk=16"]
    stock, ours, chunked = rows.values()
    assert {case for case, _ in rows} == {"5x24x6"}
    for row in rows.values():
        assert is_right(row) and row["tokens_per_s"] > 0 and row["ready_s"] is not None
    assert stock["attention"] in ("paged|sdpa", "sdpa") and stock["limits"] is None
    assert ours["limits"]["max_chunk"] is None and chunked["limits"]["max_chunk"] == 16
    assert {**ours["limits"], "max_chunk": 16} == chunked["limits"]


def test_mix_at_once_and_as_they_come(bench):
    rows = bench("mix", "--requests", 6, "--mean-new", 6, "--most-new", 12, "--rate", 4, "--stream")
    once, poisson = rows["mix6/at once", "hf_turbo"], rows["mix6/poisson4", "hf_turbo"]
    for row in (once, poisson):
        assert is_right(row)
        assert row["gap_p99_over_p50"] == pytest.approx(row["gap_p99_ms"] / row["gap_p50_ms"])
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"] and 0 < row["host_share"] < 1
    assert once["rows_per_step"] > poisson["rows_per_step"]
    assert once["tokens_per_s"] > poisson["tokens_per_s"]  # which has to wait 1.5 s for the last one to come


def test_mix_beside_transformers(bench):
    rows = bench("mix", "--requests", 2, "--mean-new", 2, "--most-new", 4, "--rate", 100, "--peer")
    assert [variant for _, variant in rows] == ["transformers"] * 2 + ["hf_turbo"] * 2
    assert all(is_right(row, texts=2) for row in rows.values())
    assert [row["host_share"] is None for row in rows.values()] == [True, True, False, False]


LONG = ("long", "--prompt", 8, "--arrivals", 2, "--every", 0.1, "--long-prompt", 800, "--long-new", 3)


def test_long_prompts_in_smaller_chunks_come_later(bench):
    rows = bench(*LONG, "--requests", 3, "--alone", 0.1, "--max-chunk", "32,none")
    chunked, whole = rows.values()
    assert [variant for _, variant in rows] == ["hf_turbo:max_chunk=32", "hf_turbo:max_chunk=None"]
    for row in rows.values():
        assert is_right(row) and row["alone_gap_p50_ms"] > 0 and row["gap_p99_over_p50"] >= 1
        assert row["rows_per_step"] > 3
    assert (chunked["limits"]["max_chunk"], whole["limits"]["max_chunk"]) == (32, None)
    assert chunked["ttft_p50_s"] > 1.5 * whole["ttft_p50_s"]  # 25 steps, not one


def test_texts_that_end_too_early_are_an_error(bench):
    (row,) = bench(*LONG, "--requests", 1, "--alone", 0.1, "--new", 2).values()
    assert "need more tokens" in row["error"] and row["gap_p50_ms"] is None


PREFIX = (
    "prefix", "--requests", 4, "--prompt", 1200, "--new", 40, "--more", 8, "--shared", 160, "--own", 20, "--repeats", 2,
)  # fmt: skip


def test_without_prefix_cache_everything_is_computed_again(bench):
    rows = bench(*PREFIX)
    turn, shared = (rows[case, "hf_turbo:prefix_cache=False"] for case in ("turn1200", "shared4x160+20x40"))
    assert is_right(turn) and is_right(shared)
    assert turn["hit_rate"] == shared["hit_rate"] == 0
    # Blocks of 16: each has ten with the shared tokens, and two to four with the rest.
    assert 4 * 12 <= shared["blocks"] <= 4 * 14 and shared["blocks_floor"] == 10 + 4 * 4


def test_prefix_cache_saves_the_second_turn_and_the_copies(bench):
    rows = bench(*PREFIX)
    turn, shared = (rows[case, "hf_turbo"] for case in ("turn1200", "shared4x160+20x40"))
    assert is_right(turn) and is_right(shared)
    assert turn["hit_rate"] > 0.9 and turn["second_over_first"] < 0.8
    assert shared["blocks"] <= shared["blocks_floor"] + 2


def test_wrong_text_has_no_figures(bench, monkeypatch):
    def with_another_head(model, load, count):
        model.lm_head.weight.data.neg_()
        return cases.checked(model, load, count)

    monkeypatch.setattr(batching, "checked", with_another_head)
    (row,) = bench("throughput", "--requests", 2, "--prompt", 8, "--new", 2, "--no-peer").values()
    assert (row["texts"], row["same_texts"]) == (2, 0) and row["error"] == "2 of 2 texts are wrong"
    assert [row[name] for name in FIGURES] == [None] * len(FIGURES)


def test_what_adding_a_request_raises_is_raised():
    model = patch(load_model("tiny", torch.float32, torch.device("cpu")))
    refused = pytest.raises(ValueError, match="token ids go from 0 to 255")
    with batching.serving(model, batching.Variant("hf_turbo")) as (manager, _), refused:
        cases.serve(manager, [cases.Job([1, 2], 2), cases.Job([256], 2)])


def test_gaps_are_those_between_two_times():
    outputs = [SimpleNamespace(timestamps=[0.0, 1.0, 3.0, 6.0]), SimpleNamespace(timestamps=[2.0])]
    assert cases.gaps(outputs) == [1, 2, 3]
    assert cases.gaps(outputs, 0.5, 5) == [2]
    assert cases.quantile([1, 2, 3, 5], 0.5) == 2.5


def test_lengths_are_those_asked_for():
    source = random.Random(0)
    news = [cases.new_tokens(source, 160, 512) for _ in range(20_000)]
    assert statistics.mean(news) == pytest.approx(160, rel=0.03) and max(news) == 512 and min(news) == 1
    assert news.count(512) / len(news) == pytest.approx(2.718 ** (-512 / 168), rel=0.1)
    prompts = [cases.prompt_length(source) for _ in range(20_000)]
    assert statistics.mean(prompts) == pytest.approx(310, rel=0.03)  # of the 480 questions
    assert min(prompts) >= 39 and max(prompts) <= 1598
    with pytest.raises(ValueError, match="half"):
        cases.new_tokens(source, 300, 512)


def test_arrivals_have_the_rate_and_lengths_do_not_depend_on_the_seed():
    one, two = (cases.mixed(2000, 8, 16, 256, seed, rate=16) for seed in "ab")
    assert one[-1].due == pytest.approx(2000 / 16, rel=0.1)
    assert [(len(job.prompt), job.new, job.due) for job in one] == [(len(j.prompt), j.new, j.due) for j in two]
    assert all(a.prompt != b.prompt for a, b in zip(one, two))
    assert {job.due for job in cases.mixed(5, 8, 16, 256, "a")} == {0}
