"""Loading INT4 checkpoints that `from_pretrained` cannot find its way into by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from .checkpoint_files import SIDE_CONFIGS, STANDARD_WEIGHTS, odd_weights_file, side_config
from .registry import int4_registered

#: What `from_pretrained` and `AutoConfig.from_pretrained` both take to find a file.
_LOCATION = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_int4(
    name_or_path: str | os.PathLike[str], *, model_class: Any = AutoModelForCausalLM, **kwargs: Any
) -> PreTrainedModel:
    """`model_class.from_pretrained(name_or_path, **kwargs)` for any quantized checkpoint that this package reads.

    Plain `from_pretrained` does for nearly all. This one also takes checkpoints of old tools, whose quantization config
    lies beside a config.json that does not mention it (quantize_config.json, quant_config.json) or, on the Hub, whose
    weights have names of their own (`gptq_model-4bit-128g.safetensors`); and it never uses gptqmodel, auto-round or
    compressed-tensors, be they installed or not.

    Args:
        name_or_path: a folder, or a repository on the Hub.
        model_class: whose `from_pretrained` is called.
        kwargs: for it.

    Raises:
        ValueError: no quantization config is found.
    """
    where = {key: kwargs[key] for key in _LOCATION if key in kwargs}
    config = kwargs.pop("config", None)
    if config is None:
        code = {key: kwargs[key] for key in ("code_revision", "trust_remote_code") if key in kwargs}
        config = AutoConfig.from_pretrained(name_or_path, **code, **where)
    if getattr(config, "quantization_config", None) is None and not _in_text_config(config):
        config.quantization_config = _side_config(name_or_path, where)
    if getattr(config, "transformers_weights", None) is None and kwargs.get("use_safetensors") is not False:
        weights = _weights_file(name_or_path, config.quantization_config, where)
        if weights is not None:
            config.transformers_weights = weights
    with int4_registered():
        return model_class.from_pretrained(name_or_path, config=config, **kwargs)


def _in_text_config(config: Any) -> bool:
    return getattr(config.get_text_config(decoder=True), "quantization_config", None) is not None


def _side_config(name_or_path: str | os.PathLike[str], where: dict[str, Any]) -> dict[str, Any]:
    folder = _folder(name_or_path, where)
    if folder is None:
        found = next(filter(None, (_hub_file(name_or_path, name, where) for name in SIDE_CONFIGS)), None)
        folder = Path(found).parent if found else None
    config = side_config(folder) if folder else None
    if config is None:
        raise ValueError(
            f"{name_or_path} is not quantized: its config.json has no quantization_config, "
            f"and there is none of {', '.join(SIDE_CONFIGS)}"
        )
    return config


def _weights_file(name_or_path: str | os.PathLike[str], quantization: Any, where: dict[str, Any]) -> str | None:
    """The name of the weights' file where it is none that Transformers looks for."""
    folder = _folder(name_or_path, where)
    if folder is not None:
        return odd_weights_file(folder)
    if any(_hub_file(name_or_path, name, where) for name in STANDARD_WEIGHTS):
        return None
    config = quantization if isinstance(quantization, dict) else {}
    guesses = (config.get("model_file_base_name"), f"gptq_model-{config.get('bits')}bit-{config.get('group_size')}g")
    names = [f"{guess}{ending}" for guess in guesses if guess for ending in (".safetensors.index.json", ".safetensors")]
    return next((name for name in names if _hub_file(name_or_path, name, where)), None)


def _folder(name_or_path: str | os.PathLike[str], where: dict[str, Any]) -> Path | None:
    folder = Path(name_or_path) / where.get("subfolder", "")
    return folder if folder.is_dir() else None


def _hub_file(name_or_path: str | os.PathLike[str], name: str, where: dict[str, Any]) -> str | None:
    """Where a file of a repository lies once it is fetched; None if the repository has none of that name."""
    return cached_file(
        name_or_path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False, **where
    )
