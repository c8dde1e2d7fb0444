"""The few methods of `generate()` that differ on a patched model, each falling back to the model's own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from ..handle import PatchHandle
from .assisted import assistance, for_own_checks, try_drafts
from .beam_loop import beam_search, can_search
from .loop import can_sample, sample
from .prefix import begin_text, keep_texts


class TurboGenerationMixin:
    """First base of a patched instance's class; `_hf_turbo` holds what belongs to the instance."""

    _hf_turbo: PatchHandle
    _hf_turbo_original_class: type

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        mode: Any,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Puts a `PagedCache` where Transformers would put a `DynamicCache`; `batch_size` counts prompts."""
        handle = self._hf_turbo
        given = model_kwargs.get(CACHE_NAME)
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if handle.model_reason:
            pass  # said when it was patched
        elif given is not None:
            if isinstance(given, PagedCache):
                given.is_given, given.prefix_domain = True, None
                if copies > 1 and given.batch_size == batch_size:  # each row goes on in several ways
                    given.batch_repeat_interleave(copies)
            else:
                handle.step_aside(f"a {type(given).__name__} was passed to generate()")
        elif reason := _why_not(handle, generation_config, model_kwargs):
            handle.step_aside(reason)
        elif generation_config.use_cache is not False:
            length = generation_config.max_length or 0
            model_kwargs[CACHE_NAME] = handle.new_cache(copies_per_row=copies, expected_length=length)
            model_kwargs[CACHE_NAME].is_given = False
            if generation_config.is_assistant:
                model_kwargs[CACHE_NAME].activate_past_recording()
            return
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, mode, batch_size, *args, **kwargs
        )

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The prompts' forward, without what the prefix cache has."""
        begin_text(self, input_ids, generation_config, model_kwargs)
        outputs = super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        keep_texts(model_kwargs.get(CACHE_NAME), input_ids)
        return outputs

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        handle = self._hf_turbo
        call = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        if handle.speculation is not None and not generation_config.is_assistant:
            result = try_drafts(self, *call, model_kwargs, handle.speculation)
            if result is not None:
                return result
        if can_sample(self, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs):
            result = sample(
                self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
            )
        else:
            result = super()._sample(*call, **model_kwargs)  # type: ignore[misc]
        keep_texts(model_kwargs.get(CACHE_NAME), result if isinstance(result, torch.Tensor) else result.sequences)
        return result

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Any = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        call = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        drafter = assistance(self, generation_config, assistant_model, assistant_tokenizer, tokenizer)
        if drafter is not None:
            result = try_drafts(self, *call, model_kwargs, drafter)
            if result is not None:
                return result
        if len(input_ids) > 1:  # Transformers' own assisted loop takes one row
            self._hf_turbo.step_aside("drafts for several rows: the text comes token by token")
            return self._sample(*call, **model_kwargs)
        return super()._assisted_decoding(  # type: ignore[misc]
            *call, inputs_tensor, assistant_model, assistant_tokenizer, tokenizer, **model_kwargs
        )

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, mode_kwargs: Any) -> None:
        """Transformers' own checks, without those of what only its own assisted loop can't do."""
        if generation_mode == GenerationMode.ASSISTED_GENERATION and not self._hf_turbo.model_reason:
            generation_config, mode_kwargs = for_own_checks(self, generation_config, mode_kwargs)
        super()._validate_generation_mode(generation_mode, generation_config, mode_kwargs)  # type: ignore[misc]

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        if can_search(self, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs):
            return beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        return super()._beam_search(  # type: ignore[misc]
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, **model_kwargs
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own continuous batching, with the attention it had before patching."""
        handle = self._hf_turbo
        start = super().init_continuous_batching  # type: ignore[misc]
        if handle.attention is None or handle.decoder_config is None or not handle.attention_is_ours():
            return start(*args, **kwargs)
        handle.step_aside("continuous batching runs over Transformers' own cache")
        handle.decoder_config._attn_implementation_internal = handle.attention.base
        try:
            manager = start(*args, **kwargs)
        except BaseException:
            handle.decoder_config._attn_implementation_internal = handle.attention
            raise
        manager._original_attn_impl = handle.attention  # what it puts back when it stops
        return manager


def _why_not(handle: PatchHandle, generation_config: Any, model_kwargs: dict[str, Any]) -> str | None:
    """Why this call can't use the paged cache; None if it can."""
    if not handle.attention_is_ours():
        return "the attention implementation was changed after patching"
    if handle.attention is not None and handle.attention.unsuited:
        return handle.attention.unsuited
    if generation_config.cache_implementation is not None:
        return f"cache_implementation={generation_config.cache_implementation!r} was asked for"
    if generation_config.output_attentions:
        return "output_attentions needs the model's own attention"
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        if mask.dim() != 2:
            return f"attention_mask has {mask.dim()} dimensions; left padding is a mask of 2"
        if not _is_left_padding(mask):
            return "attention_mask has zeros after a token, or a row without tokens; left padding has neither"
    return None


def _is_left_padding(mask: torch.Tensor) -> bool:
    real = mask.bool()
    return bool((real[:, -1].all() & (real[:, 1:] >= real[:, :-1]).all()).item())
