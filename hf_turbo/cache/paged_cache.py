"""`PagedCache`: the `Cache` that Transformers sees. One a `generate()` call; its blocks come from the pool."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..compat import crop_argument
from ..ops import dispatch
from ..ops.deferred import DeferredMode
from ..ops.metadata import LayerKV, QuantizedKV
from . import prefixes
from .block_group import LayerStore
from .block_pool import BlockPool
from .block_table import BlockTable
from .coded_group import CodedGroup
from .coded_table import CodedTable
from .forward_plan import ForwardPlan, PackedUnsuited, RowLayout
from .layer_group import LayerGroup

#: Keys and values that have been stored carry their layer under this name to the attention function.
LAYER_ATTRIBUTE = "_hf_turbo_layer"


class MaskLength(int):
    """The key length that Transformers hands to the mask function, with the layer it was asked of."""

    layer: Any  # a PagedLayer, or a StepLayer in a step that is being captured


class PagedLayer(CacheLayerMixin):
    """One layer's view of a `PagedCache`.

    `keys` and `values` gather dense `[batch, num_kv_heads, columns, head_dim]` tensors, zeros at padding, for
    code that reads a cache by hand.
    """

    is_croppable = True

    def __init__(self, group: LayerGroup, layer_idx: int) -> None:
        self.group = group
        self.layer_idx = layer_idx
        self.length = 0
        self.store: LayerStore | None = None
        group.layers.append(self)

    def __repr__(self) -> str:
        return f"PagedLayer(sliding_window={self.sliding_window}, length={self.length})"

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.store is not None

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    @property
    def sliding_window(self) -> int | None:
        return self.group.sliding_window

    @property
    def record_past(self) -> bool:
        return self.group.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.group.record_past = value

    @property
    def device(self) -> torch.device | None:
        return None if self.store is None else self.store.device

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.store is None else self.store.dtype

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.dense(self._first_column(self.length))[0] if self.length else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.dense(self._first_column(self.length))[1] if self.length else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Finds the pool's store for a layer that computes such keys and values."""
        if self.length and self.store is not None:
            raise ValueError(
                f"layer {self.layer_idx} now computes {key_states.dtype} keys on {key_states.device}, the cache holds "
                f"{self.store.dtype} on {self.store.device}: start from a new cache"
            )
        self.store = self.group.table.group.store_for(self.layer_idx, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values, `[batch, num_kv_heads, tokens, head_dim]`.

        Returns:
            In a forward whose mask came from hf_turbo: the new keys and values, marked with this layer.
            Otherwise the keys and values that a stock cache would return.
        """
        if DeferredMode.is_active():
            with DeferredMode.set_aside() as mode:
                return self.update(mode.tensor(key_states), mode.tensor(value_states))
        if torch.is_autocast_enabled(key_states.device.type):  # keys and values may come in different dtypes
            dtype = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        start, (num_rows, _, q_len, _) = self.length, key_states.shape
        plan = self.group.plan
        if (unsuited := self.group.layout.unsuited) is not None:
            if plan is None or plan.unsuited is None or not plan.fits(start, num_rows, q_len):
                raise unsuited("a layer makes no mask of Transformers' before it caches")
            return self._update_rows(plan, key_states, value_states)
        if plan is None or not plan.fits(start, num_rows, q_len):
            plan = self.group.begin(start, num_rows, q_len, key_states.device, dense=True)
        if self.store is None or not self.store.matches(key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        self._store(plan, key_states, value_states)
        self.length = start + q_len
        if plan.dense:
            # A prompt of a quantized cache is attended to as it is.
            sees_itself = plan.metadata.coded_rows is not None and start == 0
            return (key_states, value_states) if sees_itself else self.dense(self._first_column(start))
        setattr(key_states, LAYER_ATTRIBUTE, self)
        setattr(value_states, LAYER_ATTRIBUTE, self)
        return key_states, value_states

    def _update_rows(
        self, plan: ForwardPlan, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores tokens of rows that are not the batch's; `keep` counts those that stay."""
        if self.store is None or not self.store.matches(key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        kv = self.kv()
        if self.group.layout.tree is not None and isinstance(kv, QuantizedKV):
            kv = kv.wide  # a draft's block is never in codes
        metadata = plan.metadata.on(key_states.device)
        dispatch.store_kv(plan.pack(key_states), plan.pack(value_states), kv, metadata)
        setattr(key_states, LAYER_ATTRIBUTE, self)
        setattr(value_states, LAYER_ATTRIBUTE, self)
        return key_states, value_states

    def store_anew(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the prompt that `update` has stored once more, in the pool's present store for this layer."""
        self.store = self.group.table.group.store_for(self.layer_idx, key, value)
        self._store(plan, key, value)

    def _store(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        metadata = plan.store_metadata.on(key.device)
        dispatch.store_kv(plan.pack_stored(key), plan.pack_stored(value), self.kv(), metadata, plan.keep_last)

    def kv(self) -> LayerKV | QuantizedKV:
        """The layer's blocks."""
        if self.store is None:
            raise RuntimeError(f"layer {self.layer_idx} has stored nothing yet")
        return self.group.table.group.kv(self.store)

    def dense(self, first_column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the columns from `first_column` on, `[batch, num_kv_heads, columns, head_dim]`.

        Zeros at padding; what is in codes comes as numbers of the model's dtype.
        """
        table, padding, kv = self.group.table, self.group.layout.padding, self.kv()
        if isinstance(kv, LayerKV):
            return dispatch.gather_kv(kv, table.rows, table.first, padding, first_column, self.length)
        rows, first, coded = table.each_once()  # type: ignore[attr-defined]  # a `CodedTable`
        return dispatch.gather_kv(kv, rows, first, coded, padding, first_column, self.length)

    def dense_of_plan(
        self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a stock cache would have returned from the `update` that was given `key` and `value`."""
        return (key, value) if plan.start == 0 else self.dense(self._first_column(plan.start))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = self._first_column(self.length)
        length = MaskLength(self.length - offset + query_length)
        length.layer = self
        return length, offset

    def get_seq_length(self) -> int:
        if self.group.layout.packed is not None:
            raise PackedUnsuited("the model reads the cache's length, of which each row has its own")
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def activate_past_recording(self) -> None:
        """Keeps what leaves the window until the next `crop`, so that tokens can be taken back."""
        self.group.record_past = True

    def _first_column(self, start: int) -> int:
        """Where a stock layer's keys begin when `start` columns came before this forward."""
        return 0 if self.sliding_window is None else max(start - self.sliding_window + 1, 0)

    def _only_whole_cache(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the layers of a PagedCache share their blocks: call this on the cache, not a layer")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _only_whole_cache
    offload = prefetch = _only_whole_cache


class PagedCache(Cache):
    """A cache of keys and values in blocks that rows share by reference.

    Rows of a left-padded batch store no padding. Beams and copies of a prompt hold the same blocks until they
    write to them. Blocks go back to the pool when the cache is deleted, cropped or reset, and those of layers with a
    sliding window as they leave it. `copy.deepcopy` shares the blocks, too. Not to be used by two threads at once.

    Args:
        pool: where blocks come from.
        sliding_windows: per layer, how many tokens a query sees; None for all.
        copies_per_row: so many neighbouring rows of the first prompt are equal.
        expected_length: tokens a row may come to, where known; 0 otherwise.
    """

    def __init__(
        self,
        pool: BlockPool,
        sliding_windows: Sequence[int | None],
        copies_per_row: int = 1,
        expected_length: int = 0,
    ) -> None:
        self.pool = pool
        #: A loop's promise: no code but its own has run since the model's last step, so the model has not changed.
        self.model_is_as_it_was = False
        #: Whether others than the call that made it may look at it.
        self.is_given = True
        #: Under which domain the rows' tokens say all of what they hold; None: they do not, or nobody has looked.
        self.prefix_domain: bytes | None = None
        #: Where forwards leave what the model's head is given, if that is asked for: a `HeadInput`.
        self.head_input: Any = None
        self.layout = RowLayout(copies_per_row=copies_per_row)
        tables = {window: _table(pool, window, expected_length) for window in set(sliding_windows)}
        self._adopt(tables, sliding_windows)

    def _adopt(self, tables: dict[int | None, BlockTable], sliding_windows: Sequence[int | None]) -> None:
        self.groups = {window: LayerGroup(table, self.layout) for window, table in tables.items()}
        self.layers: list[PagedLayer]  # type: ignore[assignment]
        super().__init__(layers=[PagedLayer(self.groups[w], i) for i, w in enumerate(sliding_windows)])
        for group in self.groups.values():
            weakref.finalize(self, group.release)

    @property
    def num_blocks(self) -> int:
        """Different blocks that this cache holds, over all groups of layers."""
        return sum(group.table.num_live_blocks for group in self.groups.values())

    @property
    def batch_size(self) -> int:
        return len(self.layout.padding)

    @property
    def is_compileable(self) -> bool:
        return False  # True would make generate() build 4D masks and compile the forward by itself

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """For the mask's builder; our mask function does not look at it where rows are packed."""
        return self.layers[layer_idx].length

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Keys, values and sliding window of each layer, as a `DynamicCache` gives them."""
        for layer in self.layers:
            window = layer.sliding_window
            yield layer.keys, layer.values, None if window is None else torch.tensor(window)

    def reset(self) -> None:
        """Forgets all tokens."""
        for group in self.groups.values():
            group.reset()
        self.layout.padding, self.layout.behind, self.layout.copies_per_row = [], [], 1
        self._set_length(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes tokens at the end: `-n` removes n. What a positive number means is up to the Transformers release."""
        length = self.get_seq_length()
        keep = max(length - crop_argument(int(tokens_to_remove), length), 0)
        if keep < length:
            for group in self.groups.values():
                group.check_crop(keep)
            if keep == 0:
                self.layout.copies_per_row = 1  # what comes next is another prompt
        for group in self.groups.values():
            group.crop(keep)
        self._set_length(keep)

    def advance(self, ahead: int = 0) -> None:
        """Takes blocks for one more token of every row. `finish_step` counts it, once it is stored.

        Args:
            ahead: tokens that rows may have got by forwards under way, at most; their blocks are there.

        While it verifies drafts, for all nodes of the tree; where rows are packed, for what each of them brings. `keep`
        counts what stays of those.
        """
        tree = self.layout.tree
        if self.layout.packed is not None:
            for group in self.groups.values():
                group.advance_packed(self.num_columns)
            return
        num_nodes, reach = (1, 1) if tree is None else (tree.num_nodes, tree.max_depth + 1)
        for group in self.groups.values():
            group.advance(self.num_columns, num_nodes + ahead, reach + ahead, is_first=not ahead)

    def adopt_stores(self) -> None:
        """Has the layers of a cache without tokens use the pool's present stores, where there are such."""
        for layer in self.layers:
            if not layer.length:
                layer.store = layer.group.table.group.stores.get(layer.layer_idx)

    def move_accepted(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """After a forward of a tree: moves the nodes of each row's path to where the row's next tokens belong.

        Args:
            path: int64 `[batch, n]`, nodes of each row in order, the root first; node k or later at place k.
            counts: int64 `[batch]`, how many of them.
        """
        for group in self.groups.values():
            group.move_tokens(self.layout.lengths(self.get_seq_length()), path, counts)

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Takes in how many tokens rows have come to while another forward is under way; `keep` comes after the last.
        """
        self._count(lengths)
        self._set_length(self.layout.set_lengths(lengths))

    def keep(self, lengths: Sequence[int], may_shrink: bool = False) -> None:
        """Makes rows so many tokens long, none longer than it is with what the last forward brought.

        Rows may come to differ in length by other than their left padding: those that have fewer tokens count columns
        before their first as padding.

        Args:
            may_shrink: a later call may make rows shorter: a past that is recorded stays.
        """
        self._count(lengths)
        num_columns = self.layout.set_lengths(lengths)
        for group in self.groups.values():
            group.keep(lengths, num_columns, may_shrink)
        self._set_length(num_columns)

    def _count(self, lengths: Sequence[int]) -> None:
        """Adds up drafted tokens that stay."""
        before = self.layout.lengths(self.get_seq_length())
        num_new = sum([new - old for new, old in zip(lengths, before, strict=True) if new > old])
        for group in self.groups.values():
            group.table.group.stored_tokens += num_new

    def finish_step(self, length: int) -> None:
        """Counts the columns that a captured step has stored, or takes back what a failed forward has counted."""
        self._set_length(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row `i` what row `beam_idx[i]` is. Blocks are shared, none is copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only these rows, int64 `[n]` or bool `[batch]`."""
        if self.batch_size:
            rows = indices.nonzero()[:, 0].tolist() if indices.dtype == torch.bool else indices.tolist()
            self.select_rows([row % self.batch_size for row in rows])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row; the copies share its blocks."""
        self.select_rows([row for row in range(self.batch_size) for _ in range(repeats)])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Makes row `i` what row `rows[i]` is, told by the host. Blocks are shared, none is copied."""
        if list(rows) == list(range(self.batch_size)):
            return
        for group in self.groups.values():
            group.select(rows)
        self.layout.select(rows)

    def add_rows(self, num_rows: int) -> None:
        """Adds rows without tokens at the end."""
        self.layout.add_rows(num_rows, self.get_seq_length())
        for group in self.groups.values():
            group.table.add_rows(self.batch_size)

    @property
    def num_columns(self) -> int:
        """Columns so far, also while a forward is under way that must not ask for them."""
        return self.layers[0].length

    @property
    def lengths(self) -> list[int]:
        """Stored tokens of each row."""
        return self.layout.lengths(self.num_columns)

    def find_prefix(self, row: int, tokens: Sequence[int], domain: bytes) -> int:
        """Makes a row that is there and has no tokens begin with what the pool has kept of a text.

        Args:
            tokens: of the text, at least one.
            domain: all else that its keys and values depend on; see `PatchHandle.prefix_domain`.

        Returns:
            How many tokens the row has now: full blocks, fewer than there are tokens.
        """
        return prefixes.find_row(self, row, tokens, domain)

    def register_prefix(self, row: int, tokens: Sequence[int], domain: bytes) -> None:
        """Has a row's full blocks kept, once nobody holds them, for texts that begin alike.

        Args:
            tokens: the row's; those that it does not hold yet are left out.
            domain: as of `find_prefix`, when they were computed.
        """
        prefixes.register_row(self, row, tokens, domain)

    def _set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        other = PagedCache.__new__(PagedCache)
        memo[id(self)] = other
        other.pool, other.model_is_as_it_was, other.head_input, other.is_given = self.pool, False, None, True
        other.layout, other.prefix_domain = self.layout.copy(), None
        windows = [layer.sliding_window for layer in self.layers]
        other._adopt({window: group.table.copy() for window, group in self.groups.items()}, windows)
        for window, group in self.groups.items():
            other.groups[window].num_columns = group.num_columns
            other.groups[window].first_column = group.first_column
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            theirs.length, theirs.store = mine.length, mine.store
        return other

    def __reduce__(self) -> Any:
        raise TypeError(
            "a PagedCache can't be pickled: its blocks belong to the model's pool. Its tokens can be had as tensors "
            "from cache.layers[i].keys and .values"
        )


def _table(pool: BlockPool, sliding_window: int | None, expected_length: int) -> BlockTable:
    group = pool.group(sliding_window)
    kind = CodedTable if isinstance(group, CodedGroup) else BlockTable
    return kind(group, expected_length)  # type: ignore[arg-type]
