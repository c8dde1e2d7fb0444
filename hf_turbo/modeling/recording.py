"""Recording CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def record(
    function: Callable[[], Result],
    device: torch.device,
    pool: Any,
    stream: torch.cuda.Stream,
    keep_graph: bool = False,
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """What a function launches on a device, as a graph, and what it returns: tensors that each replay fills anew.

    Everything that it needs must have been compiled.

    Args:
        pool: of graphs that may share memory.
        stream: to record on.
        keep_graph: leave it to the caller to instantiate the graph, who may change it.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # what it would free might wait for the device, which a capture can't
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph(keep_graph)
            with _own_random_state(device):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
    finally:
        if was_enabled:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """Whatever begins in this block takes a copy of the random generator's state for its own.

    A capture marks the state that it finds; other threads could not draw numbers from it until the end.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)
