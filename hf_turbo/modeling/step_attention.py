"""Attention in a captured decode step: rotary embedding and cache write in one kernel, then the blocks are read."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.step_cache import StepLayer, StepUnsuited
from ..ops import dispatch
from ..ops.deferred import DeferredMode, identity
from ..ops.metadata import LayerKV, QuantizedKV
from .patterns import Rotary, match_rms_norm, match_rotary

_NOTHING_FUSED: dict[str, Any] = {"cos": None, "sin": None, "q_norm": None, "k_norm": None, "rotary_dim": 0}


def attend_step(
    layer: StepLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Stores `key` and `value` `[rows, num_kv_heads, 1, head_dim]` and attends with `query`.

    Returns:
        `[rows, 1, num_heads, v_head_dim]`.
    """
    if query.shape[2] != 1 or key.shape[2] != 1:
        raise StepUnsuited("a decode step has one token a row")
    with DeferredMode.set_aside() as mode:
        metadata = layer.group.plan.metadata
        q_source, k_source, options = _sources(query, key) if mode.rules else (query, key, dict(_NOTHING_FUSED))
        q, k, v = (_heads(mode, x, like) for x, like in ((q_source, query), (k_source, key), (value, value)))
        in_float32 = options.pop("in_float32", False)
        cos, sin = (_angles(mode, options.pop(name), in_float32) for name in ("cos", "sin"))
        kv = layer.kv(key, value)
        wide = kv.wide if isinstance(kv, QuantizedKV) else kv  # new tokens come to wide blocks
        q = dispatch.rotary_store_kv(q, k, v, cos, sin, wide, metadata, **options)
        seen: LayerKV | QuantizedKV = wide
        if isinstance(kv, QuantizedKV) and metadata.code_tables is not None:
            layer.make_codes(kv)
            seen = kv
        out = dispatch.paged_attention(q, seen, metadata, scale, softcap, sinks)
        layer.num_attended += 1
        return out[:, None]


def _sources(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """What the rotary kernel takes in query's and key's place, and its options."""
    turned = match_rotary(query), match_rotary(key)
    options = dict(_NOTHING_FUSED)
    if turned[0] is not None and turned[1] is not None and _same_angles(*turned, query.shape[0]):  # type: ignore[arg-type]
        first = turned[0]
        options |= {"cos": first.cos, "sin": first.sin}
        options |= {name: getattr(first, name) for name in ("rotary_dim", "interleaved", "in_float32")}
        query, key = first.source, turned[1].source
    elif turned[0] is not None or turned[1] is not None:
        return query, key, options
    found = {"q_norm": match_rms_norm(query), "k_norm": match_rms_norm(key)}
    sources = []
    for x, (name, normed) in zip((query, key), found.items(), strict=True):
        if normed is not None and normed[0].shape[-1] == x.shape[-1]:
            options[name] = normed[1]
            x = normed[0]
        sources.append(x)
    return sources[0], sources[1], options


def _same_angles(a: Rotary, b: Rotary, rows: int) -> bool:
    same = (a.rotary_dim, a.interleaved, a.in_float32) == (b.rotary_dim, b.interleaved, b.in_float32)
    one_a_row = a.cos.numel() in (a.rotary_dim, rows * a.rotary_dim) and a.cos.shape == a.sin.shape
    return same and one_a_row and identity(a.cos) == identity(b.cos) and identity(a.sin) == identity(b.sin)


def _heads(mode: DeferredMode, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, dim]` of what is, in some order of its dimensions of size 1, `[rows, heads, 1, dim]`."""
    numbers = mode.tensor(x)
    rows, heads, _, dim = like.shape
    return numbers.reshape(rows, heads, dim) if numbers.shape != like.shape else numbers[:, :, 0]


def _angles(mode: DeferredMode, x: Any, in_float32: bool) -> torch.Tensor | None:
    """`[rows or 1, rotary_dim]`."""
    if x is None:
        return None
    angles = mode.tensor(x).reshape(-1, x.shape[-1])
    return angles.float() if in_float32 else angles
