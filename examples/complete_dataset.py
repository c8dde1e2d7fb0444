"""A column of a data set is answered by a model, many rows at once, and written as a new column.

    python examples/complete_dataset.py answers                          a few questions, SmolLM2-135M-Instruct
    python examples/complete_dataset.py answers --data rows.jsonl --column question --new-column answer \\
        --model path/to/a/model --batch-size 512 --max-new-tokens 256

`answers` is a folder: each batch becomes a file in it, whole or not at all. Started again with the same arguments,
the program goes on after the last one. Needs the datasets package: pip install "hf-turbo[train,demo]".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_turbo
from hf_turbo.sample_models import SampleModelError, sample_model

SUBJECTS = ("the moon", "bread", "a river", "music", "the number seven", "sleep", "iron", "a library")
ASKED = ("What is {}?", "Tell a child about {} in two sentences.", "Write a line of verse on {}.")
LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    datasets.disable_progress_bars()  # generate_batch has one
    rows = load(options.data, options.column)
    settle(options.folder, options, rows)
    folder = options.model or str(sample_model("smollm2-135m-instruct"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = hf_turbo.patch(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device))
    complete(rows, model, tokenizer, options)
    parts = sorted(map(str, options.folder.glob("part-*.jsonl")))
    done = datasets.load_dataset("json", data_files=parts, split="train")
    print(f"{len(done)} rows in {options.folder}, the last one:")
    print(json.dumps(done[-1], ensure_ascii=False, indent=2))
    return 0


def complete(rows: datasets.Dataset, model: Any, tokenizer: Any, options: argparse.Namespace) -> None:
    """Writes the batches that are not there yet, with the new column."""
    starts = range(0, len(rows), options.batch_size)
    for number, start in enumerate(starts):
        part = options.folder / f"part-{number:05d}.jsonl"
        if part.exists():
            continue
        batch = rows.select(range(start, min(start + options.batch_size, len(rows))))
        prompts = [encode(tokenizer, text) for text in batch[options.column]]
        # The manager is kept: the next batch finds the cache as it is.
        results = model.generate_batch(
            prompts, max_new_tokens=options.max_new_tokens, do_sample=options.temperature > 0,
            temperature=options.temperature or None, seed=[options.seed + start + i for i in range(len(prompts))],
            progress_bar=True, persistent_manager=True,
        )  # fmt: skip
        texts = [tokenizer.decode(one.generated_tokens, skip_special_tokens=True) for one in results.values()]
        whole = part.with_suffix(".unfinished")
        batch.add_column(options.new_column, texts).to_json(whole, force_ascii=False)
        whole.rename(part)
        print(f"{part.name}: rows {start} to {start + len(batch) - 1} of {len(rows)}")
    model.destroy_cached_continuous_batching_manager()


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a chat's first turn where the model has a chat template, of the plain text where it hasn't."""
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]


def load(path: Path | None, column: str) -> datasets.Dataset:
    """The rows to complete; a few questions where there is no file."""
    if path is None:
        return datasets.Dataset.from_dict({column: [asked.format(subject) for subject in SUBJECTS for asked in ASKED]})
    if path.suffix not in LOADERS:
        sys.exit(f"{path.name}: give a file that ends with {', '.join(LOADERS)}")
    rows = datasets.load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
    if column not in rows.column_names:
        sys.exit(f"{path.name} has no column {column!r}, only {', '.join(rows.column_names)}")
    return rows


def settle(folder: Path, options: argparse.Namespace, rows: datasets.Dataset) -> None:
    """Notes in the folder what it is made with, and refuses to go on with something else."""
    if options.new_column in rows.column_names:
        sys.exit(f"there is a column {options.new_column!r} already; choose another --new-column")
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("folder", "device")}
    settings["rows"] = str(len(rows))
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "settings.json"
    if note.exists() and (before := json.loads(note.read_text())) != settings:
        changed = ", ".join(name for name in settings if settings[name] != before.get(name))
        sys.exit(f"{folder} was begun with other settings ({changed}); choose another folder")
    note.write_text(json.dumps(settings, indent=2))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Completes a column of a data set, many rows at once.")
    parser.add_argument("folder", type=Path, help="where the batches go")
    parser.add_argument("--data", type=Path, help="a .jsonl, .json, .csv, .parquet or .txt file (default: questions)")
    parser.add_argument("--column", default="text", help="what the model is given (default text)")
    parser.add_argument("--new-column", default="completion", help="what it says (default completion)")
    parser.add_argument("--model", help="a folder or a name (default: a small sample model)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="rows a file (default 16)")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="of each row (default 48)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest tokens (default)")
    parser.add_argument("--seed", type=int, default=0, help="row i is sampled with seed + i (default 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.batch_size < 1 or options.max_new_tokens < 1 or options.temperature < 0:
        parser.error("--batch-size and --max-new-tokens are 1 or more, --temperature is not negative")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SampleModelError as error:
        sys.exit(str(error))
