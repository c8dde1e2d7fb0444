"""Guesses put into a tree: kernel and reference against Python's sort and a loop over nodes."""

import math

import pytest
import torch

from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.generation.medusa_trees import PUBLISHED_TREES
from hf_turbo.ops import dispatch, reference_heads, tree_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("module", [reference_heads, tree_tokens], ids=["reference", "kernel"])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is full of what would win, or be no column."""
    empty = torch.empty

    def poison(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)

    monkeypatch.setattr(torch, "empty", poison)


def top_ranks(module, x, num):
    """The `num` largest of each row of `[rows, columns]`: a tree of one head whose every rank is a node."""
    heads, ranks = torch.zeros(num + 1, dtype=torch.int64), torch.arange(num + 1) - 1
    heads[0] = ranks[0] = -1
    roots = torch.full((len(x),), -5, device=x.device)
    tokens = module.tree_tokens(x.unsqueeze(1), roots, heads.to(x.device), ranks.to(x.device), num)
    assert (tokens[:, 0] == -5).all()
    return tokens[:, 1:]


def expected(x, num):
    """NaN first, then the largest; of equals the lowest column."""
    return [
        sorted(range(len(row)), key=lambda c, row=row: (0, 0.0, c) if math.isnan(row[c]) else (1, -row[c], c))[:num]
        for row in x.tolist()
    ]


def within_nan(x, offset=3):
    """The same numbers as a part of wider rows of NaN: another alignment and stride, and what is beyond would win."""
    wide = torch.full((x.shape[0], x.shape[1] + 2 * offset), torch.nan, dtype=x.dtype, device=x.device)
    part = wide[:, offset:-offset]
    part.copy_(x)
    return part


def make(rows, columns, dtype, device, kind, seed=0):
    """Numbers of a kind: mostly different, of a few values, infinities with zeros and NaN, or mostly equal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "ties":
        x = x.sign() * x.abs().clamp_max(1.5).round()
    elif kind == "special":
        # The interpreter takes bf16's subnormal numbers for zeros; a GPU does not.
        small = torch.finfo(dtype).tiny * (1 if dtype == torch.bfloat16 and device == "cpu" else 0.25)
        special = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, torch.nan, -torch.nan, small, -small])
        x = special[torch.randint(len(special), x.shape, generator=generator)]
        x[0, x[0].isnan() | (x[0] > 0)] = -torch.inf  # a row of zeros and minus infinity
    elif kind == "few":
        x = torch.full_like(x, -torch.inf)  # logits of which all but a few are forbidden
        x[:, columns // 2] = -5.0
    return x.to(dtype).to(device)


def check(module, device, dtypes, sizes, nums=(1, 4, 16)):
    for dtype in dtypes:
        for rows, columns in sizes:
            for kind, num in zip(("different", "ties", "special", "few"), (*nums, 3), strict=True):
                x = make(rows, columns, dtype, device, kind)
                num = min(num, columns)
                wanted = expected(x, num)
                for given in (x, within_nan(x)):
                    found = top_ranks(module, given, num)
                    assert found.dtype == torch.int64 and found.tolist() == wanted, (dtype, columns, kind)


@BOTH
def test_against_a_sort(module, poisoned):
    sizes = ((1, 1), (2, 7), (3, 2048), (2, 2049), (1, 6001))
    check(module, DEVICE, (torch.float32,), sizes)
    check(module, DEVICE, (torch.float16, torch.bfloat16), sizes[1:4:2])


@BOTH
def test_both_zeros_are_equal(module):
    x = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0]], device=DEVICE)
    assert top_ranks(module, x, 5).tolist() == [[0, 1, 3, 4, 2]]


@BOTH
def test_largest_in_one_chunk(module):
    x = torch.zeros(2, 9000, device=DEVICE)
    x[0, 5000:5016] = torch.arange(16.0) + 1
    x[1, 0], x[1, -1] = 1.0, 2.0
    ranks = top_ranks(module, x, 16)
    assert ranks[0].tolist() == list(range(5015, 4999, -1))
    assert ranks[1].tolist() == [8999, 0, *range(1, 15)]


TREES = {
    "root": TokenTree.chain(0),
    "chain": TokenTree.chain(4),
    "published": TokenTree.of_paths(PUBLISHED_TREES["mc_sim_7b_63"]),
    "few": TokenTree.of_paths([(0,), (3,), (0, 2), (3, 0), (3, 0, 1)]),
}


def nodes_of(tree, device):
    places = torch.tensor([[depth - 1 for depth in tree.depths], tree.ranks], device=device)
    return places[0], places[1]


def make_tree_case(tree, rows, columns, dtype, device, seed=0):
    num_heads = max(tree.max_depth, 1)
    logits = make(rows * num_heads, columns, dtype, device, "ties", seed).view(rows, num_heads, columns)
    return logits, torch.arange(rows, device=device) + 900, *nodes_of(tree, device), max(tree.ranks) + 1


def tree_expected(tree, logits, roots, num):
    best = [expected(of_row, num) for of_row in logits]
    ways = list(zip(tree.depths, tree.ranks, strict=True))[1:]
    pairs = zip(roots.tolist(), best, strict=True)
    return [[root, *(of_heads[depth - 1][rank] for depth, rank in ways)] for root, of_heads in pairs]


def check_trees(module, device, rows, columns, dtype=torch.float32):
    for seed, tree in enumerate(TREES.values()):
        logits, roots, *rest, num = make_tree_case(tree, rows, columns, dtype, device, seed)
        wanted = tree_expected(tree, logits, roots, num)
        heads_last = logits.transpose(0, 1).contiguous().transpose(0, 1)  # as products head by head leave them
        for given in (logits, heads_last):
            assert module.tree_tokens(given, roots, *rest, num).tolist() == wanted


@BOTH
def test_trees(module, poisoned):
    check_trees(module, DEVICE, 3, 70)
    check_trees(module, DEVICE, 1, 2060)


@BOTH
def test_into_given_places(module, poisoned):
    """Parts of wider rows, one with the roots in it already; nothing beside them is written."""
    tree = TREES["few"]
    logits, roots, *rest, num = make_tree_case(tree, 3, 70, torch.float32, DEVICE)
    wanted = tree_expected(tree, logits, roots, num)
    wide, other = (torch.full((3, n), -9, device=DEVICE) for n in (11, 8))
    parts = wide[:, 3:9], other[:, :6]
    parts[0][:, 0] = roots
    for out in (parts[:1], parts, (parts[0], other[:, :4]), (parts[0], other[:, :1])):
        other.fill_(-9)
        found = module.tree_tokens(logits, parts[0][:, 0], *rest, num, out)
        assert found is out[0]
        assert all(part.tolist() == [row[: part.shape[1]] for row in wanted] for part in out)
        size = out[1].shape[1] if len(out) == 2 else 0
        assert (wide[:, :3] == -9).all() and (wide[:, 9:] == -9).all() and (other[:, size:] == -9).all()
        parts[0][:, 1:] = -9


@BOTH
def test_no_rows(module):
    assert list(top_ranks(module, torch.zeros(0, 9, device=DEVICE), 2).shape) == [0, 2]


@BOTH
def test_refuses(module):
    x = torch.zeros(2, 40, device=DEVICE)
    for num in (0, 17):
        with pytest.raises(ValueError, match="num must be 1 to 16"):
            top_ranks(module, x, num)
    with pytest.raises(ValueError, match="1 to 3 of 3 columns"):
        top_ranks(module, x[:, :3], 4)
    with pytest.raises(ValueError, match="last stride"):
        top_ranks(module, x.t(), 1)
    with pytest.raises(ValueError, match="heads, columns"):
        top_ranks(module, x[0], 1)
    with pytest.raises(ValueError, match="bf16"):
        top_ranks(module, x.double(), 1)
    logits, roots, heads, ranks, num = make_tree_case(TREES["few"], 2, 40, torch.float32, DEVICE)
    out = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE)
    for name, given in {
        "roots": (roots[:1], heads, ranks, num),
        "heads": (roots, heads.int(), ranks, num),
        "ranks": (roots, heads, ranks[1:], num),
        "1 to 64 nodes": (roots, heads.repeat(11), ranks.repeat(11), num),
        "up to 2 tensors": (roots, heads, ranks, num, (out, out, out)),
        "out.1.": (roots, heads, ranks, num, (out, torch.cat([out, out], 1))),
        "out.0.": (roots, heads, ranks, num, (out.t().contiguous().t(),)),
    }.items():
        with pytest.raises(ValueError, match=name):
            module.tree_tokens(logits, *given)
    assert not out.any()


def test_dispatch():
    x = make(2, 50, torch.float32, DEVICE, "ties")
    found = top_ranks(dispatch, x, 5)  # on a CPU, of equals any
    assert x.gather(1, found).tolist() == x.gather(1, torch.tensor(expected(x, 5), device=x.device)).tolist()
    assert all(len(set(row)) == 5 for row in found.tolist())


def test_more_ranks_than_the_kernel_takes():
    x = torch.arange(80.0, device=DEVICE).view(2, 40)
    assert top_ranks(dispatch, x, 20).tolist() == [list(range(39, 19, -1))] * 2


@pytest.mark.gpu
def test_on_the_device():
    check(tree_tokens, "cuda", DTYPES, ((1, 1), (2, 7), (3, 2048), (2, 2049), (5, 50257), (4, 128256), (1, 262144)))
    check(tree_tokens, "cuda", DTYPES[2:], ((64, 50257),))
    check_trees(tree_tokens, "cuda", 8, 49152, torch.bfloat16)
