"""The suffix index against a search through the whole text, after every token."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_turbo.generation.suffix_index import SuffixIndex


def search(tokens, max_length):
    """The longest end of the tokens that was there before, and its last earlier end; by trying all of both."""
    for length in range(min(len(tokens) - 1, max_length), 0, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return length, end
    return 0, 0


def go_on(tokens, position, num_tokens):
    """Copies from a position on, also what has just been copied."""
    text = list(tokens)
    for i in range(num_tokens):
        text.append(text[position + i])
    return text[len(tokens) :]


@st.composite
def texts(draw):
    """Few different tokens, and parts that come again, so that much matches."""
    parts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(parts) - 1), max_size=12))
    return [token for i in order for token in parts[i]]


@settings(max_examples=200)
@given(texts())
def test_the_longest_match_and_the_last_of_them(text):
    index = SuffixIndex()
    for end, token in enumerate(text, start=1):
        index.append(token)
        assert index.match() == search(text[:end], end)
        for max_length in range(5):
            assert index.match(max_length) == search(text[:end], max_length)
    assert len(index) == len(text)


@pytest.mark.parametrize("tokens", [(0, 1), (0, 1, 2)])
def test_every_short_text(tokens):
    for text in itertools.product(tokens, repeat=12 if len(tokens) == 2 else 7):
        assert SuffixIndex(text).match() == search(text, len(text))


@given(texts(), st.integers(0, 12), st.integers(0, 4))
def test_proposals_copy_what_followed(text, num_tokens, min_match):
    length, position = search(text, len(text))
    wanted = go_on(text, position, num_tokens) if length >= max(min_match, 1) else []
    assert SuffixIndex(text).propose(num_tokens, min_match) == wanted


def test_examples():
    index = SuffixIndex([5, 6, 7, 1, 6, 7, 2, 6, 7])
    assert index.match() == (2, 6)
    assert index.match(1) == (1, 6)
    assert index.propose(2) == [2, 6]
    assert index.propose(5) == [2, 6, 7, 2, 6]
    assert index.propose(5, min_match=3) == []
    index.extend([1, 6])
    assert index.match() == (4, 5)
    assert index.propose(3) == [7, 2, 6]
    assert SuffixIndex([4, 4, 4]).match() == (2, 2) and SuffixIndex([4, 4, 4]).propose(3) == [4, 4, 4]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_nothing_was_there_before(text):
    index = SuffixIndex(text)
    assert index.match() == (0, 0) and index.match(3) == (0, 0) and index.propose(4) == []


def fibonacci_word(length):
    shorter, word = [0], [0, 1]
    while len(word) < length:
        shorter, word = word, word + shorter
    return word[:length]


class CountedList(list):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "text",
    [[1] * 4096, list(range(20)) * 200, fibonacci_word(4096), [int(i % 61 == 0) for i in range(4096)]],
    ids=["one token", "a loop", "fibonacci", "long gaps"],
)
def test_texts_that_repeat_themselves_cost_no_more(text):
    """Their ends have as many states above them as they have tokens or periods; visiting all would cost 10 x more."""
    index = SuffixIndex()
    index._seen, index._link = CountedList(index._seen), CountedList(index._link)
    index.extend(text)
    assert 0 < index._seen.reads + index._link.reads < 40 * len(text)
