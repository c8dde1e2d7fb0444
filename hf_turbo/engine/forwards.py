"""Forwards of one model over a cache whose rows join, leave and differ in length."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.forward_plan import PackedUnsuited
from ..cache.paged_cache import PagedCache
from ..cache.token_tree import TokenTree
from ..compat import CACHE_NAME
from ..generation.step import makes_stock_steps
from ..modeling.head_input import HeadInput
from ..modeling.model_state import has_experts, why_not_together
from ..modeling.step_graph import MAX_PACKED_EXPERTS, MAX_PACKED_ROWS, MAX_PACKED_SEQS, StepGraph
from ..ops.dispatch import argmax, uses_triton
from ..ops.transfer import ints_to_device

_ONE_TOKEN = TokenTree.chain(0)

#: What captured steps are asked for beside their logits.
_LIKELIEST = "likeliest"

#: Whether a model has changed is seen at one captured step in so many.
_LOOK_EVERY = 16


class RowForwards:
    """A cache, and the forwards that fill its rows.

    Nothing is counted before a forward has come to its end: one that raises leaves the cache as it was.

    Args:
        model: a patched model.
        watch: where forwards leave what the model's head is given, if that is asked for.

    Raises:
        PackedUnsuited: the model's forwards take what the rows can't say. Nothing has been done.
    """

    def __init__(self, model: Any, watch: HeadInput | None = None) -> None:
        self._model = model
        self._handle = model._hf_turbo
        self.device: torch.device = model.device
        self.watch = watch
        names = inspect.signature(type(model)._hf_turbo_original_class.forward).parameters
        if "position_ids" not in names:
            raise PackedUnsuited("the model's forward takes no positions")
        if not makes_stock_steps(model):
            raise PackedUnsuited("the model makes its forwards' arguments in a way of its own")
        if (reason := why_not_together(model)) is not None:
            raise PackedUnsuited(reason)
        self._picks_logits = "logits_to_keep" in names
        self._num_forwards = 0
        config = self._handle.config
        #: Whether forwards of few tokens are captured, those included to which rows bring different numbers of them.
        self.captures = uses_triton(self.device) and config.cuda_graphs
        self._has_experts = has_experts(model)
        self.cache = self._new_cache()

    def renew(self) -> None:
        """Begins anew with an empty cache."""
        self.cache.reset()  # an error's traceback may hold it for longer
        self.cache = self._new_cache()

    @property
    def num_rows(self) -> int:
        return self.cache.batch_size

    def probe(self) -> None:
        """Sees whether the model's forwards can be shared by rows, and what a block takes. The rows are gone then.

        Raises:
            PackedUnsuited: they can't.
        """
        knows_blocks = all(group.table.group.block_bytes for group in self.cache.groups.values())
        if self._handle.packs_rows and knows_blocks:
            return
        try:
            self.cache.add_rows(2)
            self.packed(torch.zeros(3, dtype=torch.int64, device=self.device), [2, 1], [1, 2])
            self.step(torch.zeros(2, dtype=torch.int64, device=self.device))
        finally:
            self.renew()
        self._handle.packs_rows = True

    def packed(
        self, tokens: torch.Tensor, q_lens: Sequence[int], wanted: Sequence[int], likeliest: bool = False
    ) -> torch.Tensor:
        """Computes so many tokens of each row in one forward.

        Args:
            tokens: int64 `[total]`, row after row.
            q_lens: how many of each row of the cache.
            wanted: indices of the tokens after which logits are asked for.
            likeliest: the likeliest tokens will do.

        Returns:
            Logits `[len(wanted), vocabulary]`. Where the likeliest tokens do and captured steps say them: int64
            `[len(wanted)]`, those tokens.
        """
        before = self.cache.lengths
        places = [place for start, n in zip(before, q_lens, strict=True) for place in range(start, start + n)]
        positions = ints_to_device(places, self.device)
        dim = 1 if self._captures(len(tokens)) else 0  # a row of the batch for each token
        kwargs: dict[str, Any] = {"input_ids": tokens.unsqueeze(dim), "position_ids": positions.unsqueeze(dim)}
        picks = self._picks_logits and dim == 0
        if picks:
            kwargs["logits_to_keep"] = ints_to_device(wanted, self.device)
        with self._of_rows(packed=list(q_lens), wanted=list(wanted)):
            result = self._replay(kwargs) if likeliest and dim == 1 else None
            if result is None:
                result = self._forward(kwargs)
        self.cache.keep([start + n for start, n in zip(before, q_lens, strict=True)])
        if result.dim() == 1:
            return result[: len(wanted)]
        if picks:
            return result[0]
        if self.watch is not None and self.watch.value is not None:
            hidden = self.watch.value
            keep = ints_to_device(wanted, self.device)
            self.watch.value = hidden.reshape(1, -1, hidden.shape[-1]).index_select(1, keep)
        rows = result.reshape(-1, result.shape[-1])
        if len(rows) == len(wanted):  # a captured step gives no others
            return rows
        return rows.index_select(0, ints_to_device(wanted, self.device))

    def step(self, tokens: torch.Tensor, likeliest: bool = False) -> torch.Tensor:
        """One token of every row, int64 `[rows]`: a decode step.

        Args:
            likeliest: as of `packed`, which says what comes back, too: of all rows.
        """
        lengths = self.cache.lengths
        positions = ints_to_device(lengths, self.device)
        kwargs = {"input_ids": tokens.unsqueeze(1), "position_ids": positions.unsqueeze(1)}
        with self._of_rows(tree=_ONE_TOKEN):
            result = self._replay(kwargs) if likeliest else None
            result = self._forward(kwargs)[:, 0] if result is None else result[: len(tokens)]
        self.cache.keep([length + 1 for length in lengths])
        return result

    def verify(
        self, tree: TokenTree, tokens: torch.Tensor, last_positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A token tree after every row, none of which counts until the cache is told by `keep`.

        Args:
            tree: the shape of every row's draft.
            tokens: int64 `[rows, nodes]`, none of them negative.
            last_positions: of each row: nodes that would go further, of which none will be kept, are given these.

        Returns:
            `[rows, nodes, vocabulary]`.
        """
        lengths = ints_to_device(self.cache.lengths, self.device)
        positions = lengths.unsqueeze(1) + tree.tensors(self.device).depths
        if last_positions is not None:
            positions = torch.minimum(positions, ints_to_device(last_positions, self.device).unsqueeze(1))
        kwargs = {"input_ids": tokens.reshape(-1, 1), "position_ids": positions.reshape(-1, 1)}
        with self._of_rows(tree=tree):
            return self._forward(kwargs).view(*tokens.shape, -1)

    def _captures(self, num_tokens: int) -> bool:
        """Whether a forward of so many tokens of all rows is one that is captured."""
        most = MAX_PACKED_EXPERTS if self._has_experts else MAX_PACKED_ROWS
        if not self.captures or num_tokens > most or self.num_rows > MAX_PACKED_SEQS:
            return False
        return self._knows_model() and not self._handle.steps.is_refused

    def _knows_model(self) -> bool:
        """Whether a forward has nothing to tell of the model that it tells in the model's own way alone."""
        cache, pool = self.cache, self.cache.pool
        if any(cache.lengths):  # beside others' tokens no prompt says what the layers' codes are to be
            return True
        cache.adopt_stores()
        stores_are_there = all(layer.store is not None and pool.is_settled(layer.layer_idx) for layer in cache.layers)
        return stores_are_there and self._handle.packs_rows

    def _new_cache(self) -> PagedCache:
        cache: PagedCache = self._handle.new_cache()
        cache.is_given = False
        cache.head_input = self.watch
        return cache

    @torch.no_grad()
    def _forward(self, kwargs: dict[str, Any]) -> torch.Tensor:
        """Logits `[batch, columns, vocabulary]`.

        Raises:
            RuntimeError: the model is not patched any more as it was: the forward may have been half of each kind.
        """
        try:
            output = self._model(**self._arguments(kwargs))
        except Exception as error:
            self._check_patched(error)
            raise
        self._note_forward()
        return output.logits

    @torch.no_grad()
    def _replay(self, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The likeliest tokens, int64 `[rows, or more]`, by captured steps that are there already; None: none are.

        Two graphs: the step, and what is likeliest of its logits, which nobody needs to see.
        """
        if self.watch is not None or not self.captures or self._handle.steps.is_refused:
            return None
        followed = self._handle.steps.run_drafts(
            self.cache, self._arguments(kwargs), None, None, 0, _LIKELIEST, _likeliest
        )
        if followed is None:
            return None
        self._note_forward()
        return followed.result

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, CACHE_NAME: self.cache, "use_cache": True, "return_dict": True}

    def _note_forward(self) -> None:
        self._check_patched()
        # No code of the user's runs between the steps, but other threads' may.
        self._num_forwards += 1
        self.cache.model_is_as_it_was = self._num_forwards % _LOOK_EVERY != 0

    def _check_patched(self, cause: Exception | None = None) -> None:
        if getattr(self._model, "_hf_turbo", None) is not self._handle:
            raise RuntimeError(
                "the model was unpatched, or patched anew, while requests were under way: stop the manager before that"
            ) from cause

    @contextmanager
    def _of_rows(
        self, tree: TokenTree | None = None, packed: list[int] | None = None, wanted: list[int] | None = None
    ) -> Iterator[None]:
        layout = self.cache.layout
        layout.tree, layout.packed, layout.wanted, layout.only_ones_follow = tree, packed, wanted or [], True
        try:
            yield
        finally:
            layout.tree, layout.packed, layout.wanted, layout.only_ones_follow = None, None, [], False


def _likeliest(graph: StepGraph) -> torch.Tensor:
    """The likeliest token of each row of a captured step's logits, int64 `[rows]`."""
    output: Any = graph.output
    return argmax(output.logits.flatten(0, 1))
