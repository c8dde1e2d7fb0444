"""Which of the heads' guesses a step tries: trees that are published with Medusa, and the search for one's own.

A tree is written as paths of ranks, one for each drafted token: `(0, 2)` is the second head's third best guess after
the first head's best one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import isfinite, prod
from typing import NamedTuple

Path = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]


class Repeats(NamedTuple):
    """What is expected of texts that repeat themselves, where what followed takes the place of the best guesses."""

    #: Of all places, those at which the text has been before.
    share: float
    #: How often each token that followed is right there, if those before it are.
    rate: float

# The trees that come with Medusa (FasterDecoding/Medusa, medusa_choices.py), a digit a rank.
_WRITTEN = {
    "mc_sim_7b_63": """
        0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005
        0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
    """,
    "vicuna_7b_stage1": """
        0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 020 011
        004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51
    """,
    "vicuna_7b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 030
        0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 0020 70
        14
    """,
    "vicuna_13b_stage1": """
        0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 004 13
        011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 23 16
    """,
    "vicuna_13b_stage2": """
        0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 0010
        030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013 102 0011
        300 1000
    """,
    "vicuna_33b_stage1": """
        0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 60
        020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021
    """,
    "vicuna_33b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 030 005
        0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 31 102 22
    """,
    "zephyr_stage2": """
        0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 004
        0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23
    """,
}

#: Name -> paths. Stage 1 is of heads alone, stage 2 of heads trained together with the model.
PUBLISHED_TREES: dict[str, tuple[Path, ...]] = {
    name: tuple(tuple(map(int, path)) for path in written.split()) for name, written in _WRITTEN.items()
}


def search_tree(accuracies: Accuracies, num_nodes: int, repeats: Repeats | None = None) -> tuple[Path, ...]:
    """The tree of `num_nodes` drafted tokens that the most of are right, as far as accuracies tell.

    A node is right if all guesses on its path are; taken as independent, that happens as often as the product of their
    accuracies says. The best node whose parent is in the tree is added until the tree is full. A child's product is
    never more than its parent's, so no other tree of this size has a larger sum. Method: arXiv:2401.10774, section
    2.3.3.

    Args:
        accuracies: `[head][rank]`, how often each guess was right, from 0 to 1.
        num_nodes: drafted tokens, at least 1; the root is not counted.
        repeats: then the path of best guesses may go on beyond the heads; at those places other paths count as wrong.

    Returns:
        Paths in the order in which they were added. Fewer than asked for where no other guess is ever right.

    Raises:
        ValueError: `num_nodes` is less than 1, or an accuracy is not from 0 to 1.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes}: a tree drafts at least one token")
    _check(accuracies)
    chosen: list[Path] = []
    best: list[tuple[float, int, Path]] = []  # the best of the shortest first

    def offer_children(path: Path) -> None:
        num_ranks = len(accuracies[len(path)]) if len(path) < len(accuracies) else 1
        for child in ((*path, rank) for rank in range(num_ranks)):
            if (value := _value(child, accuracies, repeats)) > 0:
                heapq.heappush(best, (-value, len(child), child))

    offer_children(())
    while best and len(chosen) < num_nodes:
        _, _, path = heapq.heappop(best)
        chosen.append(path)
        offer_children(path)
    return tuple(chosen)


def expected_length(
    paths: Sequence[Sequence[int]], accuracies: Accuracies, repeats: Repeats | None = None
) -> float:
    """Tokens that a step with this tree gives on average, the model's own one included, as far as accuracies tell.

    Args:
        paths: the tree.
        accuracies: `[head][rank]`; what it does not tell of counts as never right.
        repeats: as of `search_tree`.

    Raises:
        ValueError: an accuracy is not from 0 to 1.
    """
    _check(accuracies)
    return 1.0 + sum(_value(path, accuracies, repeats) for path in paths)


def _value(path: Sequence[int], accuracies: Accuracies, repeats: Repeats | None) -> float:
    """How often all tokens of a path are right."""
    is_told = len(path) <= len(accuracies) and all(
        rank < len(ranks) for rank, ranks in zip(path, accuracies, strict=False)
    )
    guessed = prod(ranks[rank] for rank, ranks in zip(path, accuracies, strict=False)) if is_told else 0.0
    if repeats is None:
        return guessed
    repeated = 0.0 if any(path) else repeats.rate ** len(path)
    return repeats.share * repeated + (1 - repeats.share) * guessed


def _check(accuracies: Accuracies) -> None:
    wrong = [value for ranks in accuracies for value in ranks if not (isfinite(value) and 0 <= value <= 1)]
    if wrong:
        raise ValueError(f"accuracies are from 0 to 1, not {wrong[0]}")
