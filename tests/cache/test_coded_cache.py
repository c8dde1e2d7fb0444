"""A `PagedCache` with codes, fed by hand: what it shows, against a stock cache whose older blocks are recoded here."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_policy import Policy
from transformers.cache_utils import Cache, DynamicLayer

from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.cache.paged_cache import PagedCache
from hf_turbo.ops.kv_format import end_of_codes

B, HEADS, K_DIM, V_DIM = 32, 2, 8, 12
STEP = st.one_of(
    st.tuples(st.just("update"), st.sampled_from([1, 1, 1, 2, 31, 32, 33, 70])),
    st.tuples(st.just("crop"), st.integers(0, 69)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("deepcopy"), st.none()),
)


class Pair:
    """A cache with codes and a stock one that keeps everything."""

    def __init__(self, windows, kind):
        self.pool, self.windows = BlockPool(B, kind, dict.fromkeys(range(len(windows)), kind)), windows
        self.paged = PagedCache(self.pool, windows)
        self.whole = Cache(layers=[DynamicLayer() for _ in windows])
        self.policy = Policy(kind, B)

    def update(self, tokens: int, rows: int) -> None:
        start = self.paged.get_seq_length()
        for layer, window in enumerate(self.windows):
            keys, values = torch.randn(rows, HEADS, tokens, K_DIM), torch.randn(rows, HEADS, tokens, V_DIM)
            got = self.paged.update(keys.clone(), values.clone(), layer)
            whole = self.whole.update(keys, values, layer)
            if start == 0:  # a prompt sees itself as it is
                assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
            else:
                self.assert_shown(got, layer, 0 if window is None else max(start - window + 1, 0))

    def assert_shown(self, got, layer: int, first: int, may_be_codes: bool = False) -> None:
        length = self.whole.get_seq_length()
        ends = {end_of_codes(length, B), end_of_codes(length + may_be_codes, B)}
        for x, full in zip(got, (self.whole.layers[layer].keys, self.whole.layers[layer].values), strict=True):
            shown = []
            for end in ends:
                coded = [
                    self.policy.recoded(row, layer, values=full is not self.whole.layers[layer].keys) for row in full
                ]
                expected = full.clone()
                expected[:, :, B : end * B] = torch.stack(coded)[:, :, B : end * B]
                shown.append(torch.equal(x, expected[:, :, first:]))
            assert any(shown)

    def assert_same(self) -> None:
        length = self.whole.get_seq_length()
        for i, (layer, window) in enumerate(zip(self.paged.layers, self.windows, strict=True)):
            assert layer.get_seq_length() == length
            first = 0 if window is None else max(length - window + 1, 0)
            assert layer.get_mask_sizes(3) == (length - first + 3, first)
            if length:
                self.assert_shown((layer.keys, layer.values), i, first, may_be_codes=True)

    def used(self) -> int:
        return sum(group.manager.num_used for group in self.pool.all_groups())


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(None, None), (40, 100), (100, None)]),
    st.sampled_from(["int8", "fp8", "int4"]),
    st.sampled_from([3, 64, 150]),
    st.lists(STEP, max_size=10),
)
def test_any_order_of_calls(windows, kind, prompt, steps):
    """What is taken back was announced: then it is exact, codes or not."""
    pair, rows = Pair(windows, kind), 2
    pair.paged.activate_past_recording()
    pair.update(prompt, rows)
    for step, argument in steps:
        if step == "update":
            pair.update(argument, rows)
        elif step == "crop":
            pair.paged.crop(0)
            pair.update(argument + 1, rows)
            for cache in (pair.paged, pair.whole):
                cache.crop(-argument)
        elif step == "select":
            indices = torch.tensor([i % rows for i in argument])
            rows = len(indices)
            for cache in (pair.paged, pair.whole):
                cache.batch_select_indices(indices)
        elif step == "repeat" and rows * argument <= 4:
            rows *= argument
            for cache in (pair.paged, pair.whole):
                cache.batch_repeat_interleave(argument)
        elif step == "deepcopy":
            pair.paged = copy.deepcopy(pair.paged)
        pair.assert_same()
        assert pair.used() == pair.paged.num_blocks
        for group in pair.pool.groups.values():
            group.fill(float("nan"))
    del pair.paged
    assert pair.used() == 0
