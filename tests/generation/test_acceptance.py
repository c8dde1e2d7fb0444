"""Acceptance: the accepted path against a walk in plain Python, and the text's distribution against the target's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import trees
from scipy import stats

from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.generation.acceptance import accept_by_rejection, accept_greedy, accept_matching, accept_typical


@st.composite
def drafts(draw):
    """A tree and a few rows of tokens and choices; three tokens, so that they often agree, and -1 among the drafted."""
    tree = draw(trees())
    rows = draw(st.integers(1, 3))

    def numbers(low):
        size = rows * tree.num_nodes
        return torch.tensor(draw(st.lists(st.integers(low, 2), min_size=size, max_size=size))).view(rows, -1)

    return tree, numbers(-1), numbers(0)


def check(tree, accepted, row, path, tokens):
    """One row's result against the path (root first) and the tokens of an oracle."""
    count = len(path) - 1
    beyond = range(len(path), tree.max_depth + 1)
    assert accepted.counts[row] == count
    assert accepted.path[row].tolist() == [*path, *beyond]
    assert accepted.tokens[row].tolist() == [*tokens, *(-1 for _ in beyond)]
    assert (accepted.path[row] >= torch.arange(tree.max_depth + 1)).all()


def longest_path(tree, fits):
    """The longest path from the root of nodes that fit, depth first: the first of several as long in node order."""

    def ends(node):
        yield node
        for child in tree.children[node]:
            if fits[child]:
                yield from ends(child)

    last = min(ends(0), key=lambda node: (-tree.depths[node], node))
    return tree.paths[last]


@given(drafts())
def test_greedy_is_the_longest_agreeing_path(case):
    tree, drafted, chosen = case
    accepted = accept_greedy(tree, drafted.clone(), chosen.clone())
    agrees = (drafted >= 0) & (drafted == chosen[:, [max(i, 0) for i in tree.parents]])
    for row in range(len(drafted)):
        path = longest_path(tree, agrees[row].tolist())
        check(tree, accepted, row, path, chosen[row, list(path)].tolist())


@given(drafts())
def test_matching_walks_along_what_is_chosen(case):
    tree, drafted, chosen = case
    calls = []

    def choose(depth, nodes):
        calls.append((depth, nodes.tolist()))
        return chosen.gather(1, nodes.unsqueeze(1)).squeeze(1)

    accepted = accept_matching(tree, drafted, choose)
    assert [depth for depth, _ in calls] == list(range(tree.max_depth + 1))
    for row, (said, wanted) in enumerate(zip(drafted.tolist(), chosen.tolist())):
        path = [0]
        while fitting := [i for i in tree.children[path[-1]] if said[i] == wanted[path[-1]]]:
            path.append(fitting[0])
        check(tree, accepted, row, path, [wanted[i] for i in path])
        assert [nodes[row] for _, nodes in calls] == [path[min(d, len(path) - 1)] for d in range(len(calls))]


def test_matching_can_end_early():
    tree = TokenTree.chain(4)
    drafted = torch.tensor([[9, 1, 2, 3, 4], [9, 1, 7, 3, 4]])
    depths = []

    def choose(depth, nodes):
        depths.append(depth)
        return torch.tensor([1, 1]) if depth == 0 else torch.tensor([5, 7]) if depth == 1 else torch.tensor([0, 8])

    accepted = accept_matching(tree, drafted, choose, all_ended=lambda ended: bool(ended.all()))
    assert depths == [0, 1, 2]
    assert accepted.tokens.tolist() == [[1, 5, -1, -1, -1], [1, 7, 8, -1, -1]]
    assert accepted.counts.tolist() == [1, 2]
    assert accepted.path.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_no_token_is_never_accepted():
    """-1 in the draft is no token, even where what is chosen is -1, too."""
    tree = TokenTree.chain(2)
    drafted, chosen = torch.tensor([[3, -1, 5]]), torch.tensor([[-1, 5, 6]])
    assert accept_greedy(tree, drafted, chosen).counts.tolist() == [0]
    assert accept_matching(tree, drafted, lambda depth, nodes: chosen[:, 0]).counts.tolist() == [0]


@pytest.mark.parametrize("accept", [accept_greedy, accept_matching])
def test_a_draft_of_another_tree_is_refused(accept):
    with pytest.raises(ValueError, match=r"must be \[rows, 3\]"):
        accept(TokenTree.chain(2), torch.zeros(1, 4, dtype=torch.long), lambda depth, nodes: nodes)


@pytest.mark.parametrize("accept", [accept_by_rejection, lambda *args: accept_typical(*args, 0.3, 0.1, 1.0)])
def test_probabilities_of_other_nodes_are_refused(accept):
    args = [torch.zeros(1, 2, 4)] * (2 if accept is accept_by_rejection else 1)
    with pytest.raises(ValueError, match=r"\[1, 3, vocabulary\]"):
        accept(TokenTree.chain(2), torch.zeros(1, 3, dtype=torch.long), *args)


V, ROWS = 8, 20_000
TWO_BY_TWO = TokenTree.of_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
THREE = TokenTree.of_paths([[0], [1], [2]])
SAMPLED_TREES = {"chain1": TokenTree.chain(1), "chain3": TokenTree.chain(3), "2x2": TWO_BY_TWO, "3": THREE}
FILTERS = {"all": {}, "top_p": {"top_p": 0.8}, "top_k": {"top_k": 3}}


def language(seed, temperature=1.0, top_p=1.0, top_k=V):
    """A language of V tokens in which each depends on the one before: `[V, V]`, row = the token before."""
    logits = torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.5 / temperature
    probabilities = logits.softmax(-1)
    ordered, order = probabilities.sort(dim=-1, descending=True)
    kept = (ordered.cumsum(-1) - ordered < top_p) & (torch.arange(V) < top_k)
    probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered * kept)
    return probabilities / probabilities.sum(-1, keepdim=True)


def draw_tree(tree, q, root, rows=ROWS):
    """Children of each node drawn from q without replacement, int64 `[rows, N]`: always as many as there are places.

    Once q has no token left, what is drawn is whatever comes; that is up to the acceptance.
    """
    drafted = torch.full((rows, tree.num_nodes), root)
    for node, children in enumerate(tree.children):
        keys = q[drafted[:, node]].log() + -torch.empty(rows, V).exponential_().log()
        drafted[:, list(children)] = keys.topk(len(children), dim=-1).indices
    return drafted


def sampled(tree, p, q, root=0):
    """`accept_by_rejection` over many rows of the two languages, with NaN where nothing should be read."""
    drafted = draw_tree(tree, q, root)
    draft = q[drafted]
    draft[:, [i for i, children in enumerate(tree.children) if not children]] = math.nan
    return accept_by_rejection(tree, drafted, p[drafted], draft)


def counts_of_pairs(accepted, root=0):
    """How often each token came after each, `[V, V]`, the root included."""
    before = torch.cat([torch.full((len(accepted.tokens), 1), root), accepted.tokens[:, :-1]], 1)
    there = accepted.tokens >= 0
    pairs = before[there] * V + accepted.tokens[there]
    return pairs.bincount(minlength=V * V).view(V, V)


def p_value(counts, p):
    """Chi-square over the rows of `counts`: each is a sample from the same row of p. 0 where p has a 0."""
    if counts[p == 0].any():
        return 0.0
    statistic, freedom = 0.0, 0
    for observed, expected in zip(counts.double(), counts.sum(-1, keepdim=True) * p.double()):
        often = expected >= 5
        if often.sum() > 1:
            # The rare ones count as one more token where they are enough together.
            observed, expected = (torch.cat([x[often], x[~often].sum().view(1)]) for x in (observed, expected))
            enough = expected >= 5
            statistic += ((observed - expected)[enough] ** 2 / expected[enough]).sum().item()
            freedom += int(enough.sum()) - 1
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0


@pytest.mark.parametrize("tree", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_rejection_gives_the_targets_distribution(tree, filters, temperature):
    p, q = language(1, temperature, **filters), language(2, temperature, **filters)
    accepted = sampled(tree, p, q)
    counts = counts_of_pairs(accepted)
    assert p_value(counts[:1], p[:1]) > 1e-3, "the first token"
    assert p_value(counts[1:], p[1:]) > 1e-3, "those that follow"
    assert counts.sum() == (accepted.counts + 1).sum()


def half(of, first):
    """The language with nothing but the tokens from `first` on, V / 2 of them."""
    kept = torch.zeros(V).index_fill(0, torch.arange(first, first + V // 2), 1.0)
    return of * kept / (of * kept).sum(-1, keepdim=True)


def one_hot(token):
    return torch.eye(V)[[token] * V]


ODD_DRAFTS = {
    "zeros where p has none": (language(1), half(language(2), 0)),
    "fewer tokens than children": (language(1), one_hot(3)),
    "the target": (language(1), language(1)),
    "nothing in common": (half(language(1), 0), half(language(2), 4)),
    "one token, the target's only one": (one_hot(5), one_hot(5)),
}


@pytest.mark.parametrize("tree", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
@pytest.mark.parametrize("languages", ODD_DRAFTS.values(), ids=ODD_DRAFTS.keys())
def test_rejection_with_odd_drafts(tree, languages):
    p, q = languages
    assert p_value(counts_of_pairs(sampled(tree, p, q)), p) > 1e-3


@pytest.mark.parametrize("tree", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
def test_rejection_accepts_as_much_as_the_two_have_in_common(tree):
    """The first child's chance is the overlap of p and q; drafts from the target itself are all but always accepted."""
    p, q = language(1), language(2)
    accepted = sampled(tree, p, q)
    first = (accepted.path[:, 1] == 1) & (accepted.counts > 0)
    assert first.double().mean().item() == pytest.approx(torch.minimum(p[0], q[0]).sum().item(), abs=0.015)
    assert sampled(tree, p, p).counts.min() == tree.max_depth
    assert sampled(tree, half(p, 0), half(q, 4)).counts.max() == 0


@pytest.mark.parametrize("tree", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
def test_rejection_without_a_token(tree):
    """Drafts that end early, at random: the text is the target's all the same."""
    p, q = language(1), language(2)
    drafted = draw_tree(tree, q, 0)
    missing = torch.rand(drafted.shape) < 0.4
    missing[:, 0] = False
    accepted = accept_by_rejection(tree, drafted.masked_fill(missing, -1), p[drafted], q[drafted])
    assert p_value(counts_of_pairs(accepted), p) > 1e-3
    assert not missing.gather(1, accepted.path)[torch.arange(tree.max_depth + 1) <= accepted.counts[:, None]].any()


def test_rejection_of_a_token_that_was_not_drawn():
    """A token that q does not have is none, however likely the target finds it."""
    p, q = language(1), half(language(2), 0)
    drafted = torch.tensor([[0, 5, 1]]).expand(ROWS, 3)
    accepted = accept_by_rejection(TokenTree.of_paths([[0], [1]]), drafted, p[drafted], q[drafted])
    assert accepted.counts.max() == 0
    assert p_value(counts_of_pairs(accepted), p) > 1e-3


def test_rejection_where_rounding_leaves_nothing():
    """A q that is more than p everywhere, by far more than by rounding so that it shows: then p itself is left."""
    p = language(1)
    drafted = draw_tree(TokenTree.chain(1), p, 0)
    accepted = accept_by_rejection(TokenTree.chain(1), drafted, p[drafted], 1.5 * p[drafted])
    assert 0.3 < (accepted.counts == 0).double().mean() < 0.37
    assert p_value(counts_of_pairs(accepted), p) > 1e-3


@given(drafts())
def test_rejection_of_a_sure_target_is_greedy(case):
    """Where the target has one token, that is taken wherever it was drafted; siblings differ and end with -1."""
    tree, drafted, chosen = case
    for children in map(list, tree.children):
        missing = (drafted[:, children] < 0).cumsum(1) > 0
        drafted[:, children] = torch.tensor(tree.ranks)[children].masked_fill(missing, -1)
    target, draft = torch.eye(V)[chosen], torch.full((*chosen.shape, V), 1 / V)
    for got, want in zip(accept_by_rejection(tree, drafted, target, draft), accept_greedy(tree, drafted, chosen)):
        assert torch.equal(got, want)


def typical_nodes(tree, said, logits, threshold, alpha, temperature):
    """Which tokens are typical after their parents, number by number in float64."""
    typical = [True]
    for node, parent in enumerate(tree.parents[1:], start=1):
        weights = [math.exp(x / temperature) for x in logits[parent]]
        p = [w / sum(weights) for w in weights]
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        typical.append(said[node] >= 0 and p[said[node]] > min(threshold, alpha * math.exp(-entropy)))
    return typical


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("threshold, alpha", [(0.3, 0.09), (0.09, 0.3), (0.25, 2.0)])
@settings(max_examples=30)
@given(tree=trees(), seed=st.integers(0, 1000))
def test_typical_is_the_longest_path_of_typical_tokens(tree, seed, threshold, alpha, temperature):
    torch.manual_seed(seed)
    logits = torch.randn(3, tree.num_nodes, V) * 2
    logits[:, :, 7] = -math.inf
    drafted = torch.randint(-1, V, (3, tree.num_nodes))
    accepted = accept_typical(tree, drafted, logits, threshold, alpha, temperature)
    for row, said in enumerate(drafted.tolist()):
        fits = typical_nodes(tree, said, logits[row].tolist(), threshold, alpha, temperature)
        path = longest_path(tree, fits)
        own = accepted.tokens[row, len(path) - 1].item()
        assert 0 <= own < 7
        check(tree, accepted, row, path, [*(said[i] for i in path[1:]), own])


def test_typical_takes_more_where_more_is_likely():
    """A token of probability 0.2: too little where another has 0.6, enough where five are as likely."""
    unsure, sure = torch.tensor([0.2] * 5 + [0.0] * 3), torch.tensor([0.6, 0.2, 0.2] + [0.0] * 5)
    logits = torch.stack([unsure, sure]).log().view(2, 1, V).expand(2, 2, V)
    drafted = torch.tensor([[0, 1], [0, 1]])
    accepted = accept_typical(TokenTree.chain(1), drafted, logits, 0.3, 0.6, 1.0)
    assert accepted.counts.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_typical_samples_its_own_token(temperature):
    logits = language(1).log()
    drafted = torch.tensor([[0, 3]]).expand(ROWS, 2)
    accepted = accept_typical(TokenTree.chain(1), drafted, logits[drafted], 0.0, 0.0, temperature)
    assert accepted.counts.min() == 1 and (accepted.tokens[:, 0] == 3).all()
    p = (logits / temperature).softmax(-1)
    assert p_value(accepted.tokens[:, 1].bincount(minlength=V).view(1, V), p[3:4]) > 1e-3


@given(drafts())
def test_typical_at_temperature_0_is_greedy(case):
    tree, drafted, chosen = case
    logits = torch.rand(*chosen.shape, V) + 2 * torch.eye(V)[chosen]
    for got, want in zip(accept_typical(tree, drafted, logits, 0.3, 0.09, 0.0), accept_greedy(tree, drafted, chosen)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("tree", SAMPLED_TREES.values(), ids=SAMPLED_TREES.keys())
def test_nothing_is_read_on_the_host(tree):
    """Tensors without numbers: what looks at a value, or at how many there are of something, raises."""
    drafted = torch.zeros(3, tree.num_nodes, dtype=torch.long, device="meta")
    by_node = torch.zeros(3, tree.num_nodes, V, device="meta")
    results = [
        accept_greedy(tree, drafted, drafted),
        accept_matching(tree, drafted, lambda depth, nodes: nodes),
        accept_by_rejection(tree, drafted, by_node, by_node),
        accept_typical(tree, drafted, by_node, 0.3, 0.09, 0.7),
        accept_typical(tree, drafted, by_node, 0.3, 0.09, 0.0),
    ]
    for accepted in results:
        shapes = [(x.dtype, tuple(x.shape)) for x in accepted]
        steps = (torch.int64, (3, tree.max_depth + 1))
        assert shapes == [steps, steps, (torch.int64, (3,))]
