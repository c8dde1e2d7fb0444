"""The device tensors of blocks: they outlive a call, grow without moving, and can be given back."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ops.block_ids import SEGMENT_BITS, SEGMENT_MASK
from ..ops.dispatch import layer_addresses, move_kv, token_addresses, uses_triton
from ..ops.metadata import LayerKV, QuantizedKV
from ..ops.transfer import to_device
from .block_manager import BlockManager
from .prefix_index import PrefixIndex

#: A pool that must grow takes this share of itself beyond what is needed now: few segments, little slack.
GROWTH = 1 / 16
#: Slack that is more than that leaves others three quarters of what the device has free.
_SHARE_OF_FREE = 1 / 4
_MIN_SEGMENT = 8
#: An idle pool of more segments than this is made anew as one.
_MANY_SEGMENTS = 32


#: Blocks of each segment of each group.
PoolSize = Mapping["BlockGroup", Sequence[int]]


class BlockCopies:
    """Blocks to copy in every layer, `(from, to)`; none is both. The indices go to a device once, not once a layer."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        self._by_segment: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for source, target in pairs:
            segments = source >> SEGMENT_BITS, target >> SEGMENT_BITS
            self._by_segment[segments].append((source & SEGMENT_MASK, target & SEGMENT_MASK))
        self._on: dict[torch.device, dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]] = {}

    def on(self, device: torch.device) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
        """Per pair of segments, the blocks' indices in them, int64."""
        if device not in self._on:
            pairs = {segments: to_device(indices, device).T for segments, indices in self._by_segment.items()}
            self._on[device] = {segments: (both[0], both[1]) for segments, both in pairs.items()}
        return self._on[device]

    def copy_in(self, kv: LayerKV, device: torch.device) -> None:
        """Copies them in one layer, whose blocks are on this device."""
        for (from_segment, to_segment), (sources, targets) in self.on(device).items():
            for segments in (kv.k_segments, kv.v_segments):
                segments[to_segment].index_copy_(0, targets, segments[from_segment].index_select(0, sources))


class LayerStore:
    """The blocks of one layer: one K and one V tensor a segment, made when the layer first needs them.

    Args:
        key, value: `[batch, num_kv_heads, tokens, head_dim]`, as the layer computes them: their heads, sizes,
            dtype and device become the store's.
        block_size: tokens a block.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, block_size: int) -> None:
        self.device, self.dtype = key.device, key.dtype
        self.block_size = block_size
        self.num_kv_heads = key.shape[1]
        self.head_dims = self.sizes = (key.shape[3], value.shape[3])
        self.block_bytes = block_size * self.num_kv_heads * sum(self.head_dims) * self.dtype.itemsize
        self.kv: LayerKV | None = None
        self.version = -1  # of the segments that `kv` covers

    def matches(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether keys and values like these can be stored here."""
        heads_and_dims = (key.shape[1], (key.shape[3], value.shape[3]))
        return heads_and_dims == (self.num_kv_heads, self.head_dims) and (
            (key.dtype, key.device) == (self.dtype, self.device)
        )

    def cover(self, segment_sizes: list[int]) -> LayerKV:
        """Makes the tensors that are missing, drops those of dropped segments, and returns the layer's blocks.

        The caller holds the pool's lock. Other threads read `kv` without it: blocks in use are in it throughout.
        """
        old = ([], []) if self.kv is None else (list(self.kv.k_segments), list(self.kv.v_segments))
        kept = [len(t) == n for t, n in zip(old[0], segment_sizes, strict=False)]
        if self.kv is None or len(old[0]) != len(segment_sizes) or not all(kept):
            offsets = None if self.kv is None else self.kv.segment_offsets
            if not any(n for n, is_kept in zip(segment_sizes, kept, strict=False) if is_kept):
                self.kv = None  # no block is in use: what was dropped goes before anything new is made
            with torch.inference_mode(False):  # they outlive the call, and may be written to outside of that mode
                k, v = (self._segments(ts, segment_sizes, n) for ts, n in zip(old, self.sizes, strict=True))
                # Offsets stay where they are: captured kernels read them. But where the first segment goes, from which
                # they count, what is under way may still read the old ones.
                if offsets is not None and kept[:1] == [False]:
                    offsets = offsets.clone()
                self.kv = LayerKV.of(k, v, offsets)
        return self.kv

    def _segments(self, old: list[torch.Tensor], sizes: list[int], size: int) -> tuple[torch.Tensor, ...]:
        kept = [t if len(t) == n else None for t, n in zip(old, sizes, strict=False)]
        kept += [None] * (len(sizes) - len(kept))
        old.clear()
        return tuple(self._segment(n, size) if t is None else t for t, n in zip(kept, sizes, strict=True))

    def _segment(self, num_blocks: int, size: int) -> torch.Tensor:
        """The keys, or values, of so many blocks; `size` is one of `sizes`."""
        if self.device.type == "cpu":
            # Tokens outermost: blocks that lie in a row are one strided [heads, tokens, dim] view.
            shape = (num_blocks, self.block_size, self.num_kv_heads, size)
            return torch.empty(shape, dtype=self.dtype).transpose(1, 2)
        # Heads outermost within a block: the tile a program reads is one contiguous piece.
        shape = (num_blocks, self.num_kv_heads, self.block_size, size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class BlockGroup:
    """The layers that share block tables: those with the same sliding window.

    Args:
        block_size: tokens a block.
        sliding_window: how many tokens a query sees, itself included; None for all.
        lock: the pool's.
        index: the pool's, where blocks that nobody owns may be kept.
    """

    def __init__(
        self,
        block_size: int,
        sliding_window: int | None,
        lock: threading.RLock,
        index: PrefixIndex,
    ) -> None:
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.index = index
        self.manager = BlockManager()
        #: The share of itself that the group takes beyond what is needed when it grows. An engine's are larger: on a
        #: GPU a new segment is two allocations a layer, for which everybody waits.
        self.growth = GROWTH
        #: The newest store of each layer.
        self.stores: dict[int, LayerStore] = {}
        #: Whether fresh prompts are attended to through their blocks, which then must hold all of the prompt, also
        #: what is out of the window already. None: not known yet. Set by the attention function.
        self.prompts_read_blocks: bool | None = None
        self.stored_tokens = 0
        self.shared_tokens = 0  # that were there already: a prompt's copies
        self.peak_blocks = 0
        self.copied_blocks = 0
        self._addresses: tuple[Any, Any] | None = None  # of the layers that blocks were last copied in
        self._token_addresses: dict[torch.device, tuple[Any, Any]] = {}  # and tokens were last moved in
        self._lock = lock

    #: Of the group's blocks that are codes; None where none are.
    codes: BlockGroup | None = None

    @property
    def version(self) -> int:
        """Changes with the segments."""
        return self.manager.version

    @property
    def keeps_texts(self) -> bool:
        """Whether blocks may be kept for what they hold."""
        return self.index.is_on

    @property
    def needs_all(self) -> bool:
        """Whether a row has all blocks from its first token on."""
        return self.sliding_window is None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over the group's layers."""
        return sum([store.block_bytes for store in self.stores.values()])  # a list: the engine asks often

    def allocate(self, count: int, after: int | None = None, reserve: int = 0) -> list[int]:
        """Takes blocks, growing the group when it has too few. Arguments as in `BlockManager.allocate`."""
        with self._lock:
            self.ensure_free(count)
            ids = self.manager.allocate(count, after, reserve)
            self.peak_blocks = max(self.peak_blocks, self.manager.num_used)
            return ids

    def ensure_free(self, count: int) -> None:
        """Makes `count` blocks free: gives up cached ones, or grows, so that several rows' needs become one segment.

        It grows for blocks that, once they are cached, will fit beside those that are.
        """
        with self._lock:
            if count > self.manager.num_free:
                self.index.make_room(self, count - self.manager.num_free)
            missing = count - self.manager.num_free
            if missing <= 0:
                return
            total = self.manager.num_blocks
            if self.manager.num_free == total and len(self.manager.segment_sizes) >= _MANY_SEGMENTS:
                self.manager.drop_free_segments()
                self.manager.add_segment(total + missing)
            else:
                self.manager.add_segment(max(missing + self._slack(total), _MIN_SEGMENT))

    def _slack(self, total: int) -> int:
        """Blocks to take beyond those that are missing now."""
        least, most = int(total * GROWTH), int(total * self.growth)
        device = next((store.device for store in self.stores.values()), None)
        if most == least or device is None or device.type != "cuda":
            return most
        free, _ = torch.cuda.mem_get_info(device)
        return max(least, min(most, int(free * _SHARE_OF_FREE) // self.block_bytes))

    def retain(self, ids: list[int]) -> None:
        with self._lock:
            self.manager.retain(ids)

    def release(self, ids: list[int]) -> None:
        with self._lock:
            num_cached = self.manager.num_cached
            self.manager.release(ids)
            if self.manager.num_cached > num_cached:
                self.index.trim()

    def store_for(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerStore:
        """The store of a layer that computes such keys and values, `[batch, num_kv_heads, tokens, head_dim]`.

        A layer that changed (`model.to(...)`) gets a new store; caches that hold the old one keep it alive.
        """
        with self._lock:
            store = self.stores.get(layer_idx)
            if store is None or not store.matches(key, value):
                self.forget_content()
                store = self.stores[layer_idx] = self._new_store(layer_idx, key, value)
            return store

    def forget_content(self) -> None:
        """Keeps no block for what it holds: a layer's keys and values are about to lie in another store."""
        self.index.forget(self)

    def kv(self, store: LayerStore) -> LayerKV | QuantizedKV:
        """A store's blocks as the ops take them, with tensors for every segment."""
        return self.cover(store)

    def cover(self, store: LayerStore) -> LayerKV:
        """A store's blocks, with tensors for every segment."""
        is_current = store.version == self.manager.version  # looked at before `kv`, which is written before it
        kv = store.kv
        if kv is None or not is_current:
            with self._lock:
                kv = store.cover(self.manager.segment_sizes)
                store.version = self.manager.version
        return kv

    def copy_blocks(self, stores: Sequence[LayerStore], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks in these layers, `(from, to)`; none is both."""
        addresses = self._addresses_of(stores)
        if addresses is not None:
            addresses.copy(to_device(pairs, addresses.device, torch.int32))
            return
        at_once = BlockCopies(pairs)
        for store in stores:
            at_once.copy_in(self.cover(store), store.device)

    def copy_blocks_there(self, stores: Sequence[LayerStore], pairs: torch.Tensor) -> None:
        """The same for pairs that the host does not know, int32 `[pairs, 2]`; of equal ones nothing is copied."""
        addresses = self._addresses_of(stores)
        if addresses is not None:
            addresses.copy(pairs)
        else:
            self.copy_blocks(stores, [(a, b) for a, b in pairs.tolist() if a != b])

    def move_tokens(
        self,
        stores: Sequence[LayerStore],
        block_tables: torch.Tensor,
        bases: torch.Tensor,
        path: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Moves tokens within their rows in these layers, which are on one device; see `reference.move_kv`."""
        if not uses_triton(block_tables.device):
            move_kv([self.cover(store) for store in stores], block_tables, bases, path, counts)
            return
        key = (tuple(map(weakref.ref, stores)), self.manager.version)
        known = self._token_addresses.get(block_tables.device)
        if known is None or known[0] != key:
            known = (key, token_addresses([self.cover(store) for store in stores]))
            self._token_addresses[block_tables.device] = known
        known[1].move(block_tables, bases, path, counts)

    def _new_store(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerStore:
        return LayerStore(key, value, self.block_size)

    def _addresses_of(self, stores: Sequence[LayerStore]) -> Any:
        """Where these layers' blocks lie, for one kernel that copies in all of them; None without such a kernel."""
        if not stores or not uses_triton(stores[0].device):
            return None
        key = (tuple(map(weakref.ref, stores)), self.manager.version)
        known = self._addresses
        if known is None or known[0] != key:
            known = self._addresses = (key, layer_addresses([self.cover(store) for store in stores]))
        return known[1]

    def fill(self, value: float) -> None:
        """Writes `value` into every free block: for tests that look for stale reads."""
        with self._lock:
            for store in self.stores.values():
                kv = store.cover(self.manager.segment_sizes)
                for segment, flags in enumerate(self.manager.free_flags()):
                    free = torch.tensor([i for i, is_free in enumerate(flags) if is_free], device=store.device)
                    if len(free):
                        kv.k_segments[segment].index_fill_(0, free, value)
                        kv.v_segments[segment].index_fill_(0, free, value)

    def drop_free_memory(self, before: PoolSize | None = None) -> None:
        """Gives back the memory of segments whose blocks are all free.

        Args:
            before: segments that were there then stay.
        """
        with self._lock:
            self.manager.drop_free_segments((before or {}).get(self, ()))
            if not self.manager.segment_sizes:
                self.stores.clear()
            for store in self.stores.values():
                store.cover(self.manager.segment_sizes)


def by_device(stores: Sequence[LayerStore]) -> dict[torch.device, list[LayerStore]]:
    """The stores on each device."""
    found: dict[torch.device, list[LayerStore]] = {}
    for store in stores:
        found.setdefault(store.device, []).append(store)
    return found
