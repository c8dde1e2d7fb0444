"""Rows as a table for the terminal: a line a row, cases as headings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .rows import Row, short

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Fits a terminal of 120 columns; longer messages are told in full below the table.
_VERDICT_WIDTH = 34
_FIGURES = ("step ms", "min-max", "tok/s", "of floor", "first s", "ready s", "GB")
_LEGEND = (
    "floor: the bytes that a step must read at the device's bandwidth; first: until the first token; ready: from patch "
    "or the first call until steps run at full speed, empty if they varied too much to say; GB: peak beyond the "
    "weights, on a GPU; near tie: rounding explains it"
)


def table(rows: Sequence[Row]) -> RenderableType:
    """The rows, what stepped aside and errors. Rows of one case stand together.

    Raises:
        ImportError: rich is missing.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("variant", overflow="fold")  # in a narrow terminal names take two lines, figures stay whole
    for figure in _FIGURES:
        grid.add_column(figure, justify="right", no_wrap=True)
    grid.add_column("text", max_width=_VERDICT_WIDTH)
    for _, group in groupby(rows, key=lambda row: row.case):
        of_case = list(group)
        grid.add_row(Text(case_heading(of_case[0]), style="bold cyan"))
        grid.add_row(Text("floor", style="dim"), Text(short(of_case[0].floor_ms), style="dim"))
        for row in of_case:
            bad = row.is_refused or row.error is not None
            grid.add_row(Text(row.variant), *_figures(row), Text(row.verdict, style="red" if bad else ""))
        grid.add_row()
    notes = [Text(note) for note in _notes(rows)]
    return Group(*([Text(run_title(rows[0]), style="bold")] if rows else []), Text(), grid, *notes)


def run_title(row: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    return f"{row.model}, {row.dtype}, {row.device}\n{versions}"


def case_heading(row: Row) -> str:
    beams = f", {row.beams} beams" if row.beams > 1 else ""
    return f"{row.batch} x {row.prompt:,} + {row.new}{beams}"


def _figures(row: Row) -> list[str]:
    if row.step_ms is None or row.step_ms_min is None or row.step_ms_max is None:
        return [""] * len(_FIGURES)
    return [
        short(row.step_ms),
        f"{short(row.step_ms_min)}-{short(row.step_ms_max)}",
        "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "" if row.fraction_of_floor is None else f"{row.fraction_of_floor:.0%}",
        short(row.ttft_s),
        short(row.ready_s),
        short(row.peak_extra_gb),
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    """What does not fit into the table: what its words mean, long errors, what stepped aside."""
    notes = [_LEGEND]
    for row in rows:
        if len(row.verdict) > _VERDICT_WIDTH:
            notes.append(f"{case_heading(row)}, {row.variant}: {row.verdict}")
        notes += [f"{case_heading(row)}, {row.variant}: stepped aside: {reason}" for reason in row.stepped_aside]
    return notes
