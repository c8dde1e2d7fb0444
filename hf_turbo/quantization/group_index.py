"""The `g_idx` of a weight: which group each input channel belongs to, and what it means for the order of columns."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .spec import LinearSpec
from .weight import GroupedWeight


def settle_g_idx(g_idx: Tensor | None, spec: LinearSpec) -> LinearSpec:
    """The spec, told whether this `g_idx` says nothing: all -1, or all 0 where there are several groups."""
    unset = None
    if g_idx is not None and spec.num_groups > 1 and bool((g_idx == 0).all()):
        unset = 0
    elif g_idx is not None and bool((g_idx == -1).all()):
        unset = -1
    return dataclasses.replace(spec, unset_g_idx=unset)


def perm_of(g_idx: Tensor | None, spec: LinearSpec) -> Tensor | None:
    """The input channel of each sorted column, int32 `[K]`; None where the groups lie in order.

    Raises:
        ValueError: a group that does not exist, or groups of other sizes than the spec's.
    """
    if g_idx is None or spec.unset_g_idx is not None:
        return None
    trivial = _trivial(spec, g_idx)
    if torch.equal(g_idx, trivial):
        return None
    if bool((g_idx < 0).any()) or bool((g_idx >= spec.num_groups).any()):
        raise ValueError(f"g_idx must be from 0 to {spec.num_groups - 1}, got {int(g_idx.min())} to {int(g_idx.max())}")
    ordered, perm = torch.sort(g_idx, stable=True)
    if not torch.equal(ordered, trivial):
        sizes = torch.bincount(g_idx.long(), minlength=spec.num_groups).tolist()
        raise ValueError(f"g_idx must give {spec.group_size} channels to each group (the last may be short): {sizes}")
    return perm.int()


def g_idx_of(weight: GroupedWeight, spec: LinearSpec, name: str) -> dict[str, Tensor]:
    """The `g_idx` that the spec's file holds under `name`, none where it holds none.

    Raises:
        ValueError: the weight is permuted, and the file has nothing to say so with.
    """
    if name not in spec.tensors or spec.unset_g_idx is not None:
        if weight.perm is not None:
            raise ValueError("a weight with permuted groups cannot be stored: the checkpoint has no g_idx for it")
        if name not in spec.tensors:
            return {}
    g_idx = _trivial(spec, torch.empty(0, dtype=spec.tensors[name].dtype, device=weight.codes.device))
    if spec.unset_g_idx is not None:
        g_idx.fill_(spec.unset_g_idx)
    elif weight.perm is not None:
        g_idx = torch.empty_like(g_idx).index_copy_(0, weight.perm.long(), g_idx)
    return {name: g_idx}


def sort_columns(codes: Tensor, perm: Tensor | None) -> Tensor:
    """Codes `[N, K]` with their columns sorted by group."""
    return codes if perm is None else codes.index_select(1, perm)


def unsort_columns(weight: GroupedWeight) -> Tensor:
    """Codes `[N, K]` with their columns in the input channels' order."""
    return weight.codes if weight.perm is None else weight.codes.index_select(1, torch.argsort(weight.perm))


def _trivial(spec: LinearSpec, like: Tensor) -> Tensor:
    return torch.arange(spec.in_features, dtype=like.dtype, device=like.device) // spec.group_size
