"""The small ops of a decoder layer in plain torch: the oracle of the kernels, and the path that runs on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import reference
from .metadata import AttentionMetadata, LayerKV
from .norm_spec import RMSNorm


def rms_norm(
    x: torch.Tensor,
    norm: RMSNorm,
    *,
    residual: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `norm.rms_norm`."""
    total = x if residual is None else residual + x
    result = normalize(total, norm)
    if perm is not None:
        result = result.index_select(1, perm)
    if out is not None:
        result = out.copy_(result)
    return result if residual is None else (result, total)


def normalize(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """The RMSNorm of the last dimension, in x's dtype."""
    wide = x.float()
    n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is None:
        return n.to(x.dtype)
    weight = norm.weight.float()
    if norm.round_first:
        n = n.to(x.dtype).float()
    elif norm.plus_one:
        weight = 1 + weight
    return (n * weight).to(x.dtype)


def rotary_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv: LayerKV,
    metadata: AttentionMetadata,
    *,
    rotary_dim: int,
    interleaved: bool = False,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    keep_last: int | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `rotary.rotary_store_kv`; where tokens are stored is read from the host's side of the metadata."""
    q = q if q_norm is None else normalize(q, q_norm)
    k = k if k_norm is None else normalize(k, k_norm)
    if cos is not None and sin is not None:
        q = _rotate(q, cos[:, None], sin[:, None], rotary_dim, interleaved)
        k = _rotate(k, cos[:, None], sin[:, None], rotary_dim, interleaved)
    reference.store_kv(k, v, kv, metadata, keep_last)
    if q_out is None:
        return q.clone()
    return q_out.copy_(q)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, interleaved: bool) -> torch.Tensor:
    """Rotates the first `rotary_dim` elements of the last dimension."""
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        partner = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        partner = torch.cat((-second, first), -1)
    rotated = (rotated * cos + partner * sin).to(x.dtype)
    return torch.cat((rotated, passed), -1)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, rotary_dim: int, interleaved: bool = False
) -> torch.Tensor:
    """See `rotate.rotate`."""
    return _rotate(x, cos[:, :, None], sin[:, :, None], rotary_dim, interleaved)


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `activation.gated`."""
    if kind == "silu":
        activated = F.silu(gate)
    elif kind in ("gelu", "gelu_tanh"):
        activated = F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    else:
        raise ValueError(f"kind must be silu, gelu_tanh or gelu, got {kind!r}")
    return torch.mul(activated, up, out=out)


def rotary_angles(
    frequencies: torch.Tensor, positions: torch.Tensor, *, join: str, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `angles.rotary_angles`."""
    angles = positions.float()[:, :, None] * frequencies[:, None]
    if join == "halves":
        angles = torch.cat((angles, angles), -1)
    elif join == "neighbours":
        angles = angles.repeat_interleave(2, -1)
    elif join != "alone":
        raise ValueError(f"join must be halves, neighbours or alone, got {join!r}")
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See `embedding.embedding`."""
    return F.embedding(ids, weight)
