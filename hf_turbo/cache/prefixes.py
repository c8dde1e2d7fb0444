"""Rows of a cache that begin with blocks which the pool has kept, and rows whose blocks are to be found later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .prefix_index import Entry

if TYPE_CHECKING:
    from .paged_cache import PagedCache


def find_row(cache: PagedCache, row: int, tokens: Sequence[int], domain: bytes) -> int:
    """See `PagedCache.find_prefix`."""
    index = cache.pool.index
    if not index.is_on or not _stores_are_current(cache):
        return 0
    with cache.pool.lock:
        path = index.find(domain, tokens[:-1])  # one token must be computed
        length = _longest(cache, path, len(path) * index.block_size)
        index.tokens_asked += len(tokens)
        index.tokens_found += length
        if length:
            _take(cache, row, path, length)
    if length:
        lengths = cache.lengths
        lengths[row] = length
        _set_columns(cache, cache.layout.set_lengths(lengths))
    return length


def find_rows(cache: PagedCache, prompts: Sequence[Sequence[int]], num_columns: int, domain: bytes) -> int:
    """Makes the rows of a cache that is empty yet begin with what the pool has kept of their texts.

    Args:
        prompts: the tokens of each row, without padding. They end in the same column.
        num_columns: of the padded batch.
        domain: as of `PagedCache.find_prefix`.

    Returns:
        How many columns the cache has now: up to there all rows were found.
    """
    index, copies = cache.pool.index, cache.layout.copies_per_row
    if not index.is_on:
        return 0
    padding = [num_columns - len(prompt) for prompt in prompts]
    with cache.pool.lock:
        paths = [path for prompt in prompts[::copies] for path in [index.find(domain, prompt)] * copies]
        columns = num_columns - 1
        while columns > (common := _columns_found(cache, paths, padding, columns)):
            columns = common
        lengths = [max(columns - pad, 0) for pad in padding]
        index.tokens_asked += sum(map(len, prompts[::copies]))
        index.tokens_found += sum(lengths[::copies])
        if not any(lengths):
            return 0
        for group in cache.groups.values():
            group.table.add_rows(len(prompts))
        for row, (path, length) in enumerate(zip(paths, lengths, strict=True)):
            if length:
                _take(cache, row, path, length)
    cache.layout.padding = padding
    _set_columns(cache, columns)
    return columns


def register_row(cache: PagedCache, row: int, tokens: Sequence[int], domain: bytes) -> None:
    """See `PagedCache.register_prefix`."""
    index = cache.pool.index
    length = min(max(cache.num_columns - cache.layout.padding[row], 0), len(tokens))
    if not index.is_on or length < index.block_size:
        return
    with cache.pool.lock:
        if _stores_are_current(cache):
            held = [place for group in cache.groups.values() for place in group.table.full_blocks(row, length)]
            index.add(domain, tokens, held)


def _longest(cache: PagedCache, path: Sequence[Entry], num_tokens: int) -> int:
    """How many of so many tokens all groups of layers have."""
    tables = [group.table for group in cache.groups.values()]
    while num_tokens > (common := min(table.longest_prefix(path, num_tokens) for table in tables)):
        num_tokens = common
    return num_tokens


def _columns_found(cache: PagedCache, paths: Sequence[Sequence[Entry]], padding: Sequence[int], columns: int) -> int:
    """Up to which of so many columns each row's tokens, or the first of them, are known."""
    rows = zip(paths, padding, strict=True)
    return min(pad + _longest(cache, path, columns - pad) if columns > pad else columns for path, pad in rows)


def _take(cache: PagedCache, row: int, path: Sequence[Entry], length: int) -> None:
    for group in cache.groups.values():
        group.table.take_prefix(row, path, length)
    for layer in cache.layers:
        layer.store = layer.group.table.group.stores.get(layer.layer_idx)


def _stores_are_current(cache: PagedCache) -> bool:
    """Whether the layers' keys and values lie where those of other caches are found."""
    for group in cache.groups.values():
        stores = group.table.group.stores
        for layer in group.layers:
            if layer.store is not None and layer.store is not stores.get(layer.layer_idx):
                return False
    return True


def _set_columns(cache: PagedCache, columns: int) -> None:
    for group in cache.groups.values():
        group.plan, group.num_columns = None, columns
    for layer in cache.layers:
        layer.length = columns
