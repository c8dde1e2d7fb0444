"""Which drafter serves a call of `generate()`: by its arguments, or by what the model was patched with."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..cache.forward_plan import DraftsUnsuited
from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from .draft_model import MAX_PADDING, DraftModel
from .paced import Paced, most_drafted, paced
from .prompt_lookup import PromptLookup
from .speculation import ModelUnsuited, speculate, why_not_speculate

#: What Transformers' own assisted loop alone does: other drafters, other rules.
_OTHER_KINDS = ("assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight")


def assistance(
    model: Any, generation_config: Any, assistant_model: Any, assistant_tokenizer: Any, tokenizer: Any
) -> Paced | None:
    """The drafter that the arguments of an assisted call ask for; None: Transformers' own loop serves it."""
    if model._hf_turbo.model_reason or any(getattr(generation_config, name, None) for name in _OTHER_KINDS):
        return None
    if (num_tokens := generation_config.prompt_lookup_num_tokens) is not None:
        return paced(model, PromptLookup(min(num_tokens, most_drafted(model)), min_match=1))
    if assistant_model is None or getattr(assistant_model.config, "is_encoder_decoder", False):
        return None
    if not _same_vocabulary(model, assistant_model, assistant_tokenizer, tokenizer):
        return None
    num_tokens = getattr(assistant_model.generation_config, "num_assistant_tokens", None) or 20
    return paced(model, DraftModel(assistant_model, min(num_tokens, most_drafted(model))))


def try_drafts(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict[str, Any],
    drafter: Paced,
) -> Any:
    """What the loop for drafted text gives; None, and `report()` says why, where a call can't have it."""
    handle = model._hf_turbo
    call = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    kind = model.training, frozenset(name for name, x in model_kwargs.items() if x is not None)
    reason = handle.no_drafts.get(kind) or why_not_speculate(*call, synced_gpus, model_kwargs)
    if reason is None:
        cache: PagedCache = model_kwargs[CACHE_NAME]
        before = cache.get_seq_length()
        try:
            with drafter.pace(len(input_ids), bool(generation_config.do_sample)) as pace:
                return speculate(*call, streamer, dict(model_kwargs), drafter.drafter, pace)
        except ModelUnsuited as error:
            reason = handle.no_drafts[kind] = str(error)
        except DraftsUnsuited as error:
            reason = str(error)
        if before:
            cache.crop(before - cache.get_seq_length())
        else:
            cache.reset()
    if drafter is handle.speculation or len(input_ids) > 1:  # for one row, Transformers' own assisted loop is next
        handle.step_aside(f"no drafts: {reason}")
    return None


def for_own_checks(model: Any, generation_config: Any, mode_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call's arguments without what Transformers' checks refuse and the loop for drafted text does."""
    if generation_config.num_return_sequences > 1:
        generation_config = copy.copy(generation_config)
        generation_config.num_return_sequences = 1
    names = ("assistant_model", "assistant_tokenizer", "tokenizer")
    assistant, *tokenizers = (mode_kwargs.get(name) for name in names)
    if assistant is not None and _same_vocabulary(model, assistant, *tokenizers):
        mode_kwargs = {name: x for name, x in mode_kwargs.items() if name != "assistant_model"}
    return generation_config, mode_kwargs


def _same_vocabulary(model: Any, assistant: Any, assistant_tokenizer: Any, tokenizer: Any) -> bool:
    """Whether two models' tokens are the same but for padding, as far as it can be seen."""
    sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (model, assistant)]
    if assistant_tokenizer is not None and tokenizer is not None:
        return sizes[0] != sizes[1] and assistant_tokenizer.get_vocab() == tokenizer.get_vocab()
    return assistant_tokenizer is None and abs(sizes[0] - sizes[1]) <= MAX_PADDING
