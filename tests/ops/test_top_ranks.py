"""The few largest of each row, in order: kernel and reference against Python's sort."""

import math

import pytest
import torch

from hf_turbo.ops import dispatch, reference_drafts, top_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("module", [reference_drafts, top_ranks], ids=["reference", "kernel"])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is full of what would win, or be no column."""
    empty = torch.empty

    def poison(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)

    monkeypatch.setattr(torch, "empty", poison)


def expected(x, num):
    """NaN first, then the largest; of equals the lowest column."""
    return [
        sorted(range(len(row)), key=lambda c, row=row: (0, 0.0, c) if math.isnan(row[c]) else (1, -row[c], c))[:num]
        for row in x.tolist()
    ]


def within_nan(x, offset=3):
    """The same numbers as a part of wider rows of NaN: another alignment and stride, and what is beyond would win."""
    wide = torch.full((x.shape[0], x.shape[1] + 2 * offset), torch.nan, dtype=x.dtype, device=x.device)
    part = wide[:, offset:-offset]
    part.copy_(x)
    return part


def make(rows, columns, dtype, device, kind, seed=0):
    """Numbers of a kind: mostly different, of a few values, infinities with zeros and NaN, or mostly equal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "ties":
        x = x.sign() * x.abs().clamp_max(1.5).round()
    elif kind == "special":
        # The interpreter takes bf16's subnormal numbers for zeros; a GPU does not.
        small = torch.finfo(dtype).tiny * (1 if dtype == torch.bfloat16 and device == "cpu" else 0.25)
        special = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, torch.nan, -torch.nan, small, -small])
        x = special[torch.randint(len(special), x.shape, generator=generator)]
        x[0, x[0].isnan() | (x[0] > 0)] = -torch.inf  # a row of zeros and minus infinity
    elif kind == "few":
        x = torch.full_like(x, -torch.inf)  # logits of which all but a few are forbidden
        x[:, columns // 2] = -5.0
    return x.to(dtype).to(device)


def check(module, device, dtypes, sizes, nums=(1, 4, 16)):
    for dtype in dtypes:
        for rows, columns in sizes:
            for kind, num in zip(("different", "ties", "special", "few"), (*nums, 3), strict=True):
                x = make(rows, columns, dtype, device, kind)
                num = min(num, columns)
                wanted = expected(x, num)
                for given in (x, within_nan(x)):
                    found = module.top_ranks(given, num)
                    assert found.dtype == torch.int64 and found.tolist() == wanted, (dtype, columns, kind)


@BOTH
def test_against_a_sort(module, poisoned):
    sizes = ((1, 1), (2, 7), (3, 2048), (2, 2049), (1, 6001))
    check(module, DEVICE, (torch.float32,), sizes)
    check(module, DEVICE, (torch.float16, torch.bfloat16), sizes[1:4:2])


@BOTH
def test_both_zeros_are_equal(module):
    x = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0]], device=DEVICE)
    assert module.top_ranks(x, 5).tolist() == [[0, 1, 3, 4, 2]]


@BOTH
def test_largest_in_one_chunk(module):
    x = torch.zeros(2, 9000, device=DEVICE)
    x[0, 5000:5016] = torch.arange(16.0) + 1
    x[1, 0], x[1, -1] = 1.0, 2.0
    ranks = module.top_ranks(x, 16)
    assert ranks[0].tolist() == list(range(5015, 4999, -1))
    assert ranks[1].tolist() == [8999, 0, *range(1, 15)]


@BOTH
def test_no_rows(module):
    assert list(module.top_ranks(torch.zeros(0, 9, device=DEVICE), 2).shape) == [0, 2]


@BOTH
def test_refuses(module):
    x = torch.zeros(2, 40, device=DEVICE)
    for num in (0, 17):
        with pytest.raises(ValueError, match="num must be 1 to 16"):
            module.top_ranks(x, num)
    with pytest.raises(ValueError, match="1 to 3 of 3 columns"):
        module.top_ranks(x[:, :3], 4)
    with pytest.raises(ValueError, match="last stride"):
        module.top_ranks(x.t(), 1)
    with pytest.raises(ValueError, match="last stride"):
        module.top_ranks(x[0], 1)
    with pytest.raises(ValueError, match="bf16"):
        module.top_ranks(x.double(), 1)


def test_dispatch():
    x = make(2, 50, torch.float32, DEVICE, "ties")
    found = dispatch.top_ranks(x, 5)  # on a CPU, of equals any
    assert x.gather(1, found).tolist() == x.gather(1, torch.tensor(expected(x, 5), device=x.device)).tolist()
    assert all(len(set(row)) == 5 for row in found.tolist())


@pytest.mark.gpu
def test_on_the_device():
    check(top_ranks, "cuda", DTYPES, ((1, 1), (2, 7), (3, 2048), (2, 2049), (5, 50257), (4, 128256), (1, 262144)))
    check(top_ranks, "cuda", DTYPES[2:], ((64, 50257),))
