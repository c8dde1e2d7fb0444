"""What quantized keys cost a model whose first and last layers have huge key biases, with and without protection.

    python -m benchmarks.key_bias --text wikitext2-test.txt [--out FILE.jsonl] [--windows 4] [--length 640]

The model is SmolLM2-135M as a Qwen2, which is the same model as long as the biases are zero. Then a few channels of
`k_proj.bias` in the first and the last layer get so many times the root mean square of that layer's keys. Channels are
those that turn by a radian or so within a block: a bias that does not turn is a block's zero, and costs nothing.

Nothing is cached: each window is one forward whose attention sees what a cache with blocks of 64 would show it.

    wide              the model as it is: others are compared with it
    int8, fp8, int4   all layers alike, nothing protected
    .../checked       the same, and what `hf_turbo.modeling.key_check` says of each layer at the first window
    int4/by-token     keys quantized as values are, a scale and a zero for each token: as it is often done
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_turbo.bench.rows import versions
from hf_turbo.modeling.key_check import KeyVerdict, check_keys
from hf_turbo.ops import kv_codes
from hf_turbo.ops.kv_format import KV_FORMATS, WIDE_BEHIND, KVFormat
from hf_turbo.sample_models import SampleModelName, sample_model

from .int4_quality import NOTE, Quality, measure, windows

NAME = "key_bias_benchmark"
BLOCK = 64
SAMPLE: SampleModelName = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Bias:
    times: float
    channels: tuple[int, ...]

    @property
    def name(self) -> str:
        if not self.channels:
            return "none"
        return f"{self.times:g}x-channels-{'-'.join(map(str, self.channels))}"


BIASES = (
    Bias(0, ()),
    Bias(30, (9, 12, 15)),
    Bias(30, (2, 6, 10, 14)),
    Bias(300, (10,)),
    Bias(300, (8, 10, 12)),
    Bias(1000, (10,)),
)


@dataclass
class Simulation:
    """What the attention function does in each layer, and what it notes.

    Args:
        formats: layer -> name of its format; layers that are not there stay wide.
        by_token: quantize keys as values are.
        check: name of a format: fill `verdicts` with what the layers' keys say to it, and `key_sizes`.
    """

    formats: dict[int, str] = field(default_factory=dict)
    by_token: bool = False
    check: str | None = None
    verdicts: dict[int, KeyVerdict | None] = field(default_factory=dict)
    key_sizes: dict[int, float] = field(default_factory=dict)

    def note(self, layer: int, query: Tensor, key: Tensor, scale: float, wanted: str) -> None:
        self.key_sizes[layer] = float(key.square().mean().sqrt())
        self.verdicts[layer] = check_keys(query, key, wanted, BLOCK, scale)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention of one text to itself."""
    simulation: Simulation = module.config.simulation
    if simulation.check:
        simulation.note(module.layer_idx, query, key, scaling, simulation.check)
    q, k, v = query[0], key[0], value[0]
    place = torch.arange(q.shape[1])
    block = place // BLOCK
    name = simulation.formats.get(module.layer_idx)
    as_code = (block >= 1) & (block < block[:, None] - WIDE_BEHIND) & (name is not None)
    k_code, v_code = recoded(k, v, KV_FORMATS[name], simulation.by_token) if name else (k, v)
    k, v, k_code, v_code = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v, k_code, v_code))
    scores = torch.where(as_code, q @ k_code.mT, q @ k.mT) * scaling
    weights = scores.masked_fill(place > place[:, None], -torch.inf).softmax(-1)
    out = (weights * as_code) @ v_code + (weights * ~as_code) @ v
    return out.transpose(0, 1)[None], None


def recoded(k: Tensor, v: Tensor, fmt: KVFormat, by_token: bool) -> tuple[Tensor, Tensor]:
    """`[heads, tokens, dim]` with whole blocks as their codes say."""

    def as_values(x: Tensor) -> Tensor:
        return kv_codes.dequantize_values(kv_codes.quantize_values(x, fmt), fmt, BLOCK, x.shape[-1])

    def as_keys(x: Tensor) -> Tensor:
        return kv_codes.dequantize_keys(kv_codes.quantize_keys(x, fmt), fmt, BLOCK, x.shape[-1])

    whole = k.shape[1] // BLOCK * BLOCK
    ways = ((k, as_values if by_token else as_keys), (v, as_values))
    k, v = (torch.cat([way(x[:, :whole].unflatten(1, (-1, BLOCK))).flatten(1, 2), x[:, whole:]], 1) for x, way in ways)
    return k, v


def load_as_qwen2(folder: Path) -> Any:
    """A Llama checkpoint as a Qwen2 whose biases are zero, in fp32, with the attention from above."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = ("model_type", "architectures", "transformers_version")
    fields = {name: x for name, x in AutoConfig.from_pretrained(folder).to_dict().items() if name not in own}
    model = Qwen2ForCausalLM(Qwen2Config(**fields)).eval()
    model.set_attn_implementation(NAME)
    left = model.load_state_dict(llama.state_dict(), strict=False)
    biases = {name for name, _ in model.named_parameters() if name.endswith("_proj.bias")}
    if left.unexpected_keys or set(left.missing_keys) != biases:
        raise ValueError(f"{folder} does not hold the weights of a Qwen2: {left}")
    for name in biases:
        model.get_parameter(name).data.zero_()
    return model


def set_bias(model: Any, bias: Bias, key_sizes: dict[int, float]) -> None:
    """Puts the biases into the first and the last layer, with the same signs in every run."""
    config = model.config
    for layer in (0, config.num_hidden_layers - 1):
        signs = torch.randint(2, (config.num_key_value_heads,), generator=torch.Generator().manual_seed(layer)) * 2 - 1
        biases = model.model.layers[layer].self_attn.k_proj.bias.data.view(config.num_key_value_heads, -1).zero_()
        biases[:, list(bias.channels)] = bias.times * key_sizes[layer] * signs[:, None].float()


def variants(model: Any, texts: list[Tensor]) -> Iterator[tuple[str, Quality, dict[str, Any]]]:
    """Each variant's name, its quality and what the check found out, if it has been asked."""
    layers, config = range(model.config.num_hidden_layers), model.config
    reference: list[Tensor] = []

    def quality(keep: bool = False, **settings: Any) -> Quality:
        config.simulation = Simulation(**settings)
        return measure(model, texts, reference, keep)

    yield "wide", quality(keep=True), {}
    yield "int8", quality(formats=dict.fromkeys(layers, "int8")), {}
    for name in ("fp8", "int4"):
        alike = dict.fromkeys(layers, name)
        yield name, quality(formats=alike), {}
        verdicts = {layer: verdict for layer, verdict in look(model, texts[0], name).verdicts.items() if verdict}
        checked = {layer: verdict.format for layer, verdict in verdicts.items()}
        known = {
            "protected": {layer: other for layer, other in checked.items() if other != name},
            "divergences": {layer: verdict.divergences for layer, verdict in verdicts.items()},
        }
        yield f"{name}/checked", quality(formats=alike | checked), known
    yield "int4/by-token", quality(formats=dict.fromkeys(layers, "int4"), by_token=True), {}


@torch.inference_mode()
def look(model: Any, text: Tensor, wanted: str = "int4") -> Simulation:
    """What the wide model's layers show at a text, asked for this format."""
    model.config.simulation = Simulation(check=wanted)
    model(text)
    return model.config.simulation


def rows(model: Any, texts: list[Tensor]) -> Iterator[dict[str, Any]]:
    key_sizes = look(model, texts[0]).key_sizes
    for bias in BIASES:
        set_bias(model, bias, key_sizes)
        wide = None
        for variant, quality, more in variants(model, texts):
            wide = wide or quality.perplexity
            names = {"bench": "kv_quality", "case": f"qwen2-key-bias/{bias.name}", "variant": variant}
            figures = {**vars(quality), "ratio": quality.perplexity / wide, **more}
            ends = {"length": texts[0].shape[1], "device": "cpu", "note": NOTE, "versions": versions()}
            yield {**names, **figures, **ends}


def line(row: dict[str, Any]) -> str:
    figures = f"{row['perplexity']:10.3f} {row['ratio']:8.4f}"
    compared = "" if row["kl"] is None else f"{row['kl']:10.5f} {row['same_top1']:10.4f}"
    return f"{row['case']:40} {row['variant']:14} {figures} {compared:21} {row.get('protected') or ''}"


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a plain text file, such as WikiText-2's test split")
    parser.add_argument("--out", type=Path, help="a JSONL file; a line for each row is added to it")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=640)
    given = parser.parse_args()
    folder = sample_model(SAMPLE)
    texts = windows(AutoTokenizer.from_pretrained(folder), given.text.read_text(), given.windows, given.length)
    print(f"{'case':40} {'variant':14} {'perplexity':>10} {'ratio':>8} {'kl':>10} {'same top-1':>10} protected")
    for row in rows(load_as_qwen2(folder), texts):
        print(line(row), flush=True)
        if given.out is not None:
            with given.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
