"""`PagedCache` against the stock cache: the same tensors into both, the same out of both."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.cache.forward_plan import RowLayout
from hf_turbo.cache.paged_cache import PagedCache
from hf_turbo.compat import crop_argument

HEADS, K_DIM, V_DIM = 2, 8, 6
FULL, SLIDING, MIXED = (None, None), (8, 8), (8, None, 8)
ALL_WINDOWS = pytest.mark.parametrize("windows", [FULL, SLIDING, MIXED], ids=["full", "sliding", "mixed"])


class Pair:
    """A paged cache and a stock one that are fed the same."""

    def __init__(self, windows=FULL, block_size=4):
        self.pool = BlockPool(block_size)
        self.windows = windows
        self.paged = PagedCache(self.pool, windows)
        self.stock = Cache(layers=[DynamicSlidingWindowLayer(w) if w else DynamicLayer() for w in windows])

    def update(self, tokens: int, rows: int = 2) -> None:
        for layer in range(len(self.windows)):
            keys, values = torch.randn(rows, HEADS, tokens, K_DIM), torch.randn(rows, HEADS, tokens, V_DIM)
            got = self.paged.update(keys.clone(), values.clone(), layer)
            expected = self.stock.update(keys, values, layer)
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b)

    def both(self, method: str, *args) -> None:
        """Calls both; the paged one raises what the stock one raises."""
        outcomes = []
        for cache in (self.paged, self.stock):
            try:
                outcomes.append(getattr(cache, method)(*args))
            except (RuntimeError, ValueError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], f"{method}{args}: paged {outcomes[0]}, stock {outcomes[1]}"

    def assert_same(self, views: bool = True) -> None:
        assert len(self.paged) == len(self.stock)
        assert self.paged.is_sliding == self.stock.is_sliding
        assert self.paged.get_max_length() == self.stock.get_max_length()
        for i, (mine, theirs) in enumerate(zip(self.paged.layers, self.stock.layers, strict=True)):
            assert self.paged.get_seq_length(i) == self.stock.get_seq_length(i)
            assert self.paged.get_max_length(i) == self.stock.get_max_length(i)
            for q_len in (1, 3, 20):
                assert self.paged.get_mask_sizes(q_len, i) == self.stock.get_mask_sizes(q_len, i)
            if views and theirs.get_seq_length():
                assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)

    def used(self) -> int:
        return sum(group.manager.num_used for group in self.pool.groups.values())


@ALL_WINDOWS
@pytest.mark.parametrize("steps", [(1,) * 20, (7, 1, 1), (8, 1), (9, 1, 5, 1), (20, 3, 1, 1, 9), (3, 40, 1)])
def test_update(windows, steps):
    pair = Pair(windows)
    pair.assert_same()
    for tokens in steps:
        pair.update(tokens)
        pair.assert_same()


def test_nothing_in_an_empty_cache():
    paged = Pair().paged
    assert paged.get_seq_length() == 0 and not paged.is_initialized and paged.num_blocks == 0
    assert paged.layers[0].keys is None and paged.layers[0].values is None
    paged.reorder_cache(torch.tensor([0]))
    paged.crop(-3)
    paged.reset()
    assert paged.get_seq_length() == 0


@ALL_WINDOWS
@pytest.mark.parametrize("beam_idx", [[2, 0, 1], [0, 0, 0], [1, 1, 2], [0, 1, 2], [2, 2, 0]])
def test_reorder(windows, beam_idx):
    """C04: keys and values, of every row, then each row goes on by itself."""
    pair = Pair(windows)
    pair.update(6, rows=3)
    for _ in range(4):
        pair.both("reorder_cache", torch.tensor(beam_idx))
        pair.assert_same()
        pair.update(1, rows=3)
        pair.assert_same()


@ALL_WINDOWS
@pytest.mark.parametrize("indices", [[2, 0], [1], [-1, 0], [0, 0, 1, 2, 2]])
def test_select_by_index(windows, indices):
    pair = Pair(windows)
    pair.update(6, rows=3)
    pair.both("batch_select_indices", torch.tensor(indices))
    pair.assert_same()
    pair.update(3, rows=len(indices))
    pair.assert_same()


@pytest.mark.parametrize("keep", [[True, False, True], [False, False, True], [True, True, True]])
def test_select_by_mask(keep):
    pair = Pair(MIXED)
    pair.update(6, rows=3)
    pair.both("batch_select_indices", torch.tensor(keep))
    pair.assert_same()
    pair.update(3, rows=sum(keep))
    pair.assert_same()


@ALL_WINDOWS
def test_repeat(windows):
    pair = Pair(windows)
    pair.update(6)
    used = pair.used()
    pair.both("batch_repeat_interleave", 3)
    pair.assert_same()
    assert pair.used() == used, "copies were made where blocks could be shared"
    pair.update(5, rows=6)
    pair.assert_same()


@pytest.mark.parametrize("reorder", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_of_constants(reorder):
    """C04's unit: every row one constant in K and another in V; a mix-up of either shows."""
    pair = Pair(FULL)
    row = torch.arange(3.0).view(3, 1, 1, 1)
    for layer in range(2):
        keys, values = (10 + row).expand(3, HEADS, 5, K_DIM), (20 + row).expand(3, HEADS, 5, V_DIM)
        pair.paged.update(keys.clone(), values.clone(), layer)
    if reorder == "batch_repeat_interleave":
        pair.paged.batch_repeat_interleave(3)
        order = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    else:
        order = [2, 0, 1]
        getattr(pair.paged, reorder)(torch.tensor(order))
    for layer in pair.paged.layers:
        assert layer.keys.shape == (len(order), HEADS, 5, K_DIM)
        for i, source in enumerate(order):
            assert (layer.keys[i] == 10 + source).all() and (layer.values[i] == 20 + source).all()


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize("argument", [-1, -2, -3, -5, 0, 1, 2, 3, 7])
def test_crop(argument, block_size, as_tensor):
    """C06: 3 tokens; what a positive number and 0 mean is what the installed release says."""
    pair = Pair(FULL, block_size)
    pair.update(3)
    pair.both("crop", torch.tensor(argument) if as_tensor else argument)
    pair.assert_same()
    kept = pair.paged.get_seq_length()
    if argument <= 0:
        assert kept == max(3 + argument, 0)
    assert pair.used() == 2 * -(-kept // block_size), "cropped blocks did not go back to the pool"
    pair.update(2)
    pair.update(1)
    pair.assert_same()


@pytest.mark.parametrize("length, removed", [(32, 16), (33, 1), (32, 1), (17, 17), (31, 15)])
def test_crop_at_block_edges(length, removed):
    pair = Pair(FULL, block_size=16)
    pair.update(length)
    pair.both("crop", -removed)
    pair.assert_same()
    assert pair.used() == 2 * -(-(length - removed) // 16)
    pair.update(2)
    pair.assert_same()


def test_crop_argument_follows_the_release():
    for length in (0, 3, 5):
        for argument in (-5, -3, 0, 2, 3, 9):
            pair = Pair(FULL)
            if length:
                pair.update(length)
            try:
                pair.stock.crop(argument)
                expected = pair.stock.get_seq_length()
            except ValueError:
                with pytest.raises(ValueError, match="negative"):
                    crop_argument(argument, length)
            except (AttributeError, TypeError):  # the stock layer is not initialised
                continue
            else:
                assert max(length - crop_argument(argument, length), 0) == expected


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("windows", [SLIDING, MIXED], ids=["sliding", "mixed"])
def test_crop_of_a_window_that_records_its_past(windows, block_size):
    """Assisted decoding: tokens are added, some are taken back, again and again across the window's edge."""
    pair = Pair(windows, block_size)
    pair.both("activate_past_recording")
    for added, removed in [(5, 0), (4, 3), (4, 0), (4, 4), (4, 1), (1, 0), (6, 5), (4, 2), (12, 3)]:
        pair.update(added)
        pair.both("crop", -removed)
        pair.assert_same()


@ALL_WINDOWS
def test_crop_of_a_window_not_reached(windows):
    pair = Pair(windows)
    pair.update(7)
    pair.both("crop", -4)
    pair.assert_same()
    pair.update(1)
    pair.assert_same()


@pytest.mark.parametrize("block_size", [1, 4])
def test_crop_past_what_a_window_kept(block_size):
    """As in the stock cache an error, before anything has changed, never a wrong text."""
    pair = Pair(MIXED, block_size)
    for _ in range(20):
        pair.update(1)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        pair.paged.crop(-9)
    pair.assert_same()
    pair.update(1)
    pair.assert_same()


@ALL_WINDOWS
def test_reset(windows):
    pair = Pair(windows)
    pair.update(11)
    pair.paged.reset()
    assert pair.used() == 0 and pair.paged.get_seq_length() == 0
    pair.stock = Pair(windows).stock
    pair.update(5, rows=3)
    pair.assert_same()


@ALL_WINDOWS
def test_deepcopy_shares_until_it_writes(windows):
    pair = Pair(windows)
    pair.update(6)
    used = pair.used()
    twin = Pair(windows)
    twin.pool, twin.paged, twin.stock = pair.pool, copy.deepcopy(pair.paged), copy.deepcopy(pair.stock)
    assert pair.used() == used and twin.paged.num_blocks == pair.paged.num_blocks
    for _ in range(6):
        pair.update(1)
        twin.update(2)
        pair.assert_same()
        twin.assert_same()
    del twin
    assert pair.used() == pair.paged.num_blocks
    pair.assert_same()


def test_views_are_copies():
    """Writing to `layer.keys` of a paged cache changes nothing."""
    pair = Pair()
    pair.update(5)
    pair.paged.layers[0].keys.zero_()
    pair.assert_same()


def test_iterates_like_a_dynamic_cache():
    """`for keys, values, window in cache` is what users write of the cache that `generate()` returns."""
    pair = Pair(MIXED)
    pair.update(5)
    for (keys, values, *_), layer in zip(pair.paged, pair.stock.layers, strict=True):
        assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)


def test_layers_alone_can_not_be_changed():
    """A layer shares its blocks with others: the call belongs to the cache."""
    layer = Pair().paged.layers[0]
    for call in (layer.reset, lambda: layer.crop(-1), lambda: layer.reorder_cache(torch.tensor([0]))):
        with pytest.raises(NotImplementedError, match="on the cache"):
            call()


def test_not_pickled():
    with pytest.raises(TypeError, match="layers"):
        pickle.dumps(Pair().paged)


def test_not_compiled_and_croppable():
    paged = Pair(MIXED).paged
    assert not paged.is_compileable and paged.is_croppable


def test_blocks_die_with_the_cache():
    pair = Pair(MIXED)
    pair.update(30)
    assert pair.used() > 0
    del pair.paged  # no cycle holds it: its blocks are free at once, not at the next garbage collection
    assert pair.used() == 0


def test_other_dtype_is_refused():
    pair = Pair()
    pair.update(3)
    keys, values = torch.zeros(2, HEADS, 1, K_DIM), torch.zeros(2, HEADS, 1, V_DIM)
    with pytest.raises(ValueError, match="start from a new cache"):
        pair.paged.update(keys.double(), values.double(), 0)


def test_other_number_of_rows_is_refused():
    pair = Pair()
    pair.update(3)
    with pytest.raises(ValueError, match="2 rows"):
        pair.paged.update(torch.zeros(3, HEADS, 1, K_DIM), torch.zeros(3, HEADS, 1, V_DIM), 0)


STEP = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 9)),
    st.tuples(st.just("crop"), st.integers(0, 6)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("deepcopy"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([FULL, SLIDING, MIXED]), st.sampled_from([1, 2, 4, 16]), st.lists(STEP, max_size=12))
def test_any_order_of_calls(windows, block_size, steps):
    """Recording its past as in assisted decoding, the only way in which a stock window can be cropped."""
    pair, rows = Pair(windows, block_size), 2
    pair.both("activate_past_recording")
    pair.update(3, rows)
    for step, argument in steps:
        if step == "update":
            pair.update(argument, rows)
            pair.both("crop", 0)
        elif step == "crop":
            pair.update(argument + 1, rows)  # what is taken back must have been recorded
            pair.both("crop", -argument)
        elif step == "reorder":
            indices = [i % rows for i in argument]
            pair.both("reorder_cache", torch.tensor(indices))
            rows = len(indices)
        elif step == "repeat" and rows * argument <= 8:
            pair.both("batch_repeat_interleave", argument)
            rows *= argument
        elif step == "deepcopy":
            pair.paged = copy.deepcopy(pair.paged)
        pair.assert_same()
        assert pair.used() == pair.paged.num_blocks
    pair.update(1, rows)
    pair.assert_same(views=False)


def test_rows_that_begin_later_have_no_tokens_before():
    layout = RowLayout(padding=[0, 3, 5])
    assert [layout.lengths(columns) for columns in (0, 2, 3, 7)] == [[0, 0, 0], [2, 0, 0], [3, 0, 0], [7, 4, 2]]
