"""What INT4 linears give on a CPU: decode and prompt speed of SmolLM2-135M, beside plain fp32 and bf16 in the same run.

    OMP_NUM_THREADS=2 python -m benchmarks.int4_cpu [--out FILE.jsonl] [--rounds 7] [--tokens 32] [--group-size 64]

Variants take turns, round by round, and a figure is the median over rounds: other programs of the machine meet all of
them alike. `decode` is the time that a call of `generate` takes longer for 33 new tokens than for one, after a prompt
of 32; `prompt` is a call for one new token after 256. Ratios are the median over rounds, too, to the better of the two
float models in the same round: above 1 is faster.

    float/fp32, float/bf16   plain Transformers
    int4/...                 `hf_turbo.quantize`, symmetric (what GPTQ files mostly are) and asymmetric (AWQ's), in bf16
    .../patched              with `hf_turbo.patch` on top
    int4/.../fp32            the same weights in a model of fp32
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hf_turbo
from hf_turbo.bench.rows import versions
from hf_turbo.quantization.data_free import quantize
from hf_turbo.sample_models import sample_model

MODEL = "smollm2-135m-instruct"
DECODE_PROMPT, PROMPT = 32, 256


def variants(group_size: int) -> dict[str, Any]:
    """The models by name."""
    from transformers import AutoModelForCausalLM

    folder = sample_model(MODEL)
    float32: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    float32.generation_config.eos_token_id = None  # as many tokens as asked for
    models = {"float/fp32": float32, "float/bf16": copy.deepcopy(float32).to(torch.bfloat16)}
    for name, symmetric in (("symmetric", True), ("asymmetric", False)):
        quantized = quantize(copy.deepcopy(float32), 4, group_size, symmetric=symmetric)
        models[f"int4/{name}/fp32"] = quantized
        models[f"int4/{name}/bf16"] = copy.deepcopy(quantized).to(torch.bfloat16)
        models[f"int4/{name}/bf16/patched"] = hf_turbo.patch(copy.deepcopy(quantized).to(torch.bfloat16))
    gc.collect()
    return models


def seconds(model: Any, ids: torch.Tensor, new_tokens: int) -> float:
    """How long `generate` takes, greedily."""
    began = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return time.perf_counter() - began


def measure(models: dict[str, Any], rounds: int, tokens: int) -> dict[str, dict[str, list[float]]]:
    """Seconds a token and a prompt, round by round."""
    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randint(10, 40000, (1, n), generator=generator) for n in (DECODE_PROMPT, PROMPT))
    found: dict[str, dict[str, list[float]]] = {name: {"decode": [], "prompt": []} for name in models}
    for turn in range(-1, rounds):  # the first is to warm up
        for name, model in models.items():
            first = seconds(model, short, 1)
            token = (seconds(model, short, 1 + tokens) - first) / tokens
            prompt = seconds(model, long, 1)
            if turn >= 0:
                found[name]["decode"].append(token)
                found[name]["prompt"].append(prompt)
    return found


def rows(found: dict[str, dict[str, list[float]]], group_size: int) -> Iterator[dict[str, Any]]:
    """A row a variant."""
    for name, times in found.items():
        ratios = {}
        for what, own in times.items():
            best = (
                min(pair) for pair in zip(*(found[f"float/{dtype}"][what] for dtype in ("fp32", "bf16")), strict=True)
            )
            ratios[what] = statistics.median(least / mine for least, mine in zip(best, own, strict=True))
        yield {
            "bench": "int4_cpu",
            "case": f"{MODEL}/g{group_size}",
            "variant": name,
            "decode_tokens_per_s": 1 / statistics.median(times["decode"]),
            "decode_ratio": ratios["decode"],
            "prompt_s": statistics.median(times["prompt"]),
            "prompt_ratio": ratios["prompt"],
            "rounds": times,
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "versions": versions(),
        }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['variant']:28} {row['decode_tokens_per_s']:9.1f} {row['decode_ratio']:7.2f} "
        f"{1000 * row['prompt_s']:10.0f} {row['prompt_ratio']:7.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a JSONL file; a line for each row is added to it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--only", nargs="+", help="parts of names of variants to time beside the float ones")
    given = parser.parse_args()
    models = variants(given.group_size)
    if given.only:
        models = {n: m for n, m in models.items() if n.startswith("float") or any(part in n for part in given.only)}
    print(f"{'variant':28} {'tokens/s':>9} {'ratio':>7} {'prompt ms':>10} {'ratio':>7}")
    for row in rows(measure(models, given.rounds, given.tokens), given.group_size):
        print(line(row), flush=True)
        if given.out is not None:
            with given.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
