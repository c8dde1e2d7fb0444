"""Which combinations of values a parametrized test runs by default, and which under `-m slow`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def few(*axes: Iterable[Any], together: int = 1) -> list[Any]:
    """Every combination of some parameters' values, for `pytest.mark.parametrize`; most of them are slow.

    Args:
        axes: the values of one parameter each.
        together: of so many parameters, whichever they are, those that are not slow have all values with each other:
            1 is every value once, 2 is every pair.

    Returns:
        What `pytest.param` makes of them, in the order of `itertools.product`.
    """
    axes = [list(axis) for axis in axes]
    parts = {place: set(combinations(enumerate(place), together)) for place in product(*map(range, map(len, axes)))}
    missing, quick = set().union(*parts.values()), set()
    while missing:
        best = max(parts, key=lambda place: len(parts[place] & missing))
        quick.add(best)
        missing -= parts[best]
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)), marks=[] if place in quick else pytest.mark.slow
        )
        for place in parts
    ]
