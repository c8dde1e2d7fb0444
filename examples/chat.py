"""A real model answers a prompt unpatched, then patched: the same text, and a small table of what it took.

    python examples/chat.py                     SmolLM2-135M-Instruct
    python examples/chat.py --model gemma       Gemma-3-270M, whose layers have windows of 512 tokens

The models come from the Python package index; see hf_turbo/sample_models.py. In fp32 (on a CPU) the exit
status is 1 if the texts differ; in bf16 (on a GPU) if they part where the two best tokens are not within
rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_turbo
from hf_turbo.sample_models import SampleModelError, sample_model

MODELS = {"smollm2": "smollm2-135m-instruct", "gemma": "gemma-3-270m"}
NUM_BEAMS = 4


@dataclass
class Outcome:
    """What one way of generating gave: its text, how long it took, and what its cache held at the end."""

    tokens: torch.Tensor
    kv_bytes: int
    blocks: int | None = None
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self, prompt_length: int) -> float:
        return (self.tokens.shape[-1] - prompt_length) / min(self.seconds)


def main() -> int:
    options = parse_arguments()
    console = Console()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    folder = sample_model(MODELS[options.model])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    inputs = encode(tokenizer, options.prompt).to(device)
    prompt_length = inputs["input_ids"].shape[1]
    console.print(
        f"{folder.name}, {str(dtype).removeprefix('torch.')} on {device_name(device)}, "
        f"{prompt_length} prompt tokens, torch {torch.__version__}, transformers {transformers.__version__}",
        soft_wrap=True,
    )

    # The two answers, as they come.
    ways = {"greedy": {}, f"{NUM_BEAMS} beams": {"num_beams": NUM_BEAMS}}
    length = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    console.rule("unpatched")
    model.generate(**inputs, **length, streamer=streamer)
    console.rule("patched")
    hf_turbo.patch(model)
    model.generate(**inputs, **length, streamer=streamer)
    patched_report = hf_turbo.report(model)
    hf_turbo.unpatch(model)

    # The figures: unpatched and patched by turns, each warmed up first.
    stock: dict[str, Outcome] = {}
    turbo: dict[str, Outcome] = {}
    with console.status("") as status:
        for turn in range(options.rounds):
            for name, way in ways.items():
                status.update(f"Measuring {name}, round {turn + 1} of {options.rounds}")
                measure(stock, name, model, inputs, length | way)
                with hf_turbo.patched(model):
                    measure(turbo, name, model, inputs, length | way)

    console.print(table_of(stock, turbo, prompt_length, options.rounds))
    console.print("\n".join(f"hf_turbo: {line}" for line in str(patched_report).splitlines()), style="dim")
    return 0 if all(agree(model, stock[name], turbo[name], way) for name, way in ways.items()) else 1


def measure(
    outcomes: dict[str, Outcome],
    name: str,
    model: Any,
    inputs: dict[str, torch.Tensor],
    arguments: dict[str, Any],
) -> None:
    """Generates twice, a few tokens to warm up and then for the record."""
    model.generate(**inputs, **(arguments | {"max_new_tokens": 3}))
    synchronize(model.device)
    began = time.perf_counter()
    output = model.generate(**inputs, **arguments, return_dict_in_generate=True)
    synchronize(model.device)
    seconds = time.perf_counter() - began
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    if isinstance(cache, hf_turbo.PagedCache):
        report = hf_turbo.report(model)
        found = Outcome(output.sequences, report.kv_bytes, report.blocks_in_use)
    else:
        found = Outcome(output.sequences, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
    outcomes.setdefault(name, found).seconds.append(seconds)


def table_of(stock: dict[str, Outcome], turbo: dict[str, Outcome], prompt_length: int, rounds: int) -> Table:
    caption = f"tokens/s: new tokens over the whole call, prompt included; best of {rounds}. KV: at the end."
    table = Table(title="unpatched → patched", caption=caption)
    table.add_column("")
    for heading in ("same text", "tokens/s", "KV MB", "blocks used"):
        table.add_column(heading, justify="right")
    for name in stock:
        before, after = stock[name], turbo[name]
        speeds = (f"{way.tokens_per_s(prompt_length):.1f}" for way in (before, after))
        megabytes = (f"{way.kv_bytes / 1e6:.2f}" for way in (before, after))
        same = "yes" if torch.equal(before.tokens, after.tokens) else "no"
        table.add_row(name, same, " → ".join(speeds), " → ".join(megabytes), str(after.blocks))
    return table


def agree(model: Any, stock: Outcome, turbo: Outcome, way: dict[str, Any]) -> bool:
    """Equal; or, below fp32, a greedy text that parts where the two best tokens are within rounding."""
    if torch.equal(stock.tokens, turbo.tokens):
        return True
    if model.dtype == torch.float32:
        return False
    if way:
        return True  # beams rank sums of rounded scores: no single step tells
    shortest = min(stock.tokens.shape[1], turbo.tokens.shape[1])
    parted = int((stock.tokens[0, :shortest] != turbo.tokens[0, :shortest]).int().argmax())
    with torch.no_grad():
        best = model(stock.tokens[:, :parted]).logits[0, -1].float().topk(2).values
    gap, rounding = float(best[0] - best[1]), 2 * torch.finfo(model.dtype).eps * float(best[0].abs())
    print(f"The texts part at token {parted}: the best two are {gap:.3g} apart, rounding is {rounding:.3g}")
    return gap <= rounding


def encode(tokenizer: Any, prompt: str | None) -> Any:
    """A chat prompt where the model has a chat template, plain text where it hasn't."""
    if tokenizer.chat_template is None:
        text = prompt or (Path(__file__).parent / "alice.txt").read_text()
        return tokenizer(text, return_tensors="pt")
    messages = [{"role": "user", "content": prompt or "Explain in one short paragraph why the sky is blue."}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' if threads > 1 else ''})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A real model answers a prompt, unpatched and patched.")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="which sample model (default smollm2)")
    parser.add_argument("--prompt", help="what to ask; for gemma, a base model, the text to go on with")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="of the answer (default 96)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="how often each is timed (default 2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.rounds < 1 or options.max_new_tokens < 1:
        parser.error("--rounds and --max-new-tokens are 1 or more")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SampleModelError as error:
        sys.exit(str(error))
