"""What the tests of the two loops share: a patched model by its own loops, and by Transformers'."""

from contextlib import contextmanager
from types import FunctionType
from unittest.mock import patch

import torch
from helpers import generate
from transformers import LogitsProcessor, StoppingCriteria

from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation import mixin


@contextmanager
def stock_loops():
    """Patched models run Transformers' own loops."""
    with patch.object(mixin, "can_sample", lambda *_: False), patch.object(mixin, "can_search", lambda *_: False):
        yield


@contextmanager
def own_loops():
    """Fails when a patched model runs one of Transformers' own loops in this block."""
    ran = []

    def counted(loop):
        return lambda *args: ran.append(loop) or loop(*args)

    counted_sample = patch.object(mixin, "sample", counted(mixin.sample))
    with counted_sample, patch.object(mixin, "beam_search", counted(mixin.beam_search)):
        yield
    assert ran


def both(model, inputs, new_tokens=14, seed=5, **options):
    """Results of Transformers' loop and of ours, over the same forwards; `options` may be made anew by a function."""

    def made():
        return {name: x() if isinstance(x, FunctionType) else x for name, x in options.items()}

    torch.manual_seed(seed)
    with stock_loops():
        stock = generate(model, inputs, new_tokens, **made())
    stock_random = torch.rand(3)
    torch.manual_seed(seed)
    with own_loops():
        ours = generate(model, inputs, new_tokens, **made())
    assert torch.equal(torch.rand(3), stock_random), "random numbers were left or taken"
    return stock, ours


def assert_same(stock, ours):
    """Bit for bit, and in kind."""
    assert type(stock) is type(ours)
    assert stock.keys() == ours.keys()
    for name, expected in stock.items():
        got = ours[name]
        if name == CACHE_NAME:
            assert_same_cache(expected, got)
        elif isinstance(expected, tuple):
            assert isinstance(got, tuple)
            assert len(got) == len(expected)
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True)), name
        else:
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert torch.equal(got, expected), name
            assert got.is_contiguous()


def assert_same_cache(stock, ours):
    assert ours.get_seq_length() == stock.get_seq_length()
    assert ours.layout.padding == stock.layout.padding
    assert not ours.layout.only_ones_follow
    for window, group in stock.groups.items():
        got = ours.groups[window]
        assert got.num_columns == group.num_columns
        if window is None:
            assert got.table.num_live_blocks == group.table.num_live_blocks
        else:  # a step that was taken back may have given up a block that the next step would not need either
            assert group.table.num_live_blocks - len(ours.layout.padding) <= got.table.num_live_blocks
            assert got.table.num_live_blocks <= group.table.num_live_blocks
    for (keys, values, window), (stock_keys, stock_values, _) in zip(ours, stock, strict=True):
        length = keys.shape[2] if window is None else min(keys.shape[2], int(window) - 1)
        assert torch.equal(keys[:, :, -length:], stock_keys[:, :, -length:])
        assert torch.equal(values[:, :, -length:], stock_values[:, :, -length:])


class CountingProcessor(LogitsProcessor):
    """A user's processor: remembers the lengths it saw, and lets no token come twice in a row."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores.scatter(1, input_ids[:, -1:], float("-inf")) if input_ids.shape[1] else scores


class CountingCriterion(StoppingCriteria):
    """A user's criterion: stops rows at a length, and remembers what it was called with."""

    def __init__(self, length):
        self.length = length
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((tuple(input_ids.shape), None if scores is None else len(scores)))
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)
