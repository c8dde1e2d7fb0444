"""Every argument of `generate()` means with drafts what it means without: S09 of the cases, and what is returned."""

from __future__ import annotations

import copy

import pytest
import torch
from combinations import few
from drafting import (
    RAGGED,
    SINGLE,
    Knowing,
    assert_drafted,
    assert_same_output,
    drafted,
    heads_of,
    letters,
    pair,
    stats,
    tell,
    tree_of,
    truncated,
)
from helpers import generate, prompt, stepped_aside, used_blocks
from loop_cases import CountingCriterion
from tiny_models import build
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList, pipeline
from transformers.generation.streamers import BaseStreamer

import hf_turbo
from hf_turbo.compat import CACHE_NAME
from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.prompt_lookup import PromptLookup
from hf_turbo.patching import handle_of

WAYS = ("lookup argument", "assistant argument", "lookup", "draft model", "truncated model", "heads", "tree", "chain")
ARGUMENTS = {
    "repetition penalty": dict(repetition_penalty=1.3),
    "no n-gram twice": dict(no_repeat_ngram_size=3),
    "no bigram twice": dict(no_repeat_ngram_size=2),
    "bad words": dict(bad_words_ids=[[17], [40, 41], [99, 3, 8]]),
    "suppressed": dict(suppress_tokens=list(range(20, 60))),
    "forced end": dict(forced_eos_token_id=5),
    "no early end": dict(min_new_tokens=12, eos_token_id=list(range(3, 40))),
    "early end": dict(eos_token_id=list(range(3, 12))),
    "longer and longer odds": dict(exponential_decay_length_penalty=(4, 1.5), eos_token_id=7),
    "prompt's n-grams": dict(encoder_no_repeat_ngram_size=2),
    "several": dict(repetition_penalty=1.2, no_repeat_ngram_size=3, bad_words_ids=[[17]], min_new_tokens=4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


def drafting(way, one, inputs, folder, new_tokens=24, **options):
    """A model that drafts in one of `WAYS`, and the arguments that it takes for it."""
    arguments = {}
    if way == "lookup argument":
        hf_turbo.patch(one.model, block_size=4)
        return {"prompt_lookup_num_tokens": 4}
    if way == "assistant argument":
        hf_turbo.patch(one.model, block_size=4)
        draft = copy.deepcopy(one.stock)
        draft.generation_config.num_assistant_tokens = 5
        return {"assistant_model": draft}
    speculation = {
        "lookup": lambda: PromptLookup(7, min_match=1, adaptive=False),
        "draft model": lambda: DraftModel(copy.deepcopy(one.stock), 5, adaptive=False),
        "truncated model": lambda: DraftModel(truncated(one.stock.tiny_name), 3, adaptive=False),
        "heads": lambda: Medusa(heads_of(one.model, folder), adaptive=False),
        "tree": lambda: Knowing(one.plain(inputs, new_tokens, **options), tree_of("full 2x2x2")),
        "chain": lambda: Knowing(one.plain(inputs, new_tokens, **options), tree_of("chain of 5")),
    }[way]()
    drafted(one, speculation)
    return arguments


@pytest.mark.parametrize("batch", [SINGLE, RAGGED], ids=["one row", "several"])
@pytest.mark.parametrize("way", WAYS)
def test_s09_processors(way, batch, folder):
    """They see the drafted tokens before each place, as if they were the text already."""
    one = pair("llama")
    several = not isinstance(batch, torch.Tensor)
    number = WAYS.index(way) + several  # every third of the arguments, others with each way
    for name, options in [*ARGUMENTS.items()][number % 3 :: 3]:
        extra = drafting(way, one, batch, folder, **options)
        want = one.plain(batch, 24, **options)
        got = generate(one.model, batch, 24, **options, **extra).sequences
        assert torch.equal(got, want), name
        aside = any("all rows" in reason for reason in stepped_aside(one.model))
        if several and (name == "prompt's n-grams" or "repetition_penalty" in options):
            assert aside or name != "prompt's n-grams"  # the penalty belongs to rows in some releases of Transformers
        if not aside:
            assert_drafted(one.model, needs_drafts="lookup" not in way)
        assert used_blocks(one.model) == 0


@pytest.mark.parametrize(
    "name, way", few(["llama", "gemma3_text"], ["lookup argument", "lookup", "heads", "tree", "chain"])
)
def test_s09_a_seed_gives_the_plain_text(name, way, folder):
    """Every token is the model's own draw, in the order of the text: the same numbers give the same tokens."""
    one = pair(name)
    filters = dict(do_sample=True, temperature=1.3, top_k=20, top_p=0.9)
    for seed, options in enumerate((filters, {**filters, "repetition_penalty": 1.2}, dict(do_sample=True))):
        torch.manual_seed(seed)
        want = generate(one.stock, SINGLE, 32, **options).sequences
        after = torch.rand(2)
        extra = drafting(way, one, SINGLE, folder)
        if way in ("tree", "chain"):
            tell(one.model, want)
        torch.manual_seed(seed)
        got = generate(one.model, SINGLE, 32, **options, **extra).sequences
        assert torch.equal(got, want)
        assert torch.equal(torch.rand(2), after), "random numbers were left or taken"
        assert_drafted(one.model, needs_drafts="lookup" not in way)


@pytest.mark.parametrize("way", ["lookup", "heads", "tree", "chain"])
def test_s09_a_criterion_that_ends_a_sampled_text(way, folder):
    """Random numbers for what was drafted after the end are given back."""
    one = pair("llama")
    drafting(way, one, SINGLE, folder)
    for num_tokens in range(8, 16):
        texts, after = [], []
        for model in (one.stock, one.model):
            torch.manual_seed(1)
            if way in ("tree", "chain") and texts:
                tell(model, torch.cat([texts[0], prompt(1, 20)], dim=1))
            given = StoppingCriteriaList([CountingCriterion(9 + num_tokens)])
            texts.append(generate(model, SINGLE, 32, do_sample=True, stopping_criteria=given).sequences)
            after.append(torch.rand(2))
        assert texts[0].shape[1] == 9 + num_tokens
        assert torch.equal(*texts) and torch.equal(*after)
    assert_drafted(one.model, needs_drafts=way != "lookup")


@pytest.mark.parametrize("way", ["lookup", "draft model", "truncated model", "heads"])
def test_s09_seeds_of_several_rows(way, folder):
    """The same seed, the same text; no seed, another."""
    one, texts = pair("llama"), []
    drafting(way, one, SINGLE, folder)
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        texts.append(generate(one.model, SINGLE, 24, do_sample=True, num_return_sequences=3).sequences)
        assert texts[-1].shape == (3, 9 + 24)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert_drafted(one.model, needs_drafts=way != "lookup")


class Banned(LogitsProcessor):
    """Counts calls: at each it forbids what it saw last, and one token more."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores.index_fill(1, torch.tensor([len(self.seen) % 128, input_ids[0, -1].item()]), float("-inf"))


@pytest.mark.parametrize("way", WAYS)
def test_s09_a_processor_of_the_user_with_a_memory(way, folder):
    """One row: called once a token with the text before it. Several: plain steps, and it is said why."""
    one = pair("llama")
    for batch in (SINGLE, RAGGED):
        extra, calls, texts = drafting(way, one, batch, folder), [], []
        for model, own in ((one.stock, {}), (one.model, extra)):
            calls.append(Banned())
            texts.append(generate(model, batch, 20, logits_processor=LogitsProcessorList([calls[-1]]), **own).sequences)
        assert torch.equal(*texts)
        assert calls[0].seen == calls[1].seen and len(calls[1].seen) == 20
        reasons = stepped_aside(one.model)
        assert any("all rows of the batch" in reason for reason in reasons) == (batch is RAGGED)


@pytest.mark.parametrize("way", WAYS)
def test_criteria_of_the_user(way, folder):
    one = pair("llama")
    for batch, length in ((SINGLE, 9 + 13), (RAGGED, 12 + 13)):
        extra, criteria, texts = drafting(way, one, batch, folder), [], []
        for model, own in ((one.stock, {}), (one.model, extra)):
            criteria.append(CountingCriterion(length))
            given = StoppingCriteriaList([criteria[-1]])
            texts.append(generate(model, batch, 20, stopping_criteria=given, **own).sequences)
        assert torch.equal(*texts) and texts[0].shape[1] == length
        assert criteria[0].seen == criteria[1].seen
        assert any("all rows of the batch" in reason for reason in stepped_aside(one.model)) == (batch is RAGGED)


@pytest.mark.parametrize("way", WAYS)
def test_stop_strings(way, folder):
    one, tokenizer = pair("llama"), letters()
    word = tokenizer.decode(one.plain(SINGLE, 24)[0, -14:-12])
    extra = drafting(way, one, SINGLE, folder)
    want = generate(one.stock, SINGLE, 24, stop_strings=[word], tokenizer=tokenizer).sequences
    got = generate(one.model, SINGLE, 24, stop_strings=[word], tokenizer=tokenizer, **extra).sequences
    assert torch.equal(got, want)
    assert want.shape[1] == 9 + 12
    assert_drafted(one.model, needs_drafts="lookup" not in way)


class Puts(BaseStreamer):
    def __init__(self):
        self.received, self.ends = [], 0

    def put(self, value):
        self.received.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("batch", [SINGLE, RAGGED], ids=["one row", "several"])
@pytest.mark.parametrize("way", WAYS)
def test_streamers(way, batch, folder):
    """They get what they get without drafts, call for call."""
    one = pair("llama")
    end = one.plain(batch, 24)[0, -12].item()
    extra, streams = drafting(way, one, batch, folder), []
    for model, own in ((one.stock, {}), (one.model, extra)):
        streams.append(Puts())
        generate(model, batch, 24, streamer=streams[-1], eos_token_id=end, **own)
    assert streams[0].received == streams[1].received
    assert streams[1].ends == 1
    assert_drafted(one.model, needs_drafts="lookup" not in way)


@pytest.mark.parametrize("way, batch", [*((way, RAGGED) for way in WAYS), ("heads", SINGLE), ("lookup", SINGLE)])
def test_what_is_returned(way, batch, folder):
    """Scores, logits, and a cache that is what it is after as many plain steps."""
    one = pair("gemma3_text")
    mask = torch.ones_like(batch) if isinstance(batch, torch.Tensor) else batch["attention_mask"]
    end = one.plain(batch, 24)[0, -15].item()
    extra = drafting(way, one, batch, folder)
    for options in ({}, dict(eos_token_id=end, no_repeat_ngram_size=2)):
        options = dict(output_scores=True, output_logits=True, **options)
        want, got = generate(one.stock, batch, 24, **options), generate(one.model, batch, 24, **options, **extra)
        assert_same_output(want, got, mask, options.get("eos_token_id", ()))
        del got
    assert_drafted(one.model, needs_drafts="lookup" not in way)


@pytest.mark.parametrize("way, batch", [*((way, RAGGED) for way in WAYS), ("heads", SINGLE), ("lookup", SINGLE)])
def test_a_second_turn(way, batch, folder):
    """Over the cache that the first one has returned, some of whose rows ended early."""
    one = pair("gemma3_text")
    ids = batch if isinstance(batch, torch.Tensor) else batch["input_ids"]
    mask = torch.ones_like(ids) if isinstance(batch, torch.Tensor) else batch["attention_mask"]
    end = one.plain(batch, 24)[0, -15].item()
    extra, texts = drafting(way, one, batch, folder), []
    for model, own in ((one.stock, {}), (one.model, extra)):
        first = generate(model, batch, 24, eos_token_id=end, **own)
        turn = torch.cat([first.sequences, prompt(len(ids), 5)], dim=1)
        grown = torch.nn.functional.pad(mask, (0, turn.shape[1] - mask.shape[1]), value=1)
        given = {"input_ids": turn, "attention_mask": grown, CACHE_NAME: first[CACHE_NAME]}
        if way in ("tree", "chain") and own is extra and model is one.model:
            tell(model, texts[0])
        second = generate(model, given, 24, **own)
        texts.append(second.sequences)
        if model is one.stock:
            stock = second
    assert torch.equal(*texts)
    assert_same_output(stock, second, grown)
    del first, second, given
    assert_drafted(one.model)


@pytest.mark.parametrize("way", WAYS)
def test_a_given_cache(way, folder):
    one = pair("gemma3_text")
    extra = drafting(way, one, SINGLE, folder)
    cache = hf_turbo.paged_cache(one.model)
    inputs = {"input_ids": SINGLE, "attention_mask": torch.ones_like(SINGLE), CACHE_NAME: cache}
    got = one.model.generate(**inputs, max_new_tokens=24, do_sample=False, **extra)
    assert torch.equal(got, one.plain(SINGLE, 24))
    assert cache.get_seq_length() == 9 + 23
    del inputs, cache
    assert_drafted(one.model, needs_drafts="lookup" not in way)


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_for_a_prompt(way, folder):
    """Nothing to read for a draft model: it says so."""
    one = pair("llama")
    with torch.no_grad():
        embeds = one.stock.get_input_embeddings()(RAGGED["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": RAGGED["attention_mask"]}
    want = one.stock.generate(**inputs, max_new_tokens=24, do_sample=False)
    extra = drafting(way, one, RAGGED, folder)
    if way in ("tree", "chain"):
        tell(one.model, want)
    got = one.model.generate(**inputs, max_new_tokens=24, do_sample=False, **extra)
    assert torch.equal(got, want)
    reads_tokens = way in ("assistant argument", "draft model", "truncated model")
    assert any("reads tokens" in reason for reason in stepped_aside(one.model)) == reads_tokens
    assert used_blocks(one.model) == 0


@pytest.mark.parametrize("way", WAYS)
def test_return_sequences(way, folder):
    one = pair("llama")
    extra = drafting(way, one, SINGLE, folder)
    torch.manual_seed(3)
    got = generate(one.model, SINGLE, 24, do_sample=True, top_k=1, num_return_sequences=4, **extra).sequences
    assert torch.equal(got, one.plain(SINGLE, 24).expand(4, -1))
    assert used_blocks(one.model) == 0 and not stepped_aside(one.model)


@pytest.mark.parametrize("way", WAYS)
def test_pipelines(way, folder):
    one, tokenizer = pair("llama"), letters()
    tokenizer.pad_token_id = 0
    text = tokenizer.decode(SINGLE[0])
    want = pipeline("text-generation", one.stock, tokenizer=tokenizer)(text, max_new_tokens=24, do_sample=False)
    extra = drafting(way, one, SINGLE, folder)
    run = pipeline("text-generation", one.model, tokenizer=tokenizer)
    assert run(text, max_new_tokens=24, do_sample=False, **extra) == want
    assert_drafted(one.model, needs_drafts="lookup" not in way)


# Vocabularies


@pytest.mark.parametrize("size, sampled, by", few([120, 136], [False, True], ["argument", "patch"], together=2))
def test_vocabularies_of_different_padding(size, sampled, by):
    one, draft = pair("llama"), build("llama", vocab_size=size)
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), one.stock.parameters(), strict=True):
            mine[:128] = theirs[:size] if mine.shape != theirs.shape else theirs
    extra = {"assistant_model": draft} if by == "argument" else {}
    drafted(one, None if extra else DraftModel(draft, 5, adaptive=False))
    options = dict(do_sample=True, top_k=1) if sampled else {}
    for batch in (SINGLE, RAGGED):
        got = generate(one.model, batch, 24, **options, **extra).sequences
        assert torch.equal(got, one.plain(batch, 24))
    assert stats(one.model).accepted > 0
    assert_drafted(one.model)


def test_other_tokenizers():
    one, draft = pair("llama"), build("llama", vocab_size=2000)
    drafted(one, None)
    with pytest.raises(ValueError, match="tokenizer"):
        generate(one.model, SINGLE, 8, assistant_model=draft)
    with pytest.raises(ValueError, match="same tokenizer"):
        drafted(one, DraftModel(draft))
    assert not hf_turbo.is_patched(one.model) or handle_of(one.model).speculation is None
