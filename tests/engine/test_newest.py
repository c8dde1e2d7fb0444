"""The tokens of a step, some of which only the device knows."""

import random

import pytest
import torch

from hf_turbo.engine.newest import Newest
from hf_turbo.engine.request import Request


def sequence_of(known, num_unknown, num_cached):
    sequence = Request("0", list(known)).sequences[0]
    sequence.num_unknown, sequence.num_cached = num_unknown, num_cached
    return sequence


@pytest.mark.parametrize("seed", range(50))
def test_known_and_unknown_tokens(seed):
    """Rows that decode, chunks of prompts, and ends of texts the last token of which is not known, in any order."""
    values = random.Random(seed)
    newest, shares, expected = Newest(torch.device("cpu")), [], []
    chosen = [(sequence_of(values.choices(range(100), k=values.randint(1, 9)), 1, 0), 1000 + i) for i in range(6)]
    newest.put(torch.tensor([token for _, token in chosen]), [sequence for sequence, _ in chosen])
    for sequence, token in values.sample(chosen, values.randint(0, 6)):
        sequence.num_cached = values.choice([len(sequence.tokens), values.randrange(len(sequence.tokens))])
        text = [*sequence.tokens, token][sequence.num_cached :]
        num_tokens = values.choice([len(text), values.randint(1, len(text))])
        shares.append((sequence, num_tokens))
        expected.append(text[:num_tokens])
    for _ in range(values.randint(not shares, 3)):
        sequence = sequence_of(values.choices(range(100), k=9), 0, values.randint(0, 5))
        place = values.randint(0, len(shares))
        shares.insert(place, (sequence, 4))
        expected.insert(place, sequence.tokens[sequence.num_cached :][:4])
    found = newest.tokens_of(shares)
    assert found.dtype == torch.int64
    assert found.tolist() == [token for part in expected for token in part]


def test_rows_that_go_on_take_what_was_chosen_as_it_is():
    newest, tokens = Newest(torch.device("cpu")), torch.tensor([7, 8])
    first, second = sequence_of([1, 2], 1, 2), sequence_of([3], 1, 1)
    newest.put(tokens, [first, second])
    assert newest.tokens_of([(first, 1), (second, 1)]) is tokens
    assert newest.tokens_of([(second, 1), (first, 1)]).tolist() == [8, 7]


def test_rows_that_go_on_beside_a_prompt():
    newest = Newest(torch.device("cpu"))
    first, second, prompt = sequence_of([1, 2], 1, 2), sequence_of([3], 1, 1), sequence_of([4, 5, 6, 9], 0, 1)
    newest.put(torch.tensor([7, 8]), [first, second])
    assert newest.tokens_of([(first, 1), (prompt, 2), (second, 1)]).tolist() == [7, 5, 6, 8]
    assert newest.tokens_of([(second, 1), (prompt, 2), (first, 1)]).tolist() == [8, 5, 6, 7]
    assert newest.tokens_of([(second, 1), (prompt, 2)]).tolist() == [8, 5, 6]
    assert newest.tokens.tolist() == [7, 8]
