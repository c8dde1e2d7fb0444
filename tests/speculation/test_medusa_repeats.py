"""Medusa trees in texts that repeat themselves: what followed takes the place of the heads' best guesses."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from drafting import assert_same_text, drafted, heads_of, pair, stats
from helpers import generate, new_text, prompt, ragged, twins, used_blocks

import hf_turbo
from hf_turbo.engine.row_drafts import MedusaRows
from hf_turbo.generation import device_texts, medusa, repeats, speculation
from hf_turbo.generation.ahead_rounds import GreedyFollower
from hf_turbo.generation.medusa_heads import MedusaHeads
from hf_turbo.generation.pace import Pace
from hf_turbo.generation.suffix_index import SuffixIndex
from hf_turbo.modeling.head_input import HeadInput
from hf_turbo.ops.reference_drafts import MAX_MATCH
from hf_turbo.patching import handle_of

NEW = 48
BATCHES = {"one": ragged(9), "several": ragged(3, 9, 6, 12)}
MANY = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
#: The best path is 0, 00, 000; the second head's other guess stands before its end.
TREE = [(0,), (0, 0), (0, 1), (0, 0, 0), (1,)]


def patched(model, folder, **options):
    """The model with random heads, hardly ever right, that are said to be."""
    if not (folder / "config.json").exists():
        heads = MedusaHeads(2, 1, model.config.hidden_size, model.config.vocab_size)
        heads.accuracies = [[0.5, 0.2, 0.1], [0.3, 0.1, 0.05]]
        for p in heads.parameters():
            torch.nn.init.normal_(p, std=0.2)
        heads.save_pretrained(folder)
    hf_turbo.patch(model, block_size=16, speculation=hf_turbo.Medusa(folder, **{"num_nodes": 12, **options}))
    return handle_of(model).speculation.drafter


@pytest.fixture
def models(tmp_path):
    """A stock model whose texts soon go round, and one with heads."""
    stock, model = twins("gemma2", block_size=16)
    patched(model, tmp_path)
    return stock, model


def followed(text, num_tokens, min_match=2):
    """What followed the last time that a text ended as it does, by all of its suffixes."""
    length, place = SuffixIndex(text).match(MAX_MATCH)
    return [text[place + i % (len(text) - place)] for i in range(num_tokens)] if length >= min_match else []


def check(tokens, guesses, columns, text, counts):
    """A draft is the heads' but where the text was there before."""
    found = followed(text, len(columns))
    wanted = list(guesses)
    for column, token in zip(columns, found):
        wanted[column] = token
    assert tokens == wanted
    counts["found" if found else "not found"] += 1


@pytest.fixture
def counts(monkeypatch):
    """Looks at each draft, and counts those with something that was there before."""
    counts = {"found": 0, "not found": 0, "known": 0, "beyond": 0}
    propose, follow, receive = medusa._Session.propose, repeats.RepeatingGuesses.follow, speculation._Rounds._receive

    def proposed(session, size, texts):
        draft = propose(session, size, texts)
        guesses, columns = session._drafter.guess(session._hidden, texts.last), session._drafter._best_path.tolist()
        nodes, padding = draft.tree.num_nodes, paddings(texts)
        for row, (tokens, heads) in enumerate(zip(draft.tokens.tolist(), guesses.tolist(), strict=True)):
            text = texts.row(row)[0].tolist()[padding[row] :]
            here = [column for column in columns if column < nodes]
            assert here == columns[: len(here)]
            check(tokens, heads[:nodes], here, text, counts)
        return draft

    def paddings(texts):
        ids = torch.cat([texts.row(row, texts.num_prompt) for row in range(texts.num_rows)])
        return (ids.cumsum(1) == 0).sum(1).tolist()  # the padding token is 0, and no prompt begins with it

    def following(guesses, after, out):
        follow(guesses, after, out)
        heads = guesses.drafter.guess(after.hidden, out[0][:, 0])
        for row, length in enumerate(after.lengths.tolist()):
            if length > 0:
                text = guesses.texts._text[row, : length + 1].tolist() if length < guesses.texts.room else [0]
                check(out[0][row].tolist(), heads[row].tolist(), guesses.drafter._best_path.tolist(), text, counts)
        assert torch.equal(out[0][:, : out[1].shape[1]], out[1])

    def received(rounds, ahead):
        receive(rounds, ahead)
        texts, held = rounds._rows.texts, rounds._session._repeats._held
        for row, done in enumerate(rounds._rows.done):
            known = texts.row(row)[0].tolist()[held.left_out[row] :]
            if not done and len(known) <= held.on_device.room:
                assert held.on_device._text[row, : len(known)].tolist() == known
                counts["known"] += 1
            counts["beyond"] += len(known) > held.on_device.room

    monkeypatch.setattr(medusa._Session, "propose", proposed)
    monkeypatch.setattr(repeats.RepeatingGuesses, "follow", following)
    monkeypatch.setattr(speculation._Rounds, "_receive", received)
    return counts


@pytest.fixture
def in_turn(monkeypatch):
    """Every size follows every other one, also no draft at all for a while."""
    sizes = itertools.cycle([11, 7, 3, 0, 7, 0, 0, 0, 3, 11, 0])
    monkeypatch.setattr(Pace, "choose", lambda pace: next(sizes))


def text_of(model, inputs, **options):
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]


@MANY
def test_by_the_host(models, batch, counts):
    stock, model = models
    assert torch.equal(text_of(model, batch), new_text(stock, batch, NEW))
    assert counts["found"] and counts["not found"] and used_blocks(model) == 0


@MANY
def test_ahead(ahead, models, batch, counts, in_turn):
    """Texts on the device stay whole through rounds after which nothing is drafted."""
    rounds, register = ahead
    stock, model = models
    register(model)
    for _ in range(2):
        assert torch.equal(text_of(model, batch), new_text(stock, batch, NEW))
    assert rounds["gone on"] and used_blocks(model) == 0
    assert counts["found"] and counts["not found"] and counts["known"] and not counts["beyond"]


@pytest.mark.parametrize("goes_ahead", [True, False])
def test_rows_that_end(ahead, models, counts, in_turn, goes_ahead, monkeypatch):
    """The others keep their own texts."""
    stock, model = models
    if goes_ahead:
        ahead[1](model)
    else:
        monkeypatch.setattr(speculation, "runs_ahead", lambda device: False)
    plain = new_text(stock, BATCHES["several"], NEW)
    for row, place in ((0, 3), (2, 9), (3, 5), (1, 12)):
        options = dict(eos_token_id=int(plain[row, place]), pad_token_id=0)
        got = text_of(model, BATCHES["several"], **options)
        assert torch.equal(got, new_text(stock, BATCHES["several"], NEW, **options))
    assert counts["found"] and used_blocks(model) == 0


def test_texts_that_outgrow_their_room(ahead, models, counts, monkeypatch):
    monkeypatch.setattr(device_texts, "_LEAST_ROOM", 16)
    monkeypatch.setattr(device_texts, "_NEW_ROOM", 8)
    stock, model = models
    ahead[1](model)
    batch, loaded, load = BATCHES["several"], [], device_texts.DeviceTexts.load_over
    monkeypatch.setattr(device_texts.DeviceTexts, "load_over", lambda t, *args: (loaded.append(t), load(t, *args)))
    assert torch.equal(text_of(model, batch), new_text(stock, batch, NEW))
    assert len({texts.room for texts in loaded}) > 1 and counts["found"] and used_blocks(model) == 0
    assert 0 < counts["beyond"] < 4 * 3  # rows, each for the rounds that were under way, once
    spare = handle_of(model).speculation.drafter._spare
    assert set(loaded) <= set(itertools.chain(*spare._spare.values()))
    hf_turbo.release(model)
    assert not spare._spare


def test_texts_are_used_again(ahead, models):
    """What is recorded of them serves the next call."""
    _, model = models
    ahead[1](model)
    seen = set()
    for _ in range(3):
        text_of(model, BATCHES["one"])
        seen.update(itertools.chain(*handle_of(model).speculation.drafter._spare._spare.values()))
    assert len(seen) == 1


@pytest.mark.parametrize("seed", range(3))
def test_sampled(models, seed, counts):
    """A row has the text that its seed gives without drafts."""
    texts = []
    for model in models:
        torch.manual_seed(seed)
        texts.append(text_of(model, BATCHES["one"], do_sample=True, top_k=2))
    assert torch.equal(*texts)
    assert counts["found"] + counts["not found"] > 3


def test_in_an_engine(models, monkeypatch, in_turn):
    stock, model = models
    prompts = [prompt(1, n)[0].tolist() for n in (3, 9, 6, 12)]
    laid, old = [], repeats.lay_found
    monkeypatch.setattr("hf_turbo.engine.row_drafts.lay_found", lambda *a: (laid.append(a[2]), old(*a)))
    results = model.generate_batch(prompts, max_new_tokens=NEW, do_sample=False)
    for ids, result in zip(prompts, results.values(), strict=True):
        assert result.generated_tokens == new_text(stock, torch.tensor([ids]), NEW)[0].tolist()
    assert any(any(found) for found in laid)


def test_an_engine_forgets_who_has_left(models):
    """Nothing of a request's text stays."""

    class Gone:
        request, new_tokens = SimpleNamespace(prompt=[5, 6, 7, 5]), [6]

    drafter, sequence = handle_of(models[1]).speculation.drafter, Gone()
    rows, tokens = MedusaRows(drafter, HeadInput()), torch.zeros(1, 12, dtype=torch.int64)
    rows._lay_repeats(tokens, [sequence])
    assert tokens[0, drafter._best_path[0]] == 7 and sequence in rows._repeats
    rows.forget(sequence)
    assert not rows._repeats


def test_more_is_accepted(models, tmp_path):
    """These heads are hardly ever right, and the text goes round."""
    _, model = models
    accepted = []
    for min_match in (None, 2):
        patched(model, tmp_path, adaptive=False, min_match=min_match)
        text_of(model, BATCHES["one"])
        accepted.append(stats(model).accepted)
    assert accepted[1] > 3 * accepted[0] + NEW / 4


@pytest.mark.parametrize("options", [{}, dict(kv_cache_dtype="int8")], ids=["wide", "int8"])
def test_a_tree_of_ones_own(options, tmp_path, counts):
    """It keeps its shape: what followed goes into its best path, and no further."""
    one = pair("gemma2")
    size = 32 if options else 4
    asked = hf_turbo.Medusa(heads_of(one.stock, tmp_path), tree=TREE)
    drafted(one, asked, size, **options)
    drafter = handle_of(one.model).speculation.drafter
    assert [drafter.tree.paths[node] for node in drafter._best_path] == [(0, 1), (0, 1, 3), (0, 1, 3, 5)]
    if not options:
        assert_same_text(one, BATCHES["several"], NEW)
    else:
        texts = generate(one.model, BATCHES["several"], NEW).sequences
        hf_turbo.patch(one.model, block_size=size, **options)
        assert torch.equal(texts, generate(one.model, BATCHES["several"], NEW).sequences)
    assert counts["found"] and counts["not found"]


@pytest.mark.parametrize("goes_ahead", [True, False])
def test_a_tree_without_a_best_guess(ahead, tmp_path, goes_ahead, monkeypatch):
    """Nothing is laid over it."""
    stock, model = twins("gemma2", block_size=16)
    asked = hf_turbo.Medusa(heads_of(stock, tmp_path), tree=[(1,), (1, 0), (2,)])
    hf_turbo.patch(model, block_size=16, speculation=asked)
    if goes_ahead:
        ahead[1](model)
    else:
        monkeypatch.setattr(speculation, "runs_ahead", lambda device: False)
    for _ in range(2):
        assert torch.equal(text_of(model, BATCHES["several"]), new_text(stock, BATCHES["several"], NEW))


@pytest.mark.parametrize("accuracies", [[[0.6, 0.1]], [[0.0, 0.0]], [[1.0, 1.0]]])
def test_what_a_block_must_hold(tmp_path, accuracies):
    """A tree that is searched for is not deeper, however little its heads say."""
    stock, model = twins("llama", block_size=16)
    heads = MedusaHeads(1, 1, stock.config.hidden_size, stock.config.vocab_size)
    heads.accuracies = accuracies
    heads.save_pretrained(tmp_path)
    for block_size, depth in ((64, 50), (32, 31)):
        asked = hf_turbo.Medusa(tmp_path, num_nodes=64)
        hf_turbo.patch(model, block_size=block_size, kv_cache_dtype="int8", speculation=asked)
        drafter = handle_of(model).speculation.drafter
        assert depth <= drafter.tree.max_depth < block_size and drafter.sizes[-1] == drafter.tree.num_nodes - 1
        assert torch.equal(text_of(model, BATCHES["several"]), new_text(stock, BATCHES["several"], NEW))


def test_what_is_recorded_once(models):
    """One follower for the same texts, another for others, and where nothing is drafted after it."""
    drafter = handle_of(models[1]).speculation.drafter
    one, other = (device_texts.DeviceTexts(1, 16, 3, 2, torch.device("cpu")) for _ in range(2))

    def key(texts, drafts):
        return GreedyFollower(drafter.tree, repeats.RepeatingGuesses(drafter, texts), drafts).key

    assert key(one, True) == key(one, True) and hash(key(one, True)) == hash(key(one, True))
    assert len({key(texts, drafts) for texts in (one, other) for drafts in (True, False)}) == 4
    alone = [GreedyFollower(drafter.tree, drafter, drafts) for drafts in (True, False)]
    assert alone[0].key != alone[1].key and alone[1].guesses is None


def test_nodes_beyond_the_heads(models):
    """Where nothing was there before, they hold the last head's best guess."""
    drafter = handle_of(models[1]).speculation.drafter
    hidden = torch.randn(3, models[1].config.hidden_size)
    tokens, path = drafter.guess(hidden, torch.tensor([1, 2, 3])), drafter._best_path
    assert drafter.tree.max_depth == len(path) > 2
    logits = drafter._logits(drafter._heads.features(hidden))
    for node, depth, rank in zip(range(1, 12), drafter.tree.depths[1:], drafter.tree.ranks[1:]):
        wanted = logits[:, min(depth, 2) - 1].topk(rank + 1).indices[:, rank]
        assert torch.equal(tokens[:, node], wanted)
    assert (tokens[:, path[2:]] == tokens[:, path[1:2]]).all()


@MANY
def test_with_padding_that_is_a_token(models, batch, tmp_path):
    """Nothing is found in what stands before a prompt."""
    stock, model = models
    patched(model, tmp_path, min_match=1)
    ids, mask = batch["input_ids"].clone(), batch["attention_mask"]
    ids[mask == 0] = ids[0, -1]
    batch = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(text_of(model, batch), new_text(stock, batch, NEW))


def test_copies_and_pickles(models, ahead):
    _, model = models
    ahead[1](model)
    expected = text_of(model, BATCHES["one"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ahead[1](other)
        assert torch.equal(text_of(other, BATCHES["one"]), expected)


@pytest.mark.parametrize("min_match", [0, -1, MAX_MATCH + 1, 1.5, "2"])
def test_refused(min_match):
    with pytest.raises(ValueError, match=f"1 to {MAX_MATCH} tokens, or None"):
        hf_turbo.Medusa("heads", min_match=min_match)


def test_says_what_it_is():
    assert "min_match=2" in repr(hf_turbo.Medusa("heads"))
    assert repr(hf_turbo.Medusa("heads")) != repr(hf_turbo.Medusa("heads", min_match=None))
