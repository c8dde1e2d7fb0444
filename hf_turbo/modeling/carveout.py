"""How a captured step's kernels divide a multiprocessor's memory between L1 cache and shared memory: as is fastest.

A multiprocessor must run empty before it divides its memory anew, so kernels that ask for different divisions don't
overlap; loads on their way need cache; and tiles need shared memory. What the driver chooses kernel by kernel can cost
a tenth of a step, and so can any one choice for all: with as little shared memory as possible SmolLM2-135M's steps are
6 to 12% faster, an 8B model's 6% slower. So it is timed once, after the capture. No result depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Percents for shared memory that are tried, beside the driver's own choice.
PERCENTS = (0, 10)
#: Longer steps are left as they are: those of an 8B model were, of 1 to 8 rows, and each replay costs.
_LONGEST_SECONDS = 3e-3
#: Of more sequences attention may need several programs a multiprocessor as texts grow, for which there would be no
#: room; the time of a short text does not show it.
_MOST_SEQS = 2
#: What must be gained.
_MARGIN = 1.015
_SAMPLES = 3
#: Seconds that a sample is to last, in at most so many replays.
_SAMPLE_SECONDS, _MAX_REPLAYS = 1.5e-3, 4


def tune(graph: torch.cuda.CUDAGraph, is_repeatable: bool, num_seqs: int) -> int | None:
    """Makes a recorded graph ready for replays, with the division that is fastest.

    Args:
        graph: recorded with `keep_graph`.
        is_repeatable: it does the same each time, and may be replayed some ten times for each division.
        num_seqs: rows of the cache that it serves.

    Returns:
        The percent for shared memory, or None: what the driver chooses.
    """
    graph.instantiate()
    if not is_repeatable or num_seqs > _MOST_SEQS or (usual := _seconds(graph.replay)) > _LONGEST_SECONDS:
        return None
    try:
        driver = _driver()
        original = driver.CUgraph(graph.raw_cuda_graph())
        seconds = _tried(driver, original)
        # Once more, as clocks may have risen since: whatever was timed first would seem slow.
        best = fastest(seconds | {None: min(usual, _seconds(graph.replay))})
        if best is not None:
            _set(driver, original, best)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, AttributeError, TypeError, RuntimeError):  # other bindings, or another driver
        return None  # what is ready for replays was made before
    if best is not None:
        graph.instantiate()
    return best


def _tried(driver: Any, graph: Any) -> dict[int | None, float]:
    """Seconds of each division, on a copy: what a graph was asked for can't be taken back."""
    [copy] = _checked(driver.cuGraphClone(graph))
    try:
        return {percent: _seconds_with(driver, copy, percent) for percent in PERCENTS}
    finally:
        _checked(driver.cuGraphDestroy(copy))


def _seconds_with(driver: Any, graph: Any, percent: int) -> float:
    _set(driver, graph, percent)
    [instance] = _checked(driver.cuGraphInstantiate(graph, 0))
    stream = torch.cuda.current_stream().cuda_stream
    try:
        return _seconds(lambda: _checked(driver.cuGraphLaunch(instance, stream)))
    finally:
        _checked(driver.cuGraphExecDestroy(instance))


def fastest(seconds: Mapping[int | None, float]) -> int | None:
    """The division that takes the fewest seconds; None, which must be there, where none gains enough over it."""
    best = min(seconds, key=lambda percent: seconds[percent])
    return best if seconds[best] * _MARGIN < seconds[None] else None


def percents_of(graph: torch.cuda.CUDAGraph) -> set[int]:
    """What a graph's kernels ask for; 0 also where the driver chooses."""
    driver = _driver()
    attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    kernels = _kernels(driver, driver.CUgraph(graph.raw_cuda_graph()))
    return {_checked(driver.cuGraphKernelNodeGetAttribute(node, attribute))[0].sharedMemCarveout for node in kernels}


def _set(driver: Any, graph: Any, percent: int) -> None:
    """Sets what all of a graph's kernels ask for."""
    value = driver.CUkernelNodeAttrValue()
    value.sharedMemCarveout = percent
    attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    for node in _kernels(driver, graph):
        _checked(driver.cuGraphKernelNodeSetAttribute(node, attribute, value))


def _kernels(driver: Any, graph: Any) -> list[Any]:
    _, count = _checked(driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver.cuGraphGetNodes(graph, count))
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return [node for node in nodes if _checked(driver.cuGraphNodeGetType(node))[0] == kernel]


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the driver gave beside its error code."""
    error, *rest = answer
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver answered {error}")
    return tuple(rest)


def _driver() -> Any:
    from cuda.bindings import driver  # comes with torch for CUDA

    return driver


def _seconds(replay: Callable[[], object]) -> float:
    """Of a replay, the least of some samples."""
    replay()
    once = _sample(replay, 1)
    replays = max(1, min(_MAX_REPLAYS, int(_SAMPLE_SECONDS / max(once, 1e-6))))
    return min(once, *(_sample(replay, replays) for _ in range(_SAMPLES))) if once <= _LONGEST_SECONDS else once


def _sample(replay: Callable[[], object], replays: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / replays
