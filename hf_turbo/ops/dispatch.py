"""Which implementation of an op runs: the torch reference on a CPU, Triton on a GPU that has it."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch

from . import reference
from .metadata import AttentionMetadata, LayerKV
from .reference import gather_kv

__all__ = ["gather_kv", "paged_attention", "store_kv", "uses_triton"]


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Whether the Triton kernels serve tensors on this device."""
    return device.type == "cuda" and _has_triton()


@cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from . import paged_attention, store_kv  # triton is imported when a kernel is first needed, not before

    return store_kv, paged_attention


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv: LayerKV, metadata: AttentionMetadata, keep_last: int | None = None
) -> None:
    """Writes new keys and values into their blocks; see `reference.store_kv`."""
    module = _kernels()[0] if uses_triton(k.device) else reference
    module.store_kv(k, v, kv, metadata, keep_last)


def paged_attention(
    q: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new queries over a filled cache; see `reference.paged_attention`."""
    module = _kernels()[1] if uses_triton(q.device) else reference
    return module.paged_attention(q, kv, metadata, softmax_scale, logit_softcap, sinks)
