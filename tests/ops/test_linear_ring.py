"""Linears by a ring of stages, which the interpreter does not know: the oracle on a GPU, the table anywhere."""

import dataclasses
import sys

import pytest
import torch
import triton
from test_linear import H200, Case, check_replays, make_case, random

from hf_turbo.ops import linear as ops
from hf_turbo.ops.linear_config import LinearConfig, choose_config, multiplies_together, ring_rows, takes_norm

#: (features, columns, gated) of models from 1B to 70B.
SHAPES = [
    *[(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False)],
    *[(3072, 2048, False), (2048, 8192, False), (10240, 2560, True), (2560, 10240, False), (262208, 2560, False)],
    *[(10240, 8192, False), (8192, 8192, False), (28672, 8192, True), (8192, 28672, False), (3584, 18944, False)],
]
FEW = LinearConfig(block_n=32, block_k=128, num_warps=2, num_stages=3, dot=True, ring=True, pdl=True)
ONE_WARP = LinearConfig(block_n=16, block_k=256, num_warps=1, num_stages=4, dot=True, ring=True, pdl=True)
WIDE = LinearConfig(block_n=128, block_k=128, num_warps=8, num_stages=3, dot=True, ring=True, pdl=True)
TOGETHER = LinearConfig(block_n=64, block_k=128, num_warps=4, num_stages=3, dot=True, ring=True, pdl=True)
SHARES = dataclasses.replace(TOGETHER, split_k=2, num_stages=2)


def suited(matrix):
    """The same numbers with NaN after every row and after the last, rows at multiples of 32 bytes."""
    rows, columns = matrix.shape
    buffer = torch.full((rows + 1, columns + 16), torch.nan, dtype=matrix.dtype, device=matrix.device)
    buffer[:rows, :columns] = matrix
    return buffer[:rows, :columns]


def make_ring_case(rows, k, sizes, dtype=torch.bfloat16, **options) -> Case:
    case = make_case(rows, k, sizes, dtype, **options)
    case.x, case.weights = suited(case.x), [suited(weight) for weight in case.weights]
    return case


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("config", [FEW, ONE_WARP, WIDE, TOGETHER, SHARES])
def test_on_the_device(config, rows, dtype):
    if multiplies_together(config, 9) or rows <= 16:
        make_ring_case(rows, 1024, (300, 130, 77), dtype, biases="yny").check(config)
        make_ring_case(rows, 1024, (200, 200), dtype, biases="ny", activation="silu").check(config)
        make_ring_case(rows, 1536, (515,), dtype, residual=True).check(config)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 12, 24, 64])
@pytest.mark.parametrize("features, k, gated", [(4096, 2560, True), (4096, 10240, False), (6144, 2048, False)])
def test_the_tables_configuration(rows, features, k, gated):
    assert choose_config(rows, features, k, gated, torch.bfloat16, H200, rings=True).ring
    options = {"activation": "gelu_tanh"} if gated else {"residual": True}
    make_ring_case(rows, k, (features, features) if gated else (features,), **options).check()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [FEW, ONE_WARP, TOGETHER, SHARES])
def test_a_row_does_not_depend_on_the_others(config):
    case = make_ring_case(9, 1024, (190,))
    together = ops.linear(case.x, case.weights, config=config)
    case.x[:3] = torch.nan
    case.x[4:] = torch.nan
    assert torch.equal(ops.linear(case.x, case.weights, config=config)[3], together[3])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 16, 32, 64])
def test_x_is_waited_for_in_a_graph(rows):
    """Each reads what the one before wrote; weights are on their way before that."""
    layers, hidden = 16, 2048
    weights = [make_ring_case(rows, hidden, (hidden,)).weights for _ in range(layers)]
    start = random(rows, hidden, dtype=torch.bfloat16)
    config = TOGETHER if rows > 8 else ONE_WARP

    def run(after_each):
        x = start
        for weight in weights:
            x = ops.linear(x, weight, residual=x, config=config)
            after_each()
        return x

    check_replays(run)


@pytest.mark.parametrize("features, k, gated", SHAPES)
def test_the_table_fits_the_device(features, k, gated):
    configs = [choose_config(rows, features, k, gated, torch.bfloat16, H200, rings=True) for rows in range(1, 65)]
    assert not configs[0].ring and configs[7].ring == (features <= 8448 or features > 16896 or gated)
    for rows, config in enumerate(configs, start=1):
        if config.ring:
            check_ring(config, rows, k, gated)


def check_ring(config, rows, k, gated):
    assert config.dot and not config.direct and config.pdl
    steps, left = divmod(k, config.block_k * config.split_k)
    assert left == 0 and 2 <= config.num_stages <= steps
    stage_rows = ring_rows(rows) + config.block_n * (2 if gated else 1)
    assert config.num_stages * stage_rows * config.block_k * 2 <= H200.shared_memory
    # Each warp has 16 features at least, and more rows than 16 take a warp group.
    assert config.block_n % (16 * config.num_warps) == 0
    assert rows <= 16 or multiplies_together(config, rows)
    assert not multiplies_together(config, rows) or config.block_n % 64 == 0


@pytest.mark.parametrize(
    "k, dtype, facts",
    [
        (4096 + 64, torch.bfloat16, H200),
        (4096, torch.float32, H200),
        (4096, torch.bfloat16, dataclasses.replace(H200, capability=100)),
        (4096, torch.bfloat16, dataclasses.replace(H200, capability=80)),
    ],
)
def test_no_ring_for_other_columns_dtypes_and_devices(k, dtype, facts):
    assert not any(choose_config(rows, 4096, k, True, dtype, facts, rings=True).ring for rows in range(1, 65))
    assert choose_config(4, 4096, 4096, True, torch.bfloat16, H200, rings=True).ring
    assert not choose_config(4, 4096, 4096, True, torch.bfloat16, H200).ring


def test_no_ring_where_a_norm_is_taken_along():
    """What `norm_is_faster_within` has found must be what is launched."""
    shape = (2, 5000, 1024, True, torch.bfloat16, H200)
    assert choose_config(*shape, rings=True).ring
    assert takes_norm(choose_config(*shape, norm=True, rings=True), 1024)


@pytest.mark.parametrize("side", ["x", "weight"])
@pytest.mark.parametrize("change", ["row", "start"])
def test_what_is_not_aligned_has_no_ring(side, change):
    case = make_ring_case(3, 256, (32,), torch.float16)
    assert ops._suits_ring(case.x, case.weights)
    tensor = case.x if side == "x" else case.weights[0]
    buffer = torch.empty(40, 300, dtype=tensor.dtype, device=tensor.device)
    place = buffer[:, :256] if change == "row" else buffer.flatten()[1:].as_strided((40, 256), (288, 1))
    place[: len(tensor)] = tensor
    moved = place[: len(tensor)]
    case.x, case.weights = (moved, case.weights) if side == "x" else (case.x, [moved])
    assert not ops._suits_ring(case.x, case.weights)
    with pytest.raises(ValueError, match="multiples of 32 bytes"):
        ops.linear(case.x, case.weights, config=FEW)
    case.check()


def test_refuses_columns_that_are_not_whole_steps():
    case = make_ring_case(3, 192, (32,))
    with pytest.raises(ValueError, match="multiple of 128"):
        ops.linear(case.x, case.weights, config=FEW)


@pytest.mark.parametrize("num_stages", [1, 4, 5])
def test_refuses_stages_without_columns(num_stages):
    """Of two steps: one stage would never be waited for, and with four weights are read behind the last."""
    case = make_ring_case(3, 256, (32,))
    with pytest.raises(ValueError, match="2 to 3 stages"):
        ops.linear(case.x, case.weights, config=dataclasses.replace(FEW, num_stages=num_stages))


@pytest.fixture
def with_triton(monkeypatch):
    """The module anew, as of another version of Triton."""

    def load(version):
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.delitem(sys.modules, "hf_turbo.ops.linear_ring", raising=False)
        ops._ring_launcher.cache_clear()

    yield load
    ops._ring_launcher.cache_clear()


@pytest.mark.parametrize("version, known", [("3.5.1", False), ("3.6.0", True), ("3.9.0+git1", True), ("3.10.0", False)])
def test_only_versions_whose_gluon_is_known(version, known, with_triton):
    with_triton(version)
    assert (ops._ring_launcher() is not None) == known


def test_a_ring_that_is_asked_for_and_not_there_is_an_error(with_triton):
    with_triton("3.5.1")
    case = make_ring_case(3, 256, (32,), torch.float16)
    with pytest.raises(NotImplementedError, match="Gluon"):
        ops.linear(case.x, case.weights, config=FEW)
    case.check()
