"""Linears of a few rows, as decode steps have (Triton): bound by reading the weights, once, at full speed.

One launch serves several weights with the same input (q/k/v; gate and up), which stay separate tensors. A bias, an
activation between gate and up, and a residual after are folded in: each would be a launch of its own, and at batch 1 a
launch costs as much as a small linear. So is an RMS norm before, where the table says so: every program repeats it,
which for short rows takes less than a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import torch

from .attention_config import ceil_div, device_facts, next_power_of_2
from .launch import Launcher
from .linear_config import (
    DIRECT_GROUP,
    MAX_ROWS,
    LinearConfig,
    choose_config,
    choose_expert_config,
    is_faster,
    multiplies_together,
    norm_is_faster_within,
    ring_rows,
    takes_norm,
)
from .linear_kernels import add_splits_kernel, dot_kernel, expert_kernel, gemv_kernel
from .linear_rows import LAST_FIRST, linear_rows_kernel
from .norm import check_norm, norm_constants
from .norm_spec import RMSNorm

#: Outputs a program of the kernel that adds the splits.
MERGE_BLOCK = 256

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_launch_gemv = Launcher(gemv_kernel)
_launch_dot = Launcher(dot_kernel)
_launch_rows = Launcher(linear_rows_kernel)
_launch_add_splits = Launcher(add_splits_kernel)
_launch_expert = Launcher(expert_kernel)


@cache
def _ring_launcher() -> Launcher | None:
    """None where this Triton has no Gluon, or one that is not known."""
    try:
        return Launcher(import_module(".linear_ring", __package__).linear_ring_kernel)
    except (ImportError, AttributeError):
        return None


def _check(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    rows, k = x.shape
    sizes = [len(weight) for weight in weights]
    if not 1 <= rows <= MAX_ROWS or x.stride(1) != 1:
        raise ValueError(f"x must have 1 to {MAX_ROWS} rows and a last stride of 1, got {list(x.shape)}, {x.stride()}")
    if not 1 <= len(weights) <= 3:
        raise ValueError(f"one launch takes 1 to 3 weights, got {len(weights)}")
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != k or weight.dtype != x.dtype or weight.stride(1) != 1:
            raise ValueError(
                f"weights must be [N, {k}], {x.dtype}, with a last stride of 1, "
                f"got {list(weight.shape)}, {weight.dtype}, strides {weight.stride()}"
            )
    if len({weight.stride(0) for weight in weights}) > 1:
        raise ValueError(f"all weights must have the same row stride, got {[weight.stride(0) for weight in weights]}")
    if len(biases) != len(weights):
        raise ValueError(f"biases must be None or one (or None) a weight, got {len(biases)} for {len(weights)} weights")
    for bias, size in zip(biases, sizes, strict=True):
        if bias is not None and (bias.shape != (size,) or bias.dtype != x.dtype or bias.stride(0) != 1):
            raise ValueError(f"a bias must be [{size}], {x.dtype}, contiguous, got {list(bias.shape)}, {bias.dtype}")
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be None or one of {ACTIVATIONS}, got {activation!r}")
        if len(sizes) != 2 or sizes[0] != sizes[1] or residual is not None:
            raise ValueError("an activation takes two weights of one size, gate and up, and no residual")
    if residual is not None and len(weights) != 1:
        raise ValueError(f"a residual takes one weight, got {len(weights)}")
    width = sizes[0] if activation is not None else sum(sizes)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None and (tensor.shape != (rows, width) or tensor.dtype != x.dtype or tensor.stride(1) != 1):
            raise ValueError(
                f"{name} must be {[rows, width]}, {x.dtype}, with a last stride of 1, "
                f"got {list(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
            )


class _Operands:
    """The kernels' arguments, by kind and in their order, and what they are compiled for.

    A tensor that is absent is replaced by x, of the same dtype, and not read.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        residual: torch.Tensor | None,
        activation: str | None,
        norm: RMSNorm | None,
        out: torch.Tensor,
        config: LinearConfig,
    ) -> None:
        rows, k = x.shape
        missing = 3 - len(weights)
        sizes = [len(weight) for weight in weights]
        self.x, self.out, self.config = x, out, config
        self.rows, self.k = rows, k
        self.weights = (*weights, *[x] * missing)
        self.biases = (*(x if bias is None else bias for bias in biases), *[x] * missing)
        self.residual = x if residual is None else residual
        self.norm_weight = x if norm is None or norm.weight is None else norm.weight
        self.eps = 0.0 if norm is None else float(norm.eps)
        self.sizes = (*sizes, *[0] * missing)
        # The rows of each weight, and how many of them have a bias.
        self.bounds = (*self.sizes, *(0 if bias is None else len(bias) for bias in biases), *[0] * missing)
        # A single row's stride is never used; a fixed number compiles nothing anew.
        x_stride, *self.io_strides = (t.stride(0) if rows > 1 else k for t in (x, self.residual, out))
        self.strides = (x_stride, weights[0].stride(0), *self.io_strides)
        self.epilogue = (len(sizes), any(self.bounds[3:]), residual is not None, activation)
        self.norm = None if norm is None else norm_constants(norm)
        self.output_sizes = sizes[:1] if activation is not None else sizes
        tensors = (x, *self.weights, *self.biases, self.residual, out, self.norm_weight)
        aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        self.key = (x.device, x.dtype, self.norm_weight.dtype, self.strides, aligned, config)

    def tiles(self, block_n: int) -> int:
        return sum(ceil_div(size, block_n) for size in self.output_sizes)

    def partial_sums(self) -> torch.Tensor:
        """Room for those of shares of the columns, fp32 `[split_k, M, sum of N_i]`."""
        return torch.empty(self.config.split_k, self.rows, sum(self.sizes), dtype=torch.float32, device=self.x.device)


def _run_gemv(o: _Operands) -> None:
    config = o.config
    constants = (
        o.rows, next_power_of_2(o.rows), o.k, *o.epilogue, o.norm, config.block_n, config.block_k, config.pdl,
    )  # fmt: skip
    _launch_gemv(
        (o.key, constants), (o.tiles(config.block_n), 1, 1),
        o.x, *o.weights, *o.biases, o.residual, o.out, o.norm_weight, *o.bounds, o.eps, *o.strides, *constants,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.pdl, enable_fp_fusion=True,
    )  # fmt: skip


def _run_dot(o: _Operands) -> None:
    config = o.config
    partial = o.partial_sums() if config.split_k > 1 else o.out
    constants = (
        o.k, *o.epilogue, config.split_k, max(16, next_power_of_2(o.rows)),
        config.block_n, config.block_k, config.prefetch, config.pdl,
    )  # fmt: skip
    _launch_dot(
        (o.key, constants), (o.tiles(config.block_n), config.split_k, 1),
        o.x, *o.weights, *o.biases, o.residual, o.out, partial, o.rows, *o.bounds, *o.strides, *constants,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=config.pdl, enable_fp_fusion=True,
    )  # fmt: skip
    _add_splits(o, partial)


def _run_ring(o: _Operands) -> None:
    config, launch = o.config, _ring_launcher()
    if launch is None:
        raise NotImplementedError(
            "this version of Triton has no Gluon that the ring is written for: take another config"
        )
    partial = o.partial_sums() if config.split_k > 1 else o.out
    constants = (
        o.k, *o.epilogue, config.split_k, ring_rows(o.rows), config.block_n, config.block_k, config.num_stages,
        config.num_warps, multiplies_together(config, o.rows), config.pdl,
    )  # fmt: skip
    launch(
        (o.key, constants), (o.tiles(config.block_n), config.split_k, 1),
        o.x, *o.weights, *o.biases, o.residual, o.out, partial, o.rows, *o.bounds, *o.strides, *constants,
        num_warps=config.num_warps, launch_pdl=config.pdl, enable_fp_fusion=True,
    )  # fmt: skip
    _add_splits(o, partial)


def _add_splits(o: _Operands, partial: torch.Tensor) -> None:
    """The results of the partial sums, where the columns are split."""
    config = o.config
    if config.split_k == 1:
        return
    constants = (*o.epilogue, config.split_k, MERGE_BLOCK, config.pdl)
    _launch_add_splits(
        (o.key, constants), (o.tiles(MERGE_BLOCK), o.rows, 1),
        partial, *o.biases, o.residual, o.out, *o.bounds, *o.io_strides, *constants,
        num_warps=2, launch_pdl=config.pdl, enable_fp_fusion=True,
    )  # fmt: skip


def _run_rows(o: _Operands) -> None:
    config = o.config
    each = DIRECT_GROUP if config.weights_first else max(16, next_power_of_2(o.rows))
    constants = (
        o.k, *o.epilogue, o.norm, each, config.block_n, config.num_warps, config.weights_first, LAST_FIRST,
        config.pdl,
    )  # fmt: skip
    _launch_rows(
        (o.key, constants), (o.tiles(config.block_n), ceil_div(o.rows, each), 1),
        o.x, *o.weights, *o.biases, o.residual, o.out, o.norm_weight, o.rows, *o.bounds, o.eps, *o.strides, *constants,
        num_warps=config.num_warps, num_stages=1, launch_pdl=config.pdl, enable_fp_fusion=True,
    )  # fmt: skip


def _choose_run(config: LinearConfig) -> Callable[[_Operands], None]:
    if config.direct:
        return _run_rows
    if config.ring:
        return _run_ring
    return _run_dot if config.dot else _run_gemv


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    norm: RMSNorm | None = None,
    out: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """One or several linears of the same few rows, in one launch (two when the columns are split).

    Sums are in float32, in an order that depends on shapes, dtype, device, what is folded in and whether a ring may
    serve (the rows' alignment, Triton's version) alone; results are rounded where torch, op by op, would round.

    Args:
        x: `[M, K]`, 1 to 64 rows, fp32, fp16 or bf16, the last stride 1.
        weights: one to three `[N_i, K]` in x's dtype, the last stride 1, all with the same row stride.
        biases: None, or for each weight None or `[N_i]` in x's dtype.
        residual: `[M, N]`, added to the rounded result; with one weight and no activation. It may be `out`.
        activation: None, or "silu", "gelu" or "gelu_tanh": the two weights are gate and up, of one size, and the
            result is `act(gate) * up`.
        norm: an RMS norm of x's rows before, rounded to x's dtype; where `supports_norm` says so.
        out: where to write; allocated if None. It may not overlap x.
        config: overrides the table (for measuring).

    Returns:
        `[M, N]` in x's dtype, N the sum of the N_i: the outputs side by side; with an activation N is N_0.

    Raises:
        ValueError: for other shapes, dtypes or strides, and for a norm that the configuration does not take.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [M, K], got {list(x.shape)}")
    rows, k = x.shape
    sizes = [len(weight) for weight in weights]
    biases = [None] * len(sizes) if biases is None else list(biases)
    gated = activation is not None
    if out is None:
        out = x.new_empty(rows, sizes[0] if gated else sum(sizes))
    _check(x, weights, biases, residual, activation, out)
    if config is None:
        features = sizes[0] if gated else sum(sizes)
        rings = _suits_ring(x, weights) and _ring_launcher() is not None
        config = choose_config(rows, features, k, gated, x.dtype, device_facts(x.device), norm is not None, rings)
    elif config.ring:
        _check_ring(config, x, weights)
    elif config.direct and x.dtype == torch.float32:
        raise ValueError("a direct configuration takes fp16 and bf16: fp32 would be multiplied as tf32")
    if norm is not None:
        check_norm(norm, k)
        if not takes_norm(config, k):
            raise ValueError(f"{rows} rows of {k} columns take no norm along: call `rms_norm` before")
    operands = _Operands(x, weights, biases, residual, activation, norm, out, config)
    with torch.cuda.device_of(x):
        _choose_run(config)(operands)
    return out


def _check_ring(config: LinearConfig, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    k = x.shape[1]
    steps, left = divmod(k, config.block_k * config.split_k)
    if left or not _suits_ring(x, weights):
        raise ValueError(
            f"a ring takes fp16 and bf16, rows that begin at multiples of 32 bytes, and columns that are a multiple of "
            f"{config.block_k * config.split_k}, got {k} of {x.dtype}, strides {x.stride()}, {weights[0].stride()}"
        )
    # All stages but one are filled before the first step; of more than there are, some would lie behind the weights.
    if not 2 <= config.num_stages <= steps + 1:
        raise ValueError(f"a ring of {steps} steps takes 2 to {steps + 1} stages, got {config.num_stages}")


def _suits_ring(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether loads of 16 bytes are aligned, as far as Triton looks at that."""
    tensors = (x, *weights)
    is_aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in tensors)
    return is_aligned and x.dtype in (torch.float16, torch.bfloat16)


def supports(
    x_rows: int, weights: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device, *, activation: bool
) -> bool:
    """Whether `linear` takes these weights and is the faster way, by a static table of what was measured.

    No for a device, dtype or number of rows that nobody measured; then use `torch.nn.functional.linear`.
    """
    if device.type != "cuda" or not 1 <= x_rows <= MAX_ROWS:
        return False
    if not 1 <= len(weights) <= 3 or any(weight.dtype != dtype or weight.stride(1) != 1 for weight in weights):
        return False
    if len({weight.stride(0) for weight in weights}) > 1 or (activation and len({len(w) for w in weights}) > 1):
        return False
    return is_faster(dtype, device_facts(device))


def supports_norm(x_rows: int, weights: Sequence[torch.Tensor], device: torch.device, *, activation: bool) -> bool:
    """Whether an RMS norm before is the faster way, too, for weights that `supports` has said yes to."""
    features = len(weights[0]) if activation else sum(len(weight) for weight in weights)
    k, dtype = weights[0].shape[1], weights[0].dtype
    return norm_is_faster_within(x_rows, features, k, activation, dtype, device_facts(device))


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    repeat: int = 1,
    out: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """Each row through the linear of its own expert, without the host knowing which: `x[r // repeat] @ W[id[r]].T`.

    Args:
        x: `[R / repeat, K]`, fp32, fp16 or bf16, the last stride 1.
        weight: `[E, N, K]` in x's dtype, the last stride 1.
        expert_ids: `[R]`, int64 or int32, contiguous. An id outside `[0, E)` is padding: its row becomes zeros.
        bias: None or `[E, N]` in x's dtype, the last stride 1.
        repeat: how many outputs in a row each row of x serves (the experts of a token).
        out: where to write; allocated if None. It may not overlap x.
        config: overrides the table (for measuring).

    Returns:
        `[R, N]` in x's dtype.

    Raises:
        ValueError: for other shapes, dtypes or strides.
    """
    rows, (_, k), (num_experts, size, _) = len(expert_ids), x.shape, weight.shape
    if out is None:
        out = x.new_empty(rows, size)
    _check_expert(x, weight, expert_ids, bias, repeat, out)
    if rows == 0:
        return out
    if config is None:
        config = choose_expert_config(k, x.dtype, device_facts(x.device))
    tensors = (x, weight, x if bias is None else bias, expert_ids, out)
    strides = (x.stride(0), weight.stride(0), weight.stride(1), 0 if bias is None else bias.stride(0), out.stride(0))
    constants = (repeat, k, bias is not None, config.block_n, config.block_k, config.pdl)
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    key = (x.device, x.dtype, expert_ids.dtype, strides, aligned, constants, config.num_warps)
    with torch.cuda.device_of(x):
        _launch_expert(
            key, (rows, ceil_div(size, config.block_n), 1),
            *tensors, num_experts, size, *strides, *constants,
            num_warps=config.num_warps, num_stages=1, launch_pdl=config.pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _check_expert(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    bias: torch.Tensor | None,
    repeat: int,
    out: torch.Tensor,
) -> None:
    rows, (num_experts, size, k) = len(expert_ids), weight.shape
    if expert_ids.ndim != 1 or expert_ids.dtype not in (torch.int32, torch.int64) or not expert_ids.is_contiguous():
        raise ValueError(
            f"expert_ids must be [R], int32 or int64, contiguous, got {list(expert_ids.shape)}, {expert_ids.dtype}"
        )
    if repeat < 1 or rows % repeat:
        raise ValueError(f"repeat must be at least 1 and divide the {rows} expert ids, got {repeat}")
    shapes = {
        "x": (x, (rows // repeat, k)),
        "weight": (weight, (num_experts, size, k)),
        "bias": (bias, (num_experts, size)),
        "out": (out, (rows, size)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and (tensor.shape != shape or tensor.dtype != x.dtype or tensor.stride(-1) != 1):
            raise ValueError(
                f"{name} must be {list(shape)}, {x.dtype}, with a last stride of 1, "
                f"got {list(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
            )
