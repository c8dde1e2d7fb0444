"""What a match promises: learnt from what would have been right, drafted or not."""

import random

import pytest

from hf_turbo.generation.match_gain import MatchGain
from hf_turbo.generation.prompt_lookup import LookupRow

COSTS = {1: 1.1, 3: 1.2, 7: 1.3, 15: 1.5}


def test_longer_matches_promise_more_to_begin_with():
    gain = MatchGain()
    promised = [gain.expected(length) for length in range(12)]
    assert promised == sorted(promised) and promised[0] == 0 and promised[11] == gain.expected(100)


def test_learns_what_a_match_is_worth():
    gain = MatchGain()
    for _ in range(400):
        gain.note(3, 0)
        gain.note(1, 15)
    assert gain.expected(3) < 0.01 and gain.expected(1) > 14.9
    assert gain.expected(4) == MatchGain().expected(4)  # of other lengths nothing has been said


@pytest.mark.parametrize(
    "expected, size",
    [([0.0], 0), ([0.05], 0), ([0.2], 1), ([0.5], 3), ([40.0], 15), ([0.0, 40.0], 15), ([0.0] * 9 + [0.5], 0)],
)
def test_size_by_what_is_expected(expected, size):
    assert MatchGain().best_size(expected, COSTS) == size


def test_no_size_pays():
    assert MatchGain().best_size([14.0], {15: 20.0}) == 0


def right_in_a_row(tokens, start, guess):
    count = 0
    while count < len(guess) and start + count < len(tokens) and tokens[start + count] == guess[count]:
        count += 1
    return count


def test_what_would_have_been_right():
    """Against guesses that are made and compared anew at each place."""
    rng = random.Random(0)
    piece = [rng.randrange(6) for _ in range(30)]
    tokens = [t for _ in range(12) for t in (*piece[: rng.randrange(5, 30)], rng.randrange(6))]
    noted = []

    class Noting(MatchGain):
        def note(self, length, accepted):
            noted.append((length, accepted))

    row = LookupRow(tokens[:10])
    for end in (10, 17, 18, 60, len(tokens)):  # read in any pieces
        row.read(tokens[10:end], 4, Noting())
    expected = []
    for i in range(11, len(tokens) + 1):
        before = LookupRow(tokens[:i])
        guess = before.propose(4, 1)
        right = right_in_a_row(tokens, i, guess)
        if guess and (right == 4 or i + right < len(tokens)):  # the others are not known yet
            expected.append((before.match, right))
    assert sorted(noted) == sorted(expected) and len(expected) > 100
