"""Short prompts by captured steps: the GPU computes them in a fraction of the time that the host needs to launch them.

All rows' tokens go through one step, a row of the batch for each, as those of many requests do in the engine. So left
padding is not computed, and a few dozen graphs serve prompts of all lengths.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..cache.forward_plan import real_tokens
from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from ..ops.dispatch import uses_triton
from ..ops.transfer import ints_to_device
from .key_check import MIN_TOKENS
from .prompt_forward import PromptFacts
from .step_graph import MAX_PACKED_EXPERTS, MAX_PACKED_ROWS, MAX_PACKED_SEQS, Forward

#: Multiply-adds of a layer that a large GPU does while the host launches a layer's operations one by one: 2 ms.
SHORT_WORK = 5.5e11

#: Arguments with a row for each of the batch's.
_OF_ROWS = ("input_ids", "position_ids", "attention_mask")
#: Arguments that are made anew here. Others of a prompt's are flags.
_OWN = (*_OF_ROWS, "logits_to_keep", CACHE_NAME)


def run_prompt(model: Any, forward: Forward, kwargs: dict[str, Any]) -> ModelOutput | None:
    """What `forward(**kwargs)` returns, or None: this is no short prompt, or one that goes the model's own way.

    Args:
        model: the patched model.
        forward: its own forward, bound.
        kwargs: the arguments, all by name: ids, int64 `[rows, columns]`, after what the cache holds.
    """
    cache, ids = kwargs.get(CACHE_NAME), kwargs.get("input_ids")
    if not isinstance(cache, PagedCache) or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] == 1:
        return None
    if not _is_plain(cache, kwargs):
        return None
    copies = 1 if cache.num_columns else cache.layout.copies_per_row
    if copies > 1:
        kwargs = kwargs | {name: _each_once(kwargs.get(name), copies) for name in _OF_ROWS}
        ids = kwargs["input_ids"]
    if not _fits(model, cache, ids.numel(), len(ids)):
        return None
    before, size, output, is_short = cache.layout.padding, cache.pool.size, None, False
    try:
        output = _run(model, forward, kwargs, cache, ids)
    except torch.OutOfMemoryError:
        is_short = True
    finally:
        if output is None:
            for group in cache.groups.values():
                group.forget_failed(cache.num_columns)
            cache.layout.padding = before  # of all rows
    if output is None and cache.pool.size != size:
        cache.pool.shrink(size)  # the model's own way may take less: of a quantized cache it makes codes at once
    if is_short:
        model._hf_turbo.step_aside("there was too little memory for a captured prompt")
    if output is not None and copies > 1:
        for group in cache.groups.values():
            group.table.group.shared_tokens += sum(cache.lengths) * (copies - 1)
        cache.batch_repeat_interleave(copies)
        output["logits"] = output["logits"].repeat_interleave(copies, dim=0)
        if cache.head_input is not None:
            cache.head_input.value = cache.head_input.value.repeat_interleave(copies, dim=0)
    return output


def _run(
    model: Any, forward: Forward, kwargs: dict[str, Any], cache: PagedCache, ids: torch.Tensor
) -> ModelOutput | None:
    """The same for rows that differ."""
    layout, start, q_len = cache.layout, cache.num_columns, ids.shape[1]
    if not layout.read_padding(kwargs.get("attention_mask"), len(ids), start, q_len):
        return None
    lengths, before = layout.lengths(start + q_len), layout.lengths(start)
    q_lens = [new - old for new, old in zip(lengths, before, strict=True)]
    is_fresh = not any(before)
    if min(q_lens) == 0 or (is_fresh and not _knows_formats(cache, max(q_lens))):
        return None
    real = real_tokens(q_lens, q_len, ids.device)
    if kwargs.get("position_ids") is None and (start or real is not None):
        return None  # what positions it gives to padding, and to what follows images, is the model's to say
    wanted = [end - 1 for end in itertools.accumulate(q_lens)]
    step = _packed_arguments(kwargs, ids, real)
    cache.adopt_stores()
    layout.packed, layout.wanted, layout.sees_itself = q_lens, wanted, is_fresh
    try:
        output = model._hf_turbo.steps.run(model, forward, step)
    finally:
        layout.packed, layout.wanted, layout.sees_itself = None, [], False
    if output is None:
        return None
    cache.adopt_stores()  # the first prompt has made them
    if is_fresh:
        for group in cache.groups.values():
            group.code_prompts(lengths)
    cache.keep(lengths, may_shrink=True)  # a past that is recorded stays
    watch = cache.head_input
    if watch is not None and watch.value is not None:
        watch.value = watch.value.index_select(0, ints_to_device(wanted, ids.device))
    return output


def _each_once(x: torch.Tensor | None, copies: int) -> torch.Tensor | None:
    """Of each row the first of its copies; rows are the last dimension but one. A single row stands for all."""
    return None if x is None else x[..., ::copies, :]


def _is_plain(cache: PagedCache, kwargs: dict[str, Any]) -> bool:
    """Whether it is an ordinary forward of which each row's last logits are asked for."""
    layout, keep = cache.layout, kwargs.get("logits_to_keep")
    if layout.unsuited is not None or layout.only_ones_follow:
        return False
    # Positions may be several numbers, such as time, height and width, each `[rows, columns]`.
    for name, dims in (("position_ids", (2, 3)), ("attention_mask", (2,))):
        x = kwargs.get(name)
        if x is not None and not (isinstance(x, torch.Tensor) and x.dim() in dims):
            return False
    others = [x for name, x in kwargs.items() if name not in _OWN]
    return type(keep) is int and keep == 1 and not any(isinstance(x, torch.Tensor) for x in others)


def _knows_formats(cache: PagedCache, length: int) -> bool:
    """Whether a prompt of so many tokens has nothing to say of what its layers' codes are to be."""
    return length < MIN_TOKENS or all(cache.pool.is_settled(layer.layer_idx) for layer in cache.layers)


def _fits(model: Any, cache: PagedCache, num_tokens: int, num_rows: int) -> bool:
    """Whether captured steps take so many tokens of so many rows, and the host is what they would wait for."""
    if num_tokens > MAX_PACKED_ROWS or num_rows > MAX_PACKED_SEQS:
        return False
    if not uses_triton(model.device):
        return False
    facts = PromptFacts.of(model)
    if not facts.together or num_tokens * facts.work > SHORT_WORK:
        return False
    return num_tokens <= MAX_PACKED_EXPERTS or not facts.has_experts or _sorts_by_expert(model)


def _sorts_by_expert(model: Any) -> bool:
    """Whether experts read their weights once for all of their tokens, in products that ask nothing of the host."""
    kind = getattr(model._hf_turbo.decoder_config, "_experts_implementation", None)
    return kind == "grouped_mm" and model.dtype == torch.bfloat16


def _packed_arguments(kwargs: dict[str, Any], ids: torch.Tensor, real: torch.Tensor | None) -> dict[str, Any]:
    """The step's arguments: ids and positions `[..., tokens, 1]`, padding left out.

    Args:
        real: as of `real_tokens`.
    """
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    both = [x.flatten(-2) for x in (ids, positions.expand(*positions.shape[:-2], *ids.shape))]
    packed = [(x if real is None else x.index_select(-1, real)).unsqueeze(-1) for x in both]
    # Newer releases of Transformers hand on what encoders have made of a prompt: of a text, an empty dict.
    others = {name: x for name, x in kwargs.items() if name not in _OWN and not (isinstance(x, dict) and not x)}
    return {**others, "input_ids": packed[0], "position_ids": packed[1], CACHE_NAME: kwargs[CACHE_NAME]}
