"""Which rows of the cache the running sequences hold, and what more would take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any

import torch

from ..cache.block_group import GROWTH
from ..cache.block_manager import BlockManager
from ..cache.block_pool import BlockPool
from ..cache.layer_group import LayerGroup
from ..ops.kv_format import WIDE_BEHIND, end_of_codes
from .forwards import RowForwards
from .limits import EngineLimits
from .request import Request, Sequence

#: The share of itself by which a group of blocks grows while an engine uses it.
_GROWTH = 1 / 2

#: Whether the model has changed is looked at before anything runs, and while something does once in so many seconds.
_LOOK_EVERY = 1.0


class CacheMemory:
    """The rows of a cache, each of which is one running sequence. Counts in bytes.

    Texts that have ended are kept for others that begin alike, as far as there is room for them.

    Args:
        model: a patched model.
        forwards: whose cache it is. It has computed something, so that the size of a block is known.
        limits: of the engine.
    """

    def __init__(self, model: Any, forwards: RowForwards, limits: EngineLimits) -> None:
        self._model, self._handle = model, model._hf_turbo
        self._forwards = forwards
        self._pool: BlockPool = forwards.cache.pool
        self._limits = limits
        self._size_before = self._pool.size
        #: Bytes of a block of each group, as of the beginning of the step.
        self._sizes: list[tuple[BlockManager, int]] = []
        for group in self._pool.all_groups():
            group.growth = _GROWTH
        self._keeps_texts = limits.prefix_cache
        #: Bytes that blocks in use may take, those of other caches on the model's pool included.
        self.capacity = _capacity(limits, [self._pool], forwards.device)
        #: What keys and values depend on beside the tokens: now, as of when, and when each request's were begun.
        self._domain: bytes | None = None
        self._looked_at: float | None = None
        self._domains: dict[Request, bytes | None] = {}
        #: The sequence of each row of the cache.
        self.rows: list[Sequence] = []
        self._measure()
        self.make_room()

    @property
    def used(self) -> int:
        """Bytes of blocks that somebody holds."""
        return sum([manager.num_used * size for manager, size in self._sizes])

    @property
    def available(self) -> int:
        return self.capacity - self.used

    @property
    def has_room_for_step(self) -> bool:
        """Whether every row surely has room for two more tokens."""
        return 2 * len(self.rows) * sum([size for _, size in self._sizes]) <= self.available

    def cost(self, sequence: Sequence, num_tokens: int) -> int:
        """Bytes that so many more tokens of a sequence take, at most.

        Of a block that the texts of one request share and are about to write to, the last of them keeps the original.
        """
        request, row, length = sequence.request, sequence.row, sequence.num_cached
        copies = len(request.sequences) > 1 and any(last is not sequence for last in request.live[-1:])
        total = 0
        for group in self._forwards.cache.groups.values():
            total += self._cost(group, row, length, num_tokens, copies)
        return total

    def costs(self, sequences: Many[Sequence]) -> list[int]:
        """What `cost` says of one more token of each of these: 0 for most, whose last block has room."""
        if any(group.table.codes is not None for group in self._forwards.cache.groups.values()):
            return [self.cost(sequence, 1) for sequence in sequences]
        size = self._pool.block_size
        return [
            0 if sequence.num_cached % size and sequence.request.num_sequences == 1 else self.cost(sequence, 1)
            for sequence in sequences
        ]

    def can_ever_hold(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether so many tokens of so many sequences fit with nothing else there."""
        groups = self._forwards.cache.groups.values()
        each = sum(self._cost(group, None, 0, num_tokens, copies=False) for group in groups)
        return each * num_sequences <= self.capacity

    def is_being_computed(self, request: Request) -> bool:
        """Whether a running request that is not after it computes blocks that a waiting one's prompt begins with."""
        if self._domain_of(request) is None:
            return False
        size = self._pool.block_size
        for sequence in self.rows:
            other = sequence.request
            if sequence.num_missing > 1 and other.salt == request.salt and other.priority >= request.priority:
                # The first block that is not there yet, and with it all before.
                end = sequence.num_cached // size * size + size
                if end < len(request.prompt) and other.prompt[:end] == request.prompt[:end]:
                    return True
        return False

    def find(self, request: Request) -> int:
        """Gives a request's sequences rows of the cache; how many tokens of the first one were there already."""
        self._add(request.live)
        domain = self._domains[request] = self._domain_of(request)
        if domain is None:
            return 0
        for sequence in request.live:
            found = self._forwards.cache.find_prefix(sequence.held_row, sequence.tokens, domain)
            sequence.num_cached = found
        return request.live[0].num_cached

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """Has the full blocks of these sequences kept, once nobody holds them, for texts that begin alike."""
        for sequence in sequences:
            domain = self._domains.get(sequence.request)
            # Of a model that has changed meanwhile, some of the keys and values are of what it was.
            if domain is not None and sequence.row is not None and domain == self._domain_of(sequence.request):
                self._forwards.cache.register_prefix(sequence.row, sequence.tokens[: sequence.num_cached], domain)

    def make_room(self) -> None:
        """Lets what is kept take what nobody uses, and no more: before blocks are taken, and after."""
        if self._keeps_texts:
            self._pool.let_keep(max(self.available, 1))  # 0 would say that nothing is ever kept

    def share_with(self, pool: BlockPool) -> int:
        """Leaves a draft model's blocks their part of the memory, with room for as many tokens; how many bytes.

        Where texts share blocks, more of them fit here than there: then some go without drafts.

        Args:
            pool: of the draft model, which has computed something. It is on the same device.
        """
        mine, its = _block_bytes(self._pool) * pool.block_size, _block_bytes(pool) * self._pool.block_size
        if self._limits.num_blocks is None:
            both = _capacity(self._limits, [self._pool, pool], self._forwards.device)
            self.capacity = both * mine // (mine + its)
        return self.capacity * its // mine

    def look(self) -> None:
        """Before every step: looks now and then whether the model has changed, without a wait for the device.

        Once a second all that the host can see is compared at once, and one element of each weight is sent for. It has
        come before the step after the next, which compares it. So what has been computed or begun before a change is
        not found by requests that begin a second and two steps after it, or later, and is not kept from then on. (Those
        that begin in between may be given keys of both models.) Before the first of the running requests begins, and
        after a pause, a look waits: then nothing of before a change is found.
        """
        self._measure()
        if not self._keeps_texts or self._looked_at is None or time.monotonic() - self._looked_at < _LOOK_EVERY:
            return
        self._domain = self._handle.prefix_domain(self._model, waits=False)
        if not self._handle.version.is_looking:
            self._looked_at = time.monotonic()

    def look_again(self) -> None:
        """The model may have changed."""
        self._looked_at = None

    def close(self) -> None:
        """Gives up what is kept, and the memory that has been taken since."""
        for group in self._pool.all_groups():
            group.growth = GROWTH
        self._pool.let_keep(0)
        self._pool.shrink(self._size_before)

    def fork(self, request: Request) -> None:
        """Gives the further sequences of a request rows with the blocks of its first one."""
        first, *others = request.sequences
        if not others or first.row is None:
            return
        rows = list(range(len(self.rows))) + [first.row] * len(others)
        self._forwards.cache.select_rows(rows)
        for sequence in others:
            sequence.row = len(self.rows)
            self.rows.append(sequence)

    def release(self, request: Request) -> None:
        """Gives up all that a request holds."""
        self.leave(request.sequences)
        self._domains.pop(request, None)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Gives up the rows of these sequences. The last rows move to where they were: the others stay in place."""
        gone = [sequence for sequence in sequences if sequence.row is not None]
        if not gone:
            return
        self.keep(gone)
        if self._keeps_texts:
            self._pool.let_keep(self.capacity)  # what they give up can be found until others take it
        rows = {sequence.row for sequence in gone}
        kept = [row for row in range(len(self.rows)) if row not in rows]
        order = list(range(len(kept)))
        holes = [row for row in order if row in rows]
        for hole, row in zip(holes, kept[::-1], strict=False):
            order[hole] = row
        if order:
            self._forwards.cache.select_rows(order)
        else:
            self._forwards.renew()
            self.look_again()
        self.rows = [self.rows[row] for row in order]
        for row, sequence in enumerate(self.rows):
            sequence.row = row
        for sequence in gone:
            sequence.row, sequence.num_cached = None, 0

    def _measure(self) -> None:
        """Adds up the layers' parts of a block: now, as it is asked for many times a step."""
        self._sizes = [(group.manager, group.block_bytes) for group in self._pool.all_groups()]

    def _add(self, sequences: list[Sequence]) -> None:
        self._forwards.cache.add_rows(len(sequences))
        for sequence in sequences:
            sequence.row = len(self.rows)
            self.rows.append(sequence)

    def _domain_of(self, request: Request) -> bytes | None:
        """What a request's keys and values depend on beside its tokens; None: nothing is looked up or kept."""
        if not self._keeps_texts:
            return None
        if self._looked_at is None:
            self._domain, self._looked_at = self._handle.prefix_domain(self._model), time.monotonic()
        if self._domain is None or not request.salt:
            return self._domain
        return self._domain + b" " + request.salt.encode()

    def _cost(self, group: LayerGroup, row: int | None, length: int, num_tokens: int, copies: bool) -> int:
        table, blocks = group.table, group.table.group
        held, is_shared = 0, False
        if row is not None and row < len(table.rows):
            held = table.first[row] + len(table.rows[row])
            if table.codes is None and not copies and length + num_tokens <= held * blocks.block_size:
                return 0
            writes_to_last = bool(copies and length % blocks.block_size and table.rows[row])
            is_shared = writes_to_last and blocks.manager.is_shared(table.rows[row][-1])
        missing = max(table.num_blocks(length + num_tokens) - held, 0)
        if group.sliding_window is not None:
            missing = min(missing, table.num_blocks(group.sliding_window + self._limits.max_tokens) + 1)
        if table.codes is None:
            return (missing + is_shared) * blocks.block_bytes
        codes, size = table.codes, blocks.block_size
        coded = codes.first[row] + len(codes.rows[row]) if row is not None and row < len(codes.rows) else 0
        num_codes = max(end_of_codes(length + num_tokens, size) - coded, 0)
        missing = min(missing, table.num_blocks(self._limits.max_tokens) + 2 + WIDE_BEHIND)
        return (missing + is_shared) * blocks.block_bytes + num_codes * codes.group.block_bytes


def _capacity(limits: EngineLimits, pools: Many[BlockPool], device: torch.device) -> int:
    """Bytes that blocks in use may take: so many blocks of every group of layers, or a part of the free memory.

    Args:
        pools: whose blocks' sizes are known.
    """
    groups = [group for pool in pools for group in pool.all_groups()]
    if limits.num_blocks is not None:
        return limits.num_blocks * sum(group.block_bytes for group in groups)
    there = sum(group.manager.num_blocks * group.block_bytes for group in groups)
    return there + int(_free_memory(device) * limits.max_memory_percent)


def _block_bytes(pool: BlockPool) -> int:
    """Bytes that `block_size` tokens of a long text take, without what leaves windows."""
    return sum((group.codes or group).block_bytes for group in pool.groups.values())


def _free_memory(device: torch.device) -> int:
    """Bytes that nobody uses, those included that PyTorch keeps for later."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
