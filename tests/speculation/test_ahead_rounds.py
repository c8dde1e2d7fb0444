"""Rounds with the host one behind, on a CPU: the graphs are computed through the deferred mode, but not recorded."""

import pytest
import torch
from combinations import few
from helpers import generate, new_text, prompt, ragged, twins, used_blocks
from steps import Step

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation import ahead_rounds, speculation
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.modeling.graphs import Followed, StepGraphs
from hf_turbo.modeling.step_graph import StepInputs
from hf_turbo.ops import reference
from hf_turbo.patching import handle_of

NEW = 24


class Moves:
    """What `TokenAddresses` is on a GPU."""

    def __init__(self, layers):
        self.layers = layers

    def move(self, *where):
        reference.move_kv(self.layers, *where)


@pytest.fixture
def ahead(monkeypatch):
    """Lets rounds go ahead; the numbers of those that were loaded and of those that went on from what was left."""
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
        return Followed(follower(graph).clone(), graph, key, follower, graph.turn)

    def run_drafts(steps, cache, kwargs, lengths, last_position, ahead, key, follower):
        inputs = StepInputs.of(kwargs)
        if not cache.model_is_as_it_was:
            return None
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


def drafters(stock, tmp_path):
    size = (stock.config.hidden_size, stock.config.vocab_size)
    heads = MedusaHeads(3, 1, *size)
    for p in heads.parameters():
        torch.nn.init.normal_(p, std=0.2)
    heads.save_pretrained(tmp_path)
    tree = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    return {
        "medusa": hf_turbo.Medusa(tmp_path, tree=tree, adaptive=False),
        "chain": hf_turbo.Medusa(tmp_path, tree=[[0], [0, 0]], adaptive=False),
        "adaptive": hf_turbo.Medusa(tmp_path, tree=tree),
        "lookup": hf_turbo.PromptLookup(5, 1, adaptive=False),
        "adaptive lookup": hf_turbo.PromptLookup(7, 1),
        "draft model": hf_turbo.DraftModel(stock, 3),
    }


KINDS = ["medusa", "chain", "adaptive", "lookup", "adaptive lookup", "draft model"]


@pytest.mark.parametrize("name, kind", few(["llama", "gemma3_text"], KINDS))
def test_same_text(ahead, tmp_path, name, kind):
    counts, register = ahead
    stock, model = twins(name, block_size=4)
    speculation = drafters(stock, tmp_path)[kind]
    for batch, place in ((prompt(1, 9), None), (ragged(3, 9, 6, 12), 7)):
        plain = new_text(stock, batch, NEW)
        for eos in [None] if place is None else [int(plain[-1, place])]:
            options = {} if eos is None else dict(eos_token_id=eos, pad_token_id=0)
            expected = new_text(stock, batch, NEW, **options)
            hf_turbo.patch(model, block_size=4, speculation=speculation)
            register(model)
            inputs = batch if isinstance(batch, dict) else dict(input_ids=batch, attention_mask=torch.ones_like(batch))
            got = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
            assert torch.equal(got[:, inputs["input_ids"].shape[1] :], expected)
            assert used_blocks(model) == 0
    assert counts["loaded"]
    assert counts["gone on"] or kind in ("lookup", "draft model")


def test_cache_afterwards(ahead, tmp_path):
    """A returned cache is that of plain steps."""
    counts, register = ahead
    stock, model = twins("llama", block_size=4)
    hf_turbo.patch(model, block_size=4, speculation=drafters(stock, tmp_path)["medusa"])
    register(model)
    batch = ragged(3, 9, 6, 12)
    got, expected = generate(model, batch, NEW), generate(stock, batch, NEW)
    assert torch.equal(got.sequences, expected.sequences) and counts["gone on"]
    for mine, theirs in zip(got[CACHE_NAME].layers, expected[CACHE_NAME].layers, strict=True):
        real = batch["attention_mask"].bool()
        assert mine.keys.shape == theirs.keys.shape
        for row in range(len(real)):
            pad = int((~real[row]).sum())
            torch.testing.assert_close(mine.keys[row, :, pad:], theirs.keys[row, :, pad:], atol=1e-4, rtol=1e-4)
