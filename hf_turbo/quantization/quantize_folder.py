"""Quantizes a model's folder into another, a tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .data_free import new_spec, quantize_weight
from .folder_plan import INDEX, open_checkpoint, plan_checkpoint
from .formats import encode
from .quantize_plan import Options, quantization_config

#: Told of each tensor before its turn: its name, and the bytes of files done and in all.
Progress = Callable[[str, int, int], None]

_WEIGHT_ENDINGS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".index.json",
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """What was done.

    Attributes:
        linears: how many linears were quantized.
        bytes_before, bytes_after: of all tensors.
        left: modules in the decoder's layers that hold the weights of many experts in one tensor and stay as they are.
    """

    linears: int
    bytes_before: int
    bytes_after: int
    left: tuple[str, ...]


def quantize_folder(
    source: Path,
    target: Path,
    bits: int = 4,
    group_size: int = 128,
    *,
    symmetric: bool = True,
    skip: Sequence[str] | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Summary:
    """Writes the quantized copy of a model's folder, as `hf_turbo.quantize` and `save_pretrained` would.

    No model is loaded: in memory are the new tensors of one file, and one weight. Each file of weights becomes one of
    the same name. Everything else in the folder is copied. `target` appears once all is written.

    Args:
        source: a folder with config.json and safetensors.
        target: a folder that does not exist yet, or is empty.
        bits, group_size, symmetric, skip: as in `hf_turbo.quantize`.
        progress: told of each tensor.

    Raises:
        ValueError: as `hf_turbo.quantize`; or the source is no such folder or quantized already, or the target
            is not empty.
        NotImplementedError: the files hold a linear's weight in another form than the model.
    """
    options = Options(bits, group_size, symmetric, tuple(skip or ()))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not empty; name a new folder")
    checkpoint = open_checkpoint(source)
    plan, weights = plan_checkpoint(checkpoint, options)
    before, after, where = 0, 0, {}
    with _appearing(target) as work:
        for file in checkpoint.files:
            written: dict[str, Tensor] = {}
            for name, tensor in _read(source / file):
                progress(name, before, checkpoint.num_bytes)
                before += tensor.nbytes
                written.update(_quantized(name, tensor, options) if name in weights else {name: tensor})
            after += _save(written, work / file)
            where.update(dict.fromkeys(written, file))
        if checkpoint.has_index:
            _write_json({"metadata": {"total_size": after}, "weight_map": dict(sorted(where.items()))}, work / INDEX)
        _write_configs(checkpoint.config, quantization_config(plan, options), work)
        _copy_rest(source, work)
    return Summary(len(weights), before, after, plan.fused_experts)


def _quantized(name: str, weight: Tensor, options: Options) -> dict[str, Tensor]:
    """The tensors that take the place of a weight."""
    module = name.removesuffix(".weight")
    try:
        grouped = quantize_weight(weight, options)
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from error
    return {f"{module}.{short}": tensor for short, tensor in encode(grouped, new_spec(grouped, options)).items()}


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  the file is no dict
            yield name, tensors.get_tensor(name)


def _save(tensors: dict[str, Tensor], file: Path) -> int:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_configs(config: dict[str, Any], quantization: dict[str, Any], folder: Path) -> None:
    """config.json, and the copy that older readers look for."""
    _write_json({**config, "quantization_config": quantization}, folder / "config.json")
    _write_json(quantization, folder / "quantize_config.json")


def _write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _copy_rest(source: Path, target: Path) -> None:
    """Tokenizer, generation config, chat templates, licence, code: all that holds no weights."""
    for entry in source.iterdir():
        if entry.name.startswith(".") or entry.name.endswith(_WEIGHT_ENDINGS) or (target / entry.name).exists():
            continue
        if entry.is_file():
            shutil.copyfile(entry, target / entry.name)
        elif entry.name == "additional_chat_templates":
            shutil.copytree(entry, target / entry.name)


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder beside `target` that becomes it, or goes if anything fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        inner = work / target.name  # made with the usual permissions, which a temporary folder doesn't have
        inner.mkdir()
        yield inner
        if target.exists():
            target.rmdir()
        os.replace(inner, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
