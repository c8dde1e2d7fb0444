"""Small things that go from the host to a device."""

from __future__ import annotations

from typing import Any

import torch


def to_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the host's numbers on a device, without waiting for what the device still has to do.

    `torch.tensor(numbers, device=device)` waits. The driver takes its copy of ordinary memory before the call returns,
    so the host's tensor may go at once.
    """
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
