"""The division of memory that a captured step's kernels ask for, and what must be as it is without."""

import pytest
import torch
from graph_cases import GPU, assert_same, outcome, patched_model, steps

from hf_turbo.modeling import carveout, step_graph

pytestmark = GPU


@pytest.mark.parametrize("percent", [None, *carveout.PERCENTS])
def test_all_kernels_of_a_step_ask_for_it(monkeypatch, percent):
    expected = outcome(patched_model("llama"))
    monkeypatch.setattr(carveout, "fastest", lambda seconds: percent)
    monkeypatch.setattr(carveout, "_MOST_SEQS", 8)
    model = patched_model("llama")
    assert_same(outcome(model), expected)
    graphs = [graph for graph in steps(model)._graphs.values() if not graph.is_packed]
    assert graphs
    for graph in graphs:
        assert graph.carveout == percent
        asked = carveout.percents_of(graph._graph)
        assert asked == {percent or 0}


class Counting(torch.nn.Module):
    """Counts its calls on the GPU."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64, device="cuda"))

    def forward(self, *args, **kwargs):
        self.calls.add_(1)
        return self.module(*args, **kwargs)


def test_a_model_that_counts_its_steps_counts_right(monkeypatch):
    """Of such a step nothing is timed: each replay would count."""
    monkeypatch.setattr(carveout, "_MOST_SEQS", 8)
    counts = []
    for tunes in (False, True):
        with monkeypatch.context() as patch:
            if not tunes:
                patch.setattr(step_graph, "tune", lambda graph, *args: graph.instantiate())
            model = patched_model("llama")
            model.model.norm = Counting(model.model.norm)
            outcome(model)
            counts.append(model.model.norm.calls.item())
    assert counts[0] == counts[1] > 0
