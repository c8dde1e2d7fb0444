"""Random paged-attention cases, and what they should give in float64. Independent of the code under test."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_turbo.ops.block_ids import SEGMENT_BITS
from hf_turbo.ops.metadata import AttentionMetadata, LayerKV

#: What entries of a block table hold that must not be read: as an address, far outside every pool.
GARBAGE_BLOCK = (1 << 31) - 1


@dataclass
class PagedCase:
    """Queries over a paged cache; its keys and values dense, `[seq_len, num_kv_heads, dim]` a sequence."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    kv: LayerKV
    metadata: AttentionMetadata
    softmax_scale: float
    logit_softcap: float | None
    sinks: torch.Tensor | None

    @property
    def arguments(self) -> dict:
        return {
            "softmax_scale": self.softmax_scale,
            "logit_softcap": self.logit_softcap,
            "sinks": self.sinks,
        }

    def slot(self, seq: int, position: int) -> tuple[int, int, int]:
        """The segment, block and row of a position."""
        block_size = self.kv.block_size
        block_id = int(self.metadata.block_tables[seq, position // block_size])
        return block_id >> SEGMENT_BITS, block_id & ((1 << SEGMENT_BITS) - 1), position % block_size


def make_pool(num_blocks, num_kv_heads, block_size, dim, dtype, device, layout):
    """One segment of NaN, `[num_blocks, num_kv_heads, block_size, dim]`, laid out as `layout` says."""
    nan = {"fill_value": math.nan, "dtype": dtype, "device": device}
    if layout == "hnd":
        return torch.full((num_blocks, num_kv_heads, block_size, dim), **nan)
    if layout == "nhd":
        return torch.full((num_blocks, block_size, num_kv_heads, dim), **nan).transpose(1, 2)
    if layout == "gaps":  # a larger row, block and head than is used
        return torch.full((num_blocks, num_kv_heads + 1, block_size, dim + 16), **nan)[:, 1:, :, :dim]
    raise ValueError(layout)


def make_case(
    q_lens,
    seq_lens,
    *,
    num_heads=4,
    num_kv_heads=2,
    k_dim=32,
    v_dim=None,
    block_size=16,
    dtype=torch.float32,
    device="cpu",
    num_segments=1,
    layout="hnd",
    sliding_window=None,
    logit_softcap=None,
    sinks=False,
    strided_q=False,
    max_seqlen_k=None,
    fill=True,
    placement="scattered",
    seed=0,
) -> PagedCase:
    """A random case: permuted blocks over `num_segments` pools, NaN in every slot that is not attended to.

    `fill=False` leaves all slots NaN (for a test that stores the keys itself).
    """
    v_dim = v_dim or k_dim
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    keys = [random(n, num_kv_heads, k_dim) for n in seq_lens]
    values = [random(n, num_kv_heads, v_dim) for n in seq_lens]
    counts = [math.ceil(n / block_size) for n in seq_lens]
    per_segment = math.ceil((sum(counts) + 3) / num_segments)
    k_segments = tuple(
        make_pool(per_segment + s, num_kv_heads, block_size, k_dim, dtype, device, layout) for s in range(num_segments)
    )
    v_segments = tuple(
        make_pool(per_segment + s, num_kv_heads, block_size, v_dim, dtype, device, layout) for s in range(num_segments)
    )
    kv = LayerKV.of(k_segments, v_segments)

    ids = [(s << SEGMENT_BITS) | i for s in range(num_segments) for i in range(per_segment)]
    if placement == "scattered":
        ids = [ids[i] for i in torch.randperm(len(ids), generator=generator).tolist()]
    else:
        ids.reverse()  # they are taken from the end
    table = torch.full((len(seq_lens), max(counts, default=0) + 2), GARBAGE_BLOCK, dtype=torch.int32)
    first_blocks = [
        0 if sliding_window is None else max(n - q_len - sliding_window + 1, 0) // block_size
        for q_len, n in zip(q_lens, seq_lens, strict=True)
    ]
    for b in reversed(range(len(seq_lens))) if placement == "last row first" else range(len(seq_lens)):
        for block in range(first_blocks[b], counts[b]):
            table[b, block] = ids.pop()
    total_q = sum(q_lens)
    metadata = AttentionMetadata(
        block_tables=table.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *q_lens], device=device).cumsum(0).to(torch.int32),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max_seqlen_k or max(seq_lens),
        sliding_window=sliding_window,
        seq_lens_cpu=list(seq_lens),
        q_lens_cpu=list(q_lens),
        block_ids_cpu=[table[b, first_blocks[b] : counts[b]].tolist() for b in range(len(seq_lens))],
        first_blocks_cpu=first_blocks,
    )
    q = random(total_q, num_heads, k_dim)
    if strided_q:  # as a slice of a fused projection
        q = torch.cat([random(total_q, 3, k_dim), q, random(total_q, 5, k_dim)], 1)[:, 3:-5]
    case = PagedCase(
        q=q,
        keys=keys,
        values=values,
        kv=kv,
        metadata=metadata,
        softmax_scale=k_dim**-0.5,
        logit_softcap=logit_softcap,
        sinks=random(num_heads) * 2 if sinks else None,
    )
    if fill:
        for b, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
            first_live = 0 if sliding_window is None else max(seq_len - q_len - sliding_window + 1, 0)
            for start in range(first_live - first_live % block_size, seq_len, block_size):
                rows = slice(max(first_live - start, 0), min(seq_len - start, block_size))
                tokens = slice(start + rows.start, start + rows.stop)
                segment, block, _ = case.slot(b, start)
                k_segments[segment][block, :, rows] = keys[b][tokens].transpose(0, 1)
                v_segments[segment][block, :, rows] = values[b][tokens].transpose(0, 1)
    return case


def attend(case: PagedCase, dtype: torch.dtype, softmax_dtype: torch.dtype) -> torch.Tensor:
    """Plain attention over the dense keys: `[total_q, num_heads, v_head_dim]`, zeros if nothing is seen."""
    outputs = []
    window = case.metadata.sliding_window
    start = 0
    for keys, values, q_len in zip(case.keys, case.values, case.metadata.q_lens_cpu, strict=True):
        q = case.q[start : start + q_len].to(dtype).transpose(0, 1)
        start += q_len
        group = q.shape[0] // keys.shape[1]
        k = keys.to(dtype).transpose(0, 1).repeat_interleave(group, 0)
        v = values.to(dtype).transpose(0, 1).repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * case.softmax_scale
        if case.logit_softcap is not None:
            scores = case.logit_softcap * torch.tanh(scores / case.logit_softcap)
        key_position = torch.arange(k.shape[1], device=q.device)
        position = torch.arange(k.shape[1] - q_len, k.shape[1], device=q.device)[:, None]
        seen = key_position <= position
        if window is not None:
            seen &= key_position > position - window
        scores = scores.masked_fill(~seen, -math.inf)
        if case.sinks is not None:
            scores = torch.cat([scores, case.sinks.to(dtype)[:, None, None].expand(-1, q_len, 1)], -1)
        weights = scores.softmax(-1, dtype=softmax_dtype).to(dtype)[..., : k.shape[1]]
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


def expected(case: PagedCase) -> torch.Tensor:
    """The result in float64."""
    return attend(case, torch.float64, torch.float64)


def allowed_error(case: PagedCase) -> float:
    """Twice the largest error of Transformers' eager attention in this dtype, and a little for tiny cases."""
    stock = attend(case, case.q.dtype, torch.float32)
    tiny = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[case.q.dtype]
    return 2 * (stock - expected(case)).abs().max().item() + tiny
