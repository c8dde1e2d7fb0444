"""A model by name: a shape preset, a sample model, a folder, or an id of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..sample_models import SampleModelName, sample_model
from .presets import PRESETS

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def known_names() -> str:
    """The names that need no download from the Hub."""
    return ", ".join([*PRESETS, *get_args(SampleModelName)])


def load_model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in eval mode, ready for greedy texts of any length.

    Presets get seeded random weights. The generation settings that came with a model are dropped: nothing may stop
    a text early, and nothing may sample.

    Raises:
        ValueError: there is no such model.
    """
    if name in PRESETS:
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(preset_config(name), dtype=dtype)
    else:
        place = {"device_map": str(device)} if device.type == "cuda" else {}
        with _explained(name):
            model = AutoModelForCausalLM.from_pretrained(_source(name), dtype=dtype, **place)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


def load_tokenizer(name: str) -> Any | None:
    """The model's tokenizer; None where there is none, as for presets."""
    if name in PRESETS:
        return None
    try:
        return AutoTokenizer.from_pretrained(_source(name))
    except (OSError, ValueError, ImportError):
        return None


def empty_model(name: str) -> Any:
    """The model's structure on the meta device, without weights.

    Raises:
        ValueError: there is no such model.
    """
    if name in PRESETS:
        config = preset_config(name)
    else:
        with _explained(name):
            config = AutoConfig.from_pretrained(_source(name))
    with _explained(name), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def preset_config(name: str) -> Any:
    """The Transformers configuration of a preset."""
    return AutoConfig.for_model(**PRESETS[name])


def _source(name: str) -> str:
    """The folder of a sample model; any other name as it is."""
    return str(sample_model(name)) if name in get_args(SampleModelName) else name  # type: ignore[arg-type]


class _explained:
    """Turns what Transformers says of a model that it can't load into one sentence, of one that it can't find into
    one with the names there are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, (OSError, ValueError)):
            return
        reason = (str(error).strip().splitlines() or [kind.__name__])[0]
        if isinstance(error, OSError) and not Path(self.name).is_dir():
            raise ValueError(
                f"no model {self.name!r}: give a folder, an id of the Hub, or one of {known_names()} ({reason})"
            ) from error
        raise ValueError(f"can't load {self.name!r}: {reason}") from error
