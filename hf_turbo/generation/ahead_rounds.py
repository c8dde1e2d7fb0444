"""Greedy rounds on a GPU with the host one round behind: a draft is verified while the last one's outcome is read.

What a round needs of the one before - the last tokens, how long the rows are, the next guesses of Medusa heads, what a
text said the last time - stays on the device. The host, which must find blocks for the tokens and see where texts end,
catches up one round later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..cache.token_tree import TokenTree
from ..modeling.graphs import Followed
from ..modeling.step_graph import StepGraph
from ..ops.dispatch import accept_round, token_addresses
from .device_texts import DeviceTexts
from .drafts import Draft, Guesses
from .readback import Letter
from .tree_steps import TreeSteps

_ROOT = TokenTree.chain(0)


class GreedyFollower:
    """What follows a verified draft: acceptance, the keys of what is accepted put in a row, the next guesses.

    Args:
        tree: the shape of the draft.
        guesses: makes the next drafts; None: there are none on the device.
        drafts: whether there is one after this round.
    """

    def __init__(self, tree: TokenTree, guesses: Guesses | None, drafts: bool) -> None:
        self._tree, self._drafts = tree, drafts and guesses is not None
        self.guesses = guesses if guesses is not None and (drafts or guesses.keeps_text) else None
        self._addresses: list[tuple[object, torch.Tensor]] | None = None

    @property
    def key(self) -> Hashable:
        """Equal for followers that compute the same."""
        return self._tree, self.guesses, self._drafts

    @property
    def num_columns(self) -> int:
        """Of the next draft as it is left."""
        return 1 if self.guesses is None or not self._drafts else self.guesses.num_columns

    def __call__(self, graph: StepGraph) -> torch.Tensor:
        """For each row of the graph, int64 `[rows, depth + 3 + num_columns]`: the accepted tokens, then at their number
        the model's own; that number; tokens in the cache; the largest next draft as `Guesses` leave it, or the next
        root alone.

        The next round's positions, lengths and tokens are left where the graph reads them, if it is of this shape.
        """
        tokens = graph.tensors["input_ids"].view(-1, self._tree.num_nodes)
        positions = graph.tensors["position_ids"].view(-1, *tokens.shape)
        output: Any = graph.output
        guesses, hidden, room = self.guesses, None, self.num_columns
        if guesses is not None and self._drafts and guesses.reads_hidden:
            hidden = graph.head_input
        tree = self._tree.tensors(tokens.device)
        after = accept_round(
            output.logits.flatten(0, 1), tokens, positions, graph.seq_lens, graph.last_position,
            tree.parents, tree.ancestors, tree.paths, tree.depths, tree.preference,
            hidden=None if hidden is None else hidden.flatten(0, -2), room=room,
        )  # fmt: skip
        if not self._tree.is_chain:
            self._move(graph, after.bases, after.path, after.counts)
        if guesses is not None and self._drafts:
            guesses.follow(after, (after.result[:, -room:], tokens))  # of which tokens are a beginning
        elif guesses is not None:
            guesses.skip(after)
        return after.result

    def _move(self, graph: StepGraph, bases: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
        if self._addresses is None:  # once, before the capture
            self._addresses = []
            for group in graph.groups.values():
                stores = [x.store for x in graph.cache.layers if x.group is group and x.store is not None]
                layers = [group.blocks.cover(store) for store in stores]
                self._addresses.append((token_addresses(layers), group.block_tables))
        for addresses, block_tables in self._addresses:
            addresses.move(block_tables, bases, path, counts)  # type: ignore[attr-defined]


@dataclass
class AheadRound:
    """A round under way: how it comes home, and what was drafted."""

    letter: Letter
    tree: TokenTree
    #: Tokens; None: the outcome of the round before tells.
    num_drafted: int | None


class Outcome(NamedTuple):
    """What a round has come to, a row each."""

    #: The accepted tokens, the model's own after them, -1 beyond, and the number of the accepted ones.
    numbers: list[list[int]]
    #: What the follower left for the next round, as of `Guesses.follow`.
    following: list[list[int]]


class AheadRounds:
    """Rounds of which up to two are under way.

    Args:
        steps: of the rows.
        guesses: drafts on the device, if that is how the drafter works.
    """

    def __init__(self, steps: TreeSteps, guesses: Guesses | None) -> None:
        self._steps, self._guesses = steps, guesses
        self._num_rows = len(steps.lengths)
        self._under_way: deque[AheadRound] = deque()
        self._spare: dict[TokenTree, list[Letter]] = {}  # by draft, as most of one have one shape
        self._following: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._last: Followed | None = None
        self._is_closing = False

    @property
    def has_guesses(self) -> bool:
        """Whether drafts are made on the device."""
        return self._guesses is not None

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def is_closing(self) -> bool:
        """Whether no round may follow those under way: something must be done that only the host can."""
        return self._is_closing

    @property
    def only_plain_under_way(self) -> bool:
        """Whether each round under way brings one token a row."""
        return all(one.tree.num_nodes == 1 for one in self._under_way)

    def launch(self, draft: Draft, drafts: bool) -> bool:
        """Begins the first round; False: there can't be one.

        Args:
            drafts: whether there is a draft after it, made on the device.
        """
        return self._launch(draft.tree, draft.tokens.clamp_min(0), draft.num_drafted, drafts)

    def launch_root(self) -> bool:
        """Begins a plain step behind a round under way; False: there can't be one."""
        return self._launch(_ROOT, None, 0, drafts=False)

    def launch_guess(self, tree: TokenTree) -> bool:
        """The same with what the last round guessed; a plain step that guesses, where it was one that did not."""
        if self._following is None or self._guesses is None:
            raise ValueError("no round is under way whose outcome could be guessed from")
        if self._following.shape[1] < tree.num_nodes:
            tree = _ROOT
        is_told = isinstance(self._guesses, DeviceTexts)
        return self._launch(tree, None, None if is_told else tree.max_depth * self._num_rows, drafts=True)

    def _launch(self, tree: TokenTree, tokens: torch.Tensor | None, num_drafted: int | None, drafts: bool) -> bool:
        """Begins a round, with what the last one left where no tokens are given."""
        follower = GreedyFollower(tree, self._guesses, drafts)
        ahead, last = sum(one.tree.max_depth + 1 for one in self._under_way), self._last
        result = None
        if tokens is None:
            if last is None or self._following is None:
                raise ValueError("no round is under way whose tokens could be gone on from")
            if last.key == follower.key:
                result = self._steps.go_on(tree, last, ahead)
            tokens = self._following[:, : tree.num_nodes]
        if result is None:
            result = self._steps.forward_ahead(tree, tokens, self._lengths, ahead, follower.key, follower)
        if result is None:
            self._is_closing = True
            return False
        self._last = result
        depth = tree.max_depth
        num_nodes = 1 if self._guesses is None else self._guesses.tree.num_nodes  # fewer are there if none are drafted
        self._following = result.result[: self._num_rows, depth + 3 : depth + 3 + num_nodes]
        self._lengths = result.result[: self._num_rows, depth + 2]
        spare = self._spare.setdefault(tree, [])
        letter = (spare.pop() if spare else Letter()).send(result.result)
        self._under_way.append(AheadRound(letter, tree, num_drafted))
        return True

    def receive(self) -> tuple[Outcome, AheadRound]:
        """The oldest round's outcome."""
        one = self._under_way.popleft()
        [result] = one.letter.open()
        self._spare[one.tree].append(one.letter)
        if not self._under_way:
            self._following = self._lengths = self._last = None
        if result is None:
            raise RuntimeError("a round came home without its outcome")
        rows, columns = result[: self._num_rows].tolist(), one.tree.max_depth + 2
        return Outcome([row[:columns] for row in rows], [row[columns + 1 :] for row in rows]), one
