"""Trees of drafted tokens: what is proposed after the last chosen token, and what each node may see."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

#: Nodes of a tree, the root included: a node's ancestors are the bits of one 64-bit number.
MAX_NODES = 64


@dataclass(frozen=True)
class TokenTree:
    """The shape of a draft: node 0 is the last chosen token, the others are drafted after an earlier node.

    A forward over the `num_nodes` tokens says for each node what follows it. Trees are compared and hashed by their
    shape, so that what was made for one serves its equals. A copy, also an unpickled one, has no tensors yet.

    Args:
        parents: each node's parent, -1 for the root. A node comes after its parent, and after siblings that are
            preferred to it.
        ranks: which of the drafter's guesses after its parent a node stands for, ascending among the children of a
            node; 0 for the root. By default the first child is rank 0, the second rank 1, and so on.

    Raises:
        ValueError: for more than 64 nodes, or parents or ranks that are not as said.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parents = tuple(int(parent) for parent in self.parents)
        _check_parents(parents)
        ranks = tuple(int(rank) for rank in self.ranks) or _birth_order(parents)
        _check_ranks(parents, ranks)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "ranks", ranks)

    def __reduce__(self) -> tuple[type[TokenTree], tuple[tuple[int, ...], tuple[int, ...]]]:
        return TokenTree, (self.parents, self.ranks)

    @staticmethod
    def chain(num_drafted: int) -> TokenTree:
        """The root and so many tokens, one after another; the same object for the same number.

        Raises:
            ValueError: for fewer than 0 or more than 63.
        """
        if not 0 <= num_drafted < MAX_NODES:
            raise ValueError(f"A chain has 0 to {MAX_NODES - 1} drafted tokens, not {num_drafted}.")
        return _chain(num_drafted)

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[int]], as_given: bool = False) -> TokenTree:
        """A tree from paths of ranks, the form in which Medusa publishes its trees (`medusa_choices`).

        Args:
            paths: one a drafted token: `[0]` is the first guess after the root, `[0, 2]` the third guess after that.
                The root's own path, which is empty, may be left out.
            as_given: nodes are in the order of the paths, of which each comes after its beginning and after siblings
                of lower rank. Otherwise by depth, then as lists compare.

        Raises:
            ValueError: for a path whose beginning is not there, one given twice, a negative rank, or too many.
        """
        drafted = [tuple(int(rank) for rank in path) for path in paths if len(path)]
        if not as_given:
            drafted.sort(key=lambda path: (len(path), path))
        nodes = {path: i for i, path in enumerate(((), *drafted))}
        if len(nodes) != len(drafted) + 1:
            raise ValueError("A path is given twice; each node of a tree has one path.")
        for path in drafted:
            if path[:-1] not in nodes:
                raise ValueError(f"The path {list(path)} needs its beginning, {list(path[:-1])}, which is not there.")
        parents = (-1, *(nodes[path[:-1]] for path in drafted))
        return cls(parents, (0, *(path[-1] for path in drafted)))

    @property
    def num_nodes(self) -> int:
        """How many tokens a forward takes, the root included."""
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """How many drafted tokens lead to each node, itself included; 0 for the root."""
        return _depths(self.parents)

    @functools.cached_property
    def max_depth(self) -> int:
        """The most drafted tokens that can be accepted."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.max_depth == self.num_nodes - 1

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each node's children in order of preference."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @functools.cached_property
    def most_children(self) -> tuple[int, ...]:
        """The most children that a node has, for each depth that has any: `max_depth` numbers."""
        most = [0] * (self.max_depth + 1)
        for depth, children in zip(self.depths, self.children, strict=True):
            most[depth] = max(most[depth], len(children))
        return tuple(most[:-1])

    @functools.cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes from the root to each node, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    def ancestor_masks(self, window: int | None = None) -> list[int]:
        """Which nodes each node sees, one bit a node (bit j: node j), as signed 64-bit numbers for `torch.int64`.

        Args:
            window: a layer's sliding window in tokens: a node sees itself and the `window - 1` before it. None: all.

        Raises:
            ValueError: for a window of less than one token.
        """
        if window is not None and window < 1:
            raise ValueError(f"A window holds at least one token, not {window}.")
        first = 0 if window is None else -window
        masks = [sum(1 << node for node in path[first:]) for path in self.paths]
        return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]

    def beginning(self, num_nodes: int) -> TokenTree:
        """The tree of its first nodes; the same object for the same number."""
        if num_nodes not in self._beginnings:
            self._beginnings[num_nodes] = TokenTree(self.parents[:num_nodes], self.ranks[:num_nodes])
        return self._beginnings[num_nodes]

    def pruned(self, max_depth: int, max_rank: int) -> TokenTree:
        """The tree without the nodes that are deeper or of a higher rank than said, and without what follows those.

        Args:
            max_depth: how many tokens ahead the drafter can guess.
            max_rank: the last rank that it can give: one less than the number of its guesses for a place.
        """
        kept: dict[int, int] = {-1: -1}
        for node, parent in enumerate(self.parents):
            if parent in kept and self.depths[node] <= max_depth and self.ranks[node] <= max_rank:
                kept[node] = len(kept) - 1
        nodes = [node for node in kept if node >= 0]
        return TokenTree(tuple(kept[self.parents[i]] for i in nodes), tuple(self.ranks[i] for i in nodes))

    def tensors(self, device: torch.device | str) -> TreeTensors:
        """What acceptance reads of the tree on a device.

        Made once a device, and kept as long as the tree. The first call copies from the host: make it before a CUDA
        graph is captured.
        """
        device = torch.device(device)
        if device not in self._tensors:
            self._tensors[device] = TreeTensors.of(self, device)
        return self._tensors[device]

    @functools.cached_property
    def _beginnings(self) -> dict[int, TokenTree]:
        return {self.num_nodes: self}

    @functools.cached_property
    def _tensors(self) -> dict[torch.device, TreeTensors]:
        return {}


@dataclass(frozen=True)
class TreeTensors:
    """A tree on a device, int64; N nodes, D the greatest depth, C the most children of a node."""

    #: `[N]`; the root is its own parent here.
    parents: torch.Tensor
    #: `[N]`
    depths: torch.Tensor
    #: `[N, C]`, -1 where a node has fewer.
    children: torch.Tensor
    #: `[N, D + 1]`: the node at depth k on the way to each node; k beyond the node's own depth.
    paths: torch.Tensor
    #: `[N, D + 1]`: the same, but the root beyond the node's own depth.
    ancestors: torch.Tensor
    #: `[N]`: positive, all different, greater for deeper nodes, and among those of one depth for earlier ones.
    preference: torch.Tensor

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device) -> TreeTensors:
        """Copies what there is to know of a tree to a device."""
        steps, nodes = range(tree.max_depth + 1), range(tree.num_nodes)
        fan_out = max(tree.most_children, default=0)
        lists = dict(
            parents=[max(parent, 0) for parent in tree.parents],
            depths=tree.depths,
            children=[kids + (-1,) * (fan_out - len(kids)) for kids in tree.children],
            paths=[path + tuple(steps[len(path) :]) for path in tree.paths],
            ancestors=[path + (0,) * (len(steps) - len(path)) for path in tree.paths],
            preference=[depth * len(nodes) + len(nodes) - i for i, depth in enumerate(tree.depths)],
        )
        return cls(**{name: torch.tensor(x, dtype=torch.int64, device=device) for name, x in lists.items()})


@functools.cache
def _chain(num_drafted: int) -> TokenTree:
    """One is asked for at every round: what a device needs to know of it is copied there once."""
    return TokenTree(tuple(range(-1, num_drafted)))


def _check_parents(parents: tuple[int, ...]) -> None:
    if not 1 <= len(parents) <= MAX_NODES:
        raise ValueError(f"A tree has 1 to {MAX_NODES} nodes, not {len(parents)}.")
    if parents[0] != -1:
        raise ValueError(f"Node 0 is the root, whose parent is -1, not {parents[0]}.")
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(f"Node {node}'s parent must be an earlier node, 0 to {node - 1}, not {parent}.")


def _check_ranks(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    if len(ranks) != len(parents) or ranks[0] != 0:
        raise ValueError(f"There is one rank a node, 0 for the root; {len(parents)} nodes have the ranks {ranks}.")
    last: dict[int, int] = {}
    for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
        if rank <= last.get(parent, -1):
            raise ValueError(f"Ranks are at least 0 and ascend among a node's children; node {node} has {rank}.")
        last[parent] = rank


def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return tuple(depths)


def _birth_order(parents: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(parents[:node].count(parent) for node, parent in enumerate(parents))
