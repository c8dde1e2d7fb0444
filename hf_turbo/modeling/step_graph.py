"""One captured decode step: a CUDA graph that reads what every step fills in.

Lengths, block tables and tokens are read from tensors of the graph's own, so one graph serves every length and every
cache of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from ..cache.block_group import LayerStore
from ..cache.block_pool import BlockPool
from ..cache.coded_group import CodedStore
from ..cache.paged_cache import PagedCache
from ..cache.step_cache import StepCache, StepGroup, StepUnsuited
from ..cache.token_tree import TokenTree
from ..compat import CACHE_NAME
from ..ops.attention_config import next_power_of_2
from ..ops.deferred import DeferredMode, Rule
from ..ops.metadata import new_arrivals
from .carveout import tune
from .fusion import pick_rows
from .head_input import HeadInput
from .model_state import CapturedState, settings
from .recording import record

Forward = Callable[..., Any]
#: Computes something of a step's output; see `StepGraph.follow`.
Follower = Callable[["StepGraph"], torch.Tensor]
#: Block tables, int32 `[rows, columns]`, by sliding window.
Tables = dict[int | None, torch.Tensor]

#: Rows of a step at most that verifies drafts, and of one whose rows of the cache bring different numbers of tokens.
MAX_ROWS, MAX_PACKED_ROWS = 512, 2048
#: Steps of the latter kind have, up to a number of rows, a multiple of so many, and room for one of these numbers of
#: sequences: few graphs, and rows that are not used cost more than sequences that are not.
_PACKED_ROWS = ((512, 64), (MAX_PACKED_ROWS, 256))
_PACKED_SEQS = (16, 64, 256)
MAX_PACKED_SEQS = _PACKED_SEQS[-1]
#: Rows of such a step at most where the model has experts: each row reads all of its experts' weights by itself.
MAX_PACKED_EXPERTS = 64

#: From so many rows on their lengths are taken for uneven, as those of many requests are.
_UNEVEN_ROWS = 16

#: No position comes to it.
_NO_LIMIT = torch.iinfo(torch.int64).max

#: Options that ask for what a graph's output does not hold.
_SHOW_INSIDE = frozenset({"output_hidden_states", "output_attentions", "output_router_logits"})


def bucket_of(num_rows: int) -> int | None:
    """The rows of the graph that serves so many; None for more than 512."""
    for limit, step in ((8, 1), (64, 8), (256, 32), (512, 64)):
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return None


@dataclass(frozen=True)
class StepInputs:
    """The arguments of one decode step.

    Args:
        tensors: those of the step's own size, by name.
        options: the others, baked into the graph.
        num_rows: rows of the batch.
        tree: the shape of the drafts that it verifies, a row for each node; None: it verifies none.
        watched: what the model's head is given is asked for, too.
        packed: how many tokens each row of the cache brings, a row of the batch for each; None: one a row of the cache.
        wanted: of these the rows of the batch that logits are asked for of, at most one for each of the cache's.
        reads_codes: older blocks of the cache are codes, and seen as such.
    """

    tensors: dict[str, torch.Tensor]
    options: tuple[tuple[str, Any], ...]
    num_rows: int
    tree: TokenTree | None = None
    watched: bool = False
    packed: tuple[int, ...] | None = None
    wanted: tuple[int, ...] = ()
    reads_codes: bool = False

    @classmethod
    def of(cls, kwargs: dict[str, Any]) -> StepInputs | None:
        """None: these are not the arguments of a step that can be captured."""
        cache = kwargs.get(CACHE_NAME)
        ids = kwargs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] != 1:
            return None
        tensors, options = {}, []
        for name, x in kwargs.items():
            if name in (CACHE_NAME, "attention_mask") or x is None:
                continue
            if isinstance(x, torch.Tensor):
                tensors[name] = x
            elif isinstance(x, (bool, int, float, str)) and not (x and name in _SHOW_INSIDE):
                options.append((name, x))
            else:
                return None
        by_name = tuple(sorted(options))
        if cache is None:
            return cls(tensors, by_name, len(ids))
        layout = cache.layout
        packed = None if layout.packed is None else tuple(layout.packed)
        reads_codes = cache.pool.kv_cache_dtype is not None and not layout.sees_itself
        watched, wanted = cache.head_input is not None, tuple(layout.wanted)
        return cls(tensors, by_name, len(ids), layout.tree, watched, packed, wanted, reads_codes)

    @property
    def num_nodes(self) -> int:
        """Rows of the batch for each of the cache's."""
        return 1 if self.tree is None else self.tree.num_nodes

    @property
    def num_seqs(self) -> int | None:
        """The sequences of a graph that serves the step; None: there is none for so many."""
        if self.packed is not None:
            bucket = next((n for n in _PACKED_SEQS if n >= len(self.packed)), None)
            # One more takes the rows of the batch that are not used.
            return None if bucket is None or self.num_rows > MAX_PACKED_ROWS else bucket + 1
        bucket = bucket_of(self.num_rows // self.num_nodes)
        if bucket is not None and self.tree is not None:
            bucket = next_power_of_2(bucket)  # rows leave as they end: few graphs for all numbers of them
        return None if bucket is None or bucket * self.num_nodes > MAX_ROWS else bucket

    @property
    def padded_rows(self) -> int:
        """The batch's rows of such a graph."""
        if self.packed is not None:
            step = next((step for limit, step in _PACKED_ROWS if limit >= self.num_rows), 1)
            return -(-self.num_rows // step) * step
        return (self.num_seqs or 0) * self.num_nodes

    @property
    def key(self) -> tuple[Any, ...]:
        """What a graph must have been captured with."""
        shapes = tuple((name, self.padded_shape(name), x.dtype) for name, x in self.tensors.items())
        is_chain, is_packed = self.tree is None or self.tree.is_chain, self.packed is not None
        kind = self.num_nodes, is_chain, self.watched, self.reads_codes, is_packed
        return self.num_seqs, kind, shapes, self.options, settings()

    def padded_shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape with the graph's rows for the batch's."""
        shape = list(self.tensors[name].shape)
        dim = self.batch_dim(name)
        if dim is not None:
            shape[dim] = self.padded_rows
        return tuple(shape)

    def batch_dim(self, name: str) -> int | None:
        """Which dimension of a tensor counts rows; None if it is the same for all."""
        shape = self.tensors[name].shape
        if len(shape) == 3 and name == "position_ids":  # [3, rows, 1] where positions are time, height and width
            return 1
        return 0 if shape and shape[0] == self.num_rows else None


class StepGraph:
    """One captured decode step.

    Args:
        pool: where the model's blocks are.
        sliding_windows: of each layer.
        rules: how its operations are fused.
        inputs: the first step's.
        num_columns: blocks that a row can have, by sliding window.
        state: of the model; it is told what the step reads of tensors that are set anew.
    """

    def __init__(
        self,
        pool: BlockPool,
        sliding_windows: Sequence[int | None],
        rules: Sequence[Rule],
        inputs: StepInputs,
        num_columns: dict[int | None, int],
        state: CapturedState | None = None,
    ) -> None:
        self.device = inputs.tensors["input_ids"].device
        self.num_rows = inputs.padded_rows
        self.options = dict(inputs.options)
        self.tensors = {
            name: torch.zeros(inputs.padded_shape(name), dtype=x.dtype, device=self.device)
            for name, x in inputs.tensors.items()
        }
        self.num_nodes = inputs.num_nodes
        num_seqs = inputs.num_seqs or 0
        self.seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device=self.device)
        #: The last position that drafts may have, for followers; and whether there is one.
        self.last_position = torch.full((1,), _NO_LIMIT, device=self.device)
        self._is_limited = False
        #: Differs once the inputs have been loaded, or read and followed up, again.
        self.turn = 0
        self.cu_seqlens_q = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device) * self.num_nodes
        max_seqlen_q = self.num_nodes if inputs.packed is None else self.num_rows
        is_uneven = inputs.packed is not None or (inputs.tree is None and num_seqs >= _UNEVEN_ROWS)
        arrivals = new_arrivals(self.device) if is_uneven else None
        # Of what a sequence brings, each block but the last two may become codes.
        num_coded = 0 if inputs.packed is None else self.num_rows // pool.block_size + num_seqs
        shared = (
            self.seq_lens, self.cu_seqlens_q, self.num_rows, max_seqlen_q, inputs.tree, arrivals, inputs.reads_codes,
            num_coded,
        )  # fmt: skip
        self.groups = {
            window: StepGroup(pool.group(window), columns, *shared) for window, columns in num_columns.items()
        }
        #: The rows that logits are asked for of; None: all.
        self.wanted: torch.Tensor | None = None
        if inputs.packed is not None:
            self.wanted = torch.zeros(num_seqs - 1, dtype=torch.int64, device=self.device)
        self.cache = StepCache(self.groups, sliding_windows)
        self.rules = rules
        self._state = state
        #: Outputs that the model hands on as it has them when it is asked.
        self._handed_on: dict[str, Callable[[], torch.Tensor | None]] = {}
        self.output: ModelOutput | None = None
        self._writes = 0  # operations of the model that write to tensors: each replay does so
        self.carveout: int | None = None  # as of `tune`
        self.head_input: torch.Tensor | None = None
        self.num_bytes = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        #: What is computed of the output, by what it is: another graph, and its own output.
        self._followers: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor, Follower]] = {}
        self._tables_of: dict[int | None, tuple[int, ...] | None] = {}
        self._bases: list[tuple[Any, ...]] = []  # (layer, its store, where the blocks of that lie)
        self._versions: dict[int | None, int] = {}

    def load(
        self,
        cache: PagedCache,
        inputs: StepInputs,
        tables: Tables | None = None,
        code_tables: Tables | None = None,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Copies a step's inputs to where the graph reads them.

        Args:
            lengths: tokens of each row before the step, int64 `[rows]`, where the host does not know them yet.
            tables: block tables that are newer than the cache's own, by sliding window.
            code_tables: the same of codes, where the cache has them.
        """
        self.turn += 1
        for name, x in inputs.tensors.items():
            dim = inputs.batch_dim(name)
            target = self.tensors[name]
            (target if dim is None else target.narrow(dim, 0, inputs.num_rows)).copy_(x, non_blocking=True)
        if inputs.packed is not None:
            # The last sequence has what is left of the batch's rows, and a length of 0: nothing of it is stored.
            ends = [*itertools.accumulate(inputs.packed, initial=0)]
            ends += [ends[-1]] * (len(self.seq_lens) - len(ends)) + [self.num_rows]
            self.cu_seqlens_q.copy_(torch.tensor(ends, dtype=torch.int32), non_blocking=True)
        if self.wanted is not None and inputs.wanted:
            self.wanted[: len(inputs.wanted)].copy_(torch.tensor(inputs.wanted), non_blocking=True)
        if lengths is None:
            lens = cache.layout.next_lengths(cache.num_columns)
            lens += [0] * (len(self.seq_lens) - len(lens))
            self.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32), non_blocking=True)
        else:
            self.seq_lens[: len(lengths)].copy_(lengths + self.num_nodes)
            self.seq_lens[len(lengths) :].zero_()  # rows that have left since
        for group in self.groups.values():
            if inputs.tree is not None:
                group.load_tree(inputs.tree)
        self.load_tables(cache, tables, code_tables)
        if inputs.packed is not None and inputs.reads_codes:
            old_lens, new_lens = cache.layout.lengths(cache.num_columns), cache.layout.next_lengths(cache.num_columns)
            for window, group in self.groups.items():
                table = cache.groups[window].table
                group.load_coded(table.coded_by(old_lens, new_lens))  # type: ignore[attr-defined]  # a `CodedTable`

    def limit(self, last_position: torch.Tensor | None) -> None:
        """Takes in the last position that drafts may have, int64 `[]`; None: no limit."""
        if last_position is not None:
            self.last_position.copy_(last_position)
        elif self._is_limited:
            self.last_position.fill_(_NO_LIMIT)  # another call's is there
        self._is_limited = last_position is not None

    def load_tables(
        self, cache: PagedCache, tables: Tables | None = None, code_tables: Tables | None = None
    ) -> None:
        """Copies block tables where they have changed; arguments as of `load`."""
        for window, group in self.groups.items():
            table = cache.groups[window].table
            state = table.state if tables is None else None
            if state is None or self._tables_of.get(window) != state:
                if tables is None:
                    codes = table.codes if group.code_tables is not None else None
                    group.load(table.tensor(self.device), codes.tensor(self.device) if codes else None)
                else:
                    group.load(tables[window], (code_tables or {}).get(window))
                self._tables_of[window] = state

    def compute(self, forward: Forward, watch: HeadInput | None = None) -> ModelOutput:
        """Runs the step once, as it will be captured; what comes back is read before anything else runs.

        Args:
            watch: where the forward leaves what the model's head is given, if that is asked for.
        """
        state, mode = self._state, DeferredMode(self.rules, self.device)
        set_anew = state.set_anew if state else {}
        if state and set_anew:
            mode = _ReadingMode(self.rules, self.device, set_anew.keys(), state.read)
        with mode:
            output = forward(**self.tensors, **self.options, **{CACHE_NAME: self.cache})
        self._writes = mode.num_writes
        self.cache.check_attended()
        if not isinstance(output, ModelOutput):
            raise StepUnsuited(f"the forward returns a {type(output).__name__}")
        for name, x in output.items():
            if id(x) in set_anew:
                self._handed_on[name] = set_anew[id(x)]
            elif isinstance(x, torch.Tensor):
                picks = name == "logits" and self.wanted is not None
                if picks and len(x) != self.num_rows:
                    raise StepUnsuited("the logits are not a row for each token")
                output[name] = pick_rows(mode, x, self.wanted) if picks else mode.tensor(x)  # type: ignore[arg-type]
            elif x is not self.cache:
                raise StepUnsuited(f"the forward's output has a {name} of type {type(x).__name__}")
        if watch is not None:
            self.head_input = mode.tensor(watch.take())
        return output

    def capture(
        self, forward: Forward, pool: Any, stream: torch.cuda.Stream, watch: HeadInput | None = None
    ) -> None:
        """Records the step. Everything that it needs must have been compiled by `compute`."""
        self._graph, self.output = record(lambda: self.compute(forward, watch), self.device, pool, stream, True)
        self.carveout = tune(self._graph, not (self._writes or self.is_packed), len(self.seq_lens))
        self._bases = [(i, x.store, *_base(x.store)) for i, x in enumerate(self.cache.layers) if x.store is not None]
        self._versions = {window: group.blocks.version for window, group in self.groups.items()}

    def serves(self, cache: PagedCache, ahead: int = 0) -> bool:
        """Whether the graph reads this cache's blocks, and its rows fit.

        Args:
            ahead: so many more tokens than the host knows rows may have got.
        """
        if any(cache.layers[i].store is not store for i, store, *_ in self._bases):
            return False
        longest = max(cache.layout.next_lengths(cache.num_columns), default=0) + ahead
        for window, group in self.groups.items():
            if longest > group.block_tables.shape[1] * group.blocks.block_size:
                return False
            if self._versions[window] != group.blocks.version:
                for layer in self.cache.layers:
                    if layer.group is group and layer.store is not None:
                        group.blocks.kv(layer.store)
                if any(_base(store) != tuple(base) for _, store, *base in self._bases):
                    return False
                self._versions[window] = group.blocks.version
        return True

    @property
    def is_packed(self) -> bool:
        """Whether rows of the cache bring different numbers of tokens."""
        return self.wanted is not None

    def has_follower(self, key: Hashable) -> bool:
        """Whether `follow` need not record what it is asked for."""
        return key in self._followers

    def follow(
        self,
        key: Hashable,
        function: Follower,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> torch.Tensor:
        """Replays the step, then what is computed of its output: recorded when it is first asked for.

        Args:
            key: of the function; `function` is the same for one that is equal.
            function: reads the graph's `output`, `head_input`, `tensors`, `seq_lens`, `last_position` and tables, may
                write the inputs of a next step there, and waits for nothing.
        """
        if self._graph is None:
            raise RuntimeError("the step has not been captured")
        self.turn += 1
        self._graph.replay()
        if key not in self._followers:
            inputs = [x.clone() for x in (*self.tensors.values(), self.seq_lens)]
            function(self)  # compiles
            for x, before in zip((*self.tensors.values(), self.seq_lens), inputs, strict=True):
                x.copy_(before)
            self._graph.replay()  # the function may have moved tokens
            self._followers[key] = (*record(lambda: function(self), self.device, pool, stream), function)
        graph, result, _ = self._followers[key]
        graph.replay()
        return result.clone()  # another thread's step may come next

    def replay(self, cache: PagedCache, num_rows: int) -> ModelOutput:
        """Runs the captured step on the current stream."""
        if self._graph is None or self.output is None:
            raise RuntimeError("the step has not been captured")
        self._graph.replay()
        return self.result(self.output, cache, num_rows)

    def result(self, output: ModelOutput, cache: PagedCache, num_rows: int) -> ModelOutput:
        """A copy of an output for the caller, with its own cache in it."""
        values: dict[str, Any] = {}
        for name, x in output.items():
            if name in self._handed_on:
                values[name] = self._handed_on[name]()
            elif name == "logits" and self.wanted is not None:
                values[name] = x[: len(cache.layout.wanted)].clone()
            elif isinstance(x, torch.Tensor):
                values[name] = (x[:num_rows] if x.dim() and len(x) == self.num_rows else x).clone()
            else:
                values[name] = cache
        if cache.head_input is not None and self.head_input is not None:
            cache.head_input.value = self.head_input[:num_rows].clone()
        return type(output)(**values)


class _ReadingMode(DeferredMode):
    """Notes which of some tensors operations read.

    Args:
        rules, device: as of `DeferredMode`.
        tensors: ids of those tensors.
        read: where the ids of those that are read are put.
    """

    def __init__(self, rules: Sequence[Rule], device: torch.device, tensors: Set[int], read: set[int]) -> None:
        super().__init__(rules, device)
        self._tensors, self._read = tensors, read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._read.update(self._tensors & {id(x) for x in tree_leaves((args, kwargs))})
        return super().__torch_dispatch__(func, types, args, kwargs)


def _base(store: LayerStore) -> tuple[int, ...]:
    """Where the first segments of a layer's keys and values lie, and what leads to the others; of its codes, too."""
    stores = (store, store.codes) if isinstance(store, CodedStore) else (store,)
    kvs = [one.kv for one in stores if one.kv is not None]
    places = ((kv.k_segments[0], kv.v_segments[0], kv.segment_offsets) for kv in kvs)
    return tuple(x.data_ptr() for xs in places for x in xs)
