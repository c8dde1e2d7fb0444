"""What the layers of one sliding window share within one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .block_group import LayerStore
from .block_table import BlockTable, Pairs
from .coded_group import CodedGroup
from .coded_table import CodedTable
from .forward_plan import ForwardPlan, RowLayout, make_plan

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
        self._forget_failed(start)
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

    def advance(self, start: int) -> None:
        """Takes blocks for one more column of every row after `start`; a captured step fills them."""
        self.plan = None
        self._forget_failed(start)
        self._flush(start)
        self.num_columns = start + 1
        old_lens, new_lens = self.layout.lengths(start), self.layout.lengths(start + 1)
        self._copy_blocks(self.table.grow(old_lens, new_lens, self._kept_from(start)))
        self.table.group.stored_tokens += len(new_lens)

    def crop(self, num_columns: int) -> None:
        """Forgets the columns from `num_columns` on."""
        self.plan = None
        self._crop_table(num_columns)
        self.num_columns = num_columns

    def check_crop(self, num_columns: int) -> None:
        """Raises where the window before `num_columns` is gone already."""
        if self.sliding_window is None:
            return
        for row, length in enumerate(self.layout.lengths(num_columns)):
            oldest = max(length - self.sliding_window + 1, 0)
            is_stored = oldest + self.layout.padding[row] >= self.first_column or not length
            if not (is_stored and self.table.can_crop(row, length, oldest)):
                raise RuntimeError(
                    f"can't crop to {num_columns} tokens: a layer with a sliding window of {self.sliding_window} has "
                    "given back what came before. Call activate_past_recording() on the cache before the tokens that "
                    "may be cropped"
                )

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
        window = self.window_kept
        return [max(n - window + 1, 0) if window else 0 for n in self.layout.lengths(num_columns)]

    def _flush(self, start: int) -> None:
        """Of a quantized cache: makes codes of what the tokens after `start` read as codes."""
        if isinstance(self.table, CodedTable):
            self.table.flush(self.layout.lengths(start), self._kept_from(start), self._quantize)

    def _forget_failed(self, start: int) -> None:
        if self.num_columns != start:  # a forward that took blocks, then failed
            self._crop_table(start)

    def _crop_table(self, num_columns: int) -> None:
        lengths = self.layout.lengths(num_columns)
        window = self.sliding_window
        kept = [max(n - window + 1, 0) if window else 0 for n in lengths]
        self.table.crop(lengths, kept, self._dequantize)

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
