"""Which blocks hold which tokens: what is kept of texts whose owners are gone. Plain Python: no torch.

A text's full blocks are a path in a tree: an entry is a block's tokens after its parent's, from a root that stands for
all else that keys and values depend on. An entry is looked up by a hash that covers its parent's (as a chain), and what
is found is compared, parent and tokens. So which hash function it is decides about speed alone. The same tree serves
all groups of layers: an entry says which block of each has its keys and values, if any.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from .block_manager import BlockManager

HashFunction = Callable[[int, bytes], int]


class Part(Protocol):
    """Blocks of one kind: those of a `BlockGroup`."""

    manager: BlockManager

    @property
    def needs_all(self) -> bool:
        """Whether a block is of no use without those of all entries before its own."""

    @property
    def block_bytes(self) -> int: ...


class Entry:
    """The tokens of one full block, after those of its parent.

    Args:
        parent: the entry before it; None for a root.
        key: its hash.
        content: its tokens; of a root, the domain.
    """

    __slots__ = ("blocks", "children", "content", "key", "parent")

    def __init__(self, parent: Entry | None, key: int, content: bytes) -> None:
        self.parent, self.key, self.content = parent, key, content
        self.blocks: dict[Part, int] = {}
        self.children: set[Entry] = set()


def keyed_hash(parent: int, content: bytes) -> int:
    """Python's own: bytes are hashed with a secret of the process (SipHash): nobody can choose texts that collide."""
    return hash((parent, content))


class PrefixIndex:
    """Full blocks by what they hold. Blocks in it are kept when their last owner goes, up to a number of bytes.

    Not thread-safe: its owner holds a lock.

    Args:
        block_size: tokens a block.
        limit: bytes of cached blocks, those without owners; 0: nothing is entered.
        hash_function: of a parent's hash and a block's tokens.
    """

    def __init__(self, block_size: int, limit: int, hash_function: HashFunction = keyed_hash) -> None:
        self.block_size = block_size
        self.limit = limit
        self._hash = hash_function
        self._by_key: dict[int, list[Entry]] = {}
        self._parts: dict[Part, dict[int, Entry]] = {}
        self.tokens_asked = 0
        self.tokens_found = 0
        self.num_evicted = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.limit > 0

    @property
    def cached_bytes(self) -> int:
        """Of blocks that nobody owns."""
        return sum(part.manager.num_cached * part.block_bytes for part in self._parts)

    @property
    def num_entries(self) -> int:
        return sum(map(len, self._by_key.values()))

    def find(self, domain: bytes, tokens: Sequence[int]) -> list[Entry]:
        """The entries of a text's first full blocks, as far as they are known; not each has blocks of every part."""
        entry = self._child(None, domain)
        path: list[Entry] = []
        for content in self._contents(tokens):
            entry = None if entry is None else self._child(entry, content)
            if entry is None:
                break
            path.append(entry)
        return path

    def add(self, domain: bytes, tokens: Sequence[int], held: Iterable[tuple[Part, int, int]]) -> None:
        """Enters blocks that somebody owns, unless equal ones are there.

        Args:
            domain: all else that keys and values depend on.
            tokens: of the text.
            held: `(part, index in the text, block)` of full blocks that hold their tokens' keys and values.
        """
        if not self.is_on:
            return
        new: dict[int, list[tuple[Part, int]]] = {}
        last_known: dict[int, Entry] = {}
        for part, index, block in held:
            known = self._parts.get(part, {}).get(block)
            if known is None:
                new.setdefault(index, []).append((part, block))
            else:
                last_known[index] = known
        if not new:
            return
        # A block is known after those before it: a text that has grown goes on where it was entered last.
        first = min(new)
        entry = last_known.get(first - 1)
        if entry is None:
            entry, first = self._child(None, domain) or self._new(None, domain), 0
        size = self.block_size
        for index, content in enumerate(self._contents(tokens[first * size : (max(new) + 1) * size]), first):
            entry = self._child(entry, content) or self._new(entry, content)
            for part, block in new.get(index, ()):
                self._put(entry, part, block)
        self._prune(entry)

    def make_room(self, part: Part, missing: int) -> None:
        """Makes cached blocks of a part free, the oldest first, where so many new ones are missing.

        Not for those of the new ones that, once they are cached, will fit beside those that are.
        """
        unused = max(self.limit - self.cached_bytes, 0)
        count = missing - (unused // part.block_bytes if part.block_bytes else missing)
        wanted = part.manager.num_free + min(count, part.manager.num_cached)
        while part.manager.num_free < wanted:
            self._evict_oldest(part)

    def trim(self) -> None:
        """Gives up the oldest cached blocks of all parts until the others are within the limit."""
        sizes = {part: part.block_bytes for part in self._parts}
        while sum(part.manager.num_cached * size for part, size in sizes.items()) > self.limit:
            self._evict_oldest(min((part for part in sizes if part.manager.num_cached), key=_age))

    def forget(self, part: Part) -> None:
        """Takes all of a part's blocks out: what they held is gone."""
        for entry in list(self._parts.get(part, {}).values()):
            self._drop(part, entry)

    def clear(self) -> None:
        """Takes everything out."""
        for part in list(self._parts):
            self.forget(part)

    def _contents(self, tokens: Sequence[int]) -> Iterator[bytes]:
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            yield array("q", tokens[end - self.block_size : end]).tobytes()

    def _key(self, parent: Entry | None, content: bytes) -> int:
        return self._hash(0 if parent is None else parent.key, content)

    def _child(self, parent: Entry | None, content: bytes) -> Entry | None:
        """The entry with this content after `parent`; the root of this domain where there is no parent."""
        for entry in self._by_key.get(self._key(parent, content), ()):
            if entry.parent is parent and entry.content == content:
                return entry
        return None

    def _new(self, parent: Entry | None, content: bytes) -> Entry:
        entry = Entry(parent, self._key(parent, content), content)
        if parent is not None:
            parent.children.add(entry)  # first: from here on the parent stays, whatever the garbage collector lets go
        self._by_key.setdefault(entry.key, []).append(entry)
        return entry

    def _put(self, entry: Entry, part: Part, block: int) -> None:
        entries = self._parts.setdefault(part, {})
        if part not in entry.blocks and block not in entries:
            part.manager.keep(block)
            entry.blocks[part], entries[block] = block, entry

    def _evict_oldest(self, part: Part) -> None:
        oldest = part.manager.oldest_cached
        if oldest is not None:
            before = part.manager.num_cached
            self._drop(part, self._parts[part][oldest[1]])
            self.num_evicted += before - part.manager.num_cached

    def _drop(self, part: Part, first: Entry) -> None:
        """Takes a block out, with those that are of no use without it."""
        waiting, dropped = [first], []
        while waiting:
            entry = waiting.pop()
            block = entry.blocks.pop(part, None)
            if block is None:
                continue
            del self._parts[part][block]
            part.manager.forget(block)
            dropped.append(entry)
            if part.needs_all:
                waiting += entry.children
        for entry in reversed(dropped):
            self._prune(entry)

    def _prune(self, last: Entry) -> None:
        """Removes an entry that says nothing any more, and those before it of which that is true then."""
        entry: Entry | None = last
        while entry is not None and not entry.blocks and not entry.children:
            alike = self._by_key.get(entry.key, [])
            if entry not in alike:
                return  # it was removed before
            alike.remove(entry)
            if not alike:
                del self._by_key[entry.key]
            if entry.parent is not None:
                entry.parent.children.discard(entry)
            entry = entry.parent


def _age(part: Part) -> int:
    """When a part's oldest cached block was given up."""
    oldest = part.manager.oldest_cached
    return 0 if oldest is None else oldest[0]
