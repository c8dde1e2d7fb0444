"""Prompt lookup on the device, in rounds with the host one behind: what is found, drafted and learnt."""

import copy
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from drafting import stats
from helpers import new_text, prompt, ragged, twins, used_blocks

import hf_turbo
from hf_turbo.generation import ahead_rounds, device_texts
from hf_turbo.generation.lookup_ahead import LookupAhead, _Row
from hf_turbo.generation.match_gain import MatchGain
from hf_turbo.generation.paced import Steady
from hf_turbo.generation.suffix_index import SuffixIndex
from hf_turbo.patching import handle_of

NEW = 40


@pytest.fixture
def heard(monkeypatch):
    """Looks at what the device found after each round, and counts."""
    counts = {"rounds": 0, "matches": 0, "rooms": set()}
    old = LookupAhead.hear

    def hear(session, following, done):
        texts = session._texts
        for row, (newest, *tokens, match) in enumerate(following):
            text = texts.row(row)[0].tolist()[max(session._held.left_out[row], 0) :]
            index = SuffixIndex(text)
            length, place = index.match(16)
            if not done[row] and len(text) <= session._held.on_device.room:
                assert newest == text[-1]
                assert match == length
                if match:
                    assert tokens == [text[place + i % (len(text) - place)] for i in range(len(tokens))]
                counts["matches"] += match > 0
        counts["rounds"] += 1
        counts["rooms"].add(session._held.on_device.room)
        return old(session, following, done)

    monkeypatch.setattr(LookupAhead, "hear", hear)
    return counts


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of tokens that rounds draft."""
    launched = []
    old = ahead_rounds.AheadRounds._launch

    def launch(rounds, tree, *args, **options):
        launched.append(tree.max_depth)
        return old(rounds, tree, *args, **options)

    monkeypatch.setattr(ahead_rounds.AheadRounds, "_launch", launch)
    return launched


def forgetful_twins():
    """Models whose next token depends on the last one alone, so that their texts go round."""
    models = twins("llama", block_size=4)
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
    return models


def looking_up(ahead, stock, model, speculation, batch, new=NEW, **options):
    """A model drafts for prompts, then for others of the same shape; the texts are the stock one's."""
    hf_turbo.patch(model, block_size=4, speculation=speculation)
    ahead[1](model)
    inputs = batch if isinstance(batch, dict) else dict(input_ids=batch, attention_mask=torch.ones_like(batch))
    for ids in (inputs["input_ids"], inputs["input_ids"] % 90 + 7):
        asked = dict(inputs, input_ids=ids)
        got = model.generate(**asked, max_new_tokens=new, do_sample=False, **options)
        assert torch.equal(got[:, ids.shape[1] :], new_text(stock, asked, new, **options))
        assert used_blocks(model) == 0
    return stats(model)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("rows", ["one", "several", "that end"])
def test_the_device_finds_what_an_index_finds(ahead, heard, adaptive, rows):
    stock, model = forgetful_twins()
    batch = prompt(1, 9) if rows == "one" else ragged(3, 9, 6, 12)
    options = {}
    if rows == "that end":
        options = dict(eos_token_id=int(new_text(stock, batch, NEW)[1, 11]), pad_token_id=0)
    found = looking_up(ahead, stock, model, hf_turbo.PromptLookup(7, 1, adaptive), batch, **options)
    assert heard["rounds"] > 8 and heard["matches"] and ahead[0]["gone on"] > 4
    assert rows == "that end" or (found.drafted >= found.accepted > 0 and found.tokens_per_step > 1.5)


def test_texts_that_outgrow_their_room(ahead, heard, monkeypatch):
    """Without a limit nobody knows how long a text will be."""
    monkeypatch.setattr(device_texts, "_LEAST_ROOM", 8)
    monkeypatch.setattr(device_texts, "_NEW_ROOM", 4)
    stock, model = forgetful_twins()
    looking_up(ahead, stock, model, hf_turbo.PromptLookup(3, 1, False), prompt(1, 9))
    assert heard["rooms"] == {16, 32, 64}
    [spare] = [x.drafter._spare._spare for x in handle_of(model).drafters.values()]
    assert sorted(room for _, room, _ in spare) == [16, 32, 64] and all(len(texts) == 1 for texts in spare.values())
    hf_turbo.release(model)
    assert not spare


def test_texts_are_taken_and_given_back():
    """Of a call whose texts have a limit they stay the same, however far the texts have come."""
    device, spare = torch.device("cpu"), device_texts.SpareTexts(7, 1)
    held = spare.exchange(None, 3, 1900, 2050, device)
    assert (held.room, held.key[0], held.tree.max_depth) == (4096, 4, 7)
    assert spare.exchange(held, 4, 2040, 2050, device) is held
    other = spare.exchange(None, 3, 100, 2050, device)
    assert other is not held and other.room == 4096
    smaller = spare.exchange(held, 2, 2040, 2050, device)
    assert smaller.key[0] == 2 and spare.exchange(smaller, 3, 100, 2050, device) is held
    assert spare.exchange(None, 1, 10, None, device).room == 8192
    assert spare.exchange(None, 1, 5, 20, device).room == 2048


def test_two_calls_that_want_the_same_texts():
    """The last ones may be gone between a look and a grasp."""

    class Emptied(list):
        def __bool__(self):
            return True

    spare, device = device_texts.SpareTexts(7, 1), torch.device("cpu")
    held = spare.exchange(None, 3, 100, 2000, device)
    spare._spare[held.key] = Emptied()
    assert spare.exchange(None, 3, 100, 2000, device).key == held.key


def test_copies_of_a_model_have_texts_of_their_own(ahead):
    stock, model = forgetful_twins()
    looking_up(ahead, stock, model, hf_turbo.PromptLookup(7), prompt(1, 9))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        [drafter] = [x.drafter for x in handle_of(copied).drafters.values()]
        assert not drafter._spare._spare and drafter.sizes[-1] == 7
        ahead[1](copied)
        assert torch.equal(new_text(copied, prompt(1, 9), NEW), new_text(stock, prompt(1, 9), NEW))


def test_rows_that_are_behind_decide():
    """A row that is ahead of others has time; one that has ended has nothing to say."""
    texts = SimpleNamespace(num_prompt=9, device=torch.device("cpu"), new=[[5], [5], [5]], lengths=[10] * 3)
    context = SimpleNamespace(
        texts=texts, pace=Steady([1, 3, 7, 15]), max_new=NEW, lengths=[9] * 3, goes_ahead=True, samples=False
    )
    session = hf_turbo.PromptLookup().begin(context)

    def size(matches, lengths, done=(False, False, False)):
        texts.new = [[5] * length for length in lengths]
        session.hear([[5, *range(100, 115), match] for match in matches], done)
        return session.choose(15)

    assert size([16, 16, 16], [1, 1, 1]) == 15
    assert size([16, 0, 16], [9, 2, 9]) < 7 and size([0, 16, 0], [12, 9, 12]) == 15
    assert size([0, 16, 0], [12, 15, 12]) < 7 and size([0, 16, 0], [12, 15, 12], [True, False, True]) == 15
    assert size([16, 16, 0], [13, 16, 13]) and session.num_found == 2
    size([16, 16, 0], [13, 17, 14], [True, False, False])
    assert session.num_found == 1


def test_rows_that_have_ended_do_not_decide_where_the_host_waits():
    """They stay where the caller sees the cache; nobody says that they have ended, but they get no more tokens."""
    texts = SimpleNamespace(num_prompt=2, device=torch.device("cpu"), new=[[], []], lengths=[2, 2])
    context = SimpleNamespace(
        texts=texts, pace=Steady([1, 3, 7, 15]), max_new=NEW, lengths=[2, 2], goes_ahead=True, samples=False
    )
    session = hf_turbo.PromptLookup().begin(context)
    found = torch.tensor([[5] * 16 + [0], [5] * 16 + [16]])
    session._held.load = lambda: found
    sizes = []
    for new in ([1, 1], [1, 3], [1, 9]):
        texts.new = [[5] * n for n in new]
        texts.lengths = [2 + n for n in new]
        draft = session.propose(15, texts)
        sizes.append(0 if draft is None else draft.tree.max_depth)
        session.learn(None, 1)
    assert sizes[1:] == [15, 15] and session.num_found == 1


def test_without_graphs_the_host_looks_up(ahead, heard):
    stock, model = forgetful_twins()
    hf_turbo.patch(model, block_size=4, cuda_graphs=False, speculation=hf_turbo.PromptLookup(7))
    assert torch.equal(new_text(model, prompt(1, 9), NEW), new_text(stock, prompt(1, 9), NEW))
    assert heard["rounds"] == 0 and stats(model).accepted > 0


def test_prompts_of_embeddings(ahead, heard):
    """Their tokens are not known: the text begins with the first new one."""
    stock, model = forgetful_twins()
    embeds = stock.get_input_embeddings()(prompt(2, 9)).detach()
    expected = stock.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False)
    hf_turbo.patch(model, block_size=4, speculation=hf_turbo.PromptLookup(7))
    ahead[1](model)
    assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False), expected)
    assert heard["matches"] > 8 and stats(model).accepted > 0


def test_always_the_largest_draft_where_that_is_asked_for(ahead, sizes):
    stock, model = forgetful_twins()
    looking_up(ahead, stock, model, hf_turbo.PromptLookup(5, 1, False), prompt(1, 9))
    assert sizes.count(0) == 2 and sizes[0] == 0 and set(sizes) == {0, 5}  # each call begins with a plain step


def test_nothing_found_is_nothing_drafted(ahead):
    """Rounds in which nothing was there before are counted as rounds without a drafted token."""
    stock, model = forgetful_twins()
    found = looking_up(ahead, stock, model, hf_turbo.PromptLookup(5, 16, False), prompt(1, 9), new=6)
    assert found.rounds and found.drafted == found.accepted == 0


def test_more_than_the_device_compares_is_looked_up_on_the_host(ahead, heard):
    stock, model = forgetful_twins()
    looking_up(ahead, stock, model, hf_turbo.PromptLookup(5, 17), prompt(1, 9))
    assert heard["rounds"] == 0


def right_of(guess, coming):
    count = 0
    while count < min(len(guess), len(coming)) and guess[count] == coming[count]:
        count += 1
    return count


def test_learns_what_was_right_one_round_later():
    """By rounds of any length: of each, how long the match was a round before, and what was right after its own."""
    rng = random.Random(2)
    piece = [rng.randrange(6) for _ in range(30)]
    text = [t for _ in range(12) for t in (*piece[: rng.randrange(5, 30)], rng.randrange(50))]
    noted, expected, last, place, row = [], [], None, 10, _Row()

    class Noting(MatchGain):
        def note(self, length, accepted):
            noted.append((length, accepted))

    while place < len(text):
        index = SuffixIndex(text[:place])
        match, tokens = index.match(16)[0], index.propose(4)
        row.read(text[10:place], tokens or [0] * 4, match, Noting())
        right = right_of(tokens, text[place:])
        if last is not None and (right == len(tokens) or place + right < len(text)):
            expected.append((last, right))
        last, place = match, place + rng.randint(1, 6)
    row.read(text[10:], [0] * 4, 0, Noting())
    noted.pop()  # of that last look
    assert row.match == 0
    assert sorted(noted) == sorted(expected) and len(expected) > 30


def test_lookups_that_are_right_get_longer(ahead, sizes):
    """A text that repeats itself: what its matches come to is learnt while it is said."""
    stock, model = forgetful_twins()
    looking_up(ahead, stock, model, hf_turbo.PromptLookup(7), prompt(1, 9))
    assert sizes[-4:] == [7] * 4 and 7 not in sizes[:2]


def test_what_is_learnt_is_kept_by_the_drafter(ahead):
    stock, model = forgetful_twins()
    looking_up(ahead, stock, model, hf_turbo.PromptLookup(7), prompt(1, 9))
    [drafter] = [x.drafter for x in handle_of(model).drafters.values()]
    assert drafter._ahead_gain.expected(10) > MatchGain(ahead=True).expected(10)
    assert drafter.gain.expected(10) == MatchGain().expected(10)
