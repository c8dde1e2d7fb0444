"""One forward over one group of layers: which tokens are new, where they go, what attends to what."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops.metadata import AttentionMetadata
from ..ops.transfer import to_device
from .block_table import BlockTable


@dataclass
class RowLayout:
    """How the columns of a batch map to what is stored of each row.

    Transformers counts columns, the same number for every row, left padding included. A row stores its columns
    from `padding[row]` on.

    Args:
        padding: leading columns of each row that are padding.
        copies_per_row: so many neighbouring rows begin with the same prompt (beams, return sequences).
        columns_read: columns of the last mask that was read, if it was left padding; 0 if not.
        only_ones_follow: who runs the model promises that each mask is the last one read, with ones after it: it is
            not fetched from the device.
    """

    padding: list[int] = field(default_factory=list)
    copies_per_row: int = 1
    columns_read: int = 0
    only_ones_follow: bool = False

    def lengths(self, num_columns: int) -> list[int]:
        """Stored tokens of each row after so many columns."""
        return [max(num_columns - pad, 0) for pad in self.padding]

    def read_padding(self, attention_mask: torch.Tensor | None, num_rows: int, start: int, q_len: int) -> bool:
        """Takes in a 2D mask (1 where a column is a real token) before a forward of `q_len` columns.

        Returns:
            Whether the mask is left padding, which is not stored. False: the stock mask must be applied.

        Raises:
            ValueError: the mask says that a column is real which was padding when it was computed.
        """
        total = start + q_len
        if self.only_ones_follow:
            return True
        self.columns_read = 0
        known = self.padding or [0] * num_rows
        if attention_mask is None:
            leading, real = [0] * num_rows, [total] * num_rows
        elif attention_mask.shape[1] < total:
            return False
        else:
            mask = attention_mask[:, :total].to(torch.int64)
            leading, real = torch.stack([(mask.cumsum(1) == 0).sum(1), mask.sum(1)]).tolist()
        for row, (pad, lead) in enumerate(zip(known, leading, strict=True)):
            if lead < pad:
                raise ValueError(
                    f"attention_mask says that column {lead} of row {row} is a token, but it was padding when it was "
                    f"computed and is not in the cache; pass a mask with the first {pad} columns 0"
                )
        if any(lead + n != total for lead, n in zip(leading, real, strict=True)):
            return False
        if any(pad < start and lead != pad for pad, lead in zip(known, leading, strict=True)):
            return False
        self.padding, self.columns_read = leading, total
        return True


@dataclass(eq=False)
class ForwardPlan:
    """What the mask function works out and hands to the layers in the mask's place.

    Args:
        start: columns before this forward.
        q_len: columns of this forward, padding included.
        metadata: for attention, all rows.
        store_metadata: for storing: the first row of every group of equal prompts.
        keep_last: store only so many tokens at the end of each row; None for all.
        dense: the layers return plain keys and values, as a stock cache would.
        query_index: int64 `[total_q]`, the real tokens among the `batch * q_len` columns; None when all are.
        store_index: the same for the rows that are stored.
        stock_mask: makes the mask that the stock attention would have had.
    """

    start: int
    q_len: int
    metadata: AttentionMetadata
    store_metadata: AttentionMetadata
    keep_last: int | None
    dense: bool
    copies_per_row: int = 1
    query_index: torch.Tensor | None = None
    store_index: torch.Tensor | None = None
    stock_mask: Callable[[], Any] | None = None

    def fits(self, start: int, num_rows: int, q_len: int) -> bool:
        """Whether this is the plan of the forward that brings these tokens."""
        return (start, num_rows, q_len) == (self.start, self.metadata.num_seqs, self.q_len)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, q_len, dim]` -> `[total_q, heads, dim]`, padding left out."""
        return _pack(x, self.query_index)

    def pack_stored(self, x: torch.Tensor) -> torch.Tensor:
        """The same for the rows that are stored."""
        return _pack(x if self.copies_per_row == 1 else x[:: self.copies_per_row], self.store_index)

    def unpack(self, out: torch.Tensor) -> torch.Tensor:
        """`[total_q, heads, dim]` -> `[batch, q_len, heads, dim]`, zeros at padding."""
        batch = self.metadata.num_seqs
        if self.query_index is not None:
            index = self.query_index.to(out.device)
            out = out.new_zeros(batch * self.q_len, *out.shape[1:]).index_copy_(0, index, out)
        return out.view(batch, self.q_len, *out.shape[1:])


def make_plan(
    table: BlockTable,
    layout: RowLayout,
    start: int,
    q_len: int,
    keep_window: int | None,
    dense: bool,
    device: torch.device,
) -> tuple[ForwardPlan, list[tuple[int, int]]]:
    """Takes the blocks that a forward needs and works out its geometry.

    Also returns the blocks whose content every layer must copy before it writes, as `(from, to)`.

    Args:
        keep_window: give up blocks that are out of this window; None keeps all.
        dense, start, q_len: as in `ForwardPlan`.
    """
    old_lens, new_lens = layout.lengths(start), layout.lengths(start + q_len)
    is_fresh = not any(old_lens)
    copies_per_row = layout.copies_per_row if is_fresh else 1
    window = keep_window or 0
    codes, reads_blocks = table.codes, table.group.prompts_read_blocks
    holds_new = codes is None or start > 0  # a prompt of a quantized cache is attended to as it is, without the cache
    store_tail = window > 1 and start == 0 and (not holds_new or (not dense and reads_blocks is False))
    ends = new_lens if store_tail else old_lens
    keep_from = [max(end - window + 1, 0) if window else 0 for end in ends]
    copies = table.grow(old_lens, new_lens, keep_from, copies_per_row, holds_new)

    def metadata(step: int) -> AttentionMetadata:
        q_lens = [new - old for old, new in zip(old_lens[::step], new_lens[::step], strict=True)]
        num_rows = len(q_lens)
        aligned = [0] * (-num_rows % 4)  # kernels are specialised on pointers that are multiples of 16 bytes
        both = [*new_lens[::step], *aligned, 0, *itertools.accumulate(q_lens)]
        lens_and_starts = to_device(both, device, torch.int32)
        return AttentionMetadata(
            block_tables=table.tensor(device)[::step],
            seq_lens=lens_and_starts[:num_rows],
            cu_seqlens_q=lens_and_starts[num_rows + len(aligned) :],
            max_seqlen_q=max(q_lens, default=0),
            max_seqlen_k=max(new_lens, default=0),
            sliding_window=table.group.sliding_window,
            is_fresh=is_fresh,
            seq_lens_cpu=new_lens[::step],
            q_lens_cpu=q_lens,
            block_ids_cpu=table.rows[::step],
            first_blocks_cpu=table.first[::step],
            code_tables=None if codes is None else codes.tensor(device)[::step],
            coded_rows=table.coded_rows(step),
            holds_new=holds_new,
        )

    full = metadata(1)
    stored = sum(full.q_lens_cpu[::copies_per_row])
    table.group.stored_tokens += stored
    table.group.shared_tokens += sum(full.q_lens_cpu) - stored
    plan = ForwardPlan(
        start,
        q_len,
        full,
        full if copies_per_row == 1 else metadata(copies_per_row),
        keep_last=window - 1 if store_tail else None,
        dense=dense,
        copies_per_row=copies_per_row,
        query_index=_real_tokens(full.q_lens_cpu, q_len, device),
        store_index=_real_tokens(full.q_lens_cpu[::copies_per_row], q_len, device),
    )
    return plan, copies


def _real_tokens(q_lens: Sequence[int], q_len: int, device: torch.device) -> torch.Tensor | None:
    """Indices of the real columns among `rows * q_len`; padding comes first in a row. None when all are real."""
    if all(n == q_len for n in q_lens):
        return None
    lens = torch.tensor(q_lens)
    columns = torch.arange(q_len)
    return (columns >= q_len - lens[:, None]).flatten().nonzero()[:, 0].to(device, non_blocking=True)


def _pack(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    packed = x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
    return packed if index is None else packed.index_select(0, index.to(x.device))
