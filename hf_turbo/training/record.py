"""The log of a training, and its picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..generation.medusa_files import replace_file

_COLORS = ("#1a73e8", "#12a4af", "#8ab17d", "#e9a13b", "#d93025", "#b388eb")


def require_packages() -> None:
    """Says what is missing before hours of training.

    Raises:
        ImportError: a package of the `train` extra is missing.
    """
    try:
        import matplotlib  # noqa: F401
        import tqdm  # noqa: F401
    except ImportError as error:
        raise ImportError(f"training needs {error.name}: pip install 'hf-turbo[train]'") from error


class Log:
    """Lines of `log.jsonl`: step, loss and accuracy of each head, learning rate.

    Args:
        path: of the file.
        step: lines of later steps are dropped: those steps are about to be done again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in read_log(path) if line["step"] <= step] if path.is_file() else []
        with replace_file(path) as target:
            target.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def add(self, step: int, loss: Sequence[float], accuracy: Sequence[float], learning_rate: float) -> None:
        """One line; loss and accuracy are means since the line before, an entry a head."""
        line = {"step": step, "loss": list(loss), "accuracy": list(accuracy), "learning_rate": learning_rate}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that was cut off as it was written is left out."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def draw(lines: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Writes a picture of a log: loss and accuracy of each head over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    steps = [line["step"] for line in lines]
    for axes, name, label in zip(panels, ("loss", "accuracy"), ("cross entropy", "best guess right"), strict=True):
        for head in range(len(lines[0][name])):
            color = _COLORS[head % len(_COLORS)]
            axes.plot(steps, [line[name][head] for line in lines], color=color, label=f"head {head + 1}")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(color="#e8eaed")
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(0, 1)
    panels[0].legend(frameon=False, fontsize=8.5)
    figure.suptitle(title, fontsize=10)
    with replace_file(path) as target:
        figure.savefig(target, dpi=160, format="png")
