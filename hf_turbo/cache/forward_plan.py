"""One forward over one group of layers: which tokens are new, where they go, what attends to what."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops.dispatch import uses_triton
from ..ops.metadata import AttentionMetadata, TreeNodes, new_arrivals
from ..ops.transfer import to_device
from .block_table import BlockTable
from .token_tree import TokenTree


class DraftsUnsuited(NotImplementedError):
    """A model does something in a forward that drafted tokens can't be verified with. The message says what."""


class PackedUnsuited(NotImplementedError):
    """A model does something in a forward that several rows can't share. The message says what."""


@dataclass
class RowLayout:
    """How the columns of a batch map to what is stored of each row.

    Transformers counts columns, the same number for every row, left padding included. A row stores its columns
    from `padding[row]` on.

    Args:
        padding: leading columns of each row that hold none of its tokens.
        behind: how many of those are there because the row has fewer tokens than another (speculation); the others
            are left padding. Empty where there are none.
        copies_per_row: so many neighbouring rows begin with the same prompt (beams, return sequences).
        columns_read: columns of the last mask that was read, if it was left padding; 0 if not.
        only_ones_follow: who runs the model promises that each mask is the last one read, with ones after it: it is
            not fetched from the device.
        tree: the shape of the drafts that the next forward verifies, with a row of the batch for each node of each row
            and one column; None: it verifies none.
        packed: how many tokens each row brings to the next forward, whose batch is either one row of all those tokens
            or a row for each; None: the rows of the batch are the cache's.
        wanted: of these, the tokens that logits are asked for of; a captured step gives no others.
        sees_itself: the packed rows have no tokens yet and attend to themselves as they are, also of a quantized cache.
    """

    padding: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    copies_per_row: int = 1
    columns_read: int = 0
    only_ones_follow: bool = False
    tree: TokenTree | None = None
    packed: list[int] | None = None
    wanted: list[int] = field(default_factory=list)
    sees_itself: bool = False

    def next_lengths(self, num_columns: int) -> list[int]:
        """Tokens of each row with those that the next forward brings to so many columns."""
        if self.packed is not None:
            return [length + n for length, n in zip(self.lengths(num_columns), self.packed, strict=True)]
        return self.lengths(num_columns + (1 if self.tree is None else self.tree.num_nodes))

    @property
    def unsuited(self) -> type[NotImplementedError] | None:
        """What a model raises that can't do what the next forward asks of it; None: that is an ordinary one."""
        if self.tree is not None:
            return DraftsUnsuited
        return None if self.packed is None else PackedUnsuited

    def lengths(self, num_columns: int) -> list[int]:
        """Stored tokens of each row after so many columns."""
        return [num_columns - pad if pad < num_columns else 0 for pad in self.padding]  # the engine asks often

    def left_padding(self) -> list[int]:
        """Leading columns of each row that the first mask called padding."""
        return [pad - lag for pad, lag in zip(self.padding, self.behind, strict=True)] if self.behind else self.padding

    def set_lengths(self, lengths: Sequence[int]) -> int:
        """Takes in how many tokens each row has; the answer is how many columns those are."""
        left = self.left_padding()
        num_columns = max((pad + n for pad, n in zip(left, lengths, strict=True)), default=0)
        self.padding = [num_columns - n for n in lengths]
        behind = [pad - lead for pad, lead in zip(self.padding, left, strict=True)]
        self.behind = behind if any(behind) else []
        return num_columns

    def add_rows(self, num_rows: int, num_columns: int) -> None:
        """Adds rows that have no tokens yet to those that have come to so many columns."""
        self.behind = (self.behind or [0] * len(self.padding)) + [num_columns] * num_rows
        self.padding = self.padding + [num_columns] * num_rows

    def select(self, rows: Sequence[int]) -> None:
        """Makes row `i` what row `rows[i]` is."""
        self.padding = [self.padding[row] for row in rows]
        if self.behind:
            self.behind = [self.behind[row] for row in rows]

    def copy(self) -> RowLayout:
        """The same for another cache."""
        return RowLayout(list(self.padding), list(self.behind), self.copies_per_row)

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
        num_rows, q_len: rows of the batch and columns of this forward, padding included.
        metadata: for attention, all rows.
        store_metadata: for storing: the first row of every group of equal prompts.
        keep_last: store only so many tokens at the end of each row; None for all.
        dense: the layers return plain keys and values, as a stock cache would.
        unsuited: as of `RowLayout`. None: each row of the batch is a sequence of `metadata`. Otherwise the batch has a
            row for each node of a token tree, or one row for the tokens of all sequences.
        query_index: int64 `[total_q]`, the real tokens among the `batch * q_len` columns; None when all are.
        store_index: the same for the rows that are stored.
        stock_mask: makes the mask that the stock attention would have had.
    """

    start: int
    num_rows: int
    q_len: int
    metadata: AttentionMetadata
    store_metadata: AttentionMetadata
    keep_last: int | None
    dense: bool
    unsuited: type[NotImplementedError] | None = None
    copies_per_row: int = 1
    query_index: torch.Tensor | None = None
    store_index: torch.Tensor | None = None
    stock_mask: Callable[[], Any] | None = None

    def fits(self, start: int, num_rows: int, q_len: int) -> bool:
        """Whether this is the plan of the forward that brings these tokens."""
        return (start, num_rows, q_len) == (self.start, self.num_rows, self.q_len)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, q_len, dim]` -> `[total_q, heads, dim]`, padding left out."""
        return _pack(x, self.query_index)

    def pack_stored(self, x: torch.Tensor) -> torch.Tensor:
        """The same for the rows that are stored."""
        return _pack(x if self.copies_per_row == 1 else x[:: self.copies_per_row], self.store_index)

    def unpack(self, out: torch.Tensor) -> torch.Tensor:
        """`[total_q, heads, dim]` -> `[batch, q_len, heads, dim]`, zeros at padding."""
        if self.query_index is not None:
            index = self.query_index.to(out.device)
            out = out.new_zeros(self.num_rows * self.q_len, *out.shape[1:]).index_copy_(0, index, out)
        return out.view(self.num_rows, self.q_len, *out.shape[1:])


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
    store_tail = store_tail and not table.group.keeps_texts  # what is kept for other texts is all of the prompt
    ends = new_lens if store_tail else old_lens
    keep_from = [max(end - window + 1, 0) if window else 0 for end in ends]
    copies = table.grow(old_lens, new_lens, keep_from, copies_per_row, holds_new)

    def metadata(step: int) -> AttentionMetadata:
        rows = range(0, len(new_lens), step)
        return _metadata(table, old_lens, new_lens, device, rows, is_fresh, holds_new)

    full = metadata(1)
    stored = sum(full.q_lens_cpu[::copies_per_row])
    table.group.stored_tokens += stored
    table.group.shared_tokens += sum(full.q_lens_cpu) - stored
    plan = ForwardPlan(
        start,
        len(new_lens),
        q_len,
        full,
        full if copies_per_row == 1 else metadata(copies_per_row),
        keep_last=window - 1 if store_tail else None,
        dense=dense,
        copies_per_row=copies_per_row,
        query_index=real_tokens(full.q_lens_cpu, q_len, device),
        store_index=real_tokens(full.q_lens_cpu[::copies_per_row], q_len, device),
    )
    return plan, copies


def make_tree_plan(
    table: BlockTable, layout: RowLayout, start: int, tree: TokenTree, keep_window: int | None, device: torch.device
) -> tuple[ForwardPlan, list[tuple[int, int]]]:
    """The same for a forward of a token tree after each row: a row of the batch for each node, one column.

    Args:
        start, keep_window: as in `make_plan`. Every row has tokens.
        tree: the shape of the drafts.
    """
    old_lens = layout.lengths(start)
    new_lens = [length + tree.num_nodes for length in old_lens]
    keep_from = [max(length - keep_window + 1, 0) if keep_window else 0 for length in old_lens]
    copies = table.grow(old_lens, new_lens, keep_from, reach=tree.max_depth + 1)
    nodes = None if tree.is_chain else tree_nodes(tree, table.group.sliding_window, len(old_lens), device)
    full = _metadata(table, old_lens, new_lens, device, range(len(old_lens)), tree=nodes)
    num_rows = len(old_lens) * tree.num_nodes
    return ForwardPlan(start, num_rows, 1, full, full, None, dense=False, unsuited=DraftsUnsuited), copies


def make_packed_plan(
    table: BlockTable,
    layout: RowLayout,
    start: int,
    q_lens: Sequence[int],
    num_rows: int,
    keep_window: int | None,
    device: torch.device,
) -> tuple[ForwardPlan, list[tuple[int, int]]]:
    """The same for a forward to which rows bring different numbers of tokens.

    Args:
        start, keep_window: as in `make_plan`.
        q_lens: tokens of each row; rows that bring none are left out.
        num_rows: of the batch: 1, or one for each token.
    """
    old_lens = layout.lengths(start)
    new_lens = [length + n for length, n in zip(old_lens, q_lens, strict=True)]
    keep_from = [max(length - keep_window + 1, 0) if keep_window else 0 for length in old_lens]
    copies = table.grow(old_lens, new_lens, keep_from)
    rows = [row for row, n in enumerate(q_lens) if n]
    full = _metadata(table, old_lens, new_lens, device, rows)
    if uses_triton(device):
        full.arrivals = new_arrivals(device)
    columns = sum(q_lens) // num_rows
    return ForwardPlan(start, num_rows, columns, full, full, None, dense=False, unsuited=PackedUnsuited), copies


def tree_nodes(tree: TokenTree, window: int | None, num_seqs: int, device: torch.device) -> TreeNodes:
    """What attention needs to know of a tree that every sequence has."""
    masks = to_device(tree.ancestor_masks(window) * num_seqs, device, torch.int64)
    return TreeNodes(masks, to_device(tree.depths * num_seqs, device, torch.int32))


def _metadata(
    table: BlockTable,
    old_lens: Sequence[int],
    new_lens: Sequence[int],
    device: torch.device,
    rows: Sequence[int],
    is_fresh: bool = False,
    holds_new: bool = True,
    tree: TreeNodes | None = None,
) -> AttentionMetadata:
    """The geometry of these rows."""
    lens = [new_lens[row] for row in rows]
    q_lens = [new_lens[row] - old_lens[row] for row in rows]
    aligned = [0] * (-len(lens) % 4)  # kernels are specialised on pointers that are multiples of 16 bytes
    both = [*lens, *aligned, 0, *itertools.accumulate(q_lens)]
    lens_and_starts = to_device(both, device, torch.int32)
    codes = table.codes
    return AttentionMetadata(
        block_tables=_rows_of(table.tensor(device), rows),
        seq_lens=lens_and_starts[: len(lens)],
        cu_seqlens_q=lens_and_starts[len(lens) + len(aligned) :],
        max_seqlen_q=max(q_lens, default=0),
        max_seqlen_k=max(lens, default=0),
        sliding_window=table.group.sliding_window,
        is_fresh=is_fresh,
        seq_lens_cpu=lens,
        q_lens_cpu=q_lens,
        block_ids_cpu=[table.rows[row] for row in rows],
        first_blocks_cpu=[table.first[row] for row in rows],
        code_tables=None if codes is None else _rows_of(codes.tensor(device), rows),
        coded_rows=table.coded_rows(rows),
        holds_new=holds_new,
        tree=tree,
    )


def _rows_of(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a tensor; a view of it where they are evenly spaced."""
    if isinstance(rows, range):
        return x[:: rows.step]
    return x if len(rows) == len(x) else x.index_select(0, to_device(list(rows), x.device))


def real_tokens(q_lens: Sequence[int], q_len: int, device: torch.device) -> torch.Tensor | None:
    """Indices of the real columns among `rows * q_len`; padding comes first in a row. None when all are real."""
    if all(n == q_len for n in q_lens):
        return None
    lens = torch.tensor(q_lens)
    columns = torch.arange(q_len)
    return (columns >= q_len - lens[:, None]).flatten().nonzero()[:, 0].to(device, non_blocking=True)


def _pack(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    packed = x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
    return packed if index is None else packed.index_select(0, index.to(x.device))
