import pytest
import torch

from hf_turbo.ops import reference_layers
from hf_turbo.ops.norm import NormConfig, rms_norm
from hf_turbo.ops.norm_spec import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: Name -> fields of an RMSNorm, and the dtype of its weight if not that of x.
NORMS = {
    "llama": dict(plus_one=False, round_first=True),
    "gemma": dict(plus_one=True, round_first=False),
    "rounded-once": dict(plus_one=False, round_first=False),
    "rounded-once-fp32-weight": dict(plus_one=False, round_first=False, weight_dtype=torch.float32),
    "no-weight": dict(plus_one=False, round_first=False, has_weight=False),
}


def make_norm(name, columns, dtype):
    form = dict(NORMS[name])
    weight = torch.randn(columns, device=DEVICE).to(form.pop("weight_dtype", dtype))
    return RMSNorm(weight if form.pop("has_weight", True) else None, eps=1e-3, **form)


def random_rows(rows, columns, dtype, strided=False):
    x = torch.randn(rows, columns + (16 if strided else 0), device=DEVICE).to(dtype)
    return x[:, 8 : 8 + columns] if strided else x


def check(actual, expected):
    """Within a unit in the last place, and nearly everywhere the same: a rounding too many or too few changes a
    tenth of the elements, another order of summation next to none.
    """
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=eps if expected.dtype != torch.float32 else 8 * eps, atol=1e-7)
    if expected.dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows, columns", [(1, 512), (3, 80)])
def test_norms(name, with_residual, dtype, rows, columns):
    norm = make_norm(name, columns, dtype)
    x = random_rows(rows, columns, dtype)
    residual = random_rows(rows, columns, dtype) if with_residual else None
    actual = rms_norm(x, norm, residual=residual)
    expected = reference_layers.rms_norm(x, norm, residual=residual)
    if with_residual:
        torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0)
        actual, expected = actual[0], expected[0]
    check(actual, expected)


@pytest.mark.parametrize("name", ["llama", "gemma", "no-weight"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_long_rows_are_read_in_pieces(name, with_residual):
    dtype, columns = torch.float16, 200
    norm = make_norm(name, columns, dtype)
    x = random_rows(2, columns, dtype)
    residual = random_rows(2, columns, dtype) if with_residual else None
    actual = rms_norm(x, norm, residual=residual, config=NormConfig(64, 1, pdl=False))
    expected = reference_layers.rms_norm(x, norm, residual=residual)
    if with_residual:
        torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0)
        actual, expected = actual[0], expected[0]
    check(actual, expected)


def test_more_columns_than_a_program_holds():
    norm = make_norm("llama", 20000, torch.float16)
    x = random_rows(2, 20000, torch.float16)
    check(rms_norm(x, norm), reference_layers.rms_norm(x, norm))


def test_strided_rows_and_out():
    """Slices of wider buffers; what lies beside `out` stays as it was."""
    dtype, columns = torch.float16, 80
    norm = make_norm("llama", columns, dtype)
    x, residual = (random_rows(3, columns, dtype, strided=True) for _ in range(2))
    buffer = torch.full((3, columns + 16), torch.nan, dtype=dtype, device=DEVICE)
    normed, total = rms_norm(x, norm, residual=residual, out=buffer[:, 8:-8])
    expected = reference_layers.rms_norm(x, norm, residual=residual)
    assert normed.data_ptr() == buffer[:, 8:].data_ptr()
    check(normed, expected[0])
    torch.testing.assert_close(total, expected[1], rtol=0, atol=0)
    assert buffer[:, :8].isnan().all() and buffer[:, -8:].isnan().all()


@pytest.mark.parametrize("block", [64, 128])
def test_in_place(block):
    norm = make_norm("llama", 100, torch.float16)
    x = random_rows(2, 100, torch.float16)
    expected = reference_layers.rms_norm(x, norm)
    assert rms_norm(x, norm, out=x, config=NormConfig(block, 1, pdl=False)) is x
    check(x, expected)


def test_no_rows():
    norm = make_norm("llama", 64, torch.float16)
    x = random_rows(0, 64, torch.float16)
    assert rms_norm(x, norm).shape == (0, 64)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=torch.zeros(2, 3, 64)), "x must be"),
        (dict(x=torch.zeros(2, 64, dtype=torch.float64)), "x must be"),
        (dict(x=torch.zeros(64, 2).T), "x must be"),
        (dict(norm=RMSNorm(torch.ones(32), 1e-6, False, True)), "the norm's weight"),
        (dict(residual=torch.zeros(3, 64)), "residual must be"),
        (dict(residual=torch.zeros(2, 64, dtype=torch.float16)), "residual must be"),
        (dict(out=torch.zeros(2, 32)), "out must be"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = dict(x=torch.zeros(2, 64), norm=RMSNorm(torch.ones(64), 1e-6, False, True)) | change
    with pytest.raises(ValueError, match=message):
        rms_norm(arguments.pop("x"), arguments.pop("norm"), **arguments)


def transformers_norm(name, norm, columns):
    """The module that `norm` describes, with its weight."""
    if name == "llama":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as Module
    else:
        from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm as Module
    module = Module(columns, eps=norm.eps).to(norm.weight.device, norm.weight.dtype)
    module.weight.data.copy_(norm.weight)
    return module


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_oracle_is_transformers(name):
    norm = make_norm(name, 64, torch.float16)
    x = random_rows(5, 64, torch.float16)
    with torch.no_grad():
        expected = transformers_norm(name, norm, 64)(x)
    torch.testing.assert_close(reference_layers.rms_norm(x, norm), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("rows, columns", [(1, 4096), (32, 4096), (4, 5120), (300, 576), (9, 16384), (3, 20000)])
def test_transformers_in_bf16(name, rows, columns):
    dtype = torch.bfloat16
    norm = make_norm(name, columns, dtype)
    x, residual = random_rows(rows, columns, dtype), random_rows(rows, columns, dtype)
    module = transformers_norm(name, norm, columns)
    for addend in (None, residual):
        out = torch.full_like(x, torch.nan)
        actual = rms_norm(x, norm, residual=addend, out=out)
        with torch.no_grad():
            expected = module(x if addend is None else addend + x)
        if addend is not None:
            torch.testing.assert_close(actual[1], addend + x, rtol=0, atol=0)
        check(out, expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_misaligned_after_aligned():
    """A kernel compiled for aligned rows must not serve others."""
    norm = make_norm("llama", 4096, torch.bfloat16)
    buffer = random_rows(1, 4100, torch.bfloat16)
    for start in (0, 1, 2, 4, 0):
        x = buffer[:, start : start + 4096]
        check(rms_norm(x, norm), reference_layers.rms_norm(x, norm))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_each_launch_waits_for_the_one_before():
    """A chain in a graph, each launch started while the one before still runs, gives what launches apart give."""
    norm = make_norm("llama", 4096, torch.bfloat16)
    x, residual = random_rows(200, 4096, torch.bfloat16), random_rows(200, 4096, torch.bfloat16)

    def chain(config):
        normed, total = x, residual
        for _ in range(20):
            normed, total = rms_norm(normed, norm, residual=total, config=config)
        return normed, total

    expected = chain(NormConfig(4096, 8, pdl=False))
    chain(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = chain(None)
    for _ in range(5):
        for tensor in actual:
            tensor.fill_(torch.nan)
        graph.replay()
        for ours, theirs in zip(actual, expected):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("columns", [96, 128])
@pytest.mark.parametrize("has_residual", [False, True])
def test_columns_in_another_order(columns, has_residual):
    x = random_rows(3, columns, torch.float16)
    residual = random_rows(3, columns, torch.float16) if has_residual else None
    norm = make_norm("llama", columns, torch.float16)
    perm = torch.randperm(columns, device=DEVICE).int()
    plain, ordered = (rms_norm(x, norm, residual=residual, perm=order) for order in (None, perm))
    if has_residual:
        assert torch.equal(plain[1], ordered[1])
        plain, ordered = plain[0], ordered[0]
    assert torch.equal(ordered, plain[:, perm.long()]) and not torch.equal(ordered, plain)


def test_orders_that_do_not_fit():
    norm = make_norm("llama", 96, torch.float16)
    x = random_rows(3, 96, torch.float16)
    with pytest.raises(ValueError, match=r"perm must be int32 \[96\]"):
        rms_norm(x, norm, perm=torch.arange(96, device=DEVICE))
    long = random_rows(1, 17000, torch.float16)
    with pytest.raises(ValueError, match="at most 16384 columns"):
        rms_norm(long, make_norm("no-weight", 17000, torch.float16), perm=torch.arange(17000, device=DEVICE).int())
