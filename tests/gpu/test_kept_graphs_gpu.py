"""Which captured steps are kept, on a GPU; see `test_kept_graphs`."""

import pytest
import torch
from graph_cases import GPU, on_gpu, patched_model, replays, steps, stock_model
from helpers import new_text, prompt, ragged, used_blocks
from test_kept_graphs import picture, picture_models

import hf_turbo
from hf_turbo.modeling import step_graph
from hf_turbo.patching import handle_of

pytestmark = GPU


def test_models_that_take_pictures():
    """What `generate()` sets anew drops no graph of theirs."""
    stock, model = (one.cuda() for one in picture_models())
    captured = []
    for inputs in (ragged(9), ragged(9, 5), picture(3), picture(3, 9), ragged(12, 7), picture(5), ragged(14)):
        with replays(model):
            assert torch.equal(new_text(model, on_gpu(inputs), 12), new_text(stock, on_gpu(inputs), 12))
        captured.append(steps(model).num_captured)
    assert steps(model).num_dropped == 0 and captured[3] == captured[-1] <= 5


@pytest.mark.parametrize("after", [0, 1])
def test_too_little_memory_for_a_follower(monkeypatch, after):
    """Drafts are verified with the host waiting then, and the text is the same."""
    stock, model = stock_model("llama"), patched_model("llama", turbo={"speculation": hf_turbo.PromptLookup(4, 1)})
    record, calls = step_graph.record, []

    def fails(function, *where):
        if "follow" not in function.__qualname__:
            return record(function, *where)
        calls.append(function)
        if len(calls) > after:
            raise torch.OutOfMemoryError("all is taken")
        return record(function, *where)

    monkeypatch.setattr(step_graph, "record", fails)
    inputs = on_gpu(prompt(1, 9).repeat(1, 4))
    for _ in range(2):
        assert torch.equal(new_text(model, inputs, 60), new_text(stock, inputs, 60))
    assert 0 < len(calls) <= after + 1 and used_blocks(model) == 0  # it is not tried again
    said = [reason for reason in handle_of(model).stepped_aside if "too little memory" in reason]
    assert len(said) == (len(calls) > after)
