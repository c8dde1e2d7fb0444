"""What drafters do to the models that they are of, and to what a call asks of them."""

import copy
import pickle
import random

import pytest
import torch
from helpers import generate, new_text, prompt, ragged, twins
from torch import nn

import hf_turbo
from hf_turbo.generation import speculation
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.modeling.head_input import HeadInput, make_watchable
from hf_turbo.patching import Borrowed, handle_of

NEW = 32


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Random heads for the tiny llama, as a folder."""
    stock, _ = twins("llama")
    torch.manual_seed(1)
    made = MedusaHeads(3, 1, stock.config.hidden_size, stock.config.vocab_size)
    for p in made.parameters():
        nn.init.normal_(p, std=0.2)
    made.save_pretrained(folder := tmp_path_factory.mktemp("heads"))
    return folder


# what a model's head is given


def test_the_heads_input_is_seen():
    stock, _ = twins("llama")
    expected = stock.model(prompt(1, 5)).last_hidden_state
    head, name, before = make_watchable(stock)
    assert make_watchable(stock) is None and isinstance(head, before) and name == "__class__"
    watch, other = HeadInput(), HeadInput()
    stock(prompt(1, 5))
    assert watch.value is None
    watch.wrapped(lambda **k: stock(**k))(input_ids=prompt(1, 5))
    assert torch.equal(watch.take(), expected) and other.value is None
    with pytest.raises(NotImplementedError, match="output embeddings"):
        watch.take()


def test_the_head_is_its_own_again(heads):
    stock, model = twins("llama")
    hf_turbo.patch(model, speculation=hf_turbo.Medusa(heads))
    assert type(model.lm_head) is not nn.Linear and type(model.lm_head).__name__ == "Linear"
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model.lm_head))
    assert torch.equal(again.weight, model.lm_head.weight)
    assert torch.equal(new_text(twin, prompt(1, 9), NEW), new_text(stock, prompt(1, 9), NEW))
    assert handle_of(twin).drafters and type(hf_turbo.unpatch(twin).lm_head) is nn.Linear
    assert type(hf_turbo.unpatch(model).lm_head) is nn.Linear


def test_heads_that_do_not_fit(heads, tmp_path):
    _, model = twins("llama")
    MedusaHeads(2, 1, 7, 128).save_pretrained(tmp_path)
    before = type(model)
    hf_turbo.unpatch(model)
    with pytest.raises(ValueError, match="hidden size"):
        hf_turbo.patch(model, speculation=hf_turbo.Medusa(tmp_path))
    assert not hf_turbo.is_patched(model) and type(model.lm_head) is nn.Linear and before is not None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: hf_turbo.PromptLookup(0),
        lambda: hf_turbo.PromptLookup(64),
        lambda: hf_turbo.PromptLookup(True),
        lambda: hf_turbo.PromptLookup(5, min_match=0),
        lambda: hf_turbo.DraftModel(None, 0),
        lambda: hf_turbo.Medusa("x", num_nodes=1),
        lambda: hf_turbo.Medusa("x", num_nodes=65),
        lambda: hf_turbo.Medusa("x", tree="unknown"),
        lambda: hf_turbo.Medusa("x", tree=[[0, 1]]),
        lambda: hf_turbo.Medusa("x", typical=(0.0, 0.3)),
        lambda: hf_turbo.Medusa("x", typical=(0.1,)),
    ],
)
def test_arguments_that_are_not_allowed(wrong):
    with pytest.raises(ValueError):
        wrong()


def test_no_drafter():
    _, model = twins("llama")
    with pytest.raises(TypeError, match="PromptLookup"):
        hf_turbo.patch(model, speculation="medusa")


def test_a_draft_longer_than_a_block_of_codes():
    _, model = twins("llama")
    hf_turbo.unpatch(model)
    with pytest.raises(ValueError, match="block_size"):
        hf_turbo.patch(model, kv_cache_dtype="int8", block_size=32, speculation=hf_turbo.PromptLookup(32))
    assert not hf_turbo.is_patched(model)
    hf_turbo.patch(model, kv_cache_dtype="int8", block_size=32, speculation=hf_turbo.PromptLookup(31))


# a model that is patched only while it drafts


def state(model):
    return type(model), model.config, set(vars(model)), [type(m) for m in model.modules()]


def test_a_borrowed_model():
    stock, _ = twins("llama")
    before, plain = state(stock), new_text(stock, prompt(1, 9), NEW)
    borrowed = Borrowed(stock)
    for _ in range(2):
        with borrowed as model:
            with borrowed:
                assert hf_turbo.is_patched(model)
            assert hf_turbo.is_patched(model)
            assert torch.equal(new_text(model, prompt(1, 9), NEW), plain)
            handle = handle_of(model)
        assert state(stock) == before
    with borrowed as model:
        assert handle_of(model) is handle  # what was captured is still there
    stock.config.note = "changed"
    with borrowed as model:
        assert handle_of(model) is not handle and model.config.note == "changed"
    assert state(stock) == before and stock.config.note == "changed"


def test_a_borrowed_model_that_was_patched():
    _, model = twins("llama")
    handle = handle_of(model)
    with Borrowed(model):
        assert handle_of(model) is handle
    assert handle_of(model) is handle


# pace and acceptance


class Moody:
    """A clock whose seconds mean nothing."""

    def __init__(self):
        self.random, self.now = random.Random(), 0.0

    def perf_counter(self):
        self.now += self.random.random()
        return self.now


@pytest.mark.parametrize("rows", [1, 3])
def test_s09_seeds_whatever_the_clock_says(monkeypatch, rows):
    """How much is drafted decides which random numbers are drawn; it must not depend on the time that rounds take."""
    monkeypatch.setattr(speculation, "time", Moody())
    stock, model = twins("llama")
    draft = copy.deepcopy(stock)
    draft.model.layers = draft.model.layers[:1]
    hf_turbo.patch(model, speculation=hf_turbo.DraftModel(draft, 7))
    inputs = prompt(rows, 9)
    texts = []
    for _ in range(4):
        torch.manual_seed(3)
        texts.append(new_text(model, inputs, NEW, do_sample=True, temperature=1.5))
    assert all(torch.equal(text, texts[0]) for text in texts)
    [stats] = hf_turbo.report(model).drafts.values()
    assert stats.rounds and stats.tokens == 4 * rows * (NEW - 1)


def test_typical_acceptance(heads):
    """More is accepted than exactly, only where tokens are sampled; greedy text is the model's."""
    stock, model = twins("llama")
    batch, sampled = ragged(3, 9, 6), dict(do_sample=True, temperature=0.8, output_scores=True)
    rates = {}
    for typical in (None, (0.05, 0.05)):
        hf_turbo.patch(model, speculation=hf_turbo.Medusa(heads, num_nodes=16, adaptive=False, typical=typical))
        assert torch.equal(new_text(model, batch, NEW), new_text(stock, batch, NEW))
        greedy = next(iter(hf_turbo.report(model).drafts.values())).accepted
        for _ in range(6):
            output = generate(model, batch, NEW, **sampled)
            assert len(output.scores) == NEW and output.sequences.shape[1] == 9 + NEW
        rates[typical] = next(iter(hf_turbo.report(model).drafts.values())).accepted - greedy
    assert rates[0.05, 0.05] > rates[None]


def test_report_says_what_drafts_come_to():
    stock, model = twins("llama")
    hf_turbo.patch(model, speculation=hf_turbo.DraftModel(copy.deepcopy(stock), 3, adaptive=False))
    new_text(model, prompt(1, 9), 21)
    [(name, stats)] = hf_turbo.report(model).drafts.items()
    assert name.startswith("DraftModel") and (stats.rounds, stats.drafted, stats.accepted) == (5, 15, 15)
    assert "15 tokens drafted, 100% accepted, 4.00 tokens a step; on" in str(hf_turbo.report(model))


@pytest.mark.parametrize("kind", ["draft model", "typical"])
def test_probabilities_that_are_no_numbers(heads, kind):
    """Sampling from NaN is an error, as in plain sampling, and not some token."""
    stock, model = twins("llama")
    options = dict(num_nodes=8, adaptive=False, typical=(0.1, 0.3))
    spec = hf_turbo.Medusa(heads, **options) if kind == "typical" else hf_turbo.DraftModel(stock, 3, adaptive=False)
    hf_turbo.patch(model, speculation=spec)
    new_text(model, prompt(1, 9), 4, do_sample=True)
    calls = []

    def spoil(module, args, output):
        calls.append(1)
        return output * float("nan") if len(calls) > 3 else output

    with model.model.norm.register_forward_hook(spoil), pytest.raises(RuntimeError, match="nan"):
        new_text(model, prompt(1, 9), NEW, do_sample=True)
    assert len(calls) > 3 and hf_turbo.report(model).blocks_in_use == 0
