"""Blocks that nobody holds say NaN at every moment of these tests; rounds with the host one behind, on a CPU."""

import sys
from pathlib import Path

import pytest
from drafting import Moves
from helpers import poison_what_is_freed
from steps import Step

from hf_turbo.generation import ahead_rounds, speculation
from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.modeling.graphs import Followed, StepGraphs
from hf_turbo.modeling.step_graph import StepInputs
from hf_turbo.patching import handle_of

# Small checkpoints are written by what the tests of quantization have for it.
sys.path.append(str(Path(__file__).parents[1] / "quantization"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every block that is given back is filled with NaN, codes with 0xFF."""
    poison_what_is_freed(monkeypatch)


@pytest.fixture
def ahead(monkeypatch):
    """Lets rounds go ahead: the graphs are computed through the deferred mode, but not recorded.

    The numbers of rounds that were loaded and of those that went on from what was left; and what a model is told to.
    """
    counts = {"loaded": 0, "gone on": 0}
    graphs = {}

    def played(steps, graph, cache, key, follower):
        graph.look(cache)
        model = graph.model
        forward = type(model)._hf_turbo_original_class.forward
        own = lambda **k: forward(model, **k)  # noqa: E731
        watch = cache.head_input
        graph.output = graph.compute(own if watch is None else watch.wrapped(own), watch)
        graph.turn += 1
        follower._addresses = None  # a kernel sees memory that the pool has got since
        return Followed(follower(graph).clone(), graph, key, follower, graph.turn)

    def run_drafts(steps, cache, kwargs, lengths, last_position, ahead, key, follower):
        inputs = StepInputs.of(kwargs)
        cache.advance(ahead)
        known = graphs.setdefault(id(steps), {})
        if (inputs.key, key) not in known:
            handle = steps._owner
            graph = Step(handle.pool, handle.sliding_windows, STEP_RULES, inputs, dict.fromkeys(cache.groups, 64))
            graph.model = models[id(handle)]
            known[inputs.key, key] = graph, follower
        graph, follower = known[inputs.key, key]
        super(Step, graph).load(cache, inputs, lengths=lengths)
        if last_position is not None:
            graph.last_position.copy_(last_position)
        counts["loaded"] += 1
        return played(steps, graph, cache, key, follower)

    def run_drafts_again(steps, cache, last, ahead):
        if last.graph.turn != last.turn:
            return None
        cache.advance(ahead)
        last.graph.load_tables(cache)
        counts["gone on"] += 1
        return played(steps, last.graph, cache, last.key, last.follower)

    models = {}
    monkeypatch.setattr(StepGraphs, "run_drafts", run_drafts)
    monkeypatch.setattr(StepGraphs, "run_drafts_again", run_drafts_again)
    monkeypatch.setattr(ahead_rounds, "token_addresses", Moves)
    monkeypatch.setattr(speculation, "runs_ahead", lambda device: True)
    return counts, lambda model: models.update({id(handle_of(model)): model})
