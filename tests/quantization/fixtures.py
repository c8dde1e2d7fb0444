"""The small checkpoints that other tools wrote, rebuilt from one file that holds every different tensor once.

`checkpoints/index.json` names, for each folder, its safetensors files with the tensors in them, and what the tool
that wrote it (or one that reads it) makes of it: hashes of dequantized weights, logits of an fp32 model of them.
"""

import hashlib
import json
import lzma
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load, save_file

DATA = Path(__file__).parent / "checkpoints"
INDEX = json.loads((DATA / "index.json").read_text())
NAMES = sorted(INDEX)


@cache
def _pool() -> dict[str, torch.Tensor]:
    return load(lzma.decompress((DATA / "tensors.safetensors.xz").read_bytes()))


@cache
def _pristine(name: str) -> tuple[tempfile.TemporaryDirectory, Path]:
    """The folder, written once a process; the first of the pair removes it at the end."""
    keeper = tempfile.TemporaryDirectory(prefix=f"{name}-")
    folder = Path(keeper.name) / name
    shutil.copytree(DATA / name, folder)
    for file, content in INDEX[name]["files"].items():
        tensors = {key: _pool()[digest] for key, digest in content["tensors"].items()}
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / file, content["metadata"])
    return keeper, folder


def checkpoint(name: str, tmp_path: Path) -> Path:
    """A folder of its own below `tmp_path`, as the tool that wrote it left it (but for the tokenizer's files)."""
    return Path(shutil.copytree(_pristine(name)[1], tmp_path / name))


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its full name. Shared between tests: not to be written to."""
    return {
        key: _pool()[digest] for content in INDEX[name]["files"].values() for key, digest in content["tensors"].items()
    }


def model_config(name: str) -> dict:
    """config.json."""
    return json.loads((DATA / name / "config.json").read_text())


def quantization_config(name: str) -> dict:
    return model_config(name)["quantization_config"]


def dequantized_sha256(name: str) -> dict[str, str]:
    """Module name -> SHA-256 of its dequantized fp16 weight [out, in]; empty where there is no reference."""
    return {key.removesuffix(".weight"): digest for key, digest in INDEX[name]["dequant_fp16_sha256"].items()}


def reference_logits(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` [2, 24] and the last four positions' logits [2, 4, 512] of an fp32 model with the fp16 weights."""
    return _pool()[INDEX[name]["input_ids"]], _pool()[INDEX[name]["logits_fp32"]]


def sha256(tensor: torch.Tensor) -> str:
    """Of the bytes of a tensor in C order."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
