"""Block tables against lists of tokens: what a row wrote is what it reads, whoever shares its blocks."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.cache.block_table import BlockTable

CPU = torch.device("cpu")


class TableMachine(RuleBasedStateMachine):
    """Up to two tables on one group. `memory` is the device; `tokens[table][row]` is what must be read."""

    def __init__(self):
        super().__init__()
        self.memory: dict[tuple[int, int], int] = {}  # (block, offset) -> token
        self.tables: list[BlockTable] = []
        self.tokens: list[list[list[int]]] = []
        self.next_token = 0

    @initialize(size=st.sampled_from([1, 2, 4]), copies=st.integers(1, 3), data=st.data())
    def first_prompt(self, size, copies, data):
        self.size = size
        self.group = BlockPool(size).group(None)
        self.tables = [BlockTable(self.group, expected_length=data.draw(st.integers(0, 20)))]
        lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
        lengths = [n for n in lengths for _ in range(copies)]
        prompts = [self.new_tokens(n) for n in lengths[::copies]]
        self.tokens = [[list(prompts[i // copies]) for i in range(len(lengths))]]
        pairs = self.tables[0].grow([0] * len(lengths), lengths, [0] * len(lengths), copies)
        assert pairs == []
        self.write(0, [0] * len(lengths))

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def write(self, which: int, starts: list[int]) -> None:
        table = self.tables[which]
        for row, (tokens, start) in enumerate(zip(self.tokens[which], starts, strict=True)):
            for position in range(start, len(tokens)):
                column = position // self.size - table.first[row]
                if column >= 0:
                    self.memory[table.rows[row][column], position % self.size] = tokens[position]

    def pick(self, data) -> int:
        return data.draw(st.integers(0, len(self.tables) - 1))

    @rule(data=st.data())
    def grow(self, data):
        which = self.pick(data)
        table, rows = self.tables[which], self.tokens[which]
        old = [len(tokens) for tokens in rows]
        counts = [data.draw(st.integers(0, 5)) for _ in rows]
        keep_from = [
            data.draw(st.integers(first * self.size, max(n, first * self.size)))
            for n, first in zip(old, table.first, strict=True)
        ]
        pairs = table.grow(old, [n + c for n, c in zip(old, counts, strict=True)], keep_from)
        targets = [target for _, target in pairs]
        assert not set(targets) & {source for source, _ in pairs} and len(set(targets)) == len(targets)
        for source, target in pairs:
            for offset in range(self.size):
                self.memory.pop((target, offset), None)
                if (source, offset) in self.memory:
                    self.memory[target, offset] = self.memory[source, offset]
        self.group.release([source for source, _ in pairs])
        for tokens, count in zip(rows, counts, strict=True):
            tokens.extend(self.new_tokens(count))
        self.write(which, old)
        for row, start in enumerate(keep_from):
            assert table.first[row] == start // self.size or not rows[row]

    @rule(data=st.data())
    def truncate(self, data):
        which = self.pick(data)
        table, rows = self.tables[which], self.tokens[which]
        lengths = [
            data.draw(st.integers(min(first * self.size, len(tokens)), len(tokens)))
            for tokens, first in zip(rows, table.first, strict=True)
        ]
        table.truncate(lengths)
        for tokens, length in zip(rows, lengths, strict=True):
            del tokens[length:]

    @rule(data=st.data())
    def give_up_before(self, data):
        which = self.pick(data)
        self.tables[which].give_up_before([data.draw(st.integers(0, len(t))) for t in self.tokens[which]])

    @rule(data=st.data())
    def select(self, data):
        which = self.pick(data)
        rows = self.tokens[which]
        indices = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
        self.tables[which].select(indices)
        self.tokens[which] = [list(rows[i]) for i in indices]

    @precondition(lambda self: len(self.tables) == 1)
    @rule()
    def copy(self):
        self.tables.append(self.tables[0].copy())
        self.tokens.append([list(tokens) for tokens in self.tokens[0]])

    @precondition(lambda self: len(self.tables) == 2)
    @rule(data=st.data())
    def release(self, data):
        which = self.pick(data)
        self.tables.pop(which).release()
        self.tokens.pop(which)

    @invariant()
    def every_row_reads_what_it_wrote(self):
        for table, rows in zip(self.tables, self.tokens, strict=True):
            for row, tokens in enumerate(rows):
                first = table.first[row]
                assert first + len(table.rows[row]) == max(-(-len(tokens) // self.size), first)
                for position in range(first * self.size, len(tokens)):
                    block = table.rows[row][position // self.size - first]
                    assert self.memory[block, position % self.size] == tokens[position]

    @invariant()
    def owners_are_the_rows(self):
        if not self.tables:
            return
        held = [block for table in self.tables for row in table.rows for block in row]
        manager = self.group.manager
        assert manager.num_used == len(set(held))
        assert all(manager.owners(block) == held.count(block) for block in set(held))
        for table in self.tables:
            assert table.num_live_blocks == len({block for row in table.rows for block in row})

    @rule(data=st.data())
    def mirror_is_the_host(self, data):
        table = self.tables[self.pick(data)]
        mirror = table.tensor(CPU)
        assert mirror.dtype == torch.int32 and len(mirror) == len(table.rows)
        for row, (first, blocks) in enumerate(zip(table.first, table.rows, strict=True)):
            assert mirror[row, first : first + len(blocks)].tolist() == blocks


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestBlockTable = TableMachine.TestCase


@pytest.fixture
def group():
    return BlockPool(4).group(None)


def test_growing_row_stays_in_a_row(group):
    """Two rows that grow in turn, with room reserved: each stays one run that is read in place."""
    table = BlockTable(group, expected_length=40)
    lengths = [0, 0]
    for _ in range(40):
        grown = [n + 1 for n in lengths]
        table.grow(lengths, grown, [0, 0])
        lengths = grown
    for row in table.rows:
        assert row == list(range(row[0], row[0] + 10))


def test_copies_of_a_prompt_share_its_blocks(group):
    table = BlockTable(group)
    table.grow([0] * 4, [6] * 4, [0] * 4, copies_per_row=4)
    assert table.num_live_blocks == 2 and group.manager.num_used == 2 and group.manager.num_shared == 2
    pairs = table.grow([6] * 4, [7] * 4, [0] * 4)
    group.release([source for source, _ in pairs])
    # the last owner keeps the block, the three others copy it
    assert [source for source, _ in pairs] == [table.rows[3][1]] * 3
    assert len({row[0] for row in table.rows}) == 1 and len({row[1] for row in table.rows}) == 4
    assert group.copied_blocks == 3


def test_a_full_shared_block_is_not_copied(group):
    table = BlockTable(group)
    table.grow([0] * 2, [8] * 2, [0] * 2, copies_per_row=2)
    assert table.grow([8] * 2, [9] * 2, [0] * 2) == []


def test_window_gives_blocks_up(group):
    table = BlockTable(group)
    table.grow([0], [10], [0])
    table.grow([10], [11], [8])
    assert table.first == [2] and len(table.rows[0]) == 1 and group.manager.num_used == 1


def test_prompt_past_its_window_takes_only_what_stays(group):
    table = BlockTable(group)
    table.grow([0], [100], [97])
    assert table.first == [24] and group.manager.num_used == 1


def test_mirror_follows_on_the_same_tensor(group):
    """A decode step writes its few changes into the mirror; a new one is made only when it is too narrow."""
    table = BlockTable(group)
    table.grow([0], [4], [0])
    mirror = table.tensor(CPU)
    table.grow([4], [12], [0])
    assert table.tensor(CPU) is mirror
    table.grow([12], [4 * 200], [0])
    assert table.tensor(CPU).shape[1] >= 200


def test_rows_that_changed_places_in_inference_mode():
    """The device's table outlives that mode: a later step, outside of it, writes to it."""
    table = BlockTable(BlockPool(1).group(None))
    with torch.inference_mode():
        table.grow([0] * 4, [600] * 4, [0] * 4)
        table.tensor(CPU)
        table.select([1, 0, 2, 3])
    table.grow([600] * 4, [601] * 4, [0] * 4)
    assert table.tensor(CPU)[:, :601].tolist() == table.rows
