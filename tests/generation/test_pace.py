"""The pace of speculation, by simulation: drafts accepted at random, rounds that take what a formula says."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_turbo.generation.expectation import OfTrees, _common_rate
from hf_turbo.generation.pace import Pace, PaceStats

SIZES = (1, 2, 4, 8, 16)

# Seconds of a round by its size; 1 is a plain step.
COSTS = {
    "lookup": lambda size: 1 + 0.01 * size,
    "heads": lambda size: 1.15 + 0.02 * size if size else 1.0,
    "small draft model": lambda size: 1 + 0.1 * size,
    "large draft model": lambda size: 1 + 0.3 * size,
}
# The chance of a token at a depth, once those before it are accepted.
RATES = {
    "0": lambda depth: 0.0,
    "0.2": lambda depth: 0.2,
    "0.4": lambda depth: 0.4,
    "0.6": lambda depth: 0.6,
    "0.8": lambda depth: 0.8,
    "falling": lambda depth: 0.9 * 0.8 ** (depth - 1),
}


def run(pace, rate, cost, tokens, rows=1, seed=0, jitter=0.0, outliers=0.0):
    """Generates so many tokens a row. The first two rounds of each size seem to take 100 times as long.

    Returns:
        Seconds a token of a row, without the outliers; the sizes that were chosen.
    """
    rng, seconds, made, sizes = random.Random(seed), 0.0, 0, []
    while made < tokens * rows:
        size = pace.choose()
        accepted = 0
        for _ in range(rows):
            depth = 0
            while depth < size and rng.random() < rate(depth + 1):
                depth += 1
            accepted += depth
        taken = cost(size) * (1 + jitter * rng.uniform(-1, 1))
        first = sizes.count(size) < 2
        pace.note(size, size * rows, accepted, taken * (100 if first else 20 if rng.random() < outliers else 1), rows)
        made += accepted + rows
        seconds += taken
        sizes.append(size)
    return seconds / made * rows, sizes


def best_seconds(rate, cost):
    """Seconds a token of the best fixed choice."""

    def seconds(size):
        reached = [1.0]
        for depth in range(1, size + 1):
            reached.append(reached[-1] * rate(depth))
        return cost(size) / sum(reached)

    return min(map(seconds, (0, *SIZES)))


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
@pytest.mark.parametrize("rate", RATES.values(), ids=RATES.keys())
def test_close_to_the_best_fixed_choice(rate, cost):
    """Over 2000 tokens, with durations that jitter and some of which are far off."""
    regrets = []
    for seed in range(5):
        seconds, _ = run(Pace(SIZES), rate, cost, 2000, seed=seed, jitter=0.05, outliers=0.02)
        regrets.append(seconds / best_seconds(rate, cost) - 1)
    assert sum(regrets) / 5 < 0.06 and max(regrets) < 0.12


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
@pytest.mark.parametrize("rate", [RATES["0"], RATES["0.6"], RATES["falling"]], ids=["0", "0.6", "falling"])
def test_batches_tell_only_sums(rate, cost):
    seconds, _ = run(Pace(SIZES), rate, cost, 1500, rows=16)
    assert seconds / best_seconds(rate, cost) < 1.08


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 4, 6), (5, 10, 20), SIZES], ids=str)
def test_a_useless_draft_costs_little(sizes):
    """Less than 5% of 256 steps where a round takes as long as 1.3 plain steps."""
    seconds, chosen = run(Pace(sizes), RATES["0"], lambda size: 1.3 if size else 1.0, 256)
    assert 1 < seconds < 1.05
    assert chosen[-1] == 0


@pytest.mark.parametrize("cost", [COSTS["small draft model"], COSTS["large draft model"]], ids=["small", "large"])
@pytest.mark.parametrize("bad", [100, 300, 1000, 3000])
def test_a_draft_that_turns_good_is_found_again(bad, cost):
    pace = Pace([4])
    run(pace, RATES["0"], cost, bad)
    assert not pace.stats().is_on
    _, chosen = run(pace, lambda depth: 0.95, cost, 1500)
    found = next(i for i, size in enumerate(chosen) if size)
    assert found <= min(2 * bad, 512)
    assert chosen[found + 100 :].count(0) < 0.1 * len(chosen[found + 100 :])


def test_probes_are_16_steps_apart_then_twice_as_far_up_to_512():
    pace = Pace([4])
    _, chosen = run(pace, RATES["0"], lambda size: 2.0 if size else 1.0, 4000)
    # A plain step alone is there to see what that takes, the first 4 for the same.
    waits = [len(steps) for steps in "".join("x" if size else "." for size in chosen).split("x") if len(steps) > 1]
    assert waits[:7] == [4 + 16, 32, 64, 128, 256, 512, 512]


def test_one_that_pays_brings_the_short_wait_back():
    pace, cost = Pace([4]), COSTS["small draft model"]
    run(pace, RATES["0"], cost, 500)
    run(pace, RATES["0.8"], cost, 1000)
    _, chosen = run(pace, RATES["0"], cost, 80)
    off = next(i for i in range(60) if chosen[i : i + 2] == [0, 0])
    assert off < 40 and chosen[off : off + 16] == [0] * 16 and chosen[off + 16] == 4


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 400), st.booleans())
@example(82747, 22, False)  # plain steps seemed slow, and the sizes next to them were not drafted for long
def test_whatever_happened_it_recovers(seed, rounds, new_text):
    """After any history a good draft is on, and after that a useless one is off."""
    rng, pace = random.Random(seed), Pace(SIZES)
    for _ in range(rounds):
        size = rng.choice([0, *SIZES])
        drafted = rng.randint(0, size)
        pace.note(size, drafted, rng.randint(0, drafted), rng.expovariate(1))
        assert pace.choose() in (0, *SIZES)
    if new_text:
        pace.new_text()
    cost = COSTS["heads"]
    _, good = run(pace, lambda depth: 0.9, cost, 4000)
    assert sum(size >= 4 for size in good[-100:]) > 80
    _, useless = run(pace, RATES["0"], cost, 800)
    assert useless[-200:].count(0) > 180


def test_a_new_text_begins_with_speculation():
    """Also after a text in which it was off, with what is known of durations; not where it has been off for long."""
    pace, cost = Pace(SIZES), COSTS["heads"]
    run(pace, RATES["0"], cost, 60)
    assert pace.choose() == 0
    pace.new_text()
    assert pace.choose() > 0
    run(pace, RATES["0"], cost, 600)
    assert pace.choose() == 0
    pace.new_text()
    assert pace.choose() == 0


def test_a_new_text_half_forgets():
    pace = Pace(SIZES)
    run(pace, RATES["0.4"], COSTS["small draft model"], 1000)
    before = pace._expectation.rates
    pace.new_text()
    assert pace._expectation.rates == pytest.approx([(rate + 0.7) / 2 for rate in before])
    assert abs(before[0] - 0.4) < 0.15


def test_a_probe_half_forgets():
    """So that a draft which has become good needs few rounds to show it."""
    pace = Pace([4])
    while pace.stats().is_on:
        size = pace.choose()
        pace.note(size, size, 0, COSTS["large draft model"](size))
    before = pace._expectation.rates
    while pace.choose() == 0:
        pace.note(0, 0, 0, 1.0)
    assert before[0] < 0.5
    assert pace._expectation.rates == pytest.approx([(rate + 0.7) / 2 for rate in before])


def test_depths_that_are_not_drafted_follow_those_that_are():
    """Otherwise what was once bad would stay so: a short draft never shows that a long one is good again."""
    pace = Pace([1, 4])
    for _ in range(100):
        pace.note(4, 4, 1, 1.0)
    assert pace._expectation.rates[:2] == pytest.approx([1, 0], abs=0.02)
    for _ in range(200):
        pace.note(1, 1, 1, 1.0)
    assert min(pace._expectation.rates) > 0.95


def test_durations_of_other_sizes():
    """On a line between known sizes; beyond them that of the largest, to be tried."""
    pace = Pace(SIZES)
    for size, seconds in [(0, 1.0), (4, 2.0), (8, 4.0)]:
        for i in range(8):
            pace.note(size, size, 0, seconds if i else 100.0)
    assert [pace._duration(size) for size in (0, *SIZES)] == pytest.approx([1, 1.25, 1.5, 2, 4, 4])


def test_drafts_that_are_shorter_than_asked_for_count_as_not_accepted():
    pace = Pace([4])
    for _ in range(100):
        pace.note(4, 1, 1, 1.0)
    assert pace._expectation.rates == pytest.approx([1, 0, 0.7, 0.7], abs=0.05)


@given(st.integers(1, 16), st.floats(0.01, 0.99))
def test_the_rate_that_explains_a_mean(size, rate):
    mean = sum(rate**depth for depth in range(1, size + 1))
    assert _common_rate(size, mean) == pytest.approx(rate, abs=1e-4)
    assert _common_rate(size, 0.0) == pytest.approx(0, abs=1e-5)
    assert _common_rate(size, float(size)) == pytest.approx(1, abs=1e-5)


def test_stats():
    pace = Pace([2, 4])
    assert pace.stats() == PaceStats() and pace.stats().acceptance_rate == pace.stats().tokens_per_step == 0
    pace.note(4, 7, 3, 0.1, rows=2)
    pace.note(2, 2, 2, 0.1)
    pace.note(0, 0, 0, 0.1, rows=2)
    stats = pace.stats()
    assert stats == PaceStats(rounds=2, plain_steps=1, drafted=9, accepted=5, tokens=10, row_steps=5, is_on=True)
    assert stats.acceptance_rate == 5 / 9 and stats.tokens_per_step == 2.0


@pytest.mark.parametrize("sizes", [[], [0, 1], [2, 1], [1, 1]])
def test_sizes_ascend(sizes):
    with pytest.raises(ValueError, match="ascend"):
        Pace(sizes)


@pytest.mark.parametrize(
    "noted",
    [
        *[(3, 3, 0, 1.0), (2, 3, 0, 1.0), (2, 1, 2, 1.0), (2, 2, -1, 1.0), (0, 1, 0, 1.0), (2, 2, 2, -1.0)],
        *[(2, 2, 2, float("nan")), (2, 2, 2, float("inf")), (2, 0, 0, 1.0, 0)],
    ],
)
def test_rounds_that_cannot_be_change_nothing(noted):
    pace = Pace([2, 4])
    with pytest.raises(ValueError, match="size"):
        pace.note(*noted)
    assert pace.stats() == PaceStats() and pace._expectation.rates == Pace([2, 4])._expectation.rates


PROMISED = {3: 0.84, 7: 1.05, 15: 1.24}


def test_what_trees_promise():
    """One part of all promises is kept, whichever of the trees has shown it."""
    trees = OfTrees(PROMISED)
    assert [trees.tokens(size) for size in (0, 3, 15)] == pytest.approx([1, 1 + 0.7 * 0.84, 1 + 0.7 * 1.24])
    for _ in range(200):
        trees.learn(7, 0.5 * 1.05, 1)
    assert trees.rate == pytest.approx(0.5, abs=1e-4) and trees.tokens(15) == pytest.approx(1 + 0.5 * 1.24, abs=1e-4)
    for _ in range(200):
        trees.learn(3, 0.9 * 0.84, 4)
    assert trees.tokens(7) == pytest.approx(1 + 0.9 * 1.05, abs=1e-4)
    trees.half_forget()
    assert trees.rate == pytest.approx(0.8, abs=1e-4)
    trees.learn(3, 0.0, 1)
    assert trees.rate == pytest.approx(3 * 0.95 * 0.8 / (3 * 0.95 + 1), abs=1e-4)


@pytest.mark.parametrize(
    "costs, kept, best",
    [
        ({3: 1.14, 7: 1.20, 15: 1.36}, 0.8, 7),  # SmolLM2 on an H200
        ({3: 1.03, 7: 1.05, 15: 1.08}, 0.8, 15),  # an 8B model
        ({3: 1.14, 7: 1.30, 15: 1.60}, 0.8, 3),
        ({3: 1.14, 7: 1.20, 15: 1.36}, 0.1, 0),
    ],
)
def test_the_size_of_a_tree_goes_by_what_it_takes_and_brings(costs, kept, best):
    pace, drawn = Pace([*PROMISED], OfTrees(PROMISED)), random.Random(0)
    chosen = []
    for _ in range(600):
        size = pace.choose()
        accepted = sum(drawn.random() < kept * PROMISED[size] / 3 for _ in range(3)) if size else 0
        pace.note(size, min(size, 3), accepted, costs.get(size, 1.0))
        chosen.append(size)
    late = chosen[200:]
    assert late.count(best) > 0.85 * len(late)
