import dataclasses

import pytest
import torch
from test_linear import DEVICE, GEMV, H200, MODEL_SHAPES, make_case
from test_norm import NORMS, make_norm

from hf_turbo.ops import linear as ops
from hf_turbo.ops import reference_layers
from hf_turbo.ops import reference_linear as reference
from hf_turbo.ops.linear_config import LinearConfig, choose_config, norm_is_faster_within
from hf_turbo.ops.norm import rms_norm
from hf_turbo.ops.norm_spec import RMSNorm

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


WHOLE_ROWS = LinearConfig(block_n=16, block_k=256, num_warps=1)


def poisoned(norm):
    """The norm with NaN after its weight, as nothing may be read there."""
    if norm.weight is None:
        return norm
    k = len(norm.weight)
    weight = torch.full((k + 8,), torch.nan, dtype=norm.weight.dtype, device=norm.weight.device)
    weight[:k] = norm.weight
    return RMSNorm(weight[:k], norm.eps, norm.plus_one, norm.round_first)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("config", [*CONFIGS, WHOLE_ROWS])
def test_a_norm_within_rounds_as_one_before(config, name):
    """Right, and nearly everywhere the same as after the norm's own kernel: a rounding too many or too few changes a
    tenth of what is multiplied and so a part of the results, another order of summation next to nothing.
    """
    rows = 2 if config is WHOLE_ROWS else 9
    norm = poisoned(make_norm(name, 200, torch.float16))
    case = make_case(rows, 200, (50, 16), biases="ny")
    case.x *= torch.logspace(-1, 1, rows, device=case.x.device)[:, None]  # each row has a scale of its own
    within = ops.linear(case.x, case.weights, case.biases, norm=norm, config=config)
    expected = reference.linear(reference_layers.rms_norm(case.x, norm), case.weights, case.biases)
    torch.testing.assert_close(within, expected, rtol=3e-3, atol=3e-3)
    before = ops.linear(rms_norm(case.x, norm), case.weights, case.biases, config=config)
    assert (within != before).float().mean() < 0.02


@pytest.mark.parametrize("config", [*CONFIGS, WHOLE_ROWS])
@pytest.mark.parametrize("options", [{"activation": "silu", "biases": "ny"}, {"residual": True}])
def test_a_norm_and_what_comes_after(config, options):
    case = make_case(2, 71, (21, 21) if "activation" in options else (21,), **options)
    case.options["norm"] = poisoned(make_norm("llama", 71, torch.float16))
    case.check(config)


def test_a_norm_of_each_row_by_itself():
    """Rows beyond the last and rows of NaN leave the others alone."""
    for config in CONFIGS:
        case = make_case(9, 200, (19,))
        norm = make_norm("gemma", 200, torch.float16)
        together = ops.linear(case.x, case.weights, norm=norm, config=config)
        case.x[:3] = torch.nan
        case.x[4:] = torch.nan
        assert torch.equal(ops.linear(case.x, case.weights, norm=norm, config=config)[3], together[3])


def test_no_norm_where_a_program_has_no_whole_rows():
    case, norm = make_case(2, 200, (6,)), make_norm("llama", 200, torch.float16)
    for config in (GEMV, LinearConfig(block_n=16, block_k=256, num_warps=4, num_stages=2, dot=True)):
        with pytest.raises(ValueError, match="take no norm along"):
            ops.linear(case.x, case.weights, norm=norm, config=config)
    with pytest.raises(ValueError, match="norm's weight"):
        ops.linear(case.x, case.weights, norm=make_norm("llama", 64, torch.float16), config=FEATURES_FIRST)


def with_norm(rows, features, k, gated, dtype=torch.bfloat16, facts=H200):
    return norm_is_faster_within(rows, features, k, gated, dtype, facts)


def test_which_norms_go_within():
    for shape in ((960, 576, False), (1536, 576, True)):
        assert all(with_norm(rows, *shape) for rows in range(1, 17))
        assert not any(with_norm(rows, *shape) for rows in range(33, 65))
        assert not any(with_norm(rows, *shape, torch.float32) for rows in range(1, 65))
        assert not with_norm(8, shape[0], 577, shape[2])
    assert all(with_norm(rows, 960, 576, False) for rows in range(17, 33))
    assert not with_norm(17, 1536, 576, True)  # more programs than run at once
    assert not with_norm(1, 4864, 896, True)  # the same
    assert not with_norm(1, 1024, 1032, False)
    for shape in MODEL_SHAPES[:5]:
        assert not any(with_norm(rows, *shape) for rows in range(1, 65))


def test_whose_table_is_asked(monkeypatch):
    """By the gate alone where there is one, else by all features; and the configuration is one for a norm."""
    taken = []
    monkeypatch.setattr(ops, "device_facts", lambda device: H200)
    monkeypatch.setattr(ops, "_choose_run", lambda config: taken.append(config) or (lambda operands: None))
    weights = torch.empty(2, 1536, 576, dtype=torch.bfloat16, device=DEVICE)
    for rows in (1, 16, 17, 32, 33):
        assert ops.supports_norm(rows, [*weights], weights.device, activation=True) == (rows <= 16)
        assert ops.supports_norm(rows, [weights[0, :960]], weights.device, activation=False) == (rows <= 32)
        assert not ops.supports_norm(rows, [weights[0, :, :128], weights[1, :, :128]], weights.device, activation=False)
    norm, x = make_norm("llama", 576, torch.bfloat16), weights[0, :16]
    ops.linear(x, [*weights], activation="silu", norm=norm)
    ops.linear(x, [*weights], activation="silu")
    table = [choose_config(16, 1536, 576, True, torch.bfloat16, H200, norm) for norm in (True, False)]
    assert taken == table and table[0] != table[1]


@pytest.mark.parametrize("config, launch", [(FEATURES_FIRST, "_launch_rows"), (WHOLE_ROWS, "_launch_gemv")])
def test_norms_that_need_other_kernels(config, launch, monkeypatch):
    keys = []
    monkeypatch.setattr(ops, launch, lambda key, *args, **options: keys.append(key))
    case, weight = make_case(2, 200, (6,)), torch.zeros(201, dtype=torch.float16, device=DEVICE)
    other = [None, RMSNorm(weight[:200], 1e-3), RMSNorm(weight[1:], 1e-3)]  # none, and one that is not aligned
    for norm in [*other, *(make_norm(name, 200, torch.float16) for name in NORMS if name != "llama")]:
        ops.linear(case.x, case.weights, norm=norm, config=config)
    assert len(set(keys)) == len(keys) == 7
    ops.linear(case.x, case.weights, norm=RMSNorm(weight[:200], 1e-6), config=config)
    assert keys[-1] == keys[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 4, 9, 16, 27, 32])
@pytest.mark.parametrize("name", NORMS)
def test_norms_within_on_the_device(name, rows, dtype):
    """As the table has it for an H200."""
    norm, pdl = poisoned(make_norm(name, 576, dtype)), torch.cuda.get_device_capability() >= (9, 0)
    for sizes, activation in (((576, 192, 192), None), ((1536, 1536), "silu")):
        features, gated = sizes[0] if activation else sum(sizes), activation is not None
        if with_norm(rows, features, 576, gated, dtype):
            case = make_case(rows, 576, sizes, dtype, activation=activation)
            case.options["norm"] = norm
            config = choose_config(rows, features, 576, gated, dtype, H200, norm=True)
            case.check(dataclasses.replace(config, pdl=pdl))
