"""Times `generate()` end to end on a CUDA device: the same model unpatched and patched, in one run.

    python -m benchmarks.decode --out DIR [--layers N]

Llama-3-8B shapes with random bf16 weights. A step is the median time between two tokens, over rounds in which both
variants take turns. Texts must agree up to rounding: at the first step that differs, the gap between the unpatched
model's best two logits is printed. Rows go to DIR/decode.jsonl; a table comes last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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
    Case("llama-3-8b/beam4/p1024", 1, 1024, 32, beams=4),
    Case("llama-3-8b/b1/p32768", 1, 32768, 24),
    Case("llama-3-8b/b16/p8192", 16, 8192, 16),
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


class Clock:
    """A logits processor that notes when each token's logits have come."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def generate(model: torch.nn.Module, case: Case) -> tuple[Any, list[float]]:
    """One call: its output, and the seconds to each token from the one before."""
    ids = torch.randint(0, 128000, (case.batch, case.prompt), generator=torch.Generator().manual_seed(1)).cuda()
    torch.cuda.synchronize()
    clock = Clock()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.new, min_new_tokens=case.new, do_sample=False,
        num_beams=case.beams, return_dict_in_generate=True, output_logits=True, logits_processor=[clock],
    )  # fmt: skip
    return out, [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]


def measure(model: torch.nn.Module, case: Case, rounds: int) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Per variant, figures (seconds to the first token, step ms, peak GB beyond the weights), and its output."""
    seconds: dict[str, list[list[float]]] = {"transformers": [], "hf_turbo": []}
    peaks, outputs = {}, {}
    for _ in range(rounds):
        for variant in seconds:
            if variant == "hf_turbo":
                hf_turbo.patch(model)
            generate(model, case)  # compiles, and fills the pools
            outputs.pop(variant, None)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            weights = sum(p.nbytes for p in model.parameters())
            out, times = generate(model, case)
            outputs[variant] = SimpleNamespace(sequences=out.sequences, logits=out.logits)
            del out
            seconds[variant].append(times)
            peaks[variant] = (torch.cuda.max_memory_allocated() - weights) / 1e9
            hf_turbo.unpatch(model)
    figures = {}
    for variant, runs in seconds.items():
        steps = [step for run in runs for step in run[2:]]  # the second token may still find something to set up
        figures[variant] = {
            "ttft_s": min(run[0] for run in runs),
            "step_ms": statistics.median(steps) * 1e3,
            "peak_extra_gb": peaks[variant],
        }
    return figures, outputs


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
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    model = llama_3_8b(args.layers)
    versions = {m.__name__: m.__version__ for m in (torch, transformers, triton)} | {"hf_turbo": commit()}
    table = []
    with (args.out / "decode.jsonl").open("w") as file:
        for case in CASES:
            figures, outputs = measure(model, case, args.rounds)
            difference = first_difference(outputs["transformers"], outputs["hf_turbo"], case.prompt)
            text = "same text"
            if difference is not None:
                text = f"step {difference[0]} differs, gap {difference[1]:.4f}"
            for variant, values in figures.items():
                row = {"bench": "decode", "case": case.name, "variant": variant, "layers": args.layers,
                       "device": torch.cuda.get_device_name(), "versions": versions, **values,
                       "same_text": difference is None}  # fmt: skip
                row |= {} if difference is None else {"first_difference": difference[0], "logit_gap": difference[1]}
                file.write(json.dumps(row) + "\n")
                file.flush()
                table.append(
                    f"{case.name:26s} {variant:13s} step {values['step_ms']:7.2f} ms  first {values['ttft_s']:6.3f} s  "
                    f"peak +{values['peak_extra_gb']:6.2f} GB  {text}"
                )
            print("\n".join(table[-2:]), flush=True)
            del outputs
    print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
