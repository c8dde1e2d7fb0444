"""The trade-off of each format as one picture: memory against speed, and memory against predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .kv import Tradeoff
from .plot import require
from .rows import short
from .table import case_heading

_INK, _PALE = "#202124", "#5f6368"
#: The wide cache's is hollow.
_MARKERS = ("o", "s", "D", "^")
_PANEL_SIZE = 4.9, 3.3
#: The axis goes on beyond the widest cache, for its label.
_ROOM = 1.25
#: Points nearer to each other than this share of the axis get their labels one above the other.
_NEAR = 0.08
_LABEL_HEIGHT = 25
#: The axis of ratios shows at least these, so that a ten-thousandth looks like one.
_RATIOS = 0.998, 1.005


@dataclass(frozen=True)
class _Point:
    memory: float
    y: float
    label: str
    marker: str


def draw(found: Sequence[Tradeoff], path: Path) -> None:
    """Writes a picture: a row of panels for each case; the file's ending says the format.

    Raises:
        ValueError: nothing to draw, or an ending that `plot.require` refuses.
        ImportError: matplotlib is missing.
    """
    require(path)
    from matplotlib.figure import Figure

    cases = [list(group) for _, group in groupby(found, key=lambda one: case_heading(one.decode))]
    if not cases:
        raise ValueError("nothing was measured, so there is nothing to draw")
    columns = 2 if any(one.quality for one in found) else 1
    width, height = _PANEL_SIZE
    figure = Figure(figsize=(width * columns, height * len(cases) + 0.4), layout="constrained")
    for row, of_case in zip(figure.subplots(len(cases), columns, squeeze=False), cases, strict=True):
        _speeds(row[0], of_case)
        if columns == 2:
            _ratios(row[1], of_case)
    first = found[0].decode
    title = f"KV cache of {first.model}, {first.dtype}, {first.device}"
    size = min(11.0, 110 * figure.get_figwidth() / len(title))  # a CPU's name is long
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=size)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _speeds(axes: Any, of_case: Sequence[Tradeoff]) -> None:
    points = [
        _Point(memory / 1e6, ms, f"{one.kv}\n{short(ms)} ms", marker)
        for one, marker in zip(of_case, _MARKERS, strict=False)
        if (ms := one.decode.step_ms) is not None and (memory := one.decode.peak_kv_bytes) is not None
    ]
    _dress(axes, of_case, "ms a token (less is better)")
    axes.set_ylim(0, 1.2 * max((point.y for point in points), default=1))
    _scatter(axes, points)


def _ratios(axes: Any, of_case: Sequence[Tradeoff]) -> None:
    points = [
        _Point(memory / 1e6, one.quality.ratio, f"{one.kv}\n{one.quality.ratio:.4f}", marker)
        for one, marker in zip(of_case, _MARKERS, strict=False)
        if one.quality is not None and (memory := one.decode.peak_kv_bytes) is not None
    ]
    _dress(axes, of_case, f"perplexity / that of {of_case[0].kv} (1 is best)")
    ratios = [*_RATIOS, *(point.y for point in points)]
    spare = 0.1 * (max(ratios) - min(ratios))
    axes.set_ylim(min(ratios) - spare, max(ratios) + spare)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.axhline(1, color=_PALE, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    _scatter(axes, points)


def _scatter(axes: Any, points: Sequence[_Point]) -> None:
    """Points with their labels: to the left of the one that takes the least memory, to the right of the others."""
    right = _ROOM * max((point.memory for point in points), default=1)
    axes.set_xlim(0, right)
    least = min(points, key=lambda point: point.memory, default=None)
    others = [point for point in points if point is not least]
    for point in points:
        hollow = point.marker == _MARKERS[0]
        axes.plot(
            point.memory, point.y, point.marker, color=_INK, markerfacecolor="white" if hollow else _INK, markersize=6,
            zorder=3,
        )  # fmt: skip
        on_left = point is least and len(points) > 1
        near = [point] if on_left else [other for other in others if abs(other.memory - point.memory) < _NEAR * right]
        place = sorted(near, key=lambda other: other.y).index(point) - (len(near) - 1) / 2
        axes.annotate(
            point.label, (point.memory, point.y), xytext=(-8 if on_left else 8, place * _LABEL_HEIGHT),
            textcoords="offset points", ha="right" if on_left else "left", va="center", color=_INK, fontsize=9,
            zorder=4,
        )  # fmt: skip


def _dress(axes: Any, of_case: Sequence[Tradeoff], label: str) -> None:
    axes.set_title(case_heading(of_case[0].decode), loc="left", fontsize=9.5)
    axes.set_xlabel("MB of keys and values", fontsize=9, color=_PALE)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_ylabel(label, fontsize=9)
    axes.grid(color="#e8eaed", zorder=0)
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
