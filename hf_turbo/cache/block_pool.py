"""All blocks of one patched model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .block_group import BlockGroup, PoolSize
from .coded_group import CodedGroup
from .prefix_index import PrefixIndex

#: Formats that not all keys can take, and what a layer's are kept as until it is settled whether they can.
_UNTIL_SETTLED = {"int4": "int8", "fp8": "int8"}

#: Layers that see no more tokens hold no more: of them 4 bits spare little, and cost as much as elsewhere, and float8
#: spares nothing. Gemma-3-270m, same best token with all layers in one format and with those of windows of 512 in int8:
#: int4, 2,048 tokens, 0.958 and 0.979; fp8, 32,768 tokens, 0.989 and 0.992.
_SHORT_WINDOW = 1024


class BlockPool:
    """All blocks of one patched model. Copies and pickles as an empty pool of the same options.

    Args:
        block_size: tokens a block.
        kv_cache_dtype: what older blocks are kept as, a name of `KV_FORMATS`; None: what the model computes.
        formats: layer -> the name of its format, once that is settled; see `CodedGroup.settle`.
        cache_limit: bytes of blocks that nobody owns and that are kept for texts that begin alike; 0: none are.
    """

    def __init__(
        self,
        block_size: int,
        kv_cache_dtype: str | None = None,
        formats: dict[int, str] | None = None,
        cache_limit: int = 0,
    ) -> None:
        self.block_size = block_size
        self.kv_cache_dtype = kv_cache_dtype
        self.formats: dict[int, str] = dict(formats or {})
        self.groups: dict[int | None, BlockGroup] = {}
        #: What is kept; to be used within `lock` only.
        self.index = PrefixIndex(block_size, cache_limit)
        self.cache_limit = cache_limit
        self.lock = threading.RLock()

    def group(self, sliding_window: int | None) -> BlockGroup:
        """The group of layers with this window; made when asked for first."""
        with self.lock:
            if sliding_window not in self.groups:
                self.groups[sliding_window] = self._new_group(sliding_window)
            return self.groups[sliding_window]

    def protect_short_windows(self, sliding_windows: Sequence[int | None]) -> None:
        """Has layers that see few tokens kept as what all keys can take; of each layer its window."""
        if self.kv_cache_dtype in _UNTIL_SETTLED:
            short = [i for i, window in enumerate(sliding_windows) if window is not None and window <= _SHORT_WINDOW]
            self.formats.update(dict.fromkeys(short, _UNTIL_SETTLED[self.kv_cache_dtype]))

    def all_groups(self) -> list[BlockGroup]:
        """The groups of all windows, and those of their codes."""
        groups = list(self.groups.values())
        return groups + [group.codes for group in groups if group.codes is not None]

    def is_settled(self, layer_idx: int) -> bool:
        """Whether a layer's format is what it will be."""
        return self.kv_cache_dtype not in _UNTIL_SETTLED or layer_idx in self.formats

    @property
    def protected_layers(self) -> dict[int, str]:
        """Layers that are kept in another format than was asked for."""
        return {layer: name for layer, name in self.formats.items() if name != self.kv_cache_dtype}

    def let_keep(self, num_bytes: int) -> None:
        """Keeps so many bytes of blocks that nobody owns, or what the pool was made with, if that is more."""
        with self.lock:
            before, self.index.limit = self.index.limit, max(num_bytes, self.cache_limit)
            if self.index.limit < before:
                self.index.trim()

    @property
    def size(self) -> PoolSize:
        """Blocks of each segment of each group."""
        return {group: group.manager.segment_sizes for group in self.all_groups()}

    def shrink(self, before: PoolSize) -> None:
        """Gives back the memory of free blocks that has been taken since the pool had this size."""
        for group in list(self.groups.values()):
            group.drop_free_memory(before)

    def release(self) -> None:
        """Gives back the memory of blocks that no cache holds, those included that are kept for what they hold."""
        with self.lock:
            self.index.clear()
        for group in list(self.groups.values()):
            group.drop_free_memory()

    def _new_group(self, sliding_window: int | None) -> BlockGroup:
        if self.kv_cache_dtype is None:
            return BlockGroup(self.block_size, sliding_window, self.lock, self.index)
        wanted = self.kv_cache_dtype
        default = _UNTIL_SETTLED.get(wanted, wanted)
        return CodedGroup(self.block_size, sliding_window, self.lock, self.formats, wanted, default, self.index)

    def __reduce__(self) -> tuple[type[BlockPool], tuple[Any, ...]]:
        return BlockPool, (self.block_size, self.kv_cache_dtype, self.formats, self.cache_limit)
