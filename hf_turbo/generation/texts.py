"""The texts of a batch whose rows grow by different numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList

from ..ops.transfer import to_device
from .known import ProcessorKinds

#: Columns that a buffer has beyond what was asked for, so that it seldom grows.
_SPARE = 256


class Texts:
    """Each row's tokens so far, on the device, and what logits processors make of them.

    Behind a row's tokens there is room for drafted ones, which `write` puts there and `process` takes along.

    Args:
        input_ids: the prompts, int64 `[rows, columns]`, left padding included.
        processors: called as they are, each row's text as long as it is.
    """

    def __init__(self, input_ids: torch.Tensor, processors: LogitsProcessorList) -> None:
        #: Columns of the prompts, and the new tokens of each row, on the host.
        self.num_prompt = input_ids.shape[1]
        self.new: list[list[int]] = [[] for _ in range(len(input_ids))]
        self._processors: Any = processors
        self._kinds = ProcessorKinds.of(processors)
        self._buffer = input_ids.new_zeros(len(input_ids), self.num_prompt + _SPARE)
        self._buffer[:, : self.num_prompt] = input_ids
        self._missing: list[list[int]] = [[] for _ in self.new]  # tokens of each row that the device lacks
        self._update()

    @property
    def num_rows(self) -> int:
        return len(self.new)

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @property
    def lengths(self) -> list[int]:
        """Columns of each row."""
        return [self.num_prompt + len(row) for row in self.new]

    @property
    def reads_no_text(self) -> bool:
        """Whether what the processors answer depends on the logits alone."""
        return self._kinds.read_no_text

    @property
    def last(self) -> torch.Tensor:
        """Each row's newest token, int64 `[rows]`."""
        self._upload()
        return self._buffer.gather(1, self._ends - 1)[:, 0]

    @property
    def last_two(self) -> torch.Tensor:
        """Each row's last two tokens, int64 `[rows, 2]`."""
        self._upload()
        return self._buffer.gather(1, torch.cat([self._ends - 2, self._ends - 1], dim=1))

    def without(self, num_left_out: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows without so many of their first columns; with as many before them where a number is negative.

        Returns:
            int64 `[rows, longest]`, -1 before a row and anything behind it, and the rows' lengths, int64 `[rows]`.
        """
        self._upload()
        left_out = to_device(num_left_out, self._ends.device, torch.int64)
        longest = max(length - n for length, n in zip(self.lengths, num_left_out, strict=True))
        columns = left_out.unsqueeze(1) + torch.arange(longest, device=left_out.device)
        tokens = self._buffer.gather(1, columns.clamp(0, self._buffer.shape[1] - 1))
        return tokens.masked_fill_(columns < 0, -1), self._ends[:, 0] - left_out

    def row(self, row: int, length: int | None = None) -> torch.Tensor:
        """One row's tokens, or the first `length` of them, int64 `[1, columns]`."""
        self._upload()
        end = self.num_prompt + len(self.new[row]) if length is None else length
        return self._buffer[row : row + 1, :end]

    def write(self, offset: int, tokens: torch.Tensor) -> None:
        """Puts tokens, int64 `[rows]` or `[rows, n]`, behind each row's text, after `offset` others."""
        self._upload()
        columns = tokens.reshape(self.num_rows, -1)
        self._make_room(offset + columns.shape[1])
        places = self._ends + torch.arange(offset, offset + columns.shape[1], device=self._ends.device)
        self._buffer.scatter_(1, places, columns)

    def append(self, tokens: Sequence[Sequence[int]]) -> None:
        """Makes tokens that have been written, on from offset 0, each row's own: those that the host names."""
        for row, new in zip(self.new, tokens, strict=True):
            row.extend(new)
        self._update()

    def append_unwritten(self, tokens: Sequence[Sequence[int]]) -> None:
        """The same for tokens that only the host has so far."""
        for row, new, missing in zip(self.new, tokens, self._missing, strict=True):
            row.extend(new)
            missing.extend(new)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows."""
        self._upload()
        self._missing = [[] for _ in rows]
        self.new = [self.new[row] for row in rows]
        self._buffer = self._buffer[torch.tensor(rows, device=self._buffer.device)]
        self._update()

    def process(self, logits: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """What the processors make of logits, fp32 `[rows, vocabulary]`, of the token after `offset` written ones."""
        if not self._processors:
            return logits
        self._upload()
        lengths = [length + offset for length in self.lengths]
        if self._kinds.read_no_text or len(set(lengths)) == 1:
            return self._processors(self._buffer[:, : lengths[0]], logits)
        by_row = [
            self._processors(self._buffer[row : row + 1, :length], logits[row : row + 1])
            for row, length in enumerate(lengths)
        ]
        return torch.cat(by_row)

    def process_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        """The same for all nodes of a draft, fp32 `[rows, nodes, vocabulary]`.

        Where the processors read the text it must be a chain, and its tokens must have been written.
        """
        if self._kinds.read_no_text:
            return self.process(logits.flatten(0, 1)).view_as(logits)
        return torch.stack([self.process(logits[:, node], node) for node in range(logits.shape[1])], dim=1)

    def _upload(self) -> None:
        """Writes what the device lacks."""
        longest = max(map(len, self._missing), default=0)
        if longest:
            columns = [row + [0] * (longest - len(row)) for row in self._missing]
            self._missing = [[] for _ in self.new]
            self.write(0, torch.tensor(columns).to(self._buffer.device, non_blocking=True))
            self._update()

    def _update(self) -> None:
        ends = torch.tensor(self.lengths, dtype=torch.int64)
        self._ends = ends.to(self._buffer.device, non_blocking=True).unsqueeze(1)

    def _make_room(self, num_more: int) -> None:
        missing = max(self.lengths, default=0) + num_more - self._buffer.shape[1]
        if missing > 0:
            more = max(missing, _SPARE, self._buffer.shape[1] // 2)
            self._buffer = torch.nn.functional.pad(self._buffer, (0, more))
