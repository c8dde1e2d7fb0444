"""The block manager against a model of it: any order of calls keeps its books right."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hf_turbo.cache.block_manager import BlockManager
from hf_turbo.ops.block_ids import MAX_SEGMENTS, SEGMENT_BITS, SEGMENT_MASK

SIZES = st.integers(1, 7)


def block_id(segment: int, index: int) -> int:
    return segment << SEGMENT_BITS | index


class BlockManagerMachine(RuleBasedStateMachine):
    """`owners`: how many owners each block in use has; `segments`: their sizes, 0 where dropped.

    `kept`: blocks that are cached when nobody owns them; `cached`: those, the one that has been for longest first.
    """

    def __init__(self):
        super().__init__()
        self.manager = BlockManager()
        self.owners: dict[int, int] = {}
        self.segments: list[int] = []
        self.kept: set[int] = set()
        self.cached: list[int] = []

    def all_blocks(self) -> list[int]:
        return [block_id(s, i) for s, size in enumerate(self.segments) for i in range(size)]

    def free_blocks(self) -> set[int]:
        return set(self.all_blocks()) - set(self.owners) - set(self.cached)

    def longest_run(self) -> int:
        longest = run = 0
        free, last = self.free_blocks(), None
        for block in sorted(free):
            run = run + 1 if last is not None and block == last + 1 else 1
            longest, last = max(longest, run), block
        return longest

    def held(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.owners)))

    @rule(size=SIZES)
    def add_segment(self, size):
        self.manager.add_segment(size)
        place = self.segments.index(0) if 0 in self.segments else len(self.segments)
        self.segments[place : place + 1] = [size]

    @rule(data=st.data(), reserve=st.integers(0, 12), follow=st.booleans())
    def allocate(self, data, reserve, follow):
        free = self.free_blocks()
        count = data.draw(st.integers(0, len(free)))
        after = self.held(data) if follow and self.owners else None
        longest = self.longest_run()
        ids = self.manager.allocate(count, after, reserve)
        assert len(ids) == len(set(ids)) == count
        assert free.issuperset(ids), "a block in use was handed out"
        if after is not None:
            behind = 0
            while behind < count and after + 1 + behind in free:
                behind += 1
            room = list(range(after + 1, after + 1 + behind))
            assert ids[:behind] == room, "the room behind `after` was not used"
        elif 0 < count <= longest:
            assert ids == list(range(ids[0], ids[0] + count)), "not in a row, though there is a run"
        self.owners |= dict.fromkeys(ids, 1)

    @rule(extra=st.integers(1, 3))
    def allocate_too_many(self, extra):
        with pytest.raises(ValueError, match="free"):
            self.manager.allocate(len(self.free_blocks()) + extra)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), times=st.integers(1, 3))
    def retain(self, data, times):
        block = self.held(data)
        self.manager.retain([block] * times)
        self.owners[block] += times

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True))
        self.manager.release(ids)
        for block in ids[::-1]:
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self.cached += [block] if block in self.kept else []

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def keep(self, data):
        block = self.held(data)
        self.manager.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def own_a_cached_block(self, data):
        block = data.draw(st.sampled_from(self.cached))
        with pytest.raises(ValueError, match="free"):
            self.manager.release([block])
        with pytest.raises(ValueError, match="no owner"):
            self.manager.keep(block)
        self.manager.retain([block])
        self.cached.remove(block)
        self.owners[block] = 1

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data):
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.manager.forget(block)
        self.kept.remove(block)
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: self.free_blocks())
    @rule(data=st.data())
    def use_a_free_block(self, data):
        block = data.draw(st.sampled_from(sorted(self.free_blocks())))
        with pytest.raises(ValueError, match="free"):
            self.manager.release([block])
        with pytest.raises(ValueError, match="free"):
            self.manager.retain([block])

    @rule()
    def drop_free_segments(self):
        self.manager.drop_free_segments()
        for segment in range(len(self.segments)):
            if not any(block >> SEGMENT_BITS == segment for block in {*self.owners, *self.cached}):
                self.segments[segment] = 0
        while self.segments and not self.segments[-1]:
            self.segments.pop()

    @invariant()
    def books_are_right(self):
        manager = self.manager
        assert manager.num_free + manager.num_used + manager.num_cached == manager.num_blocks == sum(self.segments)
        assert manager.num_cached == len(self.cached)
        oldest = manager.oldest_cached
        assert (None if oldest is None else oldest[1]) == (self.cached[0] if self.cached else None)
        assert manager.num_used == len(self.owners)
        assert manager.num_shared == sum(n > 1 for n in self.owners.values())
        assert manager.segment_sizes == self.segments
        for block in self.all_blocks():
            owners = self.owners.get(block, 0)
            assert manager.owners(block) == owners
            is_free = owners == 0 and block not in self.cached
            assert manager.free_flags()[block >> SEGMENT_BITS][block & SEGMENT_MASK] == is_free
            assert manager.is_shared(block) == (owners > 1 or block in self.kept)
            assert manager.is_kept(block) == (block in self.kept)


BlockManagerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBlockManager = BlockManagerMachine.TestCase


def manager_of(*sizes: int) -> BlockManager:
    manager = BlockManager()
    for size in sizes:
        manager.add_segment(size)
    return manager


def test_rows_get_room_to_grow():
    """Rows that reserve are spread out, so each can go on behind itself."""
    manager = manager_of(16)
    first, second = manager.allocate(2, reserve=8), manager.allocate(2, reserve=8)
    assert manager.allocate(6, after=first[-1]) == list(range(first[-1] + 1, first[-1] + 7))
    assert manager.allocate(6, after=second[-1]) == list(range(second[-1] + 1, second[-1] + 7))


def test_a_reservation_is_not_a_promise():
    manager = manager_of(4)
    assert len(manager.allocate(4, reserve=1000)) == 4


def test_blocks_of_several_segments_serve_one_request():
    manager = manager_of(2, 3)
    everything = [block_id(0, 0), block_id(0, 1), *(block_id(1, i) for i in range(3))]
    assert sorted(manager.allocate(5)) == everything


def test_failed_allocation_takes_nothing():
    manager = manager_of(3)
    manager.allocate(2)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 are free"):
        manager.allocate(2)
    assert manager.num_free == 1


@pytest.mark.parametrize("size", [0, -1, SEGMENT_MASK + 2])
def test_illegal_segment_sizes(size):
    with pytest.raises(ValueError, match="segment"):
        BlockManager().add_segment(size)


def test_number_of_segments_is_bounded():
    manager = manager_of(*[1] * MAX_SEGMENTS)
    with pytest.raises(RuntimeError, match="release"):
        manager.add_segment(1)
    manager.drop_free_segments()
    manager.add_segment(1)
    assert manager.segment_sizes == [1]
