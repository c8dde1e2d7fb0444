"""Times the small fused kernels of a decoder layer on a CUDA device, beside Transformers' own functions.

    python -m benchmarks.layers --out DIR [--sweep] [--budget SECONDS]

Shapes of Llama-3-8B in bf16. Every variant is checked before it is timed: its outputs start as NaN and must match
Transformers'. A decode step's time is that of one of 50 launches in a row in a CUDA graph, so the gap between two
launches is in it; "pdl" and "no-pdl" are with and without programmatic dependent launch. A prompt's time is that of
calls that rotate among sets of tensors, so that none is still in the L2 cache. `fraction_of_floor` is the bytes that
must be moved over the bandwidth of a large copy.

Rows go to DIR/layers.jsonl; a table comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.attention import commit, copy_bandwidth, random
from hf_turbo.ops import activation, norm, rotary
from hf_turbo.ops.attention_config import device_facts
from hf_turbo.ops.metadata import AttentionMetadata, LayerKV
from hf_turbo.ops.norm_spec import RMSNorm
from hf_turbo.ops.store_kv import store_kv

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
BLOCK_SIZE = 64
DECODE_ROWS = (1, 4, 32)
PROMPT_ROWS = (8192, 32768)
DECODE_LAUNCHES = 50
ROTATION_BYTES = 512 << 20  # several times the 60 MB of L2 of an H200
TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps

Call = Callable[[], Any]


@dataclass
class Problem:
    """One op on one set of tensors.

    Args:
        ours: runs the kernel with a configuration.
        theirs: runs what Transformers runs.
        outputs: what the kernel writes.
        expected: the same as Transformers computes it.
        bytes: what must be read and written.
        config: the table's configuration.
        sweep: others to try.
    """

    ours: Callable[[Any], Any]
    theirs: Call
    outputs: list[torch.Tensor]
    expected: list[torch.Tensor]
    bytes: int
    config: Any
    sweep: list[Any]


def norm_problem(rows: int, with_residual: bool) -> Problem:
    x, residual, out = random(3, rows, HIDDEN)
    module = LlamaRMSNorm(HIDDEN).to("cuda", torch.bfloat16)
    module.weight.data.copy_(random(HIDDEN))
    spec = RMSNorm(module.weight.data, module.variance_epsilon, plus_one=False, round_first=True)
    config = norm.choose_config(HIDDEN, device_facts(x.device))

    def ours(config: norm.NormConfig) -> Any:
        return norm.rms_norm(x, spec, residual=residual if with_residual else None, out=out, config=config)

    def theirs() -> torch.Tensor:
        return module(residual + x if with_residual else x)

    sweep = [replace(config, num_warps=warps) for warps in (2, 4, 8, 16)]
    size = (4 if with_residual else 2) * x.nbytes + spec.weight.nbytes
    return Problem(ours, theirs, [out], [theirs()], size, config, sweep)


def gated_problem(rows: int) -> Problem:
    gate, up = random(rows, 2 * INTERMEDIATE).chunk(2, -1)
    out = torch.empty_like(gate)
    config = activation.choose_config(rows, INTERMEDIATE, device_facts(gate.device))

    def theirs() -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    sweep = [
        replace(config, block=block, num_warps=warps)
        for block, warps in ((256, 1), (512, 1), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
    ]
    return Problem(
        lambda config: activation.gated(gate, up, "silu", out=out, config=config),
        theirs, [out], [theirs()], 3 * out.nbytes, config, sweep,
    )  # fmt: skip


def rotary_problem(rows: int, decode: bool) -> Problem:
    qkv = random(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    cos, sin = random(2, rows, HEAD_DIM)
    num_seqs, length = (rows, 1000) if decode else (1, rows)
    blocks = -(-length // BLOCK_SIZE)
    tables = torch.randperm(num_seqs * blocks, device="cuda").int().view(num_seqs, blocks)
    metadata = AttentionMetadata(
        block_tables=tables,
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * (rows // num_seqs),
        max_seqlen_q=rows // num_seqs,
        max_seqlen_k=length,
    )
    pool, expected_pool = (
        torch.full((num_seqs * blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan, device="cuda").bfloat16()
        for _ in range(2)
    )
    kv, expected_kv = (LayerKV.of([p[:, 0]], [p[:, 1]]) for p in (pool, expected_pool))
    out = torch.empty(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    config = rotary.choose_config(metadata.max_seqlen_q, HEAD_DIM, device_facts(q.device))

    def ours(config: rotary.RotaryConfig) -> torch.Tensor:
        return rotary.rotary_store_kv(
            q, k, v, cos, sin, kv, metadata, rotary_dim=HEAD_DIM, q_out=out, config=config
        )  # fmt: skip

    def theirs() -> torch.Tensor:
        """What a patched model runs without the fused kernel."""
        rotated_q, rotated_k = apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None], unsqueeze_dim=2)
        store_kv(rotated_k[0], v, expected_kv, metadata)
        return rotated_q[0]

    tiles = [(1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 8, 2), (1, 16, 4)]
    if not decode:
        tiles = [(4, 4, 4), (8, 4, 4), (8, 4, 8), (16, 4, 8), (4, 8, 4), (8, 8, 8), (16, 2, 8), (4, 16, 8)]
    sweep = [replace(config, block_t=t, block_h=h, num_warps=w) for t, h, w in tiles]
    size = 2 * qkv.nbytes + cos.nbytes + sin.nbytes
    expected_q = theirs()
    return Problem(ours, theirs, [out, pool], [expected_q, expected_pool], size, config, sweep)


OPS: dict[str, Callable[[int, bool], Problem]] = {
    "norm": lambda rows, decode: norm_problem(rows, with_residual=False),
    "add+norm": lambda rows, decode: norm_problem(rows, with_residual=True),
    "rotary+store": rotary_problem,
    "silu*up": lambda rows, decode: gated_problem(rows),
}


def check(problem: Problem, call: Call) -> None:
    for output in problem.outputs:
        output.fill_(torch.nan)
    call()
    for output, expected in zip(problem.outputs, problem.expected, strict=True):
        torch.testing.assert_close(output, expected, rtol=TOLERANCE, atol=1e-5, equal_nan=True)


def graph_us(calls: list[Call], launches: int, replays: int = 20) -> float:
    """Median microseconds of one of `launches` calls in a graph, which rotate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    times = []
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(launches):
                calls[index % len(calls)]()
        for _ in range(replays + 3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return 1000 * statistics.median(times[3:]) / launches


class Run:
    """Writes rows, and watches the clock."""

    def __init__(self, out: Path, budget: float):
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "layers.jsonl"
        self.path.unlink(missing_ok=True)
        self.start = time.monotonic()
        self.budget = budget
        versions = {"torch": torch.__version__, "triton": triton.__version__, "hf_turbo": commit()}
        self.environment = {"device": torch.cuda.get_device_name(), "versions": versions}
        self.bandwidth = copy_bandwidth()
        self.rows: list[dict] = []

    @property
    def expired(self) -> bool:
        return time.monotonic() - self.start > self.budget

    def measure(self, case: str, variant: str, problems: list[Problem], launches: int, config: Any) -> None:
        """Checks and times one variant; `config` None: Transformers'. A failure is a row too."""
        us = fraction = error = None
        try:
            if config is None:
                calls = [problem.theirs for problem in problems]
            else:
                calls = [lambda problem=problem: problem.ours(config) for problem in problems]
                check(problems[0], calls[0])
            us = graph_us(calls, launches)
            fraction = 1e6 * problems[0].bytes / self.bandwidth / us
        except Exception as failure:  # one bad configuration must not end the run
            torch.cuda.synchronize()
            error = repr(failure)[:300]
        row = {"bench": "layers", "case": case, "variant": variant, "us": us, "bytes": problems[0].bytes}
        row |= {"fraction_of_floor": fraction, **self.environment, "error": error}
        row["config"] = None if config is None else asdict(config)
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def case(self, name: str, rows: int, sweep: bool) -> None:
        """All variants of one op at one size."""
        decode = rows in DECODE_ROWS
        first = OPS[name](rows, decode)
        sets = 1 if decode else max(1, -(-ROTATION_BYTES // first.bytes))
        problems = [first, *(OPS[name](rows, decode) for _ in range(sets - 1))]
        launches = DECODE_LAUNCHES if decode else max(2, sets)
        case = f"{name}/{'decode' if decode else 'prompt'}{rows}"
        self.measure(case, "transformers", problems, launches, None)
        self.measure(case, "pdl", problems, launches, first.config)
        if decode:
            self.measure(case, "no-pdl", problems, launches, replace(first.config, pdl=False))
        for config in first.sweep if sweep else []:
            if not self.expired:
                short = " ".join(f"{key}={value}" for key, value in asdict(config).items() if key != "pdl")
                self.measure(case, short, problems, launches, config)

    def table(self) -> None:
        print(f"copy {self.bandwidth / 1e12:.3f} TB/s")
        print(f"{'case':26} {'variant':34} {'us':>9} {'floor':>6}")
        for row in self.rows:
            result = row["error"] or f"{row['us']:9.2f} {row['fraction_of_floor']:6.3f}"
            print(f"{row['case']:26} {row['variant']:34} {result}")
        failed = sum(row["error"] is not None for row in self.rows)
        print(f"{len(self.rows)} rows, {failed} failed{', out of time' if self.expired else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for layers.jsonl")
    parser.add_argument("--sweep", action="store_true", help="try other configurations too, not only the table's")
    parser.add_argument("--budget", type=float, default=35.0, help="no new case after so many seconds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    run = Run(arguments.out, arguments.budget)
    for rows in (*DECODE_ROWS, *PROMPT_ROWS):
        for name in OPS:
            if not run.expired:
                run.case(name, rows, arguments.sweep)
    run.table()


if __name__ == "__main__":
    main()
