"""Compiles kernels into Triton's cache on disk, in several processes that need no device, before they are timed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any

import torch


def _compile(call: Callable[[], Any], capability: int) -> None:
    """Runs a call on tensors without memory; its launches only compile."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch(self, *args, grid=grid, warmup=True, **kwargs)

    driver.set_active(Driver())
    JITFunction.run = compile_only
    try:
        with torch.device("meta"):
            call()
    except Exception as error:  # the timing stage meets it again and reports it
        print(f"{call}: {error!r}"[:300])
    finally:
        JITFunction.run = launch


def compile_all(calls: Sequence[Callable[[], Any]], capability: int, budget: float) -> None:
    """Compiles what the calls launch, as far as that goes in `budget` seconds.

    Call it before this process uses the device: it forks. The calls make their own tensors and must be picklable.
    """
    start = time.monotonic()
    processes = max(1, min(16, len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        wait([pool.submit(_compile, call, capability) for call in calls], timeout=budget)
        pool.shutdown(cancel_futures=True)
    print(f"{len(calls)} kernels by {processes} processes in {time.monotonic() - start:.0f} s")
