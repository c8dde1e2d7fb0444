import pytest
import torch
from test_linear import make_case

from hf_turbo.ops import linear as ops
from hf_turbo.ops.linear_config import LinearConfig

FEATURES_FIRST = LinearConfig(block_n=16, block_k=32, num_warps=2, dot=True, direct=True)
ROWS_FIRST = LinearConfig(block_n=8, block_k=32, num_warps=2, dot=True, direct=True, weights_first=False)
# More threads than outputs.
MANY_WARPS = LinearConfig(block_n=16, block_k=32, num_warps=8, dot=True, direct=True)
CONFIGS = [FEATURES_FIRST, ROWS_FIRST, MANY_WARPS]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows, k", [(1, 256), (5, 71), (17, 200)])
def test_straight_from_memory(rows, k, config):
    make_case(rows, k, (37,)).check(config)
    make_case(rows, k, (16, 5, 20), biases="yny").check(config)
    make_case(rows, k, (21, 21), activation="silu", biases="ny").check(config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [5, 17])
def test_residual_in_place(rows, config):
    case = make_case(rows, 200, (21,), residual=True, biases="y")
    case.check(config)
    expected, residual = case.expected(), case.options["residual"]
    ops.linear(case.x, case.weights, case.biases, residual=residual, out=residual, config=config)
    torch.testing.assert_close(residual, expected, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_row_does_not_depend_on_the_others(config):
    case = make_case(9, 200, (19,))
    together = ops.linear(case.x, case.weights, config=config)
    case.x[:3] = torch.nan
    case.x[4:] = torch.nan
    assert torch.equal(ops.linear(case.x, case.weights, config=config)[3], together[3])


def test_fp32_would_lose_digits():
    case = make_case(2, 64, (6,), torch.float32)
    with pytest.raises(ValueError, match="fp32"):
        ops.linear(case.x, case.weights, config=FEATURES_FIRST)
