"""Attention within prompts that have nothing cached before them: the new keys are all the keys.

Torch's FlashAttention, or the flash-attn package, is faster there than reading the blocks back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from . import dispatch, reference
from .block_ids import MAX_SEGMENTS
from .metadata import AttentionMetadata, LayerKV

Pack = Callable[[torch.Tensor], torch.Tensor]

_BLOCK_SIZE = 64


def attend_prompt(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pack: Pack,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None,
    sinks: torch.Tensor | None,
    choice: str,
) -> torch.Tensor | None:
    """Causal attention of left-padded prompts over themselves.

    Args:
        q: `[batch, num_heads, q_len, k_head_dim]`; k, v: the same with the key-value heads.
        pack: takes `[batch, heads, q_len, dim]` to `[total_q, heads, dim]`, padding left out.
        choice: `TurboConfig.prompt_attention`.

    Returns:
        `[batch, q_len, num_heads, v_head_dim]`, or `[total_q, num_heads, v_head_dim]` where padding was left
        out, or None: nothing here serves this layer, read the blocks.
    """
    window = metadata.sliding_window
    if q.device.type == "cpu":
        return reference.prompt_attention(q, k, v, metadata.q_lens_cpu, softmax_scale, window, logit_softcap, sinks)
    if choice == "triton" or not _flash_serves(q, k, v, sinks):
        return None
    if choice == "flash_attn":
        return _flash_attn(pack(q), pack(k), pack(v), metadata, softmax_scale, logit_softcap)
    if logit_softcap is not None:
        return None
    q_len = q.shape[2]
    within = window is None or window >= q_len
    if within and all(n == q_len for n in metadata.q_lens_cpu):
        out = F.scaled_dot_product_attention(
            q, k, v, scale=softmax_scale, is_causal=q_len > 1, enable_gqa=q.shape[1] > k.shape[1]
        )
        return out.transpose(1, 2)
    return _torch_varlen(pack(q), pack(k), pack(v), metadata, softmax_scale, None if within else window)


def attend_in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same where `attend_prompt` serves nothing and the cache does not keep what a prompt sees of itself.

    Args:
        q, k, v: `[total_q, heads, head_dim]`, packed; nothing is cached before them.

    Returns:
        `[total_q, num_heads, v_head_dim]`.
    """
    columns = -(-metadata.max_seqlen_q // _BLOCK_SIZE)
    shape = (metadata.num_seqs * columns, k.shape[1], _BLOCK_SIZE)
    blocks = [x.new_empty(*shape, x.shape[2]) for x in (k, v)]
    kv = LayerKV((blocks[0],), (blocks[1],), torch.zeros(2, MAX_SEGMENTS, dtype=torch.int64, device=q.device))
    ids = torch.arange(shape[0], dtype=torch.int32, device=q.device).view(-1, columns)
    rows = [list(range(i * columns, (i + 1) * columns)) for i in range(metadata.num_seqs)]
    alone = replace(
        metadata, block_tables=ids, block_ids_cpu=rows, first_blocks_cpu=[0] * len(rows), code_tables=None,
        coded_rows=None, _elsewhere={},
    )  # fmt: skip
    dispatch.store_kv(k, v, kv, alone)
    return dispatch.paged_attention(q, kv, alone, softmax_scale, logit_softcap, sinks)


def _flash_serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    return (
        sinks is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


@cache
def _varlen_arguments() -> tuple[Callable[..., Any], frozenset[str]] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, scale: float, window: int | None
) -> torch.Tensor | None:
    """Torch's FlashAttention over packed `[total_q, heads, head_dim]`; None where this torch can't."""
    found = _varlen_arguments()
    if found is None or "window_size" not in found[1] or "scale" not in found[1]:
        return None
    function, names = found
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" not in names:
            return None
        options = {"enable_gqa": True}
    else:
        options = {}
    lens, longest = metadata.cu_seqlens_q, metadata.max_seqlen_q
    span = (-1 if window is None else window - 1, 0)
    return function(q, k, v, lens, lens, longest, longest, scale=scale, window_size=span, **options)


def _flash_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, scale: float, softcap: float | None
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    lens, longest = metadata.cu_seqlens_q, metadata.max_seqlen_q
    span = (-1 if metadata.sliding_window is None else metadata.sliding_window - 1, 0)
    options = {"softmax_scale": scale, "causal": True, "window_size": span, "softcap": softcap or 0.0}
    return flash_attn_varlen_func(q, k, v, lens, lens, longest, longest, **options)
