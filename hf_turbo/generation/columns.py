"""Rows that grow by one column a step without being copied."""

from __future__ import annotations

import torch

#: Columns that a buffer gains at once when it is full: a maximal length of a million costs nothing before its time.
_PIECE = 512


class Columns:
    """A 2D tensor `[rows, columns]` that grows at its right side.

    Args:
        start: the first columns, `[rows, columns]`; copied.
        fill: what columns hold that nobody has written.
    """

    def __init__(self, start: torch.Tensor, fill: int = 0) -> None:
        self.fill = fill
        self.length = start.shape[1]
        self._buffer = self._with_room(start)

    @property
    def view(self) -> torch.Tensor:
        """All columns so far, `[rows, length]`, in the buffer: what is in them does not change later."""
        return self._buffer[:, : self.length]

    def append(self, column: torch.Tensor | None = None) -> None:
        """Adds a column `[rows]`; without one, a column of the fill value."""
        if self.length == self._buffer.shape[1]:
            self._buffer = self._with_room(self._buffer)
        if column is not None:
            self._buffer[:, self.length].copy_(column)
        self.length += 1

    def reorder(self, rows: torch.Tensor) -> None:
        """Makes row `i` what row `rows[i]` is, int64 `[rows]`."""
        self._buffer = self._buffer.index_select(0, rows)

    def _with_room(self, start: torch.Tensor) -> torch.Tensor:
        rows, columns = start.shape
        buffer = start.new_full((rows, columns + max(_PIECE, columns // 2)), self.fill)
        buffer[:, :columns] = start
        return buffer
