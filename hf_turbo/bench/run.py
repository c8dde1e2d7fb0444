"""Runs cases: variants take turns, texts are judged, rows come out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..report import Report, report
from .cases import Case, Variant
from .floor import bandwidth, step_bytes
from .judge import judge
from .measure import FirstCall, Sample, active, clean, clock, first_call, generate, prompts, turn, used_memory
from .promise import Difference
from .rows import Row, device_name, versions

Progress = Callable[[str], None]


@dataclass
class Trial:
    """What one variant has shown in one case so far."""

    variant: Variant
    samples: list[Sample] = field(default_factory=list)
    first: FirstCall | None = None
    peak_extra: int | None = None
    report: Report | None = None
    error: str | None = None

    @property
    def texts(self) -> list[torch.Tensor]:
        first = [self.first.text] if self.first is not None else []
        return first + [sample.text for sample in self.samples]


def run(
    name: str,
    model: Any,
    cases: Sequence[Case],
    variants: Sequence[Variant],
    rounds: int = 3,
    progress: Progress = lambda text: None,
) -> Iterator[Row]:
    """The rows of each case as soon as it is done.

    Args:
        name: what rows call the model.
        model: unpatched, as `load_model` gives it.
        rounds: how many samples each variant gives.
        progress: told of each turn before it starts; there are `turns(cases, variants, rounds)`.
    """
    device = model.device
    rate = bandwidth(device)
    _wake(model)
    for case in cases:
        shared = dict(
            bench="decode", case=f"{name}/{case.name}", model=name, batch=case.batch, prompt=case.prompt, new=case.new,
            beams=case.beams, dtype=str(model.dtype).removeprefix("torch."), device=device_name(device),
            versions=versions(), clock=clock(device).__name__, floor_ms=step_bytes(model, case) / rate * 1e3,
        )  # fmt: skip
        before = set(vars(model))
        ids = prompts(case, model.config.get_text_config(decoder=True).vocab_size, device)
        trials = [Trial(variant) for variant in variants]
        for number in range(rounds):
            for trial in trials:
                progress(f"{case.name}  {trial.variant.name}  round {number + 1} of {rounds}")
                _take_turn(model, ids, case, trial)
        progress(f"{case.name}  comparing texts")
        verdicts = _judge(model, ids, case, trials)
        for trial in trials:
            yield _row(shared, case, trial, verdicts.get(trial.variant.name))
        _forget(model, before)


def turns(cases: Sequence[Case], variants: Sequence[Variant], rounds: int) -> int:
    """How often `run` reports progress."""
    return len(cases) * (len(variants) * rounds + 1)


def _take_turn(model: Any, ids: torch.Tensor, case: Case, trial: Trial) -> None:
    """Adds a sample, or the error that ends the trial."""
    if trial.error is not None:
        return
    clean(ids.device)
    try:
        base, began = used_memory(ids.device), clock(ids.device)()
        with active(model, trial.variant):
            if trial.first is None:
                trial.first = first_call(model, ids, case, trial.variant, began)
                if trial.first.peak_bytes is not None:
                    trial.peak_extra = trial.first.peak_bytes - base
            else:
                generate(model, ids, case, trial.variant)  # warm again: patching dropped what it had set up
            trial.samples.append(turn(model, ids, case, trial.variant))
            if trial.variant.options is not None:
                trial.report = report(model)
    except Exception as error:
        trial.error = first_line(error)
    clean(ids.device)


def _judge(model: Any, ids: torch.Tensor, case: Case, trials: list[Trial]) -> dict[str, Difference | None]:
    """Verdicts of the trials that went well and have to write the same. If the reference itself fails, none did."""
    well = [trial for trial in trials if trial.error is None and not trial.variant.changes_numbers]
    try:
        return judge(model, ids, case, {trial.variant.name: trial.texts for trial in well})
    except Exception as error:
        for trial in well:
            trial.error = f"no text to compare with: {first_line(error)}"
        return {}


def _row(shared: dict[str, Any], case: Case, trial: Trial, difference: Difference | None) -> Row:
    aside = () if trial.report is None else tuple(trial.report.stepped_aside)
    shared = {**shared, "variant": trial.variant.name, "stepped_aside": aside}
    if trial.error is not None or trial.first is None:
        return Row(**shared, error=trial.error)
    shared["same_text"] = None if trial.variant.changes_numbers else difference is None or difference.is_rounding
    if difference is not None:
        shared |= dict(
            first_difference=difference.step, logit_gap=difference.gap, logit_gap_limit=difference.limit
        )  # fmt: skip
    if shared["same_text"] is False:
        return Row(**shared)
    steps = [sample.step_s * 1e3 for sample in trial.samples]
    step = statistics.median(steps)
    return Row(
        **shared,
        rounds=len(steps),
        step_ms=step,
        step_ms_min=min(steps),
        step_ms_max=max(steps),
        streamed_step_ms=trial.first.step_s * 1e3,
        tokens_per_s=case.batch / step * 1e3,
        fraction_of_floor=shared["floor_ms"] / step,
        ttft_s=statistics.median(sample.ttft_s for sample in trial.samples),
        ready_s=trial.first.ready_s,
        peak_extra_gb=None if trial.peak_extra is None else trial.peak_extra / 1e9,
        kv_bytes_per_token=None if trial.report is None else trial.report.kv_bytes_per_token,
        peak_kv_bytes=None if trial.report is None else trial.report.peak_kv_bytes,
    )


def _wake(model: Any) -> None:
    """A first small call, so that no variant's figures hold the start of the device's libraries."""
    case = Case(batch=1, prompt=8, new=2)
    generate(model, prompts(case, 8, model.device), case, Variant("wake"))


def _forget(model: Any, before: set[str]) -> None:
    """Drops what `generate()` left on the model and what was compiled: the next case is not to run on its shapes."""
    for name in set(vars(model)) - before:
        delattr(model, name)
    torch.compiler.reset()
    clean(model.device)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
