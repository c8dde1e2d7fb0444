"""Which captured steps are kept and which go, on a CPU: computed through the deferred mode, but not recorded."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import generate, new_text, prompt, ragged, twins, used_blocks
from steps import serve_without_gpu
from tiny_models import build
from transformers import LlamaForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_turbo
from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.compat import CACHE_NAME
from hf_turbo.modeling import graphs, prompt_steps, step_graph
from hf_turbo.modeling.model_version import ModelVersion
from hf_turbo.modeling.step_graph import StepInputs
from hf_turbo.patching import handle_of


@pytest.fixture(autouse=True)
def served(monkeypatch):
    serve_without_gpu(monkeypatch)


def steps(model):
    return handle_of(model).steps


# What models set anew


def picture_models():
    """A tiny model that takes pictures, as it is and patched."""
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        ),
        vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4),
        image_token_id=124, video_token_id=125, vision_start_token_id=126, vision_end_token_id=127,
    )  # fmt: skip
    stock, model = (Qwen2VLForConditionalGeneration(config).eval() for _ in range(2))
    for weight in stock.parameters():
        weight.data.mul_(3)
    model.load_state_dict(stock.state_dict())
    return stock, hf_turbo.patch(model, block_size=4)


def picture(*places, length=20):
    """A prompt with a picture of 2 x 2 tokens at each of these places; how its positions move differs by its size."""
    ids = prompt(1, length) % 120 + 3
    kinds = torch.zeros_like(ids)
    for place in places:
        ids[0, place : place + 4], kinds[0, place : place + 4] = 124, 1
    sizes = torch.tensor([[1, 4, 4]] * len(places))
    pixels = torch.rand(16 * len(places), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(len(places)))
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds,
        "pixel_values": pixels, "image_grid_thw": sizes,
    }  # fmt: skip


def test_each_call_sets_positions_anew():
    """Graphs that only hand that on serve all calls: texts, pictures, one row and several."""
    stock, model = picture_models()
    captured = []
    for inputs in (ragged(9), ragged(9, 5), picture(3), picture(3, 9), ragged(12, 7), picture(5), ragged(14)):
        before = steps(model).num_replayed
        assert torch.equal(new_text(model, inputs, 12), new_text(stock, inputs, 12))
        assert steps(model).num_replayed >= before + 10
        captured.append(steps(model).num_captured)
    # One for each number of rows, and for each shape of what steps are told of pictures.
    assert steps(model).num_dropped == 0 and 1 < captured[1] <= captured[3] == captured[-1] <= 4
    assert not handle_of(model).stepped_aside


def test_prompts_whose_positions_are_several_numbers(monkeypatch):
    """Captured where they say nothing of pictures, copies of them once."""
    monkeypatch.setattr(prompt_steps, "uses_triton", lambda device: True)
    stock, model = picture_models()
    calls = [(ragged(9, 5, 7, 6), {}), (prompt(2, 12), {"num_beams": 2}), (ragged(3, 8), {"num_beams": 2})]
    for inputs, options in calls:
        assert torch.equal(new_text(model, inputs, 8, **options), new_text(stock, inputs, 8, **options))
    assert sum(one.is_packed for one in steps(model)._graphs.values()) == 1
    [packed] = (one for one in steps(model)._graphs.values() if one.is_packed)
    assert packed.tensors["position_ids"].shape == (4, 64, 1) and not handle_of(model).stepped_aside


@dataclass
class Moved(CausalLMOutputWithPast):
    rope_deltas: torch.Tensor | None = None


class HandsOn(LlamaForCausalLM):
    """A model whose forward only gives back by how much positions have moved."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        return Moved(**output, rope_deltas=getattr(self.model, "rope_deltas", None))


class Reads(HandsOn):
    """One that goes by it, though positions are given."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if position_ids is not None:
            position_ids = position_ids + self.model.rope_deltas
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class ReadsOfTwo(HandsOn):
    """One that does so where there are two rows."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if position_ids is not None and len(position_ids) == 2:
            position_ids = position_ids + self.model.rope_deltas
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


def moving_models(kind):
    """A model of one of these classes, as it is and patched."""
    models = []
    for _ in range(2):
        base = build("llama")
        models.append(kind(base.config).eval())
        models[-1].load_state_dict(base.state_dict())
        models[-1].model.rope_deltas = torch.tensor([[0]])
    return models[0], hf_turbo.patch(models[1], block_size=4)


@torch.no_grad()
def test_what_a_step_hands_on():
    """Is what the model has now, not what it had when the step was captured."""
    _, model = moving_models(HandsOn)
    cache = generate(model, prompt(1, 9), 4)[CACHE_NAME]
    step = {"input_ids": torch.tensor([[9]]), "position_ids": torch.full((1, 1), 12), CACHE_NAME: cache}
    model(**step)
    for graph in steps(model)._graphs.values():
        graph._graph.replay = lambda: None  # no Python code runs at a replay
    for moved in (-3, -7):
        model.model.rope_deltas = torch.tensor([[moved]])
        replayed = steps(model).num_replayed
        assert model(**step).rope_deltas is model.model.rope_deltas
    assert steps(model).num_dropped == 0 and steps(model).num_replayed == replayed + 1
    del model.model.rope_deltas
    assert model(**step).rope_deltas is None
    assert steps(model).num_dropped > 0


@torch.no_grad()
def test_a_step_that_reads_it_is_captured_again():
    stock, model = moving_models(Reads)
    texts = []
    for moved in (0, 40, 0):
        for one in (stock, model):
            one.model.rope_deltas = torch.tensor([[moved]])
        texts.append(new_text(model, prompt(1, 9), 12))
        assert torch.equal(texts[-1], new_text(stock, prompt(1, 9), 12))
    assert steps(model).num_dropped == 2


@torch.no_grad()
def test_a_later_step_reads_what_an_earlier_one_does_not():
    """What is read is the tensor that was there at the time."""
    stock, model = moving_models(ReadsOfTwo)
    for moved, rows, num_dropped in ((0, 1, 0), (5, 1, 0), (5, 2, 0), (9, 2, 2), (2, 1, 3)):
        for one in (stock, model):
            one.model.rope_deltas = torch.tensor([[moved]])
        assert torch.equal(new_text(model, prompt(rows, 9), 6), new_text(stock, prompt(rows, 9), 6))
        assert steps(model).num_dropped == num_dropped


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model, "rope_deltas", None),
        lambda model: setattr(model.model, "rope_deltas", torch.zeros(1, 1)),
        lambda model: setattr(model.model, "rope_deltas", torch.zeros(1, dtype=torch.long)),
        lambda model: setattr(model.model, "other", torch.zeros(1, 1, dtype=torch.long)),
        lambda model: setattr(model.model.language_model, "seen", torch.ones(1)),
    ],
)
@torch.no_grad()
def test_other_changes_are_changes(change):
    """Of kind, and of other attributes; two of them that change places, too."""
    _, model = picture_models()
    model.model.language_model.seen = torch.zeros(1)
    cache = generate(model, ragged(9), 4)[CACHE_NAME]
    step = {"input_ids": torch.tensor([[9]]), "position_ids": torch.full((4, 1, 1), 12), CACHE_NAME: cache}
    model(**step)
    assert steps(model).num_dropped == 0
    num_graphs = steps(model).num_graphs
    change(model)
    model(**step)
    assert steps(model).num_dropped == num_graphs > 0


@torch.no_grad()
def test_what_is_kept_of_texts_goes_by_every_change():
    _, model = picture_models()
    version = ModelVersion()
    model.model.rope_deltas = torch.tensor([[0]])
    first = version.of(model)
    assert version.of(model) == first
    model.model.rope_deltas = torch.tensor([[-1]])
    assert version.of(model) != first


def test_experts_of_prompts_and_steps(monkeypatch):
    """Which are computed by other code, as `generate()` chooses on a GPU: graphs of both stay."""
    monkeypatch.setattr(prompt_steps, "uses_triton", lambda device: True)
    stock, model = twins("qwen3_moe", 4)

    @contextmanager
    def batched():
        before = model.get_experts_implementation()
        model.set_experts_implementation("batched_mm")
        yield
        model.set_experts_implementation(before)

    monkeypatch.setattr(model, "_optimize_model_for_decode", batched)
    assert "grouped_mm" in model.get_experts_implementation().values()
    for inputs in (ragged(9), ragged(7), prompt(1, 12)):
        assert torch.equal(new_text(model, inputs, 12), new_text(stock, inputs, 12))
    assert steps(model).num_captured == 2 and steps(model).num_dropped == 0
    model.set_experts_implementation("batched_mm")  # prompts, too, from here on
    for _ in range(2):
        assert torch.equal(new_text(model, prompt(1, 9), 12), new_text(stock, prompt(1, 9), 12))
    assert steps(model).num_captured == 3 and steps(model).num_dropped == 0


def test_experts_that_another_thread_switches(monkeypatch):
    """While a step is looked up: `generate()` switches them at its start and end, whoever else computes."""
    stock, model = twins("qwen3_moe", 4)
    names, serves = itertools.cycle(["batched_mm", "grouped_mm"]), graphs.StepGraph.serves

    def meanwhile(graph, *args):
        model.set_experts_implementation(next(names))
        return serves(graph, *args)

    monkeypatch.setattr(graphs.StepGraph, "serves", meanwhile)
    assert torch.equal(new_text(model, prompt(1, 9), 12), new_text(stock, prompt(1, 9), 12))
    assert steps(model).num_captured == 2 and steps(model).num_dropped == 0 and not handle_of(model).stepped_aside


@torch.no_grad()
def test_experts_that_cannot_be_captured(monkeypatch):
    """Say nothing of others."""
    stock, model = twins("qwen3_moe", 4)
    compute = graphs.StepGraph.compute

    def fails(graph, *args):
        if model.config._experts_implementation == "grouped_mm":
            raise RuntimeError("the host is asked")
        return compute(graph, *args)

    monkeypatch.setattr(graphs.StepGraph, "compute", fails)
    for name, captured in (("grouped_mm", 0), ("batched_mm", 1), ("grouped_mm", 1), ("batched_mm", 1)):
        model.set_experts_implementation(name)
        assert torch.equal(new_text(model, prompt(1, 9), 12), new_text(stock, prompt(1, 9), 12))
        assert steps(model).num_captured == captured and steps(model).is_refused == (name == "grouped_mm")
    assert list(handle_of(model).stepped_aside.values()) == [1] and steps(model).num_dropped == 0


# Who is not served


@torch.no_grad()
def test_a_step_that_is_to_give_a_tuple():
    """Is the model's own, and keeps none from being captured."""
    _, model = twins("llama", 4)
    cache = generate(model, prompt(1, 9), 4)[CACHE_NAME]
    step = {"input_ids": torch.tensor([[9]]), "position_ids": torch.full((1, 1), 12), CACHE_NAME: cache}
    assert isinstance(model(**step, return_dict=False), tuple)
    captured, replayed = steps(model).num_captured, steps(model).num_replayed
    new_text(model, prompt(1, 9), 4)
    assert (steps(model).num_captured, steps(model).num_replayed) == (captured, replayed + 3)
    assert not handle_of(model).stepped_aside


@torch.no_grad()
def test_another_models_cache():
    """Its blocks are another pool's."""
    stock, model = twins("llama", 4)
    other = hf_turbo.patch(build("llama"), block_size=4)
    ids, step = prompt(2, 9), prompt(2, 1, seed=1)
    generate(model, ids, 4)
    cache = hf_turbo.paged_cache(other)
    model(ids, **{CACHE_NAME: cache})
    places = torch.full((2, 1), 9)
    before = steps(model).num_captured, steps(model).num_replayed
    logits = model(step, position_ids=places, **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(logits, stock(torch.cat([ids, step], 1)).logits[:, -1:], rtol=1e-4, atol=1e-4)
    assert (steps(model).num_captured, steps(model).num_replayed) == before
    assert used_blocks(model) == 0 < used_blocks(other)


@pytest.mark.parametrize("moved", ["k_segments", "v_segments", "segment_offsets", None])
def test_blocks_that_lie_elsewhere(moved):
    """A graph has the places of the first of them, and of what leads to the others."""
    _, model = twins("llama", 4)
    cache = generate(model, prompt(1, 9), 4)[CACHE_NAME]
    [graph] = steps(model)._graphs.values()
    assert graph.serves(cache)
    if moved:
        store = cache.layers[1].store
        there = getattr(store.kv, moved)
        newest = there.clone() if isinstance(there, torch.Tensor) else tuple(x.clone() for x in there)
        store.kv = replace(store.kv, **{moved: newest})
    cache.layers[1].group.table.group.manager.version += 1
    assert graph.serves(cache) == (moved is None)


def test_the_last_position_of_another_call():
    """Does not limit those that have none."""
    _, model = twins("llama", 4)
    new_text(model, prompt(1, 9), 4)
    [graph] = steps(model)._graphs.values()
    places = []
    for limit in (None, 12, 15, None, None):
        graph.limit(None if limit is None else torch.tensor(limit))
        places.append(graph.last_position.item())
    assert places[1:3] == [12, 15] and {places[0], *places[3:]} == {2**63 - 1}


# How many


def test_prompts_of_all_sizes_have_room():
    """Those of one kind, whatever their lengths and however many."""

    def inputs(num_rows, num_seqs):
        tensors = {"input_ids": torch.zeros(num_rows, 1, dtype=torch.long)}
        return StepInputs(tensors, (), num_rows, packed=(num_rows,) + (0,) * (num_seqs - 1))

    keys = {inputs(rows, seqs).key for rows, seqs in itertools.product(range(1, 2049), (1, 16, 17, 64, 65, 256))}
    assert len(keys) == 42 <= graphs.MAX_GRAPHS


def test_nothing_goes_before_it_must(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 8)
    stock, model = twins("llama", 4)
    for _ in range(2):
        for rows in range(1, 9):
            assert torch.equal(new_text(model, prompt(rows, 9), 3), new_text(stock, prompt(rows, 9), 3))
            assert steps(model).num_dropped == 0
        assert [one.num_rows for one in steps(model)._graphs.values()] == [*range(1, 9)]
    assert steps(model).num_captured == 8


def test_prompts_and_steps_do_not_drive_each_other_out(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    monkeypatch.setattr(prompt_steps, "uses_triton", lambda device: True)
    stock, model = twins("llama", 4)
    for lengths in ((9,), (70,), (130,), (190,), (250,), (70, 5), (70, 5, 6), (70, 5, 6, 7)):
        inputs = ragged(*lengths)
        assert torch.equal(new_text(model, inputs, 3), new_text(stock, inputs, 3)), lengths
        packed = [one.num_rows for one in steps(model)._graphs.values() if one.is_packed]
        assert len(packed) <= 3 and steps(model).num_graphs - len(packed) <= 3
    # Of prompts the last sizes that were used are there; of steps those of 2 to 4 rows, as one row's is the oldest.
    assert packed == [192, 256, 128]
    assert [one.num_rows for one in steps(model)._graphs.values() if not one.is_packed] == [2, 3, 4]
    captured = steps(model).num_captured
    assert captured == 4 + 4
    for lengths in ((70, 5), (250,)):  # the one row's step alone is captured again
        new_text(model, ragged(*lengths), 3)
    assert steps(model).num_captured == captured + 1


# Too little memory


@torch.no_grad()
def test_a_follower_that_is_not_recorded(monkeypatch):
    """The host is told that nothing has been done; it is not tried again, but others that are there serve on."""
    stock, model = twins("llama", 4)
    cache, ids, tree, record = hf_turbo.paged_cache(model), prompt(2, 9), TokenTree.chain(2), step_graph.record
    model(ids, **{CACHE_NAME: cache})
    drafts, places = prompt(2, 3, seed=1), torch.arange(9, 12).repeat(2, 1)
    arguments = {"input_ids": drafts.view(-1, 1), "position_ids": places.view(-1, 1), CACHE_NAME: cache}
    num_failed = 0

    def fails(*args):
        nonlocal num_failed
        num_failed += 1
        raise torch.OutOfMemoryError("all is taken")

    @contextmanager
    def drafted():
        layout = cache.layout
        layout.tree, layout.only_ones_follow, cache.model_is_as_it_was = tree, True, True
        yield
        layout.tree, layout.only_ones_follow, cache.model_is_as_it_was = None, False, False

    def follow(key):
        with drafted():
            last = steps(model).run_drafts(cache, arguments, None, None, 0, key, lambda graph: graph.output.logits[:6])
        return last if last is None else last.result.view(2, 3, -1)

    expected = stock(torch.cat([ids, drafts], 1)).logits[:, 9:]
    for can_record in (True, False, True):
        monkeypatch.setattr(step_graph, "record", record if can_record else fails)
        with drafted():
            logits = model(**arguments).logits.view(2, 3, -1)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        if can_record:
            torch.testing.assert_close(follow("served"), expected, rtol=1e-4, atol=1e-4)
        else:
            assert follow("fails") is None and follow("fails") is None and follow("another") is None
            assert num_failed == 1 and list(handle_of(model).stepped_aside.values()) == [1]
            assert follow("served") is not None
            steps(model).drop()  # as where the model has changed: then there may be memory
    assert follow("fails") is not None and steps(model).num_captured == 2
    cache.reset()
    assert used_blocks(model) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_prompt_for_which_there_is_no_memory(monkeypatch, name):
    """It and those after it go the model's own way; steps are captured as before."""
    monkeypatch.setattr(prompt_steps, "uses_triton", lambda device: True)
    stock, model = twins(name, 4)
    compute, num_failed = graphs.StepGraph.compute, 0

    def failing(graph, forward, watch=None):
        nonlocal num_failed
        output = compute(graph, forward, watch)
        if graph.is_packed:
            num_failed += 1
            raise torch.OutOfMemoryError("all is taken")
        return output

    monkeypatch.setattr(graphs.StepGraph, "compute", failing)
    for inputs, options in ((ragged(9, 13), {}), (ragged(9, 13, 6), {"num_beams": 2}), (prompt(1, 30), {})):
        assert torch.equal(new_text(model, inputs, 6, **options), new_text(stock, inputs, 6, **options))
    assert num_failed == 1 and steps(model).num_captured > 0
    assert list(handle_of(model).stepped_aside) == ["prompts are not captured: there is too little memory"]
    assert used_blocks(model) == 0
