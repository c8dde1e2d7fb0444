"""What a quantized cache does to predictions, decoded through the cache: both sample models, short and full windows.

    python -m benchmarks.kv_quality --text wikitext2-test.txt --out FILE.jsonl [--models smollm2-135m-instruct ...]

Windows start with the model's BOS token and share nothing: `--windows` of 512 tokens, and `--full-windows` of as many
tokens as the model was made for (8,192 for SmolLM2, 32,768 for Gemma 3). Each is read chunk by chunk over a wide cache
and over a quantized one, by the same patched model; see `hf_turbo.bench.kv_quality`. In bf16 and fp16 the two differ
by rounding, too, which flips near ties: `--dtype fp32` shows codes alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from hf_turbo.bench.kv import parse_formats, quality_rows
from hf_turbo.bench.kv_quality import cut_windows, measure, token_ids
from hf_turbo.bench.models import DTYPES, load_model, load_tokenizer
from hf_turbo.bench.rows import QualityRow, append_row
from hf_turbo.sample_models import SampleModelName

SHORT = 512


def rows(
    name: str, model: Any, text_name: str, windows: list[torch.Tensor], formats: list[str]
) -> Iterator[QualityRow]:
    """The wide cache's row, then each format's."""
    for number, kv in enumerate(formats):
        wide, row = quality_rows(name, model, text_name, windows, kv, measure(model, windows, kv))
        yield from [wide, row] if number == 0 else [row]


def of_model(name: str, given: argparse.Namespace) -> Iterator[QualityRow]:
    """Rows of short windows, then of full ones."""
    model = load_model(name, DTYPES[given.dtype], torch.device(given.device))
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer")
    ids, bos = token_ids(tokenizer, given.text.read_text(encoding="utf-8")), tokenizer.bos_token_id
    full = model.config.get_text_config(decoder=True).max_position_embeddings
    for length, count in ((SHORT, given.windows), (full, given.full_windows)):
        if count:
            yield from rows(name, model, given.text.stem, cut_windows(ids, bos, length, count), parse_formats(given.kv))


def line(row: QualityRow) -> str:
    size = f"{row.windows} x {row.length}"
    return (
        f"{row.model:24} {size:>12} {row.kv:>5} {row.kv_bytes_per_token:10,.0f} {row.perplexity:10.3f} "
        f"{row.ratio:8.4f} {row.same_top1:10.4f} {row.kl:10.6f} {row.protected_layers:9}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a plain text file, such as WikiText-2's test split")
    parser.add_argument("--out", type=Path, help="a JSONL file; a line for each row is added to it")
    parser.add_argument("--models", nargs="+", default=list(get_args(SampleModelName)))
    parser.add_argument("--kv", default="all", help="formats, with commas between")
    parser.add_argument("--windows", type=int, default=40, help=f"of {SHORT} tokens")
    parser.add_argument("--full-windows", type=int, default=4, help="of the model's full length; 0: none")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if on_gpu else "fp32")
    given = parser.parse_args()
    print(
        f"{'model':24} {'windows':>12} {'kv':>5} {'B/token':>10} {'perplexity':>10} {'ratio':>8} {'same top-1':>10} "
        f"{'kl':>10} {'protected':>9}"
    )
    for name in given.models:
        for row in of_model(name, given):
            print(line(row), flush=True)
            if given.out is not None:
                append_row(row, given.out)


if __name__ == "__main__":
    main()
