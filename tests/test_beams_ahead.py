"""Beams whose next step is launched before the host knows them, on a CPU: the tables that the device would have."""

from __future__ import annotations

import pytest
import torch
from helpers import generate, new_text, prompt, ragged, twins
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import serve_without_gpu
from test_step_graph import Step
from tiny_models import build

import hf_turbo
from hf_turbo.cache.ahead_rows import AheadRows
from hf_turbo.cache.block_pool import BlockPool
from hf_turbo.cache.paged_cache import PagedCache
from hf_turbo.generation import beam_loop
from hf_turbo.generation.step import DecodeSteps
from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.modeling.graphs import StepGraphs
from hf_turbo.modeling.step_graph import StepInputs
from hf_turbo.ops import dispatch
from hf_turbo.ops.metadata import CodedRows
from hf_turbo.patching import handle_of

CPU = torch.device("cpu")


class TablesStep(Step):
    """Reads the blocks of the tables it is given, not those that the host knows of."""

    def load(self, cache, inputs, tables, code_tables):
        super().load(cache, inputs, tables, code_tables)
        for window, group in self.groups.items():
            metadata, size = group.plan.metadata, group.blocks.block_size
            ends = [-(-length // size) for length in metadata.seq_lens_cpu]
            geometry = zip(tables[window].tolist(), metadata.first_blocks_cpu, ends)
            metadata.block_ids_cpu = [row[first:end] for row, first, end in geometry]
            if window in code_tables:
                rows, codes = tables[window].tolist(), code_tables[window].tolist()
                coded = metadata.coded_rows
                anchors = [anchor and row[0] for row, anchor in zip(rows, coded.anchors, strict=True)]
                places = zip(codes, coded.first_codes, map(len, coded.code_ids), strict=True)
                code_ids = [row[first : first + count] for row, first, count in places]
                metadata.coded_rows = CodedRows(anchors, code_ids, coded.first_codes)


@pytest.fixture
def ahead(monkeypatch):
    """Lets the loop go ahead on a CPU; counts the steps that did."""
    monkeypatch.setattr(dispatch, "serves_linear", lambda rows, *args, activation: rows <= 64)
    monkeypatch.setattr(beam_loop, "runs_ahead", lambda device: True)
    launched = []

    def patch(model):
        handle = handle_of(model)
        forward = type(model)._hf_turbo_original_class.forward

        def run_ahead(cache, kwargs, rows, origins):
            inputs = StepInputs.of(kwargs)
            if not rows.can_advance:
                return None
            tables = rows.advance(origins)
            graph = TablesStep(handle.pool, handle.sliding_windows, STEP_RULES, inputs, dict.fromkeys(cache.groups, 64))
            graph.load(cache, inputs, tables, rows.code_tables)
            launched.append(len(origins))
            with torch.no_grad():
                return graph.result(graph.compute(lambda **k: forward(model, **k)), cache, inputs.num_rows)

        monkeypatch.setattr(handle.steps, "run_ahead", run_ahead)
        monkeypatch.setattr(DecodeSteps, "are_captured", True)
        return launched

    return patch


@pytest.mark.parametrize(
    "name, block_size", [("llama", 1), ("llama", 4), ("llama", 16), ("gemma3_text", 4), ("mistral", 2)]
)
def test_same_text(ahead, name, block_size):
    stock, model = twins(name)
    hf_turbo.patch(model, block_size=block_size)
    launched = ahead(model)
    for batch, new in ((ragged(9, 17), 14), (ragged(6), 18)):
        options = {"num_beams": 4, "num_return_sequences": 3, "output_scores": True}
        ours, theirs = generate(model, batch, new, **options), generate(stock, batch, new, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-5, atol=1e-5)
        cache = ours[hf_turbo.compat.CACHE_NAME]
        assert cache.get_seq_length() == theirs[hf_turbo.compat.CACHE_NAME].get_seq_length()
        del ours, cache
    assert len(launched) > 20
    assert hf_turbo.report(model).blocks_in_use == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_same_text_over_codes(ahead, name):
    """The same as where every step waits for the host; a block that is full becomes codes in such a step."""
    outputs = []
    for goes_ahead in (False, True):
        window = {"sliding_window": 70} if name == "gemma3_text" else {}
        model = build(name, max_position_embeddings=512, **window)
        hf_turbo.patch(model, block_size=32, kv_cache_dtype="int4")
        launched = ahead(model) if goes_ahead else []
        options = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
        outputs.append(generate(model, ragged(121, 153), 13, **options))
        for group in outputs[-1][hf_turbo.compat.CACHE_NAME].groups.values():
            assert all(map(len, group.table.codes.rows))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    torch.testing.assert_close(outputs[0].sequences_scores, outputs[1].sequences_scores, rtol=1e-4, atol=1e-4)
    assert 6 < len(launched) < 12
    outputs.clear()
    assert hf_turbo.report(model).blocks_in_use == 0


def test_ends_early(ahead):
    """All beams end while one more step is under way: nothing of it stays."""
    stock, model = twins("llama")
    hf_turbo.patch(model, block_size=4)
    ahead(model)
    batch = ragged(5, 8)
    eos = generate(stock, batch, 12, num_beams=3).sequences[:, 14].unique().tolist()
    for early in (True, False, "never"):
        options = {"num_beams": 3, "eos_token_id": eos, "pad_token_id": 0, "early_stopping": early}
        ours, theirs = generate(model, batch, 30, **options), generate(stock, batch, 30, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        name = hf_turbo.compat.CACHE_NAME
        assert ours[name].get_seq_length() == theirs[name].get_seq_length()
        assert len(ours.sequences[0]) < 8 + 30
        del ours
    assert hf_turbo.report(model).blocks_in_use == 0


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_order(data):
    """What each row holds after any changes of place, against lists; blocks are neither lost nor owned twice."""
    size, rows, window = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 5)), None
    pool = BlockPool(size)
    cache = PagedCache(pool, [window])
    length = data.draw(st.integers(1, 6))
    texts = [[float(100 * row + i) for i in range(length)] for row in range(rows)]
    keys = torch.tensor(texts)[:, None, :, None]
    cache.layers[0].update(keys, keys)
    assert AheadRows.is_possible(cache)
    ahead = AheadRows(cache, CPU)
    group = cache.groups[window]
    for step in range(data.draw(st.integers(1, 9))):
        origins = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        table = ahead.advance(torch.tensor(origins))[window].tolist()
        texts = [[*texts[row], float(1000 * step + i)] for i, row in enumerate(origins)]
        kv = cache.layers[0].kv()
        for row, text in enumerate(texts):
            block = table[row][(len(text) - 1) // size]
            for segments in (kv.k_segments, kv.v_segments):
                segments[block >> 23][block & (1 << 23) - 1, 0, (len(text) - 1) % size, 0] = text[-1]
        ahead.catch_up(origins, keep_step=True)
        assert [r[: len(mine)] for r, mine in zip(table, group.table.rows)] == group.table.rows
        assert cache.layers[0].keys[:, 0, :, 0].tolist() == texts
        assert pool.group(window).manager.num_used == group.table.num_live_blocks + rows
    ahead.release()
    assert pool.group(window).manager.num_used == group.table.num_live_blocks


def test_no_block_is_lost_where_there_are_none_left(monkeypatch):
    """While spare blocks are taken, and while they are replaced."""
    pool = BlockPool(2)
    cache = PagedCache(pool, [None, 8])
    keys = torch.randn(3, 1, 5, 4)
    for layer in cache.layers:
        layer.update(keys, keys)

    def fails(*args):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(pool.group(8), "allocate", fails)
        with pytest.raises(torch.OutOfMemoryError):
            AheadRows(cache, CPU)
    ahead = AheadRows(cache, CPU)
    ahead.advance(torch.tensor([1, 1, 2]))
    with monkeypatch.context() as patched:
        patched.setattr(pool.group(None), "allocate", fails)
        with pytest.raises(torch.OutOfMemoryError):
            ahead.catch_up([1, 1, 2], keep_step=True)
    ahead.release()
    for window, group in cache.groups.items():
        assert pool.group(window).manager.num_used == group.table.num_live_blocks


def test_steps_that_are_watched(monkeypatch):
    """Somebody who looks at every module's output sees those of all steps: none goes ahead by a graph."""
    serve_without_gpu(monkeypatch)
    monkeypatch.setattr(beam_loop, "runs_ahead", lambda device: True)
    stock, model = twins("llama", block_size=4)
    answers, run_ahead = [], StepGraphs.run_ahead

    def noted(*args):
        answers.append(run_ahead(*args) is not None)  # and as if there had been no graph

    monkeypatch.setattr(StepGraphs, "run_ahead", noted)
    new_text(model, prompt(2, 9), 4, num_beams=3)
    answers.clear()
    new_text(model, prompt(2, 9), 4, num_beams=3)
    assert any(answers)
    answers.clear()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        got = new_text(model, prompt(2, 9), 8, num_beams=3)
    finally:
        hook.remove()
    assert torch.equal(got, new_text(stock, prompt(2, 9), 8, num_beams=3))
    assert answers and not any(answers)
