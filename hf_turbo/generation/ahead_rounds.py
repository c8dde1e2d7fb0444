"""Greedy rounds on a GPU with the host one round behind: a draft is verified while the last one's outcome is read.

What a round needs of the one before - the last tokens, how long the rows are, the next guesses of Medusa heads - stays
on the device. The host, which must find blocks for the tokens and see where texts end, catches up one round later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.token_tree import TokenTree
from ..modeling.graphs import Followed
from ..modeling.step_graph import StepGraph
from ..ops.dispatch import accept_drafts, argmax, token_addresses
from .drafts import Draft, Guesses
from .readback import Letter
from .tree_steps import TreeSteps

_ROOT = TokenTree.chain(0)


class GreedyFollower:
    """What follows a verified draft: acceptance, the keys of what is accepted put in a row, the next guesses.

    Args:
        tree: the shape of the draft.
        guesses: makes the next drafts; None: there are none on the device.
    """

    def __init__(self, tree: TokenTree, guesses: Guesses | None) -> None:
        self._tree, self._guesses = tree, guesses
        self._addresses: list[tuple[object, torch.Tensor]] | None = None

    @property
    def key(self) -> Hashable:
        """Equal for followers that compute the same."""
        return self._tree, id(self._guesses)

    def __call__(self, graph: StepGraph) -> torch.Tensor:
        """For each row of the graph, int64 `[rows, depth + 3 + nodes]`: the accepted tokens, then at their number the
        model's own; that number; tokens in the cache; the next draft, or the next root alone.

        The next round's positions, lengths and tokens are left where the graph reads them.
        """
        num_nodes = self._tree.num_nodes
        tokens = graph.tensors["input_ids"].view(-1, num_nodes)
        output: Any = graph.output
        chosen = argmax(output.logits.flatten(0, 1)).view(tokens.shape)
        tree = self._tree.tensors(tokens.device)
        verdict = accept_drafts(
            tokens, chosen, graph.seq_lens, tree.parents, tree.ancestors, tree.paths, tree.depths, tree.preference
        )
        if not self._tree.is_chain:
            self._move(graph, graph.seq_lens - num_nodes, verdict.path, verdict.counts)
        following = verdict.roots.unsqueeze(1)
        if self._guesses is not None:
            hidden = graph.head_input
            if hidden is not None:
                rows = torch.arange(len(tokens), device=tokens.device) * num_nodes
                hidden = hidden.flatten(0, -2).index_select(0, rows + verdict.last)
            following = self._guesses.guess(hidden, verdict.roots)
        lengths = verdict.lengths.unsqueeze(1)
        result = torch.cat([verdict.outcome, lengths, following], dim=1)
        if following.shape == tokens.shape:
            tokens.copy_(following)
        positions = graph.tensors["position_ids"]
        by_node = positions.view(*positions.shape[:-2], -1, num_nodes)
        roots = by_node[..., :1] + verdict.counts.unsqueeze(1)
        by_node.copy_(torch.minimum(roots + tree.depths, graph.last_position))
        # Rows that are not used stay empty.
        graph.seq_lens.copy_(torch.where(graph.seq_lens > num_nodes, graph.seq_lens + verdict.counts, 0))
        return result

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
    depth: int
    num_drafted: int


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
        self._spare = [Letter(), Letter()]
        self._following: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._last: Followed | None = None
        self._is_closing = False

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
        return all(one.depth == 0 for one in self._under_way)

    def launch(self, draft: Draft) -> bool:
        """Begins a round; False: there can't be one, now or behind those under way.

        Args:
            draft: its root does not count where a round is under way: it is on the device then.
        """
        tokens = draft.tokens
        if self._following is not None:
            tokens = torch.cat([self._following[:, :1], tokens[:, 1:]], dim=1)
        return self._launch(draft.tree, tokens, draft.num_drafted, guesses=draft.num_drafted > 0)

    def launch_root(self) -> bool:
        """The same without a draft, behind a round under way."""
        if self._following is None:
            raise ValueError("no round is under way whose tokens could be gone on from")
        root = self._following if self._following.shape[1] == 1 else self._following[:, :1]
        return self._launch(_ROOT, root, 0)

    def launch_guess(self) -> bool:
        """The same with what the last round guessed; a plain step that guesses, where it was one that did not."""
        if self._guesses is None or self._following is None:
            raise ValueError("no round is under way whose outcome could be guessed from")
        tree = self._guesses.tree
        if self._following.shape[1] != tree.num_nodes:
            return self._launch(_ROOT, self._following[:, :1], 0, guesses=True)
        return self._launch(tree, self._following, tree.max_depth * self._num_rows, guesses=True)

    def _launch(self, tree: TokenTree, tokens: torch.Tensor, num_drafted: int, guesses: bool = False) -> bool:
        follower = GreedyFollower(tree, self._guesses if guesses else None)
        ahead, last = sum(one.depth + 1 for one in self._under_way), self._last
        result = None
        if last is not None and tokens is self._following and last.key == follower.key:
            result = self._steps.go_on(tree, last, ahead)
        if result is None:
            drafted = tokens.clamp_min(0)
            result = self._steps.forward_ahead(tree, drafted, self._lengths, ahead, follower.key, follower)
        if result is None:
            self._is_closing = True
            return False
        self._last = result
        columns = tree.max_depth + 2
        outcome, lengths, following = result.result.tensor_split([columns, columns + 1], dim=1)
        self._following, self._lengths = following[: self._num_rows], lengths[: self._num_rows, 0]
        letter = self._spare.pop().send(outcome)
        self._under_way.append(AheadRound(letter, tree.max_depth, num_drafted))
        return True

    def receive(self) -> tuple[list[list[int]], AheadRound]:
        """The oldest round's outcome, a row each: accepted tokens, the model's own after them, their number last."""
        one = self._under_way.popleft()
        [outcome] = one.letter.open()
        self._spare.append(one.letter)
        if not self._under_way:
            self._following = self._lengths = self._last = None
        if outcome is None:
            raise RuntimeError("a round came home without its outcome")
        return outcome[: self._num_rows].tolist(), one
