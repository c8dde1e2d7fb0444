"""What the benchmark of drafted texts makes of times and texts."""

import sys
from argparse import Namespace
from collections import Counter
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


def test_rows_of_a_category():
    """Two texts of three tokens: 2 seconds in plain steps, 1 with drafts, of which one says something else."""
    plain = [text(1.0, [1, 2, 3]), text(3.0, [4, 5, 6])]
    drafts = [DraftedText(1.0, torch.tensor([[1, 2, 3]]), (6, 3, 3, 12)), text(1.0, [4, 5, 7])]
    common = dict(bench="speculation", device="cpu", versions={}, dtype="fp32")
    rows = [*speculation.text_rows("case", {"plain": plain, "x": drafts}, Counter(plain=2, x=1), END, common)]
    assert [(row.variant, row.tokens_per_s, row.speedup) for row in rows] == [("plain", 1.5, 1.0), ("x", 3.0, 2.0)]
    assert (rows[0].same_texts, rows[1].same_texts, rows[1].texts) == (None, 1, 2)
    assert (rows[1].tokens_per_round, rows[1].acceptance) == (2.0, 0.25)


def test_variants():
    asked = Namespace(medusa="heads", nodes=[8], variants=None)
    names = ["plain", "prompt lookup", "medusa8", "medusa8 alone", "useless"]
    assert [*speculation.variants_of(asked, 100)] == names
    asked.variants = ["medusa8 alone"]
    assert [*speculation.variants_of(asked, 100)] == ["plain", "medusa8 alone"]
    asked.variants = ["medusa16"]
    with pytest.raises(ValueError, match="no variant medusa16: there are plain, prompt lookup, medusa8"):
        speculation.variants_of(asked, 100)
