"""The files of Medusa heads: finding, reading and replacing them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: In the order in which they are looked for.
_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_CONFIG = "config.json"


def weights_name() -> str:
    """The name of the file that heads are saved in."""
    return _WEIGHTS[0]


def find_heads(path: str | Path) -> Path:
    """The file of the heads' weights: itself, in a folder, or fetched from the Hugging Face Hub.

    Raises:
        ValueError: there is none.
    """
    local = Path(path)
    if local.is_file():
        return local
    if local.is_dir():
        found = next((local / name for name in _WEIGHTS if (local / name).is_file()), None)
        if found is None:
            raise ValueError(f"{local} has no Medusa heads: none of {', '.join(_WEIGHTS)}")
        return found
    return _fetch(str(path))


def _fetch(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        for file in _WEIGHTS:
            try:
                found = Path(hf_hub_download(name, file))
            except LocalEntryNotFoundError:  # the Hub can't be reached
                raise
            except EntryNotFoundError:
                continue
            _fetch_config(name)
            return found
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"no Medusa heads {name!r}: give a folder, a file or an id of the Hub ({reason})") from error
    raise ValueError(f"{name!r} of the Hub has no Medusa heads: none of {', '.join(_WEIGHTS)}")


def _fetch_config(name: str) -> None:
    """Puts the config beside the weights, if there is one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(name, _CONFIG)
    except EntryNotFoundError:
        return


def read_config(weights: Path) -> dict[str, Any]:
    """The config beside a weights file, with the names of the published heads; empty where there is none.

    vLLM's configs call the numbers of heads and of blocks by other names.
    """
    path = weights.parent / _CONFIG
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if config.get("model_type") == "medusa":
        config.setdefault("medusa_num_heads", config.get("num_heads"))
        config.setdefault("medusa_num_layers", config.get("num_hidden_layers"))
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU. A pickle is read by torch's restricted unpickler, which runs no code.

    Raises:
        ValueError: the file can't be read, or holds something else.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors' and pickle's errors have no common class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"can't read Medusa heads from {path}: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} holds no dictionary of tensors")
    return tensors


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A name to write to; after the block the file has `path`'s name, and before it nothing has changed there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
