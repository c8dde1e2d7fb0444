"""Logits of some rows: the head multiplies those only."""

import pytest
import torch
import torch.nn.functional as F

from hf_turbo.modeling.fusion import STEP_RULES, pick_rows
from hf_turbo.ops.deferred import DeferredMode

WEIGHT = torch.randn(11, 8)
BIAS = torch.randn(11)
#: What a model does with its last hidden states `[rows, 1, 8]`.
HEADS = {
    "plain": lambda x: F.linear(x, WEIGHT),
    "bias": lambda x: F.linear(x, WEIGHT, BIAS),
    "soft cap": lambda x: torch.tanh(F.linear(x, WEIGHT) / 3) * 3,
    "scale and cast": lambda x: (F.linear(x, WEIGHT) * 0.5).double(),
    "of two": lambda x: F.linear(x, WEIGHT) * F.linear(x, WEIGHT.flip(0)),  # not known: all rows are computed
    "without a head": lambda x: x.sum(-1, keepdim=True).expand(-1, -1, 11),
}


@pytest.mark.parametrize("rules", [(), STEP_RULES])
@pytest.mark.parametrize("name", HEADS)
def test_same_numbers(name, rules):
    x, rows = torch.randn(6, 1, 8), torch.tensor([4, 0, 0, 5])
    mode = DeferredMode(rules, x.device)
    with mode:
        logits = HEADS[name](x * 2)
    torch.testing.assert_close(pick_rows(mode, logits, rows), HEADS[name](x * 2)[rows])


@pytest.mark.parametrize("head", [HEADS["plain"], lambda x: HEADS["plain"](x) * 0.5])
@pytest.mark.parametrize("shape", [(3, 2, 11), (6, 11)])
def test_rows_are_of_the_first_dimension(shape, head):
    """Also where the head computes several rows for each of those, and where its own have another shape."""
    x, rows = torch.randn(6, 1, 8), torch.tensor([2, 0])
    mode = DeferredMode(STEP_RULES, x.device)
    with mode:
        logits = head(x * 2).view(shape)
    torch.testing.assert_close(pick_rows(mode, logits, rows), head(x * 2).view(shape)[rows])


@pytest.mark.parametrize("name", ["plain", "bias", "soft cap", "scale and cast"])
def test_no_other_row_is_multiplied(name, monkeypatch):
    x, rows, seen = torch.randn(6, 1, 8), torch.tensor([4, 0]), []
    product = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: (seen.append(len(x)), product(x, *rest))[1])
    mode = DeferredMode(STEP_RULES, x.device)
    with mode:
        logits = HEADS[name](x * 2)
    seen.clear()
    pick_rows(mode, logits, rows)
    assert seen == [2]
