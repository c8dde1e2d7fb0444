"""Prompts that `generate()` answers one by one: what rows of many can't have, beams."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .supported import OBJECTS, SEED, check_names

#: What only matters among many.
_OF_MANY = ("priority", "salt")


def by_generate(
    model: Any,
    prompts: list[list[int]],
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
    progress_bar: bool,
) -> dict[str, GenerationOutput]:
    """What `generate_batch` returns, by `generate()` for one prompt after the other.

    Args:
        model: a patched model.
        prompts: token ids.
        generation_config: None for the model's own.
        options: as of `Manager.add_request`, and `seed`: one for each prompt, or None.
        progress_bar: whether a bar shows how many prompts are done.

    Raises:
        ValueError: an option that isn't known.
    """
    from tqdm import tqdm

    own = {name: value for name, value in options.items() if name not in _OF_MANY}
    objects = {name: own.pop(name) for name in OBJECTS if name in own}
    check_names(own)
    seeds = own.pop(SEED)
    if generation_config is not None:  # both at once are deprecated
        generation_config = copy.deepcopy(generation_config)
        generation_config.update(**own)
        if generation_config.cache_implementation == "paged":  # how generate() came to generate_batch()
            generation_config.cache_implementation = None
        own = {}
    results = {}
    bar = tqdm(prompts, disable=not progress_bar, desc="generate_batch", unit="request")
    for i, (prompt, seed) in enumerate(zip(bar, seeds, strict=True)):
        ids, began = torch.tensor([list(prompt)], device=model.device), time.perf_counter()
        with nullcontext() if seed is None else torch.random.fork_rng(_devices(model)):
            if seed is not None:
                torch.manual_seed(seed)
            texts = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=generation_config,
                **own, **objects, return_dict_in_generate=False,
            )  # fmt: skip
        for j, text in enumerate(texts[:, ids.shape[1] :].tolist()):
            name = f"req_{i}" if j == 0 else f"req_{i}__child#{j - 1}"
            results[name] = GenerationOutput(
                request_id=name,
                prompt_ids=list(prompt),
                generated_tokens=_ended(text, model._prepare_generation_config(generation_config)[0], options),
                status=RequestStatus.FINISHED,
                created_time=began,
                lifespan=(began, time.perf_counter()),
            )
    return results


def _ended(text: list[int], config: GenerationConfig, options: dict[str, Any]) -> list[int]:
    """A text up to its end token, without the padding after it."""
    ends, pad = (config.eos_token_id, config.pad_token_id)
    ends = options.get("eos_token_id", ends)
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    for i, token in enumerate(text):
        if token in ends:
            return text[: i + 1]
    length = len(text)
    while length and text[length - 1] == options.get("pad_token_id", pad):
        length -= 1
    return text[:length]


def _devices(model: Any) -> list[torch.device]:
    return [model.device] if model.device.type == "cuda" else []
