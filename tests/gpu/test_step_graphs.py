"""Captured decode steps: which models have them, for which sizes, what memory they take, and what ends them."""

import copy
import pickle
import random

import pytest
import torch
from graph_cases import (
    BATCH,
    GPU,
    NEW,
    MiB,
    assert_differs,
    assert_same,
    on_gpu,
    outcome,
    patched_model,
    replays,
    rows_of,
    settled,
    steps,
    stock_model,
    warmed_up,
)
from helpers import generate, groups, new_text, prompt, ragged
from tiny_models import ACCELERATED, STEPS_ASIDE, ZOO, expectation, in_this_transformers

import hf_turbo
from hf_turbo.modeling import graphs, prompt_steps
from hf_turbo.patching import handle_of

pytestmark = GPU

NOT_CAPTURED = "decode steps are not captured: "
NAMES = [name for name in ZOO if in_this_transformers(name) and ZOO[name].expect != STEPS_ASIDE]
#: Whose steps must be captured, whatever else steps aside.
CAPTURED = set(
    """
    cohere cohere2 gemma gemma2 gemma3_text glm4 gpt2 gpt_neox gpt_oss granite llama ministral mistral mixtral olmo2
    olmo3 phi phi3 qwen2 qwen3 qwen3_moe smollm3 starcoder2
    """.split()  # noqa: SIM905
)


@pytest.fixture(autouse=True)
def only_decode_steps(request, monkeypatch):
    """Prompts are not captured, as most tests count the graphs of steps; but for those that ask for `short_prompts`."""
    if "short_prompts" not in request.fixturenames:
        monkeypatch.setattr(prompt_steps, "SHORT_WORK", 0)


@pytest.fixture
def short_prompts():
    """Are captured, too."""


# the zoo


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name, short_prompts):
    """Text in fp32, over a left-padded batch: that of the unpatched model, with and without graphs."""
    stock = stock_model(name)
    if expectation(stock, name) != ACCELERATED:
        pytest.skip("steps aside as a whole")
    model = patched_model(name)
    expected = outcome(stock)
    for _ in range(2):
        assert_same(outcome(model), expected)
    reasons = set(handle_of(model).stepped_aside)
    assert all(reason.startswith((NOT_CAPTURED, "prompts are not captured: ")) for reason in reasons), reasons
    assert bool(steps(model).num_replayed) != any(reason.startswith(NOT_CAPTURED) for reason in reasons)
    if name in CAPTURED:
        assert steps(model).num_captured == 2 and not reasons, "one of prompts, one of steps"
        assert steps(model).num_replayed == 2 * NEW - 2


def test_captured_names_are_in_the_zoo():
    assert set(NAMES) >= CAPTURED


# options


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "cohere2", "gpt_oss"])
def test_options(name):
    expected = outcome(stock_model(name))
    for fused_layers in (True, False):
        model = patched_model(name, turbo={"fused_layers": fused_layers})
        with replays(model):
            assert_same(outcome(model), expected)
        model = patched_model(name, turbo={"fused_layers": fused_layers, "cuda_graphs": False})
        assert_same(outcome(model), expected)
        assert steps(model).num_captured == steps(model).num_replayed == 0
        assert not handle_of(model).stepped_aside


def test_patching_again():
    """Another block size, and graphs of its own."""
    model = patched_model("gemma2")
    expected = warmed_up(model)
    old = steps(model)
    hf_turbo.patch(model, block_size=16)
    assert steps(model) is not old
    with replays(model):
        assert_same(outcome(model), expected)
    hf_turbo.patch(model, cuda_graphs=False)
    assert_same(outcome(model), expected)
    assert steps(model).num_captured == 0


# sizes


def test_numbers_of_rows():
    """A graph for each number up to 8, and one for 9 to 16."""
    stock, model = stock_model("llama"), patched_model("llama")
    counts = [3, 2, 5, 9, 1, 16, 13]
    for _ in range(2):
        for count in counts:
            with replays(model):
                assert torch.equal(new_text(model, rows_of(count), 12), new_text(stock, rows_of(count), 12)), count
    assert steps(model).num_captured == steps(model).num_graphs == 5


def decode_steps(model):
    """Rows of the captured steps that have no prompts in them, the newest last."""
    return [graph.num_rows for graph in steps(model)._graphs.values() if not graph.is_packed]


def test_more_sizes_than_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 16)
    stock, model = stock_model("llama"), patched_model("llama")
    counts = [*range(1, 9), 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 512]
    for count in [*counts, 1, 2]:
        assert torch.equal(new_text(model, rows_of(count), 6), new_text(stock, rows_of(count), 6)), count
        assert len(decode_steps(model)) <= 16
    assert [*decode_steps(model)][-2:] == [1, 2] and len(decode_steps(model)) == 16
    captured = steps(model).num_captured
    assert torch.equal(new_text(model, rows_of(513), 3), new_text(stock, rows_of(513), 3))
    assert steps(model).num_captured == captured, "so many rows have no graph"


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_pool_grows_under_the_graphs(name):
    """Blocks that are made later lie elsewhere."""
    options = {"max_position_embeddings": 512}
    stock, model = stock_model(name, **options), patched_model(name, block_size=2, **options)
    warmed_up(model)
    captured, manager = steps(model).num_captured, groups(model)[None].manager
    before = len(manager.segment_sizes)
    with replays(model):
        assert torch.equal(new_text(model, on_gpu(BATCH), 200), new_text(stock, on_gpu(BATCH), 200))
    assert len(manager.segment_sizes) > before + 1
    assert steps(model).num_captured == captured


def test_longer_than_the_model_was_made_for():
    """More blocks than a graph has columns for."""
    stock, model = stock_model("llama"), patched_model("llama")
    warmed_up(model)
    assert BATCH["input_ids"].shape[1] + 400 > stock.config.max_position_embeddings + 100
    with replays(model):
        assert torch.equal(new_text(model, on_gpu(BATCH), 400), new_text(stock, on_gpu(BATCH), 400))
    assert steps(model).num_captured <= 4


def test_release_between_calls():
    """It gives the blocks' memory back although graphs have read it, and the next call has blocks of its own."""
    options = {"head_dim": 64, "num_key_value_heads": 4}
    stock, model = stock_model("llama", **options), patched_model("llama", block_size=64, **options)
    inputs = on_gpu(prompt(8, 240))
    expected, short = new_text(stock, inputs, 8), outcome(stock)
    for _ in range(3):
        with replays(model):
            assert torch.equal(new_text(model, inputs, 8), expected)
            assert_same(outcome(model), short)
        pool = hf_turbo.report(model).pool_bytes
        assert pool > 6 * MiB
        before, _ = settled()
        hf_turbo.release(model)
        assert settled()[0] <= before - 0.9 * pool


def test_many_calls_of_mixed_shapes():
    """Memory stays as it is once every number of rows has come by."""
    model = patched_model("llama", max_position_embeddings=512, block_size=64)
    shapes = random.Random(0)
    calls = [(rows, 300, 40) for rows in range(9, 0, -1)]
    calls += [(shapes.randint(1, 9), shapes.randint(5, 300), shapes.randint(3, 40)) for _ in range(191)]
    used = []
    for rows, length, new in calls:
        lengths = [length] + [shapes.randint(1, length) for _ in range(rows - 1)]
        generate(model, on_gpu(ragged(*lengths)), new, return_dict_in_generate=False)
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert steps(model).num_graphs <= graphs.MAX_GRAPHS
    for kind in (0, 1):
        assert max(one[kind] for one in used[60:]) <= used[59][kind] + 2 * MiB
    assert steps(model).num_captured == 9
    assert not handle_of(model).stepped_aside


# the end


def test_unpatch_gives_the_graphs_memory_back():
    model = stock_model("llama", head_dim=64, num_key_value_heads=4)
    inputs = on_gpu(prompt(8, 300))

    def generate_patched():
        hf_turbo.patch(model, block_size=64)
        with replays(model):
            generate(model, inputs, 8)
        generate(model, on_gpu(prompt(2, 300)), 8)
        assert steps(model).num_graphs == 2

    generate_patched()
    hf_turbo.unpatch(model)
    allocated, reserved = settled()
    generate_patched()
    assert settled()[0] > allocated + 8 * MiB, "the check below would see nothing"
    hf_turbo.unpatch(model)
    after = settled()
    assert after[0] <= allocated + 2 * MiB
    assert after[1] <= reserved + 2 * MiB


def test_a_dropped_model_takes_its_graphs_along():
    generate(patched_model("llama"), on_gpu(BATCH), 8)
    allocated, reserved = settled()
    for _ in range(3):
        model = patched_model("llama")
        warmed_up(model)
        del model
    after = settled()
    assert after[0] <= allocated + 2 * MiB
    assert after[1] <= reserved + 2 * MiB


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@torch.no_grad()
def test_copies_capture_their_own(again):
    model = patched_model("llama")
    before = warmed_up(model)
    captured = steps(model).num_captured
    other = again(model)
    assert hf_turbo.is_patched(other)
    assert steps(other).num_graphs == steps(other).num_captured == 0
    with replays(other):
        assert_same(outcome(other), before)
    other.model.layers[0].mlp.down_proj.weight.mul_(-2)
    with replays(other):
        assert_differs(outcome(other), before)
    with replays(model):
        assert_same(outcome(model), before)
    assert steps(model).num_captured == captured
