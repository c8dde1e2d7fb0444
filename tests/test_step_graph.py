"""A decode step as it is captured, on a CPU: computed through the deferred mode with every rule, but not recorded."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ACCELERATED, ZOO, build, expectation, in_this_transformers

import hf_turbo
from hf_turbo.cache.step_cache import StepUnsuited
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.modeling.step_graph import StepGraph, StepInputs
from hf_turbo.ops import dispatch
from hf_turbo.patching import handle_of

#: Why steps of these are not captured.
UNSUITED = {
    "biogpt": "reads the cache's length",
    "ctrl": "reads the cache's length",
    "opt": "reads the cache's length",
}
NAMES = [name for name in ZOO if in_this_transformers(name)]


@pytest.fixture(autouse=True)
def _few_rows_merge(monkeypatch):
    """The kernels' table has no CPU in it: take what it says of a GPU."""

    def serves(rows, weights, dtype, device, *, activation):
        return rows <= 64

    monkeypatch.setattr(dispatch, "serves_linear", serves)


class Step(StepGraph):
    """The reference ops read a step's geometry on the host."""

    def load(self, cache, inputs, tables=None):
        super().load(cache, inputs, tables)
        for window, group in self.groups.items():
            table, metadata = cache.groups[window].table, group.plan.metadata
            metadata.seq_lens_cpu = self.seq_lens.tolist()
            metadata.q_lens_cpu = [1] * self.num_rows
            metadata.block_ids_cpu = [list(row) for row in table.rows]
            metadata.first_blocks_cpu = list(table.first)


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


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNSUITED])
@torch.no_grad()
def test_a_step_equals_the_models_own(name):
    """Within the rounding of sums in another order."""
    model = build(name)
    if expectation(model, name) != ACCELERATED:
        pytest.skip("steps aside")
    prompt, steps = decode_steps(4)
    expected = own_logits(model, model(**prompt, use_cache=True)[CACHE_NAME], steps)
    hf_turbo.patch(model, block_size=4)
    cache = hf_turbo.paged_cache(model)
    model(**prompt, **{CACHE_NAME: cache})
    for inputs, logits in zip(steps, expected):
        torch.testing.assert_close(step(model, cache, use_cache=True, **inputs), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name in UNSUITED])
@torch.no_grad()
def test_what_is_not_captured_says_why(name):
    """And goes the model's own way, over the cache that the attempt has left."""
    model = build(name)
    prompt, steps = decode_steps(2)
    expected = own_logits(model, model(**prompt, use_cache=True)[CACHE_NAME], steps)
    hf_turbo.patch(model, block_size=4)
    cache = hf_turbo.paged_cache(model)
    model(**prompt, **{CACHE_NAME: cache})
    with pytest.raises(StepUnsuited, match=UNSUITED[name]):
        step(model, cache, use_cache=True, **steps[0])
    for logits, same in zip(own_logits(model, cache, steps), expected, strict=True):
        torch.testing.assert_close(logits, same, rtol=1e-4, atol=1e-4)
