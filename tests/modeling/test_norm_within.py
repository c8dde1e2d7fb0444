"""Norms that the linears after them compute: which are, and that nothing is left out or done twice."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from steps import check_a_step
from tiny_models import build

from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.ops import dispatch, reference_layers, reference_linear
from hf_turbo.ops.deferred import DeferredMode

#: Of a step of a model of two layers: linears with a norm of their own, other linears, norms' kernels. Where a norm's
#: kernel takes a residual's sum along, it stays.
LAUNCHES = {
    "llama": {"with norm": 5, "linears": 4},
    "qwen2": {"with norm": 5, "linears": 4},
    "phi3": {"with norm": 5, "linears": 4},
    "gemma2": {"with norm": 1, "linears": 8, "norms": 8},
}


@pytest.fixture
def calls(monkeypatch):
    """The table answers as a GPU's for short rows, and what is launched is counted."""
    counted = Counter()

    def linear(*args, norm=None, **options):
        counted["linears" if norm is None else "with norm"] += 1
        return reference_linear.linear(*args, norm=norm, **options)

    def rms_norm(*args, **options):
        counted["norms"] += 1
        return reference_layers.rms_norm(*args, **options)

    monkeypatch.setattr(dispatch, "serves_linear", lambda rows, weights, dtype, device, *, activation: rows <= 64)
    monkeypatch.setattr(dispatch, "serves_norm", lambda rows, weights, device, *, activation: rows <= 32)
    monkeypatch.setattr(dispatch, "linear", linear)
    monkeypatch.setattr(dispatch, "rms_norm", rms_norm)
    return counted


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_step(name, calls):
    check_a_step(build(name), calls)
    assert calls == Counter(LAUNCHES[name])


WEIGHTS = torch.randn(4, 6, 8)
GAIN = torch.rand(8)


def normed(x, columns=8):
    groups = x.view(-1, columns)
    return (GAIN[:columns] * (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-3))).view(x.shape)


def together(num):
    def read(x):
        n = normed(x)
        return torch.cat([F.linear(n, w) for w in WEIGHTS[:num]], 1)

    return read


def before_and_after(x):
    """What a layer with attention and MLP side by side does: the norm is read again after numbers are asked for."""
    n = normed(x)
    first = F.linear(n, WEIGHTS[0])
    return first.sort(dim=1).values + F.silu(F.linear(n, WEIGHTS[1])) * F.linear(n, WEIGHTS[2])


@pytest.mark.parametrize("swapped", [False, True])
@torch.no_grad()
def test_a_residuals_sum_goes_with_the_norm_that_reads_it(swapped, calls):
    """Two layers with norms on both sides of a product, as Gemma's; whichever way round the model adds."""

    def layers(x):
        for weight in WEIGHTS[:3, :, :6]:
            y = normed(F.linear(normed(x, 6), weight), 6)
            x = x + y if swapped else y + x
        return normed(x, 6)

    x = torch.randn(5, 6)
    mode = DeferredMode(STEP_RULES, x.device)
    with mode:
        result = layers(x)
    torch.testing.assert_close(mode.tensor(result), layers(x))
    assert mode.num_launched == 0, "sums of their own"


#: What reads a norm of `x`, and the launches.
READERS = {
    "three products": (together(3), {"with norm": 1}),
    "more products than one launch takes": (together(4), {"norms": 1, "linears": 2}),
    "again, later": (before_and_after, {"with norm": 2}),
    "a product and its residual": (lambda x: x[:, :6] + F.linear(normed(x), WEIGHTS[0]), {"with norm": 1}),
    "a norm of a sum": (lambda x: F.linear(normed(x + x.flip(0)), WEIGHTS[0]), {"norms": 1, "linears": 1}),
    "a norm of groups": (lambda x: F.linear(normed(x, 4), WEIGHTS[0]), {"norms": 1, "linears": 1}),
    "no norm": (lambda x: F.linear(x * 2, WEIGHTS[0]), {"linears": 1}),
}


@pytest.mark.parametrize("name", READERS)
@torch.no_grad()
def test_readers_of_a_norm(name, calls):
    read, launches = READERS[name]
    x = torch.randn(5, 8)
    expected = read(x)
    mode = DeferredMode(STEP_RULES, x.device)
    with mode:
        result = read(x)
    torch.testing.assert_close(mode.tensor(result), expected)
    assert calls == Counter(launches)


@torch.no_grad()
def test_more_rows_than_the_table_says(calls):
    x = torch.randn(33, 8)
    mode = DeferredMode(STEP_RULES, x.device)
    with mode:
        result = together(2)(x)
    torch.testing.assert_close(mode.tensor(result), together(2)(x))
    assert calls == Counter({"norms": 1, "linears": 1})


@torch.no_grad()
def test_the_table_is_told_what_is_launched(calls, monkeypatch):
    asked = []

    def serves(rows, weights, device, *, activation):
        asked.append((rows, len(weights), activation))
        return False

    monkeypatch.setattr(dispatch, "serves_norm", serves)
    x = torch.randn(5, 8)
    mode = DeferredMode(STEP_RULES, x.device)
    with mode:
        result = before_and_after(x)
    torch.testing.assert_close(mode.tensor(result), before_and_after(x))
    assert asked == [(5, 1, False)]  # the norm is there then
    assert calls == Counter({"norms": 1, "linears": 2})
    asked.clear()
    with mode:
        n = normed(x)
        result = F.silu(F.linear(n, WEIGHTS[1])) * F.linear(n, WEIGHTS[2])
    mode.tensor(result)
    assert asked == [(5, 2, True)]


def test_no_norm_within_on_a_cpu():
    assert not dispatch.serves_norm(1, [WEIGHTS[0]], torch.device("cpu"), activation=False)
