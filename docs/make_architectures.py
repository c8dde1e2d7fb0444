"""Writes docs/architectures.md: what is accelerated of each architecture in the tests' zoo, or why not.

    python docs/make_architectures.py

The page is what `hf_turbo.patch` and `hf_turbo.report` say of each tiny model. Architectures that the
installed Transformers lacks keep the rows they have, so run it with the oldest and the newest one supported.
"""

import logging
import re
import sys
from pathlib import Path

import torch

import hf_turbo

PAGE = Path(__file__).with_name("architectures.md")
sys.path.insert(0, str(PAGE.parents[1] / "tests"))

from tiny_models import ACCELERATED, BY_VERSION, ZOO, build, expectation, in_this_transformers  # noqa: E402

HEADER = """\
# Architectures

What `hf_turbo.patch(model)` does with each architecture: which of its layers run over the paged cache, or why
it steps aside and leaves the model as it is. Any other decoder that uses Transformers' attention interface is
treated by the same rules. Made by `docs/make_architectures.py` from `tests/tiny_models.py`, whose models
`tests/test_matrix.py` compares with their unpatched selves.

| architecture | | layers, or the reason |
|---|---|---|
"""
OLDER = " (older Transformers)"


def row(name: str) -> tuple[str, str]:
    """An architecture's label and its line of the table."""
    model = build(name)
    label = name
    if ZOO[name].expect == BY_VERSION and expectation(model, name) != ACCELERATED:
        label += OLDER
    hf_turbo.patch(model).generate(
        torch.ones(1, 3, dtype=torch.long), max_new_tokens=2
    )  # some turn out at the first prompt
    report = hf_turbo.report(model)
    # the tiny models' numbers say nothing about the architecture
    kinds = sorted({re.sub(r" of \d+$", "", kind) for kind in report.accelerated})
    what, why = ("accelerated", kinds) if kinds else ("steps aside", report.stepped_aside)
    return label, f"| {label} | {what} | {', '.join(why)} |\n"


def rows() -> dict[str, str]:
    """The lines of the architectures that this Transformers has."""
    return dict(row(name) for name in ZOO if in_this_transformers(name))


def rows_on(page: str) -> dict[str, str]:
    """The lines that a page has already, of architectures that are still in the zoo."""
    lines = [line for line in page.removeprefix(HEADER).splitlines(keepends=True) if line.startswith("| ")]
    labelled = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    return {label: line for label, line in labelled.items() if label.removesuffix(OLDER) in ZOO}


def updated(page: str) -> str:
    """The page with this Transformers' rows brought up to date."""
    return HEADER + "".join(line for _, line in sorted({**rows_on(page), **rows()}.items()))


if __name__ == "__main__":
    logging.getLogger("hf_turbo").setLevel(logging.ERROR)
    PAGE.write_text(updated(PAGE.read_text() if PAGE.exists() else ""))
