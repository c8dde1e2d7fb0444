"""The quantized modules of a local checkpoint, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_files import STANDARD_WEIGHTS, odd_weights_file, read_headers, side_config
from .formats import linear_specs
from .spec import LinearSpec


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of safetensors.

    Attributes:
        specs: the file's name of each quantized module -> how it lies there.
        files: tensor -> the file that has it.
    """

    specs: Mapping[str, LinearSpec]
    files: Mapping[str, Path]

    def read(self, module: str, device: torch.device) -> dict[str, Tensor]:
        """The tensors of one module by their short names."""
        from safetensors import safe_open

        tensors = {}
        for short in self.specs[module].tensors:
            name = f"{module}.{short}"
            with safe_open(self.files[name], framework="pt") as file:
                tensors[short] = file.get_tensor(name).to(device)
        return tensors


def open_folder(folder: Path) -> CheckpointFolder | None:
    """What is in a folder; None if it holds no quantized checkpoint.

    Raises:
        OSError, ValueError, NotImplementedError: it holds one that is not whole, or not read here.
    """
    config = _quantization_config(folder)
    weights = next((name for name in STANDARD_WEIGHTS if (folder / name).is_file()), None) or odd_weights_file(folder)
    if config is None or weights is None:
        return None
    names = [weights]
    if weights.endswith(".json"):
        names = sorted(set(json.loads((folder / weights).read_text())["weight_map"].values()))
    files: dict[str, Path] = {}
    headers = {}
    for path in (folder / name for name in names):
        found = read_headers([path])
        headers.update(found)
        files.update(dict.fromkeys(found, path))
    return CheckpointFolder(linear_specs(config, headers), files)


def _quantization_config(folder: Path) -> dict[str, Any] | None:
    if not (folder / "config.json").is_file():
        return None
    config = json.loads((folder / "config.json").read_text())
    nested = (part for part in (config, *config.values()) if isinstance(part, dict))
    found = next((part["quantization_config"] for part in nested if part.get("quantization_config")), None)
    return found or side_config(folder)
