"""Guesses in texts that repeat themselves: where a text has been before, what followed is a better guess than a head's.

It takes the place of the best guesses, one after another, so that the other guesses are verified beside it and a draft
has the same shape wherever it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..cache.token_tree import TokenTree
from ..ops.reference_rounds import Round
from ..ops.transfer import to_device
from .device_texts import CallTexts, DeviceTexts, SpareTexts
from .drafts import DraftContext, Guesses
from .suffix_index import SuffixIndex
from .texts import Texts

if TYPE_CHECKING:
    from .medusa import MedusaDrafter


def best_path(tree: TokenTree) -> list[int]:
    """The nodes that stand for the best guess after another, from the first drafted one on."""
    nodes: list[int] = []
    while children := [node for node in tree.children[nodes[-1] if nodes else 0] if tree.ranks[node] == 0]:
        nodes += children
    return nodes


class RowRepeats:
    """One row's text on the host, and what followed.

    Args:
        tokens: the prompt's.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._num_read = 0

    @cached_property
    def _index(self) -> SuffixIndex:
        """Made when drafts are first asked for."""
        return SuffixIndex(self._tokens)

    def find(self, new: Sequence[int], num_tokens: int, min_match: int) -> list[int]:
        """What followed the last time that the text ended like this; none if it has not.

        Args:
            new: all tokens after the prompt, those included that have been taken in before.
            num_tokens: wanted.
            min_match: tokens that must be alike.
        """
        self._index.extend(new[self._num_read :])
        self._num_read = len(new)
        return self._index.propose(num_tokens, min_match)


def lay_found(tokens: torch.Tensor, columns: torch.Tensor, found: Sequence[Sequence[int]]) -> None:
    """Puts what was found in each row, if anything, into columns of a draft, int64 `[rows, nodes]`."""
    if any(found):
        nothing = [-1] * len(columns)
        laid = to_device([row or nothing for row in found], tokens.device, torch.int64)
        tokens[:, columns] = torch.where(laid >= 0, laid, tokens[:, columns])


class HostRepeats:
    """Of a call's rows, where the host sees each round.

    Args:
        context: of the call.
        drafter: whose guesses they take the place of.
    """

    is_outgrown = False

    def __init__(self, context: DraftContext, drafter: MedusaDrafter) -> None:
        self._drafter = drafter
        self._rows = [RowRepeats(row) for row in context.prompts()]

    def lay_over(self, tokens: torch.Tensor, texts: Texts) -> None:
        """Takes in the texts, and lays what followed over guesses, int64 `[rows, nodes]`."""
        columns, min_match = self._drafter.columns_of_repeats(tokens.device), self._drafter.min_match or 0
        rows = zip(self._rows, texts.new, strict=True)
        lay_found(tokens, columns, [row.find(new, len(columns), min_match) for row, new in rows])

    def begin_ahead(self, newest: torch.Tensor | None = None) -> Guesses:
        """What guesses where the texts stay here."""
        return self._drafter

    def change(self) -> None:
        """The host has seen to a round."""

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows."""
        self._rows = [self._rows[row] for row in rows]

    def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True)
class RepeatingGuesses:
    """Heads' guesses, and over them what followed in texts on the device; see `Guesses`."""

    drafter: MedusaDrafter
    texts: DeviceTexts

    reads_hidden = keeps_text = True

    @property
    def tree(self) -> TokenTree:
        return self.drafter.tree

    @property
    def num_columns(self) -> int:
        return self.drafter.num_columns

    def follow(self, after: Round, out: Sequence[torch.Tensor]) -> None:
        self.drafter.follow(after, out)
        columns = self.drafter.columns_of_repeats(after.lengths.device)
        self.texts.lay_over(after.outcome, after.lengths, columns, out)

    def skip(self, after: Round) -> None:
        self.texts.skip(after)


class DeviceRepeats:
    """Of a call's rows, where rounds go ahead.

    Args:
        context, drafter: as of `HostRepeats`.
        spare: where texts on the device come from, and go to afterwards.
    """

    def __init__(self, context: DraftContext, drafter: MedusaDrafter, spare: SpareTexts) -> None:
        self._drafter = drafter
        self._held = CallTexts(spare, context.texts, context.lengths, context.max_new)
        self._is_known = False

    @property
    def is_outgrown(self) -> bool:
        """Whether the texts have no room any more."""
        return self._held.are_outgrown

    def lay_over(self, tokens: torch.Tensor, texts: Texts) -> None:
        """See `HostRepeats`."""
        self._load([tokens])

    def begin_ahead(self, newest: torch.Tensor | None = None) -> Guesses:
        """Has the device know the texts, `newest` as of `DraftSession`."""
        if not self._is_known:
            self._load([], newest)
        return RepeatingGuesses(self._drafter, self._held.on_device)

    def change(self) -> None:
        """What the device knows is not all."""
        self._is_known = False
        self._held.fit()

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows."""
        self._held.select(rows)
        self._is_known = False

    def close(self) -> None:
        """Gives the texts back."""
        self._held.close()

    def _load(self, drafts: Sequence[torch.Tensor], newest: torch.Tensor | None = None) -> None:
        self._held.fit()
        columns = self._drafter.columns_of_repeats(self._held.device)
        self._held.load_over(columns, drafts, newest)
        self._is_known = True
