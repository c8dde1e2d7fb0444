"""Forwards of drafted tokens over a cache whose rows may differ in length."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.forward_plan import DraftsUnsuited
from ..cache.paged_cache import PagedCache
from ..cache.token_tree import TokenTree
from ..compat import CACHE_NAME
from ..modeling.graphs import Followed
from ..modeling.step_graph import Follower
from ..ops.transfer import to_device

#: Arguments of a step that are made here.
_OWN = ("input_ids", "attention_mask", "position_ids")


class TreeSteps:
    """One forward after another: a token tree after each row's text, of which some nodes are kept.

    To the model a forward is a decode step with a row for each node; only attention and the cache know that the nodes
    of a tree belong together. So whatever a model does in a decode step, it does in these, captured ones included.

    Args:
        model: a patched model.
        model_kwargs: what `generate()` handed to the loop, as the prompt's forward has left it.
        first: tokens that would follow the rows, int64 `[rows, 1]`: the model's own methods make a step's arguments.
        max_new: tokens that a row may get: positions of drafts do not go further. None without a limit.
        alone: no code of the caller's runs between the steps.

    Raises:
        DraftsUnsuited: the model's steps take arguments that are not known. Nothing has been done.
    """

    def __init__(
        self, model: Any, model_kwargs: dict[str, Any], first: torch.Tensor, max_new: int | None, alone: bool
    ) -> None:
        self.cache: PagedCache = model_kwargs[CACHE_NAME]
        self._model = model
        self._alone = alone
        inputs = model.prepare_inputs_for_generation(first, next_sequence_length=1, **model_kwargs)
        positions = inputs.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.shape[-2:] not in ((1, 1), (len(first), 1)):
            raise DraftsUnsuited("the model's steps take no positions")
        self._inputs = {name: x for name, x in inputs.items() if name not in _OWN}
        others = [name for name, x in self._inputs.items() if isinstance(x, torch.Tensor)]
        if others:
            raise DraftsUnsuited(f"the model's steps take {', '.join(others)}")
        self._inputs["return_dict"] = True
        self.lengths = self.cache.layout.lengths(self.cache.get_seq_length())
        # Positions may not begin at 0 (right padding, images): they go on from the first step's.
        lengths = to_device(self.lengths, positions.device)
        self._offsets = positions.expand(*positions.shape[:-2], len(first), 1) - lengths.unsqueeze(1)
        self._last_position = None if max_new is None else positions.amax() + max(max_new - 1, 0)
        #: Tokens of each row, with what is drafted, up to which no position comes to the last one.
        self._limits = [length + max((max_new or 1) - 1, 0) for length in self.lengths]
        self._places: dict[TokenTree, torch.Tensor] = {}  # positions of nodes in rows without tokens

    def forward(self, tree: TokenTree, tokens: torch.Tensor) -> torch.Tensor:
        """What the model says after each node, `[rows, nodes, vocabulary]`.

        Args:
            tree: the shape of every row's draft.
            tokens: int64 `[rows, nodes]`; -1 where there is none.
        """
        lengths = torch.tensor(self.lengths).to(self._offsets.device, non_blocking=True)
        with self._verifying(tree):
            outputs = self._model(**self._arguments(tree, tokens.clamp_min(0), lengths))
        self.cache.model_is_as_it_was = self._alone
        return outputs.logits.view(*tokens.shape, -1)

    def forward_ahead(
        self,
        tree: TokenTree,
        tokens: torch.Tensor,
        lengths: torch.Tensor | None,
        ahead: int,
        key: Hashable,
        follower: Follower,
    ) -> Followed | None:
        """The same where the host need not know how long rows are, and what is computed of it: two captured graphs.

        Args:
            tree: the shape of every row's draft.
            tokens: int64 `[rows, nodes]`, none of them -1.
            lengths: tokens of each row, int64 `[rows]`; None where no forward is under way.
            ahead: tokens that a row may have got by forwards under way, at most.
            key, follower: as of `StepGraph.follow`.

        Returns:
            None where there is no graph yet, or no more: `forward` makes it.
        """
        known = lengths
        if known is None:
            known = torch.tensor(self.lengths).to(self._offsets.device, non_blocking=True)
        with self._verifying(tree):
            arguments = self._arguments(tree, tokens, known, ahead) | {CACHE_NAME: self.cache}
            result = self._model._hf_turbo.steps.run_drafts(
                self.cache, arguments, lengths, self._last_position, ahead, key, follower
            )
        self.cache.model_is_as_it_was |= result is not None and self._alone
        return result

    def go_on(self, tree: TokenTree, last: Followed, ahead: int) -> Followed | None:
        """The same with what the follower has left as the next draft; None where that is there no more."""
        with self._verifying(tree):
            return self._model._hf_turbo.steps.run_drafts_again(self.cache, last, ahead)

    def note(self, added: Sequence[int]) -> None:
        """Counts tokens of a forward while another is under way; `keep` comes after the last."""
        self.lengths = [length + n for length, n in zip(self.lengths, added, strict=True)]
        self.cache.note_lengths(self.lengths)

    def keep(self, added: Sequence[int], may_shrink: bool = False) -> None:
        """Makes rows longer by so many tokens of the last forward; or shorter, where a number is negative.

        Args:
            may_shrink: as of `PagedCache.keep`.
        """
        self.lengths = [length + n for length, n in zip(self.lengths, added, strict=True)]
        self.cache.keep(self.lengths, may_shrink)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows."""
        self.cache.select_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self._limits = [self._limits[row] for row in rows]
        self._offsets = self._offsets.index_select(-2, to_device(rows, self._offsets.device, torch.int64))
        self._places.clear()

    def close(self) -> None:
        """After the last step."""
        self.cache.model_is_as_it_was = False

    @contextmanager
    def _verifying(self, tree: TokenTree) -> Iterator[None]:
        layout = self.cache.layout
        layout.tree, layout.only_ones_follow = tree, True
        try:
            yield
        finally:
            layout.tree, layout.only_ones_follow = None, False

    def _arguments(
        self, tree: TokenTree, tokens: torch.Tensor, lengths: torch.Tensor, ahead: int = 0
    ) -> dict[str, Any]:
        """A forward's arguments: tokens and positions `[rows * nodes, 1]`, and what a step of this model takes.

        Args:
            ahead: tokens that a row may have got by forwards under way, at most.
        """
        if tree not in self._places:
            self._places[tree] = self._offsets + tree.tensors(self._offsets.device).depths
        positions = self._places[tree] + lengths.unsqueeze(1)
        reach = ahead + tree.max_depth
        reached = (length + reach > limit for length, limit in zip(self.lengths, self._limits, strict=True))
        if self._last_position is not None and any(reached):
            positions = torch.minimum(positions, self._last_position)
        positions = positions.reshape(*positions.shape[:-2], -1, 1)
        return {"input_ids": tokens.reshape(-1, 1), "position_ids": positions, **self._inputs}
