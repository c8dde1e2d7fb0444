"""`hf-turbo bench` on a CPU: what it parses, what it measures, what it refuses to print, and how it looks."""

import io
import json
import math
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hf_turbo.bench import cases, measure, models, plot, promise, rows, run, table
from hf_turbo.bench.cases import Case, Variant, grid, parse_case, parse_variants
from hf_turbo.bench.promise import Difference, differences, worst
from hf_turbo.bench.rows import Row
from hf_turbo.cli import main
from hf_turbo.cli.app import app

CPU = torch.device("cpu")
TRANSFORMERS, HF_TURBO = Variant("transformers"), Variant("hf_turbo", {})
SMALL = Case(1, 8, 6)
HEAD = dict(
    bench="decode", case="tiny/b1/p8/n4", variant="hf_turbo", model="tiny", batch=1, prompt=8, new=4, beams=1,
    dtype="float32", device="a CPU", versions={"torch": "2"}, clock="perf_counter",
)  # fmt: skip
FIGURES = ["step_ms", "step_ms_min", "step_ms_max", "streamed_step_ms", "tokens_per_s", "fraction_of_floor", "ttft_s"]


@pytest.fixture(autouse=True)
def device_of_known_speed(monkeypatch):
    """Saves each run the quarter of a second that measuring takes."""
    monkeypatch.setattr(run, "bandwidth", lambda device: 1e10)


@pytest.fixture(scope="module")
def tiny():
    return models.load_model("tiny", torch.float32, CPU)


def measured(model, case=SMALL, variants=(TRANSFORMERS, HF_TURBO), rounds=2, progress=lambda text: None):
    return list(run.run("tiny", model, [case], variants, rounds, progress))


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "tiny", "--device", "cpu", *arguments])


@contextmanager
def head_turned_round(model, **options):
    """Stands in for `patched` that breaks the text: the least likely token becomes the likeliest."""
    model.lm_head.weight.data.neg_()
    yield model
    model.lm_head.weight.data.neg_()


# Parsing


def test_grid_is_all_combinations():
    assert grid("1,32", "128,1024", "64", "1,4") == [
        Case(b, p, 64, beams) for b in (1, 32) for p in (128, 1024) for beams in (1, 4)
    ]


def test_case_is_written_in_one_word():
    assert parse_case("1x128x64") == Case(1, 128, 64)
    assert parse_case("2x1024x64b4") == Case(2, 1024, 64, beams=4)
    assert parse_case("2x1024x64b4").name == "b2/p1024/n64/beam4"


@pytest.mark.parametrize("text", ["128", "1x128", "1x128x64b", "0x128x64", "1x128x1", "1x128x64b0", "-1x2x3"])
def test_case_written_otherwise_is_refused(text):
    with pytest.raises(ValueError, match=r"case|at least"):
        parse_case(text)


def test_grid_wants_numbers():
    with pytest.raises(ValueError, match="whole numbers"):
        grid("1,", "128", "64", "1")


def test_variants():
    parsed = parse_variants("transformers, transformers-static,hf_turbo,hf_turbo:block_size=32,prompt_attention=triton")
    assert [v.name for v in parsed] == [
        "transformers", "transformers-static", "hf_turbo", "hf_turbo:block_size=32,prompt_attention=triton",
    ]  # fmt: skip
    assert [v.options for v in parsed] == [None, None, {}, {"block_size": 32, "prompt_attention": "triton"}]
    assert parsed[1].generate_options == {"cache_implementation": "static"}


def test_options_turns_each_switch(monkeypatch):
    @dataclass(frozen=True)
    class Config:
        block_size: int | None = None
        graphs: bool = True
        guess: bool = False

        @classmethod
        def of(cls, config, options):
            return cls(**options)

    monkeypatch.setattr(cases, "TurboConfig", Config)
    parsed = parse_variants("options,hf_turbo:graphs=false")
    assert [(v.name, v.options) for v in parsed] == [
        ("hf_turbo:graphs=false", {"graphs": False}),
        ("hf_turbo:guess=true", {"guess": True}),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("vllm", "unknown variant"),
        ("hf_turbo:speed=9", "unknown option"),
        ("hf_turbo:block_size=7", "block_size=7"),
        ("hf_turbo:block_size", "option=value"),
        ("transformers:block_size=16", "unknown variant"),
        (",", "no variants"),
    ],
)
def test_variants_are_checked_before_anything_runs(text, message):
    with pytest.raises(ValueError, match=message):
        parse_variants(text)


# The rule


def example(gap: float, highest: float = 8.0):
    """One row of two steps whose reference prefers token 0 to token 1 by `gap` at the second."""
    first, second = torch.tensor([[highest, 0.0, -1.0]]), torch.tensor([[highest, highest - gap, -1.0]])
    return torch.tensor([[0, 0]]), [first, second]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_tie_is_rounding(dtype):
    limit = promise.UNITS * torch.finfo(dtype).eps * 8.0
    for gap, is_rounding in ((0.0, True), (0.9 * limit, True), (1.1 * limit, False)):
        reference, logits = example(gap)
        (found,) = differences(torch.tensor([[0, 1]]), reference, logits, dtype)
        assert (found.row, found.step) == (0, 1)
        assert found.gap == pytest.approx(gap, abs=1e-5) and found.limit == pytest.approx(limit)
        assert found.is_rounding is is_rounding


@pytest.mark.parametrize("gap", [0.0, 1e-6])
def test_fp32_forgives_nothing(gap):
    reference, logits = example(gap)
    (found,) = differences(torch.tensor([[0, 1]]), reference, logits, torch.float32)
    assert not found.is_rounding


def test_gap_is_to_the_token_that_was_chosen():
    reference, logits = example(0.0)
    (found,) = differences(torch.tensor([[0, 2]]), reference, logits, torch.bfloat16)
    assert found.gap == 9.0 and not found.is_rounding


def test_measured_noise_widens_the_limit():
    reference, logits = example(0.5)
    noise = torch.tensor([[0.0, 0.3]])
    assert differences(torch.tensor([[0, 1]]), reference, logits, torch.bfloat16, noise)[0].is_rounding


def test_only_the_first_difference_of_a_row_counts():
    reference, logits = example(0.0)
    assert [d.step for d in differences(torch.tensor([[1, 1]]), reference, logits, torch.bfloat16)] == [0]
    assert differences(reference, reference, logits, torch.bfloat16) == []


def test_texts_of_other_lengths_are_no_comparison():
    reference, logits = example(0.0)
    with pytest.raises(ValueError, match="shape"):
        differences(reference[:, :1], reference, logits, torch.bfloat16)


def test_worst_is_what_rounding_explains_least():
    near, far = Difference(0, 1, gap=0.1, limit=0.2), Difference(1, 5, gap=0.3, limit=0.2)
    assert worst([near, far]) is far and worst([]) is None


def test_presets_have_the_sizes_of_their_models():
    billions = {
        "llama-3-8b": 8.03, "llama-3.2-1b": 1.24, "mistral-7b": 7.25, "qwen3-4b": 4.02, "qwen3-30b-a3b": 30.53,
        "gemma-3-1b": 1.00, "gemma-3-4b-text": 3.88, "smollm2-135m": 0.1345,
    }  # fmt: skip
    assert {*billions, "tiny"} == set(models.PRESETS)
    for name, expected in billions.items():
        count = sum(p.numel() for p in models.empty_model(name).parameters())
        assert count / 1e9 == pytest.approx(expected, rel=0.005), name


# Measuring


def test_full_speed_is_three_quick_steps_in_a_row():
    seconds = [5.0, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]  # the third step captures
    stamps = [math.fsum(seconds[: i + 1]) for i in range(len(seconds))]
    ready, step = measure.full_speed(stamps)
    assert ready == pytest.approx(6.0) and step == pytest.approx(0.1)


def test_clock_of_one_thread_is_its_own(monkeypatch):
    for threads, expected in ((1, time.thread_time), (2, time.perf_counter)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert measure.clock(CPU) is expected
        assert measure.clock(torch.device("cuda")) is time.perf_counter


def test_never_at_full_speed():
    assert measure.full_speed([0.0, 1.0, 1.1, 2.1, 2.2, 3.2, 3.3])[0] is None


def test_one_step_is_its_own_speed():
    assert measure.full_speed([1.0, 1.5]) == (1.0, 0.5)


def test_step_is_the_difference_of_whole_calls(monkeypatch):
    took, warmed = {16: 2.6, 8: 1.8, 1: 1.1}, []
    monkeypatch.setattr(measure, "generate", lambda model, ids, case, variant, new: warmed.append(new))
    monkeypatch.setattr(measure, "_timed", lambda model, ids, case, variant, new: (took[new], torch.zeros(1, new)))
    sample = measure.whole_call_turn(None, None, Case(1, 8, 16), TRANSFORMERS)
    assert sample.step_s == pytest.approx(0.1) and sample.ttft_s == 1.1 and sample.text.shape == (1, 16)
    assert warmed == [8]


def test_whole_calls_and_stamps_see_the_same_text(tiny):
    case = Case(2, 8, 6)
    ids = measure.prompts(case, 256, CPU)
    turns = [way(tiny, ids, case, TRANSFORMERS) for way in (measure.whole_call_turn, measure.stamped_turn)]
    assert torch.equal(turns[0].text, turns[1].text) and turns[0].text.shape == (2, 6)
    assert all(t.ttft_s > 0 for t in turns) and turns[1].step_s > 0


@pytest.mark.parametrize("beams", [1, 2])
def test_a_stamp_for_each_token(tiny, beams):
    case, stamps = Case(2, 8, 6, beams), measure.Stamps(time.perf_counter)
    measure.generate(tiny, measure.prompts(case, 256, CPU), case, TRANSFORMERS, **stamps.options(case))
    assert len(stamps.times) == 6 and stamps.times == sorted(stamps.times)


@pytest.mark.parametrize("case", [Case(2, 8, 6), Case(1, 8, 6, beams=3)], ids=lambda case: case.name)
def test_rows_have_their_figures(tiny, case):
    told = []
    found = measured(tiny, case, progress=told.append)
    assert [row.variant for row in found] == ["transformers", "hf_turbo"]
    assert len(told) == run.turns([case], found, 2)
    for row in found:
        assert row.case == f"tiny/{case.name}" and row.rounds == 2 and row.dtype == "float32"
        assert row.same_text is True and row.error is None and row.first_difference is None
        assert all(getattr(row, name) > 0 for name in FIGURES), row
        assert row.step_ms_min <= row.step_ms <= row.step_ms_max
        assert row.tokens_per_s == pytest.approx(case.batch / row.step_ms * 1e3)
        assert row.fraction_of_floor == pytest.approx(row.floor_ms / row.step_ms)
        assert row.peak_extra_gb is None  # only a GPU tells
        assert {"torch", "transformers", "triton", "hf_turbo", "hf_turbo_commit"} == set(row.versions)


def test_model_is_left_as_it_was(tiny):
    before, kind = set(vars(tiny)), type(tiny)
    measured(tiny, variants=[*parse_variants("transformers-static"), HF_TURBO], rounds=1)
    assert set(vars(tiny)) == before and type(tiny) is kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [Case(2, 8, 6), Case(1, 8, 6, beams=2)], ids=lambda case: case.name)
def test_no_speed_for_another_text(monkeypatch, dtype, case):
    model = models.load_model("tiny", dtype, CPU)
    monkeypatch.setattr(measure, "patched", head_turned_round)
    monkeypatch.setattr(run, "report", lambda model: SimpleNamespace(stepped_aside={}))
    good, refused = measured(model, case)
    assert good.same_text and good.step_ms
    assert refused.same_text is False and refused.is_refused and refused.rounds == 0
    assert refused.first_difference == 0 and refused.logit_gap > refused.logit_gap_limit
    assert all(getattr(refused, name) is None for name in [*FIGURES, "ready_s", "peak_extra_gb"])
    assert refused.verdict.startswith("text differs at token 0 (gap ")


def test_text_of_every_round_counts(tiny, monkeypatch):
    """A first call that is right does not excuse a later one that isn't."""
    whole = run.turn

    def last_token_changed(model, ids, case, variant):
        sample = whole(model, ids, case, variant)
        if variant is HF_TURBO:
            sample.text[:, -1] += 1
        return sample

    monkeypatch.setattr(run, "turn", last_token_changed)
    good, refused = measured(tiny)
    assert good.same_text and refused.is_refused and refused.first_difference == 5


def test_a_variant_that_fails_does_not_end_the_run(tiny):
    failing = Variant("failing", generate_options={"cache_implementation": "no such cache"})
    failed, good = measured(tiny, variants=[failing, HF_TURBO])
    assert "no such cache" in failed.error and failed.same_text is None and failed.step_ms is None
    assert good.same_text and good.error is None


def test_nothing_is_told_without_a_reference(tiny, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(run, "judge", no_memory)
    for row in measured(tiny):
        assert row.error == "no text to compare with: OutOfMemoryError: out of memory"
        assert row.step_ms is None and row.same_text is None


def test_model_by_an_unknown_name():
    with pytest.raises(ValueError, match=r"llama-3-8b.*smollm2-135m-instruct"):
        models.load_model("./no-such-folder", torch.float32, CPU)


def test_settings_of_a_folder_do_not_change_the_text(tmp_path, tiny):
    tiny.generation_config.eos_token_id = list(range(256))
    try:
        tiny.save_pretrained(tmp_path)
    finally:
        tiny.generation_config.eos_token_id = None
    loaded = models.load_model(str(tmp_path), torch.float32, CPU)
    assert loaded.generation_config.eos_token_id is None
    ids = measure.prompts(SMALL, 256, CPU)
    assert torch.equal(*(measure.generate(m, ids, SMALL, TRANSFORMERS) for m in (loaded, tiny)))


# Rows, table, picture


def test_rows_survive_json(tmp_path):
    first = Row(**HEAD, same_text=True, step_ms=1.5, floor_ms=1.0, stepped_aside=("a reason",))
    second = Row(**HEAD, error="none left")
    path = tmp_path / "new" / "rows.jsonl"
    for row in (first, second):
        rows.append_row(row, path)
    assert rows.read_rows(path) == [first, second]
    for line in path.read_text().splitlines():
        assert set(json.loads(line)) == {f.name for f in fields(Row)}


def test_rows_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**HEAD, "us": 3}) + "\n")
    with pytest.raises(ValueError, match="unknown keys us"):
        rows.read_rows(path)


def test_commit_of_copied_code(monkeypatch):
    monkeypatch.setenv("HF_TURBO_COMMIT", "abc1234")
    assert rows.versions()["hf_turbo_commit"] == "abc1234"


def made_up() -> list[Row]:
    """One row of each kind, in figures as wide as they come."""
    wide = {**HEAD, "variant": "hf_turbo:fused_layers=false", "floor_ms": 99.9}
    figures = dict(
        rounds=3, step_ms=99.9, step_ms_min=98.8, step_ms_max=99.9, tokens_per_s=99999.0, fraction_of_floor=1.0,
        ttft_s=99.9, ready_s=999.0, peak_extra_gb=99.9,
    )  # fmt: skip
    near = dict(same_text=True, first_difference=127, logit_gap=0.031, logit_gap_limit=0.18)
    far = dict(same_text=False, first_difference=15, logit_gap=1.53, logit_gap_limit=0.18)
    return [
        Row(**wide, **figures, same_text=True),
        Row(**wide, **figures, **near),
        Row(**{**wide, "variant": "transformers"}, **far, stepped_aside=("it can't",)),
        Row(**{**wide, "variant": "transformers-static"}, error="OutOfMemoryError: " + 30 * "long "),
    ]


def test_table_fits_120_columns_a_line_a_row():
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.table(made_up()))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for verdict in ("same text", "near tie at token 127", "text differs at token 15 (gap 1.5)"):
        assert len([line for line in lines if line.endswith(verdict)]) == 1, text
    for figure in ("98.8-99.9", "99,999", "100%", "999"):
        assert len([line for line in lines if figure in line.split()]) == 2, text
    assert "transformers-static: error: OutOfMemoryError: long long" in text and "stepped aside: it can't" in text


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw(made_up(), tmp_path / "new" / "rows.png")
    assert (tmp_path / "new" / "rows.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="one model"):
        plot.draw([*made_up(), Row(**{**HEAD, "model": "other"})], tmp_path / "two.png")


# The command


def test_command(tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    arguments = ["--case", "1x8x6", "--case", "2x8x4b2", "--variants", "transformers,hf_turbo", "--rounds", "1"]
    done = bench(*arguments, "--out", str(out), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert "1 x 8 + 6" in done.stdout and "2 x 8 + 4, 2 beams" in done.stdout
    assert [(row.case, row.variant) for row in rows.read_rows(out)] == [
        (f"tiny/{case}", variant) for case in ("b1/p8/n6", "b2/p8/n4/beam2") for variant in ("transformers", "hf_turbo")
    ]
    assert picture.stat().st_size > 10_000
    assert "comparing texts" in done.stderr and "comparing texts" not in done.stdout


def test_command_fails_when_a_text_differs(monkeypatch):
    monkeypatch.setattr(run, "judge", lambda model, ids, case, texts: {"hf_turbo": Difference(0, 3, 1.0, 0.0)})
    done = bench("--new", "4", "--prompt", "8", "--rounds", "1", "--variants", "transformers,hf_turbo")
    assert done.exit_code == 1
    assert "text differs at token 3 (gap 1)" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--case", "1x8"], "batch x prompt x new"),
        (["--case", "1x8x8", "--batch", "2"], "leave out --batch"),
        (["--variants", "hf_turbo:speed=9"], "unknown option speed"),
        (["--dtype", "int3"], "dtype 'int3'"),
        (["--device", "toaster"], "device 'toaster'"),
    ],
)
def test_command_says_what_is_wrong(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", "").split())


def test_info():
    done = CliRunner().invoke(app, ["info", "gemma-3-1b"])
    assert done.exit_code == 0, done.output
    assert "Gemma3ForCausalLM" in done.stdout and "sliding window of 512: 22 layers" in done.stdout


def test_main_without_its_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "hf_turbo.cli.app")
    with pytest.raises(SystemExit) as left:
        main(["info", "tiny"])
    assert left.value.code == "hf-turbo: the command line needs typer: pip install 'hf-turbo[cli]'"
