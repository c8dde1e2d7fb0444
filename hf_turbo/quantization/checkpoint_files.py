"""The files of a quantized checkpoint: which there are, what they say of their tensors, and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from .spec import TensorHeader

#: Where tools before Transformers' own `quantization_config` wrote it.
SIDE_CONFIGS = ("quantize_config.json", "quant_config.json", "quantization_config.json")

_SAFETENSORS, _INDEX = ".safetensors", ".index.json"
#: What Transformers looks for.
STANDARD_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def read_headers(files: Sequence[str | Path]) -> dict[str, TensorHeader]:
    """Name -> dtype and shape of every tensor in these files, without their data.

    Raises:
        FileNotFoundError: one of the files is not there.
        ValueError: a file is cut short, or has a tensor of an unknown type.
    """
    paths = [Path(file) for file in files]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"the checkpoint lacks {', '.join(missing)}")
    headers: dict[str, TensorHeader] = {}
    for path in paths:
        headers.update(_safetensors_headers(path) if path.suffix == _SAFETENSORS else _pickle_headers(path))
    return headers


def absent_tensors(files: Sequence[str | Path], headers: Mapping[str, TensorHeader]) -> list[str]:
    """The tensors that an index beside these files names, but none of the files has."""
    named = {name for index in _indexes([Path(file) for file in files]) for name in _weight_map(index)}
    return sorted(named - headers.keys())


def _weight_map(index: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads(index.read_text()).get("weight_map", {})
    return weight_map


def _safetensors_headers(path: Path) -> dict[str, TensorHeader]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path} is cut short, or no safetensors file")
        entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    if 8 + size + max(ends, default=0) > path.stat().st_size:
        raise ValueError(f"{path} is cut short: it ends before the data of its last tensor")
    return {name: TensorHeader(_dtype(path, name, entry), tuple(entry["shape"])) for name, entry in entries.items()}


def _dtype(path: Path, name: str, entry: dict[str, Any]) -> torch.dtype:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: {name} is of the type {entry['dtype']}, which is not known here")
    return _DTYPES[entry["dtype"]]


def _pickle_headers(path: Path) -> dict[str, TensorHeader]:
    """Read by torch's restricted unpickler, and onto no device."""
    tensors = torch.load(path, map_location="meta", weights_only=True, mmap=is_zipfile(path))
    return {name: TensorHeader(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _indexes(paths: Sequence[Path]) -> list[Path]:
    """The index files beside these that name one of them."""
    names = {path.name for path in paths}
    folders = {path.parent for path in paths}
    found = sorted(index for folder in folders for index in folder.glob(f"*{_INDEX}"))
    return [index for index in found if names & set(_weight_map(index).values())]


def odd_weights_file(folder: Path) -> str | None:
    """The name of the safetensors file, or of their index, in a folder that has none by the names that Transformers
    looks for, as auto-gptq wrote them (`gptq_model-4bit-128g.safetensors`). None where the standard one is there, or
    none at all.

    Raises:
        ValueError: several files, and nothing that says which.
    """
    if any((folder / name).is_file() for name in STANDARD_WEIGHTS):
        return None
    found = _odd(folder, f"*{_SAFETENSORS}{_INDEX}") or _odd(folder, f"*{_SAFETENSORS}")
    if len(found) > 1:
        raise ValueError(
            f"{folder} has no {STANDARD_WEIGHTS[0]} but several others: {', '.join(found)}; "
            "say which by `transformers_weights` in its config.json"
        )
    return found[0] if found else None


def _odd(folder: Path, pattern: str) -> list[str]:
    """Names that are neither adapters' nor variants' (`model.fp16.safetensors`), which are asked for by other means."""
    return sorted(path.name for path in folder.glob(pattern) if not path.name.startswith(("adapter_", "model.")))


def side_config(folder: Path) -> dict[str, Any] | None:
    """The quantization config that lies beside config.json, with the `quant_method` that old tools left out."""
    path = next((folder / name for name in SIDE_CONFIGS if (folder / name).is_file()), None)
    if path is None:
        return None
    config: dict[str, Any] = json.loads(path.read_text())
    awq = path.name == "quant_config.json" or "zero_point" in config
    return {**config, "quant_method": config.get("quant_method", "awq" if awq else "gptq")}


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few, and how many more."""
    found = list(names)
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")
