"""All blocks of one patched model."""

from __future__ import annotations

import threading
from typing import Any

from .block_group import BlockGroup
from .coded_group import CodedGroup

#: Formats that not all keys can take, and what a layer's are kept as until it is settled whether they can.
_UNTIL_SETTLED = {"int4": "int8", "fp8": "int8"}


class BlockPool:
    """All blocks of one patched model. Copies and pickles as an empty pool of the same options.

    Args:
        block_size: tokens a block.
        kv_cache_dtype: what older blocks are kept as, a name of `KV_FORMATS`; None: what the model computes.
        formats: layer -> the name of its format, once that is settled; see `CodedGroup.settle`.
    """

    def __init__(
        self, block_size: int, kv_cache_dtype: str | None = None, formats: dict[int, str] | None = None
    ) -> None:
        self.block_size = block_size
        self.kv_cache_dtype = kv_cache_dtype
        self.formats: dict[int, str] = dict(formats or {})
        self.groups: dict[int | None, BlockGroup] = {}
        self._lock = threading.RLock()

    def group(self, sliding_window: int | None) -> BlockGroup:
        """The group of layers with this window; made when asked for first."""
        with self._lock:
            if sliding_window not in self.groups:
                self.groups[sliding_window] = self._new_group(sliding_window)
            return self.groups[sliding_window]

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

    def release(self) -> None:
        """Gives back the memory of blocks that no cache holds."""
        for group in list(self.groups.values()):
            group.drop_free_memory()

    def _new_group(self, sliding_window: int | None) -> BlockGroup:
        if self.kv_cache_dtype is None:
            return BlockGroup(self.block_size, sliding_window, self._lock)
        wanted = self.kv_cache_dtype
        return CodedGroup(
            self.block_size, sliding_window, self._lock, self.formats, wanted, _UNTIL_SETTLED.get(wanted, wanted)
        )

    def __reduce__(self) -> tuple[type[BlockPool], tuple[Any, ...]]:
        return BlockPool, (self.block_size, self.kv_cache_dtype, self.formats)
