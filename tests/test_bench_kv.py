"""`hf-turbo bench --kv`: what it measures of predictions, and how it shows the trade-off."""

import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import forward
from tiny_models import build
from typer.testing import CliRunner

import hf_turbo
from hf_turbo.bench import kv, kv_plot, kv_quality, kv_table, models, rows, run
from hf_turbo.bench.cases import Case, Variant
from hf_turbo.bench.kv_quality import cut_windows, measure
from hf_turbo.bench.rows import QualityRow, Row
from hf_turbo.cli.app import app
from hf_turbo.patching import handle_of, is_patched

CPU = torch.device("cpu")
HEAD = dict(model="tiny", dtype="float32", device="a CPU", versions={"torch": "2"})


@pytest.fixture(autouse=True)
def device_of_known_speed(monkeypatch):
    """Saves each run the quarter of a second that measuring takes."""
    monkeypatch.setattr(run, "bandwidth", lambda device: 1e10)


@pytest.fixture(scope="module")
def tiny():
    return models.load_model("tiny", torch.float32, CPU)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    bos_token_id = 1

    def __call__(self, text, **options):
        return SimpleNamespace(input_ids=list(text.encode()))


def small(name: str = "llama", **overrides):
    """A tiny model that is not too sure of its next token for ratios to mean something."""
    model = build(name, **{"max_position_embeddings": 1024, **overrides})
    model.lm_head.weight.data.mul_(0.1)
    return model


def window(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed))


def token_by_token(model, ids: torch.Tensor, **options) -> torch.Tensor:
    """Log-probabilities `[length - 1, vocabulary]` of what follows each token, one forward a token."""
    with hf_turbo.patched(model, **options), torch.no_grad():
        handle = handle_of(model)  # single tokens are too short a prompt to settle what keys can take
        unsettled = set(range(len(handle.sliding_windows))) - handle.pool.formats.keys()
        handle.pool.formats |= dict.fromkeys(unsettled, options.get("kv_cache_dtype"))
        cache = hf_turbo.paged_cache(model)
        steps = [forward(model, ids[None, i : i + 1], cache).logits[0, 0] for i in range(len(ids) - 1)]
        assert not options or any(group.table.codes.rows[0] for group in cache.groups.values())
    return torch.stack(steps).log_softmax(-1)


# Predictions


@pytest.mark.parametrize(
    "name, overrides, kind",
    [("llama", {}, "int8"), ("llama", {}, "int4"), ("gemma3_text", {"sliding_window": 110}, "int4")],
)
def test_chunks_give_what_single_tokens_give(name, overrides, kind):
    model, ids = small(name, **overrides), window(450)
    wide = token_by_token(model, ids)
    coded = token_by_token(model, ids, kv_cache_dtype=kind)
    found = measure(model, [ids], kind)
    surprises = [-x.gather(1, ids[1:, None]).mean().item() for x in (coded, wide)]
    assert found.tokens == 449
    assert found.perplexity == pytest.approx(math.exp(surprises[0]), rel=1e-5)
    assert found.wide_perplexity == pytest.approx(math.exp(surprises[1]), rel=1e-5)
    assert found.ratio == pytest.approx(math.exp(surprises[0] - surprises[1]), rel=1e-5)
    divergence = (wide.exp() * (wide - coded)).sum(-1).mean().item()
    assert found.kl == pytest.approx(divergence, rel=1e-2, abs=1e-8) and found.kl > 1e-7
    assert found.same_top1 == (wide.argmax(-1) == coded.argmax(-1)).float().mean()


def test_a_long_first_chunk_would_hide_codes(monkeypatch):
    """It is why the first one is short: a prompt sees itself wide."""
    model, ids = small(), window(500)
    honest = measure(model, [ids], "int4")
    monkeypatch.setattr(kv_quality, "_chunks", lambda window, first: [(window[None, :-1], window[1:])])
    hidden = measure(model, [ids], "int4")
    assert hidden.kl < 1e-9 < 1e-4 < honest.kl


@pytest.mark.parametrize("length", [2, 128, 129, 130, 385, 386])
def test_every_token_is_predicted_once(length):
    ids = torch.arange(length)
    parts = list(kv_quality._chunks(ids, 128))
    assert torch.equal(torch.cat([fed[0] for fed, _ in parts]), ids[:-1])
    assert torch.equal(torch.cat([targets for _, targets in parts]), ids[1:])
    assert len(parts[0][1]) <= 128 and max(len(targets) for _, targets in parts) <= max(kv_quality.CHUNK, 128)


def test_windows_share_nothing_and_count_alike():
    """Two windows are the mean of each alone, in either order; few rows at a time or all at once."""
    model, texts = small(), [window(300, 1), window(300, 2)]
    both = measure(model, texts, "int4")
    alone = [measure(model, [text], "int4") for text in texts]
    assert both.kl == pytest.approx((alone[0].kl + alone[1].kl) / 2, rel=1e-9)
    assert both.perplexity == pytest.approx(math.sqrt(alone[0].perplexity * alone[1].perplexity), rel=1e-9)


def test_divergence_is_from_the_wide_cache():
    """Of two predictions that are far apart: which way round shows."""
    sums, wide, coded = kv_quality._Sums(), torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    sums.add(wide.log(), coded.log(), torch.tensor([1]))
    found = sums.means()
    assert found["kl"] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)
    assert found["ratio"] == pytest.approx(0.1 / 0.5, rel=1e-5)


def test_logits_are_compared_a_few_rows_at_a_time(monkeypatch):
    model, ids = small(), window(300)
    whole, seen = measure(model, [ids], "int8"), []
    add = kv_quality._Sums._add
    monkeypatch.setattr(kv_quality, "_NUMBERS_AT_ONCE", 7 * 128)
    monkeypatch.setattr(
        kv_quality._Sums, "_add", lambda sums, known, got, to: (seen.append(len(known)), add(sums, known, got, to))
    )
    pieces = measure(model, [ids], "int8")
    assert max(seen) == 7 and sum(seen) == 299
    assert pieces.kl == pytest.approx(whole.kl) and pieces.perplexity == pytest.approx(whole.perplexity)


def test_formats_in_order_and_bytes():
    model, ids = small(), window(600)
    int8, fp8, int4 = (measure(model, [ids], kind) for kind in ("int8", "fp8", "int4"))
    assert 0 < int8.kl < fp8.kl < int4.kl
    assert int8.kv_bytes_per_token == fp8.kv_bytes_per_token > int4.kv_bytes_per_token
    assert int4.wide_kv_bytes_per_token == 2 * 2 * 16 * 4


def test_the_model_is_left_as_it_was():
    model, ids = small(), window(200)
    measure(model, [ids], "int8")
    assert not is_patched(model)
    hf_turbo.patch(model, kv_cache_dtype="fp8", block_size=32)
    before = measure(model, [ids], "int8")
    assert handle_of(model).config.kv_cache_dtype == "fp8" and handle_of(model).config.block_size == 32
    assert before == measure(hf_turbo.unpatch(model), [ids], "int8")


def test_options_reach_the_patch():
    """Smaller blocks: fewer tokens stay wide, so that a text shorter than three blocks of 64 has codes."""
    model, ids = small(), window(180)
    assert measure(model, [ids], "int4").kl < 1e-9
    assert measure(model, [ids], "int4", block_size=32).kl > 1e-5


def test_what_can_not_be_measured():
    with pytest.raises(ValueError, match="two tokens"):
        measure(small(), [window(1)], "int8")
    with pytest.raises(ValueError, match="two tokens"):
        measure(small(), [], "int8")
    with pytest.raises(NotImplementedError, match=r"steps aside|can't be had"):
        measure(build("bloom"), [window(9)], "int8")


def test_windows_of_a_text():
    cut = cut_windows(range(10, 20), 1, 4, 9)
    assert [one.tolist() for one in cut] == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18]]
    assert [one.tolist() for one in cut_windows(range(10, 20), None, 4, 1)] == [[10, 11, 12, 13]]
    for length in (1, 12):
        with pytest.raises(ValueError, match="no window"):
            cut_windows(range(10, 20), 1, length, 1)


# Texts and formats


def test_formats_are_chosen_by_name():
    assert kv.parse_formats("all") == ["int8", "fp8", "int4"]
    assert kv.parse_formats("int4, int8,int4") == ["int4", "int8"]
    for text in ("", "int3", "all,int8", "bf16"):
        with pytest.raises(ValueError, match="int8, fp8, int4"):
            kv.parse_formats(text)


def test_the_text_that_comes_with_the_package(tmp_path):
    text = kv.read_text(None, Bytes())
    content = bytes(text.ids).decode()
    assert text.name == "opticks" and 90_000 < len(content) < 120_000 and text.bos == 1
    assert content.startswith("Query 1. Do not Bodies act upon Light at a distance") and "Gutenberg" not in content
    assert kv.read_text(None, None) is None


def test_a_text_of_ones_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("word " * 200)
    assert kv.read_text(file, Bytes()).name == "mine" and len(kv.read_text(file, Bytes()).ids) == 1000
    file.write_text("word " * 20)
    with pytest.raises(ValueError, match="100 tokens"):
        kv.read_text(file, Bytes())
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        kv.read_text(tmp_path / "nowhere.txt", Bytes())


def test_how_much_of_a_text_is_read():
    text = kv.Text("noise", range(3000), 1)
    assert [len(text.windows(length)) for length in (512, 1000, 2048, 3001, 9000)] == [4, 3, 1, 1, 1]
    assert len(text.windows(9000)[0]) == 3001


# The trade-off


def noise(length: int = 1400) -> kv.Text:
    return kv.Text("noise", window(length).tolist(), None)


def test_a_row_for_each_cache(tiny):
    told = []
    case = Case(2, 400, 6)
    found = list(kv.run("tiny", tiny, [case], ["int8", "int4"], noise(), 1, told.append))
    wide, int8, int4 = found
    assert [one.kv for one in found] == ["fp32", "int8", "int4"]
    assert [one.decode.case for one in found] == [f"tiny/b2/p400/n6/kv-{name}" for name in ("fp32", "int8", "int4")]
    assert [one.decode.variant for one in found] == ["hf_turbo"] * 3
    assert len(told) == kv.turns([case], ["int8", "int4"], noise(), 1)
    assert wide.decode.same_text is True and int8.decode.same_text is None and int4.decode.verdict == "not compared"
    assert all(one.decode.step_ms > 0 and one.decode.error is None for one in found)
    # Of 405 stored tokens blocks 1 to 4 of 7 are codes (one may not be yet), the others wide.
    assert wide.decode.peak_kv_bytes > int8.decode.peak_kv_bytes > int4.decode.peak_kv_bytes > 0
    assert wide.decode.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    expected = measure(tiny, noise().windows(512), "int4")
    assert int4.quality.perplexity == expected.perplexity and int4.quality.kl == expected.kl
    assert int4.decode.kv_bytes_per_token == int4.quality.kv_bytes_per_token == expected.kv_bytes_per_token
    assert wide.quality.perplexity == expected.wide_perplexity
    assert (wide.quality.ratio, wide.quality.same_top1, wide.quality.kl) == (1, 1, 0)
    assert int4.quality.case == "tiny/noise/w2x512/kv-int4"


def test_without_a_tokenizer_there_is_no_perplexity(tiny):
    found = list(kv.run("tiny", tiny, [Case(1, 8, 4)], ["int8"], None, 1))
    assert [one.quality for one in found] == [None, None] and found[1].decode.step_ms > 0
    shown = written(found)
    assert "no perplexity: the model has no tokenizer" in shown and "same top-1" not in shown


def test_a_format_that_fails_does_not_end_the_run(tiny, monkeypatch):
    def fails(model, windows, kind):
        if kind == "int8":
            raise torch.OutOfMemoryError("out of memory")
        return measure(model, windows, kind)

    monkeypatch.setattr(kv, "measure", fails)
    wide, int8, fp8 = kv.run("tiny", tiny, [Case(1, 8, 4)], ["int8", "fp8"], noise(), 1)
    assert int8.quality is None and wide.quality.kv == "fp32" and fp8.quality.kv == "fp8"
    assert "1 x 8 + 4, int8: no perplexity: OutOfMemoryError: out of memory" in written([wide, int8, fp8])


def test_quantized_variants_are_not_refused_for_their_text(tiny, monkeypatch):
    """Who asks for one by name asks for other numbers; any other variant's text still has to be the same."""
    compared = []
    monkeypatch.setattr(run, "judge", lambda model, ids, case, texts: compared.append(list(texts)) or {})
    variants = [Variant("hf_turbo", {}), Variant("int4", {"kv_cache_dtype": "int4"})]
    plain, int4 = run.run("tiny", tiny, [Case(1, 300, 4)], variants, 1)
    assert compared == [["hf_turbo"]]
    assert plain.same_text is True and int4.same_text is None and int4.step_ms > 0 and not int4.is_refused
    assert not Variant("none", {"kv_cache_dtype": None}).changes_numbers


def made_up() -> list[kv.Tradeoff]:
    """Figures as wide as they come; the wide cache first; the int8 and fp8 points in one place."""
    found = []
    for name, size in (("bf16", 131072.0), ("int8", 69632.0), ("fp8", 69632.0), ("int4", 38000.0)):
        decode = Row(
            bench="decode", case=f"tiny/b8/p32768/n128/kv-{name}", variant="hf_turbo", batch=8, prompt=32768, new=128,
            beams=4, clock="perf_counter", rounds=3, step_ms=999.9, step_ms_min=999.0, step_ms_max=999.9,
            kv_bytes_per_token=size, peak_kv_bytes=int(size * 8 * 32768), peak_extra_gb=99.9,
            same_text=True if name == "bf16" else None, **HEAD,
        )  # fmt: skip
        quality = QualityRow(
            bench="kv_quality", case=f"tiny/opticks/w1x32768/kv-{name}", variant="hf_turbo", kv=name, text="opticks",
            windows=1, length=32768, tokens=32767, perplexity=12345.678, ratio=1.0312, same_top1=0.98765, kl=0.123456,
            kv_bytes_per_token=size, protected_layers=2 * (name == "int4"), **HEAD,
        )  # fmt: skip
        found.append(kv.Tradeoff(name, decode, quality))
    return found


def written(found) -> str:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(kv_table.table(found))
    return console.export_text()


def test_table_fits_120_columns_a_line_a_row():
    lines = [line.rstrip() for line in written(made_up()).splitlines()]
    assert max(map(len, lines)) <= 120
    first = next(line for line in lines if line.startswith("bf16")).split()
    int4 = next(line for line in lines if line.startswith("int4")).split()
    assert first[1:6] == ["131,072", "34,360", "100%", "1,000", "100%"]
    assert int4[1:] == ["38,000", "9,961", "29%", "1,000", "100%", "99.9", "1.235e+04", "1.0312", "98.77%", "0.123456"]
    text = "\n".join(lines)
    assert "8 x 32,768 + 128, 4 beams: read 1 x 32,768 tokens of opticks" in text
    assert "int4: 2 layers are kept as something else" in text


def test_errors_and_refused_texts_are_told():
    found = made_up()
    found[0] = replace(found[0], decode=replace(found[0].decode, step_ms=None, same_text=False, first_difference=3))
    found[0] = replace(found[0], decode=replace(found[0].decode, logit_gap=1.0, logit_gap_limit=0.1))
    found[1] = replace(found[1], decode=replace(found[1].decode, step_ms=None, error="OutOfMemoryError: none left"))
    text = " ".join(written(found).split())
    assert "bf16: text differs at token 3 (gap 1)" in text and "int8: error: OutOfMemoryError: none left" in text


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    found = made_up()
    kv_plot.draw(found, tmp_path / "new" / "kv.svg")
    assert (tmp_path / "new" / "kv.svg").stat().st_size > 10_000
    kv_plot.draw(
        [replace(one, quality=None, decode=replace(one.decode, step_ms=None)) for one in found], tmp_path / "e.png"
    )
    with pytest.raises(ValueError, match="nothing"):
        kv_plot.draw([], tmp_path / "none.png")


def test_labels_of_points_in_one_place_do_not_meet():
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(5, 3))
    axes = figure.subplots()
    kv_plot._speeds(axes, made_up())
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)


# The command


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "tiny", "--device", "cpu", *arguments])


def test_command(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(models, "load_tokenizer", lambda name: Bytes())
    text, out, picture = tmp_path / "mine.txt", tmp_path / "rows.jsonl", tmp_path / "kv.png"
    text.write_text("".join(chr(33 + i) for i in window(700).tolist() if i < 90) * 3)
    files = ["--text", str(text), "--out", str(out), "--plot", str(picture)]
    done = bench("--kv", "int8,int4", "--case", "1x300x4", "--rounds", "1", *files)
    assert done.exit_code == 0, done.output
    assert "1 x 300 + 4" in done.stdout and "tokens of mine" in done.stdout and "reading mine" in done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [(bench, f"kv-{name}") for name in ("fp32", "int8", "int4") for bench in ("decode", "kv_quality")]
    assert [(line["bench"], line["case"].rpartition("/")[2]) for line in lines] == expected
    assert [row.case for row in rows.read_rows(out)] == [f"tiny/b1/p300/n4/kv-{n}" for n in ("fp32", "int8", "int4")]
    assert picture.stat().st_size > 10_000


def test_command_takes_long_prompts_of_itself():
    done = bench("--kv", "int8", "--rounds", "1", "--new", "2")
    assert done.exit_code == 0, done.output
    assert "1 x 1,024 + 2" in done.stdout and "no perplexity: the model has no tokenizer" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--kv", "int3"], "int8, fp8, int4"),
        (["--kv", "all", "--variants", "hf_turbo"], "leave out --variants"),
        (["--text", "a.txt"], "give --kv"),
    ],
)
def test_command_says_what_is_wrong(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", "").split())
