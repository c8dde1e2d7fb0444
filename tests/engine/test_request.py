"""A request and its sequences: what they count."""

import pytest

from hf_turbo.engine.request import Request, Sequence, Status


def test_a_request_begins_as_one_sequence_with_a_copy_of_its_prompt():
    request = Request("a", [5, 6, 7], num_sequences=3)
    [sequence] = request.sequences
    assert (sequence.request, sequence.index, sequence.tokens) == (request, 0, [5, 6, 7])
    assert (sequence.length, sequence.num_missing, sequence.new_tokens) == (3, 3, [])
    sequence.tokens.append(8)
    assert request.prompt == [5, 6, 7]
    assert sequence.new_tokens == [8]


def test_tokens_that_the_host_does_not_know_count():
    sequence = Sequence(Request("a", [5, 6]), tokens=[5, 6, 9], num_unknown=2, num_cached=4)
    assert sequence.length == 5
    assert sequence.num_missing == 1
    assert sequence.new_tokens == [9]


@pytest.mark.parametrize(
    "max_new_tokens, num_new, num_unknown, is_full",
    [(2, 1, 0, False), (2, 2, 0, True), (2, 1, 1, True), (None, 50, 1, False)],
)
def test_a_sequence_is_full_when_its_last_token_has_been_chosen(max_new_tokens, num_new, num_unknown, is_full):
    request = Request("a", [5, 6], max_new_tokens=max_new_tokens)
    [sequence] = request.sequences
    sequence.tokens += [9] * num_new
    sequence.num_unknown = num_unknown
    assert sequence.is_full == is_full
    assert (sequence in request.live) == (not is_full)


def test_a_fork_gives_each_sequence_the_same_tokens_and_lists_of_its_own():
    request = Request("a", [5, 6], num_sequences=3)
    first = request.sequences[0]
    first.num_unknown, first.num_cached = 1, 2
    request.fork()
    assert [sequence.index for sequence in request.sequences] == [0, 1, 2]
    for sequence in request.sequences:
        assert sequence.request is request
        assert (sequence.tokens, sequence.num_unknown, sequence.num_cached) == ([5, 6], 1, 2)
    request.sequences[1].tokens.append(9)
    assert [len(sequence.tokens) for sequence in request.sequences] == [2, 3, 2]


def test_sequences_that_have_ended_are_not_live():
    request = Request("a", [5], num_sequences=3)
    request.fork()
    request.sequences[1].is_done = True
    assert [sequence.index for sequence in request.live] == [0, 2]


def test_requests_and_sequences_are_themselves_alone():
    first, second = Request("a", [5]), Request("a", [5])
    assert first != second
    assert first.sequences[0] != second.sequences[0]
    assert len({first, second}) == 2


@pytest.mark.parametrize("status", Status)
def test_what_is_over(status):
    assert Request("a", [5], status=status).is_over == (status.name in ("FINISHED", "FAILED", "CANCELLED"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(prompt=[]), "at least one token"),
        (dict(prompt=[5], num_sequences=0), "num_sequences is at least 1, not 0"),
        (dict(prompt=[5], max_new_tokens=0), "max_new_tokens is at least 1, or None for no limit; not 0"),
    ],
)
def test_what_can_not_be_asked_for(arguments, message):
    with pytest.raises(ValueError, match=message):
        Request("a", **arguments)
