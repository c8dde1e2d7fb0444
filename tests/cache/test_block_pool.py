"""The tensors behind the blocks: they grow in place, are given back, and copy whole blocks."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_turbo.cache.block_group import BlockCopies, LayerStore
from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.ops.block_ids import MAX_SEGMENTS, SEGMENT_BITS, SEGMENT_MASK

HEADS, K_DIM, V_DIM, SIZE = 2, 8, 6, 4


def states(dtype=torch.float32, heads=HEADS, k_dim=K_DIM, v_dim=V_DIM):
    return torch.zeros(1, heads, 1, k_dim, dtype=dtype), torch.zeros(1, heads, 1, v_dim, dtype=dtype)


@pytest.fixture
def group():
    return BlockPool(SIZE).group(None)


def tensors(kv) -> list[torch.Tensor]:
    return [*kv.k_segments, *kv.v_segments]


def num_bytes(kv) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors(kv))


def test_layout(group):
    store = group.store_for(0, *states())
    group.allocate(3)
    kv = group.cover(store)
    [blocks] = group.manager.segment_sizes
    assert kv.k_segments[0].shape == (blocks, HEADS, SIZE, K_DIM) and kv.v_segments[0].shape[3] == V_DIM
    assert kv.block_size == SIZE and kv.num_kv_heads == HEADS
    assert store.block_bytes == SIZE * HEADS * (K_DIM + V_DIM) * 4
    assert num_bytes(kv) == blocks * store.block_bytes


def test_growth_neither_copies_nor_moves(group, monkeypatch):
    """Growing makes the new segment alone: what is there stays where it is, with its content."""
    made = []
    original = LayerStore._segment

    def segment(self, blocks, dim):
        made.append((blocks, dim))
        return original(self, blocks, dim)

    monkeypatch.setattr(LayerStore, "_segment", segment)
    store = group.store_for(0, *states())
    group.allocate(10)
    kv = group.cover(store)
    for tensor in tensors(kv):
        tensor.fill_(7.0)
    places = [t.data_ptr() for t in tensors(kv)]
    made.clear()
    group.allocate(group.manager.num_free + 1)  # one too many
    grown = group.cover(store)
    assert len(group.manager.segment_sizes) == 2
    new_blocks = group.manager.segment_sizes[1]
    assert made == [(new_blocks, K_DIM), (new_blocks, V_DIM)], "more than the new segment was allocated"
    assert [t.data_ptr() for t in (grown.k_segments[0], grown.v_segments[0])] == places
    assert all((t[:10] == 7.0).all() for t in (grown.k_segments[0], grown.v_segments[0]))
    assert num_bytes(grown) == group.manager.num_blocks * store.block_bytes


@pytest.mark.parametrize("drops", [False, True])
def test_blocks_in_use_are_never_out_of_sight(group, monkeypatch, drops):
    """Another thread may read a layer's blocks, or copy some, while a segment is added or dropped."""
    store = group.store_for(0, *states())
    used = group.allocate(8)
    spare = group.allocate(group.manager.num_free + 1)
    for tensor in tensors(group.cover(store)):
        tensor.fill_(7.0)
    if drops:
        group.release(spare)
        group.manager.drop_free_segments()
    group.allocate(group.manager.num_free + (9 if drops else 1))  # another size than what was there
    seen = []
    original = LayerStore._segment

    def segment(self, blocks, dim):
        seen.append(self.kv is not None and (read(self.kv, used[0])[0] == 7.0).all())
        BlockCopies([(used[0], used[1])]).copy_in(self.kv, self.device)
        return original(self, blocks, dim)

    monkeypatch.setattr(LayerStore, "_segment", segment)
    group.cover(store)
    assert seen == [True, True]


def test_offsets_lead_to_every_segment(group):
    """What a kernel adds to its one base pointer."""
    store = group.store_for(0, *states())
    for _ in range(3):
        group.allocate(group.manager.num_free + 5)
        kv = group.cover(store)
    assert kv.segment_offsets.shape == (2, MAX_SEGMENTS) and len(kv.k_segments) == 3
    for side, segments in enumerate((kv.k_segments, kv.v_segments)):
        for offset, segment in zip(kv.segment_offsets[side].tolist(), segments, strict=False):
            assert segments[0].data_ptr() + offset * segment.element_size() == segment.data_ptr()
            assert segment.stride() == segments[0].stride()


def test_several_rows_grow_as_one_segment(group):
    group.ensure_free(100)
    for _ in range(4):
        group.allocate(25)
    assert len(group.manager.segment_sizes) == 1


def test_slack_is_small(group):
    """A pool of many blocks holds little more than was ever asked for."""
    for _ in range(200):
        group.allocate(10)
    assert group.manager.num_blocks <= 2000 * 1.07 + 16
    assert len(group.manager.segment_sizes) < 64


def test_idle_pool_of_many_segments_becomes_one(group):
    held = []
    while len(group.manager.segment_sizes) < 40:
        held.append(group.allocate(group.manager.num_free + 8))
    for ids in held:
        group.release(ids)
    total = group.manager.num_blocks
    group.allocate(total + 1)
    assert len(group.manager.segment_sizes) == 1


def test_release_returns_the_memory(group):
    store = group.store_for(0, *states())
    kept = group.allocate(4)
    group.cover(store)
    gone = group.allocate(group.manager.num_free + 20)
    kv = group.cover(store)
    dropped = [weakref.ref(kv.k_segments[1]), weakref.ref(kv.v_segments[1])]
    del kv
    group.release([block for block in gone if block >> SEGMENT_BITS == 1])
    group.drop_free_memory()
    gc.collect()
    assert [ref() for ref in dropped] == [None, None], "a dropped segment's tensor is alive"
    assert len(store.kv.k_segments) == 1, "the segment in use went, too"
    group.release([block for block in (*kept, *gone) if block >> SEGMENT_BITS == 0])
    first = weakref.ref(store.kv.k_segments[0])
    del store
    group.drop_free_memory()
    gc.collect()
    assert first() is None and group.manager.num_blocks == 0 and group.block_bytes == 0


def test_pool_releases_all_its_groups():
    pool = BlockPool(SIZE)
    for window in (None, 8):
        group = pool.group(window)
        group.release(group.allocate(3))
    pool.release()
    assert [g.manager.num_blocks for g in pool.groups.values()] == [0, 0]


def test_dropped_segment_makes_room_for_another(group):
    """A hole in the middle is filled by the next segment; ids elsewhere stay what they are."""
    store = group.store_for(0, *states())
    rows = [group.allocate(group.manager.num_free + 4) for _ in range(3)]
    by_segment = {s: [b for row in rows for b in row if b >> SEGMENT_BITS == s] for s in range(3)}
    kv = group.cover(store)
    block = by_segment[2][0]
    kv.k_segments[2][block & SEGMENT_MASK] = 3.0
    group.release(by_segment[1])
    group.drop_free_memory()
    assert group.manager.segment_sizes[1] == 0
    group.allocate(group.manager.num_free + 4)
    kv = group.cover(store)
    assert len(kv.k_segments) == 3 and len(kv.k_segments[1]) == group.manager.segment_sizes[1] > 0
    assert (kv.k_segments[2][block & SEGMENT_MASK] == 3.0).all()


def test_the_first_segment_is_dropped_and_made_anew(group):
    """Who is computing meanwhile finds blocks as before: offsets count from the first segment as it was then."""
    store = group.store_for(0, *states())
    first = group.allocate(8)
    group.allocate(group.manager.num_free + 4)
    for change in (lambda: group.release(first), lambda: group.allocate(group.manager.num_free + 9)):
        before = group.cover(store)
        offsets = before.segment_offsets.clone()
        change()
        group.drop_free_memory()
        after = group.cover(store)
        assert len(after.k_segments[0]) != len(before.k_segments[0])
        assert torch.equal(before.segment_offsets, offsets) and not torch.equal(after.segment_offsets, offsets)
        assert after.k_segments[1] is before.k_segments[1]
    grown = group.cover(store)
    group.allocate(group.manager.num_free + 9)
    assert group.cover(store).segment_offsets is grown.segment_offsets


def test_freed_blocks_are_used_again(group):
    for _ in range(20):
        group.release(group.allocate(8))
    assert len(group.manager.segment_sizes) == 1 and group.peak_blocks == 8


@pytest.mark.parametrize(
    "change", [dict(dtype=torch.float64), dict(heads=HEADS + 1), dict(k_dim=K_DIM + 8), dict(v_dim=V_DIM + 2)]
)
def test_changed_layer_gets_a_new_store(group, change):
    """`model.half()` after a first call: the old tensors die with the caches that still hold them."""
    old = group.store_for(0, *states())
    group.allocate(2)
    group.cover(old)
    assert group.store_for(0, *states()) is old
    new = group.store_for(0, *states(**change))
    assert new is not old and new.matches(*states(**change)) and not new.matches(*states())
    ref = weakref.ref(old.kv.k_segments[0])
    assert group.block_bytes == new.block_bytes
    del old
    gc.collect()
    assert ref() is None


def test_copy_moves_whole_blocks_between_segments(group):
    store = group.store_for(0, *states())
    first = group.allocate(8)
    second = group.allocate(group.manager.num_free + 4)
    kv = group.cover(store)
    for tensor in tensors(kv):
        tensor.copy_(torch.randn(tensor.shape))
    ids = [*first, *second]
    content = {b: read(kv, b) for b in ids}
    pairs = [(ids[0], ids[-1]), (ids[1], ids[-2]), (ids[-3], ids[2]), (ids[0], ids[3])]
    BlockCopies(pairs).copy_in(kv, store.device)
    for source, target in pairs:
        for a, b in zip(read(kv, target), content[source], strict=True):
            assert torch.equal(a, b)
    for block in set(ids) - {target for _, target in pairs}:
        for a, b in zip(read(kv, block), content[block], strict=True):
            assert torch.equal(a, b)


def read(kv, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    segment, index = block >> SEGMENT_BITS, block & SEGMENT_MASK
    return kv.k_segments[segment][index].clone(), kv.v_segments[segment][index].clone()


def test_fill_spares_what_is_in_use(group):
    store = group.store_for(0, *states())
    held = group.allocate(3)
    kv = group.cover(store)
    for tensor in tensors(kv):
        tensor.zero_()
    group.fill(float("nan"))
    in_use = torch.tensor([b & SEGMENT_MASK for b in held])
    for tensor in tensors(kv):
        assert (tensor[in_use] == 0).all()
        assert tensor.isnan().flatten(1).all(1).sum() == group.manager.num_free


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_copies_of_a_pool_are_empty(again):
    pool = BlockPool(SIZE)
    pool.group(None).allocate(3)
    other = again(pool)
    assert other.block_size == SIZE and other.groups == {} and other.lock is not pool.lock


@pytest.mark.parametrize("growth, sizes", [(None, [100, 8]), (0.5, [100, 51])])
def test_how_much_more_than_needed(group, growth, sizes):
    if growth is not None:
        group.growth = growth
    group.ensure_free(100)
    group.allocate(100)
    group.allocate(1)
    assert group.manager.segment_sizes == sizes


@pytest.mark.parametrize("free, blocks", [(10_000, 50), (1000, 25), (0, 6)])
def test_slack_leaves_others_what_is_free(group, free, blocks, monkeypatch):
    """Half of 100 blocks of 10 bytes, but no more than a quarter of what is free, and a sixteenth in any case."""
    group.growth = 0.5
    group.stores[0] = SimpleNamespace(device=torch.device("cuda"), block_bytes=10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**6))
    assert group._slack(100) == blocks
