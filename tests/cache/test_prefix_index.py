"""The index of what blocks hold against a plain list of it: it finds what was entered, and nothing else."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_turbo.cache.block_manager import BlockManager
from hf_turbo.cache.prefix_index import PrefixIndex, keyed_hash

HASHES = {"keyed": keyed_hash, "constant": lambda parent, content: 0, "two values": lambda parent, content: parent ^ 1}
SIZE = 2
TEXTS = st.lists(st.integers(0, 1), max_size=9)
DOMAINS = st.sampled_from([b"a", b"b", b""])


class Part:
    """Blocks of one kind, of which there are enough."""

    def __init__(self, needs_all: bool, block_bytes: int) -> None:
        self.needs_all, self.block_bytes = needs_all, block_bytes
        self.manager = BlockManager()
        self.manager.add_segment(500)


class IndexMachine(RuleBasedStateMachine):
    """`entered[part][path]`: a block, where a path is a domain and tokens. `idle`: (part, path), the oldest first."""

    @initialize(name=st.sampled_from(sorted(HASHES)), limit=st.sampled_from([1, 30, 1000]))
    def begin(self, name, limit):
        self.parts = [Part(True, 3), Part(False, 5)]
        self.index = PrefixIndex(SIZE, limit, HASHES[name])
        self.entered = [{}, {}]
        self.idle: list[tuple[int, tuple]] = []
        self.rows: list[tuple[int, list[int]]] = []  # what somebody holds: part, blocks
        self.num_evicted = 0

    def path_of(self, part: int, block: int):
        return next((path for path, held in self.entered[part].items() if held == block), None)

    def take_out(self, part: int, path: tuple) -> None:
        """With those that follow it, where a part needs all blocks."""

        def goes(other):
            longer = other[0] == path[0] and other[1][: len(path[1])] == path[1]
            return other == path or (longer and self.parts[part].needs_all)

        for other in [other for other in self.entered[part] if goes(other)]:
            del self.entered[part][other]
            self.idle = [place for place in self.idle if place != (part, other)]

    def bytes_idle(self) -> int:
        return sum(self.parts[part].block_bytes for part, _ in self.idle)

    @rule(domain=DOMAINS, tokens=TEXTS, first=st.integers(0, 3))
    def enter(self, domain, tokens, first):
        """A row of each part, the second of which has lost its first blocks."""
        held = []
        for part, start in ((0, 0), (1, first)):
            places = range(start, len(tokens) // SIZE)
            blocks = self.parts[part].manager.allocate(len(places))
            self.rows.append((part, blocks))
            held += [(self.parts[part], place, block) for place, block in zip(places, blocks, strict=True)]
            for place, block in zip(places, blocks, strict=True):
                path = (domain, tuple(tokens[: (place + 1) * SIZE]))
                self.entered[part].setdefault(path, block)
        self.index.add(domain, tokens, held)

    @rule(domain=DOMAINS, tokens=TEXTS)
    def find(self, domain, tokens):
        found = self.index.find(domain, tokens)
        for end, entry in enumerate(found, start=1):
            path = (domain, tuple(tokens[: end * SIZE]))
            for part, known in zip(self.parts, self.entered, strict=True):
                assert entry.blocks.get(part) == known.get(path)
        known = {path for known in self.entered for path in known}
        deepest = max((len(t) for d, t in known if d == domain and t == tuple(tokens[: len(t)])), default=0)
        assert len(found) * SIZE >= deepest

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def give_up(self, data):
        part, blocks = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        manager = self.parts[part].manager
        manager.release(blocks)
        for block in blocks[::-1]:
            path = self.path_of(part, block)
            if path is not None and not manager.owners(block):
                self.idle.append((part, path))
        self.index.trim()
        before = len(self.idle)
        while self.bytes_idle() > self.index.limit:
            self.take_out(*self.idle[0])
        self.num_evicted += before - len(self.idle)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def own_again(self, data):
        part, path = data.draw(st.sampled_from(self.idle))
        block = self.entered[part][path]
        self.parts[part].manager.retain([block])
        self.idle.remove((part, path))
        self.rows.append((part, [block]))

    @rule(part=st.integers(0, 1), missing=st.integers(0, 4))
    def make_room(self, part, missing):
        self.index.make_room(self.parts[part], missing)
        before, size = len(self.idle), self.parts[part].block_bytes
        too_many = missing
        while too_many and self.bytes_idle() + (missing - too_many + 1) * size <= self.index.limit:
            too_many -= 1
        while before - len(self.idle) < too_many and any(p == part for p, _ in self.idle):
            self.take_out(*next(place for place in self.idle if place[0] == part))
        self.num_evicted += before - len(self.idle)

    @rule(part=st.integers(0, 1), everything=st.booleans())
    def forget(self, part, everything):
        for one in range(2):
            if everything or one == part:
                self.entered[one].clear()
                self.idle = [place for place in self.idle if place[0] != one]
        if everything:
            self.index.clear()
            assert self.index.num_entries == 0
        else:
            self.index.forget(self.parts[part])

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "index"):
            return
        for number, part in enumerate(self.parts):
            held = {block for part_of_row, blocks in self.rows if part_of_row == number for block in blocks}
            assert part.manager.num_used == len(held)
            assert part.manager.num_cached == sum(p == number for p, _ in self.idle)
        assert self.index.cached_bytes == self.bytes_idle() <= self.index.limit
        assert self.index.num_evicted == self.num_evicted
        paths = {path for known in self.entered for path in known}
        alive = {(d, t[:end]) for d, t in paths for end in range(0, len(t) + 1, SIZE)}
        assert self.index.num_entries == len(alive), "entries stay that lead nowhere"


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPrefixIndex = IndexMachine.TestCase


def filled(text: list[int], limit: int = 100, hash_function=keyed_hash):
    part = Part(True, 1)
    index = PrefixIndex(SIZE, limit, hash_function)
    blocks = part.manager.allocate(len(text) // SIZE)
    index.add(b"", text, [(part, place, block) for place, block in enumerate(blocks)])
    return index, part, blocks


@pytest.mark.parametrize("name", HASHES)
def test_the_parent_is_part_of_what_is_compared(name):
    """Equal tokens after others are another block, whatever the hash function says."""
    index, part, blocks = filled([1, 2, 3, 4], hash_function=HASHES[name])
    assert [entry.blocks[part] for entry in index.find(b"", [1, 2, 3, 4, 5])] == blocks
    assert index.find(b"", [3, 4, 3, 4]) == index.find(b"other", [1, 2, 3, 4]) == index.find(b"", [3, 4]) == []
    assert len(index.find(b"", [1, 2, 1, 2])) == 1


def test_the_last_block_that_is_not_full_is_not_there():
    index, _, blocks = filled([1, 2, 3])
    assert len(blocks) == 1 and len(index.find(b"", [1, 2, 3, 4])) == 1


def test_later_blocks_of_a_text_go_first():
    index, part, blocks = filled(list(range(8)), limit=4)
    part.manager.release(blocks)
    for left in (4, 3, 2, 1):
        index.limit = left
        index.trim()
        assert [entry.blocks[part] for entry in index.find(b"", list(range(8)))] == blocks[:left]


def test_the_text_that_was_used_last_stays():
    index, part, first = filled([1, 1])
    [second] = part.manager.allocate(1)
    index.add(b"", [2, 2], [(part, 0, second)])
    part.manager.release(first)
    part.manager.release([second])
    part.manager.retain(first)
    part.manager.release(first)
    index.limit = 1
    index.trim()
    assert index.find(b"", [1, 1]) and not index.find(b"", [2, 2])


def test_a_block_with_owners_is_never_given_up():
    index, part, _ = filled([1, 2, 3, 4], limit=1)
    index.trim()
    index.make_room(part, 10)
    assert len(index.find(b"", [1, 2, 3, 4])) == 2 and part.manager.num_used == 2


def test_without_a_limit_nothing_is_entered():
    index, part, blocks = filled([1, 2, 3, 4], limit=0)
    part.manager.release(blocks)
    assert index.find(b"", [1, 2, 3, 4]) == [] and part.manager.num_cached == index.num_entries == 0
