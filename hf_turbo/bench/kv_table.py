"""The trade-off of each format as a table for the terminal: the wide cache first, cases as headings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .kv import Tradeoff
from .rows import QualityRow, short
from .table import case_heading, run_title

if TYPE_CHECKING:
    from rich.console import RenderableType

_COSTS = ("B/token", "KV MB", "of wide", "ms", "of wide")
_COSTS_LEGEND = (
    "B/token: of a block in this format, all layers; KV MB: the cache's blocks at most, those that stay wide included; "
    "ms: a token, median of turns"
)
_PEAK = "peak GB"
_PEAK_LEGEND = "peak GB: most memory beyond the weights"
_PREDICTIONS = ("perplexity", "ratio", "same top-1", "KL")
_PREDICTIONS_LEGEND = (
    "perplexity: of a text read through the cache; ratio, same top-1, KL (nats): against what the wide cache predicts"
)


def table(found: Sequence[Tradeoff]) -> RenderableType:
    """The rows, and below them what went wrong.

    Raises:
        ImportError: rich is missing.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("cache")
    has_peak, has_quality = _has_peak(found), _has_quality(found)
    for figure in (*_COSTS, *([_PEAK] if has_peak else []), *(_PREDICTIONS if has_quality else [])):
        grid.add_column(figure, justify="right", no_wrap=True)
    for _, group in groupby(found, key=lambda one: case_heading(one.decode)):
        of_case = list(group)
        grid.add_row(Text(case_heading(of_case[0].decode), style="bold cyan"))
        for one in of_case:
            peak = [short(one.decode.peak_extra_gb)] if has_peak else []
            predictions = _predictions(one.quality) if has_quality else []
            grid.add_row(Text(one.kv), *_costs(one, of_case[0]), *peak, *predictions)
        grid.add_row()
    title = [Text(run_title(found[0].decode), style="bold")] if found else []
    return Group(*title, Text(), grid, *map(Text, _notes(found)))


def _has_peak(found: Sequence[Tradeoff]) -> bool:
    return any(one.decode.peak_extra_gb is not None for one in found)


def _has_quality(found: Sequence[Tradeoff]) -> bool:
    return any(one.quality is not None for one in found)


def _costs(one: Tradeoff, wide: Tradeoff) -> list[str]:
    row, base = one.decode, wide.decode
    return [
        "" if row.kv_bytes_per_token is None else f"{row.kv_bytes_per_token:,.0f}",
        "" if row.peak_kv_bytes is None else short(row.peak_kv_bytes / 1e6),
        _share(row.peak_kv_bytes, base.peak_kv_bytes),
        short(row.step_ms),
        _share(row.step_ms, base.step_ms),
    ]


def _predictions(row: QualityRow | None) -> list[str]:
    if row is None:
        return [""] * len(_PREDICTIONS)
    return [f"{row.perplexity:.4g}", f"{row.ratio:.4f}", f"{row.same_top1:.2%}", f"{row.kl:.6f}"]


def _share(value: float | None, base: float | None) -> str:
    return f"{value / base:.0%}" if value is not None and base else ""


def _notes(found: Sequence[Tradeoff]) -> list[str]:
    """What the words mean, what was read, why figures are missing, and what else there is to know."""
    legends = [_COSTS_LEGEND]
    legends += [_PEAK_LEGEND] if _has_peak(found) else []
    legends += [_PREDICTIONS_LEGEND] if _has_quality(found) else []
    notes = ["; ".join(legends)]
    notes += _missing(found)
    for one in found:
        where = _where(one)
        if one.quality is not None:
            notes.append(f"{case_heading(one.decode)}: read {_read(one.quality)}")
        if one.quality is not None and one.quality.protected_layers:
            notes.append(f"{where}: {one.quality.protected_layers} layers are kept as something else")
        if one.decode.verdict not in ("same text", "not compared"):
            notes.append(f"{where}: {one.decode.verdict}")
        notes += [f"{where}: stepped aside: {reason}" for reason in one.decode.stepped_aside]
    return list(dict.fromkeys(notes))


def _missing(found: Sequence[Tradeoff]) -> list[str]:
    """Why there is no perplexity, said once where it is the same for all."""
    reasons = {f"{_where(one)}: ": one.why_no_quality for one in found}
    if len(set(reasons.values())) == 1:
        reasons = {"": found[0].why_no_quality}
    return [f"{where}no perplexity: {why}" for where, why in reasons.items() if why]


def _where(one: Tradeoff) -> str:
    return f"{case_heading(one.decode)}, {one.kv}"


def _read(row: QualityRow) -> str:
    return f"{row.windows} x {row.length:,} tokens of {row.text}"
