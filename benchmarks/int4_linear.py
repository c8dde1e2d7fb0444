"""Times linears with INT4 weights on a CUDA device, beside cuBLAS in bf16 and torch's own INT4 operator in one run.

    python -m benchmarks.int4_linear --out DIR [--rows 1 4 16 64] [--shapes qkv o ...] [--search] [--budget SECONDS]

The shapes are an 8B model's. Every variant is checked against an fp32 product before it is timed. Times are medians
over replays of a CUDA graph whose calls rotate among copies of the weights, so that no copy is still in the L2 cache
when its turn comes again. `fraction_of_floor` is the bytes that must be moved over the bandwidth of a large copy.

    cublas-bf16  one `F.linear` with dequantized weights merged, and nothing else
    int4pack     `torch.ops.aten._weight_int4pack_mm` with weights merged, and nothing else
    hf_turbo     `int4_linear` with the table's configuration, activation and residual (with --search: the best of many)
    act-order    the same with another order of columns
    asymmetric   the same with zero points

Rows go to DIR/int4_linear.jsonl; a table comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.attention import commit, copy_bandwidth, graph_us
from benchmarks.linear_cases import LARGE, MIN_ROTATION_BYTES, Shape
from benchmarks.precompile import compile_all
from hf_turbo.ops import int4_linear as ops
from hf_turbo.ops.attention_config import ceil_div, next_power_of_2
from hf_turbo.ops.int4_config import MAX_ROWS, MAX_STREAM_ROWS, Int4Config
from hf_turbo.ops.int4_layout import packed_shape
from hf_turbo.ops.packed_weight import PackedWeight

GROUP_SIZE = 128
DTYPE = torch.bfloat16
ERROR_LIMIT = 2e-2


def quantized_bytes(shape: Shape, rows: int) -> int:
    """What a launch has to move: codes, scales, x and the output."""
    numbers = sum(shape.sizes) * shape.k
    activations = rows * (shape.k + shape.features * (2 if shape.residual else 1))
    return numbers // 2 + 2 * (numbers // GROUP_SIZE + activations)


def random_weights(shape: Shape, perm: torch.Tensor | None = None, zeros: bool = False) -> list[PackedWeight]:
    weights = []
    for size in shape.sizes:
        words = torch.randint(-(2**31), 2**31, packed_shape(size, shape.k, 4), dtype=torch.int32)
        scales = (torch.rand(shape.k // GROUP_SIZE, size) * 0.2 / shape.k**0.5).half()
        points = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if zeros else None
        weights.append(PackedWeight(words, scales, points, perm, 4, GROUP_SIZE))
    return weights


def run(shape: Shape, rows: int, config: Int4Config | None, zeros: bool = False, perm: bool = False) -> None:
    """One call on new tensors, for compiling."""
    order = torch.empty(shape.k, dtype=torch.int32) if perm else None
    x = torch.empty(rows, shape.k, dtype=DTYPE)
    call(x, random_weights_without_numbers(shape, order, zeros), shape, config)


def random_weights_without_numbers(shape: Shape, perm: torch.Tensor | None, zeros: bool) -> list[PackedWeight]:
    weights = []
    for size in shape.sizes:
        scales = torch.empty(shape.k // GROUP_SIZE, size, dtype=torch.float16)
        points = torch.empty(scales.shape, dtype=torch.uint8) if zeros else None
        words = torch.empty(packed_shape(size, shape.k, 4), dtype=torch.int32)
        weights.append(PackedWeight(words, scales, points, perm, 4, GROUP_SIZE))
    return weights


def call(
    x: torch.Tensor,
    weights: list[PackedWeight],
    shape: Shape,
    config: Int4Config | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if shape.residual and residual is None:
        residual = x.new_empty(x.shape[0], shape.sizes[0])
    return ops.int4_linear(x, weights, residual=residual, activation=shape.activation, config=config)


def candidates(shape: Shape, rows: int) -> Iterator[Int4Config]:
    units = shape.k // 64
    features = shape.features
    if rows <= MAX_STREAM_ROWS:
        for shares, strips, step, ahead in itertools.product((2, 4, 8), (1, 2), (1, 2, 4, 8), (False, True)):
            warps = ceil_div(features, 16 * strips) * shares
            registers = strips * step * (2 if shape.activation else 1) + step * ceil_div(rows, 8) * 2
            if warps >= 132 * 6 and registers <= 32 and units >= shares * step:
                yield Int4Config(True, strips, step, shares, shares, ahead=ahead, pdl=True)
    else:
        for shares, warps, step, stages in itertools.product((1, 2, 4, 8), (4, 8), (1, 2), (2, 3, 4, 5)):
            programs = ceil_div(features, 64) * shares
            if 100 <= programs <= 5000 and units >= 4 * shares * step:
                yield Int4Config(False, 4, step, shares, warps, num_stages=stages, pdl=True)


class Run:
    """Writes rows and remembers the best of each case."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "int4_linear.jsonl"
        self.environment = {
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "hf_turbo": commit()},
        }
        self.bandwidth = copy_bandwidth()
        self.best: dict[tuple[str, int], dict[str, Any]] = {}
        print(f"copy {self.bandwidth / 1e12:.3f} TB/s")

    def measure(
        self,
        shape: Shape,
        rows: int,
        variant: str,
        function: Callable[[int], torch.Tensor],
        copies: int,
        size: int,
        expected: torch.Tensor | None,
        config: Int4Config | None = None,
    ) -> float | None:
        try:
            if expected is not None:
                out = function(0).float()
                error = ((out - expected).abs() / (expected.abs() + expected.square().mean().sqrt())).max().item()
                if not error <= ERROR_LIMIT:
                    raise RuntimeError(f"wrong by {error:.2g}")
            us = graph_us(function, copies, replays=6, graph_ms=1.0)
        except (RuntimeError, triton.runtime.errors.OutOfResources) as problem:
            print(f"{shape.name} {rows} {variant} {config}: {problem}"[:200], flush=True)
            return None
        row = {"bench": "int4_linear", "case": f"{shape.name}/b{rows}/g{GROUP_SIZE}", "variant": variant, "us": us,
               "bytes": size, "fraction_of_floor": 1e6 * size / self.bandwidth / us,
               "config": config and dataclasses.asdict(config), **self.environment}  # fmt: skip
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        cell = self.best.setdefault((shape.name, rows), {})
        if us < cell.get(variant, (float("inf"),))[0]:
            cell[variant] = us, row["fraction_of_floor"], config
        return us

    def table(self) -> None:
        for (name, rows), cell in self.best.items():
            figures = "  ".join(f"{v} {us:.1f} ({part:.2f})" for v, (us, part, _) in cell.items())
            config = cell.get("hf_turbo", (0, 0, None))[2]
            print(f"{name:11} {rows:4}: {figures}  {config or ''}")


def time_shape(out: Run, shape: Shape, rows: int, search: bool, deadline: float) -> None:
    size = quantized_bytes(shape, rows)
    copies = max(2, MIN_ROTATION_BYTES // size)
    first = random_weights(shape)
    sets = [first] + [[dataclasses.replace(w, qweight=w.qweight.clone()) for w in first] for _ in range(copies - 1)]
    x = torch.randn(rows, shape.k).to(DTYPE)
    residual = torch.randn(rows, shape.sizes[0]).to(DTYPE) if shape.residual else None
    dense = [ops.dequantize(w, shape.k, torch.float32) for w in first]
    parts = [x.float() @ w.t() for w in dense]
    expected = F.silu(parts[0]) * parts[1] if shape.activation else torch.cat(parts, 1)
    expected = expected if residual is None else expected + residual.float()
    merged = [torch.cat(dense).to(DTYPE) for _ in range(max(2, MIN_ROTATION_BYTES // (4 * size)))]
    del dense, parts
    out.measure(shape, rows, "cublas-bf16", lambda i: F.linear(x, merged[i % len(merged)]), copies,
                merged[0].nbytes, None)  # fmt: skip
    merged.clear()
    if rows <= MAX_ROWS:
        time_int4pack(out, shape, rows, x, copies, size)
    for config in candidates(shape, rows) if search else [None]:
        if time.monotonic() < deadline:
            out.measure(shape, rows, "hf_turbo", lambda i, c=config: call(x, sets[i], shape, c, residual), copies, size,
                        expected, config)  # fmt: skip
    if not search:
        perm = torch.randperm(shape.k).int()
        for name, options in (("act-order", {"perm": perm}), ("asymmetric", {"zeros": True})):
            other = random_weights(shape, **options)
            others = [
                [dataclasses.replace(w, qweight=s.qweight) for w, s in zip(other, each, strict=True)] for each in sets
            ]
            out.measure(shape, rows, name, lambda i, o=others: call(x, o[i], shape, None, residual), copies, size, None)


def time_int4pack(out: Run, shape: Shape, rows: int, x: torch.Tensor, copies: int, size: int) -> None:
    features = sum(shape.sizes)
    codes = torch.randint(0, 256, (features, shape.k // 2), dtype=torch.uint8)
    packs = [torch.ops.aten._convert_weight_to_int4pack(codes, 8) for _ in range(min(copies, 8))]
    scales = torch.rand(shape.k // GROUP_SIZE, features, 2, dtype=DTYPE)
    out.measure(shape, rows, "int4pack",
                lambda i: torch.ops.aten._weight_int4pack_mm(x, packs[i % len(packs)], GROUP_SIZE, scales),
                copies, size, None)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--shapes", nargs="+", default=["qkv", "o", "gate_up", "down", "lm_head"])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    shapes = [shape for shape in LARGE if shape.name.split("/")[1] in options.shapes]
    jobs = [
        functools.partial(run, shape, rows, config, **more)
        for shape in shapes
        for rows in options.rows
        for config in (candidates(shape, rows) if options.search else [None])
        for more in ({}, *(() if options.search else ({"zeros": True}, {"perm": True})))
        if rows <= next_power_of_2(MAX_ROWS) and (options.search or config is not None)
    ]
    if jobs:
        compile_all(jobs, 90, 60)
    with torch.device("cuda"):
        out = Run(options.out)
        for shape, rows in itertools.product(shapes, options.rows):
            if time.monotonic() < deadline:
                time_shape(out, shape, rows, options.search, deadline)
                torch.cuda.empty_cache()
    out.table()


if __name__ == "__main__":
    main()
