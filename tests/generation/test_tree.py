"""Token trees: what may be one, and what is read from it, against the definition node by node."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import trees

from hf_turbo.cache.token_tree import MAX_NODES, TokenTree


def way_up(tree, node):
    """A node and its ancestors, the root last."""
    return [node] if node == 0 else [node, *way_up(tree, tree.parents[node])]


def bits(mask):
    return [j for j in range(64) if (mask % 2**64) >> j & 1]


def test_chain():
    tree = TokenTree.chain(3)
    assert tree.parents == (-1, 0, 1, 2) and tree.ranks == (0, 0, 0, 0)
    assert tree.is_chain and tree.max_depth == 3 and tree.num_nodes == 4
    assert tree.children == ((1,), (2,), (3,), ())
    assert tree.most_children == (1, 1, 1)
    assert tree == TokenTree.of_paths([[0], [0, 0], [0, 0, 0]])
    assert TokenTree.chain(3) is tree  # what a device has been told of it stays there
    assert TokenTree.chain(0).parents == (-1,) and TokenTree.chain(0).is_chain and TokenTree.chain(0).max_depth == 0


def test_paths_as_medusa_publishes_them():
    tree = TokenTree.of_paths([[0], [1], [0, 1], [3], [0, 0], [1, 0], [0, 1, 0]])
    assert tree.parents == (-1, 0, 0, 0, 1, 1, 2, 5)
    assert tree.ranks == (0, 0, 1, 3, 0, 1, 0, 0)
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3)
    assert tree.children == ((1, 2, 3), (4, 5), (6,), (), (), (7,), (), ())
    assert tree.most_children == (3, 2, 1)
    assert tree.paths[7] == (0, 1, 5, 7)
    assert not tree.is_chain


@pytest.mark.parametrize(
    "parents, message",
    [
        ((), "nodes, not 0"),
        ((-1,) * 65, "nodes, not 65"),
        ((0, 0), "parent is -1"),
        ((-1, -1), "earlier node"),
        ((-1, 1), "earlier node"),
        ((-1, 0, 3, 1), "earlier node"),
    ],
)
def test_what_is_no_tree(parents, message):
    with pytest.raises(ValueError, match=message):
        TokenTree(parents)


@pytest.mark.parametrize("ranks", [(0,), (1, 0, 1), (0, 1, 1), (0, 1, 0), (0, -1, 0)])
def test_ranks_ascend_among_the_children_of_a_node(ranks):
    with pytest.raises(ValueError, match=r"(r|R)ank"):
        TokenTree((-1, 0, 0), ranks)


@pytest.mark.parametrize(
    "paths, message",
    [([[0, 0]], "beginning"), ([[0], [0]], "twice"), ([[-1]], "Ranks"), ([[i] for i in range(64)], "65")],
)
def test_what_are_no_paths(paths, message):
    with pytest.raises(ValueError, match=message):
        TokenTree.of_paths(paths)


@pytest.mark.parametrize("num_drafted", [-1, MAX_NODES])
def test_a_chain_has_at_most_64_nodes(num_drafted):
    with pytest.raises(ValueError, match="0 to 63"):
        TokenTree.chain(num_drafted)


@given(trees(), st.sampled_from([None, 1, 2, 3]))
def test_masks(tree, window):
    for node, mask in enumerate(tree.ancestor_masks(window)):
        ancestors = way_up(tree, node)
        seen = [j for j in ancestors if window is None or tree.depths[node] - tree.depths[j] < window]
        assert bits(mask) == sorted(seen)


def test_masks_of_64_nodes_fit_int64():
    masks = TokenTree.chain(63).ancestor_masks()
    assert bits(masks[63]) == list(range(64)) and masks[63] == -1
    assert torch.tensor(masks, dtype=torch.int64)[62] == 2**63 - 1
    assert TokenTree.chain(63).ancestor_masks(window=1)[63] == -(2**63)
    with pytest.raises(ValueError, match="at least one"):
        TokenTree.chain(1).ancestor_masks(window=0)


@given(trees(), st.integers(0, 4), st.integers(0, 3))
def test_pruned(tree, max_depth, max_rank):
    def path(of, node):
        return [of.ranks[i] for i in reversed(way_up(of, node)) if i]

    kept = [path(tree, i) for i in range(tree.num_nodes)]
    kept = [p for p in kept if len(p) <= max_depth and all(rank <= max_rank for rank in p)]
    pruned = tree.pruned(max_depth, max_rank)
    assert [path(pruned, i) for i in range(pruned.num_nodes)] == kept


@given(trees())
def test_tensors(tree):
    tensors = tree.tensors("cpu")
    best_first = tensors.preference.argsort(descending=True).tolist()
    assert best_first == sorted(range(tree.num_nodes), key=lambda i: (-tree.depths[i], i))
    assert tensors.preference.min() > 0
    assert tensors.parents.tolist() == [0, *tree.parents[1:]] and tensors.depths.tolist() == list(tree.depths)
    for node in range(tree.num_nodes):
        assert tuple(i for i in tensors.children[node].tolist() if i >= 0) == tree.children[node]
        way_down, beyond = way_up(tree, node)[::-1], range(tree.depths[node] + 1, tree.max_depth + 1)
        assert tensors.paths[node].tolist() == [*way_down, *beyond]
        assert tensors.ancestors[node].tolist() == [*way_down, *(0 for _ in beyond)]
    assert all(x.dtype == torch.int64 for x in vars(tensors).values())


def test_tensors_are_made_once_a_device():
    tree = TokenTree.chain(2)
    assert tree.tensors("cpu") is tree.tensors(torch.device("cpu"))
    assert tree.tensors("meta") is not tree.tensors("cpu") and tree.tensors("meta").paths.device.type == "meta"


@settings(max_examples=20)
@given(trees())
def test_a_tree_is_its_shape(tree):
    tree.tensors("cpu")
    for twin in (copy.copy(tree), copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert twin == tree and hash(twin) == hash(tree) and twin.tensors("cpu") is not tree.tensors("cpu")
    assert TokenTree.chain(1) != TokenTree((-1, 0), (0, 1))
    with pytest.raises(AttributeError):
        tree.parents = (-1,)
