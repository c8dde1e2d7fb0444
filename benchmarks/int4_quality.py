"""What INT4 costs in quality: perplexity and distance to the float model, on a CPU.

    python -m benchmarks.int4_quality --text wikitext2-test.txt --out FILE.jsonl [--models smollm2-135m-instruct ...]

Each model's linears are replaced, in fp32, by what a method makes of them. Windows of the text start with the model's
BOS token and share nothing. Both sample models come from 4-bit GGUF files, so that their float weights already lie on
grids of 16 levels for 32 values: figures say how methods compare here, not what they cost a model of full precision.

    float     the weights as they are, in fp32 and in bf16
    rtn       round to nearest: a scale that covers the group (symmetric: zero in the middle of the codes)
    mse       a searched scale: the least sum of squared differences
    hqq       half-quadratic (Badri and Shaji, 2023), p = 0.7, zero points rounded as the format has no others
    hf_turbo  `hf_turbo.quantize`

`kl` is the mean divergence from the float model in nats, `same_top1` how often the likeliest next token is the same,
both over every fourth position.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from hf_turbo.bench.rows import versions
from hf_turbo.quantization.data_free import quantize_weight
from hf_turbo.quantization.quantize_plan import Options, make_plan
from hf_turbo.sample_models import SampleModelName, sample_model

NOTE = "weights come from a 4-bit GGUF file"
EVERY = 4

#: Groups [M, size] in fp32 to what stands for them.
Method = Callable[[Tensor, Options], Tensor]


@dataclass(frozen=True)
class Variant:
    method: str
    options: Options

    @property
    def name(self) -> str:
        return f"{self.method}/{self.options.bits}bit/{'symmetric' if self.options.symmetric else 'asymmetric'}"


def covering(groups: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Plain rounding's scales and zero points, `[M, 1]`."""
    top = 2**options.bits - 1
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    if options.symmetric:
        scale = stored(2 * torch.maximum(-low, high) / top)
        return scale, torch.full_like(scale, 2 ** (options.bits - 1))
    scale = stored((high - low) / top)
    return scale, (-low / scale).round().clamp(0, top)


def stored(scale: Tensor) -> Tensor:
    scale = scale.half().float()
    return torch.where(scale == 0, 1.0, scale)


def rounded(groups: Tensor, scale: Tensor, zero: Tensor, options: Options) -> Tensor:
    codes = ((groups / scale).round() + zero).clamp(0, 2**options.bits - 1)
    return scale * (codes - zero)


def rtn(groups: Tensor, options: Options) -> Tensor:
    return rounded(groups, *covering(groups, options), options)


def mse(groups: Tensor, options: Options) -> Tensor:
    """Shrinks the covering scale by up to 40%."""
    scale, zero = covering(groups, options)
    best = rounded(groups, scale, zero, options)
    least = (best - groups).square().sum(1, keepdim=True)
    for step in range(1, 17):
        found = rounded(groups, stored(scale * (1 - step / 40)), zero, options)
        error = (found - groups).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return best


def hqq(groups: Tensor, options: Options, p: float = 0.7, beta: float = 10.0, kappa: float = 1.01) -> Tensor:
    """Alternates between what of the error to call outliers, and the zero point (symmetric: the scale) for the rest."""
    scale, zero = covering(groups, options)
    best = rounded(groups, scale, zero, options)
    least = (best - groups).abs().pow(p).sum(1, keepdim=True)
    for _ in range(20):
        found = rounded(groups, scale, zero, options)
        error = groups - found
        objective = error.abs().pow(p).sum(1, keepdim=True)
        best, least = torch.where(objective < least, found, best), torch.minimum(objective, least)
        size = error.abs()
        outliers = error.sign() * (size - size.clamp(min=1e-8).pow(p - 1) / beta).clamp(min=0)
        codes = found / scale  # less the zero point
        if options.symmetric:
            energy = codes.square().sum(1, keepdim=True).clamp(min=1e-8)
            scale = stored(((groups - outliers) * codes).sum(1, keepdim=True) / energy)
        else:
            zero = (codes + zero - (groups - outliers) / scale).mean(1, keepdim=True)
            zero = zero.round().clamp(0, 2**options.bits - 1)
        beta *= kappa
    return best


METHODS: dict[str, Method] = {"rtn": rtn, "mse": mse, "hqq": hqq}


def dequantized(weight: Tensor, variant: Variant) -> Tensor:
    """What the variant makes of a weight `[N, K]`, in the fp16 that files stand for."""
    if variant.method == "hf_turbo":
        return quantize_weight(weight, variant.options).dequantize(torch.float16).float()
    size = variant.options.group_size_of(weight.shape[1])
    slices = weight.split(max(1, (1 << 18) // weight.shape[1]))
    method = METHODS[variant.method]
    return torch.cat([method(rows.reshape(-1, size), variant.options).view_as(rows) for rows in slices]).half().float()


def windows(tokenizer: Any, text: str, count: int, length: int) -> list[Tensor]:
    """`[1, length]` each: BOS, then the text's next tokens."""
    ids = tokenizer(text[: 16 * count * length], add_special_tokens=False, return_tensors="pt").input_ids[0]
    parts = ids.split(length - 1)[:count]
    if len(parts) < count or len(parts[-1]) < length - 1:
        raise ValueError(f"the text has no {count} windows of {length} tokens")
    bos = torch.tensor([tokenizer.bos_token_id])
    return [torch.cat([bos, part])[None] for part in parts]


@dataclass
class Quality:
    perplexity: float
    tokens: int
    kl: float | None
    same_top1: float | None


@torch.inference_mode()
def measure(model: Any, texts: list[Tensor], reference: list[Tensor], keep: bool = False) -> Quality:
    """Perplexity over all tokens but BOS.

    Args:
        reference: the float model's log-probabilities, fp16, at every fourth position of each text.
        keep: fill `reference` instead of comparing with it.
    """
    surprise, tokens, divergence, same, compared = 0.0, 0, 0.0, 0, 0
    for index, ids in enumerate(texts):
        log_probs = model(ids).logits[0, :-1].float().log_softmax(-1)
        surprise -= float(log_probs.gather(1, ids[0, 1:, None]).double().sum())
        tokens += ids.shape[1] - 1
        some = log_probs[::EVERY]
        if keep:
            reference.append(some.half())
        else:
            known = reference[index].float()
            divergence += float((known.exp() * (known - some)).sum(-1).double().sum())
            same += int((known.argmax(-1) == some.argmax(-1)).sum())
            compared += len(some)
    perplexity = math.exp(surprise / tokens)
    if keep:
        return Quality(perplexity, tokens, None, None)
    return Quality(perplexity, tokens, divergence / compared, same / compared)


def rows(name: str, text: str, count: int, length: int, variants: list[Variant]) -> Iterator[dict[str, Any]]:
    """A row for the float model, in fp32 and in bf16, and for each variant."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sample_model(name)  # type: ignore[arg-type]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = windows(AutoTokenizer.from_pretrained(folder), text, count, length)
    reference: list[Tensor] = []

    def row(variant: str, quality: Quality, **more: Any) -> dict[str, Any]:
        common = {"bench": "int4_quality", "case": f"{name}/wikitext2/w{count}x{length}", "variant": variant}
        ends = {"device": "cpu", "note": NOTE, "versions": versions()}
        return {**common, "bits": None, "group_size": None, "method": None, **more, **vars(quality), **ends}

    yield row("float/fp32", measure(model, texts, reference, keep=True))
    yield row("float/bf16", measure(model.to(torch.bfloat16), texts, reference))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    linears = make_plan(model, variants[0].options).linears
    originals = {linear: model.get_submodule(linear).weight.detach().clone() for linear in linears}
    for variant in variants:
        began = time.perf_counter()
        for linear, weight in originals.items():
            model.get_submodule(linear).weight.data.copy_(dequantized(weight, variant))
        seconds = time.perf_counter() - began
        options = variant.options
        settings = {"bits": options.bits, "group_size": options.group_size, "method": variant.method}
        yield row(variant.name, measure(model, texts, reference), **settings, quantize_s=round(seconds, 1))


def default_variants(group_size: int) -> list[Variant]:
    wanted = {
        (4, True): ("rtn", "mse", "hqq", "hf_turbo"),
        (4, False): ("rtn", "mse", "hqq", "hf_turbo"),
        (8, True): ("rtn", "hf_turbo"),
        (8, False): ("hf_turbo",),
    }
    return [
        Variant(method, Options(bits, group_size, symmetric))
        for (bits, symmetric), methods in wanted.items()
        for method in methods
    ]


def line(row: dict[str, Any]) -> str:
    more = "" if row["kl"] is None else f"{row['kl']:10.5f} {row['same_top1']:10.4f}"
    return f"{row['case'].split('/')[0]:24} {row['variant']:28} {row['perplexity']:10.3f} {more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a plain text file, such as WikiText-2's test split")
    parser.add_argument("--out", type=Path, help="a JSONL file; a line for each row is added to it")
    parser.add_argument("--models", nargs="+", default=list(get_args(SampleModelName)))
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    given = parser.parse_args()
    text = given.text.read_text()
    print(f"{'model (' + NOTE + ')':24} {'variant':28} {'perplexity':>10} {'kl':>10} {'same top-1':>10}")
    for name in given.models:
        for row in rows(name, text, given.windows, given.length, default_variants(given.group_size)):
            print(line(row), flush=True)
            if given.out is not None:
                with given.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
