"""Decode steps as they are captured, on a CPU: computed through the deferred mode, but not recorded."""

from __future__ import annotations

import torch

from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.modeling.step_graph import StepGraph, StepInputs
from hf_turbo.patching import handle_of


class Step(StepGraph):
    """The reference ops read a step's geometry on the host."""

    def load(self, cache, inputs, tables=None, code_tables=None):
        super().load(cache, inputs, tables, code_tables)
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
