"""Lookups in a text that grows: kernel and reference against an index of the whole text's suffixes."""

import random

import pytest
import torch

from hf_turbo.generation.suffix_index import SuffixIndex
from hf_turbo.ops import dispatch, reference_drafts, repeat_text
from hf_turbo.ops.reference_drafts import MAX_MATCH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("module", [reference_drafts, repeat_text], ids=["reference", "kernel"])


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Programs of few places, so that short texts have several; new memory is full of what would win."""
    empty = torch.empty
    monkeypatch.setattr(repeat_text, "_PLACES", 32)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.iinfo(k["dtype"]).max))


def wanted(text, num_tokens, min_match):
    """By the suffix index: newest token, what followed, tokens of the match."""
    length, place = SuffixIndex(text).match(MAX_MATCH)
    if length < min_match:
        return [text[-1]] * (num_tokens + 1) + [0]
    return [text[-1], *(text[place + i % (len(text) - place)] for i in range(num_tokens)), length]


def call(module, texts, counts, room, num_tokens, min_match, seed=0, steps=None):
    """Looks up in each text, whose last tokens, so many, are new; what is beyond a text would match."""
    rng = random.Random(seed)
    steps = steps or max(counts)
    beyond = [[rng.choice([*text, -1, 2**31 - 1]) for _ in range(room)] for text in texts]
    rows, outcome = [], []
    for text, count, garbage in zip(texts, counts, beyond, strict=True):
        known = text[: len(text) - count]
        rows.append(known + garbage[len(known) :])
        # Beyond the model's own token stands -1.
        outcome.append(text[len(text) - count :] + [-1] * (steps - count) + [count - 1])
    text = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    before = text.clone()
    lengths = torch.tensor([len(t) - 1 for t in texts], device=DEVICE)
    got = module.repeat_text(text, torch.tensor(outcome, device=DEVICE), lengths, num_tokens, min_match)
    assert got.dtype == torch.int64
    for row, tokens in enumerate(texts):
        assert text[row, : len(tokens)].tolist() == tokens
        assert torch.equal(text[row, len(tokens) :], before[row, len(tokens) :])
    # A captured one is computed once before its capture. Its result goes to a part of a wider one, and to a draft.
    wide = torch.full((len(texts), num_tokens + 5), -7, device=DEVICE)
    draft = torch.full((len(texts), rng.randint(1, num_tokens + 1)), -7, device=DEVICE)
    out = (wide[:, 2:-1], draft)
    again = module.repeat_text(text, torch.tensor(outcome, device=DEVICE), lengths, num_tokens, min_match, out=out)
    assert torch.equal(got, again) and torch.equal(wide[:, 2:-1], got) and torch.equal(draft, got[:, : draft.shape[1]])
    assert (wide[:, :2] == -7).all() and (wide[:, -1] == -7).all()
    return got.tolist()


def make_text(rng):
    """Few different tokens, and parts that come again, so that much matches."""
    parts = [[rng.randrange(4) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 4))]
    return [token for _ in range(rng.randint(1, 12)) for token in rng.choice(parts)]


@BOTH
def test_against_an_index_of_suffixes(module):
    for seed in range(200 if module is reference_drafts else 12):
        rng = random.Random(seed)
        rows = [make_text(rng) for _ in range(rng.randint(1, 3))]
        counts = [rng.randint(1, min(len(text), 6)) for text in rows]
        num_tokens, min_match, spare = rng.randint(1, 17), rng.randint(1, 4), rng.randint(0, 3)
        got = call(module, rows, counts, max(map(len, rows)) + spare, num_tokens, min_match, seed, steps=6)
        assert got == [wanted(text, num_tokens, min_match) for text in rows], seed


@BOTH
@pytest.mark.parametrize("period", [1, 3, 16, 17])
def test_no_more_than_so_many_tokens_are_compared(module, period):
    """Of two pieces that agree in as many tokens the later one counts, however much longer the other is."""
    rng = random.Random(period)
    piece = [rng.randrange(5, 100) for _ in range(period)]
    same = [rng.randrange(5, 100) for _ in range(MAX_MATCH)]
    text = [*piece * 2, 1, *same, 2, 3, *same, 4, 1, *same]
    got = call(module, [text, text[:-1], piece * 3], [3, 1, 2], 2 * len(text) + 3 * period, 15, 1)
    assert got == [wanted(t, 15, 1) for t in (text, text[:-1], piece * 3)]
    assert got[0][1:3] == [4, 1] and got[0][-1] == MAX_MATCH


@BOTH
def test_rows_that_are_not_used(module):
    """Empty ones, those with impossible numbers and those without room find nothing, and write nowhere else."""
    text = torch.full((5, 8), 7, dtype=torch.int32, device=DEVICE)
    outcome = torch.tensor([[5, 6, -1, 1]] * 5, device=DEVICE)
    lengths = torch.tensor([-3, 0, 7, 8, 1 << 20], device=DEVICE)
    got = module.repeat_text(text, outcome, lengths, 3, 1)
    assert got.tolist() == [[6, 6, 6, 6, 0]] * 5
    rows = [[7] * 8, [6] + [7] * 7, [7] * 6 + [5, 6], [7] * 7 + [5], [7] * 8]
    assert text.tolist() == rows


@BOTH
def test_longer_texts(module, monkeypatch):
    monkeypatch.setattr(repeat_text, "_PLACES", 1024)
    rng = random.Random(1)
    base = [rng.randrange(300) for _ in range(700)]
    rows = [base + base[100:160], base * 2, [rng.randrange(10**6) for _ in range(50)], base[:1]]
    got = call(module, rows, [16, 1, 8, 1], 1500, 15, 2)
    assert got == [wanted(text, 15, 2) for text in rows] and got[0][-1] == MAX_MATCH and got[3][-1] == 0


def lay(module, texts, counts, room, columns, min_match, seed=0):
    """Lays what followed over two drafts of other tokens, and says what became of the wider one."""
    rng = random.Random(seed)
    rows = [t[: len(t) - n] + [rng.choice(t) for _ in range(room - len(t) + n)] for t, n in zip(texts, counts)]
    outcome = [t[len(t) - n :] + [-1] * (max(counts) - n) + [n - 1] for t, n in zip(texts, counts)]
    text = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    wide = torch.full((len(texts), 22), -7, device=DEVICE)
    drafts = [wide[:, 2:-1], torch.full((len(texts), rng.randint(1, 19)), -7, device=DEVICE)]
    lengths = torch.tensor([len(t) - 1 for t in texts], device=DEVICE)
    places = torch.tensor(columns, dtype=torch.int64, device=DEVICE)
    for _ in range(2):  # a captured one is computed once before its capture
        module.lay_repeats(text, torch.tensor(outcome, device=DEVICE), lengths, places, min_match, drafts)
    assert [row[: len(t)] for row, t in zip(text.tolist(), texts)] == texts
    assert torch.equal(drafts[0][:, : drafts[1].shape[1]], drafts[1])
    assert (wide[:, :2] == -7).all() and (wide[:, -1] == -7).all()
    return drafts[0].tolist()


@BOTH
def test_laid_over_drafts(module):
    """Rows in which nothing was there before keep their own tokens."""
    seen = set()
    for seed in range(200 if module is reference_drafts else 12):
        rng = random.Random(seed)
        rows = [make_text(rng) for _ in range(rng.randint(1, 3))]
        counts = [rng.randint(1, min(len(text), 6)) for text in rows]
        columns, min_match = rng.sample(range(19), rng.randint(1, 9)), rng.randint(1, 4)
        got = lay(module, rows, counts, max(map(len, rows)) + rng.randint(0, 3), columns, min_match, seed)
        for text, line in zip(rows, got, strict=True):
            _, *tokens, match = wanted(text, len(columns), min_match)
            laid = dict(zip(columns, tokens)) if match else {}
            assert line == [laid.get(column, -7) for column in range(19)], seed
            seen.add(match > 0)
    assert seen == {True, False}


@BOTH
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_columns_that_a_draft_has_not(module, num_drafts):
    """Nothing is written beside it."""
    text = torch.tensor([[1, 2, 3, 4, 1, 9]], dtype=torch.int32, device=DEVICE)
    outcome, lengths = torch.tensor([[1, 2, 1]], device=DEVICE), torch.tensor([5], device=DEVICE)
    wide = torch.full((num_drafts, 1, 8), -7, device=DEVICE)
    columns = torch.tensor([1, 4, 2], device=DEVICE)
    module.lay_repeats(text, outcome, lengths, columns, 2, [x[:, 1:4] for x in wide])
    assert wide.tolist() == [[[-7, -7, 3, 1, -7, -7, -7, -7]]] * num_drafts


@BOTH
def test_texts_that_only_grow(module):
    """Without columns or drafts nothing is looked for."""
    text = torch.tensor([[1, 2, 1, 9, 9], [3, 3, 3, 9, 9]], dtype=torch.int32, device=DEVICE)
    outcome, lengths = (torch.tensor(x, device=DEVICE) for x in ([[2, 5, 1], [4, -1, 0]], [4, 3]))
    draft = torch.full((2, 4), -7, device=DEVICE)
    for columns, drafts in (([], [draft]), ([1, 2], [])):
        module.lay_repeats(text, outcome, lengths, torch.tensor(columns, dtype=torch.int64, device=DEVICE), 1, drafts)
        assert text.tolist() == [[1, 2, 1, 2, 5], [3, 3, 3, 4, 9]] and (draft == -7).all()


@BOTH
def test_no_rows(module):
    empty = torch.tensor([], dtype=torch.int64, device=DEVICE)
    got = module.repeat_text(empty.view(0, 8).int(), empty.view(0, 3), empty, 4, 1)
    assert got.shape == (0, 6)
    module.lay_repeats(empty.view(0, 8).int(), empty.view(0, 3), empty, torch.tensor([1], device=DEVICE), 1, [got])


@BOTH
def test_refuses_what_it_does_not_take(module):
    text, outcome, lengths = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 3).long(), torch.zeros(2).long()
    for wrong in (
        (text.long(), outcome, lengths, 4, 1), (text[:, ::2], outcome, lengths, 4, 1), (text[:1], outcome, lengths, 4),
        (text, outcome[:, :1], lengths, 4, 1), (text, outcome, lengths.int(), 4, 1), (text, outcome, lengths, 0, 1),
        (text, outcome, lengths, 64, 1), (text, outcome, lengths, 4, 0), (text, outcome, lengths, 4, MAX_MATCH + 1),
        (text, torch.zeros(2, 66).long(), lengths, 4, 1), (text, outcome, lengths, 4, 1, [torch.zeros(2, 5).long()]),
        (text, outcome, lengths, 4, 1, [torch.zeros(2, 6).long(), torch.zeros(2, 6).long()]),
        (text, outcome, lengths, 4, 1, [torch.zeros(2, 6)]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            module.repeat_text(*wrong)
    columns, draft = torch.tensor([1, 2]), torch.zeros(2, 4).long()
    for wrong in (
        (columns, 0, [draft]), (columns.int(), 1, [draft]), (columns[None], 1, [draft]), (columns, 1, [draft[:1]]),
        (columns, 1, [draft] * 3), (columns, 1, [draft.int()]), (columns, 1, [draft[:, ::2]]),
        (torch.zeros(64).long(), 1, [draft]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            module.lay_repeats(text, outcome, lengths, *wrong)


def test_dispatch():
    text = torch.tensor([[1, 2, 3, 1, 0, 0]], dtype=torch.int32, device=DEVICE)
    outcome, lengths = torch.tensor([[2, 0]], device=DEVICE), torch.tensor([4], device=DEVICE)
    assert dispatch.repeat_text(text, outcome, lengths, 2, 1).tolist() == [[2, 3, 1, 2]]
    draft = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    dispatch.lay_repeats(text, outcome, lengths, torch.tensor([2, 0], device=DEVICE), 1, [draft])
    assert draft.tolist() == [[1, 0, 3]]
