"""Acceptance of greedy drafts against a walk down each row's tree, and against `accept_greedy`."""

import random

import pytest
import torch
from tree_oracle import random_tree

from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.generation.acceptance import accept_greedy
from hf_turbo.ops import reference_drafts

GARBAGE = [-(2**63), 2**63 - 1, -1, 1 << 40]


def trees():
    """The root alone, chains, binary trees and random ones, whose nodes are ordered by depth."""
    yield from (TokenTree.chain(num_drafted) for num_drafted in (0, 1, 4, 63))
    yield TokenTree((-1, *(node // 2 for node in range(63))))
    for num_nodes, seed in ((2, 0), (7, 1), (9, 2), (33, 3), (64, 4)):
        tree = random_tree(num_nodes, seed)
        children = {node: [] for node in range(-1, num_nodes)}
        for node, parent in enumerate(tree.parents):
            children[parent].append(node)
        order = [0]
        for node in order:
            order += children[node]
        yield TokenTree((-1, *(order.index(tree.parents[node]) for node in order[1:])))


def make_case(tree, rows, vocabulary, seed):
    """Random tokens, few of them, so that some paths agree; `seq_lens` have room for the tree."""
    generator = torch.Generator().manual_seed(seed)
    tokens, chosen = (torch.randint(vocabulary, (rows, tree.num_nodes), generator=generator) for _ in range(2))
    seq_lens = torch.randint(tree.num_nodes, 9000, (rows,), generator=generator).to(torch.int32)
    return tokens, chosen, seq_lens


def call(tree, *case):
    t = tree.tensors("cpu")
    of_tree = (t.parents, t.ancestors, t.paths, t.depths, t.preference)
    return reference_drafts.accept_drafts(*case, *of_tree)


def walk(tree, tokens, chosen):
    """The longest path of agreeing nodes, the first of several as long, by looking at every child."""
    frontier, longest = [[0]], [0]
    while frontier:
        longest = frontier[0]
        frontier = [
            [*path, child]
            for path in frontier
            for child in tree.children[path[-1]]
            if tokens[child] == chosen[path[-1]]
        ]
    return longest


def expected(tree, tokens, chosen, seq_lens):
    """The verdict's fields as lists."""
    fields = [[] for _ in reference_drafts.Verdict._fields]
    steps = tree.max_depth + 1
    for row_tokens, row_chosen, seq_len in zip(tokens.tolist(), chosen.tolist(), seq_lens.tolist(), strict=True):
        path = walk(tree, row_tokens, row_chosen)
        own = row_chosen[path[-1]]
        text = [*(row_tokens[node] for node in path[1:]), own]
        of_row = (
            [*text, *[-1] * (steps - len(text)), len(path) - 1],
            [*path, *range(len(path), steps)],
            len(path), path[-1], own, seq_len - tree.num_nodes + len(path),
        )  # fmt: skip
        for field, value in zip(fields, of_row, strict=True):
            field.append(value)
    return fields


def test_agrees_with_a_walk():
    depths = set()
    for seed, tree in enumerate(trees()):
        for num_rows, vocabulary in zip((1, 3, 4), (2, 1, 3), strict=True):
            case = make_case(tree, num_rows, vocabulary, seed)
            verdict = call(tree, *case)
            wanted = expected(tree, *case)
            assert [x.tolist() for x in verdict] == wanted
            depths |= set(wanted[2])
    assert {1, 2, 3, 64} <= depths  # nothing is accepted, a little, all of a long chain


def test_agrees_with_accept_greedy():
    for seed, tree in enumerate(trees()):
        tokens, chosen, seq_lens = make_case(tree, 4, 2, seed)
        verdict = call(tree, tokens, chosen, seq_lens)
        accepted = accept_greedy(tree, tokens, chosen)
        assert torch.equal(verdict.outcome[:, :-1].cpu(), accepted.tokens)
        assert torch.equal(verdict.outcome[:, -1].cpu(), accepted.counts)
        assert torch.equal(verdict.path.cpu().long(), accepted.path)


def test_dtypes():
    tree = TokenTree.chain(2)
    verdict = call(tree, *make_case(tree, 2, 2, 0))
    wide, narrow = torch.int64, torch.int32
    assert [x.dtype for x in verdict] == [wide, narrow, narrow, wide, wide, wide]
    assert [list(x.shape) for x in verdict] == [[2, 4], [2, 3], [2], [2], [2], [2]]


def test_a_row_of_garbage_changes_no_other():
    for seed, tree in enumerate(trees()):
        tokens, chosen, seq_lens = make_case(tree, 4, 2, seed)
        for row in (0, 2):
            tokens[row], chosen[row] = (
                torch.tensor(random.Random(seed + i).choices(GARBAGE, k=tree.num_nodes)) for i in (row, row + 10)
            )
            seq_lens[row] = 0
        verdict = call(tree, tokens, chosen, seq_lens)
        # Rows of garbage follow the same rule; the root counts whatever it is.
        assert [x.tolist() for x in verdict] == expected(tree, tokens, chosen, seq_lens)


def test_of_equal_siblings_the_first_counts():
    tree = TokenTree((-1, 0, 0, 1, 2, 2))
    tokens = torch.tensor([[9, 5, 5, 6, 7, 7], [9, 5, 5, 8, 7, 7], [9, 5, 5, 8, 8, 8]])
    chosen = torch.tensor([[5, 6, 7, 1, 2, 3]] * 3)
    verdict = call(tree, tokens, chosen, torch.tensor([10, 20, 30], dtype=torch.int32))
    assert verdict.last.tolist() == [3, 4, 1]
    assert verdict.outcome.tolist() == [[5, 6, 1, 2], [5, 7, 2, 2], [5, 6, -1, 1]]
    assert verdict.lengths.tolist() == [7, 17, 26]


def test_no_rows():
    tree = TokenTree.chain(2)
    verdict = call(tree, *make_case(tree, 0, 2, 0))
    assert [list(x.shape) for x in verdict] == [[0, 4], [0, 3], [0], [0], [0], [0]]


@pytest.mark.parametrize(
    "name, change",
    [
        ("tokens", lambda x: x.to(torch.int32)),
        ("tokens", lambda x: x[0]),
        ("chosen", lambda x: x[:, 1:]),
        ("chosen", lambda x: x.t().contiguous().t()),
        ("seq_lens", lambda x: x.long()),
        ("parents", lambda x: x.to(torch.int32)),
        ("ancestors", lambda x: x[:, 1:].contiguous()),
        ("paths", lambda x: x[:, :0]),
        ("depths", lambda x: x[1:]),
        ("preference", lambda x: x.float()),
    ],
)
def test_refuses_other_tensors(name, change):
    tree = TokenTree.chain(2)
    tokens, chosen, seq_lens = make_case(tree, 2, 2, 0)
    t = tree.tensors("cpu")
    given = dict(
        tokens=tokens, chosen=chosen, seq_lens=seq_lens, parents=t.parents, ancestors=t.ancestors, paths=t.paths,
        depths=t.depths, preference=t.preference,
    )  # fmt: skip
    given[name] = change(given[name])
    with pytest.raises(ValueError, match="must be"):
        reference_drafts.accept_drafts(**given)


def test_refuses_more_nodes_than_bits():
    x = torch.zeros(1, 65, dtype=torch.int64)
    table = torch.zeros(65, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 to 64 nodes"):
        reference_drafts.accept_drafts(x, x, torch.ones(1, dtype=torch.int32), x[0], table, table, x[0], x[0])
