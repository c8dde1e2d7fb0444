"""Rows that change places on the device before the host knows how: beams whose next step need not wait for it.

Which beam goes on from which is known on the device first. `advance` reorders the block tables there and gives every
beam a block of its own to write to, out of spare blocks that were taken beforehand; `catch_up` does the same to the
host's account of the blocks, while the device is at work on the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops.transfer import to_device
from .paged_cache import LayerGroup, PagedCache


class AheadRows:
    """The rows of a cache, each with a spare block in every group of layers.

    Args:
        cache: with at least one token in each row, and no row's last block shared (see `is_possible`).
        device: of the tables.
    """

    def __init__(self, cache: PagedCache, device: torch.device) -> None:
        self._cache = cache
        self._groups: dict[int | None, _AheadGroup] = {}
        try:
            for window, group in cache.groups.items():
                self._groups[window] = _AheadGroup(group, device)
        except BaseException:
            self.release()
            raise

    @staticmethod
    def is_possible(cache: PagedCache) -> bool:
        """Whether every row could write to its last block now."""
        lengths = cache.layout.lengths(cache.get_seq_length())
        for group in cache.groups.values():
            size, is_shared = group.table.group.block_size, group.table.group.manager.is_shared
            for length, row in zip(lengths, group.table.rows, strict=True):
                if not length or (length % size and is_shared(row[-1])):
                    return False
        return True

    @property
    def can_advance(self) -> bool:
        """Whether the next step needs nothing of the host: no block becomes codes then."""
        lengths = self._cache.layout.lengths(self._cache.get_seq_length())
        return not any(group.codes_blocks_at(lengths) for group in self._groups.values())

    @property
    def code_tables(self) -> dict[int | None, torch.Tensor]:
        """Those of the last `advance`, of the groups that have any."""
        return {window: group.codes for window, group in self._groups.items() if group.codes is not None}

    def advance(self, origins: torch.Tensor) -> dict[int | None, torch.Tensor]:
        """Makes row `i` go on from row `origins[i]`, and room for its next token. Where that `can_advance`.

        Args:
            origins: int64 `[rows]`, on the device.

        Returns:
            For each group of layers int32 `[rows, columns]`, the block tables.
        """
        lengths = self._cache.layout.lengths(self._cache.get_seq_length())
        return {window: group.advance(origins, lengths) for window, group in self._groups.items()}

    def catch_up(self, rows: Sequence[int], keep_step: bool) -> None:
        """What the last `advance` did, on the host.

        Args:
            rows: where each row came from.
            keep_step: the step after it counts; otherwise the cache stays as long as it was.
        """
        start = self._cache.get_seq_length()
        lengths = self._cache.layout.lengths(start)
        for group in self._groups.values():
            group.catch_up(rows, lengths)
        self._cache.layout.select(rows)
        if keep_step:
            self._cache.finish_step(start + 1)
        for ahead in self._groups.values():
            ahead.group.num_columns = start + 1
            if not keep_step:
                ahead.group.crop(start)

    def release(self) -> None:
        """Gives the spare blocks back."""
        for group in self._groups.values():
            group.release()


class _AheadGroup:
    """The same for one group of layers."""

    def __init__(self, group: LayerGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._spares = group.table.group.allocate(len(group.table.rows))
        self._spares_there = to_device(self._spares, device, torch.int32)
        self._tables = group.table.tensor(device).clone()
        codes = group.table.codes
        self.codes = None if codes is None else codes.tensor(device).clone()
        self._rows = torch.arange(len(self._spares), device=device)
        self._columns: list[int] = []
        self._columns_there = torch.empty(0)
        self._is_new: list[bool] = []

    def codes_blocks_at(self, lengths: Sequence[int]) -> bool:
        """Whether blocks may become codes before a step after so many tokens."""
        size = self.group.table.group.block_size
        return self.codes is not None and any(length % size == 0 for length in lengths)

    def advance(self, origins: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        if self.codes is not None:
            self.codes = self.codes.index_select(0, origins)
        size = self.group.table.group.block_size
        self._set_columns([length // size for length in lengths])
        self._is_new = [length % size == 0 for length in lengths]
        tables = self._tables.index_select(0, origins)
        last = tables.gather(1, self._columns_there)[:, 0]
        moved = origins != self._rows
        if any(self._is_new):
            is_new = to_device(self._is_new, self._device)
            target = torch.where(moved | is_new, self._spares_there, last)
            source = torch.where(moved & ~is_new, last, target)
        else:
            target = torch.where(moved, self._spares_there, last)
            source = last
        tables.scatter_(1, self._columns_there, target[:, None])
        stores = [layer.store for layer in self.group.layers if layer.store is not None]
        self.group.table.group.copy_blocks_there(stores, torch.stack([source, target], 1))
        self._tables = tables
        return tables

    def catch_up(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        table, blocks = self.group.table, self.group.table.group
        moved = [origin != row for row, origin in enumerate(rows)]
        used = [row for row, is_new in enumerate(self._is_new) if is_new or moved[row]]
        fresh = blocks.allocate(len(used))  # first of all: should there be none, nothing has changed
        table.forget_mirror()
        table.select(rows)
        for row, block in zip(used, fresh, strict=True):
            if self._is_new[row]:
                table.rows[row].append(self._spares[row])
            else:
                blocks.release([table.rows[row][-1]])
                table.rows[row][-1] = self._spares[row]
            self._spares[row] = block
        window = None if self.group.record_past else self.group.sliding_window
        if window:
            table.give_up_before([max(length - window + 1, 0) for length in lengths])
        if used:
            self._spares_there = to_device(self._spares, self._device, torch.int32)

    def release(self) -> None:
        self.group.table.group.release(self._spares)
        self._spares = []

    def _set_columns(self, columns: list[int]) -> None:
        if columns == self._columns:
            return
        self._columns = columns
        self._columns_there = to_device(columns, self._device)[:, None]
        missing = max(columns) + 1 - self._tables.shape[1]
        if missing > 0:
            self._tables = torch.nn.functional.pad(self._tables, (0, missing + 64))
