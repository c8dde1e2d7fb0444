"""Launches Triton kernels without analysing their arguments anew at every call.

Triton looks at each argument of each launch to find the compiled kernel that fits it: tens of microseconds of Python,
several times what a decode step's kernel takes. A caller that knows what its kernel was compiled for says so in a key.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Launcher:
    """The compiled variants of one kernel.

    Args:
        kernel: a `triton.jit` function.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        """Launches the kernel on the current device.

        Args:
            key: everything that Triton compiles for and that may differ between calls: the device, dtypes, constants,
                options, and of each argument that it specialises on, whether it is a multiple of 16 or 1.
            args: all of the kernel's arguments, in order, constants included.
            options: Triton's, for compiling.
        """
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, **options)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled
