"""Quantized keys and values in plain torch: the oracle of the kernels, and the path that runs on a CPU.

What a query sees depends on its position alone (see `kv_format.end_of_codes`): the first block and the last ones wide,
those between as codes. A forward of several tokens finds some blocks both ways: its first queries see them wide, its
last ones as codes. Codes become numbers a piece at a time, float32, and everything is computed in that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from . import reference
from .block_ids import block_runs
from .kv_codes import (
    dequantize_keys,
    dequantize_values,
    dequantize_values_in_a_row,
    quantize_keys,
    quantize_values,
)
from .kv_format import WIDE_BEHIND, end_of_codes
from .metadata import AttentionMetadata, CodedRows, QuantizedKV

#: Numbers that are made of codes, or codes of numbers, at a time: temporary memory, and what a core's own cache holds.
_PIECE = 2**18
#: Queries of a step for which products with one piece after another are quicker than one attention over all.
_FEW_QUERIES = 8

Pairs = Sequence[tuple[int, int]] | torch.Tensor


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv: QuantizedKV, metadata: AttentionMetadata, keep_last: int | None = None
) -> None:
    """Writes new keys and values into the wide blocks that are held, and the codes of blocks that are full.

    Args:
        k: `[total_q, num_kv_heads, k_head_dim]`, packed by `metadata.cu_seqlens_q`.
        v: `[total_q, num_kv_heads, v_head_dim]`.
        keep_last: store only those blocks that have one of a sequence's last so many tokens; None for all.

    A row of a fixed-shape batch that no sequence has (its length is 0) and nodes of a tree make no codes.
    """
    # No block of codes ends in a step of one token; nodes of a tree may yet be dropped.
    if metadata.max_seqlen_q == 1 or metadata.tree is not None:
        reference.store_kv(k, v, kv.wide, metadata, keep_last)
        return
    size, taken = kv.block_size, 0
    for row, (seq_len, q_len) in enumerate(zip(metadata.seq_lens_cpu, metadata.q_lens_cpu, strict=True)):
        if q_len and seq_len:
            kept = 0 if keep_last is None else max(seq_len - keep_last, 0) // size
            new = slice(taken, taken + q_len)
            _store_wide(k[new], v[new], kv, metadata, row, kept)
            _store_codes(k[new], v[new], kv, metadata, row, kept)
        taken += q_len


def _store_wide(
    k: torch.Tensor, v: torch.Tensor, kv: QuantizedKV, metadata: AttentionMetadata, row: int, kept: int
) -> None:
    """Writes a sequence's new tokens into its wide blocks, from block `kept` on."""
    size, seq_len, dead = kv.block_size, metadata.seq_lens_cpu[row], metadata.first_blocks_cpu[row]
    old, ids = seq_len - len(k), metadata.block_ids_cpu[row]
    start = max(old, size * max(kept, dead))
    anchor = _anchor(metadata, row)
    if old < size <= start and kept == 0 and anchor:
        reference.store_tokens(kv.wide, anchor, old, k[: size - old], v[: size - old])
    rest = slice(start - old, None)
    reference.store_tokens(kv.wide, ids, start - dead * size, k[rest], v[rest])


def _store_codes(
    k: torch.Tensor, v: torch.Tensor, kv: QuantizedKV, metadata: AttentionMetadata, row: int, kept: int
) -> None:
    """Writes the codes of a sequence's blocks, from block `kept` on, that get old by its new tokens."""
    size, seq_len, coded = kv.block_size, metadata.seq_lens_cpu[row], _coded(metadata)
    old, dead = seq_len - len(k), metadata.first_blocks_cpu[row]
    before, code_ids = coded.first_codes[row], coded.code_ids[row]
    first = max(old // size - WIDE_BEHIND, before, kept, 1)
    end = min(end_of_codes(seq_len, size), before + len(code_ids))
    step = _blocks_a_piece(kv, 1)
    for start in range(first, end, step):
        stop = min(start + step, end)
        wide_ids = metadata.block_ids_cpu[row][start - dead : -(-old // size) - dead] if start * size < old else []
        keys, values = (
            _whole_blocks(segments, wide_ids, x, old, start * size, stop * size)
            for segments, x in ((kv.wide.k_segments, k), (kv.wide.v_segments, v))
        )
        _write_codes(kv, code_ids[start - before : stop - before], keys, values)


def _whole_blocks(
    segments: Sequence[torch.Tensor], wide_ids: list[int], x: torch.Tensor, old: int, start: int, stop: int
) -> torch.Tensor:
    """Tokens `start` to `stop` of a sequence as blocks, `[blocks, num_kv_heads, block_size, dim]`.

    Args:
        wide_ids: blocks from `start` on that hold what comes before token `old`; `x` is what comes from there on.
    """
    size = segments[0].shape[2]
    tokens = x[max(start - old, 0) : max(stop - old, 0)]
    if start < old:
        stored = _blocks(segments, wide_ids).transpose(1, 2).flatten(0, 1)[: old - start]
        tokens = torch.cat([stored[: stop - start], tokens])
    return tokens.unflatten(0, (-1, size)).transpose(1, 2)


def quantize_blocks(layers: Sequence[QuantizedKV], pairs: Pairs) -> None:
    """Writes the codes of full wide blocks, in every layer.

    Args:
        pairs: ids of a wide block and of the block that its codes go to, a list or int32 `[pairs, 2]`.
    """
    for kv in layers:
        for wide_ids, code_ids in _in_pieces(kv, pairs):
            keys, values = (_blocks(side, wide_ids) for side in (kv.wide.k_segments, kv.wide.v_segments))
            _write_codes(kv, code_ids, keys, values)


def dequantize_blocks(layers: Sequence[QuantizedKV], pairs: Pairs) -> None:
    """Makes wide blocks of codes, in every layer: what a reader of the codes sees, in the model's dtype.

    Args:
        pairs: ids of a block of codes and of the wide block that it goes to, a list or int32 `[pairs, 2]`.
    """
    for kv in layers:
        for code_ids, wide_ids in _in_pieces(kv, pairs):
            keys, values = _blocks(kv.codes.k_segments, code_ids), _blocks(kv.codes.v_segments, code_ids)
            _write(kv.wide.k_segments, wide_ids, dequantize_keys(keys, kv.format, kv.block_size, kv.k_dim))
            _write(kv.wide.v_segments, wide_ids, dequantize_values(values, kv.format, kv.block_size, kv.v_dim))


def gather_kv(
    kv: QuantizedKV,
    block_ids: list[list[int]],
    first_blocks: list[int],
    coded: CodedRows,
    padding: list[int],
    first_column: int,
    num_columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense keys and values of the columns `first_column` to `num_columns`, in the model's dtype.

    A token that is there both ways comes back wide. What is not there any more comes back as zeros.

    Args:
        block_ids: per sequence, its wide blocks but for the anchor; `first_blocks` come before those.
        padding: per sequence, leading columns that were not stored; they come back as zeros.

    Returns:
        `[batch, num_kv_heads, columns, k_head_dim]` and the same with `v_head_dim`.
    """
    shape = (len(block_ids), kv.num_kv_heads, num_columns - first_column)
    keys = kv.wide.k_segments[0].new_zeros(*shape, kv.k_dim)
    values = kv.wide.v_segments[0].new_zeros(*shape, kv.v_dim)
    for row, (wide_ids, dead) in enumerate(zip(block_ids, first_blocks, strict=True)):
        before, anchor = coded.first_codes[row], coded.anchors[row]
        wanted = range(first_column - padding[row], num_columns - padding[row])
        pieces = list(_code_pieces(kv, [coded.code_ids[row]], before, wanted))
        if anchor is not None:
            pieces.append(_Piece(kv, [[anchor]], 0, wanted))
        pieces.append(_Piece(kv, [wide_ids], dead, wanted))  # over codes of the same tokens
        for piece in pieces:
            here = slice(piece.tokens.start - wanted.start, piece.tokens.stop - wanted.start)
            if piece.tokens:
                keys[row, :, here], values[row, :, here] = piece.keys()[0], piece.values()[0]
    return keys, values


def paged_attention(
    q: torch.Tensor,
    kv: QuantizedKV,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new queries over a filled cache that holds their keys already; as `reference.paged_attention`.

    Returns:
        `[total_q, num_heads, v_head_dim]` in q's dtype.
    """
    outs, taken = [q.new_empty(0, q.shape[1], kv.v_dim)], 0
    for rows in _alike(metadata):
        count, q_len = len(rows), metadata.q_lens_cpu[rows[0]]
        if q_len == 0:
            continue
        if metadata.seq_lens_cpu[rows[0]] == 0:  # rows of a fixed-shape batch that no sequence has
            outs.append(q.new_zeros(count * q_len, q.shape[1], kv.v_dim))
            taken += count * q_len
            continue
        # The queries of a KV head, one query head after another: [rows, num_kv_heads, group, q_len, dim].
        queries = q[taken : taken + count * q_len].view(count, q_len, kv.num_kv_heads, -1, kv.k_dim)
        queries = queries.permute(0, 2, 3, 1, 4).float()
        here = slice(taken, taken + count * q_len)
        taken = here.stop
        pieces = _visible_pieces(kv, metadata, rows, here)
        mask = None if q_len == 1 and metadata.tree is None else _mask(pieces, metadata, rows[0], here, q.device)
        if q_len <= _FEW_QUERIES or logit_softcap is not None or sinks is not None:
            out = _attend_by_pieces(queries, pieces, mask, softmax_scale, logit_softcap, sinks)
        else:
            out = _attend_at_once(queries, pieces, mask, softmax_scale)
        outs.append(out.permute(0, 3, 1, 2, 4).reshape(count * q_len, -1, kv.v_dim).to(q.dtype))
    return outs[1] if len(outs) == 2 else torch.cat(outs)


def _attend_by_pieces(
    q: torch.Tensor,
    pieces: list[_Piece],
    mask: torch.Tensor | None,
    softmax_scale: float,
    logit_softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention that holds the numbers of one piece at a time."""
    rows = q.flatten(2, 3)
    scores = torch.cat([rows @ piece.keys().transpose(-1, -2) for piece in pieces], -1).mul_(softmax_scale)
    weights = reference.softmax_weights(scores.view(*q.shape[:-1], -1), mask, logit_softcap, sinks).flatten(2, 3)
    parts = weights.split([len(piece.tokens) for piece in pieces], -1)
    out = parts[0] @ pieces[0].values()
    for part, piece in zip(parts[1:], pieces[1:], strict=True):
        out += part @ piece.values()
    return out.view(*q.shape[:-1], -1)


def _attend_at_once(
    q: torch.Tensor, pieces: list[_Piece], mask: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """Attention that never holds all scores."""
    keys, values = torch.cat([piece.keys() for piece in pieces], 2), torch.cat([piece.values() for piece in pieces], 2)
    mask = None if mask is None else mask.repeat(q.shape[2], 1)
    out = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=mask, scale=softmax_scale)
    return out.view(*q.shape[:-1], -1)


def _alike(metadata: AttentionMetadata) -> list[list[int]]:
    """The sequences, those together that are neighbours, equally long and have one query each that is no tree's."""
    shapes = list(zip(metadata.seq_lens_cpu, metadata.q_lens_cpu, strict=True))
    groups = (list(rows) for _, rows in itertools.groupby(range(len(shapes)), key=shapes.__getitem__))
    return [
        part
        for rows in groups
        for part in ([rows] if shapes[rows[0]][1] == 1 and metadata.tree is None else [[row] for row in rows])
    ]


def _visible_pieces(kv: QuantizedKV, metadata: AttentionMetadata, rows: list[int], queries: slice) -> list[_Piece]:
    """What the queries of some sequences see that are equally long."""
    size, window, coded = kv.block_size, metadata.sliding_window, _coded(metadata)
    seq_len, q_len = metadata.seq_lens_cpu[rows[0]], metadata.q_lens_cpu[rows[0]]
    oldest = 0 if window is None else max(seq_len - q_len - window + 1, 0)
    first_code, end_code = max(oldest // size, 1), end_of_codes(seq_len, size)
    if metadata.tree is not None:
        end_code = int(_first_wide(metadata, rows[0], queries, size).max().clamp(min=1))
    first_wide = max((seq_len - q_len) // size - WIDE_BEHIND, oldest // size)
    tokens = range(oldest, seq_len)

    pieces: list[_Piece] = []
    if first_code < end_code:
        starts = [first_code - coded.first_codes[row] for row in rows]
        code_ids = [
            coded.code_ids[row][start : start + end_code - first_code] for row, start in zip(rows, starts, strict=True)
        ]
        pieces += _code_pieces(kv, code_ids, first_code, tokens)
    if oldest < size and first_wide > 0:
        pieces.append(_Piece(kv, [_anchor(metadata, row) for row in rows], 0, tokens))
    wide_ids = [metadata.block_ids_cpu[row][first_wide - metadata.first_blocks_cpu[row] :] for row in rows]
    pieces.append(_Piece(kv, wide_ids, first_wide, tokens))
    return pieces


@dataclass(frozen=True)
class _Piece:
    """Blocks that follow one another in each of some sequences.

    Args:
        block_ids: of each sequence, equally many.
        first_block: how many blocks come before them.
        wanted: positions of tokens, of which the piece gives those that it has.
        coded: the blocks are codes.
    """

    kv: QuantizedKV
    block_ids: list[list[int]]
    first_block: int
    wanted: range
    coded: bool = False

    @cached_property
    def tokens(self) -> range:
        """Positions of the piece's tokens."""
        size = self.kv.block_size
        start = max(self.wanted.start, self.first_block * size)
        return range(start, min(self.wanted.stop, (self.first_block + len(self.block_ids[0])) * size))

    def keys(self) -> torch.Tensor:
        """Float32 `[sequences, num_kv_heads, tokens, k_head_dim]`."""
        kv = self.kv
        if not self.coded:
            return self._wide(kv.wide.k_segments)
        blocks = self._blocks(kv.codes.k_segments)
        return self._cut(dequantize_keys(blocks, kv.format, kv.block_size, kv.k_dim).flatten(2, 3))

    def values(self) -> torch.Tensor:
        """Float32 `[sequences, num_kv_heads, tokens, v_head_dim]`."""
        kv = self.kv
        if not self.coded:
            return self._wide(kv.wide.v_segments)
        blocks = self._blocks(kv.codes.v_segments)
        return self._cut(dequantize_values_in_a_row(blocks, kv.format, kv.block_size, kv.v_dim).transpose(-1, -2))

    def _wide(self, segments: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._cut(self._blocks(segments).flatten(2, 3)).float()

    def _blocks(self, segments: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[sequences, num_kv_heads, blocks, ...]`."""
        ids = [block for row in self.block_ids for block in row]
        return _blocks(segments, ids).unflatten(0, (len(self.block_ids), -1)).transpose(1, 2)

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        start = self.first_block * self.kv.block_size
        return x[:, :, self.tokens.start - start : self.tokens.stop - start]


def _code_pieces(kv: QuantizedKV, block_ids: list[list[int]], first_block: int, wanted: range) -> Iterator[_Piece]:
    """Blocks of codes in pieces of a bounded size."""
    step = _blocks_a_piece(kv, len(block_ids))
    for start in range(0, len(block_ids[0]), step):
        yield _Piece(kv, [ids[start : start + step] for ids in block_ids], first_block + start, wanted, coded=True)


def _mask(
    pieces: list[_Piece], metadata: AttentionMetadata, row: int, queries: slice, device: torch.device
) -> torch.Tensor:
    """Bool `[q_len, tokens of all pieces]`: which of them the queries of a sequence see."""
    seq_len, q_len, window = metadata.seq_lens_cpu[row], metadata.q_lens_cpu[row], metadata.sliding_window
    size = pieces[0].kv.block_size
    query = torch.arange(seq_len - q_len, seq_len, device=device)[:, None]
    first_wide = _first_wide(metadata, row, queries, size).to(device)[:, None]
    masks = []
    for piece in pieces:
        token = torch.arange(piece.tokens.start, piece.tokens.stop, device=device)
        block = token // size
        if metadata.tree is not None:
            seen = reference.tree_mask(metadata.tree, queries, seq_len - q_len, piece.tokens, window)
        else:
            seen = token <= query if window is None else (token <= query) & (token > query - window)
        is_here = block < first_wide if piece.coded else (block == 0) | (block >= first_wide)
        masks.append(seen & is_here)
    return torch.cat(masks, 1)


def _first_wide(metadata: AttentionMetadata, row: int, queries: slice, block_size: int) -> torch.Tensor:
    """The first of the last blocks that each query of a sequence sees wide, int64 `[q_len]`, on the host."""
    seq_len, q_len = metadata.seq_lens_cpu[row], metadata.q_lens_cpu[row]
    if metadata.tree is None:
        return torch.arange(seq_len - q_len, seq_len) // block_size - WIDE_BEHIND
    committed = seq_len - q_len
    own = (committed + metadata.tree.depths[queries].cpu().long()) // block_size
    return (own - WIDE_BEHIND).clamp(max=committed // block_size)  # blocks with nodes are never codes


def _anchor(metadata: AttentionMetadata, row: int) -> list[int]:
    """The wide block of a sequence's first tokens, if it is still there."""
    if metadata.first_blocks_cpu[row] == 0:
        return metadata.block_ids_cpu[row][:1]
    anchor = _coded(metadata).anchors[row]
    return [] if anchor is None else [anchor]


def _coded(metadata: AttentionMetadata) -> CodedRows:
    if metadata.coded_rows is None:
        raise ValueError("a quantized cache needs metadata with coded_rows")
    return metadata.coded_rows


def _blocks_a_piece(kv: QuantizedKV, num_seqs: int) -> int:
    return max(_PIECE // (num_seqs * kv.num_kv_heads * kv.block_size * max(kv.k_dim, kv.v_dim)), 1)


def _in_pieces(kv: QuantizedKV, pairs: Pairs) -> Iterator[tuple[list[int], list[int]]]:
    """Ids to copy from and to, some at a time."""
    listed = pairs.tolist() if isinstance(pairs, torch.Tensor) else pairs
    step = _blocks_a_piece(kv, 1)
    for start in range(0, len(listed), step):
        sources, targets = zip(*listed[start : start + step], strict=True)
        yield list(sources), list(targets)


def _write_codes(kv: QuantizedKV, code_ids: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the codes of blocks `[blocks, num_kv_heads, block_size, dim]`."""
    _write(kv.codes.k_segments, code_ids, quantize_keys(keys, kv.format))
    _write(kv.codes.v_segments, code_ids, quantize_values(values, kv.format))


def _blocks(segments: Sequence[torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Blocks by their ids, `[blocks, ...]`: a view if they lie in a row."""
    parts = [segments[segment][index : index + count] for segment, index, count in block_runs(ids)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _write(segments: Sequence[torch.Tensor], ids: list[int], data: torch.Tensor) -> None:
    taken = 0
    for segment, index, count in block_runs(ids):
        segments[segment][index : index + count] = data[taken : taken + count]
        taken += count
