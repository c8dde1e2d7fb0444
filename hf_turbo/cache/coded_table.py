"""The blocks of a cache whose older blocks are codes: wide ones at both ends of a row, codes between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from ..ops.kv_format import WIDE_BEHIND, end_of_codes
from ..ops.metadata import CodedRows
from .block_table import BlockTable, Pairs
from .coded_group import CodedGroup
from .prefix_index import Entry, Part

Recode = Callable[[Pairs], None]


class CodedTable(BlockTable):
    """The wide blocks of each row, with a table of those that are codes.

    `rows` and `first` are a row's tail: the wide blocks from the one before the next token's on, and maybe more until
    the next `grow`. `anchors` holds a row's first block once the tail begins after it and while it is in the window.
    Blocks from 1 to where the tail begins are in `codes`, those before a window excepted; some of the tail may be, too.

    Args:
        group, expected_length: as of `BlockTable`.
    """

    group: CodedGroup
    codes: BlockTable

    def __init__(self, group: CodedGroup, expected_length: int = 0) -> None:
        super().__init__(group)  # a row has few wide blocks: they need no room to grow
        self.anchors: list[int | None] = []
        self.codes = BlockTable(group.codes, expected_length)

    @property
    def num_live_blocks(self) -> int:
        wide = {block for row in self.rows for block in row} | {block for block in self.anchors if block is not None}
        return len(wide) + self.codes.num_live_blocks

    @property
    def state(self) -> tuple[int, ...]:
        return *super().state, *self.codes.state

    def can_crop(self, row: int, length: int, oldest: int) -> bool:
        size = self.group.block_size
        first = min(self.first[row], self.codes.first[row]) if self.codes.rows[row] else self.first[row]
        if first == 1 and self.anchors[row] is not None:
            first = 0
        return first <= min(oldest // size, max(length // size - WIDE_BEHIND, 0))

    def coded_rows(self, rows: Sequence[int]) -> CodedRows:
        codes = self.codes
        return CodedRows(
            [self.anchors[row] for row in rows], [codes.rows[row] for row in rows], [codes.first[row] for row in rows]
        )

    def each_once(self) -> tuple[list[list[int]], list[int], CodedRows]:
        """`rows`, `first` and the others without the wide blocks that are codes, too."""
        rows, first, coded = [], [], self.coded_rows(range(len(self.rows)))
        for row, blocks in enumerate(self.rows):
            end = self._end_of_codes(row)
            both = max(end - self.first[row], 0) if self.codes.rows[row] else 0
            if both and self.first[row] == 0:
                coded.anchors[row] = blocks[0]
            rows.append(blocks[both:])
            first.append(self.first[row] + both)
        return rows, first, coded

    def flush(self, lengths: Sequence[int], keep_from: Sequence[int], quantize: Recode, reach: int = 1) -> None:
        """Makes codes of the blocks that the next tokens after these lengths read as such and that are none yet.

        Args:
            keep_from: the first token of each row that is still read.
            quantize: writes wide blocks as codes, `(wide id, code id)`.
            reach: how many next tokens, no more than a block.
        """
        size = self.group.block_size
        if any((length + reach - 1) % size < reach for length in lengths):
            self._make_codes([end_of_codes(length + reach, size) for length in lengths], keep_from, quantize)

    def grow_wide(self, new_lens: Sequence[int]) -> Pairs:
        """As `grow` for rows without tokens, which hold wide blocks only: until `code_prompts`."""
        nothing = [0] * len(new_lens)
        return super().grow(nothing, new_lens, nothing)

    def code_prompts(self, lengths: Sequence[int], keep_from: Sequence[int], quantize: Recode) -> None:
        """Leaves of rows after `grow_wide`, which have been stored since, what `grow` without `holds_new` gives them.

        Args:
            lengths: tokens of each row.
            keep_from, quantize: as of `flush`.
        """
        size = self.group.block_size
        self._make_codes([end_of_codes(length, size) for length in lengths], keep_from, quantize)
        for row, (length, keep) in enumerate(zip(lengths, keep_from, strict=True)):
            tail = max((length - 1) // size - WIDE_BEHIND, 0)
            self._hold_from(row, tail, min(keep // size, tail))

    def coded_by(self, old_lens: Sequence[int], new_lens: Sequence[int]) -> Pairs:
        """After `flush` and `grow`: wide blocks that become codes by the new tokens, `(wide id, code id)`."""
        size, pairs = self.group.block_size, []
        for row, (old, new) in enumerate(zip(old_lens, new_lens, strict=True)):
            for block in range(max(old // size - WIDE_BEHIND, 1), end_of_codes(new, size)):
                places = block - self.first[row], block - self.codes.first[row]
                pairs.append((self.rows[row][places[0]], self.codes.rows[row][places[1]]))
        return pairs

    def _make_codes(self, ends: Sequence[int], keep_from: Sequence[int], quantize: Recode) -> None:
        """Makes codes of each row's blocks before these that are still read and that are none yet."""
        size = self.group.block_size
        places: dict[tuple[int, int], list[int]] = defaultdict(list)  # (column, wide block) -> the rows that hold it
        for row, (end, keep) in enumerate(zip(ends, keep_from, strict=True)):
            first = max(keep // size, 1)
            for block in range(max(first, self._end_of_codes(row)) if first < end else end, end):
                places[block, self.rows[row][block - self.first[row]]].append(row)
        if not places:
            return
        ids = self.group.codes.allocate(len(places))
        try:
            quantize([(wide, code) for (_, wide), code in zip(places, ids, strict=True)])
        except BaseException:
            self.group.codes.release(ids)
            raise
        for ((column, _), rows), code in zip(places.items(), ids, strict=True):
            self.group.codes.retain([code] * (len(rows) - 1))
            for row in rows:
                self.codes.append(row, column, code)

    def grow(
        self,
        old_lens: Sequence[int],
        new_lens: Sequence[int],
        keep_from: Sequence[int],
        copies_per_row: int = 1,
        holds_new: bool = True,
        reach: int = 0,
    ) -> Pairs:
        """As `BlockTable.grow`, for both kinds of blocks, after `flush`.

        Held wide are the first block and, with `holds_new`, those from the one before the first new token's on, else
        the last two. Codes are taken for blocks that this forward fills.
        """
        size = self.group.block_size
        if all(0 < old % size <= size - (new - old) for old, new in zip(old_lens, new_lens, strict=True)):
            # Most steps: every row stays in its last block.
            return super().grow(old_lens, new_lens, [first * size for first in self.first])
        self.add_rows(len(new_lens))
        if not holds_new:
            self.group.ensure_free(len(new_lens) // copies_per_row * (2 + WIDE_BEHIND))
        tails, code_ends, codes_from = [], [], []
        for row, (old, new, keep) in enumerate(zip(old_lens, new_lens, keep_from, strict=True)):
            tail = max((old if holds_new else new - 1) // size - WIDE_BEHIND, 0)
            window = min(keep // size, tail)  # the block before the first new token's is held in any case
            if self.keeps_past and old:
                tail = min(tail, self.first[row])
            if row % copies_per_row == 0:
                if old == 0:
                    self._begin_row(row, tail, window)
                else:
                    self._hold_from(row, tail, window)
            tails.append(tail * size)
            code_ends.append(end_of_codes(old + reach if reach else new, size) * size)
            codes_from.append(max(window, 1) * size)
        code_starts = [end if old else 0 for old, end in zip(old_lens, code_ends, strict=True)]
        self.codes.grow(code_starts, code_ends, codes_from, copies_per_row)
        return super().grow(old_lens, new_lens, tails, copies_per_row)

    def crop(self, new_lens: Sequence[int], keep_from: Sequence[int], restore: Recode) -> None:
        """As `BlockTable.crop`. Wide blocks that the next token needs and that are codes only are restored first."""
        size = self.group.block_size
        tails = [max(length // size - WIDE_BEHIND, 0) for length in new_lens]
        missing = {
            row: range(tail, min(self.first[row], self.num_blocks(length)))
            for row, (tail, length) in enumerate(zip(tails, new_lens, strict=True))
            if tail < self.first[row] and length
        }
        if missing:
            self._restore(missing, restore)
        self.truncate(new_lens)
        if self.keeps_past:
            self.give_up_before(keep_from)
            for row, tail in enumerate(tails):
                self._hold_from(row, min(tail, self._end_of_codes(row)), 0)

    def truncate(self, new_lens: Sequence[int]) -> None:
        size = self.group.block_size
        super().truncate(new_lens)
        self.codes.truncate([end_of_codes(length + 1, size) * size for length in new_lens])
        for row, length in enumerate(new_lens):
            if not length:
                self._let_anchor_go(row)
            if not self.codes.rows[row]:
                self.codes.first[row] = min(self.codes.first[row], end_of_codes(length + 1, size))

    def give_up_before(self, tokens: Sequence[int]) -> None:
        size, windows = self.group.block_size, []
        for row, token in enumerate(tokens):
            last_two = max(self.first[row] + len(self.rows[row]) - 1 - WIDE_BEHIND, 0)
            windows.append(min(token // size, last_two))
            self._hold_from(row, windows[row], windows[row])
        self.codes.give_up_before([block * size for block in windows])

    def select(self, indices: Sequence[int]) -> None:
        anchors = [self.anchors[i] for i in indices]
        self.group.retain(_there(anchors))
        self.group.release(_there(self.anchors))
        self.anchors = anchors
        super().select(indices)
        self.codes.select(indices)

    def longest_prefix(self, entries: Sequence[Entry], num_tokens: int) -> int:
        """As of `BlockTable`: wide blocks must be there for all that the next token sees wide, codes for the rest."""
        size = self.group.block_size
        length = min(num_tokens, len(entries) * size)
        while length > 0:
            tail, window = self._parts(entries, length)
            wide = [*([0] if tail and not window else []), *range(tail, self.num_blocks(length))]
            if all(self.group in entries[i].blocks for i in wide) and all(
                self.codes.group in entries[i].blocks for i in range(max(window, 1), tail)
            ):
                break
            length = (length - 1) // size * size
        return length

    def take_prefix(self, row: int, entries: Sequence[Entry], num_tokens: int) -> None:
        tail, window = self._parts(entries, num_tokens)
        self._take(row, tail, entries[tail : self.num_blocks(num_tokens)])
        if tail and not window:
            self.anchors[row] = self._changes[row, 0] = anchor = entries[0].blocks[self.group]
            self.group.retain([anchor])
        first_code = max(window, 1)
        self.codes._take(row, first_code, entries[first_code:tail])

    def full_blocks(self, row: int, num_tokens: int) -> Iterator[tuple[Part, int, int]]:
        anchor = self.anchors[row]
        if anchor is not None and num_tokens >= self.group.block_size:
            yield self.group, 0, anchor
        yield from super().full_blocks(row, num_tokens)
        yield from self.codes.full_blocks(row, num_tokens)

    def take_no_room(self) -> None:
        self.codes.take_no_room()

    def forget_mirror(self) -> None:
        super().forget_mirror()
        self.codes.forget_mirror()

    def copy(self) -> CodedTable:
        other: CodedTable = super().copy()  # type: ignore[assignment]
        other.anchors, other.codes = list(self.anchors), self.codes.copy()
        self.group.retain(_there(other.anchors))
        return other

    def release(self) -> None:
        self.group.release(_there(self.anchors))
        self.anchors = []
        super().release()
        self.codes.release()

    def add_rows(self, num_rows: int) -> None:
        super().add_rows(num_rows)
        self.codes.add_rows(num_rows)
        self.anchors += [None] * (num_rows - len(self.anchors))

    def _columns_of(self, row: int) -> list[int]:
        columns, anchor = super()._columns_of(row), self.anchors[row]
        return columns if anchor is None else [anchor, *columns[1:]]

    def _share_leaders(self, copies_per_row: int) -> None:
        super()._share_leaders(copies_per_row)
        for row in range(len(self.rows)):
            leader = row - row % copies_per_row
            if row != leader:
                self._let_anchor_go(row)
                self.anchors[row] = self.anchors[leader]
                self.group.retain(_there([self.anchors[row]]))

    def _parts(self, entries: Sequence[Entry], length: int) -> tuple[int, int]:
        """Where the tail of a row of so many tokens begins, and the first block that the next token sees at all."""
        size = self.group.block_size
        tail = max(length // size - WIDE_BEHIND, 0)
        window = min(self._first_seen(length), tail)
        if length % size == 0:  # the next `flush` makes codes that are missing of blocks that are wide
            tail = next((i for i in range(max(window, 1), tail) if self.codes.group not in entries[i].blocks), tail)
        return tail, window

    def _end_of_codes(self, row: int) -> int:
        return self.codes.first[row] + len(self.codes.rows[row])

    def _begin_row(self, row: int, tail: int, window: int) -> None:
        """Takes an empty row's first block, where `tail` begins after it and `window` does not."""
        if tail == 0 or window > 0:
            self._let_anchor_go(row)
        elif self.anchors[row] is None:
            [anchor] = self.group.allocate(1)
            self.anchors[row] = self._changes[row, 0] = anchor

    def _hold_from(self, row: int, tail: int, window: int) -> None:
        """Gives up wide blocks before `tail`, but not the first one unless `window` begins after it."""
        if tail > 0 and window == 0 and self.first[row] == 0 and self.rows[row]:
            self.anchors[row] = self.rows[row].pop(0)
            self.first[row] = 1
        self._give_up_before(row, tail)
        if window > 0:
            self._let_anchor_go(row)

    def _let_anchor_go(self, row: int) -> None:
        self.group.release(_there([self.anchors[row]]))
        self.anchors[row] = None

    def _restore(self, missing: dict[int, range], restore: Recode) -> None:
        """Puts wide blocks, made of codes, before rows' tails."""
        of_codes: dict[int, int] = {}
        found: dict[int, list[int]] = {}
        taken: list[int] = []
        try:
            for row, blocks in missing.items():
                found[row] = [self._wide_again(row, block, of_codes, taken) for block in blocks]
            if of_codes:
                restore(list(of_codes.items()))
        except BaseException:
            self.group.release(taken)
            raise
        for row, blocks in missing.items():
            if blocks.stop < self.first[row]:  # nothing of the tail stays
                self.group.release(self.rows[row])
                self.rows[row] = []
            if blocks.start == 0:
                self.anchors[row] = None
            self.rows[row][:0] = found[row]
            self.first[row] = blocks.start
            self._changes.update({(row, block): wide for block, wide in zip(blocks, found[row], strict=True)})
        self._version += 1

    def _wide_again(self, row: int, block: int, of_codes: dict[int, int], taken: list[int]) -> int:
        """A wide block for one that a row does not hold wide. Rows with the same codes share it.

        Args:
            of_codes: the wide block for each code block so far.
            taken: references to blocks that were taken so far.
        """
        anchor = self.anchors[row]
        if block == 0 and anchor is not None:
            return anchor
        code = self.codes.rows[row][block - self.codes.first[row]]
        if code in of_codes:
            self.group.retain([of_codes[code]])
        else:
            [of_codes[code]] = self.group.allocate(1)
        taken.append(of_codes[code])
        return of_codes[code]


def _there(blocks: Sequence[int | None]) -> list[int]:
    return [block for block in blocks if block is not None]
