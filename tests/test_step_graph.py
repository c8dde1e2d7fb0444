"""A decode step as it is captured, on a CPU: computed through the deferred mode with every rule, but not recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from steps import Step, capture_without_gpu, decode_steps, own_logits, step
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


@pytest.mark.parametrize("norms_within", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNSUITED])
@torch.no_grad()
def test_a_step_equals_the_models_own(name, norms_within, monkeypatch):
    """Within the rounding of sums in another order."""
    monkeypatch.setattr(dispatch, "serves_norm", lambda *args, activation: norms_within)
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


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_a_step_that_shows_its_inside_is_no_captured_one(option):
    """It goes the model's own way; that is no reason to capture no other."""
    ids = torch.ones(1, 1, dtype=torch.long)
    assert StepInputs.of({"input_ids": ids, option: False}) is not None
    assert StepInputs.of({"input_ids": ids, option: True}) is None


@pytest.fixture
def captures(monkeypatch):
    capture_without_gpu(monkeypatch)


@torch.no_grad()
def test_changed_between_two_captures_and_back(captures):
    """Neither graph is kept for a model that it was not captured from."""
    model = build("llama")
    hf_turbo.patch(model, block_size=4)
    steps, forward = handle_of(model).steps, type(model)._hf_turbo_original_class.forward

    def one_step(rows):
        cache = hf_turbo.paged_cache(model)
        ids = torch.full((rows, 3), 5)
        model(ids, **{CACHE_NAME: cache})
        inputs = StepInputs.of({"input_ids": ids[:, :1], "position_ids": torch.full((1, 1), 3)})
        return steps._run(model, lambda **k: forward(model, **k), cache, inputs)

    one_step(1)
    norm = model.model.norm
    eps, norm.variance_epsilon = norm.variance_epsilon, 100.0
    one_step(2)
    assert steps.num_dropped == 1 and steps.num_graphs == 1
    norm.variance_epsilon = eps
    assert one_step(2) is None and steps.num_dropped == 2


@torch.no_grad()
def test_prompts_that_can_not_be_captured_leave_steps_alone(captures):
    """The other way round, what is wrong with a step is wrong with prompts."""
    model = build("llama")
    hf_turbo.patch(model, block_size=4)
    steps, norm = handle_of(model).steps, model.model.norm

    def fail(**kwargs):
        raise RuntimeError("reads a number")

    def try_one(packed):
        cache, ids = hf_turbo.paged_cache(model), torch.full((1, 3), 5)
        model(ids, **{CACHE_NAME: cache})
        tensors = {"input_ids": ids[:, :1], "position_ids": torch.full((1, 1), 3)}
        cache.layout.packed = packed
        return steps._run(model, fail, cache, StepInputs(tensors, (), 1, packed=packed))

    assert try_one((1,)) is None
    assert steps.is_refused and steps._is_allowed(is_packed=False) and not steps._is_allowed(is_packed=True)
    norm.variance_epsilon *= 2  # another model
    assert steps._is_allowed(is_packed=True)
    assert try_one(None) is None
    assert not steps._is_allowed(is_packed=False) and not steps._is_allowed(is_packed=True)
    assert set(hf_turbo.report(model).stepped_aside) == {
        f"{what} are not captured: capturing the step failed: reads a number" for what in ("prompts", "decode steps")
    }


@torch.no_grad()
def test_a_cache_of_another_dtype(captures):
    """The step is captured for caches to come; this one has no place for its keys, as the model's own way says."""
    model = build("llama")
    hf_turbo.patch(model, block_size=4)
    steps, forward = handle_of(model).steps, type(model)._hf_turbo_original_class.forward
    ids, cache = torch.full((1, 3), 5), hf_turbo.paged_cache(model)
    model(ids, **{CACHE_NAME: cache})
    model.double()
    inputs = StepInputs.of({"input_ids": ids[:, :1], "position_ids": torch.full((1, 1), 3)})
    assert steps._run(model, lambda **k: forward(model, **k), cache, inputs) is None
    with pytest.raises(ValueError, match="start from a new cache"):
        model(ids[:, :1], **{CACHE_NAME: cache})
    cache = hf_turbo.paged_cache(model)
    model(ids, **{CACHE_NAME: cache})
    assert steps._run(model, lambda **k: forward(model, **k), cache, inputs).logits.dtype == torch.float64
    assert steps.num_captured == 1 and steps.num_replayed == 1


@torch.no_grad()
def test_positions_that_are_not_given(captures):
    """A step's is the number of columns before it, but for models that have seen pictures: those know better."""
    model = build("llama")
    hf_turbo.patch(model, block_size=4)
    steps, forward = handle_of(model).steps, type(model)._hf_turbo_original_class.forward

    def one_step(**more):
        ids, cache = torch.full((1, 3), 5), hf_turbo.paged_cache(model)
        model(ids, **{CACHE_NAME: cache})
        inputs = StepInputs.of({"input_ids": ids[:, :1]} | more)
        return steps._run(model, lambda **k: forward(model, **k), cache, inputs)

    given = torch.full((1, 1), 3)
    assert torch.equal(one_step().logits, one_step(position_ids=given).logits)
    model.model.rope_deltas = torch.tensor([[-2]])
    one_step()  # drops what was captured before
    assert one_step() is None and steps.num_graphs == 0  # there is no graph for it
    assert one_step(position_ids=given) is not None and steps.num_graphs == 1
    assert one_step() is None and not steps.is_refused  # there is one


@torch.no_grad()
def test_first_prompts(captures):
    """The first one is computed once, though its cache has no blocks before; the next finds the graph wide enough."""
    model = build("llama", max_position_embeddings=4)  # longer texts come, too
    hf_turbo.patch(model, block_size=4)
    steps, forward = handle_of(model).steps, type(model)._hf_turbo_original_class.forward
    tensors = {"input_ids": torch.full((9, 1), 5), "position_ids": torch.arange(9)[:, None]}
    logits = []
    for _ in range(2):
        cache = hf_turbo.paged_cache(model)
        cache.layout.padding, cache.layout.packed, cache.layout.wanted = [0], [9], [8]
        cache.adopt_stores()
        inputs = StepInputs.of(tensors | {CACHE_NAME: cache})
        logits.append(steps._run(model, lambda **k: forward(model, **k), cache, inputs).logits)
    assert torch.equal(*logits) and logits[0].shape[:2] == (1, 1)
    assert (steps.num_captured, steps.num_replayed, steps.num_dropped) == (1, 1, 0)


@torch.no_grad()
def test_memory_that_was_moved_stays_seen(captures):
    """A graph whose blocks lie elsewhere now serves nobody, however often it is asked."""
    model = build("llama")
    hf_turbo.patch(model, block_size=4)
    handle, cache = handle_of(model), hf_turbo.paged_cache(model)
    ids = torch.full((1, 3), 5)
    model(ids, **{CACHE_NAME: cache})
    inputs = StepInputs.of({"input_ids": ids[:, :1]})
    graph = Step(handle.pool, handle.sliding_windows, STEP_RULES, inputs, dict.fromkeys(cache.groups, 64))
    graph._bases = [(0, cache.layers[0].store, 0, 0)]
    graph._versions = {None: -1}
    assert not graph.serves(cache) and not graph.serves(cache)


@torch.no_grad()
def test_room_for_tokens_that_the_host_does_not_know():
    """A graph serves rows only as far as its tables reach: with their next token, and those under way."""
    handle = handle_of(model := hf_turbo.patch(build("llama"), block_size=4))
    cache, ids = hf_turbo.paged_cache(model), torch.full((1, 9), 5)
    model(ids, **{CACHE_NAME: cache})
    inputs = StepInputs.of({"input_ids": ids[:, :1]})
    graph = Step(handle.pool, handle.sliding_windows, STEP_RULES, inputs, {None: 3})  # 12 tokens
    graph._versions = {None: handle.pool.group(None).version}
    assert [graph.serves(cache, ahead) for ahead in range(4)] == [True, True, True, False]


def test_the_last_position_of_drafts():
    """Of one call, not of the next one that has none."""
    handle = handle_of(hf_turbo.patch(build("llama"), block_size=4))
    graph = Step(handle.pool, handle.sliding_windows, STEP_RULES, inputs_of(2), {None: 3})
    largest = torch.iinfo(torch.int64).max
    for limit in (None, 7, 5, None, None, 3):
        graph.limit(None if limit is None else torch.tensor(limit))
        assert graph.last_position.tolist() == [largest if limit is None else limit]


@torch.no_grad()
def test_a_packed_step_gives_logits_of_the_rows_that_are_wanted():
    """Other rows each time: the graph reads which."""
    model = build("llama")
    prompt, new, q_lens = torch.randint(3, 60, (3, 5)), torch.randint(3, 60, (5,)), [2, 0, 3]
    texts = [torch.cat([row, more]) for row, more in zip(prompt, new.split(q_lens), strict=True)]
    expected = torch.cat([model(text[None]).logits[0, 5:] for text in texts])
    hf_turbo.patch(model, block_size=4)
    handle, cache = handle_of(model), hf_turbo.paged_cache(model)
    model(prompt, **{CACHE_NAME: cache})
    layout, forward = cache.layout, type(model)._hf_turbo_original_class.forward
    layout.packed, layout.only_ones_follow = q_lens, True
    positions = torch.tensor([5, 6, 5, 6, 7])
    kwargs = {"input_ids": new[:, None], "position_ids": positions[:, None], CACHE_NAME: cache}
    cache.advance()
    graph = None
    for wanted in ([1, 4], [0, 2, 3], [], [4]):
        layout.wanted = wanted
        inputs = StepInputs.of(kwargs)
        if graph is None:
            graph = Step(handle.pool, handle.sliding_windows, STEP_RULES, inputs, dict.fromkeys(cache.groups, 64))
        graph.load(cache, inputs)
        output = graph.compute(lambda **k: forward(model, **k))
        assert output.logits.shape[:2] == (16, 1)  # not the 64 rows of the step
        logits = graph.result(output, cache, inputs.num_rows).logits
        torch.testing.assert_close(logits, expected[wanted][:, None], rtol=1e-4, atol=1e-4)


def inputs_of(num_rows, **more):
    return StepInputs({"input_ids": torch.zeros(num_rows, 1, dtype=torch.long)}, (), num_rows, **more)


def packed_inputs(num_rows, num_seqs=1):
    return inputs_of(num_rows, packed=(num_rows,) + (0,) * (num_seqs - 1))


@pytest.mark.parametrize(
    "num_rows, padded", [(1, 64), (64, 64), (65, 128), (512, 512), (513, 768), (1024, 1024), (1900, 2048)]
)
def test_packed_steps_have_few_sizes(num_rows, padded):
    inputs = packed_inputs(num_rows, num_seqs=17)
    assert inputs.num_seqs == 65 and inputs.padded_rows == padded
    assert inputs.padded_shape("input_ids") == (padded, 1)


def test_larger_packed_steps_are_not_captured():
    assert packed_inputs(2048, 256).num_seqs == 257
    assert packed_inputs(2049).num_seqs is None and packed_inputs(300, 257).num_seqs is None


def test_which_rows_share_keys_out():
    """Those of many requests. Each step has counters of its own, which the layers of all windows use in turn."""
    model = hf_turbo.patch(build("llama"))
    pool = handle_of(model).pool

    def counters(inputs):
        groups = StepGraph(pool, [None, 8], STEP_RULES, inputs, {None: 4, 8: 4}).groups
        one, other = (group.plan.metadata.arrivals for group in groups.values())
        assert one is other and (one is None or (not one.any() and len(one) == one.numel() >= 1 << 15))
        return one

    assert counters(inputs_of(8)) is None
    assert counters(inputs_of(64, tree=SimpleNamespace(num_nodes=4, is_chain=True))) is None
    many, packed = counters(inputs_of(16)), counters(packed_inputs(3))
    assert many is not None and packed is not None and many.data_ptr() != packed.data_ptr()


def test_a_model_that_keeps_changing_is_left_alone():
    """Graphs that are dropped before they have paid, a few times in a row; once they pay the count starts anew."""
    model = hf_turbo.patch(build("llama"))
    steps = handle_of(model).steps
    cache = hf_turbo.paged_cache(model)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]), **{CACHE_NAME: cache})
    for replays in (0, 2, 1, 100, 0, 3, 7):
        steps.num_replayed += replays
        steps._drop_changed()
        assert steps._wants(cache) and not handle_of(model).stepped_aside
    steps._drop_changed()
    assert not steps._wants(cache)
    assert any("changes every few steps" in reason for reason in handle_of(model).stepped_aside)
