"""A decode step as it is captured, on a CPU: computed through the deferred mode with every rule, but not recorded."""

from __future__ import annotations

import pytest
import torch
import tiny_models
from tiny_models import ACCELERATED, ZOO, build, expectation, in_this_transformers

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling.fusion import RULES
from hf_turbo.modeling.step_graph import StepGraph, StepInputs
from hf_turbo.ops import dispatch
from hf_turbo.patching import handle_of

#: Why steps of these are not captured.
UNSUITED = {
    "biogpt": "reads the cache's length",
    "ctrl": "reads the cache's length",
    "opt": "reads the cache's length",
    "qwen2_moe": "not of the layers' window",
}
NAMES = [name for name in ZOO if in_this_transformers(name)]


@pytest.fixture(autouse=True)
def _few_rows_merge(monkeypatch):
    """The kernels' table has no CPU in it: take what it says of a GPU."""

    def serves(rows, weights, dtype, device, *, norm, activation):
        return rows <= 64 and (rows <= 4 or not norm)

    monkeypatch.setattr(dispatch, "serves_linear", serves)


class Step(StepGraph):
    """The reference ops read a step's geometry on the host."""

    def load(self, cache, inputs):
        super().load(cache, inputs)
        for window, group in self.groups.items():
            table, metadata = cache.groups[window].table, group.plan.metadata
            unused = self.num_rows - inputs.num_rows
            metadata.seq_lens_cpu = self.seq_lens.tolist()
            metadata.q_lens_cpu = [1] * inputs.num_rows + [0] * unused
            metadata.block_ids_cpu = [list(row) for row in table.rows] + [[]] * unused
            metadata.first_blocks_cpu = list(table.first) + [0] * unused


def step(model, cache, **kwargs):
    """The logits of one step by way of a `StepGraph`."""
    handle = handle_of(model)
    kwargs[CACHE_NAME] = cache
    inputs = StepInputs.of(kwargs)
    cache.layout.read_padding(kwargs.get("attention_mask"), inputs.num_rows, cache.get_seq_length(), 1)
    start = cache.get_seq_length()
    cache.advance()
    graph = Step(handle.pool, handle.sliding_windows, RULES, inputs, dict.fromkeys(cache.groups, 64))
    graph.load(cache, inputs)
    forward = type(model)._hf_turbo_original_class.forward
    output = graph.result(graph.compute(lambda **k: forward(model, **k)), cache, inputs.num_rows)
    cache.finish_step(start + 1)
    return output.logits


@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_models_own(name):
    """Within the rounding of sums in another order; what can't be captured says so."""
    model = build(name)
    if expectation(model, name) != ACCELERATED:
        pytest.skip("steps aside")
    prompt = torch.randint(3, 60, (3, 11))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    tokens = torch.randint(3, 60, (3, 4))
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    with torch.no_grad():
        expected = []
        cache = model(prompt, attention_mask=mask, position_ids=positions, use_cache=True)[CACHE_NAME]
        grown = mask
        for i in range(4):
            grown = torch.nn.functional.pad(grown, (0, 1), value=1)
            position = positions[:, -1:] + 1 + i
            out = model(tokens[:, i : i + 1], attention_mask=grown, position_ids=position, **{CACHE_NAME: cache})
            expected.append(out.logits)
        hf_turbo.patch(model, block_size=4)
        cache = hf_turbo.paged_cache(model)
        model(prompt, attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache})
        grown = mask
        for i in range(4):
            grown = torch.nn.functional.pad(grown, (0, 1), value=1)
            position = positions[:, -1:] + 1 + i
            logits = step(
                model, cache, input_ids=tokens[:, i : i + 1], attention_mask=grown, position_ids=position, use_cache=True
            )
            torch.testing.assert_close(logits, expected[i], rtol=2e-5, atol=2e-5)
