"""Decode steps as they are captured, on a CPU: computed through the deferred mode, but not recorded."""

from __future__ import annotations

from contextlib import nullcontext

import torch

import hf_turbo
from hf_turbo.cache.paged_cache import PagedCache
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import graphs, prompt_steps, step_graph
from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.modeling.step_graph import StepGraph, StepInputs, _base
from hf_turbo.ops import dispatch
from hf_turbo.patching import handle_of


class Step(StepGraph):
    """The reference ops read a step's geometry on the host."""

    def load(self, cache, inputs, tables=None, code_tables=None, lengths=None):
        super().load(cache, inputs, tables, code_tables, lengths)
        self.look(cache)

    def look(self, cache):
        """Tells the host what is on the device; rows that no cache has are empty."""
        unused = len(self.seq_lens) - cache.batch_size
        for window, group in self.groups.items():
            table, metadata = cache.groups[window].table, group.plan.metadata
            for made_of_them in ("runs", "even_rows"):
                vars(metadata).pop(made_of_them, None)
            metadata.seq_lens_cpu = self.seq_lens.tolist()
            metadata.q_lens_cpu = self.cu_seqlens_q.diff().tolist()
            metadata.block_ids_cpu = [list(row) for row in table.rows] + [[] for _ in range(unused)]
            metadata.first_blocks_cpu = list(table.first) + [0] * unused
            metadata.coded_rows = table.coded_rows(range(len(table.rows)))


def step(model, cache, **kwargs):
    """The logits of one step by way of a `StepGraph`."""
    handle = handle_of(model)
    kwargs[CACHE_NAME] = cache
    inputs = StepInputs.of(kwargs)
    cache.layout.read_padding(kwargs.get("attention_mask"), inputs.num_rows, cache.get_seq_length(), 1)
    start = cache.get_seq_length()
    cache.advance()
    graph = Step(handle.pool, handle.sliding_windows, STEP_RULES, inputs, dict.fromkeys(cache.groups, 64))
    graph.load(cache, inputs)
    forward = type(model)._hf_turbo_original_class.forward
    output = graph.result(graph.compute(lambda **k: forward(model, **k)), cache, inputs.num_rows)
    cache.finish_step(start + 1)
    return output.logits


def tree_step(model, cache, tree, tokens, position_ids, graphs=None, **kwargs):
    """The logits `[rows, nodes, vocabulary]` of drafts by way of a `StepGraph`; the cache then waits for its `keep`.

    Args:
        tree: the shape of the drafts.
        tokens, position_ids: int64 `[rows, nodes]`.
        graphs: those that were made before, by their keys; a new one is added.
    """
    handle = handle_of(model)
    layout = cache.layout
    layout.tree, layout.only_ones_follow = tree, True
    kwargs |= {"input_ids": tokens.reshape(-1, 1), "position_ids": position_ids.reshape(-1, 1), CACHE_NAME: cache}
    inputs = StepInputs.of(kwargs)
    cache.advance()
    graphs = {} if graphs is None else graphs
    if inputs.key not in graphs:
        columns = dict.fromkeys(cache.groups, 64)
        graphs[inputs.key] = Step(handle.pool, handle.sliding_windows, STEP_RULES, inputs, columns)
    graph = graphs[inputs.key]
    graph.load(cache, inputs)
    forward = type(model)._hf_turbo_original_class.forward
    output = graph.result(graph.compute(lambda **k: forward(model, **k)), cache, inputs.num_rows)
    layout.tree, layout.only_ones_follow = None, False
    return output.logits.view(*tokens.shape, -1)


class CapturedSteps:
    """What a GPU's captured steps do, in a patched model's place for them: one graph for each kind of step."""

    def __init__(self, model):
        self.handle = handle_of(model)
        self.graphs = {}
        self.num_replayed = 0

    def run(self, model, forward, kwargs):
        cache, inputs = kwargs[CACHE_NAME], StepInputs.of(kwargs)
        if inputs is None or inputs.num_seqs is None or (cache.num_columns == 0 and inputs.packed is None):
            return None
        start = cache.num_columns
        cache.advance()
        if inputs.key not in self.graphs:
            columns = dict.fromkeys(cache.groups, 64)
            self.graphs[inputs.key] = Step(
                self.handle.pool, self.handle.sliding_windows, STEP_RULES, inputs, columns
            )
        graph = self.graphs[inputs.key]
        graph.load(cache, inputs)
        output = graph.result(graph.compute(forward, cache.head_input), cache, inputs.num_rows)
        if cache.layout.unsuited is None:
            cache.finish_step(start + 1)
        self.num_replayed += 1
        return output


class PromptSteps(CapturedSteps):
    """Captured steps that leave decode steps alone, and count prompts."""

    def __init__(self, model):
        super().__init__(model)
        self.num_rows = []

    @property
    def num_prompts(self):
        return len(self.num_rows)

    def run(self, model, forward, kwargs):
        cache = kwargs.get(CACHE_NAME)
        if not isinstance(cache, PagedCache) or cache.layout.packed is None:
            return None
        self.num_rows.append(len(kwargs["input_ids"]))
        for layer in cache.layers:  # a graph serves those caches alone whose blocks it writes to
            assert layer.store is layer.group.table.group.stores.get(layer.layer_idx)
        return super().run(model, forward, kwargs)


def capture_prompts(monkeypatch):
    """A function that has a patched model's prompts go through captured steps."""
    monkeypatch.setattr(prompt_steps, "uses_triton", lambda device: True)
    # The kernels' table has no CPU in it: take what it says of a GPU.
    monkeypatch.setattr(dispatch, "serves_linear", lambda rows, *args, **options: rows <= 64)

    def make(model):
        steps = PromptSteps(model)
        monkeypatch.setattr(handle_of(model).steps, "run", steps.run)
        return steps

    return make


class Played:
    """What a CUDA graph is, of a function that is called again."""

    def __init__(self, function):
        self.replay = function


def capture_without_gpu(monkeypatch):
    """Has `StepGraphs` serve models on a CPU, where its `_run` is asked: a graph is computed anew at each replay."""

    class Recorded(Step):
        def capture(self, forward, pool, stream, watch=None):
            self._versions = {window: group.blocks.version for window, group in self.groups.items()}
            self._bases = [(i, x.store, *_base(x.store)) for i, x in enumerate(self.cache.layers)]
            self.output = self.compute(forward, watch)
            self._graph = Played(lambda: setattr(self, "output", self.compute(forward, watch)))

    def record(function, *where):
        result = function()
        return Played(lambda: result.copy_(function())), result

    monkeypatch.setattr(step_graph, "record", record)
    monkeypatch.setattr(graphs, "StepGraph", Recorded)
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: None)
    monkeypatch.setattr(graphs.StepGraphs, "_order_streams", lambda self: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)


def serve_without_gpu(monkeypatch):
    """The same for all of a patched model's steps."""
    capture_without_gpu(monkeypatch)
    monkeypatch.setattr(graphs, "uses_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def decode_steps(num_steps):
    """The arguments of a left-padded prompt of three rows, and those of steps after it."""
    prompt = torch.randint(3, 60, (3, 11))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    steps = []
    for i in range(1, num_steps + 1):
        grown = torch.nn.functional.pad(mask, (0, i), value=1)
        token = torch.randint(3, 60, (3, 1))
        steps.append({"input_ids": token, "attention_mask": grown, "position_ids": positions[:, -1:] + i})
    return {"input_ids": prompt, "attention_mask": mask, "position_ids": positions}, steps


def own_logits(model, cache, steps):
    return [model(**inputs, **{CACHE_NAME: cache}).logits for inputs in steps]


@torch.no_grad()
def check_a_step(model, calls):
    """Patches a model; its deferred step has its own logits, and `calls` counts what is launched for that alone."""
    prompt, steps = decode_steps(1)
    [expected] = own_logits(model, model(**prompt, use_cache=True)[CACHE_NAME], steps)
    hf_turbo.patch(model, block_size=4)
    cache = hf_turbo.paged_cache(model)
    model(**prompt, **{CACHE_NAME: cache})
    calls.clear()
    torch.testing.assert_close(step(model, cache, use_cache=True, **steps[0]), expected, rtol=1e-4, atol=1e-4)
