"""Times `generate()` end to end on a CUDA device: the same model unpatched and patched, in one run.

    python -m benchmarks.decode --out DIR [--layers N]

Llama-3-8B shapes with random bf16 weights. A step is the difference of two calls that differ in new tokens only.
Texts must agree up to rounding: at the first step that differs, the gap between the unpatched model's best two logits
is printed. Rows go to DIR/decode.jsonl; a table comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

import hf_turbo

from .attention import commit


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `prompt` tokens, `new` tokens each."""

    name: str
    batch: int
    prompt: int
    new: int
    beams: int = 1


CASES = [
    Case("llama-3-8b/b1/p128", 1, 128, 48),
    Case("llama-3-8b/b32/p1024", 32, 1024, 32),
    Case("llama-3-8b/b16/p8192", 16, 8192, 16),
    Case("llama-3-8b/b1/p32768", 1, 32768, 24),
    Case("llama-3-8b/beam4/p1024", 1, 1024, 32, beams=4),
]


def llama_3_8b(num_layers: int) -> torch.nn.Module:
    """Random weights in the shapes of Llama-3-8B."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=num_layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=65536, rope_theta=500000.0,
        eos_token_id=None, pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def generate(model: torch.nn.Module, ids: torch.Tensor, new: int, beams: int) -> tuple[Any, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        num_beams=beams, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return out, seconds


def measure(model: torch.nn.Module, case: Case) -> tuple[dict[str, float], Any]:
    """Prefill seconds, step ms and peak memory beyond the weights; and the longer call's output."""
    ids = torch.randint(0, 128000, (case.batch, case.prompt), generator=torch.Generator().manual_seed(1)).cuda()
    out, _ = generate(model, ids, case.new, case.beams)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    short = statistics.median(generate(model, ids, 2, case.beams)[1] for _ in range(3))
    long = statistics.median(generate(model, ids, case.new, case.beams)[1] for _ in range(2))
    figures = {
        "ttft_s": short,
        "step_ms": (long - short) / (case.new - 2) * 1e3,
        "peak_extra_gb": (torch.cuda.max_memory_allocated() - before) / 1e9,
    }
    return figures, out


def first_difference(reference: Any, other: Any, prompt: int) -> tuple[int, float] | None:
    """The first new token that differs in any row, and the reference's gap between its best two logits there."""
    different = (reference.sequences != other.sequences)[:, prompt:]
    if not different.any():
        return None
    step = int(different.any(0).nonzero()[0])
    row = int(different[:, step].nonzero()[0])
    best = reference.logits[step][row].float().topk(2).values
    return step, float(best[0] - best[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    model = llama_3_8b(args.layers)
    versions = {m.__name__: m.__version__ for m in (torch, transformers, triton)} | {"hf_turbo": commit()}
    table = []
    with (args.out / "decode.jsonl").open("w") as file:
        for case in CASES:
            results = {}
            for variant in ("transformers", "hf_turbo"):
                if variant == "hf_turbo":
                    hf_turbo.patch(model)
                results[variant] = measure(model, case)
                hf_turbo.unpatch(model)
                torch.cuda.empty_cache()
            difference = first_difference(results["transformers"][1], results["hf_turbo"][1], case.prompt)
            for variant, (figures, _) in results.items():
                row = {"bench": "decode", "case": case.name, "variant": variant, "layers": args.layers,
                       "device": torch.cuda.get_device_name(), "versions": versions, **figures,
                       "same_text": difference is None}  # fmt: skip
                row |= {} if difference is None else {"first_difference": difference[0], "logit_gap": difference[1]}
                file.write(json.dumps(row) + "\n")
                table.append((case.name, variant, figures, difference))
            print(case.name, results["transformers"][0], results["hf_turbo"][0], difference, flush=True)
            del results
    for name, variant, figures, difference in table:
        text = "same text" if difference is None else f"step {difference[0]} differs, gap {difference[1]:.4f}"
        print(f"{name:26s} {variant:13s} step {figures['step_ms']:7.2f} ms  first {figures['ttft_s']:6.3f} s  "
              f"peak +{figures['peak_extra_gb']:6.2f} GB  {text}")  # fmt: skip


if __name__ == "__main__":
    main()
