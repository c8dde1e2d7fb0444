"""Loading small checkpoints, and changing what is in their folders."""

import json

import fixtures
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_turbo.quantization.int4_linear import Int4Linear


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **kwargs})


def logits(model, name="gptq_sym_g32"):
    """Of the last four positions of a checkpoint's reference inputs."""
    input_ids, _ = fixtures.reference_logits(name)
    with torch.no_grad():
        return model(input_ids.to(model.device)).logits[:, -4:]


def quantized(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, Int4Linear)}


def files_of(folder):
    """Every tensor of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def change_model_config(folder, **changes):
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    merged = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def change_config(folder, **changes):
    """Sets keys of the quantization config; None removes one."""
    merged = {**json.loads((folder / "config.json").read_text())["quantization_config"], **changes}
    merged = {key: value for key, value in merged.items() if value is not None}
    change_model_config(folder, quantization_config=merged)


def change_files(folder, change, file="model.safetensors"):
    """Calls `change` with the tensors of a file, and saves them again."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def rename(old, new):
    def change(tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change
