"""What a call with drafts leaves: no blocks, no patched draft model, nothing of a round that failed. S08."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from combinations import few
from drafting import RAGGED, SINGLE, Knowing, assert_same_text, drafted, heads_of, pair, random_model, stats, tree_of
from helpers import assert_pool_accounts, generate, new_text, prompt, stepped_aside, used_blocks
from tiny_models import build
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedConfig

import hf_turbo
from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.prompt_lookup import PromptLookup
from hf_turbo.patching import handle_of


def state_of(model):
    """What another owner of a model would miss: class, configs, attributes of all modules, weights."""
    modules = [(name, type(module), dict(vars(module))) for name, module in model.named_modules()]
    return type(model), model.config, dict(vars(model.config)), dict(vars(model.generation_config)), modules


@pytest.mark.parametrize("by", ["argument", "patch"])
def test_a_draft_model_is_what_it_was(by):
    one = pair("llama")
    draft = copy.deepcopy(one.stock)
    before, text = state_of(draft), new_text(draft, SINGLE)
    extra = {"assistant_model": draft} if by == "argument" else {}
    drafted(one, None if extra else DraftModel(draft, 5, adaptive=False))
    for batch in (SINGLE, RAGGED):
        assert torch.equal(generate(one.model, batch, 24, **extra).sequences, one.plain(batch, 24))
    after = state_of(draft)
    assert after[0] is before[0] and after[1] is before[1]
    assert repr(after) == repr(before) and not hf_turbo.is_patched(draft)
    assert draft.config._attn_implementation == "eager"
    assert torch.equal(new_text(draft, SINGLE), text)


def test_a_draft_model_that_is_patched_stays_so():
    one = pair("llama")
    draft = hf_turbo.patch(copy.deepcopy(one.stock), block_size=8)
    handle = handle_of(draft)
    drafted(one, DraftModel(draft, 5, adaptive=False))
    assert_same_text(one, RAGGED, 24)
    assert handle_of(draft) is handle and used_blocks(draft) == 0
    assert_pool_accounts(draft)


class Fails(LogitsProcessor):
    """Raises at its third call."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return scores


WAYS = {
    "lookup": lambda one, folder: PromptLookup(3, min_match=1, adaptive=False),
    "draft model": lambda one, folder: DraftModel(copy.deepcopy(one.stock), 5, adaptive=False),
    "heads": lambda one, folder: Medusa(heads_of(one.model, folder), adaptive=False),
    "tree": lambda one, folder: Knowing(one.plain(SINGLE, 64), tree_of("full 2x2x2")),
}


@pytest.mark.parametrize("name, way", few(["llama", "gemma3_text"], WAYS))
def test_a_processor_that_raises(name, way, tmp_path):
    """In the middle of a round: the next call is right."""
    one = pair(name)
    speculation = WAYS[way](one, tmp_path)
    drafted(one, speculation)
    before = None if way != "draft model" else state_of(speculation.model)
    with pytest.raises(KeyboardInterrupt):
        generate(one.model, SINGLE, 24, logits_processor=LogitsProcessorList([Fails()]))
    assert used_blocks(one.model) == 0
    assert_pool_accounts(one.model)
    assert before is None or repr(state_of(speculation.model)) == repr(before)
    assert_same_text(one, SINGLE)


@pytest.mark.parametrize("who, when", few(["model", "draft"], [1, 2, 3, 5]))
def test_a_forward_that_raises(who, when):
    """The prompt's, the first that sees whether drafts work, and later ones; with a cache of the caller's, too."""
    one = pair("gemma3_text")
    draft = copy.deepcopy(one.stock)
    drafted(one, DraftModel(draft, 5, adaptive=False))
    calls = []

    def fail(*_):
        calls.append(0)
        if len(calls) == when:
            raise KeyboardInterrupt

    layers = (one.model if who == "model" else draft).model.layers
    hook = layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        generate(one.model, RAGGED, 24)
    hook.remove()
    assert used_blocks(one.model) == 0 and not hf_turbo.is_patched(draft)
    assert_pool_accounts(one.model)
    assert not stepped_aside(one.model)
    assert_same_text(one, RAGGED)


def test_blocks_during_a_call_are_those_of_the_text():
    """A round's rejected nodes give theirs back: of one row, never more than the text and one tree need."""
    one = pair("llama")
    tree = tree_of("64 nodes")
    drafted(one, Knowing(one.plain(SINGLE, 64), tree), block_size=4)
    assert_same_text(one, SINGLE)
    assert hf_turbo.report(one.model).peak_blocks <= -(-(9 + 64 + 64) // 4)


# S08


def test_s08_a_useless_draft_switches_itself_off():
    one = pair("llama")
    draft = random_model("llama", num_hidden_layers=6, hidden_size=32)
    drafted(one, DraftModel(draft, 7))
    assert_same_text(one, prompt(1, 20), 150)
    seen = stats(one.model)
    assert not seen.is_on and seen.acceptance_rate < 0.1
    assert seen.rounds < 60 and seen.plain_steps > 80
    assert seen.tokens == 149 and 1 <= seen.tokens_per_step < 1.2


def test_s08_drafts_that_never_stop_say_so():
    one = pair("llama")
    drafted(one, DraftModel(random_model("llama"), 3, adaptive=False))
    assert_same_text(one, SINGLE)
    assert stats(one.model).is_on and stats(one.model).plain_steps == 0


def test_s08_nothing_is_copied(monkeypatch):
    """After the first call neither configs nor models are."""
    one = pair("llama")
    draft = hf_turbo.patch(copy.deepcopy(one.stock), block_size=4)
    drafted(one, DraftModel(draft, 5, adaptive=False))
    options = dict(max_new_tokens=24, do_sample=False)
    want = one.model.generate(SINGLE, attention_mask=torch.ones_like(SINGLE), **options)
    copied, real = [], copy.deepcopy

    def watched(x, *args):
        if isinstance(x, (torch.nn.Module, PreTrainedConfig)) or "okenizer" in type(x).__name__:
            copied.append(type(x))
        return real(x, *args)

    monkeypatch.setattr(copy, "deepcopy", watched)
    got = one.model.generate(SINGLE, attention_mask=torch.ones_like(SINGLE), **options)
    assert torch.equal(got, want) and not copied


def test_p01_threads():
    """Each text is what it is alone; one draft model serves them all."""
    one = pair("llama")
    draft = hf_turbo.patch(copy.deepcopy(one.stock), block_size=4)
    drafted(one, DraftModel(draft, 5, adaptive=False))
    prompts = [prompt(1, n) for n in range(5, 13)]
    wanted, got = [one.plain(ids, 24) for ids in prompts], [None] * len(prompts)

    def work(i):
        got[i] = generate(one.model, prompts[i], 24, return_dict_in_generate=False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(wanted, got))
    assert used_blocks(one.model) == used_blocks(draft) == 0


def test_a_deep_copy_drafts_for_itself():
    one = pair("llama")
    drafted(one, Knowing(one.plain(RAGGED, 64), tree_of("full 2x2x2")))
    assert_same_text(one, RAGGED)
    other = copy.deepcopy(one.model)
    hf_turbo.unpatch(one.model)
    got = generate(other, RAGGED, 64, return_dict_in_generate=False)
    assert torch.equal(got, one.plain(RAGGED, 64))
    assert used_blocks(other) == 0
    assert build("llama").config._attn_implementation == "eager"
