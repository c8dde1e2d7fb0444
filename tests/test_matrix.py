"""Every architecture of the zoo x every way of calling generate(): patched gives what unpatched gives.

What the unpatched model refuses to do, the patched one refuses with the same exception, or does right. Before
each call the unused slots of the block pool are NaN. By default `THOROUGH` architectures run every case, other
common ones the `core` cases and a share of the others, the rest the `core` cases; `-m slow` runs what is left.
"""

import functools
import warnings
from collections import Counter

import pytest
import torch
from generate_cases import CASES, NEW_TOKENS, PLAIN, RAGGED, run
from tiny_models import ACCELERATED, COMMON, THOROUGH, ZOO, build, build_without, expectation, in_this_transformers

import hf_turbo

BLOCK_SIZE = 4
# Of two tokens that are closer than this, another order of summation could choose the other.
SMALLEST_GAP = 1e-3
TOLERANCE = {"sequences_scores": 1e-5}


class Lab:
    """One architecture twice, with the same weights: unpatched, and patched."""

    def __init__(self, name: str):
        self.name = name
        self.stock = build(name)
        self.patched = build(name)
        assert hf_turbo.patch(self.patched, block_size=BLOCK_SIZE) is self.patched
        self._references = {}
        outcome("left-padded-beams", self.patched)  # so that there are blocks to fill with NaN

    def reference(self, case: str):
        if case not in self._references:
            self._references[case] = outcome(case, self.stock)
        return self._references[case]

    def reasons(self) -> Counter[str]:
        """Why the patched model stepped aside, and how often, so far."""
        return Counter(hf_turbo.report(self.patched).stepped_aside)


@functools.cache  # the models are tiny, and all of this file's tests ask for them
def lab(name: str) -> Lab:
    if not in_this_transformers(name):
        pytest.skip(f"this Transformers has no {name}")
    return Lab(name)


def outcome(case: str, model) -> dict | Exception:
    """What a case gives on this model: named results, or the exception."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*past_key_values.*", category=FutureWarning)
        try:
            return CASES[case].run(model)
        except Exception as error:
            return error


def flat(result) -> list[torch.Tensor]:
    """The tensors of a result, in order; a list of numbers is one, None is none."""
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in flat(part)]
    return [] if result is None else [torch.as_tensor(result)]


def assert_same(result: dict, reference: dict) -> None:
    assert result.keys() == reference.keys()
    for key, expected in reference.items():
        got, expected = flat(result[key]), flat(expected)
        assert len(got) == len(expected), f"{key}: {len(got)} tensors instead of {len(expected)}"
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            where = f"{key}[{i}]" if len(got) > 1 else key
            if a.shape != b.shape:
                pytest.fail(f"{where}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
            tolerance = TOLERANCE.get(key, 1e-4) if a.is_floating_point() else 0
            differ = ~torch.isclose(a, b, rtol=tolerance, atol=tolerance)
            if differ.any():
                at = tuple(differ.nonzero()[0].tolist())
                pytest.fail(f"{where} differs, first at {at}: {a[at[:-1]].tolist()} instead of {b[at[:-1]].tolist()}")


def assert_as_unpatched(lab: Lab, case: str, result: dict | Exception) -> str | None:
    """Checks a patched outcome; returns why there is nothing to compare with, if so."""
    reference = lab.reference(case)
    if not isinstance(reference, Exception):
        if isinstance(result, Exception):
            raise AssertionError("only the patched model raises") from result
        assert_same(result, reference)
        return None
    refusal = f"unpatched raises {type(reference).__name__}: {reference}"
    if isinstance(result, Exception):
        if type(result) is not type(reference):
            raise AssertionError(f"{refusal}; patched raises {type(result).__name__}: {result}") from result
        return refusal
    text_of = CASES[case].text_of
    assert text_of, f"{refusal}; patched does not"
    assert_same(result, lab.reference(text_of))
    return f"{refusal}; patched gives the text of {text_of!r}"


#: Of the other common architectures, each runs every so many-th case, beginning at another one than its neighbour.
SHARE = 4


def _cell(name: str, case: str):
    place = sorted(COMMON).index(name) + list(CASES).index(case) if name in COMMON else None
    quick = name in THOROUGH or CASES[case].core or (place is not None and place % SHARE == 0)
    return pytest.param(name, case, id=f"{name}-{case}", marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize("name, case", [_cell(name, case) for name in ZOO for case in CASES])
def test_matrix(name, case, poison_pool, record_property):
    models = lab(name)
    known = models.reasons()
    poison_pool(models.patched)
    result = outcome(case, models.patched)
    refusal = assert_as_unpatched(models, case, result)
    if refusal:
        record_property("not applicable", refusal)
    if expectation(models.stock, name) == ACCELERATED:
        reasons = models.reasons() - known
        assert CASES[case].may_step_aside or refusal or not reasons, f"stepped aside for this call: {reasons}"


@pytest.mark.parametrize("name", ZOO)
def test_report(name):
    """What is accelerated says how, what is not says why."""
    models = lab(name)
    models.patched.generate(PLAIN, max_new_tokens=1)
    report = hf_turbo.report(models.patched)
    if expectation(models.stock, name) == ACCELERATED:
        assert report.accelerated, "nothing is accelerated"
        assert report.peak_blocks, "no block was ever used"
    else:
        assert not report.accelerated, f"accelerated: {report.accelerated}"
        assert report.stepped_aside, "gives no reason for stepping aside"


@pytest.mark.parametrize("name", ZOO)
def test_zoo_is_telling(name):
    """The texts compared above vary, and are not decided by ties."""
    for inputs in (PLAIN, RAGGED):
        output = run(lab(name).stock, inputs, output_logits=True)
        best, second = torch.stack(output.logits, dim=1).topk(2, dim=-1).values.unbind(-1)
        assert (best - second).min() > SMALLEST_GAP
        rows = output.sequences[:, -NEW_TOKENS:].tolist()
        assert len(set().union(*rows)) >= 6, f"too few different tokens: {rows}"
        assert min(len(set(row)) for row in rows) > 1, f"a row of one token: {rows}"


@pytest.mark.parametrize("name, feature", [pytest.param(n, f, id=f"{n}-{f}") for n in ZOO for f in ZOO[n].guards])
def test_guard(name, feature):
    """Without the feature the unpatched model gives another text: ignoring it would turn the matrix red."""
    if not in_this_transformers(name):
        pytest.skip(f"this Transformers has no {name}")
    with_feature = lab(name).reference("greedy")["sequences"]
    assert not torch.equal(outcome("greedy", build_without(name, feature))["sequences"], with_feature)
