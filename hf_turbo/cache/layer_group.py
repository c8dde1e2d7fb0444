"""What the layers of one sliding window share within one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..ops.transfer import to_device
from .block_group import LayerStore, by_device
from .block_table import BlockTable, Pairs
from .coded_group import CodedGroup
from .coded_table import CodedTable
from .forward_plan import ForwardPlan, RowLayout, make_packed_plan, make_plan, make_tree_plan
from .token_tree import TokenTree

if TYPE_CHECKING:
    from .paged_cache import PagedLayer


class LayerGroup:
    """Block tables, and the forward under way.

    Args:
        table: of the rows, with what it holds already.
        layout: of the cache, for all its groups.
    """

    def __init__(self, table: BlockTable, layout: RowLayout) -> None:
        self.table = table
        self.layout = layout
        self.sliding_window = table.group.sliding_window
        self.num_columns = 0
        #: Columns before it were out of the window when their prompt was stored: they were not.
        self.first_column = 0
        self.layers: list[PagedLayer] = []
        self.plan: ForwardPlan | None = None

    @property
    def record_past(self) -> bool:
        """Whether what leaves the window, or becomes codes, is kept until the next `crop`."""
        return self.table.keeps_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.table.keeps_past = value

    @property
    def window_kept(self) -> int | None:
        """What is out of this window is given up; None: nothing is."""
        return None if self.record_past else self.sliding_window

    @property
    def stores(self) -> list[LayerStore]:
        """Of those layers that have stored something."""
        return [layer.store for layer in self.layers if layer.store is not None]

    def begin(self, start: int, num_rows: int, q_len: int, device: torch.device, dense: bool) -> ForwardPlan:
        """Takes blocks for `q_len` more columns of `num_rows` rows after `start`, and makes them the current plan.

        Args:
            dense: the caller wants plain keys and values back, as from a stock cache.
        """
        if not self.layout.padding:
            self.layout.padding = [0] * num_rows
        if len(self.layout.padding) != num_rows:
            raise ValueError(f"the cache holds {len(self.layout.padding)} rows, this forward brings {num_rows}")
        self.forget_failed(start)
        if device.type != "cpu":
            # Room to grow in a row is for reading in place. On a CPU memory that nobody has written to costs nothing.
            self.table.take_no_room()
        self._flush(start)
        self.num_columns = start + q_len  # from here on there is something to forget
        self.plan, copies = make_plan(self.table, self.layout, start, q_len, self.window_kept, dense, device)
        self._copy_blocks(copies)
        if start == 0:
            self.first_column = 0 if self.plan.keep_last is None else max(q_len - self.plan.keep_last, 0)
        return self.plan

    def begin_tree(self, start: int, tree: TokenTree, device: torch.device) -> ForwardPlan:
        """The same for a token tree after each row: the forward has a row for each node, and one column."""
        self.forget_failed(start)
        self._flush(start, tree.max_depth + 1)
        self.num_columns = start + tree.num_nodes
        self.plan, copies = make_tree_plan(self.table, self.layout, start, tree, self.window_kept, device)
        self._copy_blocks(copies)
        return self.plan

    def begin_packed(self, start: int, q_lens: Sequence[int], num_rows: int, device: torch.device) -> ForwardPlan:
        """The same for tokens of which each row brings a number of its own, in so many rows of the batch."""
        self.forget_failed(start)
        if device.type != "cpu":
            self.table.take_no_room()
        self._flush(start)
        self.num_columns = start + max(q_lens)
        self.plan, copies = make_packed_plan(
            self.table, self.layout, start, q_lens, num_rows, self.window_kept, device
        )
        self._copy_blocks(copies)
        return self.plan

    def advance(self, start: int, num_nodes: int = 1, reach: int = 1, is_first: bool = True) -> None:
        """Takes blocks for one more column of every row after `start`; a captured step fills them.

        Args:
            num_nodes: or for the nodes of a token tree after each row.
            reach: tokens that may stay of it.
            is_first: nothing is under way that may need more blocks than rows of these lengths have.
        """
        self.plan = None
        if is_first:
            self.forget_failed(start)
        self._flush(start, reach)
        self.num_columns = start + num_nodes
        old_lens = self.layout.lengths(start)
        new_lens = [length + num_nodes for length in old_lens]
        self._copy_blocks(self.table.grow(old_lens, new_lens, self._kept_from(start), reach=reach))
        self.table.group.stored_tokens += 0 if self.layout.tree else len(new_lens)

    def advance_packed(self, start: int) -> None:
        """The same where the layout says what each row brings. Prompts that see themselves as they are stay wide."""
        self.plan = None
        self.forget_failed(start)
        self.table.take_no_room()
        self._flush(start)
        old_lens, new_lens = self.layout.lengths(start), self.layout.next_lengths(start)
        self.num_columns = start + max(new - old for old, new in zip(old_lens, new_lens, strict=True))
        if start == 0:
            self.first_column = 0
        if isinstance(self.table, CodedTable) and self.layout.sees_itself:
            self._copy_blocks(self.table.grow_wide(new_lens))
        else:
            self._copy_blocks(self.table.grow(old_lens, new_lens, self._kept_from(start)))

    def code_prompts(self, lengths: Sequence[int]) -> None:
        """Of a quantized cache: makes codes of prompts of these lengths that a captured step has stored wide."""
        if isinstance(self.table, CodedTable):
            # What is kept for other texts is all of the prompt.
            window = None if self.table.group.keeps_texts else self.window_kept
            self.table.code_prompts(lengths, _first_kept(lengths, window), self._quantize)

    def keep(self, lengths: Sequence[int], num_columns: int, may_shrink: bool) -> None:
        """Forgets each row's tokens after these lengths, of what the last forward brought; the layout knows already.

        Args:
            may_shrink: as of `PagedCache.keep`.
        """
        self.plan = None
        if may_shrink:
            self.table.truncate(lengths)
        else:
            self._crop_table(lengths)
        self.num_columns = num_columns

    def move_tokens(self, lengths: Sequence[int], path: torch.Tensor, counts: torch.Tensor) -> None:
        """Moves the accepted nodes of a tree that follows so many tokens; see `PagedCache.move_accepted`."""
        for device, stores in by_device(self.stores).items():
            bases = to_device(list(lengths), device, torch.int32)
            there = (x.to(device, torch.int32) for x in (path, counts))
            self.table.group.move_tokens(stores, self.table.tensor(device), bases, *there)

    def crop(self, num_columns: int) -> None:
        """Forgets the columns from `num_columns` on."""
        self.plan = None
        self._crop_table(self.layout.lengths(num_columns))
        self.num_columns = num_columns

    def check_crop(self, num_columns: int) -> None:
        """Raises where the window before `num_columns` is gone already."""
        if self.sliding_window is None:
            return
        left_padding = self.layout.left_padding()
        for row, length in enumerate(self.layout.lengths(num_columns)):
            oldest = max(length - self.sliding_window + 1, 0)
            is_stored = oldest + left_padding[row] >= self.first_column or not length
            if not (is_stored and self.table.can_crop(row, length, oldest)):
                raise RuntimeError(
                    f"can't crop to {num_columns} tokens: a layer with a sliding window of {self.sliding_window} has "
                    "given back what came before. Call activate_past_recording() on the cache before the tokens that "
                    "may be cropped"
                )

    def forget_failed(self, start: int) -> None:
        """Takes back the blocks of a forward after `start` columns that failed; the layout has its rows still."""
        if self.num_columns != start:
            self.crop(start)

    def reset(self) -> None:
        """Forgets all columns."""
        self.table.release()
        self.num_columns, self.first_column, self.plan = 0, 0, None

    def release(self) -> None:
        """Gives up all blocks, and the layers' hold on the pool's tensors."""
        self.plan = None
        self.table.release()
        for layer in self.layers:
            layer.store = None
        self.layers.clear()  # a layer refers to its group: without the circle both go now, not at the next gc

    def select(self, indices: Sequence[int]) -> None:
        """Makes row `i` what row `indices[i]` is."""
        self.plan = None
        self.table.select(indices)

    def _kept_from(self, num_columns: int) -> list[int]:
        """The first token of each row that the token after `num_columns` columns sees, or that is kept for a crop."""
        return _first_kept(self.layout.lengths(num_columns), self.window_kept)

    def _flush(self, start: int, reach: int = 1) -> None:
        """Of a quantized cache: makes codes of what the `reach` tokens after `start` read as codes."""
        if isinstance(self.table, CodedTable):
            self.table.flush(self.layout.lengths(start), self._kept_from(start), self._quantize, reach)

    def _crop_table(self, lengths: Sequence[int]) -> None:
        self.table.crop(lengths, _first_kept(lengths, self.sliding_window), self._dequantize)

    def _quantize(self, pairs: Pairs) -> None:
        blocks = self.table.group
        if isinstance(blocks, CodedGroup):
            blocks.quantize_blocks(self.stores, pairs)

    def _dequantize(self, pairs: Pairs) -> None:
        blocks = self.table.group
        if isinstance(blocks, CodedGroup):
            blocks.dequantize_blocks(self.stores, pairs)

    def _copy_blocks(self, copies: Pairs) -> None:
        if copies:
            self.table.group.copy_blocks(self.stores, copies)
            self.table.group.release([source for source, _ in copies])


def _first_kept(lengths: Sequence[int], window: int | None) -> list[int]:
    """The first token of rows of these lengths that the next one sees."""
    return [max(length - window + 1, 0) if window else 0 for length in lengths]
