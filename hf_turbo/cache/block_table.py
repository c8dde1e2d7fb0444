"""Which blocks the rows of one cache hold in one group of layers, on the host and on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from ..ops.metadata import CodedRows
from ..ops.transfer import to_device
from .block_group import BlockGroup
from .prefix_index import Entry, Part

Pairs = list[tuple[int, int]]

_numbers = itertools.count()

#: A table of so few entries goes to the device anew rather than in changes: one copy instead of several operations.
_SMALL = 2048


class BlockTable:
    """The block ids of each row, in the order of its tokens, and the owner of one reference to each.

    Lengths are in tokens of a row, without padding. A row of a sliding-window group gives up the blocks
    before its window: `first[row]` counts them, `rows[row]` holds the live ones.

    Args:
        group: where the blocks come from.
        expected_length: tokens a row may grow to, if known: room that is looked for, not taken.
    """

    #: Of a quantized cache: the blocks that are codes.
    codes: BlockTable | None = None

    def __init__(self, group: BlockGroup, expected_length: int = 0) -> None:
        self.group = group
        self.rows: list[list[int]] = []
        self.first: list[int] = []
        #: Tokens are to be taken back at the next `crop`: until then nothing is given up that they may need.
        self.keeps_past = False
        #: Blocks that a row gets room for in a row.
        self.reserve = self.num_blocks(expected_length)
        self._mirror: torch.Tensor | None = None  # int32 [rows, columns]: the same on a device
        self._changes: dict[tuple[int, int], int] = {}  # (row, column) -> id that the mirror lacks
        self._number = next(_numbers)
        self._version = 0

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.group.block_size)

    @property
    def num_live_blocks(self) -> int:
        """Different blocks that the rows hold."""
        return len({block for row in self.rows for block in row})

    @property
    def width(self) -> int:
        """Columns of the longest row, those before its window included."""
        return max((first + len(row) for first, row in zip(self.first, self.rows, strict=True)), default=0)

    @property
    def state(self) -> tuple[int, ...]:
        """Differs between tables, and from what it was where a column holds another block since."""
        return self._number, self._version

    def can_crop(self, row: int, length: int, oldest: int) -> bool:
        """Whether a row of so many tokens, of which the next one sees those from `oldest` on, has them still."""
        return self.first[row] <= oldest // self.group.block_size

    def coded_rows(self, rows: Sequence[int]) -> CodedRows | None:
        """Of a quantized cache: what `rows` and `first` do not say of these rows."""
        return None

    def grow(
        self,
        old_lens: Sequence[int],
        new_lens: Sequence[int],
        keep_from: Sequence[int],
        copies_per_row: int = 1,
        holds_new: bool = True,
        reach: int = 0,
    ) -> Pairs:
        """Gives every row the blocks for its new tokens, and blocks of its own where it will write.

        Args:
            old_lens, new_lens: tokens of each row before and after.
            keep_from: the first token of each row that must stay; blocks before it are given up or not taken.
            copies_per_row: so many neighbouring rows, all empty so far, are the same prompt and share its blocks.
            holds_new: of a quantized cache, as in `AttentionMetadata`.
            reach: of a quantized cache: of the new tokens only so many stay at most, so no others become codes; 0: all.

        Returns:
            Blocks whose content must be copied before anything is written, as `(from, to)`. The caller releases
            the sources, once they are copied.
        """
        self.add_rows(len(new_lens))
        size = self.group.block_size
        leaders = range(0, len(self.rows), copies_per_row)
        wanted = [0] * len(self.rows)
        for row in leaders:
            if old_lens[row] == 0:
                self.first[row] = keep_from[row] // size
            if keep_from[row] >= size:
                self._give_up_before(row, keep_from[row] // size)
            held = (self.first[row] + len(self.rows[row])) * size
            if new_lens[row] > held:
                wanted[row] = self.num_blocks(new_lens[row] - held)
        own = [row for row in leaders if self._writes_to_shared(row, old_lens[row], new_lens[row])]
        room = sum(max(wanted[row], copies_per_row * self.reserve) for row in leaders if not self.rows[row])
        self.group.ensure_free(max(sum(wanted) + len(own), room))
        copies = self._replace_shared(own)
        for row in leaders:
            if wanted[row]:
                last = self.rows[row][-1] if self.rows[row] else None
                reserve = 0 if self.rows[row] else self.reserve
                ids = self.group.allocate(wanted[row], last, reserve)
                column = self.first[row] + len(self.rows[row])
                self._changes.update({(row, column + i): block for i, block in enumerate(ids)})
                self.rows[row].extend(ids)
        if copies_per_row > 1:
            self._share_leaders(copies_per_row)
        self._version += bool(copies or any(wanted))
        return copies

    def crop(self, new_lens: Sequence[int], keep_from: Sequence[int], restore: Callable[[Pairs], None]) -> None:
        """Frees the blocks past the new lengths and, where the past was kept for this crop, those before `keep_from`.

        Args:
            restore: of a quantized cache: makes wide blocks of codes, `(code id, wide id)`.
        """
        self.truncate(new_lens)
        if self.keeps_past:
            self.give_up_before(keep_from)

    def truncate(self, new_lens: Sequence[int]) -> None:
        """Frees the blocks past the new lengths."""
        size = self.group.block_size
        for length, first, blocks in zip(new_lens, self.first, self.rows, strict=True):
            if blocks and length <= (first + len(blocks) - 1) * size:
                keep = max(self.num_blocks(length) - first, 0)
                self.group.release(blocks[keep:])
                del blocks[keep:]

    def give_up_before(self, tokens: Sequence[int]) -> None:
        """Frees the blocks that end before these tokens."""
        for row, token in enumerate(tokens):
            self._give_up_before(row, token // self.group.block_size)

    def select(self, indices: Sequence[int]) -> None:
        """Makes row `i` what row `indices[i]` is; blocks are shared, not copied."""
        before = self.rows
        rows = [before[source] if i == source else list(before[source]) for i, source in enumerate(indices)]
        changed = [i for i, source in enumerate(indices) if i != source]
        gone = [i for i in changed if i < len(before)] + list(range(len(rows), len(before)))
        shared = {i: self._num_shared(i, indices[i]) for i in gone if i < len(rows)}
        for i in changed:
            self.group.retain(rows[i][shared.get(i, 0) :])
        for i in gone:
            self.group.release(before[i][shared.get(i, 0) :])
        self.rows, self.first = rows, [self.first[i] for i in indices]
        self._version += 1
        if self._mirror is not None and self._mirror.numel() <= _SMALL:
            self._mirror = None
        self._flush()
        if self._mirror is not None:
            with torch.inference_mode(False):  # as in `tensor`
                self._mirror = self._mirror.index_select(0, to_device(list(indices), self._mirror.device))

    def _num_shared(self, a: int, b: int) -> int:
        """How many of its first blocks row `a` has in common with row `b`.

        Rows share prefixes only: where they hold the same block, they hold the same blocks before it.
        """
        if self.first[a] != self.first[b]:
            return 0
        length = min(len(self.rows[a]), len(self.rows[b]))
        while length and self.rows[a][length - 1] != self.rows[b][length - 1]:
            length -= 1
        return length if self.rows[a][:length] == self.rows[b][:length] else 0

    def append(self, row: int, column: int, block: int) -> None:
        """Gives a row one more block, which follows those that it has, if any."""
        if not self.rows[row]:
            self.first[row] = column
        self.rows[row].append(block)
        self._changes[row, column] = block
        self._version += 1

    def longest_prefix(self, entries: Sequence[Entry], num_tokens: int) -> int:
        """How many of a text's first `num_tokens` tokens a row can begin with: all that the next one sees is there.

        Args:
            entries: of the text's first blocks, as found in the index.
        """
        length = min(num_tokens, len(entries) * self.group.block_size)
        while length > 0:
            needed = range(self._first_seen(length), self.num_blocks(length))
            missing = next((i for i in reversed(needed) if self.group not in entries[i].blocks), None)
            if missing is None:
                break
            length = missing * self.group.block_size
        return length

    def take_prefix(self, row: int, entries: Sequence[Entry], num_tokens: int) -> None:
        """Makes an empty row begin with so many tokens, which `longest_prefix` has said it can."""
        first = self._first_seen(num_tokens)
        self._take(row, first, entries[first : self.num_blocks(num_tokens)])

    def full_blocks(self, row: int, num_tokens: int) -> Iterator[tuple[Part, int, int]]:
        """The blocks that a row holds of its first `num_tokens` tokens and that these fill.

        Yields:
            Where a block belongs to, its place in the row, and the block.
        """
        first = self.first[row]
        end = min(num_tokens // self.group.block_size, first + len(self.rows[row]))
        for place in range(first, end):
            yield self.group, place, self.rows[row][place - first]

    def take_no_room(self) -> None:
        """New rows do not look for room to grow."""
        self.reserve = 0

    def forget_mirror(self) -> None:
        """The next `tensor` is made anew: somebody else keeps the device's table meanwhile."""
        self._mirror = None
        self._changes.clear()
        self._version += 1

    def copy(self) -> BlockTable:
        """Another owner of the same blocks."""
        other = type(self)(self.group)
        other.rows, other.first, other.reserve = [list(row) for row in self.rows], list(self.first), self.reserve
        other.keeps_past = self.keeps_past
        for row in other.rows:
            self.group.retain(row)
        return other

    def release(self) -> None:
        """Gives up all blocks."""
        for row in self.rows:
            self.group.release(row)
        self.rows, self.first, self._mirror, self._changes = [], [], None, {}
        self._version += 1

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The table as int32 `[rows, columns]`; entries past a row's blocks and before its window are anything."""
        mirror = self._mirror
        if mirror is not None and (mirror.device != device or len(mirror) != len(self.rows)):
            self._mirror = None
        self._flush()
        width = self.width
        if self._mirror is None or self._mirror.shape[1] < width:
            columns = width + max(width // 4, 16)
            filled = [self._columns_of(row) for row in range(len(self.rows))]
            padded = [row + [0] * (columns - len(row)) for row in filled]
            with torch.inference_mode(False):  # a later step, outside of that mode, may write to it
                self._mirror = to_device(padded, device, torch.int32).reshape(len(padded), columns)
        return self._mirror

    def _columns_of(self, row: int) -> list[int]:
        """A row's blocks from the first on; anything for those that it does not hold."""
        return [0] * self.first[row] + self.rows[row]

    def _flush(self) -> None:
        """Brings the mirror up to date, or gives it up where it has become too narrow."""
        if self._mirror is not None and self._changes:
            if max(column for _, column in self._changes) < self._mirror.shape[1]:
                changes = [(*place, block) for place, block in self._changes.items()]
                rows, columns, ids = to_device(changes, self._mirror.device).T
                self._mirror.index_put_((rows, columns), ids.to(torch.int32))
            else:
                self._mirror = None
        self._changes.clear()

    def _first_seen(self, length: int) -> int:
        """The first block that the token after so many sees."""
        window = self.group.sliding_window
        return 0 if window is None else max(length - window + 1, 0) // self.group.block_size

    def _take(self, row: int, first: int, entries: Sequence[Entry]) -> None:
        """Puts found blocks from the block `first` on in an empty row."""
        self.add_rows(row + 1)
        blocks = [entry.blocks[self.group] for entry in entries]
        self.group.retain(blocks)
        self.rows[row], self.first[row] = blocks, first
        self._changes.update({(row, first + i): block for i, block in enumerate(blocks)})
        self._version += 1

    def add_rows(self, num_rows: int) -> None:
        """Adds empty rows until there are so many."""
        while len(self.rows) < num_rows:
            self.rows.append([])
            self.first.append(0)

    def _give_up_before(self, row: int, block: int) -> None:
        count = min(block - self.first[row], len(self.rows[row]))
        if count > 0:
            self.group.release(self.rows[row][:count])
            del self.rows[row][:count]
            self.first[row] += count
        if not self.rows[row]:
            self.first[row] = max(self.first[row], block)

    def _writes_to_shared(self, row: int, old_len: int, new_len: int) -> bool:
        if new_len == old_len or old_len % self.group.block_size == 0 or not self.rows[row]:
            return False
        return self.group.manager.is_shared(self.rows[row][-1])

    def _replace_shared(self, rows: Sequence[int]) -> Pairs:
        """Gives rows that will write to a shared last block one of their own; the last owner keeps the block.

        (Not where what it holds is kept for other rows.)
        """
        copies: Pairs = []
        for row in rows:
            shared = self.rows[row][-1]
            leaving = sum(source == shared for source, _ in copies)
            if self.group.manager.owners(shared) - leaving > 1 or self.group.manager.is_kept(shared):
                [block] = self.group.allocate(1)
                copies.append((shared, block))
                self.rows[row][-1] = block
                self._changes[row, self.first[row] + len(self.rows[row]) - 1] = block
        self.group.copied_blocks += len(copies)
        return copies

    def _share_leaders(self, copies_per_row: int) -> None:
        for row in range(len(self.rows)):
            leader = row - row % copies_per_row
            if row != leader:
                self.rows[row], self.first[row] = list(self.rows[leader]), self.first[leader]
                self.group.retain(self.rows[row])
        self._mirror = None
