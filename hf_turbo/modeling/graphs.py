"""The captured decode steps of one patched model: one for each number of rows, made on first need.

They belong to the model as it was: what the forward's Python code could see is compared while the GPU works, and a
step of a model that has changed meanwhile is computed again, the model's own way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from transformers.utils import ModelOutput

from ..cache.ahead_rows import AheadRows
from ..cache.block_pool import BlockPool
from ..cache.paged_cache import PagedCache
from ..cache.step_cache import StepUnsuited
from ..compat import CACHE_NAME
from ..config import TurboConfig
from ..ops.dispatch import uses_triton
from .fusion import STEP_RULES
from .model_state import CapturedState, is_watched, shifts_positions, why_not_captured
from .step_graph import Follower, Forward, StepGraph, StepInputs

#: Graphs of one model at most, of decode steps, and as many of steps with prompts: neither drives the others out. The
#: one that was not used for longest goes. Requests that come and go need one for each of 25 numbers of rows; prompts of
#: all lengths one for each of 14 sizes with room for 16, 64 or 256 of them: 42. (Of a quantized cache, what follows a
#: text has others than what begins one: 14 each with room for 16.)
MAX_GRAPHS = 48
#: A model that changed so often, each time before so many replays, is not captured any more.
_MAX_WASTED, _FEW_REPLAYS = 4, 8


class Followed(NamedTuple):
    """What a follower gave, and how to go on from it: the graph, the follower, and the graph's turn."""

    result: torch.Tensor
    graph: StepGraph
    key: Hashable
    follower: Follower
    turn: int


class Owner(Protocol):
    """What the steps need of a patch handle."""

    config: TurboConfig
    pool: BlockPool
    sliding_windows: list[int | None]

    def attention_is_ours(self) -> bool: ...

    def step_aside(self, reason: str) -> None: ...


class StepGraphs:
    """The captured steps of one patched model.

    Args:
        owner: the model's patch handle.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._graphs: OrderedDict[Any, StepGraph] = OrderedDict()
        self._lock = threading.RLock()
        self._state: CapturedState | None = None
        #: Why steps can't be captured, and those with prompts, which have other tensors; by what computes experts.
        self._refusals: dict[tuple[bool, tuple[Any, ...]], str] = {}
        #: Whether there was too little memory to record what follows a step.
        self._refuses_followers = False
        self._pool: Any = None
        self._last_stream: torch.cuda.Stream | None = None
        self.num_captured = self.num_replayed = self.num_dropped = 0
        self._num_wasted = self._num_replayed_before = 0

    def __reduce__(self) -> tuple[type[StepGraphs], tuple[Owner]]:
        return StepGraphs, (self._owner,)  # a copy of the model captures its own

    @property
    def is_refused(self) -> bool:
        """Whether steps of the model, as it was last, can't be captured, or not those with prompts."""
        refused = {experts for _, experts in list(self._refusals)}
        return self._experts in refused or self._num_wasted >= _MAX_WASTED

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Device memory that the captures took."""
        return sum(graph.num_bytes for graph in list(self._graphs.values()))

    def run(self, model: Any, forward: Forward, kwargs: dict[str, Any]) -> ModelOutput | None:
        """One decode step, or one with prompts, by a graph.

        Args:
            model: the patched model.
            forward: its own forward, bound.
            kwargs: the arguments, all by name.

        Returns:
            What the forward would return, or None: this call goes the model's own way.
        """
        cache: Any = kwargs.get(CACHE_NAME)
        inputs = self._inputs_of(cache, kwargs)
        if inputs is None:
            return None
        device = inputs.tensors["input_ids"].device
        # What is made here outlives the call, and the next one may be outside of an inference mode.
        with self._lock, torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            if not self._is_allowed(inputs.packed is not None):
                return None
            if not self._takes_mask(cache, kwargs.get("attention_mask"), inputs):
                return None
            return self._run(model, forward, cache, inputs)

    def run_ahead(
        self, cache: PagedCache, kwargs: dict[str, Any], rows: AheadRows, origins: torch.Tensor
    ) -> ModelOutput | None:
        """One decode step of rows that only the device knows, by a graph that is there already.

        Args:
            cache: whose rows they are; they are advanced here, and are to be caught up with.
            kwargs: as of `run`.
            rows: the cache's.
            origins: int64 `[rows]`, the row that each goes on from.

        Returns:
            What the forward would return, or None: nothing has been done.
        """
        inputs = self._inputs_of(cache, kwargs)
        if inputs is None or not cache.model_is_as_it_was or "position_ids" not in inputs.tensors:
            return None
        if not rows.can_advance:
            return None
        device = inputs.tensors["input_ids"].device
        with self._lock, torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            place = self._key(inputs)
            graph = self._graphs.get(place)
            if graph is None or self._state is None or not self._state.same_memory() or not graph.serves(cache):
                return None
            tables = rows.advance(origins)
            self._graphs.move_to_end(place)
            self._order_streams()
            graph.load(cache, inputs, tables, rows.code_tables)
            self.num_replayed += 1
            return graph.replay(cache, inputs.num_rows)

    def run_drafts(
        self,
        cache: PagedCache,
        kwargs: dict[str, Any],
        lengths: torch.Tensor | None,
        last_position: torch.Tensor | None,
        ahead: int,
        key: Hashable,
        follower: Follower,
    ) -> Followed | None:
        """Verifies drafts by a graph that is there already, and computes what follows by another.

        Or computes what rows that don't draft bring, and what follows.

        Args:
            cache: whose `layout` knows the tree, or what each row brings.
            kwargs: as of `run`.
            lengths: tokens of each row, int64 `[rows]`, where forwards are under way; None: the host knows them.
            last_position: of drafts, int64 `[]`; None without a limit.
            ahead: tokens that a row may have got by those, at most.
            key, follower: as of `StepGraph.follow`.

        Returns:
            None: nothing has been done.
        """
        is_first, inputs = not cache.model_is_as_it_was, self._inputs_of(cache, kwargs)
        if inputs is None:
            return None
        device = inputs.tensors["input_ids"].device
        with self._lock, torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            place = self._key(inputs)
            graph = self._graphs.get(place)
            if graph is None or self._state is None or not self._state.same_memory():
                return None
            if self._refuses_followers and not graph.has_follower(key):
                return None
            cache.advance(ahead)
            if not graph.serves(cache, ahead):
                return None
            self._graphs.move_to_end(place)
            self._order_streams()
            graph.load(cache, inputs, lengths=lengths)
            graph.limit(last_position)
            result = self._follow(graph, key, follower)
            if is_first and not self._state.unchanged():  # looked at while the GPU works
                self._drop_changed()
                return None
            return result

    def run_drafts_again(self, cache: PagedCache, last: Followed, ahead: int) -> Followed | None:
        """The same for drafts that the follower of the last round has left in the graph's inputs.

        Returns:
            None: something else has used the graph since; nothing has been done.
        """
        graph = last.graph
        with self._lock, torch.cuda.device(graph.device), torch.inference_mode(False), torch.no_grad():
            if graph.turn != last.turn or self._state is None or not self._state.same_memory():
                return None
            cache.advance(ahead)
            if not graph.serves(cache, ahead):
                return None
            self._order_streams()
            graph.load_tables(cache)
            return self._follow(graph, last.key, last.follower)

    def drop(self) -> None:
        """Forgets all graphs and gives their memory back."""
        with self._lock:
            self.num_dropped += len(self._graphs)
            self._graphs.clear()
            self._refusals, self._refuses_followers = {}, False
            self._state = self._pool = None

    def _inputs_of(self, cache: Any, kwargs: dict[str, Any]) -> StepInputs | None:
        """A step's inputs; None where no graph may serve it. Arguments as of `run`."""
        if not isinstance(cache, PagedCache) or torch.is_grad_enabled() or not self._wants(cache):
            return None
        if kwargs.get("return_dict") is False:
            return None
        inputs = StepInputs.of(kwargs)
        if inputs is None or not uses_triton(inputs.tensors["input_ids"].device) or is_watched():
            return None
        if inputs.packed is not None and "logits_to_keep" in inputs.tensors:
            return None  # one token as a row of tokens, not as a row for each
        if inputs.num_seqs is None:
            self._owner.step_aside("decode steps of more than 512 rows, drafts included, are not captured")
            return None
        if torch.is_autocast_enabled("cuda"):  # it keeps copies of weights, for longer than a forward
            self._owner.step_aside("decode steps under autocast are not captured")
            return None
        return inputs

    def _wants(self, cache: PagedCache) -> bool:
        return (
            self._owner.config.cuda_graphs
            and self._num_wasted < _MAX_WASTED
            and cache.pool is self._owner.pool
            and (cache.num_columns > 0 or cache.layout.packed is not None)
            and self._owner.attention_is_ours()
        )

    def _is_allowed(self, is_packed: bool) -> bool:
        if self._refusals.keys().isdisjoint(((False, self._experts), (is_packed, self._experts))):
            return True
        if self._state is not None and self._state.unchanged():
            return False
        self.drop()
        return True

    def _takes_mask(self, cache: PagedCache, mask: Any, inputs: StepInputs) -> bool:
        """Whether the mask is the left padding that the cache was filled with."""
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
            return False
        num_rows = cache.batch_size * inputs.num_nodes if inputs.packed is None else sum(inputs.packed)
        if num_rows != inputs.num_rows:
            return False
        layout = cache.layout
        return layout.unsuited is not None or layout.read_padding(mask, inputs.num_rows, cache.num_columns, 1)

    def _run(
        self, model: Any, forward: Forward, cache: PagedCache, inputs: StepInputs
    ) -> ModelOutput | None:
        start = cache.num_columns
        counts_itself = "position_ids" not in inputs.tensors
        if counts_itself:
            inputs.tensors["position_ids"] = torch.full((1, 1), start, device=inputs.tensors["input_ids"].device)
        if self._graphs and (self._state is None or not self._state.same_memory()):
            self._drop_changed()
        cache.advance()
        place = self._key(inputs)
        graph = self._graphs.get(place)
        if graph is not None and not graph.serves(cache):
            del self._graphs[place]
            self.num_dropped += 1
            graph = None
        if graph is None:
            if counts_itself and shifts_positions(model):
                return None
            result = self._capture(model, forward, cache, inputs)
        else:
            self._graphs.move_to_end(place)
            self._order_streams()
            graph.load(cache, inputs)
            result = graph.replay(cache, inputs.num_rows)
            self.num_replayed += 1
            if not cache.model_is_as_it_was and self._state is not None and not self._state.unchanged():
                self._drop_changed()  # that step was of a model that is no more
                return None
            if counts_itself and shifts_positions(model):  # looked at while the GPU works
                return None
        if result is not None and cache.layout.unsuited is None:
            cache.finish_step(start + 1)
        return result

    def _key(self, inputs: StepInputs) -> tuple[Any, ...]:
        """Under which a graph for these inputs is kept. Once a call: other threads' `generate()` switches experts."""
        return *inputs.key, self._experts

    @property
    def _experts(self) -> tuple[Any, ...]:
        state = self._state
        return () if state is None else state.experts

    def _capture(self, model: Any, forward: Forward, cache: PagedCache, inputs: StepInputs) -> ModelOutput | None:
        """The first step with these inputs: computed, then captured for the next ones."""
        if self._state is not None and not self._state.unchanged():
            self._drop_changed()  # one state stands for all graphs
        if self._state is None:
            self._state = CapturedState(model)
        place, is_packed = self._key(inputs), inputs.packed is not None
        reason = why_not_captured(model)
        if reason is not None:
            self._refuse(reason)
            return None
        if not self._graphs:  # a pool whose graphs are all gone is gone, too
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_reserved()
        rules = STEP_RULES if self._owner.config.fused_layers else ()
        columns = self._columns(model, cache)
        graph = StepGraph(self._owner.pool, self._owner.sliding_windows, rules, inputs, columns, self._state)
        self._order_streams()
        try:
            graph.load(cache, inputs)
            watch = cache.head_input
            result = graph.result(graph.compute(forward, watch), cache, inputs.num_rows)
            hidden = None if watch is None else watch.value
            graph.capture(forward, self._pool, _capture_stream(graph.device), watch)
            if watch is not None:
                watch.value = hidden
        except StepUnsuited as error:
            self._refuse(str(error), is_packed)
            return None
        except torch.OutOfMemoryError:
            self.drop()
            self._state = CapturedState(model)
            self._refuse("there is too little memory", is_packed)  # the model's own way may yet fit
            return None
        except Exception as error:  # whatever the model's code says to tensors without numbers
            reason = f"capturing the step failed: {error}".splitlines()[0]
            self._refuse(reason, is_packed)
            return None
        alike = [key for key, one in self._graphs.items() if one.is_packed == is_packed]
        for key in alike[: max(len(alike) + 1 - MAX_GRAPHS, 0)]:
            del self._graphs[key]
        self._graphs[place] = graph
        self.num_captured += 1
        graph.num_bytes = max(torch.cuda.memory_reserved() - before, 0)
        if cache.num_columns and not graph.serves(cache):
            return None  # the model computes other keys now than the cache holds: its own way says so
        return result

    def _follow(self, graph: StepGraph, key: Hashable, follower: Follower) -> Followed | None:
        """Replays a step and what follows it; None: there is too little memory for that, the host must see to it."""
        self.num_replayed += 1
        try:
            result = graph.follow(key, follower, self._pool, _capture_stream(graph.device))
        except torch.OutOfMemoryError:
            self._refuses_followers = True
            self._owner.step_aside("what follows a step waits for the host: there is too little memory to record it")
            return None
        return Followed(result, graph, key, follower, graph.turn)

    def _drop_changed(self) -> None:
        """Drops the graphs of a model that has changed. One that keeps changing is cheaper without any."""
        hardly_used = self.num_replayed - self._num_replayed_before < _FEW_REPLAYS
        self._num_wasted = self._num_wasted + 1 if hardly_used else 0
        self._num_replayed_before = self.num_replayed
        self.drop()
        if self._num_wasted == _MAX_WASTED:
            self._owner.step_aside("decode steps are not captured any more: the model changes every few steps")

    def _refuse(self, reason: str, is_packed: bool = False) -> None:
        self._refusals[is_packed, self._experts] = reason
        self._owner.step_aside(f"{'prompts' if is_packed else 'decode steps'} are not captured: {reason}")

    def _columns(self, model: Any, cache: PagedCache) -> dict[int | None, int]:
        """Blocks for the longest context that the model was made for, or twice the present one."""
        longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
        tokens = max(longest, 2 * max(cache.layout.next_lengths(cache.num_columns)))
        return {window: -(-tokens // group.table.group.block_size) for window, group in cache.groups.items()}

    def _order_streams(self) -> None:
        """Graphs share their inputs and memory: what another stream still runs comes first."""
        stream = torch.cuda.current_stream()
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all models: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)
