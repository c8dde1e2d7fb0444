"""Times store_kv and paged_attention on a CUDA device, beside torch's SDPA in the same run.

    python -m benchmarks.attention --out DIR [--sweep] [--quick] [--budget SECONDS]

Every variant is checked before it is timed: its output starts as NaN and must match float32 attention. Times
are medians over replays of a CUDA graph whose calls rotate among several KV sets, so that no set is still in
the L2 cache when its turn comes again. `fraction_of_floor` is the bytes that must be moved over the bandwidth
of a large copy (decode, store), or the operations over the rate of a large bf16 matrix product (prompt).

Rows go to DIR/attention.jsonl; a table of the best variants comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch
import triton

from hf_turbo.ops.attention_config import AttentionConfig, choose_config, device_facts
from hf_turbo.ops.metadata import AttentionMetadata, LayerKV
from hf_turbo.ops.paged_attention import paged_attention
from hf_turbo.ops.store_kv import store_kv

MIN_ROTATION_BYTES = 256 << 20  # several times the 60 MB of L2 of an H200
ERROR_LIMIT = 3e-2  # of an element, relative to its size plus the root mean square of its row


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` sequences of `length` tokens, the last `q_len` of them queries."""

    name: str
    batch: int
    length: int
    q_len: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    dim: int = 128
    window: int | None = None
    softcap: float | None = None
    splits: tuple[int, ...] = ()  # to sweep

    @property
    def is_decode(self) -> bool:
        return self.q_len == 1

    @property
    def bytes(self) -> int:
        kv = self.batch * min(self.length, self.window or self.length) * self.num_kv_heads * 2 * self.dim
        return 2 * (kv + 2 * self.batch * self.q_len * self.num_heads * self.dim)

    @property
    def flops(self) -> int:
        window = self.window or self.length
        pairs = sum(min(position + 1, window) for position in range(self.length - self.q_len, self.length))
        return 4 * self.batch * self.num_heads * self.dim * pairs


DECODE = [
    Case("b32/l8192", 32, 8192, splits=(1, 2, 3, 4)),
    Case("b1/l32768", 1, 32768, splits=(16, 24, 32, 33, 48, 64, 96)),
    Case("b64/l1024", 64, 1024, splits=(1, 2, 3, 4)),
    Case("b1/l1024", 1, 1024, splits=(4, 8, 16)),
    Case("b1/l128", 1, 128, splits=(1, 2, 4)),
    Case("b16/l8192", 16, 8192, splits=(1, 2, 3, 4, 6)),
    Case("b8/l8192", 8, 8192, splits=(3, 4, 6, 8)),
    Case("b64/l4096", 64, 4096, splits=(1, 2)),
    Case("b128/l1024", 128, 1024, splits=(1, 2)),
    Case("b256/l512", 256, 512, splits=(1, 2)),
    Case("b32/l8192/window1024", 32, 8192, window=1024, splits=(1, 2)),
    Case("b32/l4096/h32-32-64", 32, 4096, num_kv_heads=32, dim=64),
    Case("b32/l4096/h32-32-80", 32, 4096, num_kv_heads=32, dim=80),
    Case("b32/l4096/h16-8-256", 32, 4096, num_heads=16, dim=256),
]
PROMPT = [
    Case("chunk2048/l10240", 1, 10240, q_len=2048),
    Case("fresh8192", 1, 8192, q_len=8192),
    Case("gemma/chunk2048/l10240", 1, 10240, q_len=2048, num_heads=16, dim=256, window=4096, softcap=50.0),
]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Problem:
    """The tensors of a case: a pool of permuted blocks, and as many sets of queries and tables as rotate."""

    def __init__(self, case: Case, block_size: int):
        self.case = case
        torch.manual_seed(0)
        device = torch.device("cuda")
        num_sets = max(1, min(256, -(-MIN_ROTATION_BYTES // case.bytes))) if case.is_decode else 1
        blocks = -(-case.length // block_size)
        num_blocks = num_sets * case.batch * blocks
        # K and V of a block in a row, as the cache lays them out.
        pool = random(num_blocks, 2, case.num_kv_heads, block_size, case.dim)
        self.kv = LayerKV.of([pool[:, 0]], [pool[:, 1]])
        tables = torch.randperm(num_blocks, device=device).int().view(num_sets, case.batch, blocks)
        self.sets = []
        for table in tables:
            metadata = AttentionMetadata(
                block_tables=table,
                seq_lens=torch.full((case.batch,), case.length, dtype=torch.int32, device=device),
                cu_seqlens_q=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len,
                max_seqlen_q=case.q_len,
                max_seqlen_k=case.length,
                sliding_window=case.window,
            )
            self.sets.append((random(case.batch * case.q_len, case.num_heads, case.dim), metadata))
        self.out = torch.empty_like(self.sets[0][0])
        self.reference = self._reference()

    def dense(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous `[batch, num_kv_heads, length, dim]` keys and values of one set."""
        table = self.sets[index][1].block_tables.long()
        result = []
        for pool in (self.kv.k_segments[0], self.kv.v_segments[0]):
            x = pool[table].transpose(2, 3).flatten(1, 2)[:, : self.case.length]
            result.append(x.transpose(1, 2).contiguous())
        return tuple(result)

    def _reference(self) -> torch.Tensor:
        """Float32 attention of the first set, a head and at most 1024 queries at a time."""
        case = self.case
        keys, values = (x.float() for x in self.dense(0))
        q = self.sets[0][0].view(case.batch, case.q_len, case.num_kv_heads, -1, case.dim).float()
        out = torch.empty_like(q)
        key = torch.arange(case.length, device=q.device)
        for b, h, start in itertools.product(range(case.batch), range(case.num_kv_heads), range(0, case.q_len, 1024)):
            rows = slice(start, start + 1024)
            scores = torch.einsum("qgd,kd->gqk", q[b, rows, h], keys[b, h]) * case.dim**-0.5
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            query = key[case.length - case.q_len :][rows, None]
            seen = (key <= query) & (key > query - (case.window or case.length))
            weights = scores.masked_fill_(~seen, float("-inf")).softmax(-1)
            out[b, rows, h] = torch.einsum("gqk,kd->qgd", weights, values[b, h])
        return out.view_as(self.out)

    def ours(self, config: AttentionConfig | None):
        def call(index: int) -> torch.Tensor:
            q, metadata = self.sets[index]
            return paged_attention(
                q, self.kv, metadata, self.case.dim**-0.5, self.case.softcap, out=self.out, config=config
            )

        return call

    def sdpa(self):
        """Torch's attention over contiguous keys: SDPA, or FlashAttention-2's varlen form for a chunk."""
        case = self.case
        if case.window or case.softcap:
            return None
        dense = [self.dense(i) for i in range(len(self.sets))]
        if case.is_decode or case.q_len == case.length:

            def call(index: int) -> torch.Tensor:
                q = self.sets[index][0].view(case.batch, case.q_len, case.num_heads, case.dim).transpose(1, 2)
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, *dense[index], is_causal=not case.is_decode, enable_gqa=True
                )
                return out.transpose(1, 2).reshape_as(self.out)

            return call
        packed = [[x.transpose(1, 2).flatten(0, 1).contiguous() for x in kv] for kv in dense]
        cu_seqlens_k = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.length

        def call_varlen(index: int) -> torch.Tensor:
            q, metadata = self.sets[index]
            lengths = (metadata.cu_seqlens_q, cu_seqlens_k, case.q_len, case.length)
            # No dropout, causal, no debug mask.
            return torch.ops.aten._flash_attention_forward(q, *packed[index], *lengths, 0.0, True, False)[0]

        return call_varlen


def graph_us(call, num_sets: int, replays: int = 15, graph_ms: float = 4.0) -> float:
    """Median microseconds of one call, in a graph of calls that rotate among the sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(min(num_sets, 2)):
            call(index)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(0)
        end.record()
        end.synchronize()
        rounds = max(1, min(50, int(graph_ms / max(start.elapsed_time(end), 0.005) / num_sets)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for index in range(num_sets):
                    call(index)
        times = []
        for _ in range(replays + 3):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return 1000 * statistics.median(times[3:]) / (rounds * num_sets)


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, counting those read and those written.

    Not in a graph: a copy node there may go to a slower copy engine.
    """
    x = torch.randint(2**30, (1 << 30,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * x.nbytes / (statistics.median(times) * 1e-3)


def matmul_rate() -> float:
    """Floating-point operations a second of a large bf16 matrix product of random data."""
    a, b = random(2, 8192, 8192)
    return 2 * 8192**3 / (graph_us(lambda _: a @ b, 1) * 1e-6)


def commit() -> str:
    try:
        result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return result.stdout.strip() or os.environ.get("HF_TURBO_COMMIT", "unknown")


class Run:
    """Writes rows, remembers the best of each case, and watches the clock."""

    def __init__(self, out: Path, budget: float):
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "attention.jsonl"
        self.path.unlink(missing_ok=True)
        self.start = time.monotonic()
        self.budget = budget
        versions = {"torch": torch.__version__, "triton": triton.__version__, "hf_turbo": commit()}
        self.environment = {"device": torch.cuda.get_device_name(), "versions": versions}
        self.bandwidth = copy_bandwidth()
        self.flop_rate = matmul_rate()
        print(f"copy {self.bandwidth / 1e12:.3f} TB/s, matmul {self.flop_rate / 1e12:.0f} TFLOP/s")
        self.rows: list[dict] = []

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def expired(self) -> bool:
        return self.elapsed > self.budget

    def write(self, case: str, variant: str, us: float | None, size: int, floor_us: float, **more) -> None:
        row = {"bench": "attention", "case": case, "variant": variant, **self.environment}
        row |= {"us": us, "bytes": size, "fraction_of_floor": us and floor_us / us, **more}
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        detail = f"{us:9.2f} us  {row['fraction_of_floor']:.3f}" if us else f"failed: {more['error']}"
        print(f"{self.elapsed:4.0f} s  {case:38} {variant:13} {detail}  {more.get('config', '')}", flush=True)

    def measure(self, problem: Problem, block_size: int, variant: str, call, config=None) -> float | None:
        """Checks and times one variant; a failure is a row too."""
        case = problem.case
        name = f"{case.name}/h{case.num_heads}-{case.num_kv_heads}-{case.dim}/bf16"
        floor_us = 1e6 * (case.bytes / self.bandwidth if case.is_decode else case.flops / self.flop_rate)
        more = {"block_size": block_size, "config": config and dataclasses.asdict(config)}
        try:
            problem.out.fill_(float("nan"))
            reference = problem.reference
            error = (call(0).float() - reference).abs()
            more["max_error"] = error.max().item()
            size = reference.abs() + reference.square().mean(-1, keepdim=True).sqrt()
            relative = (error / size).max().item()
            if not relative < ERROR_LIMIT:  # NaN too
                raise ArithmeticError(f"the result is off by {relative} of its size")
            us = graph_us(call, len(problem.sets))
        except Exception as failure:  # one bad configuration must not end the sweep
            torch.cuda.synchronize()
            self.write(name, variant, None, case.bytes, floor_us, **more, error=repr(failure)[:300])
            return None
        self.write(name, variant, us, case.bytes, floor_us, **more)
        return us

    def best_of(self, problem: Problem, block_size: int, configs) -> AttentionConfig | None:
        """Measures configurations while there is time; returns the fastest."""
        results = []
        for config in configs:
            if self.expired:
                break
            us = self.measure(problem, block_size, "hf_turbo", problem.ours(config), config)
            results.append((us or float("inf"), config))
        return min(results, key=lambda result: result[0], default=(0, None))[1]

    def table(self) -> None:
        """The best variant of each case and block size, beside torch."""
        best: dict[tuple, dict] = {}
        for row in self.rows:
            key = (row["case"], row.get("block_size"), row["variant"])
            if row["us"] and (key not in best or row["us"] < best[key]["us"]):
                best[key] = row
        print(f"\n{'case':40} {'block':>5} {'variant':13} {'us':>9} {'floor':>6} {'error':>8}  configuration")
        for (case, block_size, variant), row in sorted(best.items(), key=lambda item: str(item[0])):
            config = row.get("config") or {}
            short = " ".join(f"{k}={v}" for k, v in config.items() if v is not None)
            error = row.get("max_error")
            print(
                f"{case:40} {block_size or '':>5} {variant:13} {row['us']:9.2f} "
                f"{row['fraction_of_floor']:6.3f} {'' if error is None else format(error, '.1e'):>8}  {short}"
            )
        failed = sum(row["us"] is None for row in self.rows)
        print(f"{len(self.rows)} rows, {failed} failed{', out of time' if self.expired else ''}")


def table_config(case: Case) -> AttentionConfig:
    rows = case.q_len * case.num_heads // case.num_kv_heads
    facts = device_facts(torch.device("cuda", 0))
    programs = case.batch * case.num_kv_heads
    return choose_config(rows, programs, case.dim, case.dim, torch.bfloat16, facts)


def decode_configs(block_size: int, base: AttentionConfig) -> list[AttentionConfig]:
    """Tiles, warps and stages to try; blocks other than 64 get fewer."""
    shapes = {
        16: [(64, 4, 2), (64, 4, 3), (64, 2, 3), (32, 4, 3), (32, 2, 3)],
        32: [(64, 4, 3), (32, 4, 3), (32, 2, 3), (32, 2, 4)],
        64: [
            (64, 4, 3), (64, 4, 4), (64, 2, 3), (64, 8, 3), (32, 4, 3), (32, 4, 4), (32, 2, 3), (32, 2, 4),
            (128, 4, 3), (128, 8, 3),
        ],
        128: [(64, 4, 3), (32, 2, 3), (128, 8, 2)],
    }  # fmt: skip
    configs = [dataclasses.replace(base, tile=t, num_warps=w, num_stages=s) for t, w, s in shapes[block_size]]
    return [base, *configs]


def prompt_configs(case: Case, base: AttentionConfig) -> list[AttentionConfig]:
    shapes = {
        128: [
            (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2),
            (64, 32, 4, 4), (128, 64, 8, 4),
        ],
        256: [(128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 3)],
    }  # fmt: skip
    names = ("block_m", "tile", "num_warps", "num_stages")
    return [base, *(dataclasses.replace(base, **dict(zip(names, s, strict=True))) for s in shapes[case.dim])]


def run_decode(run: Run, cases: list[Case], block_sizes: list[int], sweep: bool) -> None:
    for block_size in block_sizes:
        # The other block sizes answer one question, what they cost, on the long and the large case.
        for case in cases if block_size == 64 else cases[:3]:
            if run.expired:
                return
            problem = Problem(case, block_size)
            if block_size == 64 and (peer := problem.sdpa()):
                run.measure(problem, block_size, "torch-sdpa", peer)
            base = table_config(case)
            best = run.best_of(problem, block_size, decode_configs(block_size, base) if sweep else [base])
            if sweep and best and block_size == 64:
                splits = [dataclasses.replace(best, num_splits=n) for n in case.splits]
                run.best_of(problem, block_size, splits)


def run_prompt(run: Run, cases: list[Case], sweep: bool) -> None:
    for case in cases:
        base = table_config(case)
        for block_size in (64, 32, 16):
            if run.expired:
                return
            problem = Problem(case, block_size)
            if block_size == 64 and (peer := problem.sdpa()):
                run.measure(problem, block_size, "torch-flash2", peer)
            configs = prompt_configs(case, base) if sweep and block_size == 64 else [base]
            run.best_of(problem, block_size, configs)


def run_store(run: Run, case: Case) -> None:
    """The cache write of a decode step or a prompt."""
    problem = Problem(case, 64)
    k, v = random(2, case.batch * case.q_len, case.num_kv_heads, case.dim)
    us = graph_us(lambda _: store_kv(k, v, problem.kv, problem.sets[0][1]), 1)
    num_bytes = 4 * k.nbytes
    run.write(case.name, "hf_turbo", us, num_bytes, 1e6 * num_bytes / run.bandwidth)


def run_host(run: Run, case: Case) -> None:
    """What a decode call costs the host when nothing is captured."""
    problem = Problem(case, 64)
    k, v = random(2, case.batch * case.q_len, case.num_kv_heads, case.dim)
    functions = {
        "host/paged_attention": problem.ours(None),
        "host/store_kv": lambda index: store_kv(k, v, problem.kv, problem.sets[index][1]),
    }
    for name, function in functions.items():
        function(0)
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                function(0)
            times.append((time.perf_counter() - start) / 20)
        run.write(name, "hf_turbo", 1e6 * statistics.median(times), 0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for attention.jsonl")
    parser.add_argument("--sweep", action="store_true", help="try many configurations, not only the table's")
    parser.add_argument("--quick", action="store_true", help="three decode cases, one prompt, blocks of 64")
    parser.add_argument("--budget", type=float, default=330.0, help="no new variant after so many seconds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    run = Run(arguments.out, arguments.budget)
    run_host(run, Case("host", 1, 1024))
    run_store(run, Case("store/b64", 64, 1024))
    run_store(run, Case("store/prompt8192", 1, 8192, q_len=8192))
    run_decode(run, DECODE[:3] if arguments.quick else DECODE, [64], arguments.sweep)
    run_prompt(run, PROMPT[:1] if arguments.quick else PROMPT, arguments.sweep)
    if not arguments.quick:
        run_decode(run, DECODE, [16, 128, 32], arguments.sweep)
    run.table()


if __name__ == "__main__":
    main()
