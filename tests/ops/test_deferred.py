"""What deferred operations say of their results before there are any."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_turbo.ops import deferred
from hf_turbo.ops.deferred import Deferred, DeferredMode, aten

CPU = torch.device("cpu")


def shape_of(x):
    return x.shape, x.stride(), x.dtype, x.storage_offset()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(deferred, "_results", {})
    monkeypatch.setattr(deferred, "_specs", {})


def pairs():
    """Operations that differ in one respect each: what is remembered of one must not be taken for another."""
    x, y = torch.randn(4, 6), torch.randn(6, 4)
    half = x.to(torch.bfloat16)
    return [
        (lambda: x * 2, lambda: half * 2),
        (lambda: x.neg(), lambda: y.t().neg()),
        (lambda: x.mean(-1), lambda: x.mean(-1, keepdim=True)),
        (lambda: x.mean(0), lambda: x.mean(1)),
        (lambda: torch.cat([x, x]), lambda: torch.cat([x, x, x])),
        (lambda: torch.cat([x, x], dim=0), lambda: torch.cat([x, x], dim=1)),
        (lambda: x.neg()[:, 1:3], lambda: x.neg()[:, 1:5]),
        (lambda: x.neg().split(2), lambda: x.neg().split([1, 3])),
        (lambda: (x @ y).neg(), lambda: (y @ x).neg()),
        (lambda: x[torch.tensor([1, 0])], lambda: x[torch.tensor([1, 0, 3])]),
        (lambda: x.neg().to(torch.float64), lambda: x.neg().to(torch.bfloat16)),
        (lambda: x.neg().to(torch.int64) * 2, lambda: x.neg().to(torch.int64) * 2.0),
        (lambda: x.neg().to(torch.bool) * True, lambda: x.neg().to(torch.bool) * 1),
        (lambda: x.neg()[:2].view(12), lambda: x.neg()[2:].view(12)),
        (lambda: x.neg().view(4, 6).mean(1), lambda: x.neg().t().mean(1)),
    ]


@pytest.mark.parametrize("i", range(len(pairs())))
def test_operations_that_differ_a_little(i):
    for compute in (*pairs()[i], *pairs()[i]):
        expected = compute()
        with DeferredMode([], CPU) as mode:
            got = compute()
        some, all_expected = (x if isinstance(x, (tuple, list)) else [x] for x in (got, expected))
        assert len(some) == len(all_expected)
        for one, right in zip(some, all_expected, strict=True):
            assert isinstance(one, Deferred) and shape_of(one) == shape_of(right)
            assert shape_of(mode.tensor(one))[0] == right.shape and mode.tensor(one).dtype == right.dtype


def test_the_default_dtype_counts():
    """It is what whole numbers become that are multiplied by others."""
    x = torch.randn(4, 6)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with DeferredMode([], CPU):
                assert (x.neg().to(torch.int64) * 2.0).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_equal_operations_are_looked_at_once(monkeypatch):
    seen = []
    own = deferred._meta
    monkeypatch.setattr(deferred, "_meta", lambda x: seen.append(x) or own(x))
    with DeferredMode([], CPU) as mode:
        x, y = torch.randn(4, 6), torch.randn(4, 6)
        first = mode.tensor(x * 3)
        num_seen = len(seen)
        second = mode.tensor(y * 3)
    assert num_seen and len(seen) == num_seen
    assert torch.equal(first, x * 3) and torch.equal(second, y * 3)


def test_a_deep_model_is_looked_at_no_longer_than_a_shallow_one():
    """A layer's input is like the last layer's, whatever computed it."""
    x, weight = torch.randn(4, 6), torch.randn(6, 6)
    num_known = []
    with DeferredMode([], CPU):
        for _ in range(4):
            half = (x @ weight).view(2, 2, 6).transpose(0, 1).neg()
            x = x + half.reshape(4, 6).tanh()
            num_known.append(len(deferred._results))
    assert num_known[1] == num_known[2] == num_known[3]


def test_not_everything_is_remembered(monkeypatch):
    """What was deferred before goes on as it is."""
    monkeypatch.setattr(deferred, "_MAX_RESULTS", 5)
    with DeferredMode([], CPU) as mode:
        early = torch.arange(6.0).view(2, 3) * 2
        for n in range(1, 20):
            assert mode.tensor(torch.ones(n) * 2).shape == (n,)
            assert len(deferred._results) <= 5 and len(deferred._specs) <= 5
        late = torch.arange(6.0).view(3, 2) * 2
        assert early.t().neg().shape == late.neg().shape == (3, 2)
        assert mode.tensor(early.t().neg()).tolist() == [[0, -6], [-2, -8], [-4, -10]]


class Seen(TorchDispatchMode):
    """Notes what runs while it is active."""

    def __init__(self):
        super().__init__()
        self.funcs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.funcs.append(func)
        return func(*args, **(kwargs or {}))


def test_another_mode_sees_nothing_of_what_is_deferred():
    x = torch.randn(4, 6)
    with Seen() as seen, DeferredMode([], CPU) as mode:
        waits = x.neg().t()
        result = mode.tensor(waits)
    assert seen.funcs == []
    assert type(result) is torch.Tensor and torch.equal(result, -x.t())


@pytest.mark.parametrize("make", ["computed", "deferred", "written", "a view", "kept", "a part"])
@pytest.mark.parametrize("use", ["weight", "bias", "norm"])
def test_weights_that_are_made_in_between(make, use):
    """What multiplies by them does not wait: kernels read weights before those in front of them have ended."""
    x, kept = torch.randn(3, 6), torch.randn(6, 6)
    with DeferredMode([], CPU) as mode:
        if make == "computed":
            weight = torch.where(kept > 0, kept, 0.5)
        elif make == "deferred":
            weight = mode.tensor(kept.neg())
        elif make == "written":
            weight = kept.mul_(2)
        elif make == "a part":
            [weight] = kept.view(1, 6, 6).unbind()
        else:
            made = kept if make == "kept" else torch.where(kept > 0, kept, 0.5)
            weight = made.t()
        if use == "weight":
            result, expected = x @ weight, lambda: x @ weight
        elif use == "bias":
            result, expected = torch.addmm(weight[0], x, x.t() @ x), lambda: torch.addmm(weight[0], x, x.t() @ x)
        else:
            result, expected = x.neg() * weight[0], lambda: -x * weight[0]
        assert isinstance(result, Deferred) == (make in ("kept", "a part"))
        result = mode.tensor(result)
    torch.testing.assert_close(result, expected())


@pytest.mark.parametrize("use", [lambda x: x.float(), lambda x: x + 1, lambda x: 1 + x.float()])
def test_what_a_norm_makes_of_its_weight(use):
    """A rule looks through a cast and a sum, and its kernel reads the weight itself."""
    kept = torch.randn(6).to(torch.bfloat16)
    with DeferredMode([], CPU):
        made = torch.where(kept > 0, kept, 0.5)
        assert isinstance(use(kept), Deferred) and not isinstance(use(made), Deferred)
        assert isinstance(use(kept.neg()), Deferred)  # nothing has been made so far


def test_what_is_multiplied_may_be_made():
    """The left side of a product, as attention gives it."""
    x, weight = torch.randn(3, 6), torch.randn(6, 6)
    with DeferredMode([], CPU) as mode:
        left = torch.where(x > 0, x, 0.5)
        product, plus = left @ weight, torch.addmm(weight[0], left, weight)
        assert isinstance(product, Deferred) and isinstance(plus, Deferred)
        product, plus = mode.tensor(product), mode.tensor(plus)
    torch.testing.assert_close(product, left @ weight)
    torch.testing.assert_close(plus, left @ weight + weight[0])


def test_what_waits():
    x = torch.ones(3)
    with DeferredMode([], CPU) as mode:
        first, dropped, done, second, other = x.neg(), x.neg(), x.neg(), x.neg(), x * 2
        del dropped
        mode.tensor(done)
        for _ in range(2):
            assert mode.waiting(aten.neg.default) == [first.value, second.value]
        assert mode.waiting(aten.neg.default, aten.mul.Tensor) == [first.value, second.value, other.value]
        third = x.neg()
        assert mode.waiting(aten.neg.default) == [first.value, second.value, third.value]


def test_a_list_of_tensors_that_is_written_to():
    weight = torch.ones(3)
    with DeferredMode([], CPU) as mode:
        twice = weight * 2
        torch._foreach_add_([weight], 1)
        assert mode.tensor(twice).tolist() == [2, 2, 2]


class Wrapped(torch.Tensor):
    """A tensor whose numbers are in another one, as quantizing libraries have them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[x.inner if isinstance(x, Wrapped) else x for x in args], **(kwargs or {}))


def test_a_write_while_a_wrapped_weight_waits():
    weight = torch.randn(4, 3)
    with DeferredMode([], CPU) as mode:
        rows = torch.nn.functional.embedding(torch.tensor([1]), Wrapped(weight))
        torch.zeros(2).add_(1)
        assert torch.equal(mode.tensor(rows), weight[1:2])
