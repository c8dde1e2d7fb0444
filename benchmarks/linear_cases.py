"""Which linears the benchmark is about, the configurations it tries, and the tensors they run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from hf_turbo.ops import linear as ops
from hf_turbo.ops import reference_linear
from hf_turbo.ops.attention_config import DeviceFacts, next_power_of_2
from hf_turbo.ops.linear_config import MAX_ROWS, LinearConfig, choose_config, ring_rows

MIN_ROTATION_BYTES = 256 << 20  # several times the 60 MB of L2 of an H200
ERROR_LIMIT = 2e-2  # of an element, relative to its size plus the root mean square of all
DTYPE = torch.bfloat16
# Between these, both kernels are tried: the table's threshold lies there.
FIRST_DOT_ROWS, LAST_GEMV_ROWS = 2, 4
# Up to these each warp of a ring's program may multiply by itself; from 9 on four may do it together.
MAX_WARP_ROWS = 16
MAX_RING_BYTES = 224 << 10


@dataclass(frozen=True)
class Shape:
    """The linears of one launch; `norm`: in a layer, a norm's kernel comes before them."""

    name: str
    sizes: tuple[int, ...]
    k: int
    norm: bool = False
    residual: bool = False
    activation: str | None = None

    @property
    def features(self) -> int:
        return self.sizes[0] if self.activation else sum(self.sizes)

    def bytes(self, rows: int) -> int:
        numbers = sum(self.sizes) * self.k + rows * (self.k + self.features * (2 if self.residual else 1))
        return numbers * DTYPE.itemsize


def model_shapes(name: str, hidden: int, kv: int, inner: int, vocabulary: int) -> list[Shape]:
    return [
        Shape(f"{name}/qkv", (hidden, kv, kv), hidden, norm=True),
        Shape(f"{name}/o", (hidden,), hidden, residual=True),
        Shape(f"{name}/gate_up", (inner, inner), hidden, norm=True, activation="silu"),
        Shape(f"{name}/down", (hidden,), inner, residual=True),
        Shape(f"{name}/lm_head", (vocabulary,), hidden),
    ]


LARGE = model_shapes("8b", 4096, 1024, 14336, 128256)
SMALL = model_shapes("135m", 576, 192, 1536, 49152)


def gemv_configs(shape: Shape) -> list[LinearConfig]:
    """(block_n, block_k, num_warps) to try."""
    if shape.k == 576:
        tried = [(1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (4, 256, 1), (4, 512, 2)]
    elif shape.k == 1536:
        tried = [(1, 512, 2), (2, 512, 2), (4, 512, 2), (1, 2048, 8)]
    else:
        tried = [
            (1, 2048, 8), (2, 1024, 4), (2, 2048, 8), (1, 1024, 4), (4, 512, 2), (1, 4096, 8), (1, 2048, 4),
            (4, 1024, 4),
        ]  # fmt: skip
    return [LinearConfig(n, k, warps) for n, k, warps in tried]


def dot_configs(shape: Shape) -> list[LinearConfig]:
    """(block_n, block_k, num_warps, num_stages, split_k) to try."""
    if shape in SMALL:
        tried = [(16, 64, 2, 5, 1), (16, 128, 4, 4, 1), (32, 128, 4, 4, 1), (16, 256, 4, 3, 1)]
    elif shape.activation:
        tried = [
            (64, 128, 8, 4, 1), (64, 128, 4, 3, 1), (64, 64, 4, 5, 1), (32, 128, 4, 4, 1), (64, 128, 8, 3, 1),
            (32, 256, 4, 3, 1),
        ]  # fmt: skip
    elif shape.features > 100_000:
        tried = [(64, 128, 4, 4, 1), (128, 64, 4, 4, 1), (128, 128, 8, 4, 1)]
    else:
        tried = [
            (64, 128, 4, 5, 2), (64, 128, 4, 5, 1), (64, 128, 4, 4, 4), (128, 64, 4, 5, 4), (32, 128, 4, 5, 1),
            (32, 256, 4, 4, 1), (64, 64, 4, 6, 1), (64, 64, 4, 6, 2), (64, 256, 4, 3, 1),
        ]  # fmt: skip
    return [LinearConfig(n, k, warps, stages, True, split, prefetch=256) for n, k, warps, stages, split in tried]


def ring_configs(shape: Shape, rows: int) -> list[LinearConfig]:
    """(block_n, block_k, num_warps, num_stages, split_k) to try; none for short columns, which lie in registers."""
    if shape in SMALL:
        return []
    if rows <= MAX_WARP_ROWS:
        tried = [
            (32, 128, 2, 3, 1), (32, 128, 2, 4, 1), (32, 128, 2, 8, 1), (16, 256, 1, 4, 1), (16, 256, 1, 6, 1),
            (16, 256, 1, 8, 1), (32, 256, 2, 7, 1), (64, 128, 4, 3, 1), (128, 128, 8, 3, 1),
        ]  # fmt: skip
    else:
        tried = [(64, 128, 4, 3, 1), (64, 128, 4, 4, 1), (64, 64, 4, 4, 1), (64, 128, 4, 6, 1), (128, 128, 4, 3, 1)]
    tried += [(64, 128, 4, 5, 4), (64, 128, 4, 8, 2), (128, 128, 4, 4, 4), (128, 64, 4, 8, 4)]
    weights = 2 if shape.activation else 1
    return [
        LinearConfig(n, k, warps, stages, True, split, ring=True)
        for n, k, warps, stages, split in tried
        if (ring_rows(rows) + n * weights) * k * stages * DTYPE.itemsize <= MAX_RING_BYTES
    ]


def table_config(shape: Shape, rows: int, facts: DeviceFacts) -> LinearConfig:
    return choose_config(rows, shape.features, shape.k, shape.activation is not None, DTYPE, facts, rings=True)


def candidates(shape: Shape, rows: int, facts: DeviceFacts) -> list[LinearConfig]:
    """The table's configuration first, then those to try."""
    configs = gemv_configs(shape) if rows <= LAST_GEMV_ROWS else []
    if rows >= FIRST_DOT_ROWS:
        configs = configs + dot_configs(shape) + (ring_configs(shape, rows) if facts.capability == 90 else [])
    configs = [replace(config, pdl=facts.capability >= 90) for config in configs]
    return list(dict.fromkeys([table_config(shape, rows, facts), *configs]))


@dataclass(frozen=True)
class CompileJob:
    """Launches one kernel, to compile it."""

    shape: Shape
    rows: int
    config: LinearConfig

    def __call__(self) -> None:
        Problem(self.shape, copies=1).ours(self.rows, self.config)(0)

    @property
    def kernel(self) -> tuple[Shape, int, LinearConfig]:
        """What is equal where one compiled kernel serves: tensor cores take rows in a few sizes."""
        padded = ring_rows(self.rows) if self.config.ring else max(16, next_power_of_2(self.rows))
        return self.shape, padded if self.config.dot else self.rows, self.config


def compile_jobs(
    shapes: Sequence[Shape],
    all_rows: Sequence[int],
    facts: DeviceFacts,
    find: Callable[[Shape, int, DeviceFacts], list[LinearConfig]],
) -> list[CompileJob]:
    """One job a kernel, for the configurations that `find` gives a shape and a number of rows."""
    jobs = (CompileJob(shape, rows, c) for shape in shapes for rows in all_rows for c in find(shape, rows, facts))
    return list({job.kernel: job for job in jobs}.values())


class Problem:
    """The tensors of a shape: copies of the weights that rotate, and x, residual and output for up to 64 rows."""

    def __init__(self, shape: Shape, copies: int | None = None) -> None:
        self.shape = shape
        k, total = shape.k, sum(shape.sizes)
        if copies is None:
            copies = max(1, min(256, -(-MIN_ROTATION_BYTES // shape.bytes(1))))
        self.merged = [torch.empty(total, k, dtype=DTYPE).normal_(0, k**-0.5) for _ in range(copies)]
        self.weights = [merged.split(shape.sizes) for merged in self.merged]
        self.x = torch.empty(MAX_ROWS, k, dtype=DTYPE).normal_()
        self.residual = torch.empty(MAX_ROWS, shape.features, dtype=DTYPE).normal_()
        self.out = torch.empty(MAX_ROWS, shape.features, dtype=DTYPE)

    def _arguments(self, rows: int) -> dict[str, Any]:
        residual = self.residual[:rows] if self.shape.residual else None
        return {"residual": residual, "activation": self.shape.activation}

    def reference(self, rows: int) -> torch.Tensor:
        return reference_linear.linear(self.x[:rows], self.weights[0], **self._arguments(rows)).float()

    def ours(self, rows: int, config: LinearConfig) -> Callable[[int], torch.Tensor]:
        arguments = self._arguments(rows)
        x, out = self.x[:rows], self.out[:rows]
        return lambda index: ops.linear(x, self.weights[index], **arguments, out=out, config=config)

    def cublas(self, rows: int) -> Callable[[int], torch.Tensor]:
        x = self.x[:rows]
        return lambda index: F.linear(x, self.merged[index])

    def torch_ops(self, rows: int) -> Callable[[int], torch.Tensor]:
        shape, x, residual = self.shape, self.x[:rows], self.residual[:rows]

        def call(index: int) -> torch.Tensor:
            parts = [F.linear(x, weight) for weight in self.weights[index]]
            if shape.activation:
                return F.silu(parts[0]) * parts[1]
            return residual + parts[0] if shape.residual else parts[0]

        return call


def checked_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest error of an element, relative to its size plus the root mean square of all.

    Raises:
        ArithmeticError: if it is over the limit, or NaN.
    """
    difference = (result.float() - reference).abs()
    error = (difference / (reference.abs() + reference.square().mean().sqrt())).max().item()
    if not error < ERROR_LIMIT:
        raise ArithmeticError(f"the result is off by {error} of its size")
    return error
