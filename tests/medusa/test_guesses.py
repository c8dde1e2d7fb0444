"""The tokens that a drafter's heads put into its tree, against a computation by hand."""

import pytest
import tiny_models
import torch
from torch import nn

import hf_turbo
from hf_turbo.generation import medusa
from hf_turbo.generation.medusa_heads import MedusaHeads, is_plain_linear
from hf_turbo.modeling.head_input import make_watchable
from hf_turbo.ops import reference_linear

HEADS = 3
TREES = {
    "all heads": [[0], [2], [0, 1], [2, 0], [0, 1, 3]],
    "fewer": [[0], [1], [1, 2]],
    "more ranks than the kernel takes": [[0], [20], [20, 17]],
}


@pytest.fixture(scope="module")
def base():
    return tiny_models.build("llama")


def drafter_of(base, folder, tree, own=False, num_layers=2):
    heads = MedusaHeads(HEADS, num_layers, base.config.hidden_size, base.config.vocab_size, own_projection=own)
    for p in heads.parameters():
        nn.init.normal_(p, std=0.3)
    heads.save_pretrained(folder)
    return hf_turbo.Medusa(folder, tree=tree).attach(hf_turbo.patch(base)), heads


def by_hand(heads, hidden, roots, tree, projection):
    rows = []
    for x, root in zip(hidden, roots.tolist(), strict=True):
        best = []
        for head in range(HEADS):
            y = x
            for weight, bias in zip(heads.weights, heads.biases, strict=True):
                z = weight[head] @ y + bias[head]
                y = y + z * torch.sigmoid(z)
            own = projection if heads.projections is None else heads.projections[head]
            best.append((own @ y).argsort(descending=True).tolist())
        nodes = sorted(tree, key=lambda path: (len(path), path))
        rows.append([root, *(best[len(path) - 1][path[-1]] for path in nodes)])
    return rows


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_guesses(base, tmp_path, tree, own):
    drafter, heads = drafter_of(base, tmp_path, tree, own)
    try:
        hidden, roots = torch.randn(4, base.config.hidden_size), torch.arange(4)
        wanted = by_hand(heads, hidden, roots, tree, base.lm_head.weight)
        assert drafter.guess(hidden, roots).tolist() == wanted
        places = torch.full((4, 3 + len(wanted[0])), -1), torch.full((4, len(wanted[0])), -1)
        assert drafter.guess(hidden, roots, (places[0][:, 3:], places[1])).tolist() == wanted
        assert places[0][:, 3:].tolist() == places[1].tolist() == wanted and (places[0][:, :3] == -1).all()
        with pytest.raises(ValueError, match="what the model's head is given"):
            drafter.guess(None, roots)
    finally:
        hf_turbo.unpatch(base)


def test_a_plain_head_is_multiplied_as_in_a_step(base, tmp_path, monkeypatch):
    drafter, heads = drafter_of(base, tmp_path, TREES["all heads"])
    shapes = []

    def linear(x, weights, biases):
        shapes.append(tuple(x.shape))
        return reference_linear.linear(x, weights, biases)

    try:
        monkeypatch.setattr(medusa, "serves_linear", lambda rows, *args, **options: rows <= 6)
        monkeypatch.setattr(medusa, "linear", linear)
        hidden, roots = torch.randn(3, base.config.hidden_size), torch.arange(3)
        for rows in (1, 2, 3):
            wanted = by_hand(heads, hidden[:rows], roots[:rows], TREES["all heads"], base.lm_head.weight)
            assert drafter.guess(hidden[:rows], roots[:rows]).tolist() == wanted
        assert shapes == [(3, base.config.hidden_size), (6, base.config.hidden_size)]
    finally:
        hf_turbo.unpatch(base)


def test_a_heads_bias_and_hooks_count(base, tmp_path, monkeypatch):
    drafter, _ = drafter_of(base, tmp_path, TREES["all heads"])
    calls = []

    def linear(*case):
        calls.append(case)
        return reference_linear.linear(*case)

    try:
        monkeypatch.setattr(base.lm_head, "bias", nn.Parameter(torch.randn(base.config.vocab_size) * 9))
        hidden, roots = torch.randn(2, base.config.hidden_size), torch.arange(2)
        wanted = drafter.guess(hidden, roots).tolist()
        monkeypatch.setattr(medusa, "serves_linear", lambda *args, **options: True)
        monkeypatch.setattr(medusa, "linear", linear)
        assert drafter.guess(hidden, roots).tolist() == wanted and len(calls) == 1
        hook = base.lm_head.register_forward_hook(lambda module, args, output: -output)
        assert drafter.guess(hidden, roots).tolist() != wanted and len(calls) == 1
        hook.remove()
    finally:
        hf_turbo.unpatch(base)


def test_plain_linears():
    cpu, meta = torch.device("cpu"), torch.device("meta")

    class Other(nn.Linear):
        pass

    class Model:
        def __init__(self, head):
            self.get_output_embeddings = lambda: head

    plain, watched, hooked, replaced = (nn.Linear(2, 3) for _ in range(4))
    make_watchable(Model(watched))
    hooked.register_forward_hook(lambda *args: None)
    replaced.forward = lambda x: x
    assert is_plain_linear(plain, cpu) and is_plain_linear(watched, cpu)
    for module, device in ((plain, meta), (hooked, cpu), (replaced, cpu), (Other(2, 3), cpu), (nn.Identity(), cpu)):
        assert not is_plain_linear(module, device)
