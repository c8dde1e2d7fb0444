"""Which blocks are free and how many owners the others have. Plain Python: no torch."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

from ..ops.block_ids import MAX_SEGMENTS, SEGMENT_BITS, SEGMENT_MASK

_FREE = b"\x01"

#: Goes on with every block that loses its last owner, over all managers, so that the oldest of several can be told.
_clock = itertools.count()


class BlockManager:
    """Free blocks and reference counts over a few segments that are added one by one.

    A block id is `segment << SEGMENT_BITS | index`. A block is free, used (it has owners) or cached: it was to be kept
    when it lost its last owner. At every step `num_free + num_used + num_cached == num_blocks`.
    Not thread-safe: its owner holds a lock.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []  # per segment, 1 where a block is free: `find` scans it at C speed
        self._owners: list[array[int]] = []
        self._kept: set[int] = set()
        self._cached: dict[int, int] = {}  # block -> when its last owner went, the oldest first
        self._cursor = (0, 0)  # where the next run is looked for, so that rows get room to grow behind them
        self.num_free = 0
        self.num_blocks = 0
        self.num_shared = 0
        self.version = 0  # changes with the segments

    @property
    def num_used(self) -> int:
        """Blocks with owners."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks without owners that are kept."""
        return len(self._cached)

    @property
    def oldest_cached(self) -> tuple[int, int] | None:
        """When the cached block that has been without owners for longest lost its last one, and that block."""
        return next(((when, block) for block, when in self._cached.items()), None)

    @property
    def segment_sizes(self) -> list[int]:
        return [len(flags) for flags in self._free]

    def free_flags(self) -> list[bytearray]:
        """Per segment, a byte a block: 1 where it is free. Not a copy."""
        return self._free

    def add_segment(self, num_blocks: int) -> None:
        """Adds `num_blocks` free blocks as one more segment, or in the place of one that was dropped."""
        if not 0 < num_blocks <= SEGMENT_MASK + 1:
            raise ValueError(f"a segment holds 1 to {SEGMENT_MASK + 1} blocks, not {num_blocks}")
        place = next((i for i, flags in enumerate(self._free) if not flags), len(self._free))
        if place == MAX_SEGMENTS:
            raise RuntimeError(f"the pool has its {MAX_SEGMENTS} segments already; call hf_turbo.release(model)")
        self._free[place : place + 1] = [bytearray(_FREE) * num_blocks]
        self._owners[place : place + 1] = [array("i", bytes(4 * num_blocks))]
        self.num_free += num_blocks
        self.num_blocks += num_blocks
        self.version += 1

    def drop_free_segments(self, spared: Sequence[int] = ()) -> None:
        """Empties the segments of which all blocks are free; ids in the others stay what they are.

        Args:
            spared: sizes of the first segments at some time: those that are still the same stay.
        """
        for segment, flags in enumerate(self._free):
            is_spared = segment < len(spared) and len(flags) == spared[segment]
            if flags and not is_spared and flags.count(_FREE) == len(flags):
                self.num_free -= len(flags)
                self.num_blocks -= len(flags)
                self._free[segment], self._owners[segment] = bytearray(), array("i")
        while self._free and not self._free[-1]:
            self._free.pop()
            self._owners.pop()
        self._cursor = (0, 0)
        self.version += 1

    def allocate(self, count: int, after: int | None = None, reserve: int = 0) -> list[int]:
        """Takes `count` free blocks, each with one owner.

        Args:
            count: how many; at most `num_free`.
            after: an id the first block should follow: a sequence that grows stays in a row, which lets
                the CPU path read it in place.
            reserve: look for a run of at least this many, so that there is room to grow; not a promise.

        Raises:
            ValueError: fewer than `count` blocks are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        ids: list[int] = []
        if after is not None:
            segment, index = after >> SEGMENT_BITS, (after & SEGMENT_MASK) + 1
            flags = self._free[segment]
            end = index
            while end < len(flags) and end - index < count and flags[end]:
                end += 1
            self._take(segment, index, end - index, ids)
        for length in (max(reserve, count - len(ids)), count - len(ids)):
            if len(ids) < count and (place := self._find_run(length)) is not None:
                segment, index = place
                self._cursor = (segment, index + length)
                self._take(segment, index, count - len(ids), ids)
        for segment, flags in enumerate(self._free):  # no run is long enough: piece by piece
            index = 0
            while len(ids) < count and (index := flags.find(_FREE, index)) >= 0:
                self._take(segment, index, 1, ids)
        return ids

    def retain(self, ids: Iterable[int]) -> None:
        """Adds an owner to each block. The blocks must be in use or cached."""
        for block in ids:
            owners = self._owners[block >> SEGMENT_BITS]
            index = block & SEGMENT_MASK
            if owners[index] < 1 and self._cached.pop(block, None) is None:
                raise ValueError(f"block {block} is free: it can't be shared")
            self.num_shared += owners[index] == 1
            owners[index] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Takes an owner from each block. A block without owners is free, or cached where it is kept.

        Of those that become cached the last counts as the oldest: a block is of no use without those before it.
        """
        for block in reversed(ids):
            segment, index = block >> SEGMENT_BITS, block & SEGMENT_MASK
            owners = self._owners[segment]
            if owners[index] < 1:
                raise ValueError(f"block {block} is free already")
            owners[index] -= 1
            self.num_shared -= owners[index] == 1
            if owners[index] == 0 and block in self._kept:
                self._cached[block] = next(_clock)
            elif owners[index] == 0:
                self._set_free(block)

    def keep(self, block: int) -> None:
        """From now on the block is cached rather than free when it loses its last owner, and is written to no more.

        Raises:
            ValueError: nobody owns it.
        """
        if self.owners(block) < 1:
            raise ValueError(f"block {block} has no owner: it can't be kept")
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """Keeps a block no longer: a cached one is free."""
        self._kept.discard(block)
        if self._cached.pop(block, None) is not None:
            self._set_free(block)

    def owners(self, block: int) -> int:
        """How many owners a block has; 0 when it is free or cached."""
        return self._owners[block >> SEGMENT_BITS][block & SEGMENT_MASK]

    def is_shared(self, block: int) -> bool:
        """Whether others than one owner count on what a block holds: it must be copied before it is written to."""
        return self.owners(block) > 1 or block in self._kept

    def is_kept(self, block: int) -> bool:
        """Whether the block stays when it loses its last owner."""
        return block in self._kept

    def _set_free(self, block: int) -> None:
        self._free[block >> SEGMENT_BITS][block & SEGMENT_MASK] = 1
        self.num_free += 1

    def _find_run(self, length: int) -> tuple[int, int] | None:
        """The first run of `length` free blocks from the cursor on, then from the start."""
        pattern = _FREE * length
        first, offset = self._cursor
        places = [(first, offset), *((s, 0) for s in range(first + 1, len(self._free)))]
        places += [(s, 0) for s in range(first + 1)]
        for segment, start in places:
            if segment < len(self._free) and (index := self._free[segment].find(pattern, start)) >= 0:
                return segment, index
        return None

    def _take(self, segment: int, index: int, count: int, ids: list[int]) -> None:
        if count <= 0:
            return
        self._free[segment][index : index + count] = bytes(count)
        self._owners[segment][index : index + count] = array("i", [1]) * count
        self.num_free -= count
        first = segment << SEGMENT_BITS | index
        ids.extend(range(first, first + count))
