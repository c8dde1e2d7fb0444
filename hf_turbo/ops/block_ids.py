"""How a block id is written: the one fact that the block manager and the kernels share. No torch."""

from __future__ import annotations

from collections.abc import Sequence

#: A block id is `segment << SEGMENT_BITS | index`: segments are separate allocations of different
#: sizes, so a pool grows by adding one and nothing in it moves. 256 segments of 8M blocks fit int32.
SEGMENT_BITS = 23
SEGMENT_MASK = (1 << SEGMENT_BITS) - 1
MAX_SEGMENTS = 256


def block_runs(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits block ids into `(segment, first index, count)` runs of neighbours."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, len(block_ids) + 1):
        if i == len(block_ids) or block_ids[i] != block_ids[i - 1] + 1:
            first = block_ids[start]
            runs.append((first >> SEGMENT_BITS, first & SEGMENT_MASK, i - start))
            start = i
    return runs
