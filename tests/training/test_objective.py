"""The loss against one computed head by head and position by position, and its gradients."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.training.examples import NO_TARGET, Examples
from hf_turbo.training.objective import Objective, _SummedLoss

HEADS, HIDDEN, VOCAB, ROWS = 3, 16, 24, 11


def heads(own=False, num_layers=2):
    made = MedusaHeads(HEADS, num_layers, HIDDEN, VOCAB, own_projection=own)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def batch():
    targets = torch.randint(VOCAB, (ROWS, HEADS))
    targets[2, 2] = targets[-1, 1:] = NO_TARGET
    return torch.randn(ROWS, HIDDEN), targets


def by_hand(made, project, hidden, targets):
    logits = made(hidden, project).double()
    losses, accuracies = [], []
    for head in range(HEADS):
        rows = [row for row in range(len(targets)) if targets[row, head] != NO_TARGET]
        log_probabilities = [logits[row, head].log_softmax(-1)[targets[row, head]] for row in rows]
        losses.append(-sum(log_probabilities) / len(rows))
        accuracies.append(sum(int(logits[row, head].argmax() == targets[row, head]) for row in rows) / len(rows))
    return torch.stack(losses), accuracies


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("rows", [1, 4, 100], ids="rows{}".format)
def test_loss_and_gradients(own, rows):
    made, project = heads(own), nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    hidden, targets = batch()
    expected, accuracies = by_hand(made, project, hidden, targets)
    weights = torch.tensor([1.0, 0.8, 0.64])
    wanted = torch.autograd.grad((expected * weights).sum(), list(made.parameters()))
    found = Objective(made, project, max_logits=rows * HEADS * VOCAB)(hidden, targets)
    torch.testing.assert_close(found.loss, expected.float())
    torch.testing.assert_close(found.accuracy, torch.tensor(accuracies))
    (found.loss * weights).sum().backward()
    for parameter, gradient in zip(made.parameters(), wanted):
        torch.testing.assert_close(parameter.grad, gradient.float(), atol=1e-6, rtol=1e-4)
        assert parameter.grad.flatten(1).any(dim=1).all()  # every head's part
    assert project.weight.grad is None


def test_rows_without_targets_change_nothing():
    made, project = heads(), nn.Linear(HIDDEN, VOCAB, bias=False)
    hidden, targets = batch()
    padded = torch.cat([hidden, torch.randn(5, HIDDEN)])
    more = torch.cat([targets, torch.full((5, HEADS), NO_TARGET)])
    objective = Objective(made, project)
    torch.testing.assert_close(objective(padded, more), objective(hidden, targets))
    nothing = objective(hidden, torch.full_like(targets, NO_TARGET))
    assert nothing.loss.tolist() == nothing.accuracy.tolist() == [0.0] * HEADS


def test_the_projection_is_no_part_of_what_is_trained():
    made, project = heads(), nn.Linear(HIDDEN, VOCAB, bias=False)
    assert {id(p) for p in Objective(made, project).parameters()} == {id(p) for p in made.parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hidden_states_train_fp32_weights(dtype):
    made, project = heads(), nn.Linear(HIDDEN, VOCAB, bias=False).to(dtype).requires_grad_(False)
    hidden, targets = batch()
    found = Objective(made, project)(hidden.to(dtype), targets)
    full = Objective(made, nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False))
    full._project = lambda features: features @ project.weight.float().T
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, full(hidden, targets).loss, rtol=0.05, atol=0.02)
    found.loss.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in made.parameters())


class SoftmaxAsOnGPUs(TorchFunctionMode):
    """Under CUDA's autocast a softmax is in fp32 unless it is told otherwise; a CPU's leaves it alone."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.softmax and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return function(*args, **kwargs)


def test_gradients_in_bf16_are_those_of_the_rounded_logits():
    """Against double precision: probabilities, their gradients and those of the features are each rounded once."""
    made, project = heads(), nn.Linear(HIDDEN, VOCAB, bias=False).to(torch.bfloat16).requires_grad_(False)
    _, targets = batch()
    features = (torch.randn(ROWS, HEADS, HIDDEN) * 3).bfloat16().requires_grad_()
    with SoftmaxAsOnGPUs():
        sums, _ = _SummedLoss.apply(features, None, targets, Objective(made, project))
    logits = project(features.detach()).double()
    known = targets != NO_TARGET
    wanted = torch.zeros_like(logits).scatter_(-1, targets.clamp(min=0).unsqueeze(-1), 1) * known.unsqueeze(-1)
    losses = -(logits.log_softmax(-1) * wanted).sum((0, 2))
    torch.testing.assert_close(sums, losses.float(), rtol=0.004, atol=0)
    sums.sum().backward()
    exact = ((logits.softmax(-1) - wanted) * known.unsqueeze(-1)) @ project.weight.double()
    bounds = (logits.softmax(-1) + wanted) @ project.weight.double().abs() / 128
    assert ((features.grad - exact).abs() <= bounds).all()


@pytest.mark.parametrize("max_logits", [1, 1 << 20])
def test_rank_accuracies(max_logits):
    made, project = heads(), nn.Linear(HIDDEN, VOCAB, bias=False)
    hidden, targets = batch()
    found = Objective(made, project, max_logits).rank_accuracies(Examples(hidden, targets))
    logits = made(hidden, project)
    for head in range(HEADS):
        rows = [row for row in range(ROWS) if targets[row, head] != NO_TARGET]
        order = [logits[row, head].argsort(descending=True).tolist() for row in rows]
        places = [ranks.index(targets[row, head]) for row, ranks in zip(rows, order)]
        assert found[head] == pytest.approx([places.count(rank) / len(rows) for rank in range(10)])


def test_a_small_vocabulary_has_fewer_ranks():
    made = MedusaHeads(1, 1, HIDDEN, 4)
    examples = Examples(torch.randn(6, HIDDEN), torch.randint(4, (6, 1)))
    (ranks,) = Objective(made, nn.Linear(HIDDEN, 4)).rank_accuracies(examples)
    assert len(ranks) == 4 and sum(ranks) == pytest.approx(1.0)
