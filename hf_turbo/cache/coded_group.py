"""The blocks of a cache whose older blocks are codes: wide ones and codes, each with a manager of their own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..ops import dispatch
from ..ops.kv_format import KV_FORMATS, KVFormat
from ..ops.metadata import QuantizedKV
from ..ops.transfer import to_device
from .block_group import BlockGroup, LayerStore, PoolSize, by_device
from .prefix_index import PrefixIndex

#: What free code blocks are filled with where others get NaN: their scales are NaN then.
_POISON = 0xFF


class CodeStore(LayerStore):
    """The codes of one layer: one uint8 tensor for K and one for V a segment, `[blocks, num_kv_heads, bytes]`.

    Args:
        key, value, block_size: as of `LayerStore`.
        fmt: of the codes.

    Raises:
        NotImplementedError: the format does not hold such heads.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, block_size: int, fmt: KVFormat) -> None:
        super().__init__(key, value, block_size)
        if any(dim % fmt.parts for dim in self.head_dims):
            raise NotImplementedError(
                f"kv_cache_dtype={fmt.name!r} takes head sizes that are multiples of {fmt.parts}; a layer has keys of "
                f"{self.head_dims[0]} and values of {self.head_dims[1]}: patch the model without it"
            )
        self.format = fmt
        k_dim, v_dim = self.head_dims
        self.sizes = (fmt.key_bytes(block_size, k_dim), fmt.value_bytes(block_size, v_dim))
        self.block_bytes = self.num_kv_heads * sum(self.sizes)

    def _segment(self, num_blocks: int, size: int) -> torch.Tensor:
        return torch.empty(num_blocks, self.num_kv_heads, size, dtype=torch.uint8, device=self.device)


class CodedStore(LayerStore):
    """The wide blocks of one layer, and its codes."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, block_size: int, fmt: KVFormat) -> None:
        super().__init__(key, value, block_size)
        self.codes = CodeStore(key, value, block_size, fmt)


class CodedGroup(BlockGroup):
    """The wide blocks of layers with one sliding window; `codes` is the group of their codes.

    Args:
        block_size, sliding_window, lock, index: as of `BlockGroup`.
        formats: layer -> name of its format, the pool's; written by `settle`.
        wanted: name of the format that was asked for.
        default: name of the format of layers that are not in `formats`.
    """

    codes: BlockGroup

    def __init__(
        self,
        block_size: int,
        sliding_window: int | None,
        lock: threading.RLock,
        formats: dict[int, str],
        wanted: str,
        default: str,
        index: PrefixIndex,
    ) -> None:
        super().__init__(block_size, sliding_window, lock, index)
        self.codes = BlockGroup(block_size, sliding_window, lock, index)
        self.wanted = wanted
        self._formats, self._default = formats, default
        self._code_addresses: dict[torch.device, tuple[Any, Any]] = {}  # of the layers that blocks were last coded in

    @property
    def version(self) -> int:
        return self.manager.version + self.codes.manager.version

    @property
    def needs_all(self) -> bool:
        return False  # most of a row's blocks are codes

    def forget_content(self) -> None:
        super().forget_content()
        self.codes.forget_content()

    def kv(self, store: LayerStore) -> QuantizedKV:
        """A store's blocks of both kinds, with tensors for every segment."""
        if not self.codes.manager.segment_sizes:  # a kernel takes the address of the first
            self.codes.ensure_free(1)
        codes = store.codes  # type: ignore[attr-defined]  # all stores here are `CodedStore`s
        return QuantizedKV(self.cover(store), self.codes.cover(codes), codes.format)

    def is_settled(self, layer_idx: int) -> bool:
        """Whether a layer's format is what it will be."""
        return self._default == self.wanted or layer_idx in self._formats

    def settle(self, layer_idx: int, name: str) -> None:
        """Makes `name` the layer's format. Caches that hold its present store go on with that."""
        with self._lock:
            self._formats[layer_idx] = name
            store = self.stores.get(layer_idx)
            if isinstance(store, CodedStore) and store.codes.format.name != name:
                self.forget_content()
                del self.stores[layer_idx]

    def quantize_blocks(self, stores: Sequence[LayerStore], pairs: list[tuple[int, int]]) -> None:
        """Writes wide blocks as codes in these layers, `(wide id, code id)`."""
        for device, alike in by_device(stores).items():
            if dispatch.uses_triton(device):
                self._code_addresses_of(device, alike).quantize(to_device(pairs, device, torch.int32))
            else:
                dispatch.quantize_blocks([self.kv(store) for store in alike], pairs)

    def dequantize_blocks(self, stores: Sequence[LayerStore], pairs: list[tuple[int, int]]) -> None:
        """Writes codes as wide blocks in these layers, `(code id, wide id)`."""
        for device, alike in by_device(stores).items():
            if dispatch.uses_triton(device):
                self._code_addresses_of(device, alike).dequantize(to_device(pairs, device, torch.int32))
            else:
                dispatch.dequantize_blocks([self.kv(store) for store in alike], pairs)

    def fill(self, value: float) -> None:
        super().fill(value)
        self.codes.fill(_POISON)

    def drop_free_memory(self, before: PoolSize | None = None) -> None:
        with self._lock:
            super().drop_free_memory(before)
            self.codes.manager.drop_free_segments((before or {}).get(self.codes, ()))
            if not self.stores:  # while a wide store is there, its codes are to be found
                self.codes.stores.clear()
            for store in self.codes.stores.values():
                if store.kv is not None:
                    store.cover(self.codes.manager.segment_sizes)

    def _new_store(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerStore:
        fmt = KV_FORMATS[self._formats.get(layer_idx, self._default)]
        store = CodedStore(key, value, self.block_size, fmt)
        self.codes.stores[layer_idx] = store.codes
        return store

    def _code_addresses_of(self, device: torch.device, stores: Sequence[LayerStore]) -> Any:
        """Where these layers' blocks of both kinds lie, for one kernel that goes through all of them."""
        key = (tuple(map(weakref.ref, stores)), self.version)
        known = self._code_addresses.get(device)
        if known is None or known[0] != key:
            known = self._code_addresses[device] = (key, dispatch.code_addresses([self.kv(store) for store in stores]))
        return known[1]
