"""What the benchmark of drafted texts makes of times and texts."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
speculation = pytest.importorskip("benchmarks.speculation", reason="there are benchmarks in a checkout alone")
DraftedText, seconds_per_token = speculation.DraftedText, speculation.seconds_per_token

END = 9


def text(seconds, *rows):
    return DraftedText(seconds, torch.tensor(rows), (0, 0, 0, 0))


def test_lengths_go_to_the_end_token():
    """Which may be what rows are padded with."""
    assert text(1.0, [1, 2, END, END, END], [1, 2, 3, 4, 5], [1, 2, 3, 4, END]).lengths(END) == [3, 5, 5]


def test_speed_is_that_of_the_longest_row():
    """A text that ends early, as rounding leads it there, is not a fast one."""
    long, short = text(4.0, [1, 2, 3, 4], [1, END, END, END]), text(2.0, [1, END, END, END], [1, END, END, END])
    assert seconds_per_token([long], END) == seconds_per_token([short], END) == 1.0
    assert seconds_per_token([long, short], END) == 1.0


@pytest.mark.parametrize("seconds", [(1.0, 9.0, 2.0), (9.0, 2.0, 1.0), (2.0,)])
def test_the_median_call_stands_for_all(seconds):
    assert speculation.typical_of(text(one, [1]) for one in seconds).seconds == 2.0
