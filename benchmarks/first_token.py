"""Time to the first token of short prompts: unpatched, patched, and patched with prompts that are not captured.

    python -m benchmarks.first_token --model llama-3-8b --cases 1x16 1x128 4x128 --out FILE.jsonl

A call of `generate()` with one new token, medians over the calls after the first. The first one of a size captures it,
and is told apart; what it compiles is kept on disk, so only a run on a bare machine shows that. Random weights will do.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_turbo.bench.measure import clock, synchronize
from hf_turbo.bench.models import DTYPES, load_model
from hf_turbo.bench.rows import device_name, versions
from hf_turbo.modeling import prompt_steps
from hf_turbo.patching import handle_of, patch


@dataclass(frozen=True)
class FirstTokenRow:
    """One prompt size.

    Args:
        case: `model/b1/p128`.
        stock_ms, patched_ms: medians. launched_ms: patched, each operation launched by itself.
        first_ms: the patched model's first call of that size; graphs: that it captured.
        same: of how many rows the token was the unpatched model's.
    """

    bench: str
    case: str
    device: str
    versions: dict[str, str]
    dtype: str
    stock_ms: float
    launched_ms: float
    patched_ms: float
    first_ms: float
    graphs: int
    rows: int
    same: int


def timed(model: Any, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Milliseconds of a call, and its tokens `[rows]`."""
    now = clock(model.device)
    synchronize(model.device)
    began = now()
    text = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    synchronize(model.device)
    return (now() - began) * 1e3, text[:, -1]


def rows(args: argparse.Namespace) -> Iterator[FirstTokenRow]:
    device = torch.device(args.device)
    model = load_model(args.model, DTYPES[args.dtype], device)
    common = dict(bench="first token", device=device_name(device), versions=versions(), dtype=args.dtype)
    sizes = [tuple(map(int, case.split("x"))) for case in args.cases]
    prompts = [torch.randint(1, model.config.vocab_size, size, device=device) for size in sizes]

    def calls(ids: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        both = [timed(model, ids) for _ in range(args.repeats + 1)]
        return [ms for ms, _ in both], both[-1][1]

    stock = [calls(ids) for ids in prompts]
    patch(model)
    most, prompt_steps.SHORT_WORK = prompt_steps.SHORT_WORK, 0.0
    launched = [calls(ids) for ids in prompts]
    prompt_steps.SHORT_WORK = most
    for (num_rows, length), ids, own, plain in zip(sizes, prompts, stock, launched, strict=True):
        before = handle_of(model).steps.num_captured
        times, tokens = calls(ids)
        yield FirstTokenRow(
            case=f"{args.model}/b{num_rows}/p{length}", stock_ms=statistics.median(own[0][1:]),
            launched_ms=statistics.median(plain[0][1:]), patched_ms=statistics.median(times[1:]), first_ms=times[0],
            graphs=handle_of(model).steps.num_captured - before, rows=num_rows,
            same=int((tokens == own[1]).sum()), **common,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", default=["1x16", "1x128", "4x128", "1x512", "1x1000", "1x2000"])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with args.out.open("a") as file:
        for row in rows(args):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            print(
                f"{row.case:24} stock {row.stock_ms:7.2f} ms, launched {row.launched_ms:7.2f}, "
                f"patched {row.patched_ms:7.2f} (first {row.first_ms:8.1f}, {row.graphs} graphs), "
                f"same {row.same}/{row.rows}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
