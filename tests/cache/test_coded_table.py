"""Tables of wide blocks and codes against lists of tokens: what a row wrote is what it reads, as what it should be."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.cache.coded_table import CodedTable
from hf_turbo.ops.kv_format import end_of_codes


class CodedTableMachine(RuleBasedStateMachine):
    """Up to two tables on one group. `wide` and `codes` are the device; `tokens[table][row]` is what must be read."""

    @initialize(
        size=st.sampled_from([2, 4]),
        window=st.sampled_from([None, 2, 5, 11]),
        keeps_past=st.booleans(),
        is_whole=st.booleans(),
        copies=st.integers(1, 3),
        data=st.data(),
    )
    def first_prompt(self, size, window, keeps_past, is_whole, copies, data):
        self.size, self.window, self.next_token = size, window, 0
        self.wide: dict[tuple[int, int], int | None] = {}  # (block, offset) -> token
        self.codes: dict[int, list[int | None]] = {}
        self.group = BlockPool(size, "int8").group(None)
        self.forget_what_is_free(self.group)
        self.forget_what_is_free(self.group.codes)
        table = CodedTable(self.group, data.draw(st.integers(0, 20)))
        table.keeps_past = keeps_past
        lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=2))
        prompts = [self.new_tokens(n) for n in lengths]
        self.tables, self.tokens = [table], [[list(prompt) for prompt in prompts for _ in range(copies)]]
        lengths = [n for n in lengths for _ in range(copies)]
        keep_last = window - 1 if window and not keeps_past and not is_whole else None
        keep_from = [0 if keep_last is None else max(n - keep_last, 0) for n in lengths]
        #: Tokens of each row from which on all were stored.
        self.stored_from = [list(keep_from)]
        assert table.grow([0] * len(lengths), lengths, keep_from, copies, holds_new=is_whole) == []
        self.store(0, [0] * len(lengths), is_whole, keep_last)

    def forget_what_is_free(self, group):
        """What is free may be overwritten at any time."""
        release = group.release

        def release_and_forget(ids):
            release(ids)
            for block in ids:
                if group.manager.owners(block) == 0 and group is self.group:
                    for offset in range(self.size):
                        self.wide.pop((block, offset), None)
                elif group.manager.owners(block) == 0:
                    self.codes.pop(block, None)

        group.release = release_and_forget

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def wide_block(self, table: CodedTable, row: int, block: int) -> int:
        if block == 0 and table.first[row] > 0:
            assert table.anchors[row] is not None
            return table.anchors[row]
        assert block >= table.first[row]
        return table.rows[row][block - table.first[row]]

    def code_block(self, table: CodedTable, row: int, block: int) -> int:
        assert block >= table.codes.first[row]
        return table.codes.rows[row][block - table.codes.first[row]]

    def store(self, which: int, old_lens: list[int], holds_new: bool = True, keep_last: int | None = None) -> None:
        """What `store_kv` does by the contract of a quantized cache."""
        table, size = self.tables[which], self.size
        for row, (tokens, old) in enumerate(zip(self.tokens[which], old_lens, strict=True)):
            new, first = len(tokens), old // size
            if new == old:
                continue
            kept = 0 if keep_last is None else max(new - keep_last, 0) // size
            held = first - 1 if holds_new else (new - 1) // size - 1
            for position in range(old, new):
                block = position // size
                if block >= kept and (block == 0 or block >= held):
                    self.wide[self.wide_block(table, row, block), position % size] = tokens[position]
            for block in range(max(first - 1, 1, kept), (new - 1) // size - 1):
                numbers = [
                    tokens[p] if p >= old else self.wide.get((self.wide_block(table, row, block), p % size))
                    for p in range(block * size, (block + 1) * size)
                ]
                self.write_codes(self.code_block(table, row, block), numbers)

    def write_codes(self, block: int, numbers: list[int | None]) -> None:
        assert self.codes.get(block, numbers) == numbers, "codes were changed"
        self.codes[block] = numbers

    def quantize(self, pairs):
        assert len({code for _, code in pairs}) == len({wide for wide, _ in pairs}) == len(pairs)
        for wide, code in pairs:
            self.write_codes(code, [self.wide.get((wide, i)) for i in range(self.size)])

    def dequantize(self, pairs):
        assert len({wide for _, wide in pairs}) == len({code for code, _ in pairs}) == len(pairs)
        for code, wide in pairs:
            self.wide.update({(wide, i): token for i, token in enumerate(self.codes[code])})

    def kept_from(self, which: int, lengths: list[int], record: bool = True) -> list[int]:
        window = None if record and self.tables[which].keeps_past else self.window
        return [max(n - window + 1, 0) if window else 0 for n in lengths]

    def pick(self, data) -> int:
        return data.draw(st.integers(0, len(self.tables) - 1))

    @rule(data=st.data(), counts=st.sampled_from([(1, 1), (1, 1), (2, 9), (1, 30)]), fails=st.booleans())
    def forward(self, data, counts, fails):
        which = self.pick(data)
        table, rows, size = self.tables[which], self.tokens[which], self.size
        old = [len(tokens) for tokens in rows]
        count = data.draw(st.integers(*counts))
        keep_from = self.kept_from(which, old)
        if fails:
            with pytest.raises(MemoryError):
                self.fail_in(table.flush, old, keep_from)
        table.flush(old, keep_from, self.quantize)
        pairs = table.grow(old, [n + count for n in old], keep_from)
        for source, target in pairs:
            for offset in range(size):
                self.wide[target, offset] = self.wide.get((source, offset))
        self.group.release([source for source, _ in pairs])
        seen_from = self.kept_from(which, old, record=False)
        for row, tokens in enumerate(rows):
            tokens.extend(self.new_tokens(count))
            first = old[row] // size
            for block in range(max(seen_from[row], self.stored_from[which][row]) // size, first):
                if block == 0 or block >= first - 1:
                    self.wide_block(table, row, block)
                else:
                    self.code_block(table, row, block)
        self.store(which, old)

    def fail_in(self, flush, lengths, keep_from):
        """A `flush` that fails, if it has anything to do."""

        def fail(pairs):
            raise MemoryError

        flush(lengths, keep_from, fail)
        raise MemoryError

    @rule(data=st.data(), most=st.sampled_from([1, 3, 40]))
    def crop(self, data, most):
        which = self.pick(data)
        table, rows = self.tables[which], self.tokens[which]
        count = data.draw(st.integers(0, min(most, min(map(len, rows)))))
        lengths = [len(tokens) - count for tokens in rows]
        oldest = self.kept_from(which, lengths, record=False)
        if any(
            not table.can_crop(row, n, first) or (n and first < self.stored_from[which][row])
            for row, (n, first) in enumerate(zip(lengths, oldest, strict=True))
            if self.window
        ):
            return  # `LayerGroup.check_crop` forbids it
        table.crop(lengths, oldest, self.dequantize)
        for tokens, n in zip(rows, lengths, strict=True):
            del tokens[n:]

    @rule(data=st.data())
    def give_up(self, data):
        """Of a table that is not told to keep its past, after a step of beams that went ahead."""
        which = self.pick(data)
        if not self.tables[which].keeps_past:
            self.tables[which].give_up_before(self.kept_from(which, [len(t) for t in self.tokens[which]]))

    @rule(data=st.data())
    def select(self, data):
        which = self.pick(data)
        rows = self.tokens[which]
        indices = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
        self.tables[which].select(indices)
        self.tokens[which] = [list(rows[i]) for i in indices]
        self.stored_from[which] = [self.stored_from[which][i] for i in indices]

    @precondition(lambda self: len(self.tables) == 1)
    @rule()
    def copy(self):
        self.tables.append(self.tables[0].copy())
        self.tokens.append([list(tokens) for tokens in self.tokens[0]])
        self.stored_from.append(list(self.stored_from[0]))

    @precondition(lambda self: len(self.tables) == 2)
    @rule(data=st.data())
    def release(self, data):
        which = self.pick(data)
        self.tables.pop(which).release()
        self.tokens.pop(which)
        self.stored_from.pop(which)

    @rule(data=st.data())
    def mirrors_are_the_host(self, data):
        table = self.tables[self.pick(data)]
        from test_block_table import CPU

        wide, codes = table.tensor(CPU), table.codes.tensor(CPU)
        for row, (first, blocks) in enumerate(zip(table.first, table.rows, strict=True)):
            assert wide[row, first : first + len(blocks)].tolist() == blocks
            assert table.anchors[row] in (None, wide[row, 0].item())
            first, blocks = table.codes.first[row], table.codes.rows[row]
            assert codes[row, first : first + len(blocks)].tolist() == blocks

    @invariant()
    def every_row_reads_what_it_wrote(self):
        for which, (table, rows) in enumerate(zip(self.tables, self.tokens, strict=True)):
            wide_rows, firsts, coded = table.each_once()
            for row, tokens in enumerate(rows):
                oldest = self.kept_from(which, [len(tokens)], record=False)[0]
                for position in range(max(oldest, self.stored_from[which][row]), len(tokens)):
                    block, offset = divmod(position, self.size)
                    if block >= firsts[row]:
                        got = self.wide.get((wide_rows[row][block - firsts[row]], offset))
                    elif block == 0:
                        got = self.wide.get((coded.anchors[row], offset))
                    else:
                        got = self.codes[coded.code_ids[row][block - coded.first_codes[row]]][offset]
                    assert got == tokens[position], f"row {row}, position {position}"

    @invariant()
    def owners_are_the_rows(self):
        wide = [b for t in self.tables for row in t.rows for b in row]
        wide += [b for t in self.tables for b in t.anchors if b is not None]
        codes = [b for t in self.tables for row in t.codes.rows for b in row]
        for group, held in ((self.group, wide), (self.group.codes, codes)):
            manager = group.manager
            assert manager.num_used == len(set(held))
            assert all(manager.owners(block) == held.count(block) for block in set(held))
        for table in self.tables:
            live = {b for row in table.rows for b in row} | {b for b in table.anchors if b is not None}
            live_codes = {b for row in table.codes.rows for b in row}
            assert table.num_live_blocks == len(live) + len(live_codes)

    @invariant()
    def few_blocks_are_wide(self):
        for table, rows in zip(self.tables, self.tokens, strict=True):
            for row, tokens in enumerate(rows):
                end = table.codes.first[row] + len(table.codes.rows[row])
                assert end >= end_of_codes(len(tokens), self.size) or not tokens


CodedTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestCodedTable = CodedTableMachine.TestCase
