"""What rounds take is counted from outcome to outcome, whatever the host did in between: a clock that others move."""

from itertools import pairwise

import pytest
import torch
from drafting import Knowing, pair
from helpers import prompt
from test_ahead_rounds import drafters

import hf_turbo
from hf_turbo.cache.token_tree import TokenTree
from hf_turbo.generation import speculation
from hf_turbo.generation.lookup_ahead import LookupAhead
from hf_turbo.generation.pace import Pace
from hf_turbo.generation.rows import Rows

NEW = 24


class Clock:
    """Seconds that pass when somebody says so."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(speculation, "time", clock)
    return clock


@pytest.fixture
def noted(monkeypatch, clock):
    """Seconds that the pace was told of, and when."""
    seconds, note = [], Pace.note

    def noting(pace, size, drafted, accepted, taken, rows=1):
        seconds.append((clock.now, taken))
        return note(pace, size, drafted, accepted, taken, rows)

    monkeypatch.setattr(Pace, "note", noting)
    return seconds


def slow(monkeypatch, clock, cls, name, seconds):
    """A method that takes so long."""
    method = getattr(cls, name)

    def slowly(*args, **options):
        clock.now += seconds
        return method(*args, **options)

    monkeypatch.setattr(cls, name, slowly)


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize("kind", ["knowing", "lookup", "adaptive lookup", "medusa"])
def test_no_time_falls_through(monkeypatch, tmp_path, clock, noted, kind, goes_ahead, request):
    one = pair("llama")
    register = request.getfixturevalue("ahead")[1] if goes_ahead else lambda model: None
    text = one.plain(prompt(1, 9), NEW)
    known = drafters(one.stock, tmp_path) | {"knowing": Knowing(text, TokenTree.chain(3))}
    hf_turbo.patch(one.model, block_size=4, speculation=known[kind])
    register(one.model)
    slow(monkeypatch, clock, Knowing, "propose", 1.0)
    slow(monkeypatch, clock, LookupAhead, "propose", 1.0)
    slow(monkeypatch, clock, LookupAhead, "choose", 0.5)
    slow(monkeypatch, clock, Rows, "take", 0.125)
    slow(monkeypatch, clock, Rows, "take_numbers", 0.125)
    got = one.model.generate(prompt(1, 9), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, text)
    times, seconds = zip(*noted, strict=True)
    assert len(times) > 3 and times[-1] == clock.now > times[0]
    assert list(seconds[1:]) == [after - before for before, after in pairwise(times)]
    if goes_ahead and kind != "knowing":
        assert seconds[0] is None  # it began behind the prompt: when is not known
    else:
        assert 0 < seconds[0] <= times[0]
    if kind == "knowing":
        assert min(seconds) > 1.0  # each has waited for its draft
