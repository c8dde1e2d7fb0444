"""A row of results: its keys, and where it was measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from .. import __version__


@dataclass(frozen=True)
class Row:
    """One variant in one case. What does not apply is None.

    Args:
        case: `model/b1/p128/n64`, the shape again in `batch`, `prompt`, `new` and `beams`.
        versions: of torch, transformers, triton and hf_turbo, and hf_turbo's commit.
        clock: what measured: `perf_counter`, or `thread_time` on a CPU with one thread, which other programs on the
            machine don't lengthen.
        rounds: how many samples the medians are of.
        step_ms, step_ms_min, step_ms_max: median, best and worst time between tokens in steady state, over rounds.
        streamed_step_ms: the same in the first call, where each token was handed to the host as it came.
        tokens_per_s: of all rows together; beams of one prompt are one row.
        floor_ms, fraction_of_floor: the bytes that a step must read over the device's bandwidth; that over `step_ms`.
        ttft_s: median time of a call for one token.
        ready_s: from before `patch` (unpatched: from the start of the first call) until the first step at full speed
            began, the prompt's time included: the first of three steps in a row within 1.3 times the call's steady
            one. What the process has compiled for an earlier case isn't waited for again.
        peak_extra_gb: most memory beyond the unpatched model's weights, `patch` and the first call included; GPU only.
        kv_bytes_per_token, peak_kv_bytes: of a patched model's cache, as in `hf_turbo.report`.
        same_text: whether each text of this run is the unpatched model's, in bf16 and fp16 up to rounding; None if it
            wasn't compared. Where it is false there are no figures; where it is None, only those of a quantized cache.
        first_difference, logit_gap, logit_gap_limit: the new token that differs first, how much the unpatched model
            prefers its own there (with beams: in mean log-probability), and how much rounding would explain; of the
            row that is worst. None where the texts are equal.
        stepped_aside: what the patched model did not do faster, and why.
        error: why there is nothing to tell.
    """

    bench: str
    case: str
    variant: str
    model: str
    batch: int
    prompt: int
    new: int
    beams: int
    dtype: str
    device: str
    versions: dict[str, str]
    clock: str
    rounds: int = 0
    step_ms: float | None = None
    step_ms_min: float | None = None
    step_ms_max: float | None = None
    streamed_step_ms: float | None = None
    tokens_per_s: float | None = None
    floor_ms: float | None = None
    fraction_of_floor: float | None = None
    ttft_s: float | None = None
    ready_s: float | None = None
    peak_extra_gb: float | None = None
    kv_bytes_per_token: float | None = None
    peak_kv_bytes: int | None = None
    same_text: bool | None = None
    first_difference: int | None = None
    logit_gap: float | None = None
    logit_gap_limit: float | None = None
    stepped_aside: tuple[str, ...] = ()
    error: str | None = None

    @property
    def is_refused(self) -> bool:
        return self.same_text is False

    @property
    def verdict(self) -> str:
        """The text's state in a few words."""
        if self.error is not None:
            return f"error: {self.error}"
        if self.same_text is None:
            return "not compared"
        if self.first_difference is None:
            return "same text"
        if self.is_refused:
            return f"text differs at token {self.first_difference} (gap {self.logit_gap:.2g})"
        return f"near tie at token {self.first_difference}"


@dataclass(frozen=True)
class QualityRow:
    """What one format of the cache does to predictions: a line of its own beside those of `Row`.

    Args:
        case: `model/text/w4x512/kv-int8`: the text's name, windows and their length, and the format.
        kv: the format; "bf16" and the like for the wide cache, which others are compared with.
        text: the text's name.
        windows, length: so many windows of so many tokens.
        tokens, perplexity, ratio, same_top1, kl, kv_bytes_per_token: as in `kv_quality.Quality`.
        protected_layers: how many layers are kept as something else.
    """

    bench: str
    case: str
    variant: str
    model: str
    kv: str
    text: str
    windows: int
    length: int
    dtype: str
    device: str
    versions: dict[str, str]
    tokens: int
    perplexity: float
    ratio: float
    same_top1: float
    kl: float
    kv_bytes_per_token: float
    protected_layers: int


def short(value: float | None) -> str:
    """A figure in three digits for people; nothing for None."""
    if value is None:
        return ""
    if value < 1:
        return f"{value:.3f}"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def append_row(row: Row | QualityRow, path: Path) -> None:
    """Adds a row to a JSONL file, as one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The decode rows of a JSONL file that `append_row` wrote.

    Raises:
        ValueError: a line has keys that rows don't have.
    """
    known = {f.name for f in fields(Row)}
    rows = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        if values.get("bench") != "decode":
            continue
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{path}: a row has the unknown keys {', '.join(unknown)}")
        rows.append(Row(**{**values, "stepped_aside": tuple(values.get("stepped_aside", ()))}))
    return rows


def versions() -> dict[str, str]:
    """Of what a figure depends on. `HF_TURBO_COMMIT` is for code that was copied out of its checkout."""
    found = {"torch": str(torch.__version__)}
    for name in ("transformers", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return {**found, "hf_turbo": __version__, "hf_turbo_commit": _commit()}


def device_name(device: torch.device) -> str:
    """A GPU's name; a CPU's with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {_count(torch.get_num_threads(), 'thread')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _cpu_name() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = ()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _commit() -> str:
    if commit := os.environ.get("HF_TURBO_COMMIT"):
        return commit
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed: a checkout around it would be another project's
        return "unknown"
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
