"""Rotary angles and looked up rows in deferred forwards: what becomes one launch, and what stays torch's."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from steps import check_a_step
from tiny_models import build

from hf_turbo.modeling.fusion import STEP_RULES
from hf_turbo.modeling.prompt_fusion import PROMPT_RULES, TRANSIENT
from hf_turbo.ops import dispatch, reference_layers
from hf_turbo.ops.deferred import DeferredMode

CPU = torch.device("cpu")
FREQUENCIES = 100.0 ** -(torch.arange(6) / 6)


@pytest.fixture
def calls(monkeypatch):
    """The joins of the angles that are launched, and the lookups."""
    counted = Counter()

    def rotary_angles(frequencies, positions, *, join, scale, dtype):
        counted[join] += 1
        assert positions.dtype in (torch.int64, torch.int32, torch.float32)  # what the kernel takes
        return reference_layers.rotary_angles(frequencies, positions, join=join, scale=scale, dtype=dtype)

    def embedding(weight, ids):
        counted["lookups"] += 1
        return reference_layers.embedding(weight, ids)

    monkeypatch.setattr(dispatch, "rotary_angles", rotary_angles)
    monkeypatch.setattr(dispatch, "embedding", embedding)
    return counted


def product(positions):
    """`[..., size, tokens]`, a product of matrices, as most rotary embeddings of Transformers begin."""
    *rows, _ = positions.shape
    expanded = FREQUENCIES[:, None].expand(*rows, -1, 1)
    return expanded.float() @ positions.unsqueeze(-2).float()


def angles(positions):
    return product(positions).transpose(-1, -2)


def columns(positions):
    """The same numbers by a product of columns: another release's spelling."""
    return positions[..., None].float() * FREQUENCIES


def pair(positions):
    """As few numbers of a position as a join makes of each."""
    return positions[..., None].float() * FREQUENCIES[:2]


def joined(f):
    return torch.cat((f[:3], f[3:]))


def both(f, scale=1.5, dtype=torch.bfloat16):
    return (f.cos() * scale).to(dtype), (f.sin() * scale).to(dtype)


def halves(f):
    return torch.cat((f, f), dim=-1)


def deferred(compute, rules=STEP_RULES, transient=frozenset()):
    """What `compute` gives in a deferred forward, and how many operations torch has launched."""
    mode = DeferredMode(rules, CPU, transient)
    with mode:
        results = compute()
    return tuple(mode.tensor(x) for x in results), mode.num_launched


def same_as_torch(compute, **options):
    results, num_launched = deferred(compute, **options)
    for a, b in zip(results, compute(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    return num_launched


WAYS = {
    "halves": lambda f: both(halves(f)),
    "neighbours": lambda f: both(torch.repeat_interleave(f, 2, dim=-1)),
    "alone": both,
}


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 7), (2, 7), (3, 2, 1), (3, 2, 7), (2, 6)])
@pytest.mark.parametrize("join", WAYS)
@pytest.mark.parametrize("spelling", [angles, columns])
def test_one_launch_gives_both(spelling, join, shape, calls):
    positions = torch.randint(0, 90, shape)
    assert same_as_torch(lambda: WAYS[join](spelling(positions))) == 0
    assert calls == Counter({join: 1})


FORMS = {
    "no scale": lambda f: (f.cos().to(torch.bfloat16), f.sin().to(torch.bfloat16)),
    "no cast": lambda f: (f.cos() * 1.5, f.sin() * 1.5),
    "neither": lambda f: (f.cos(), f.sin()),
    "sines first": lambda f: both(f)[::-1],
    "an integer": lambda f: both(f, scale=2),
    "cosines alone": lambda f: (f.cos(),),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, calls):
    positions = torch.randint(0, 90, (3, 1))
    assert same_as_torch(lambda: FORMS[form](halves(angles(positions)))) == 0
    assert calls == Counter(halves=1)


def test_what_is_asked_for_twice_is_two_tensors(calls):
    """One may be written to."""

    def compute(f):
        first, second = both(f), both(f)
        first[0].add_(1)
        return first + second

    positions = torch.randint(0, 90, (3, 1))
    assert same_as_torch(lambda: compute(halves(angles(positions)))) == 0
    assert calls == Counter(halves=2)


APART = {
    "of two dtypes": lambda f: (f.cos(), f.sin().to(torch.bfloat16)),
    "of two scales": lambda f: (f.cos() * 2, f.sin() * 3),
    "of two joins": lambda f: (f.cos(), halves(f).sin()),
    "of two products": lambda f: (f.cos(), angles(torch.tensor([[3], [4], [5]])).sin()),
}


@pytest.mark.parametrize("form", APART)
def test_what_one_launch_does_not_give(form, calls):
    positions = torch.randint(0, 90, (3, 1))
    num_launched = same_as_torch(lambda: APART[form](angles(positions)))
    assert (calls.total(), num_launched) == ((1, 1) if form == "of two dtypes" else (2, 0))


OTHERS = {
    "a cat of two tensors": lambda x: both(torch.cat((angles(x), 2 * angles(x)), -1)),
    "a cat of two products": lambda x: both(torch.cat((angles(x), angles(x)), -1)),
    "three times": lambda x: both((lambda f: torch.cat((f, f, f), -1))(angles(x))),
    "a cat of rows": lambda x: both((lambda f: torch.cat((f, f), 1))(angles(x))),
    "each three times": lambda x: both(torch.repeat_interleave(angles(x), 3, dim=-1)),
    "rows twice": lambda x: both(torch.repeat_interleave(angles(x), 2, dim=1)),
    "two of each in turn": lambda x: both(pair(x)[..., None, :].expand(6, 6, 2, 2).clone().flatten(2)),
    "each of joined rows twice": lambda x: both(joined(angles(x)[..., None]).expand(6, 6, 6, 2).clone().flatten(2)),
    "rows of six positions": lambda x: both(halves(columns(x).reshape(6, 36))),
    "a row of six positions": lambda x: both(halves(angles(x[:, :1]).reshape(1, 36))),
    "a sum": lambda x: both(angles(x) + 1),
    "not transposed": lambda x: both(product(x)),
    "transposed otherwise": lambda x: both(product(x).transpose(0, 1)),
    "float64": lambda x: both(angles(x).double()),
    "another function": lambda x: (angles(x).tanh(), angles(x).neg()),
    "a longer sum": lambda x: both((FREQUENCIES[:, None].expand(6, -1, 2) @ x[:, None].float().expand(6, 2, 6)).mT),
    "a product in bf16": lambda x: both(product(x).bfloat16().mT),
    "positions in bf16": lambda x: both(x[..., None].bfloat16() * FREQUENCIES),
    "frequencies of each position": lambda x: both(x[..., None].float() * (FREQUENCIES + x[..., None])),
    "positions and no frequencies": lambda x: both(x.float() * FREQUENCIES),
    "of bf16": lambda x: both((FREQUENCIES.bfloat16()[:, None].expand(6, -1, 1) @ x[:, None].bfloat16()).mT),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_stays_torchs(name, calls):
    """Six positions of six rows, as many as frequencies: shapes alone tell nothing."""
    positions = torch.randint(0, 90, (6, 6))
    assert same_as_torch(lambda: OTHERS[name](positions)) > 0
    assert not calls


MORE = {
    "a scale on the device": lambda f: both(f, scale=torch.tensor([1.5])),
    "a complex scale": lambda f: [x.imag for x in both(f, scale=2j, dtype=torch.complex64)],
    "a cast to float64": lambda f: both(f, dtype=torch.float64),
    "a cast to integers": lambda f: both(f, dtype=torch.int64),
    "two scales": lambda f: ((f.cos() * 1.5) * 2, (f.sin() * 1.5) * 2),
}


@pytest.mark.parametrize("name", MORE)
def test_torch_goes_on_from_the_angles(name, calls):
    positions = torch.randint(0, 90, (3, 1))
    assert same_as_torch(lambda: MORE[name](angles(positions))) > 0
    assert calls == Counter(alone=1)


def test_angles_that_were_asked_for_before(calls):
    def compute(positions):
        column = angles(positions)[..., None]
        repeated = column.expand(3, 1, 6, 2).clone().flatten(2)
        return (column.amax(), *both(repeated))

    positions = torch.randint(0, 90, (3, 1))
    assert same_as_torch(lambda: compute(positions)) > 0
    assert not calls


def test_products_that_torch_may_round(calls):
    positions = torch.randint(0, 90, (3, 1))
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        assert same_as_torch(lambda: both(angles(positions))) > 0
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert not calls


def test_positions_that_change_afterwards():
    def compute(positions):
        results = both(halves(angles(positions)))
        positions.add_(1)
        return results

    results, _ = deferred(partial(compute, torch.arange(4)[:, None]))
    assert all(torch.equal(a, b) for a, b in zip(results, compute(torch.arange(4)[:, None]), strict=True))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64, torch.float32])
def test_positions_of_other_dtypes(dtype, calls):
    positions = torch.randint(0, 90, (3, 1)).to(dtype)
    assert same_as_torch(lambda: both(angles(positions))) == (dtype != torch.float32)
    assert calls == Counter(alone=1)


#: Of a step: the angles' joins, the lookups.
STEPS = {
    "llama": Counter(halves=1, lookups=1),
    "qwen3": Counter(halves=1, lookups=1),
    "phi": Counter(halves=1, lookups=1),
    "gpt_neox": Counter(halves=1, lookups=1),
    "glm4": Counter(halves=1, lookups=1),
    "cohere": Counter(neighbours=1, lookups=1),
    "gpt_oss": Counter(alone=1, lookups=1),
    "gemma3_text": Counter(halves=2, lookups=1),  # frequencies of local and of global layers
    "gpt2": Counter(lookups=2),  # tokens and positions
}


@pytest.mark.parametrize("name", STEPS)
def test_launches_of_a_step(name, calls):
    check_a_step(build(name), calls)
    assert calls == STEPS[name]


class Other(torch.Tensor):
    """What a library makes of a weight."""

    __torch_function__ = torch._C._disabled_torch_function_impl


WEIGHT = torch.randn(9, 8)
LOOKUPS = {
    "one row": (WEIGHT, (1, 1), 1),
    "16 rows": (WEIGHT, (16, 1), 1),
    "of a padded table": (torch.randn(9, 12)[:, :8], (3,), 1),
    "of a parameter": (torch.nn.Parameter(WEIGHT.half(), requires_grad=False), (2, 2), 1),
    "17 rows": (WEIGHT, (17, 1), 0),
    "none": (WEIGHT, (0, 1), 0),
    "of columns": (torch.randn(8, 9).t(), (3,), 0),
    "in float64": (WEIGHT.double(), (3,), 0),
    "of another library": (WEIGHT.as_subclass(Other), (3,), 0),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name, calls):
    weight, shape, num = LOOKUPS[name]
    ids = torch.randint(0, 9, shape)
    num_launched = same_as_torch(lambda: (F.embedding(ids, weight, padding_idx=0),))
    assert (calls["lookups"], num_launched) == (num, 1 - num)


def test_a_table_on_another_device_is_torchs_to_refuse(calls):
    with DeferredMode(STEP_RULES, torch.device("cpu")) as mode:
        found = F.embedding(torch.tensor([1]), WEIGHT.to("meta"))
    assert mode.tensor(found).device.type == "meta" and not calls["lookups"]


def test_what_is_looked_up_is_what_was_there(calls):
    def compute(weight, ids):
        first = F.embedding(ids, weight)
        weight.zero_()
        second = F.embedding(ids, weight)
        ids.fill_(8)
        return first, second

    (first, second), _ = deferred(partial(compute, WEIGHT.clone(), torch.tensor([[1], [2]])))
    assert torch.equal(first, WEIGHT[1:3, None]) and not second.any() and calls["lookups"] == 2


def test_long_prompts_make_their_embeddings_anew(calls):
    ids = torch.randint(0, 9, (1, 17))
    long = {"rules": PROMPT_RULES, "transient": TRANSIENT}
    assert same_as_torch(lambda: (F.embedding(ids, WEIGHT),), **long) == 1
    positions = torch.arange(17)[None]
    assert same_as_torch(lambda: both(halves(angles(positions))), **long) == 0
    assert calls == Counter(halves=1)
