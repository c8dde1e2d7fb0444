import dataclasses

import pytest
import torch
from combinations import few

from hf_turbo.ops import linear as ops
from hf_turbo.ops import reference_linear as reference
from hf_turbo.ops.attention_config import DeviceFacts
from hf_turbo.ops.linear_config import LinearConfig, choose_config
from hf_turbo.ops.norm import rms_norm
from hf_turbo.ops.norm_spec import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GEMV = LinearConfig(block_n=2, block_k=128, num_warps=1)
DOT = LinearConfig(block_n=16, block_k=64, num_warps=4, num_stages=2, dot=True)
SPLIT = dataclasses.replace(DOT, block_k=32, split_k=3)
H200 = DeviceFacts(132, 90, 232448)
SMALLER = DeviceFacts(84, 86, 101376)
# (features, columns, gated) of an 8B and a 135M model.
MODEL_SHAPES = [
    *[(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False)],
    *[(960, 576, False), (576, 576, False), (1536, 576, True), (576, 1536, False), (49152, 576, False)],
]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def random(*shape, dtype):
    return torch.randn(shape, device=DEVICE).to(dtype)


def padded(matrix):
    """The same numbers with NaN after every row and after the last, as nothing may be read there."""
    rows, columns = matrix.shape
    buffer = torch.full((rows + 1, columns + 8), torch.nan, dtype=matrix.dtype, device=DEVICE)
    buffer[:rows, :columns] = matrix
    return buffer[:rows, :columns]


@dataclasses.dataclass
class Case:
    """Inputs of one call, x and the residual as slices of wider rows, as a model's are."""

    x: torch.Tensor
    weights: list
    biases: list | None
    options: dict

    def expected(self):
        return reference.linear(self.x, self.weights, self.biases, **self.options)

    def check(self, config=None):
        """The result is right, and nothing beside it is written."""
        expected = self.expected()
        rows, width = expected.shape
        buffer = torch.full((rows + 2, width + 16), torch.nan, dtype=expected.dtype, device=DEVICE)
        out = buffer[1:-1, 8:-8]
        assert ops.linear(self.x, self.weights, self.biases, **self.options, out=out, config=config) is out
        tolerance = TOLERANCES[expected.dtype]
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        out.fill_(torch.nan)
        assert buffer.isnan().all()


def make_case(rows, k, sizes, dtype=torch.float16, biases="", residual=False, activation=None):
    """`biases` says of each weight whether it has one: "yn"."""
    x = padded(random(rows, k, dtype=dtype))
    weights = [padded((torch.randn(size, k, device=DEVICE) / k**0.5).to(dtype)) for size in sizes]
    bias_list = [random(n, dtype=dtype) if has == "y" else None for n, has in zip(sizes, biases)] if biases else None
    added = random(rows, sum(sizes) + 8, dtype=dtype)[:, :-8] if residual else None
    return Case(x, weights, bias_list, {"residual": added, "activation": activation})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("sizes, biases", [((7,), ""), ((5, 2), "ny"), ((6, 1, 3), "yny")])
def test_few_rows(rows, sizes, biases, dtype):
    make_case(rows, 200, sizes, dtype, biases).check(GEMV)


@pytest.mark.parametrize("config", [DOT, SPLIT])
@pytest.mark.parametrize("rows, k, dtype", [(1, 256, torch.float16), (17, 200, torch.float32), (33, 71, torch.float16)])
@pytest.mark.parametrize("sizes, biases", [((37,), ""), ((16, 5, 20), "yny")])
def test_many_rows(rows, k, sizes, biases, dtype, config):
    make_case(rows, k, sizes, dtype, biases).check(config)


@pytest.mark.parametrize(
    "biases, activation, config", few(["", "ny"], ["silu", "gelu", "gelu_tanh"], [GEMV, DOT, SPLIT], together=2)
)
def test_gated(activation, biases, config):
    case = make_case(3, 200, (21, 21), torch.float32, biases, activation=activation)
    case.x *= 4  # to where the activations bend and saturate
    case.check(config)


@pytest.mark.parametrize("config", [GEMV, DOT, SPLIT])
def test_gate_is_rounded_before_and_after_its_activation(config):
    case = make_case(4, 64, (80, 80), activation="silu", biases="yy")
    case.check(config)
    out = ops.linear(case.x, case.weights, case.biases, activation="silu", config=config)
    gate, up = (case.x.float() @ w.float().T + b.float() for w, b in zip(case.weights, case.biases))
    unrounded = (torch.nn.functional.silu(gate) * up).half()
    mismatches = [(out != other).float().mean() for other in (case.expected(), unrounded)]
    assert mismatches[0] < 0.02 < 0.1 < mismatches[1]


@pytest.mark.parametrize("config", [GEMV, DOT, SPLIT])
def test_residual(config):
    case = make_case(5, 200, (21,), residual=True, biases="y")
    case.check(config)
    expected = case.expected()
    residual = case.options["residual"]
    ops.linear(case.x, case.weights, case.biases, residual=residual, out=residual, config=config)
    torch.testing.assert_close(residual, expected, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("k", [136, 2056])
@pytest.mark.parametrize(
    "rows, options", [(1, {}), (2, {"biases": "y"}), (4, {"residual": True}), (20, {"biases": "y"})]
)
def test_the_tables_configuration(rows, options, k):
    make_case(rows, k, (9,), **options).check()


@pytest.mark.parametrize("config", [GEMV, DOT, SPLIT])
def test_a_row_does_not_depend_on_the_others(config):
    case = make_case(8, 200, (19,), torch.float32)
    together = ops.linear(case.x, case.weights, config=config)
    for row in (0, 3, 7):
        alone = ops.linear(case.x[row : row + 1], case.weights, config=config)
        torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=1e-6)


def test_weights_with_gaps_between_rows():
    case = make_case(2, 64, (6, 4))
    whole = random(10, 72, dtype=torch.float16)
    case.weights = [whole[:6, :64], whole[6:, :64]]
    case.check(GEMV)
    case.check(DOT)


def test_refuses_what_it_cannot_do():
    case = make_case(2, 64, (6, 4))
    x, weights = case.x, case.weights
    with pytest.raises(ValueError, match="x must be"):
        ops.linear(x[0], weights)
    with pytest.raises(ValueError, match="1 to 64 rows"):
        ops.linear(x.new_zeros(65, 64), weights)
    with pytest.raises(ValueError, match="last stride of 1"):
        ops.linear(x, [weights[0].T.contiguous().T])
    with pytest.raises(ValueError, match="1 to 3 weights"):
        ops.linear(x, weights * 2)
    with pytest.raises(ValueError, match="weights must be"):
        ops.linear(x, [weights[0].float()])
    with pytest.raises(ValueError, match="same row stride"):
        ops.linear(x, [weights[0], random(4, 80, dtype=x.dtype)[:, :64]])
    with pytest.raises(ValueError, match="one \\(or None\\) a weight"):
        ops.linear(x, weights, [None])
    with pytest.raises(ValueError, match="bias must be"):
        ops.linear(x, weights, [None, weights[0][0]])
    with pytest.raises(ValueError, match="of one size"):
        ops.linear(x, weights, activation="silu")
    with pytest.raises(ValueError, match="one of"):
        ops.linear(x, [weights[0]] * 2, activation="relu")
    with pytest.raises(ValueError, match="takes one weight"):
        ops.linear(x, weights, residual=x[:, :10])
    with pytest.raises(ValueError, match="out must be"):
        ops.linear(x, weights, out=x)


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(ops, "device_facts", lambda device: H200)


def supports(weights, rows=1, dtype=torch.bfloat16, device="cuda", activation=False):
    return ops.supports(rows, weights, dtype, torch.device(device), activation=activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_supports_what_was_measured(rows, dtype, on_h200):
    weights = torch.empty(3, 8, 8, dtype=dtype)
    assert supports([*weights], rows, dtype)
    assert supports([*weights[:2]], rows, dtype, activation=True)


@pytest.mark.usefixtures("on_h200")
def test_supports_nothing_that_the_kernels_do_not_take():
    weight = torch.empty(8, 8, dtype=torch.bfloat16)
    assert supports([weight])
    assert not supports([weight], rows=0)
    assert not supports([weight], rows=65)
    assert not supports([])
    assert not supports([weight] * 4)
    assert not supports([weight.float()])
    assert not supports([weight.mT])
    assert not supports([weight, torch.empty(8, 16, dtype=torch.bfloat16)[:, :8]])
    assert supports([weight, weight[:4]])
    assert not supports([weight, weight[:4]], activation=True)


def test_supports_nothing_that_was_not_measured(on_h200, monkeypatch):
    weight = torch.empty(8, 8)
    assert not supports([weight], dtype=torch.float32)
    assert supports([weight.bfloat16()])
    assert not supports([weight.bfloat16()], device="cpu")
    monkeypatch.setattr(ops, "device_facts", lambda device: dataclasses.replace(H200, capability=80))
    assert not supports([weight.bfloat16()])


def is_power_of_2(size):
    return size > 0 and size & (size - 1) == 0


@pytest.mark.parametrize("features, k, gated", MODEL_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("facts", [H200, SMALLER])
def test_the_table_fits_the_device(facts, dtype, features, k, gated):
    for rows in range(1, 65):
        config = choose_config(rows, features, k, gated, dtype, facts)
        assert (config.dot or rows <= 2) and config.pdl == (facts.capability >= 90)
        for size in (config.block_n, config.block_k, config.num_warps):
            assert is_power_of_2(size)
        if config.direct:
            check_direct_config(config, rows, features, k, gated, dtype, facts)
        elif config.dot:
            check_dot_config(config, rows, gated, dtype, facts)
        else:
            # Every thread loads whole pieces of 16 bytes of a row.
            assert config.block_k * dtype.itemsize % (16 * 32 * config.num_warps) == 0
            assert config.split_k == 1 and config.prefetch == 0


def check_direct_config(config, rows, features, k, gated, dtype, facts):
    """All of a warp's numbers fit into its registers, and all warps into those of the device."""
    assert dtype != torch.float32
    assert config.block_n >= (16 if config.weights_first else 8)
    tile_rows = 8 if config.weights_first else next(padded for padded in (16, 32) if padded >= rows)
    columns = -(-k // (32 * config.num_warps)) * 32
    registers = (tile_rows + config.block_n * (2 if gated else 1)) * columns * dtype.itemsize // (4 * 32)
    assert registers <= 192  # and at most 40 more, as compiled
    programs = -(-features // config.block_n) * -(-rows // tile_rows)
    a_multiprocessor = -(-programs // facts.num_sms)
    assert a_multiprocessor <= 2
    assert a_multiprocessor * config.num_warps * 32 * (registers + 40) <= 65536


def check_dot_config(config, rows, gated, dtype, facts):
    """Tiles that a tensor core takes, at least two of them in flight, and all in shared memory."""
    padded_rows = next(padded for padded in (16, 32, 64) if padded >= rows)
    tile_rows = padded_rows + config.block_n * (2 if gated else 1)
    assert config.block_n >= 16 and config.block_k >= 16
    assert config.num_stages >= 2 and config.split_k >= 1
    assert config.num_stages * tile_rows * config.block_k * dtype.itemsize <= facts.shared_memory
    lines, rest = divmod(config.prefetch * dtype.itemsize, 128)
    assert rest == 0 and (lines == 0 or is_power_of_2(lines))


# Warps a program by rows, which of them put all rows into a program, as measured.
@pytest.mark.parametrize(
    "features, k, gated, warps, together",
    [(960, 576, False, (4, 2, 2), False), (1536, 576, True, (4, 2, 4), True), (576, 1536, False, (8, 4, 8), False)],
)
def test_short_linears_go_straight_into_registers(features, k, gated, warps, together):
    choices = [choose_config(rows, features, k, gated, torch.float16, H200) for rows in (1, 2, 8, 9, 16, 17, 32, 33)]
    assert [config.direct for config in choices] == [False, *[True] * 6, False]
    assert [config.num_warps for config in choices[1:7]] == [size for size in warps for _ in range(2)]
    assert [config.weights_first for config in choices[1:7]] == [True] * 4 + [not together] * 2
    assert not choose_config(2, features, k, gated, torch.float32, H200).direct
    assert not choose_config(8, features, k + 1, gated, torch.float16, H200).direct
    assert not choose_config(8, 8192, k, gated, torch.float16, H200).direct
    assert not choose_config(2, 8192, k, gated, torch.float16, H200).dot


@pytest.mark.parametrize("stages, shared_memory", [(3, 232448), (3, 110592), (2, 110591), (2, 65536)])
def test_stages_go_first_where_shared_memory_is_short(stages, shared_memory):
    facts = dataclasses.replace(H200, shared_memory=shared_memory)
    config = choose_config(8, 14336, 4096, True, torch.bfloat16, facts)  # 36,864 bytes a stage
    assert config == dataclasses.replace(choose_config(8, 14336, 4096, True, torch.bfloat16, H200), num_stages=stages)


@pytest.mark.parametrize("dtype, id_type", [(torch.float32, torch.int64), (torch.float16, torch.int32)])
@pytest.mark.parametrize("repeat, with_bias", [(1, True), (2, False)])
def test_experts(repeat, with_bias, id_type, dtype):
    x = random(6 // repeat, 200, dtype=dtype)
    weight = (random(4, 12, 208, dtype=dtype) / 14)[:, 1:10, :200]
    ids = torch.tensor([3, 0, 4, 2, -1, 0], device=DEVICE, dtype=id_type)
    bias = random(4, 12, dtype=dtype)[:, :9] if with_bias else None
    if repeat == 1:
        x[[2, 4]] = torch.nan  # rows of padding hold anything
    out = torch.full((6, 9), torch.nan, dtype=dtype, device=DEVICE)
    ops.expert_linear(x, weight, ids, bias=bias, repeat=repeat, out=out, config=GEMV)
    expected = torch.zeros_like(out)
    for row, expert in enumerate(ids.tolist()):
        if 0 <= expert < 4:
            product = x[row // repeat].float() @ weight[expert].float().T
            expected[row] = (product + bias[expert] if with_bias else product).to(dtype)
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert not out[[2, 4]].any()
    by_reference = reference.expert_linear(x, weight, ids, bias=bias, repeat=repeat)
    torch.testing.assert_close(by_reference, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    by_table = ops.expert_linear(x, weight, ids, bias=bias, repeat=repeat)
    torch.testing.assert_close(by_table, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_experts_refuse():
    x, weight = random(3, 16, dtype=torch.float32), random(2, 4, 16, dtype=torch.float32)
    ids = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="expert_ids"):
        ops.expert_linear(x, weight, ids.float())
    with pytest.raises(ValueError, match="repeat"):
        ops.expert_linear(x, weight, ids, repeat=2)
    with pytest.raises(ValueError, match="x must be"):
        ops.expert_linear(x[:2], weight, ids)
    with pytest.raises(ValueError, match="last stride of 1"):
        ops.expert_linear(x, weight.mT.contiguous().mT, ids)
    assert ops.expert_linear(x[:0], weight, ids[:0]).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 33, 64])
@pytest.mark.parametrize("k", [576, 1001, 4096])
def test_on_the_device(rows, k, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    make_case(rows, k, (k, 130, 77), dtype, "yny").check()
    make_case(rows, k, (1000, 1000), dtype, activation="silu").check()
    make_case(rows, k, (515,), dtype, residual=True).check()


@pytest.mark.gpu
def test_alignment_is_part_of_what_is_compiled():
    aligned = make_case(1, 512, (64,), torch.bfloat16)
    aligned.check()
    shifted = make_case(1, 512, (64,), torch.bfloat16)
    shifted.weights = [torch.cat([w.flatten(), w[0]])[1:-511].view(64, 512) for w in shifted.weights]
    shifted.x = torch.cat([shifted.x, shifted.x], 1)[:, 3:515]
    shifted.check()


def check_replays(run):
    """A chain of launches, each of which reads what the one before wrote, in a graph: as with a wait after each."""
    expected = run(torch.cuda.synchronize)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(lambda: None)
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 24])
def test_dependent_launches_in_a_graph(rows):
    """A chain in which every kernel reads what the one before wrote, captured, replayed, against one by one."""
    hidden, inner, layers = 1024, 2048, 12
    down = [make_case(rows, inner, (hidden,), torch.bfloat16).weights for _ in range(layers)]
    up = [make_case(rows, hidden, (inner, inner), torch.bfloat16).weights for _ in range(layers)]
    start = random(rows, hidden, dtype=torch.bfloat16)
    norm = RMSNorm(None, 1e-5)

    def run(after_each):
        x = start
        for up_weights, down_weights in zip(up, down):
            normed = rms_norm(x, norm)
            after_each()
            inside = ops.linear(normed, up_weights, activation="silu")
            after_each()
            x = ops.linear(inside, down_weights, residual=x)
            after_each()
        return x

    check_replays(run)
