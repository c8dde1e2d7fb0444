"""A residual block of all heads: kernel and reference against a loop over heads in float64."""

import pytest
import torch

from hf_turbo.ops import dispatch, head_block, reference_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("module", [reference_heads, head_block], ids=["reference", "kernel"])


@pytest.fixture
def poisoned(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))


def drawn(*shape, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def within_nan(x):
    """The same numbers as a part of wider rows of NaN: what is read beyond spoils the result."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), torch.nan, dtype=x.dtype, device=x.device)
    part = wide[..., 8:-8]
    part.copy_(x)
    return part


def make_case(rows, heads, size, own, dtype, device, seed=0):
    """Rows, weights and biases; beyond the weights and the biases, as beyond the rows, lies NaN."""
    x = drawn(rows, *([heads] if own else []), size, dtype=dtype, device=device, seed=seed)
    weights = drawn(heads + 1, size, size, dtype=dtype, device=device, seed=seed + 1) * (2 / size**0.5)
    biases = drawn(heads + 1, size, dtype=dtype, device=device, seed=seed + 2)
    weights[-1] = biases[-1] = torch.nan
    return within_nan(x), weights[:-1], biases[:-1]


def expected(x, weight, bias):
    x, weight, bias = x.double(), weight.double(), bias.double()
    results = []
    for head in range(len(bias)):
        own = x if x.dim() == 2 else x[:, head]
        y = own @ weight[head].T + bias[head]
        results.append(own + y / (1 + torch.exp(-y)))
    return torch.stack(results, dim=1)


def check(module, device, dtype, rows, heads, size, own):
    case = make_case(rows, heads, size, own, dtype, device)
    found = module.head_block(*case)
    assert found.dtype == dtype and found.shape == (rows, heads, size)
    bits = {torch.float16: 11, torch.bfloat16: 8}[dtype]
    # Each of product, activation and sum is rounded once, of numbers of up to about 8; where torch adds the bias by
    # itself, once more.
    torch.testing.assert_close(found.double(), expected(*case), atol=8 * 2.0**-bits, rtol=2.0 ** (1 - bits))


@BOTH
@pytest.mark.parametrize("own", [False, True], ids=["one-state", "own-states"])
def test_against_float64(module, own, poisoned):
    for rows, heads, size in ((1, 3, 48), (2, 3, 48), (17, 2, 40), (1, 1, 33), (3, 2, 33)):
        check(module, DEVICE, torch.float16, rows, heads, size, own)


def test_more_columns_than_a_step(monkeypatch, poisoned):
    monkeypatch.setattr(head_block, "choose_config", lambda rows, size: head_block.BlockConfig(16, 64, 1))
    for rows, size in ((1, 136), (1, 128), (3, 136), (3, 128)):
        check(head_block, DEVICE, torch.float16, rows, 2, size, True)


def test_bfloat16(poisoned):
    check(head_block, DEVICE, torch.bfloat16, 1, 2, 64, False)  # the interpreter has no products of bf16 tiles


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(x=lambda x: x.float()), "all must be bf16"),
        (dict(weight=lambda x: x.float()), "all must be bf16"),
        (dict(x=lambda x: x[:, :-1]), "rows of"),
        (dict(x=lambda x: x[:0]), "1 to 64 rows"),
        (dict(x=lambda x: x[:1].repeat(65, 1)), "1 to 64 rows"),
        (dict(x=lambda x: x.t().contiguous().t()), "last stride"),
        (dict(weight=lambda x: x[:-1]), "weight must be"),
        (dict(weight=lambda x: x.transpose(1, 2)), "contiguous"),
        (dict(bias=lambda x: x[0]), "bias"),
    ],
)
def test_refuses(change, told):
    given = dict(zip(("x", "weight", "bias"), make_case(1, 2, 16, False, torch.float16, DEVICE), strict=True))
    given["x"] = given["x"].repeat(2, 1)
    for name, function in change.items():
        given[name] = function(given[name])
    with pytest.raises(ValueError, match=told):
        head_block.head_block(**given)


def test_dispatch_leaves_other_dtypes_to_torch(monkeypatch):
    """As training has them when it looks how good its heads are: float32 ones, and a model's states in bfloat16."""
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    x, weight, bias = make_case(2, 2, 32, False, torch.bfloat16, "cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = dispatch.head_block(x, weight.float(), bias.float())
        wanted = reference_heads.head_block(x, weight.float(), bias.float())
    assert found.equal(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_the_device(dtype):
    for rows, heads, size in ((1, 4, 576), (5, 5, 960), (8, 4, 576), (64, 4, 576), (1, 2, 4096), (8, 2, 8192)):
        for own in (False, True):
            check(head_block, "cuda", dtype, rows, heads, size, own)


@pytest.mark.gpu
def test_dispatch_on_the_device(monkeypatch):
    """The kernel where nothing is learnt and rows are few; else torch, which has gradients."""
    calls = []
    monkeypatch.setattr(head_block, "head_block", lambda *case: calls.append(len(case[0])))
    for rows, dtype in ((1, torch.float16), (64, torch.float16), (65, torch.float16), (1, torch.float32)):
        x, weight, bias = make_case(rows, 2, 32, False, torch.float16, "cuda")
        case = [t.to(dtype) for t in (x, weight, bias)]
        with torch.no_grad():
            dispatch.head_block(*case)
        assert dispatch.head_block(*case) is not None
    assert calls == [1, 64]
