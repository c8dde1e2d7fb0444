"""Every op in plain torch: the oracle of the kernels, and the path that runs on a CPU, written to be quick.

Shapes as in the kernels: packed queries `[total_q, num_heads, head_dim]`, one row a token, sequences one after
another. A sequence whose blocks lie in a row is read in place; otherwise its pieces are joined first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .block_ids import SEGMENT_BITS, SEGMENT_MASK, block_runs
from .metadata import AttentionMetadata, EvenRows, LayerKV, TreeNodes


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv: LayerKV, metadata: AttentionMetadata, keep_last: int | None = None
) -> None:
    """Writes new keys and values into their blocks.

    Args:
        k: `[total_q, num_kv_heads, k_head_dim]`, packed by `metadata.cu_seqlens_q`.
        v: `[total_q, num_kv_heads, v_head_dim]`.
        keep_last: store only a sequence's last so many tokens; None for all.
    """
    size, taken = kv.block_size, 0
    for row, (seq_len, q_len) in enumerate(zip(metadata.seq_lens_cpu, metadata.q_lens_cpu, strict=True)):
        first = max(seq_len - q_len, 0 if keep_last is None else seq_len - keep_last, 0)
        new = slice(taken + q_len - (seq_len - first), taken + q_len)
        ids, dead = metadata.block_ids_cpu[row], metadata.first_blocks_cpu[row]
        taken += q_len
        if seq_len - first == 1:  # a decode step: as few operations as can be
            block, offset = ids[first // size - dead], first % size
            for side, x in ((kv.k_segments, k), (kv.v_segments, v)):
                _store_token(side[block >> SEGMENT_BITS], block & SEGMENT_MASK, offset, x if len(x) == 1 else x[new])
        elif seq_len > first:
            store_tokens(kv, ids, first - dead * size, k[new], v[new])


def store_tokens(kv: LayerKV, ids: list[int], start: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes tokens, `[tokens, num_kv_heads, dim]`, from row `start` of blocks on, which count as one."""
    positions = torch.arange(start, start + len(k))
    blocks = torch.tensor(ids)[positions // kv.block_size]
    segments = blocks >> SEGMENT_BITS
    for segment in set(segments.tolist()):
        here = slice(None) if segment == segments.min() == segments.max() else (segments == segment).nonzero()[:, 0]
        place = ((blocks[here] & SEGMENT_MASK).to(k.device), (positions[here] % kv.block_size).to(k.device))
        kv.k_segments[segment].transpose(1, 2)[place] = k[here]
        kv.v_segments[segment].transpose(1, 2)[place] = v[here]


def _store_token(blocks: torch.Tensor, index: int, offset: int, x: torch.Tensor) -> None:
    """Writes one token, `[1, num_kv_heads, dim]`, to a block."""
    by_block, by_head, by_token, _ = blocks.stride()
    place = blocks.storage_offset() + index * by_block + offset * by_token
    blocks.as_strided((1, *x.shape[1:]), (0, by_head, 1), place).copy_(x)


def move_kv(
    layers: Sequence[LayerKV],
    block_tables: torch.Tensor,
    bases: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Moves tokens of each sequence to the slots from a base on, in every layer: the nodes that a tree's check kept.

    For `k` from 0 to `counts[b] - 1`, in order, slot `bases[b] + k` of sequence `b` takes what slot
    `bases[b] + path[b, k]` holds. Nothing else is written.

    Args:
        layers: with the same block ids; K and V may differ in all but the block size.
        block_tables: int32 `[num_seqs, columns]`, as of `AttentionMetadata`; only entries of slots that are named are
            read.
        bases: int32 `[num_seqs]`; below 0: nothing of the sequence is moved.
        path: int32 `[num_seqs, max_count]`; its first `counts[b]` entries ascend strictly, so `path[b, k] >= k`. The
            others may be anything.
        counts: int32 `[num_seqs]`.
    """
    rows = zip(block_tables.tolist(), bases.tolist(), path.tolist(), counts.tolist(), strict=True)
    for table, base, steps, count in rows:
        for k, step in enumerate(steps[:count] if base >= 0 else []):
            if k != step:
                for kv in layers:
                    source, target = (divmod(base + place, kv.block_size) for place in (step, k))
                    for segments in (kv.k_segments, kv.v_segments):
                        _slot(segments, table, *target).copy_(_slot(segments, table, *source))


def _slot(segments: Sequence[torch.Tensor], table: list[int], column: int, row: int) -> torch.Tensor:
    """One token's keys or values, `[num_kv_heads, dim]`, a view."""
    return segments[table[column] >> SEGMENT_BITS][table[column] & SEGMENT_MASK, :, row]


def paged_attention(
    q: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new queries over a filled cache that holds their keys already.

    Args:
        q: `[total_q, num_heads, k_head_dim]`, packed by `metadata.cu_seqlens_q`; `num_heads` is a multiple of
            the key-value heads, neighbouring query heads share one.
        softmax_scale: factor of `q k`.
        logit_softcap: scores become `cap * tanh(score / cap)` before masking.
        sinks: `[num_heads]`, for each head one more logit in the softmax's denominator.

    Returns:
        `[total_q, num_heads, v_head_dim]` in q's dtype. A query that sees nothing gives zeros.
    """
    if metadata.num_seqs > 1 and metadata.even_rows is not None:
        keys, values = _read_even_rows(kv, metadata, metadata.even_rows)
        return attend(q.unsqueeze(2), keys, values, softmax_scale, None, logit_softcap, sinks).squeeze(2)
    outs, taken, window = [], 0, metadata.sliding_window
    if len(q) == metadata.num_seqs == 1 and logit_softcap is None and sinks is None and metadata.tree is None:
        # A decode step of one row, which Python's own work is a part of: nothing to go through.
        [seq_len], [runs], offset = metadata.seq_lens_cpu, metadata.runs, metadata.first_blocks_cpu[0] * kv.block_size
        first = 0 if window is None else max(seq_len - window, 0)
        keys, values = _read(kv, runs, first - offset, seq_len - offset)
        rows = q.view(1, keys.shape[1], -1, q.shape[2])  # the queries of a KV head
        return F.scaled_dot_product_attention(rows, keys, values, scale=softmax_scale).view(1, q.shape[1], -1)
    for row, (seq_len, q_len) in enumerate(zip(metadata.seq_lens_cpu, metadata.q_lens_cpu, strict=True)):
        if q_len == 0:
            continue
        here = slice(taken, taken + q_len)
        taken += q_len
        if seq_len == 0:  # a row of a fixed-shape batch that no sequence has
            outs.append(q.new_zeros(q_len, q.shape[1], kv.v_segments[0].shape[3]))
            continue
        first = 0 if window is None else max(seq_len - q_len - window + 1, 0)
        offset = metadata.first_blocks_cpu[row] * kv.block_size
        keys, values = _read(kv, metadata.runs[row], first - offset, seq_len - offset)
        queries = q if len(q) == q_len else q[here]
        if metadata.tree is not None:
            mask = tree_mask(metadata.tree, here, seq_len - q_len, range(first, seq_len), window)
            queries = queries.transpose(0, 1).unsqueeze(0)
            out = attend(queries, keys, values, softmax_scale, None, logit_softcap, sinks, mask)
            outs.append(out[0].transpose(0, 1))
        elif q_len == 1:  # nothing to transpose: the step that a decode spends its time in
            out = attend(queries.unsqueeze(2), keys, values, softmax_scale, None, logit_softcap, sinks)
            outs.append(out.view(1, q.shape[1], -1))
        else:
            queries = queries.transpose(0, 1).unsqueeze(0)
            out = attend(queries, keys, values, softmax_scale, window, logit_softcap, sinks)
            outs.append(out[0].transpose(0, 1))
    if not outs:
        return q.new_empty(0, q.shape[1], kv.v_segments[0].shape[3])
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of equally long sequences over their keys; KV heads are not repeated.

    Args:
        q: `[batch, num_heads, q_len, k_head_dim]`, the queries of the last `q_len` tokens.
        k: `[batch, num_kv_heads, kv_len, k_head_dim]`, of all tokens that any query sees.
        v: `[batch, num_kv_heads, kv_len, v_head_dim]`.
        mask: bool `[q_len, kv_len]`: which keys are seen, in place of those that are causal and in the window.

    Returns:
        `[batch, num_heads, q_len, v_head_dim]`.
    """
    batch, num_heads, q_len, _ = q.shape
    num_kv_heads, kv_len = k.shape[1:3]
    group = num_heads // num_kv_heads
    plain = mask is None and logit_softcap is None and sinks is None
    if q_len == kv_len and plain and (sliding_window or kv_len) >= kv_len:
        return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, is_causal=q_len > 1, enable_gqa=group > 1)
    if mask is None:
        mask = _visible(q_len, kv_len, sliding_window, q.device)
    if logit_softcap is not None or sinks is not None:
        grouped = q.reshape(batch, num_kv_heads, group, q_len, -1)
        scores = (grouped @ k[:, :, None].transpose(-1, -2)).float() * softmax_scale
        return _softmax_by_hand(scores, v[:, :, None], mask, logit_softcap, sinks).flatten(1, 2).to(q.dtype)
    rows = q.reshape(batch, num_kv_heads, group * q_len, -1)  # the queries of a KV head, one head after another
    mask = None if mask is None else mask.repeat(group, 1)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=softmax_scale)
    return out.reshape(batch, num_heads, q_len, -1)


def prompt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_lens: list[int],
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within left-padded prompts that have nothing cached before them.

    Args:
        q: `[batch, num_heads, q_len, k_head_dim]`; k, v: the same with the key-value heads.
        q_lens: real tokens of each row, at its end.

    Returns:
        `[batch, q_len, num_heads, v_head_dim]`, zeros at padding.
    """
    options = (softmax_scale, sliding_window, logit_softcap, sinks)
    batch, num_heads, q_len, _ = q.shape
    if all(n == q_len for n in q_lens):
        return attend(q, k, v, *options).transpose(1, 2)
    out = q.new_zeros(batch, q_len, num_heads, v.shape[-1])
    for row, n in enumerate(q_lens):
        if n:
            one_q, one_k, one_v = (x[row : row + 1, :, q_len - n :] for x in (q, k, v))
            out[row, q_len - n :] = attend(one_q, one_k, one_v, *options)[0].transpose(0, 1)
    return out


def gather_kv(
    kv: LayerKV,
    block_ids: list[list[int]],
    first_blocks: list[int],
    padding: list[int],
    first_column: int,
    num_columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense keys and values of the columns `first_column` to `num_columns`, as a stock cache holds them.

    Args:
        block_ids: per sequence, its live blocks; `first_blocks` come before those and are gone.
        padding: per sequence, leading columns that were not stored; they come back as zeros.

    Returns:
        `[batch, num_kv_heads, columns, k_head_dim]` and the same with `v_head_dim`.
    """
    shape = (len(block_ids), kv.num_kv_heads, num_columns - first_column)
    keys = kv.k_segments[0].new_zeros(*shape, kv.k_segments[0].shape[3])
    values = kv.v_segments[0].new_zeros(*shape, kv.v_segments[0].shape[3])
    for row, ids in enumerate(block_ids):
        offset = padding[row] + first_blocks[row] * kv.block_size  # the column of the first live token
        start = max(first_column, offset)
        if start < num_columns:
            here = slice(start - first_column, None)
            k, v = _read(kv, block_runs(ids), start - offset, num_columns - offset)
            keys[row, :, here], values[row, :, here] = k[0], v[0]
    return keys, values


def _read(kv: LayerKV, runs: list[tuple[int, int, int]], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `start` to `stop` of a sequence's live blocks, `[1, num_kv_heads, tokens, dim]`.

    A view if the blocks lie in a row and their tokens do, too.
    """
    sides = []
    for segments in (kv.k_segments, kv.v_segments):
        segment, index, _ = runs[0]
        blocks = segments[segment]
        num_heads, block_size, dim = blocks.shape[1:]
        by_block, by_head, by_token, _ = blocks.stride()
        if len(runs) == 1 and by_block == block_size * by_token:
            place = blocks.storage_offset() + index * by_block + start * by_token
            sides.append(blocks.as_strided((1, num_heads, stop - start, dim), (0, by_head, by_token, 1), place))
        else:
            pieces = [segments[s][i : i + n].transpose(0, 1).flatten(1, 2) for s, i, n in runs]
            sides.append(torch.cat(pieces, dim=1)[None, :, start:stop])
    return sides[0], sides[1]


def _read_even_rows(kv: LayerKV, metadata: AttentionMetadata, rows: EvenRows) -> tuple[torch.Tensor, torch.Tensor]:
    """What the queries of a step see, `[num_seqs, num_kv_heads, tokens, dim]`: a view if all blocks lie in a row."""
    seq_len, window = metadata.seq_lens_cpu[0], metadata.sliding_window
    offset = metadata.first_blocks_cpu[0] * kv.block_size
    start, stop = (0 if window is None else max(seq_len - window, 0)) - offset, seq_len - offset
    sides = []
    for segments in (kv.k_segments, kv.v_segments):
        blocks = segments[rows.segment]
        num_heads, block_size, dim = blocks.shape[1:]
        by_block, by_head, by_token, _ = blocks.stride()
        if rows.index is None and by_block == block_size * by_token:
            shape = (metadata.num_seqs, num_heads, stop - start, dim)
            place = blocks.storage_offset() + rows.first * by_block + start * by_token
            sides.append(blocks.as_strided(shape, (rows.step * by_block, by_head, by_token, 1), place))
        else:
            index = torch.tensor(metadata.block_ids_cpu).flatten() & SEGMENT_MASK if rows.index is None else rows.index
            joined = blocks.transpose(1, 2).index_select(0, index.to(blocks.device))  # [n, block_size, heads, dim]
            tokens = joined.reshape(metadata.num_seqs, -1, num_heads, dim)
            sides.append(tokens[:, start:stop].transpose(1, 2))
    return sides[0], sides[1]


def _visible(q_len: int, kv_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """Bool `[q_len, kv_len]`: which keys the last `q_len` tokens see; None where that is all."""
    if q_len == 1 and (sliding_window is None or sliding_window >= kv_len):
        return None
    query = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)
    mask = key <= query
    return mask if sliding_window is None else mask & (key > query - sliding_window)


def tree_mask(tree: TreeNodes, nodes: slice, committed: int, slots: range, sliding_window: int | None) -> torch.Tensor:
    """Bool `[nodes, slots]`: which slots the nodes of one sequence see.

    Args:
        nodes: the sequence's, of all in `tree`.
        committed: tokens that are stored before the first node.
        slots: those that are asked about.
    """
    slot = torch.arange(slots.start, slots.stop, device=tree.masks.device)
    seen = (slot < committed).expand(nodes.stop - nodes.start, -1)
    if sliding_window is not None:
        seen = seen & (slot > committed + tree.depths[nodes, None] - sliding_window)
    node = slot - committed
    return seen | (node >= 0) & (tree.masks[nodes, None] >> node.clamp(min=0) & 1).bool()


def _softmax_by_hand(
    scores: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    logit_softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Scores `[batch, num_kv_heads, group, q_len, kv_len]`, float32 -> output in v's dtype."""
    return softmax_weights(scores, mask, logit_softcap, sinks).to(v.dtype) @ v


def softmax_weights(
    scores: torch.Tensor, mask: torch.Tensor | None, logit_softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Weights of the keys, from scores `[batch, num_kv_heads, group, q_len, kv_len]`, float32.

    Args:
        mask: bool `[q_len, kv_len]`: which keys are seen; None for all.
    """
    if logit_softcap is not None:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.float().view(1, scores.shape[1], scores.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
