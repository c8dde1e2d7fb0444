"""Rows that begin with kept blocks read what their tokens' keys and values are, in all groups of layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.cache.coded_table import CodedTable
from hf_turbo.cache.paged_cache import PagedCache
from hf_turbo.cache.prefixes import find_rows

DIM = 4
DOMAIN = b"a"
WINDOWS = [(None,), (3,), (None, 5), (5, 2, None)]


def keys_of(tokens: list[int]) -> torch.Tensor:
    """`[1, 1, tokens, DIM]`: a token's depend on all tokens before it."""
    state, rows = torch.arange(DIM, dtype=torch.float64), []
    for token in tokens:
        state = torch.sin(3 * state + token + 1)
        rows.append(state)
    return torch.stack(rows).float()[None, None] if rows else torch.zeros(1, 1, 0, DIM)


def poison(pool: BlockPool) -> None:
    for group in pool.groups.values():
        group.fill(float("nan"))


def forward(cache: PagedCache, texts: list[list[int]], start: int, columns: int, dense: bool = True) -> None:
    """Stores each text's columns from `start` to `columns`; texts end in the same column.

    Args:
        dense: as for the model's own attention. Otherwise as for a kernel that attends to a prompt without its blocks.
    """
    for group in cache.groups.values():
        group.plan, group.table.group.prompts_read_blocks = None, False
        if not dense:
            group.begin(start, len(texts), columns - start, torch.device("cpu"), dense=False)
    for number, layer in enumerate(cache.layers):
        rows = [torch.nn.functional.pad(keys_of(text) + number, (0, 0, columns - len(text), 0)) for text in texts]
        new = torch.cat(rows)[:, :, start:]
        layer.update(new, -new)


def assert_reads(cache: PagedCache, texts: list[list[int]]) -> None:
    """All that the next token of each row sees."""
    columns = cache.get_seq_length()
    for number, layer in enumerate(cache.layers):
        keys, values = layer.keys, layer.values
        for row, text in enumerate(texts):
            seen = min(len(text), keys.shape[2], (layer.sliding_window or columns + 1) - 1)
            expected = keys_of(text)[0, :, len(text) - seen :] + number
            assert torch.equal(keys[row, :, keys.shape[2] - seen :], expected)
            assert torch.equal(values[row, :, keys.shape[2] - seen :], -expected)


def assert_accounts(pool: BlockPool, num_used: int | None = None) -> None:
    for group in pool.all_groups():
        manager = group.manager
        assert manager.num_free + manager.num_used + manager.num_cached == manager.num_blocks
        assert num_used is None or manager.num_used == num_used


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 2, 4]),
    windows=st.sampled_from(WINDOWS),
    limit=st.sampled_from([0, 2000, 10**6]),
    batches=st.lists(
        st.tuples(st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 2), st.booleans(), st.booleans()), max_size=7
    ),
)
def test_any_texts_in_any_order(size, windows, limit, batches):
    """Batches of left-padded texts: found, computed from there on, kept; some of the caches live on."""
    pool = BlockPool(size, cache_limit=limit)
    alive = []
    for texts, extra_padding, stays, dense in batches:
        cache = PagedCache(pool, windows)
        columns = max(map(len, texts)) + extra_padding
        found = find_rows(cache, texts, columns, DOMAIN)
        assert found < columns and (limit or not found)
        padding = cache.layout.padding = [columns - len(text) for text in texts]
        poison(pool)
        if found:
            assert_reads(cache, [text[: max(found - pad, 0)] for text, pad in zip(texts, padding, strict=True)])
        forward(cache, texts, found, columns, dense)
        assert_reads(cache, texts)
        for row, text in enumerate(texts):
            cache.register_prefix(row, text, DOMAIN)
        if stays:
            alive.append((cache, texts))
        else:
            cache.reset()
        poison(pool)
        for other, its_texts in alive:
            assert_reads(other, its_texts)
        assert_accounts(pool)
    for cache, _ in alive:
        cache.reset()
    assert_accounts(pool, num_used=0)
    pool.release()
    assert all(group.manager.num_blocks == 0 for group in pool.all_groups())


def kept(pool: BlockPool, windows, text: list[int]) -> None:
    """Computes a text and gives its cache up."""
    cache = PagedCache(pool, windows)
    forward(cache, [text], 0, len(text), dense=False)
    cache.register_prefix(0, text, DOMAIN)
    cache.reset()


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_full_blocks_are_found(size, windows):
    """Of a text that was kept, for one that goes on from any place within it, and in rows of several lengths."""
    text = [i * i % 7 for i in range(13)]
    for length in range(1, 14):
        pool = BlockPool(size, cache_limit=10**6)
        kept(pool, windows, text)
        turn = [*text[:length], 8, 9]
        cache = PagedCache(pool, windows)
        assert find_rows(cache, [turn], len(turn), DOMAIN) == length // size * size
        cache.reset()
        cache.add_rows(2)
        assert cache.find_prefix(1, turn, DOMAIN) == length // size * size
        assert cache.lengths == [0, length // size * size]
        assert cache.find_prefix(0, text[:3], DOMAIN) == 2 // size * size
        assert cache.lengths == [2 // size * size, length // size * size]
        assert find_rows(PagedCache(pool, windows), [turn], len(turn), b"other") == 0


def test_the_same_text_again_computes_one_token():
    pool = BlockPool(4, cache_limit=10**6)
    text = list(range(8))
    kept(pool, (None,), text)
    cache = PagedCache(pool, (None,))
    assert find_rows(cache, [text], 8, DOMAIN) == 7
    forward(cache, [text], 7, 8)
    assert_reads(cache, [text])
    assert cache.groups[None].table.group.copied_blocks == 1, "a kept block was written to"


def test_a_row_of_its_own_copy_is_kept_once():
    pool = BlockPool(2, cache_limit=10**6)
    caches = [PagedCache(pool, (None,)) for _ in range(2)]
    for cache in caches:
        forward(cache, [[1, 2, 3, 4]], 0, 4)
    for cache in caches:
        cache.register_prefix(0, [1, 2, 3, 4], DOMAIN)
        cache.reset()
    assert pool.group(None).manager.num_cached == 2


def test_taken_back_tokens_of_a_kept_block_are_written_elsewhere():
    pool = BlockPool(4, cache_limit=10**6)
    cache, text = PagedCache(pool, (None,)), list(range(8))
    forward(cache, [text], 0, 8)
    cache.register_prefix(0, text, DOMAIN)
    cache.crop(-3)
    other = [*text[:5], 20, 21, 22]
    forward(cache, [other], 5, 8)
    assert_reads(cache, [other])
    again = PagedCache(pool, (None,))
    assert find_rows(again, [[*text, 9]], 9, DOMAIN) == 8
    assert_reads(again, [text])


def test_keys_of_another_dtype_are_not_mistaken():
    """What layers compute now lies in other tensors: nothing that was kept is there."""
    pool = BlockPool(2, cache_limit=10**6)
    kept(pool, (None,), [1, 2, 3, 4])
    old = PagedCache(pool, (None,))
    forward(old, [[5, 6]], 0, 2)
    cache = PagedCache(pool, (None,))
    new = keys_of([1, 2, 3, 4]).double()
    cache.layers[0].update(new, new)
    assert find_rows(PagedCache(pool, (None,)), [[1, 2, 3, 4, 5]], 5, DOMAIN) == 0
    old.register_prefix(0, [5, 6], DOMAIN)
    assert find_rows(PagedCache(pool, (None,)), [[5, 6, 7]], 3, DOMAIN) == 0


def test_the_pool_grows_for_kept_blocks_up_to_the_limit():
    pool = BlockPool(1, cache_limit=10**6)
    kept(pool, (None,), [0])
    bytes_a_block = pool.group(None).block_bytes
    pool.index.limit = 20 * bytes_a_block
    for seed in range(30):
        kept(pool, (None,), [seed + i for i in range(8)])
        assert pool.index.cached_bytes <= pool.index.limit
    manager = pool.group(None).manager
    assert manager.num_cached == 20 and manager.num_blocks <= 20 + 8 and pool.index.num_evicted > 0
    held, total = PagedCache(pool, (None,)), manager.num_blocks
    forward(held, [list(range(100, 100 + total))], 0, total)
    assert manager.num_cached == 0 and manager.num_used == manager.num_blocks == total, "it grew for what was kept"


# Rows of wide blocks and codes


def needed(length: int, size: int, window: int | None) -> tuple[set[int], set[int]]:
    """The blocks that the token after so many reads wide, and as codes (docs/kv_cache.md).

    A row holds the one before the token's own even where a window is shorter than a block.
    """
    oldest = 0 if window is None else max(length - window + 1, 0)
    seen = range(min(oldest // size, max(length // size - 1, 0)), -(-length // size))
    wide = {block for block in seen if block == 0 or block >= length // size - 1}
    return wide, set(seen) - wide


def blocks_of(table: CodedTable, row: int) -> tuple[dict[int, int], dict[int, int]]:
    wide = {table.first[row] + i: block for i, block in enumerate(table.rows[row])}
    if table.anchors[row] is not None:
        wide[0] = table.anchors[row]
    return wide, {table.codes.first[row] + i: block for i, block in enumerate(table.codes.rows[row])}


@pytest.mark.parametrize("window", [None, 2, 5, 11])
@pytest.mark.parametrize("size", [2, 4])
def test_rows_with_codes(size, window):
    """Of a prompt that was kept, a row begins with all that the next token sees, and only where that is there."""
    for length in range(1, 30):
        pool = BlockPool(size, "int8", cache_limit=10**6)
        group = pool.group(window)
        first, text = CodedTable(group), list(range(length))
        first.grow([0], [length], [0], holds_new=False)
        wide, codes = blocks_of(first, 0)
        with pool.lock:
            pool.index.add(DOMAIN, text, list(first.full_blocks(0, length)))
        path = pool.index.find(DOMAIN, text)
        assert len(path) == length // size

        def is_there(count, wide=wide, codes=codes, length=length):
            wanted_wide, wanted_codes = needed(count, size, window)
            full = length // size
            known_wide = {block for block in wide if block < full}
            made_next = known_wide if count % size == 0 else set()  # codes are made of wide blocks before they are read
            return wanted_wide <= known_wide and wanted_codes <= {*codes, *made_next}

        for asked in range(length + 1):
            table = CodedTable(group)
            found = table.longest_prefix(path, asked)
            candidates = [asked, *range(asked // size * size, -1, -size)]
            assert found == next(n for n in candidates if n == 0 or is_there(n))
            if not found:
                continue
            table.take_prefix(0, path, found)
            own_wide, own_codes = blocks_of(table, 0)
            wanted_wide, wanted_codes = needed(found, size, window)
            assert {b: own_wide[b] for b in wanted_wide} == {b: wide[b] for b in wanted_wide}
            for b in wanted_codes:
                assert own_codes[b] == codes[b] if b in codes else own_wide[b] == wide[b]
            table.release()
        if length >= size:
            assert first.longest_prefix(path, length) >= length // size * size, "the end of a text is always found"
        first.release()
        assert group.manager.num_used == group.codes.manager.num_used == 0
        assert group.manager.num_free + group.manager.num_cached == group.manager.num_blocks


def test_codes_that_are_gone_are_made_of_wide_blocks_at_a_block_s_beginning_alone():
    """The next forward makes codes when a row begins a block; within one it would read what is not there."""
    pool, text = BlockPool(4, "int8", cache_limit=10**6), list(range(20))
    group = pool.group(None)
    for length in (8, 16):
        table = CodedTable(group)
        table.grow([0], [length], [0], holds_new=False)
        with pool.lock:
            pool.index.add(DOMAIN, text[:length], list(table.full_blocks(0, length)))
    path = pool.index.find(DOMAIN, text)
    assert [CodedTable(group).longest_prefix(path, n) for n in (15, 16)] == [15, 16]
    pool.index.forget(group.codes)
    assert [CodedTable(group).longest_prefix(path, n) for n in (15, 16)] == [12, 16]
    table = CodedTable(group)
    table.take_prefix(0, path, 16)
    made = []
    table.flush([16], [0], made.extend)
    assert [wide for wide, _ in made] == [path[1].blocks[group], path[2].blocks[group]]
