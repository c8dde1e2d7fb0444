"""Drafted text by captured steps: the text of the unpatched model, in fp32."""

import itertools

import pytest
import torch
from graph_cases import BATCH, GPU, on_gpu, patched_model, stock_model
from helpers import generate, new_text, used_blocks
from transformers import LogitsProcessorList

import hf_turbo
from hf_turbo.generation.device_texts import DeviceTexts
from hf_turbo.generation.draft_model import DraftModel
from hf_turbo.generation.lookup_ahead import LookupAhead
from hf_turbo.generation.medusa import Medusa
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.generation.prompt_lookup import PromptLookup
from hf_turbo.generation.suffix_index import SuffixIndex
from hf_turbo.generation.texts import Texts
from hf_turbo.patching import handle_of

pytestmark = GPU
NEW = 64
TREES = {
    "chain": [[0], [0, 0], [0, 0, 0]],
    "2x2x2": [[*path] for n in (1, 2, 3) for path in itertools.product(range(2), repeat=n)],
    "63 nodes": "mc_sim_7b_63",
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Random heads for a model, as a folder."""
    made = {}

    def folder(model):
        size = (model.config.hidden_size, model.config.vocab_size)
        if size not in made:
            torch.manual_seed(1)
            heads = MedusaHeads(4, 1, *size)
            for p in heads.parameters():
                torch.nn.init.normal_(p, std=0.2)
            made[size] = tmp_path_factory.mktemp("heads")
            heads.save_pretrained(made[size])
        return made[size]

    return folder


def batches():
    return [{name: x[-1:] for name, x in on_gpu(BATCH).items()}, on_gpu(BATCH)]


def drafts(model, speculation, expected, batch, **options):
    """The same text, and what the drafter has come to."""
    hf_turbo.patch(model, block_size=16, speculation=speculation, **options)
    for _ in range(2):  # captured, then replayed
        got = model.generate(**batch, max_new_tokens=NEW, do_sample=False)[:, batch["input_ids"].shape[1] :]
        assert torch.equal(got, expected)
    handle = handle_of(model)
    assert not handle.stepped_aside, handle.stepped_aside
    assert used_blocks(model) == 0
    return next(iter(handle.drafters.values())).stats()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_medusa(name, tree, heads):
    stock, model = stock_model(name), patched_model(name)
    for batch in batches():
        stats = drafts(
            model, Medusa(heads(stock), tree=TREES[tree], adaptive=False), new_text(stock, batch, NEW), batch
        )
        assert stats.rounds > NEW


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_prompt_lookup(name, adaptive):
    stock, model = stock_model(name), patched_model(name)
    for batch in batches():
        stats = drafts(model, PromptLookup(7, 1, adaptive), new_text(stock, batch, NEW), batch)
        assert stats.rounds + stats.plain_steps > 16


def models_that_go_round():
    """A stock one and one to patch, whose next token depends on the last one alone."""
    stock, model = stock_model("llama"), patched_model("llama")
    for layer in (*stock.model.layers, *model.model.layers):
        layer.self_attn.o_proj.weight.data.zero_()
    return stock, model


def test_medusa_where_the_text_repeats_itself(heads):
    """The device lays what followed over the guesses of heads that know nothing."""
    stock, model = models_that_go_round()
    for batch in batches():
        expected, brought = new_text(stock, batch, NEW), []
        for min_match in (None, 2):
            asked = Medusa(heads(stock), tree=TREES["2x2x2"], adaptive=False, min_match=min_match)
            brought.append(drafts(model, asked, expected, batch).tokens_per_step)
        assert brought[0] < 1.5 and brought[1] > 2


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_device_finds_what_an_index_finds(adaptive, monkeypatch):
    """In texts that go round; after each round, by captured graphs."""
    stock, model = models_that_go_round()
    heard, hear = [], LookupAhead.hear

    def checked(session, following, done):
        texts = session._texts
        for row, (newest, *tokens, match) in enumerate(following):
            text = texts.row(row)[0].tolist()[session._held.left_out[row] :]
            length, place = SuffixIndex(text).match(16)
            if not done[row]:
                assert newest == text[-1] and match == length
                assert not match or tokens == [text[place + i % (len(text) - place)] for i in range(len(tokens))]
                heard.append(match)
        return hear(session, following, done)

    monkeypatch.setattr(LookupAhead, "hear", checked)
    for batch in batches():
        heard.clear()
        stats = drafts(model, PromptLookup(7, 1, adaptive), new_text(stock, batch, NEW), batch)
        assert sum(match > 0 for match in heard) > 8
        assert stats.tokens_per_step > (1.2 if adaptive else 2) and 0 < stats.accepted <= stats.drafted


def test_texts_are_loaded_without_waiting():
    texts = Texts(torch.randint(5, 50, (3, 40), device="cuda"), LogitsProcessorList())
    texts.append_unwritten([[7, 8], [9], [10, 11, 12]])
    held = DeviceTexts(4, 128, 7, 1, torch.device("cuda"))
    held.load(texts, [0, 3, 0])  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = held.load(texts, [0, 3, 0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for row, left_out in enumerate([0, 3, 0]):
        text = texts.row(row)[0].tolist()[left_out:]
        assert found[row, 0] == text[-1] and found[row, -1] == SuffixIndex(text).match(16)[0]


@pytest.mark.parametrize("draft", ["same", "other"])
def test_draft_model(draft):
    stock, model = stock_model("llama"), patched_model("llama")
    other = stock_model("llama")
    if draft == "other":
        torch.manual_seed(3)
        for p in other.parameters():
            p.data.normal_(std=0.05)
    for batch in batches():
        stats = drafts(model, DraftModel(other, 5, adaptive=False), new_text(stock, batch, NEW), batch)
        assert (stats.acceptance_rate == 1) == (draft == "same") or len(batch["input_ids"]) > 1


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_over_codes(kind, heads):
    """Against plain decoding over the same codes."""
    stock = stock_model("llama")
    for batch in batches():
        model = hf_turbo.patch(stock_model("llama"), kv_cache_dtype=kind, block_size=32)
        expected = new_text(model, batch, NEW)
        speculation = Medusa(heads(stock), adaptive=False)
        model = hf_turbo.patch(model, kv_cache_dtype=kind, block_size=32, speculation=speculation)
        assert torch.equal(new_text(model, batch, NEW), expected)


def test_an_end_within_a_draft(heads):
    stock, model = stock_model("llama"), patched_model("llama")
    batch = batches()[1]
    plain = new_text(stock, batch, NEW)
    for place in (3, 4, 5, 30):
        eos = int(plain[1, place])
        expected = new_text(stock, batch, NEW, eos_token_id=eos, pad_token_id=0)
        medusa = Medusa(heads(stock), adaptive=False)
        for speculation in (PromptLookup(7, 1, False), medusa, DraftModel(stock, 5, False)):
            hf_turbo.patch(model, block_size=16, speculation=speculation)
            got = model.generate(**batch, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0)
            assert torch.equal(got[:, batch["input_ids"].shape[1] :], expected)


def test_sampled_and_kept(heads):
    """Sampling one row with a seed gives the plain sampled text; scores and cache are those of a plain run."""
    stock, model = stock_model("llama"), patched_model("llama")
    batch, options = batches()[0], dict(do_sample=True, temperature=0.8, output_scores=True)
    torch.manual_seed(5)
    expected = generate(hf_turbo.patch(model, block_size=16), batch, NEW, **options)
    hf_turbo.patch(model, block_size=16, speculation=Medusa(heads(stock), adaptive=False))
    torch.manual_seed(5)
    got = generate(model, batch, NEW, **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(expected.scores), atol=1e-3, rtol=1e-3)
    assert got.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def test_verification_is_captured(heads):
    """After the first call nothing is computed the model's own way but the prompt."""
    model = patched_model("llama")
    hf_turbo.patch(model, block_size=16, speculation=Medusa(heads(model), adaptive=False))
    batch = batches()[0]
    model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    steps = handle_of(model).steps
    captured, replayed = steps.num_captured, steps.num_replayed
    model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    assert steps.num_captured == captured and steps.num_replayed > replayed + 16


@pytest.mark.parametrize("name", ["llama"])
def test_heads_of_a_quantized_model(name, heads):
    model = stock_model(name)
    hf_turbo.quantize(model, group_size=16)
    batch = batches()[1]
    expected = new_text(hf_turbo.patch(model, block_size=16), batch, NEW)
    hf_turbo.patch(model, block_size=16, speculation=Medusa(heads(model), adaptive=False))
    got = new_text(model, batch, NEW)
    assert torch.equal(got, expected)
