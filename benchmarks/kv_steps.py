"""Decode steps over a cache that is full already, by format, without a clock in the loop.

    python -m benchmarks.kv_steps --model llama-3-8b --cases 16x8192 1x128 --out FILE.jsonl

A prompt is read once for each format; `generate()` goes on from its cache. What a call of many new tokens takes more
than one of few is steps alone. Random weights will do: nothing here depends on what the text says.
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

from hf_turbo.bench.measure import clean, clock, synchronize
from hf_turbo.bench.models import DTYPES, load_model
from hf_turbo.bench.rows import device_name, versions
from hf_turbo.compat import CACHE_NAME
from hf_turbo.patching import patch, unpatch


@dataclass(frozen=True)
class StepRow:
    """Steps of one format.

    Args:
        case: `model/b16/p8192`. kv: the format; `wide`: what the model computes.
        step_ms: median of the repeats; of_wide: over that of the wide cache in the same run.
    """

    bench: str
    case: str
    kv: str
    device: str
    versions: dict[str, str]
    dtype: str
    step_ms: float
    of_wide: float | None


class Text:
    """A text that is gone on with, over its cache."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        self._model = model
        self._ids = torch.randint(1, model.config.vocab_size, (rows, length), device=model.device)
        self._cache: Any = None
        self.go_on(1)

    def go_on(self, new: int) -> float:
        """Adds so many tokens, greedy; the seconds that it took."""
        now = clock(self._model.device)
        cached = {} if self._cache is None else {CACHE_NAME: self._cache}
        synchronize(self._model.device)
        began = now()
        output = self._model.generate(
            input_ids=self._ids, attention_mask=torch.ones_like(self._ids), max_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, **cached,
        )  # fmt: skip
        synchronize(self._model.device)
        self._ids, self._cache = output.sequences, output[CACHE_NAME]
        return now() - began


def step_seconds(text: Text, long: int, short: int, repeats: int) -> float:
    """Seconds a step: the median of differences."""
    text.go_on(short)  # captures
    return statistics.median((text.go_on(long) - text.go_on(short)) / (long - short) for _ in range(repeats))


def rows(args: argparse.Namespace) -> Iterator[StepRow]:
    device = torch.device(args.device)
    model = load_model(args.model, DTYPES[args.dtype], device)
    common = dict(bench="kv steps", device=device_name(device), versions=versions(), dtype=args.dtype)
    wide: dict[str, float] = {}
    for kv in args.kv:
        patch(model, kv_cache_dtype=None if kv == "wide" else kv)
        for case in args.cases:
            num_rows, length = map(int, case.split("x"))
            seconds = step_seconds(Text(model, num_rows, length), args.long, args.short, args.repeats)
            if kv == "wide":
                wide[case] = seconds
            yield StepRow(
                case=f"{args.model}/b{num_rows}/p{length}", kv=kv, step_ms=seconds * 1e3,
                of_wide=seconds / wide[case] if case in wide else None, **common,
            )  # fmt: skip
        unpatch(model)
        clean(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv", nargs="+", default=["wide", "int8", "fp8", "int4"])
    parser.add_argument("--cases", nargs="+", default=["16x8192", "1x128"], help="rows x tokens of the prompt")
    parser.add_argument("--long", type=int, default=80)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with args.out.open("a") as file:
        for row in rows(args):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            share = "" if row.of_wide is None else f"  {row.of_wide:.3f} of wide"
            print(f"{row.case:28} {row.kv:5} {row.step_ms:8.3f} ms{share}", flush=True)


if __name__ == "__main__":
    main()
