"""Times the linear kernels on a CUDA device, beside cuBLAS in the same run.

    python -m benchmarks.linear --out DIR [--budget SECONDS] [--rows 1 4 16] [--shapes 8b/qkv ...]
    python -m benchmarks.linear --out DIR --tune [--budget SECONDS] [--rows 1 4 16]

Every variant is checked before it is timed: its output starts as NaN and must match the torch reference. Times are
medians over replays of a CUDA graph whose calls rotate among copies of the weights, so that no copy is still in the L2
cache when its turn comes again. `fraction_of_floor` is the bytes that must be moved over the bandwidth of a large
copy. All kernels are compiled first, by as many processes as there are cores.

    cublas       one `F.linear` with the weights merged (a second copy of them), and nothing else
    torch-ops    what Transformers does: a linear a weight, activation and product, or residual
    hf_turbo     one configuration of `linear`, with activation and residual

The chain is the figure that matters: eight layers' norms and linears (q/k/v, o, gate/up, down) in one graph, in
microseconds a layer, with the table's configurations.

    pdl, no-pdl  our norms and linears, with and without programmatic dependent launch
    cublas       the linears alone, weights merged
    tuned        with --tune, which times nothing but the chain: the configurations that suit it best

Rows go to DIR/linear.jsonl; a table of the best variants comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.attention import commit, copy_bandwidth, graph_us
from benchmarks.linear_cases import (
    DTYPE,
    LARGE,
    SMALL,
    Problem,
    Shape,
    candidates,
    checked_error,
    compile_jobs,
    table_config,
)
from benchmarks.linear_chain import SHAPES, Chain, chain_candidates, layer_us, tune
from benchmarks.precompile import compile_all
from hf_turbo.ops import linear as ops
from hf_turbo.ops import reference_linear
from hf_turbo.ops.attention_config import DeviceFacts, device_facts
from hf_turbo.ops.linear_config import LinearConfig, choose_expert_config

CHAIN_ROWS = (1, 4, 16, 64)
EXPERTS = [("moe/gate_up", 128, 1536, 2048), ("moe/down", 128, 2048, 768)]  # Qwen3-30B-A3B: name, E, N, K
EXPERT_ROWS = (8, 64)
EXPERT_REPEAT = {"moe/gate_up": 8, "moe/down": 1}


def expert_configs() -> list[LinearConfig]:
    return [LinearConfig(n, k, w) for n, k, w in [(1, 1024, 4), (2, 1024, 4), (4, 512, 2), (4, 256, 1), (1, 2048, 8)]]


def find_facts() -> DeviceFacts | None:
    if not torch.cuda.is_available():
        return None
    return device_facts(torch.device("cuda", 0))


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
                more["error_size"] = checked_error(call(0), reference)
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
        peers = ("cublas", "torch-ops")
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
                configs = "  ".join(f"{name}: {short(config)}" for name, config in row.get("configs", {}).items())
                print(f"{row['case']:20} {row['us']:8.2f} {row['fraction_of_floor']:6.3f} {row['variant']:8} {configs}")
        failed = sum(row["us"] is None for row in self.rows)
        print(f"{len(self.rows)} rows, {failed} failed{', out of time' if self.expired else ''}")


def short(config: dict[str, Any]) -> str:
    names = ("block_n", "block_k", "num_warps", "num_stages", "split_k", "prefetch")
    return ("dot" if config["dot"] else "gemv") + " " + "/".join(str(config[name]) for name in names)


def run_shape(run: Run, shape: Shape, all_rows: list[int], facts: DeviceFacts) -> None:
    problem = Problem(shape)
    copies = len(problem.merged)
    for rows in all_rows:
        case, size = f"{shape.name}/m{rows}", shape.bytes(rows)
        reference = problem.reference(rows)
        run.measure(case, "cublas", problem.cublas(rows), copies, size)
        if len(shape.sizes) > 1 or shape.residual:
            run.measure(case, "torch-ops", problem.torch_ops(rows), copies, size)
        out = problem.out[:rows]
        for config in candidates(shape, rows, facts):
            if run.expired:
                return
            run.measure(case, "hf_turbo", problem.ours(rows, config), copies, size, config, out, reference)


def run_chain(run: Run, chain: Chain, all_rows: list[int], facts: DeviceFacts, tuning: bool) -> None:
    """The table's configurations, with and without programmatic dependent launch; then the search, if asked for."""
    for rows in all_rows:
        case, size = f"chain/m{rows}", chain.bytes(rows)
        configs = [table_config(shape, rows, facts) for shape in SHAPES]
        on = chain.ours(rows, configs)
        off = chain.ours(rows, [dataclasses.replace(config, pdl=False) for config in configs])
        same = torch.equal(on(0), off(0))
        if not same:
            print(f"{case}: results with and without programmatic dependent launch differ")
        for variant, call in (("pdl", on), ("no-pdl", off)):
            run.write(case, variant, layer_us(call), size, configs=by_shape(configs), pdl_changes_nothing=same)
        run.write(case, "cublas", layer_us(chain.cublas(rows)), size)
        if tuning and not run.expired:
            tuned, us = tune(chain, rows, facts, lambda: run.expired)
            run.write(case, "tuned", us, size, configs=by_shape(tuned))
            print(f"{case}: tuned to {us:.2f} us a layer", flush=True)


def by_shape(configs: list[LinearConfig]) -> dict[str, dict[str, Any]]:
    return {shape.name: dataclasses.asdict(config) for shape, config in zip(SHAPES, configs, strict=True)}


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
    parser.add_argument("--shapes", nargs="+", help="names such as 8b/qkv; all by default, with the chain")
    parser.add_argument("--tune", action="store_true", help="search the chain's configurations; nothing else is timed")
    arguments = parser.parse_args()
    if arguments.tune and arguments.shapes:
        parser.error("--tune is of the chain of all shapes: leave out --shapes")

    # Processes can't be forked once the device is in use, so another one asks for its facts.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        facts = pool.apply(find_facts)
    if facts is None:
        parser.error("needs a CUDA device")
    shapes = [s for s in [*LARGE, *SMALL] if not arguments.shapes or s.name in arguments.shapes]
    if arguments.tune:
        jobs = compile_jobs(SHAPES, arguments.rows, facts, chain_candidates)
    else:
        jobs = compile_jobs(shapes, arguments.rows, facts, candidates)
    compile_all(jobs, facts.capability, budget=60)

    torch.set_default_device("cuda")
    torch.manual_seed(0)
    run = Run(arguments.out, arguments.budget, start)
    if arguments.tune:
        run_chain(run, Chain(), arguments.rows, facts, tuning=True)
    else:
        for shape in shapes:
            run_shape(run, shape, arguments.rows, facts)
    if not arguments.tune and not arguments.shapes:
        run_chain(run, Chain(), [rows for rows in arguments.rows if rows in CHAIN_ROWS], facts, tuning=False)
        run_experts(run, facts)
    run.table()


if __name__ == "__main__":
    main()
