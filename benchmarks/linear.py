"""Times the linear kernels on a CUDA device, beside cuBLAS in the same run.

    python -m benchmarks.linear --out DIR [--budget SECONDS] [--rows 1 4 16] [--shapes 8b/qkv ...]

Every variant is checked before it is timed: its output starts as NaN and must match the torch reference. Times are
medians over replays of a CUDA graph whose calls rotate among copies of the weights, so that no copy is still in the L2
cache when its turn comes again. `fraction_of_floor` is the bytes that must be moved over the bandwidth of a large
copy. All kernels are compiled first, by as many processes as there are cores.

    cublas       one `F.linear` with the weights merged (a second copy of them), and nothing else
    torch-ops    what Transformers does: norm, a linear a weight, activation and product, or residual
    hf_turbo     one configuration of `linear`, with norm (up to 4 rows), activation and residual
    no-norm      the table's configuration without the norm

The chain is eight layers' linears (q/k/v, o, gate/up, down) in one graph, in microseconds a layer. Rows go to
DIR/linear.jsonl; a table of the best variants comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.attention import commit, copy_bandwidth, graph_us
from benchmarks.precompile import compile_all
from hf_turbo.ops import linear as ops
from hf_turbo.ops import reference_linear
from hf_turbo.ops.attention_config import DeviceFacts, device_facts
from hf_turbo.ops.linear_config import MAX_GEMV_ROWS, LinearConfig, choose_config, choose_expert_config
from hf_turbo.ops.norm_spec import RMSNorm

MIN_ROTATION_BYTES = 256 << 20  # several times the 60 MB of L2 of an H200
ERROR_LIMIT = 2e-2  # of an element, relative to its size plus the root mean square of all
MAX_NORM_ROWS = 4  # with more, the norm is a kernel of its own
CHAIN_LAYERS = 8
CHAIN_ROWS = (1, 4, 16, 64)
DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Shape:
    """The linears of one launch."""

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
EXPERTS = [("moe/gate_up", 128, 1536, 2048), ("moe/down", 128, 2048, 768)]  # Qwen3-30B-A3B: name, E, N, K
EXPERT_ROWS = (8, 64)
EXPERT_REPEAT = {"moe/gate_up": 8, "moe/down": 1}


def gemv_configs(shape: Shape, rows: int) -> list[LinearConfig]:
    """(block_n, block_k, num_warps) to try."""
    if shape.k == 576:
        tried = [(1, 1024, 4), (4, 1024, 4), (4, 256, 1), (4, 512, 2)]
    elif shape.k == 1536:
        tried = [(1, 512, 2), (2, 512, 2), (4, 512, 2), (1, 2048, 8)]
    elif rows == 1:
        tried = [(1, 2048, 4), (1, 1024, 4), (2, 1024, 4), (2, 2048, 8), (1, 4096, 8), (4, 512, 2), (1, 2048, 8)]
    else:
        tried = [(1, 2048, 8), (2, 1024, 4), (2, 2048, 8), (4, 1024, 4), (4, 512, 2)]
    return [LinearConfig(n, k, warps) for n, k, warps in tried]


def dot_configs(shape: Shape) -> list[LinearConfig]:
    """(block_n, block_k, num_warps, num_stages, split_k) to try."""
    if shape in SMALL:
        tried = [(16, 64, 2, 5, 1), (16, 128, 4, 4, 1), (32, 128, 4, 4, 1), (16, 256, 4, 3, 1)]
    elif shape.activation:
        tried = [(32, 128, 4, 4, 1), (64, 128, 4, 3, 1), (64, 64, 4, 5, 1), (64, 128, 8, 4, 1)]
    elif shape.features > 100_000:
        tried = [(64, 128, 4, 4, 1), (128, 64, 4, 4, 1), (128, 128, 8, 4, 1)]
    else:
        tried = [
            (32, 128, 4, 5, 1), (32, 256, 4, 4, 1), (64, 128, 4, 5, 2), (64, 128, 4, 4, 4), (128, 64, 4, 5, 4),
            (64, 128, 4, 5, 1),
        ]  # fmt: skip
    return [LinearConfig(n, k, warps, stages, True, split, prefetch=256) for n, k, warps, stages, split in tried]


def expert_configs() -> list[LinearConfig]:
    return [LinearConfig(n, k, w) for n, k, w in [(1, 1024, 4), (2, 1024, 4), (4, 512, 2), (4, 256, 1), (1, 2048, 8)]]


def folds_norm(shape: Shape, rows: int) -> bool:
    return shape.norm and rows <= MAX_NORM_ROWS


def candidates(shape: Shape, rows: int, facts: DeviceFacts) -> list[LinearConfig]:
    """The table's configuration first, then those to try."""
    norm = folds_norm(shape, rows)
    base = choose_config(rows, shape.features, shape.k, shape.activation is not None, norm, DTYPE, facts)
    configs = gemv_configs(shape, rows) if rows <= MAX_GEMV_ROWS else []
    if rows > 4:
        configs = configs[1:3] + dot_configs(shape)
    return list(dict.fromkeys([base, *(dataclasses.replace(c, pdl=facts.capability >= 90) for c in configs)]))


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """Launches one kernel, to compile it."""

    shape: Shape
    rows: int
    config: LinearConfig
    norm: bool

    def __call__(self) -> None:
        Problem(self.shape, copies=1).ours(self.rows, self.config, self.norm)(0)


def find_jobs(shapes: list[Shape], all_rows: list[int], facts: DeviceFacts) -> Iterator[CompileJob]:
    for shape in shapes:
        for rows in all_rows:
            norm = folds_norm(shape, rows)
            configs = candidates(shape, rows, facts)
            yield from (CompileJob(shape, rows, config, norm) for config in configs)
            if norm:
                yield CompileJob(shape, rows, configs[0], False)


def find_facts() -> DeviceFacts | None:
    if not torch.cuda.is_available():
        return None
    return device_facts(torch.device("cuda", 0))


class Problem:
    """The tensors of a shape: copies of the weights that rotate, and x, residual and output for up to 64 rows."""

    def __init__(self, shape: Shape, copies: int | None = None) -> None:
        self.shape = shape
        k, total = shape.k, sum(shape.sizes)
        if copies is None:
            copies = max(1, min(256, -(-MIN_ROTATION_BYTES // shape.bytes(1))))
        self.merged = [torch.empty(total, k, dtype=DTYPE).normal_(0, k**-0.5) for _ in range(copies)]
        self.weights = [merged.split(shape.sizes) for merged in self.merged]
        self.x = torch.empty(64, k, dtype=DTYPE).normal_()
        self.norm = RMSNorm(torch.empty(k, dtype=DTYPE).normal_(1, 0.1), 1e-5)
        self.residual = torch.empty(64, shape.features, dtype=DTYPE).normal_()
        self.out = torch.empty(64, shape.features, dtype=DTYPE)

    def _arguments(self, rows: int, norm: bool) -> dict[str, Any]:
        return {
            "norm": self.norm if norm else None,
            "residual": self.residual[:rows] if self.shape.residual else None,
            "activation": self.shape.activation,
        }

    def reference(self, rows: int, norm: bool) -> torch.Tensor:
        return reference_linear.linear(self.x[:rows], self.weights[0], **self._arguments(rows, norm)).float()

    def ours(self, rows: int, config: LinearConfig, norm: bool) -> Callable[[int], torch.Tensor]:
        arguments = self._arguments(rows, norm)
        x, out = self.x[:rows], self.out[:rows]
        return lambda index: ops.linear(x, self.weights[index], **arguments, out=out, config=config)

    def cublas(self, rows: int) -> Callable[[int], torch.Tensor]:
        x = self.x[:rows]
        return lambda index: F.linear(x, self.merged[index])

    def torch_ops(self, rows: int) -> Callable[[int], torch.Tensor]:
        shape, x, residual = self.shape, self.x[:rows], self.residual[:rows]

        def call(index: int) -> torch.Tensor:
            y = F.rms_norm(x, (shape.k,), self.norm.weight, self.norm.eps) if shape.norm else x
            parts = [F.linear(y, weight) for weight in self.weights[index]]
            if shape.activation:
                return F.silu(parts[0]) * parts[1]
            return residual + parts[0] if shape.residual else parts[0]

        return call


class Run:
    """Writes rows, remembers the best of each case, and watches the clock."""

    def __init__(self, out: Path, budget: float, start: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "linear.jsonl"
        self.path.unlink(missing_ok=True)
        self.start, self.budget = start, budget
        versions = {"torch": torch.__version__, "triton": triton.__version__, "hf_turbo": commit()}
        self.environment = {"device": torch.cuda.get_device_name(), "versions": versions}
        self.bandwidth = copy_bandwidth()
        self.rows: list[dict[str, Any]] = []
        print(f"copy {self.bandwidth / 1e12:.3f} TB/s")

    @property
    def expired(self) -> bool:
        return time.monotonic() - self.start > self.budget

    def write(self, case: str, variant: str, us: float | None, size: int, **more: Any) -> None:
        row = {"bench": "linear", "case": case, "variant": variant, "config": None, "us": us, "bytes": size}
        row["fraction_of_floor"] = us and 1e6 * size / self.bandwidth / us
        row |= {**more, **self.environment}
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if us is None:
            print(f"{case:18} {variant:10} failed: {more['error']} {more.get('config')}", flush=True)

    def measure(
        self,
        case: str,
        variant: str,
        call: Callable[[int], torch.Tensor],
        copies: int,
        size: int,
        config: LinearConfig | None = None,
        out: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
    ) -> float | None:
        """Checks a variant against `reference`, if given, and times it; a failure is a row too."""
        more: dict[str, Any] = {"config": config and dataclasses.asdict(config)}
        try:
            if out is not None:
                out.fill_(float("nan"))
            if reference is not None:
                difference = (call(0).float() - reference).abs()
                more["error_size"] = (difference / (reference.abs() + reference.square().mean().sqrt())).max().item()
                if not more["error_size"] < ERROR_LIMIT:  # NaN too
                    raise ArithmeticError(f"the result is off by {more['error_size']} of its size")
            us = graph_us(call, copies, replays=8, graph_ms=1.5)
        except Exception as failure:  # one bad configuration must not end the sweep
            torch.cuda.synchronize()
            self.write(case, variant, None, size, error=repr(failure)[:300], **more)
            return None
        self.write(case, variant, us, size, **more)
        return us

    def best(self, case: str, variant: str) -> dict[str, Any] | None:
        rows = [row for row in self.rows if row["case"] == case and row["variant"] == variant and row["us"]]
        return min(rows, key=lambda row: row["us"], default=None)

    def table(self) -> None:
        """The best configuration of each case, beside torch."""
        peers = ("cublas", "torch-ops", "no-norm")
        heads = "".join(f"{peer:>10}" for peer in peers)
        print(f"\n{'case':20} {'us':>8} {'floor':>6} {'error':>7} {heads}  best configuration (the table's)")
        for case in dict.fromkeys(row["case"] for row in self.rows if row["variant"] == "hf_turbo"):
            best = self.best(case, "hf_turbo")
            if best is None:
                continue
            others = [self.best(case, peer) for peer in peers]
            times = "".join(f"{peer['us']:10.2f}" if peer else f"{'':10}" for peer in others)
            first = next(row for row in self.rows if row["case"] == case and row["variant"] == "hf_turbo")
            table = f"{first['us']:.2f} {short(first['config'])}" if first["us"] else "failed"
            print(
                f"{case:20} {best['us']:8.2f} {best['fraction_of_floor']:6.3f} {best['error_size']:7.1e} "
                f"{times}  {short(best['config'])}  ({table})"
            )
        for row in self.rows:
            if row["case"].startswith("chain"):
                print(f"{row['case']:20} {row['us'] or 0:8.2f} {row['fraction_of_floor'] or 0:6.3f} {row['variant']}")
        failed = sum(row["us"] is None for row in self.rows)
        print(f"{len(self.rows)} rows, {failed} failed{', out of time' if self.expired else ''}")


def short(config: dict[str, Any]) -> str:
    names = ("block_n", "block_k", "num_warps", "num_stages", "split_k")
    return ("dot" if config["dot"] else "gemv") + " " + "/".join(str(config[name]) for name in names)


def run_shape(run: Run, shape: Shape, all_rows: list[int], facts: DeviceFacts) -> None:
    problem = Problem(shape)
    copies = len(problem.merged)
    for rows in all_rows:
        case, size, norm = f"{shape.name}/m{rows}", shape.bytes(rows), folds_norm(shape, rows)
        reference = problem.reference(rows, norm)
        run.measure(case, "cublas", problem.cublas(rows), copies, size)
        if shape.norm or shape.activation or shape.residual:
            run.measure(case, "torch-ops", problem.torch_ops(rows), copies, size)
        out = problem.out[:rows]
        configs = candidates(shape, rows, facts)
        for config in configs:
            if run.expired:
                return
            run.measure(case, "hf_turbo", problem.ours(rows, config, norm), copies, size, config, out, reference)
        if norm:
            plain = problem.reference(rows, False)
            call = problem.ours(rows, configs[0], False)
            run.measure(case, "no-norm", call, copies, size, configs[0], out, plain)


class Chain:
    """Eight layers' linears, each reading what the one before it wrote; q stands in for the attention's output."""

    def __init__(self) -> None:
        self.shapes = LARGE[:4]
        self.layers = [[Problem(shape, copies=1) for shape in self.shapes] for _ in range(CHAIN_LAYERS)]

    def ours(self, rows: int, configs: list[LinearConfig]) -> Callable[[int], torch.Tensor]:
        start = self.layers[0][0].x[:rows]

        def call(_: int) -> torch.Tensor:
            hidden = start
            for layer in self.layers:
                x = hidden
                for problem, config in zip(layer, configs, strict=True):
                    shape = problem.shape
                    x = ops.linear(
                        x[:, : shape.k],
                        problem.weights[0],
                        norm=problem.norm if folds_norm(shape, rows) else None,
                        residual=hidden if shape.residual else None,
                        activation=shape.activation,
                        config=config,
                    )
                    if shape.residual:
                        hidden = x
            return hidden

        return call

    def cublas(self, rows: int) -> Callable[[int], torch.Tensor]:
        start = self.layers[0][0].x[:rows]

        def call(_: int) -> torch.Tensor:
            x = start
            for layer in self.layers:
                for problem in layer:
                    x = F.linear(x[:, : problem.shape.k], problem.merged[0])
            return x

        return call


def run_chain(run: Run, all_rows: list[int], facts: DeviceFacts) -> None:
    """Each linear in its best configuration, with and without programmatic dependent launch."""
    chain = Chain()
    for rows in all_rows:
        configs = []
        for shape in chain.shapes:
            best = run.best(f"{shape.name}/m{rows}", "hf_turbo")
            configs.append(LinearConfig(**best["config"]) if best else candidates(shape, rows, facts)[0])
        size = sum(shape.bytes(rows) for shape in chain.shapes)
        case = f"chain/m{rows}"
        on = chain.ours(rows, configs)
        off = chain.ours(rows, [dataclasses.replace(config, pdl=False) for config in configs])
        same = torch.equal(on(0), off(0))
        for variant, call in (("pdl", on), ("no-pdl", off), ("cublas", chain.cublas(rows))):
            us = graph_us(call, 1, replays=8)
            run.write(case, variant, us / CHAIN_LAYERS, size, pdl_changes_nothing=same)
        if not same:
            print(f"{case}: results with and without programmatic dependent launch differ")


def run_experts(run: Run, facts: DeviceFacts) -> None:
    for name, num_experts, size, k in EXPERTS:
        weight = torch.empty(num_experts, size, k, dtype=DTYPE).normal_(0, k**-0.5)
        for rows in EXPERT_ROWS:
            repeat = EXPERT_REPEAT[name]
            x = torch.empty(rows // repeat, k, dtype=DTYPE).normal_()
            # A token's experts are distinct; of different tokens, they may be the same.
            ids = [
                torch.cat([torch.randperm(num_experts)[:8] for _ in range(rows // 8)]) for _ in range(256 // rows * 4)
            ]
            read = sum(len(one.unique()) for one in ids) / len(ids)
            num_bytes = int(2 * (read * size * k + len(x) * k + rows * size))
            out = torch.empty(rows, size, dtype=DTYPE)
            reference = reference_linear.expert_linear(x, weight, ids[0], repeat=repeat).float()

            def ours(config: LinearConfig) -> Callable[[int], torch.Tensor]:
                return lambda index: ops.expert_linear(x, weight, ids[index], repeat=repeat, out=out, config=config)  # noqa: B023

            def gathered(index: int) -> torch.Tensor:
                return torch.bmm(weight[ids[index]], x.repeat_interleave(repeat, 0)[:, :, None])[:, :, 0]  # noqa: B023

            case = f"{name}/r{rows}"
            run.measure(case, "torch-ops", gathered, len(ids), num_bytes)
            pdl = facts.capability >= 90
            configs = [choose_expert_config(k, DTYPE, facts), *expert_configs()]
            for config in dict.fromkeys(dataclasses.replace(config, pdl=pdl) for config in configs):
                if run.expired:
                    return
                run.measure(case, "hf_turbo", ours(config), len(ids), num_bytes, config, out, reference)


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for linear.jsonl")
    parser.add_argument("--budget", type=float, default=110.0, help="no new variant after so many seconds")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", help="names such as 8b/qkv; all by default")
    arguments = parser.parse_args()

    # Processes can't be forked once the device is in use, so another one asks for its facts.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        facts = pool.apply(find_facts)
    if facts is None:
        parser.error("needs a CUDA device")
    shapes = [s for s in [*LARGE, *SMALL] if not arguments.shapes or s.name in arguments.shapes]
    # One kernel serves 8 and 16 rows, so those need compiling once.
    jobs = list(find_jobs(shapes, arguments.rows, facts))
    jobs = [job for job in jobs if not (job.config.dot and job.rows == 8 and 16 in arguments.rows)]
    compile_all(jobs, facts.capability, budget=60)

    torch.set_default_device("cuda")
    torch.manual_seed(0)
    run = Run(arguments.out, arguments.budget, start)
    for shape in shapes:
        run_shape(run, shape, arguments.rows, facts)
    if not arguments.shapes:
        run_chain(run, [rows for rows in arguments.rows if rows in CHAIN_ROWS], facts)
        run_experts(run, facts)
    run.table()


if __name__ == "__main__":
    main()
