"""Continuations of prompts by the model itself: heads learn best what they will have to guess.

They are kept on disk as they come, so that a call that was cut off goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.medusa_files import replace_file
from .base_model import pad
from .config import TrainingConfig

#: Prompts whose continuations share a file.
_SHARD = 512


class Text(NamedTuple):
    """A prompt and its continuation.

    Attributes:
        tokens: of both.
        num_prompt_tokens: at least 1.
    """

    tokens: list[int]
    num_prompt_tokens: int


def fitting(prompts: Sequence[Sequence[int]], config: TrainingConfig) -> list[list[int]]:
    """The prompts that leave room for three tokens, shortest first: batches of them need few pads."""
    fit = [list(tokens) for tokens in prompts if 0 < len(tokens) <= config.max_length - 3]
    return sorted(fit, key=len)


def continue_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    config: TrainingConfig,
    *,
    share: slice,
    progress: Callable[[int], Any],
) -> None:
    """Writes the continuations that are not there yet.

    Args:
        prompts: as from `fitting`.
        folder: for the files.
        share: the files that this process writes, of all.
        progress: called with numbers of prompts that are done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = [prompts[start : start + _SHARD] for start in range(0, len(prompts), _SHARD)]
    for number, shard in list(enumerate(shards))[share]:
        path = _path(folder, number)
        if not path.is_file():
            _write(path, _continue_shard(model, shard, config, config.seed + number, progress))
        else:
            progress(len(shard))


def read_continuations(folder: Path, num_prompts: int) -> list[Text]:
    """All continuations, in the order of their prompts."""
    found = []
    for number in range(-(-num_prompts // _SHARD)):
        tensors = load_file(_path(folder, number))
        lengths, num_prompt_tokens = tensors["lengths"].tolist(), tensors["num_prompt_tokens"].tolist()
        texts = [tokens.tolist() for tokens in tensors["tokens"].split(lengths)]
        found += [Text(tokens, num) for tokens, num in zip(texts, num_prompt_tokens, strict=True)]
    return found


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def _write(path: Path, sequences: Sequence[Text]) -> None:
    tensors = {
        "tokens": torch.tensor([token for sequence in sequences for token in sequence.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(sequence.tokens) for sequence in sequences], dtype=torch.int32),
        "num_prompt_tokens": torch.tensor([sequence.num_prompt_tokens for sequence in sequences], dtype=torch.int32),
    }
    with replace_file(path) as target:
        save_file(tensors, target)


def _continue_shard(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    config: TrainingConfig,
    seed: int,
    progress: Callable[[int], Any],
) -> list[Text]:
    found: list[Text] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), config.batch_size):
            batch = prompts[start : start + config.batch_size]
            found += _continue_batch(model, batch, config)
            progress(len(batch))
    return found


def _continue_batch(model: PreTrainedModel, prompts: Sequence[Sequence[int]], config: TrainingConfig) -> list[Text]:
    input_ids, attention_mask = pad(prompts, model.device, left=True)
    width = input_ids.shape[1]
    new_tokens = min(config.new_tokens, config.max_length - width)
    out = model.generate(  # type: ignore[operator]
        input_ids, attention_mask=attention_mask, max_new_tokens=new_tokens, **_choice(model, config.temperature)
    )
    rows = out[:, width:].tolist()
    ends = set(_eos_tokens(model))
    return [Text([*prompt, *_until_end(row, ends)], len(prompt)) for prompt, row in zip(prompts, rows, strict=True)]


def _choice(model: PreTrainedModel, temperature: float) -> dict[str, Any]:
    """Arguments of `generate` that choose tokens; everything else is what the model's own settings say."""
    pad_token = model.generation_config.pad_token_id
    choice: dict[str, Any] = {"num_beams": 1, "pad_token_id": 0 if pad_token is None else pad_token}
    if temperature > 0:
        return {**choice, "do_sample": True, "temperature": temperature}
    return {**choice, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def _eos_tokens(model: PreTrainedModel) -> list[int]:
    eos: Any = model.generation_config.eos_token_id
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to the first token that ends a text, with it."""
    end = next((number for number, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]
