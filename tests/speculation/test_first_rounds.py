"""The first round of a call goes ahead like those after it, and the model is looked at meanwhile.

On a CPU: real graphs of steps, computed through the deferred mode, but not recorded.
"""

import gc

import pytest
import torch
from drafting import Moves, assert_same_output
from helpers import new_text, prompt, ragged, twins, used_blocks
from steps import serve_without_gpu
from test_ahead_rounds import drafters

import hf_turbo
from hf_turbo.generation import ahead_rounds, speculation
from hf_turbo.generation.medusa import MedusaDrafter
from hf_turbo.generation.pace import Pace
from hf_turbo.generation.paced import Steady
from hf_turbo.generation.tree_steps import TreeSteps
from hf_turbo.modeling.model_state import CapturedState
from hf_turbo.modeling.step_graph import StepGraph
from hf_turbo.patching import handle_of

NEW = 24


load_tables = StepGraph.load_tables


def load_tables_and_look(graph, cache, *tables):
    load_tables(graph, cache, *tables)
    graph.look(cache)


def follow(graph, key, function, *where):
    """What `StepGraph.follow` does, without a record: to compute a follower is to write to its inputs."""
    graph.turn += 1
    graph._graph.replay()
    return function(graph).clone()


@pytest.fixture(autouse=True)
def goes_ahead(monkeypatch):
    serve_without_gpu(monkeypatch)
    monkeypatch.setattr(StepGraph, "follow", follow)
    monkeypatch.setattr(StepGraph, "load_tables", load_tables_and_look)
    monkeypatch.setattr(ahead_rounds, "token_addresses", Moves)
    monkeypatch.setattr(speculation, "runs_ahead", lambda device: True)


@pytest.fixture
def by_host(monkeypatch):
    """Forwards of drafted text of which the host sees all, one entry each."""
    seen, forward = [], TreeSteps.forward

    def noted(steps, tree, tokens):
        seen.append(tree)
        return forward(steps, tree, tokens)

    monkeypatch.setattr(TreeSteps, "forward", noted)
    return seen


def drafting(tmp_path, kind):
    stock, model = twins("llama", block_size=8)
    hf_turbo.patch(model, block_size=8, speculation=drafters(stock, tmp_path)[kind])
    return stock, model


def texts(model, batch):
    inputs = batch if isinstance(batch, dict) else dict(input_ids=batch, attention_mask=torch.ones_like(batch))
    got = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert used_blocks(model) == 0
    return got[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("kind", ["medusa", "chain", "lookup", "adaptive lookup"])
def test_only_a_first_call_waits(by_host, tmp_path, monkeypatch, kind):
    stock, model = drafting(tmp_path, kind)
    for seed, batch in enumerate((prompt(1, 9), prompt(1, 20, seed=1), ragged(3, 9, 6), ragged(12, 5, 7, seed=2))):
        if seed == 2 or (seed == 3 and kind == "adaptive lookup"):
            by_host.clear()  # another number of rows has graphs of its own
        new = seed % 2 == 0
        before = len(by_host)
        assert torch.equal(texts(model, batch), new_text(stock, batch, NEW))
        if kind != "adaptive lookup":  # which comes to sizes that had no round yet
            assert (len(by_host) > before) == new
    replayed = handle_of(model).steps.num_replayed
    by_host.clear()
    looks, unchanged = [], CapturedState.unchanged
    monkeypatch.setattr(CapturedState, "unchanged", lambda state: looks.append(state) or unchanged(state))
    assert torch.equal(texts(model, batch), new_text(stock, batch, NEW))
    assert handle_of(model).steps.num_replayed > replayed
    assert kind == "adaptive lookup" or (not by_host and len(looks) == 1)


@pytest.fixture
def launched(monkeypatch):
    """Rounds, and whether the host knew the texts by then."""
    seen, launch, begin = [], ahead_rounds.AheadRounds._launch, speculation._Rounds.__init__

    def began(rounds, *args):
        begin(rounds, *args)
        seen.append(rounds._rows)

    def noted(rounds, tree, *args, **options):
        seen.append((tree.num_nodes, min(map(len, seen[0].texts.new))))
        return launch(rounds, tree, *args, **options)

    monkeypatch.setattr(speculation._Rounds, "__init__", began)
    monkeypatch.setattr(ahead_rounds.AheadRounds, "_launch", noted)
    return seen


@pytest.mark.parametrize("kind", ["medusa", "lookup", "adaptive lookup"])
def test_a_step_is_under_way_before_the_first_token_is_known(launched, tmp_path, kind):
    stock, model = drafting(tmp_path, kind)
    for batch in (ragged(3, 9, 6), ragged(12, 5, 7, seed=2)):
        for _ in range(2):
            launched.clear()
            assert torch.equal(texts(model, batch), new_text(stock, batch, NEW))
        assert launched[1] == (1, 0) and launched[2][1] == 1 and launched[2][0] > (kind != "adaptive lookup")


def test_each_round_behind_the_first_is_of_a_draft(launched, tmp_path):
    """Also where rows have left."""
    stock, model = drafting(tmp_path, "medusa")
    batch = ragged(3, 9, 6)
    said = new_text(stock, batch, NEW)
    options = dict(eos_token_id=[int(said[row, 7]) for row in (0, 1)], pad_token_id=0)
    for _ in range(3):
        launched.clear()
        got = model.generate(**batch, max_new_tokens=NEW, do_sample=False, **options)
        assert torch.equal(got[:, 9:], new_text(stock, batch, NEW, **options))
    nodes = [n for n, _ in launched[1:]]
    assert len(nodes) > 6 and nodes[0] == 1 and set(nodes[1:]) == {7}


def test_nothing_is_guessed_that_will_not_be_drafted(launched, tmp_path, monkeypatch):
    stock, model = drafting(tmp_path, "medusa")
    batch, guessed, guess = ragged(3, 9, 6), [], MedusaDrafter.guess
    monkeypatch.setattr(Steady, "choose", lambda pace: 0)
    monkeypatch.setattr(MedusaDrafter, "guess", lambda *args: guessed.append(args) or guess(*args))
    for _ in range(2):
        launched.clear()
        assert torch.equal(texts(model, batch), new_text(stock, batch, NEW))
    assert len(launched) > NEW // 2 and not guessed


def test_a_round_whose_seconds_are_not_known():
    """It counts, and says nothing of how long others take."""
    pace = Pace([3])
    for seconds in [None] * 8 + [1.0] * 4:
        pace.note(0, 0, 0, seconds)
    for _ in range(4):
        assert pace.relative_cost(3) is None
        pace.note(3, 3, 2, 2.0)
    assert pace.relative_cost(3) == 2.0 and pace.stats().plain_steps == 12


@pytest.mark.parametrize("kind", ["medusa", "lookup"])
@pytest.mark.parametrize("returns_cache", [False, True])
def test_texts_that_end_at_once(launched, tmp_path, kind, returns_cache):
    """One row, all rows, and by their length: after the first token or the second."""
    stock, model = drafting(tmp_path, kind)
    batch = ragged(3, 9, 6)
    texts(model, batch)
    said = new_text(stock, batch, 3)
    ends = [said[0, :1], said[1, 1:2], said[:, 0], said[:, 1]]
    asked = [dict(max_new_tokens=n) for n in (1, 2, 3)]
    asked += [dict(max_new_tokens=NEW, eos_token_id=end.tolist(), pad_token_id=0) for end in ends]
    for options in asked:
        launched.clear()
        options |= dict(do_sample=False, return_dict_in_generate=returns_cache)
        expected, got = (one.generate(**batch, **options) for one in (stock, model))
        if returns_cache:
            assert_same_output(expected, got, batch["attention_mask"], options.get("eos_token_id", ()))
        else:
            assert torch.equal(got, expected)
        assert (launched[1:2] == [(1, 0)]) == (options["max_new_tokens"] > 1)
        del got
        gc.collect()
        assert used_blocks(model) == 0


def weaker(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.5


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)


def other_weight(model):
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * torch.linspace(-1, 1, len(norm.weight)))


@pytest.mark.parametrize("change", [weaker, hooked, other_weight])
@pytest.mark.parametrize("kind", ["medusa", "lookup"])
def test_a_model_that_has_changed(by_host, tmp_path, kind, change):
    """What the first round computed of the model as it was does not count."""
    stock, model = drafting(tmp_path, kind)
    batch = ragged(3, 9, 6)
    for _ in range(2):
        before = texts(model, batch)
    by_host.clear()
    change(stock)
    change(model)
    expected = new_text(stock, batch, NEW)
    assert not torch.equal(expected, before)
    dropped = handle_of(model).steps.num_dropped
    assert torch.equal(texts(model, batch), expected)
    assert by_host and handle_of(model).steps.num_dropped > dropped


def test_steps_that_are_watched(by_host, tmp_path):
    """Somebody who looks at every module's output sees those of all rounds."""
    stock, model = drafting(tmp_path, "chain")
    batch = prompt(1, 9)
    for _ in range(2):
        texts(model, batch)
    by_host.clear()
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        got = texts(model, batch)
    finally:
        hook.remove()
    assert torch.equal(got, new_text(stock, batch, NEW))
    assert len(by_host) > 1 and seen.count(model.model.norm) == 1 + len(by_host)
