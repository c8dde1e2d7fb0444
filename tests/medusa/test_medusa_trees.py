"""Trees: the published ones are whole, and the searched one is the best of all."""

from itertools import combinations, pairwise, product

import pytest

from hf_turbo.generation.medusa_trees import PUBLISHED_TREES, Repeats, expected_length, search_tree


def all_paths(heads, ranks):
    return [path for depth in range(1, heads + 1) for path in product(range(ranks), repeat=depth)]


def is_tree(paths):
    return len(set(paths)) == len(paths) and all(path[:-1] in {(), *paths} for path in paths)


def value(path, accuracies):
    found = 1.0
    for head, rank in enumerate(path):
        found *= accuracies[head][rank]
    return found


@pytest.mark.parametrize("name", PUBLISHED_TREES)
def test_published_trees(name):
    paths = PUBLISHED_TREES[name]
    assert len(paths) == 63 and is_tree(paths)
    assert max(map(len, paths)) <= 4 and max(map(max, paths)) == 9
    # each was searched for, so that ranks are used in their order and parents come before their children
    for number, path in enumerate(paths):
        assert path[:-1] in {(), *paths[:number]}
        assert all((*path[:-1], rank) in paths for rank in range(path[-1]))


def test_some_published_nodes():
    assert PUBLISHED_TREES["mc_sim_7b_63"][:6] == ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0))
    assert PUBLISHED_TREES["mc_sim_7b_63"][-3:] == ((0, 0, 0, 1), (1, 6), (0, 7, 0))
    assert PUBLISHED_TREES["vicuna_7b_stage2"][-3:] == ((0, 0, 2, 0), (7, 0), (1, 4))
    assert max(map(len, PUBLISHED_TREES["vicuna_33b_stage1"])) == 3


@pytest.mark.parametrize(
    "accuracies",
    [
        [[0.6, 0.2], [0.5, 0.3]],
        [[0.1, 0.6], [0.9, 0.05]],  # the second best guess is right more often
        [[0.5, 0.5], [0.5, 0.5]],
        [[0.3, 0.1], [0.8, 0.1]],
    ],
)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6])
def test_no_tree_is_better(accuracies, num_nodes):
    paths = search_tree(accuracies, num_nodes)
    assert len(paths) == num_nodes and is_tree(paths)
    trees = [tree for tree in combinations(all_paths(2, 2), num_nodes) if is_tree(tree)]
    best = max(sum(value(path, accuracies) for path in tree) for tree in trees)
    assert sum(value(path, accuracies) for path in paths) == pytest.approx(best)
    assert expected_length(paths, accuracies) == pytest.approx(1 + best)


def test_trees_grow_node_by_node():
    accuracies = [[0.55, 0.2, 0.1], [0.4, 0.15, 0.1], [0.3, 0.1, 0.05]]
    large = search_tree(accuracies, 20)
    assert [search_tree(accuracies, size) for size in range(1, 20)] == [large[:size] for size in range(1, 20)]
    lengths = [expected_length(large[:size], accuracies) for size in range(21)]
    gains = [after - before for before, after in pairwise(lengths)]
    assert lengths[0] == 1.0 and gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("share, rate", [(0.2, 0.9), (0.6, 0.5), (0.05, 1.0)])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6])
def test_no_tree_is_better_where_texts_repeat_themselves(share, rate, num_nodes):
    """The path of best guesses may be deeper than the heads."""
    accuracies, repeats = [[0.6, 0.2], [0.5, 0.3]], Repeats(share, rate)

    def right(path):
        guessed = value(path, accuracies) if len(path) <= 2 else 0.0
        return (1 - share) * guessed + (0.0 if any(path) else share * rate ** len(path))

    paths = search_tree(accuracies, num_nodes, repeats)
    assert len(paths) == num_nodes and is_tree(paths)
    known = all_paths(2, 2) + [(0,) * depth for depth in range(3, 7)]
    best = max(sum(map(right, tree)) for tree in combinations(known, num_nodes) if is_tree(tree))
    assert sum(map(right, paths)) == pytest.approx(best)
    assert expected_length(paths, accuracies, repeats) == pytest.approx(1 + best)


def test_guesses_that_are_never_right_are_left_out():
    assert search_tree([[0.5, 0.0], [0.0, 0.0], [0.9, 0.1]], 10) == ((0,),)
    assert search_tree([[0.5, 0.25]], 10) == ((0,), (1,))


def test_what_accuracies_do_not_tell_of_is_never_right():
    assert expected_length([(0,), (0, 0), (5,)], [[0.5]]) == 1.5


@pytest.mark.parametrize("accuracies, num_nodes", [([[1.5]], 1), ([[float("nan")]], 1), ([[-0.1]], 1), ([[0.5]], 0)])
def test_refused(accuracies, num_nodes):
    with pytest.raises(ValueError, match=r"from 0 to 1|at least one"):
        search_tree(accuracies, num_nodes)
