import pytest
import torch

from hf_turbo.ops import reference_layers
from hf_turbo.ops.activation import KINDS, gated

# The interpreter's, of an exponential that is meant to.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_halves(rows, columns, dtype):
    """Gate and up as the halves of one projection, of both signs and up to where the activations saturate."""
    both = torch.randn(rows, 2 * columns, device=DEVICE) * 4
    return both.to(dtype).chunk(2, -1)


def check(actual, expected):
    """Within a unit in the last place of the activation, which is rounded before it is multiplied, and of the result.

    Torch's own activations cancel where they are nearly zero, so small results may differ by 1e-6.
    """
    eps = torch.finfo(expected.dtype).eps
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=8 * eps, atol=4e-6)
    else:
        torch.testing.assert_close(actual, expected, rtol=2 * eps, atol=4e-6)
        assert (actual != expected)[expected.abs() > 0.01].float().mean() < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows, columns", [(1, 96), (3, 2500), (2, 40)])
def test_kinds(kind, dtype, rows, columns):
    gate, up = random_halves(rows, columns, dtype)
    buffer = torch.full((rows, columns + 16), torch.nan, dtype=dtype, device=DEVICE)
    out = gated(gate, up, kind, out=buffer[:, 8:-8])
    check(out, reference_layers.gated(gate, up, kind))
    assert buffer[:, :8].isnan().all() and buffer[:, -8:].isnan().all()
    check(gated(gate, up, kind), out)


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind):
    gate = torch.tensor([[-60000.0, -300.0, -90.0, -1e-7, 0.0, 1e-7, 90.0, 300.0, 60000.0]], device=DEVICE)
    up = torch.ones_like(gate)
    torch.testing.assert_close(gated(gate, up, kind), reference_layers.gated(gate, up, kind), rtol=1e-6, atol=1e-12)


def test_in_place():
    gate, up = random_halves(2, 64, torch.float16)
    expected = reference_layers.gated(gate, up, "silu")
    assert gated(gate, up, "silu", out=gate) is gate
    check(gate, expected)


def test_no_rows():
    gate, up = random_halves(0, 64, torch.float16)
    assert gated(gate, up, "silu").shape == (0, 64)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kind="relu"), "kind must be one of silu"),
        (dict(gate=torch.zeros(2, 3, 8)), "gate must be"),
        (dict(gate=torch.zeros(2, 8, dtype=torch.int32)), "gate must be"),
        (dict(up=torch.zeros(2, 4)), "up must be"),
        (dict(up=torch.zeros(2, 8, dtype=torch.float16)), "up must be"),
        (dict(gate=torch.zeros(8, 2).T), "gate must be"),
        (dict(out=torch.zeros(3, 8)), "out must be"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = dict(gate=torch.zeros(2, 8), up=torch.zeros(2, 8), kind="silu", out=None) | change
    with pytest.raises(ValueError, match=message):
        gated(arguments["gate"], arguments["up"], arguments["kind"], out=arguments["out"])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("kind, name", [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")])
@pytest.mark.parametrize("rows, columns", [(1, 14336), (4, 1536), (32, 14336), (1000, 5504)])
def test_transformers_in_bf16(kind, name, rows, columns):
    from transformers.activations import ACT2FN

    gate, up = random_halves(rows, columns, torch.bfloat16)
    out = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    gated(gate, up, kind, out=out)
    check(out, ACT2FN[name](gate) * up)
