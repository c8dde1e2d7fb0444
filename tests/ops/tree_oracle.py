"""Random token trees over a paged cache, and what their nodes should see in float64.

Independent of the code under test, and written out node by node: a node's keys are gathered one by one, from what was
put into the cache.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from oracle import GARBAGE_BLOCK, PagedCase, attend, make_case

from hf_turbo.ops.metadata import TreeNodes

#: Bits of a mask beyond a sequence's own nodes, which no one may look at.
GARBAGE_BITS = 0x5A5A_5A5A_5A5A_5A5A


@dataclass
class Tree:
    """Parents of a sequence's nodes, which come before their children; the root's is -1."""

    parents: list[int]

    def path(self, node):
        """A node's ancestors and itself, from the root down."""
        above = [] if self.parents[node] < 0 else self.path(self.parents[node])
        return [*above, node]

    def depth(self, node):
        return len(self.path(node)) - 1

    def mask(self, node, window):
        """The nodes that a node sees: those of its path that are within the window of its position."""
        path = self.path(node)
        bits = sum(1 << j for j in path[-window if window else None :])
        bits |= GARBAGE_BITS >> len(self.parents) << len(self.parents) & (1 << 64) - 1
        return bits - (1 << 64) if bits >> 63 else bits


def random_tree(num_nodes, seed, chain=False):
    generator = random.Random(seed)
    return Tree([-1, *(j if chain else generator.randint(max(j - 4, 0), j) for j in range(num_nodes - 1))])


def tree_nodes(trees, window=None, device="cpu"):
    """What `AttentionMetadata.tree` is of these trees, one a sequence."""
    nodes = [(tree, j) for tree in trees for j in range(len(tree.parents))]
    return TreeNodes(
        torch.tensor([tree.mask(j, window) for tree, j in nodes], dtype=torch.int64, device=device),
        torch.tensor([tree.depth(j) for tree, j in nodes], dtype=torch.int32, device=device),
    )


def make_tree_case(committed, num_nodes, *, chain=False, unused=(), seed=0, **options) -> tuple[PagedCase, list[Tree]]:
    """A case whose queries are trees' nodes, `num_nodes` a sequence, after so many committed tokens.

    Args:
        unused: sequences of length 0, whose table and masks are garbage.
        options: as of `make_case`.
    """
    count = len(committed)
    case = make_case([num_nodes] * count, [n + num_nodes for n in committed], seed=seed, **options)
    trees = [random_tree(num_nodes, seed + i, chain) for i in range(count)]
    metadata = case.metadata
    nodes = tree_nodes(trees, metadata.sliding_window, case.q.device)
    for row in unused:
        metadata.seq_lens[row] = metadata.seq_lens_cpu[row] = 0
        metadata.block_tables[row] = GARBAGE_BLOCK
        metadata.block_ids_cpu[row], metadata.first_blocks_cpu[row] = [], 0
        case.keys[row], case.values[row] = case.keys[row][:0], case.values[row][:0]
        nodes.masks[row * num_nodes : (row + 1) * num_nodes] = -1
        nodes.depths[row * num_nodes : (row + 1) * num_nodes] = 1 << 20
    case.metadata = replace(metadata, tree=nodes)
    return case, trees


def visible_slots(tree, committed, node, window):
    """The slots that a node sees: committed tokens and nodes of its path, of which its position leaves some."""
    path = [*range(committed), *(committed + j for j in tree.path(node))]
    return path[-window if window else None :]


def expected(case: PagedCase, trees: list[Tree]) -> torch.Tensor:
    """The result in float64, `[total_q, num_heads, v_head_dim]`; zeros for sequences of length 0."""
    return torch.cat([_of_sequence(case, trees, row, torch.float64, torch.float64) for row in range(len(trees))])


def _of_sequence(case, trees, row, dtype, softmax_dtype):
    num_nodes = len(trees[row].parents)
    queries = case.q[row * num_nodes : (row + 1) * num_nodes]
    out = torch.zeros(*queries.shape[:2], case.values[row].shape[2], dtype=dtype, device=case.q.device)
    committed = len(case.keys[row]) - num_nodes
    for node in range(num_nodes if committed >= 0 else 0):
        slots = visible_slots(trees[row], committed, node, case.metadata.sliding_window)
        # One query over the keys that it sees, in the order of the text: a decode step.
        step = replace(case, q=queries[node : node + 1], keys=[case.keys[row][slots]], values=[case.values[row][slots]])
        step.metadata = replace(case.metadata, q_lens_cpu=[1], sliding_window=None, tree=None)
        out[node] = attend(step, dtype, softmax_dtype)[0]
    return out


def allowed_error(case: PagedCase, trees: list[Tree]) -> float:
    """Twice the error of plain attention over the same keys in the case's dtype, and a little for tiny cases."""
    rows = range(len(trees))
    stock = torch.cat([_of_sequence(case, trees, row, case.q.dtype, torch.float32) for row in rows])
    tiny = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[case.q.dtype]
    error = (stock - expected(case, trees)).abs().max().item()
    assert math.isfinite(error)
    return 2 * error + tiny
