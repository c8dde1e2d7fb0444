"""What of a `GenerationConfig` one request of many may ask for: every attribute is decided on here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig
from transformers.generation import WatermarkingConfig

#: Done row by row, by Transformers' own preparation, processors and criteria.
SERVED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "num_return_sequences", "pad_token_id", "bos_token_id", "eos_token_id",
}  # fmt: skip

#: What greedy and sampled text does not depend on in generate() either: it is for beams, for assistants, for static
#: caches, for encoders, for how a long prompt is computed, or it says where a config is from. A dict returned by
#: generate() has nothing that a request's result lacks as long as nothing of `REFUSED` is asked for.
WITHOUT_EFFECT = {
    "early_stopping", "length_penalty", "low_memory", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type", "max_cache_len", "compile_config", "disable_compile",
    "prefill_chunk_size", "decoder_start_token_id", "return_dict_in_generate", "continuous_batching_config",
    "transformers_version",
}  # fmt: skip

#: What a row among many can't have, with the values that don't ask for it; None never does.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "token_healing": (False,),
    "use_mtp": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "is_assistant": (False,),
    "use_cache": (True,),
    "cache_implementation": ("paged", "dynamic"),
    "cache_config": (),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
}

#: What `generate()` takes beside a GenerationConfig, and so does a request.
OBJECTS = ("logits_processor", "stopping_criteria", "tokenizer", "prefix_allowed_tokens_fn")

#: A request's own attributes, beyond those of a GenerationConfig.
SEED = "seed"
#: The manager's, not a request's.
_NOT_OF_A_REQUEST = {"continuous_batching_config"}


def check_names(overrides: Iterable[str]) -> None:
    """Looks whether a request may name these.

    Raises:
        ValueError: names that are no attribute of a GenerationConfig.
    """
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - _NOT_OF_A_REQUEST | {SEED}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not known; a request takes what GenerationConfig has, and {SEED!r}")


def check_values(config: GenerationConfig, own: GenerationConfig) -> None:
    """Looks whether a request can have all that a config asks for.

    Args:
        config: of one request, defaults filled in.
        own: the model's; what only models of this kind know of is left to them.

    Raises:
        NotImplementedError: values that a request can't have, by name.
    """
    declared, defaults = vars(GenerationConfig()), config._get_default_generation_params()
    asked = [
        f"{name}={value!r}"
        for name, value in vars(config).items()
        if not (value is None or name.startswith("_") or name in SERVED or name in WITHOUT_EFFECT)
        and not (name in REFUSED and value in REFUSED[name])
        and not (name == "watermarking_config" and type(value) is WatermarkingConfig)
        and not (name not in REFUSED and name in declared and value == defaults.get(name))
        and not (name not in declared and value == getattr(own, name, None))
    ]
    if (config.num_return_sequences or 1) > 1 and config.encoder_repetition_penalty not in (None, 1):
        asked.append("encoder_repetition_penalty with num_return_sequences > 1")  # kept for the prompt's row alone
    if asked:
        raise NotImplementedError(f"not available for one request of many: {', '.join(asked)}; call generate() for it")
