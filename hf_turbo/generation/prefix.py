"""What `generate()` looks up in the prefix cache, and what it leaves there."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.paged_cache import PagedCache
from ..cache.prefixes import find_rows
from ..compat import CACHE_NAME
from ..handle import PatchHandle

#: Arguments of a forward of which nothing but the tokens, and where they stand, changes keys and values.
_HARMLESS = {
    "attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", "output_attentions",
    CACHE_NAME,
}  # fmt: skip


def begin_text(model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Fills the cache of a call with what is known of its prompts, where their tokens say all of what they are.

    Args:
        input_ids: the prompts, int64 `[rows, columns]`.
        generation_config, model_kwargs: as of `_prefill`.
    """
    handle: PatchHandle = model._hf_turbo
    cache = model_kwargs.get(CACHE_NAME)
    if not handle.config.prefix_cache or not isinstance(cache, PagedCache) or cache.pool is not handle.pool:
        return
    if cache.is_given or cache.get_seq_length() or model.training:
        return
    if not _tokens_say_all(input_ids, generation_config, model_kwargs):
        return
    prompts = _prompts(input_ids, model_kwargs)
    if prompts is None:
        return
    cache.prefix_domain = handle.prefix_domain(model)
    if cache.prefix_domain is not None and _takes_the_rest(input_ids, generation_config, model_kwargs):
        find_rows(cache, prompts, input_ids.shape[1], cache.prefix_domain)


def keep_texts(cache: Any, texts: torch.Tensor) -> None:
    """Has blocks kept, where the cache has a row for each of these texts.

    Args:
        cache: of the call.
        texts: int64 `[rows, columns]`, left padding included; tokens that the cache does not hold may follow.
    """
    if not isinstance(cache, PagedCache) or cache.prefix_domain is None or len(texts) != cache.batch_size:
        return
    for row, tokens in enumerate(texts[:, : cache.layers[0].length].tolist()):
        keep_text(cache, row, tokens)


def keep_text(cache: PagedCache, row: int, tokens: list[int]) -> None:
    """The same for one row."""
    if cache.prefix_domain is not None:
        cache.register_prefix(row, tokens[cache.layout.left_padding()[row] :], cache.prefix_domain)


def _tokens_say_all(input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    others = [name for name, x in model_kwargs.items() if x is not None and name not in _HARMLESS]
    return not (others or generation_config.is_assistant or input_ids.dim() != 2 or input_ids.shape[1] == 0)


def _takes_the_rest(input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the prompt's forward is given the columns only that the cache lacks, and nobody misses the others."""
    mask = model_kwargs.get("attention_mask")
    width = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
    return (
        width == input_ids.shape[1]
        and generation_config.prefill_chunk_size is None
        and not generation_config.output_hidden_states
    )


def _prompts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]] | None:
    """The tokens of each row without left padding; None where they stand at other positions than a text's."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        return None
    real = mask.to(input_ids.device, torch.int64)
    if positions is not None:
        usual = (real.cumsum(1) - 1).clamp_min(0)
        if positions.dim() != 2 or not torch.equal(positions.to(usual.device).expand_as(usual) * real, usual * real):
            return None
    starts = (real.cumsum(1) == 0).sum(1).tolist()
    return [row[start:] for row, start in zip(input_ids.tolist(), starts, strict=True)]
