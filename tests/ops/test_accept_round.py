"""What follows a draft's forward in one op: it and its reference against a walk down each row's tree and a loop."""

import pytest
import torch
from test_accept_drafts import GARBAGE, make_case, trees
from test_accept_drafts import expected as expected_verdict

from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.ops import accept_round, dispatch, reference_rounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("module", [reference_rounds, accept_round], ids=["reference", "kernel"])
LAST = 5000


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is full of what no result may have."""
    empty = torch.empty

    def poison(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poison)


class Case:
    """One round of one tree: its arguments by name, on the CPU. Of several rows the last is not used.

    The greatest logit of a node is where `make_case` says, and once more behind it.
    """

    def __init__(self, tree, rows, choices, seed, vocabulary=None, planes=1, size=None, dtype=torch.float32):
        tokens, chosen, seq_lens = make_case(tree, rows, choices, seed)
        vocabulary = vocabulary or choices
        spread = (vocabulary - 1) // max(choices - 1, 1)  # over all of the vocabulary
        tokens, chosen = tokens * spread, chosen * spread
        generator = torch.Generator().manual_seed(seed)
        if rows > 1:
            seq_lens[-1] = seed % 2 * tree.num_nodes
        logits = torch.randn(tree.num_nodes * rows, vocabulary, generator=generator).clamp_max(2)
        logits.scatter_(1, chosen.flatten().unsqueeze(1), 7.0)
        for row, first in zip(logits, chosen.flatten().tolist(), strict=True):
            row[first + (len(row) - first) // 2 :][:1] = 7.0
        firsts = torch.randint(LAST - 100, LAST, (planes, rows, 1), generator=generator)
        hidden = None if size is None else torch.randn(len(logits), size, generator=generator).to(dtype)
        self.tree, self.chosen = tree, chosen
        self.given = {
            "logits": logits.to(dtype), "tokens": tokens, "seq_lens": seq_lens, "hidden": hidden,
            "positions": firsts + torch.tensor(tree.depths), "last_position": torch.tensor([LAST]),
        }  # fmt: skip

    def arguments(self, device):
        t = self.tree.tensors(device)
        names = ("parents", "ancestors", "paths", "depths", "preference")
        of_round = {name: None if x is None else x.to(device, copy=True) for name, x in self.given.items()}
        return of_round | {name: getattr(t, name) for name in names}

    def check(self, module, device, room=1):
        arguments = self.arguments(device)
        after = module.accept_round(**arguments, room=room)
        given, num_nodes = self.given, self.tree.num_nodes
        verdict = expected_verdict(self.tree, given["tokens"], self.chosen, given["seq_lens"])
        outcome, path, counts, last, roots, lengths = verdict
        columns = [[*row, length, root] for row, length, root in zip(outcome, lengths, roots, strict=True)]
        assert list(after.result.shape) == [len(counts), self.tree.max_depth + 3 + room]
        assert after.result[:, : self.tree.max_depth + 4].tolist() == columns
        assert after.outcome.tolist() == outcome and after.lengths.tolist() == lengths
        assert after.path.tolist() == path and after.counts.tolist() == counts
        assert after.bases.tolist() == (given["seq_lens"] - num_nodes).tolist()
        if given["hidden"] is None:
            assert after.hidden is None
        else:
            picked = [row * num_nodes + node for row, node in enumerate(last)]
            assert torch.equal(after.hidden.cpu(), given["hidden"][picked])
        # In place:
        lens = zip(given["seq_lens"].tolist(), counts, strict=True)
        assert arguments["seq_lens"].tolist() == [n + count if n > num_nodes else 0 for n, count in lens]
        firsts = [[place[0] for place in plane] for plane in given["positions"].tolist()]
        assert arguments["positions"].tolist() == [
            [
                [min(first + count + depth, LAST) for depth in self.tree.depths]
                for first, count in zip(plane, counts, strict=True)
            ]
            for plane in firsts
        ]
        assert arguments["tokens"][:, 0].tolist() == roots
        assert torch.equal(arguments["tokens"][:, 1:].cpu(), given["tokens"][:, 1:])
        return counts


def check(module, device, rows=(1, 3, 4), **options):
    counts = set()
    for seed, tree in enumerate(trees()):
        for num_rows, choices in zip(rows, (2, 1, 3), strict=True):
            case = Case(tree, num_rows, choices, seed, planes=1 + seed % 2 * 2, **options)
            counts |= set(case.check(module, device, room=1 if seed % 2 else tree.num_nodes))
    assert {1, 2, 3, 64} <= counts  # nothing is accepted, a little, all of a long chain


@BOTH
def test_agrees_with_a_walk(module, poisoned):
    check(module, DEVICE)


@BOTH
def test_of_many_parts_of_the_vocabulary(module, poisoned):
    for columns in (4096, 4097, 13000):
        Case(TokenTree.of_paths([(0,), (1,), (0, 0)]), 3, 4, 1, vocabulary=columns).check(module, DEVICE)


@BOTH
@pytest.mark.parametrize("size", [1, 40, 2050])
def test_hidden_states(module, size, poisoned):
    Case(TokenTree.of_paths([(0,), (1,), (0, 0)]), 3, 2, 0, size=size).check(module, DEVICE)
    Case(TokenTree.chain(3), 3, 2, 2, size=size, dtype=torch.bfloat16).check(module, DEVICE)


@BOTH
def test_logits_of_garbage_change_no_other_row(module, poisoned):
    tree = TokenTree.of_paths([(0,), (1,), (0, 0)])
    case = Case(tree, 3, 2, 5)
    case.given["logits"][8:] = torch.nan
    case.given["tokens"][2] = torch.tensor(GARBAGE)
    arguments = case.arguments(DEVICE)
    after = module.accept_round(**arguments)
    alone = Case(tree, 3, 2, 5)
    wanted = module.accept_round(**alone.arguments(DEVICE))
    for found, other in zip(after[:6], wanted[:6], strict=True):
        assert torch.equal(found[:2], other[:2])
    assert arguments["seq_lens"][2] == 0 or case.given["seq_lens"][2] > tree.num_nodes


@BOTH
def test_no_rows(module):
    case = Case(TokenTree.chain(2), 0, 2, 0, size=8)
    after = module.accept_round(**case.arguments(DEVICE))
    assert [list(x.shape) for x in after] == [[0, 6], [0, 4], [0], [0, 3], [0], [0], [0, 8]]


@BOTH
def test_refuses(module):
    case = Case(TokenTree.chain(2), 2, 2, 0, size=8)
    for name, change in {
        "tokens": lambda x: x[0],
        "logits": lambda x: x[1:],
        "positions": lambda x: x[0],
        "positions must be contiguous": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "last_position": lambda x: x.int(),
        "hidden": lambda x: x.t(),
        "seq_lens": lambda x: x.long(),
        "parents": lambda x: x.int(),
    }.items():
        arguments = case.arguments(DEVICE)
        field = name.split()[0]
        arguments[field] = change(arguments[field])
        before = {key: None if x is None else x.clone() for key, x in arguments.items()}
        with pytest.raises(ValueError, match=name):
            module.accept_round(**arguments)
        assert all(x is None or torch.equal(x, before[key]) for key, x in arguments.items())
    with pytest.raises(ValueError, match="room"):
        module.accept_round(**case.arguments(DEVICE), room=0)


def test_dispatch():
    Case(TokenTree.chain(3), 3, 2, 0, size=8).check(dispatch, DEVICE)


@pytest.mark.gpu
def test_on_the_device():
    check(accept_round, "cuda")
    check(accept_round, "cuda", vocabulary=49152, size=576, dtype=torch.bfloat16)
    check(accept_round, "cuda", rows=(8, 8, 8), vocabulary=128256, size=4096, dtype=torch.float16)


@pytest.mark.gpu
def test_captured_rounds():
    """Replayed with other numbers, each round on the lengths and positions that the last one left."""
    tree = next(tree for tree in trees() if tree.num_nodes == 64 and not tree.is_chain)
    arguments = Case(tree, 4, 2, 0, vocabulary=5000, size=64).arguments("cuda")
    twin = Case(tree, 4, 2, 0, vocabulary=5000, size=64).arguments("cuda")
    before = {name: x.clone() for name, x in arguments.items()}
    accept_round.accept_round(**arguments)
    for name, x in arguments.items():
        x.copy_(before[name])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after = accept_round.accept_round(**arguments)
    for seed in range(10):
        fresh = Case(tree, 4, 2, seed, vocabulary=5000, size=64).given
        for given in (arguments, twin):
            for name in ("logits", "tokens", "hidden"):
                given[name].copy_(fresh[name])
        graph.replay()
        wanted = reference_rounds.accept_round(**twin)
        assert all(torch.equal(x, y) for x, y in zip(after, wanted, strict=True))
        assert all(torch.equal(x, twin[name]) for name, x in arguments.items())
