"""Small quantized checkpoints of any architecture, each with a twin: the same weights, dequantized, in a plain one."""

import dataclasses
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hf_turbo.quantization.formats import LAYOUTS, encode
from hf_turbo.quantization.spec import LinearSpec, TensorHeader
from hf_turbo.quantization.weight import GroupedWeight

LINEARS = r"(_proj|\.w[123]|c_attn|c_fc|\.fc[12]|linear_[12])\.weight$"

CONFIGS = {
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "sym": False,
        "desc_act": False,
        "meta": {"quantizer": ["gptqmodel:7.6.0"]},
    },
    "awq_gemm": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    "pack_quantized": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16},
            }
        },
    },
}


def grouped(weight: torch.Tensor, group_size: int = 16, bits: int = 4) -> GroupedWeight:
    """A weight [N, K] rounded to codes, one scale and zero point a group."""
    outputs, inputs = weight.shape
    count = -(-inputs // group_size)
    padded = torch.nn.functional.pad(weight.float(), (0, count * group_size - inputs)).view(outputs, count, group_size)
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=1e-3)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    codes = (padded / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    codes = codes.to(torch.uint8).reshape(outputs, -1)[:, :inputs].contiguous()
    return GroupedWeight(codes, scales.T.contiguous(), zeros.T.to(torch.uint8).contiguous(), None, bits, group_size)


def spec_of(weight: GroupedWeight, layout: str) -> LinearSpec:
    offset = "words" if layout == "gptq" else "none"
    bare = LinearSpec(layout, weight.bits, weight.group_size, weight.in_features, weight.out_features, {}, offset)
    tensors = {}
    for name, shape in LAYOUTS[layout].shapes(bare).items():
        if name not in ("bias", "weight_g_idx"):
            dtypes = LAYOUTS[layout].dtypes[name]
            tensors[name] = TensorHeader(torch.float16 if torch.float16 in dtypes else dtypes[0], shape)
    return dataclasses.replace(bare, tensors=tensors)


def write(
    model,
    folder: Path,
    layout: str = "gptq",
    linears: str = LINEARS,
    transposed: bool = False,
    group_size: int = 16,
) -> tuple[Path, Path]:
    """Saves a model quantized, and its twin.

    Args:
        linears: what the files' names of the weights to quantize match.
        transposed: the plain weights are [in, out], as GPT-2 has them.

    Returns:
        The folders of the two.
    """
    twin, quantized = folder / "twin", folder / "quantized"
    model.save_pretrained(twin)
    model.save_pretrained(quantized)
    tensors = load_file(twin / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and re.search(linears, name):
            module = name.removesuffix("weight")
            weight = grouped(tensor.T if transposed else tensor, group_size)
            dense = weight.dequantize(torch.float32)
            plain[name] = dense.T.contiguous() if transposed else dense
            del packed[name]
            spec = spec_of(weight, layout)
            packed.update({f"{module}{short}": value for short, value in encode(weight, spec).items()})
    assert len(packed) > len(plain)
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    save_file(packed, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = with_group_size(CONFIGS[layout], group_size)
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, twin


def with_group_size(config: dict, group_size: int) -> dict:
    """The config, its group size changed where it says one."""
    changed = {
        key: with_group_size(value, group_size) if isinstance(value, dict) else value for key, value in config.items()
    }
    return {**changed, "group_size": group_size} if "group_size" in config else changed
