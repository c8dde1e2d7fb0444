"""A picture of rows: the time of a step, variant by variant, above the floor of each case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Row, short

_UNPATCHED_COLORS = {"transformers": "#9aa0a6", "transformers-static": "#c9cdd2"}
#: hf_turbo first, then its variants with an option turned.
_PATCHED_COLORS = ("#1a73e8", "#7baaf7", "#12a4af", "#8ab17d", "#e9a13b", "#b388eb")
_INK = "#202124"
_GROUP_WIDTH = 0.8
_FORMATS = (".png", ".svg")


def require(path: Path) -> None:
    """Says what stands against a picture there, before hours of measuring.

    Raises:
        ValueError: the ending is neither .png nor .svg.
        ImportError: matplotlib is missing.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"a picture ends in {' or '.join(_FORMATS)}, not {str(path)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'hf-turbo[bench]'") from error


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes a picture of the rows, of one model; the file's ending says the format.

    Raises:
        ValueError: no rows, or rows of several models, dtypes or devices, or an ending that `require` refuses.
        ImportError: matplotlib is missing.
    """
    require(path)
    from matplotlib.figure import Figure

    if len({(row.model, row.dtype, row.device) for row in rows}) != 1:
        raise ValueError("a picture shows the rows of one model, dtype and device")
    cases = list(dict.fromkeys(row.case for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    width = max(7.0, 1.6 + len(cases) * (0.5 + 0.48 * len(variants)))
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    axes = figure.subplots()
    _bars(axes, rows, cases, variants)
    _floors(axes, rows, cases)
    _dress(figure, axes, rows, cases)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _bars(axes: Any, rows: Sequence[Row], cases: list[str], variants: list[str]) -> None:
    """A color a variant; no bar but a word where there is no figure."""
    bar = _GROUP_WIDTH / len(variants)
    patched = iter(_PATCHED_COLORS * len(variants))
    for number, variant in enumerate(variants):
        color = _UNPATCHED_COLORS.get(variant) or next(patched)
        mine = {cases.index(row.case): row for row in rows if row.variant == variant}
        places = {i: i + (number + 0.5) * bar - _GROUP_WIDTH / 2 for i in mine}
        shown = {i: row.step_ms for i, row in mine.items() if row.step_ms is not None}
        axes.bar([places[i] for i in shown], list(shown.values()), 0.92 * bar, color=color, label=variant, zorder=2)
        for i, row in mine.items():
            _label(axes, places[i], row)


def _label(axes: Any, x: float, row: Row) -> None:
    above: dict[str, Any] = dict(xytext=(0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8)
    if row.step_ms is not None:
        axes.annotate(short(row.step_ms), (x, row.step_ms), color=_INK, zorder=4, **above)
    else:
        word = "text differs" if row.is_refused else "error"
        paper = dict(facecolor="white", edgecolor="none", pad=1)
        axes.annotate(word, (x, 0), color="#c5221f", rotation=90, zorder=4, bbox=paper, **above)


def _floors(axes: Any, rows: Sequence[Row], cases: list[str]) -> None:
    """A line across each group of bars."""
    floors = {cases.index(row.case): row.floor_ms for row in rows if row.floor_ms is not None}
    if floors:
        sides = [(i - _GROUP_WIDTH / 2 - 0.02, i + _GROUP_WIDTH / 2 + 0.02) for i in floors]
        lefts, rights = zip(*sides, strict=True)
        label = "floor: what must be read, at the device's bandwidth"
        axes.hlines(list(floors.values()), lefts, rights, color="#d93025", linewidth=1.6, label=label, zorder=3)


def _dress(figure: Any, axes: Any, rows: Sequence[Row], cases: list[str]) -> None:
    by_case = {row.case: row for row in rows}
    axes.set_xticks(range(len(cases)), [_case_label(by_case[case]) for case in cases])
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_xlabel("prompts x tokens of each + new tokens", fontsize=8.5, color="#5f6368")
    axes.set_ylabel("ms a step (less is better)")
    axes.margins(y=0.12)
    axes.grid(axis="y", color="#e8eaed", zorder=0)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    first = rows[0]
    versions = "  ".join(f"{name} {version}" for name, version in first.versions.items())
    title = f"{first.model}, {first.dtype}, {first.device}"
    size = min(12.0, 100 * figure.get_figwidth() / len(title))  # a CPU's name is long
    axes.set_title(title, loc="left", fontweight="bold", fontsize=size, pad=18)
    axes.text(0, 1.02, versions, transform=axes.transAxes, fontsize=7.5, color="#5f6368")
    _legend(figure)


def _legend(figure: Any) -> None:
    """In as many columns as the picture is wide enough for."""
    for columns in (3, 2, 1):
        legend = figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _case_label(row: Row) -> str:
    beams = f"\n{row.beams} beams" if row.beams > 1 else ""
    return f"{row.batch} x {row.prompt:,}\n+ {row.new}{beams}"
