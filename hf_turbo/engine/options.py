"""What one request of many asks for: Transformers' own preparation of `generate()`'s arguments, for one prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..generation.known import ProcessorKinds
from ..ops.transfer import ints_to_device
from .configs import RequestConfigs
from .merging import merge_key
from .stops import Stops
from .supported import SEED


@dataclass(eq=False)
class RequestOptions:
    """How a request's tokens are chosen, and where its texts end.

    Args:
        generation_config: as `generate()` prepares it: defaults, lengths and special tokens filled in.
        processors: called with rows of this request alone, unless it makes no difference.
        stops: the stopping criteria.
        num_prompt: tokens of the prompt.
        seed: what the request's random numbers come from; None for greedy text. Where none was asked for it is drawn
            from torch's default generator, so that `torch.manual_seed` before the requests settles their texts.
    """

    generation_config: GenerationConfig
    processors: LogitsProcessorList
    stops: Stops
    num_prompt: int
    seed: int | None

    @classmethod
    def of(
        cls,
        model: Any,
        prompt: Sequence[int],
        generation_config: GenerationConfig | None,
        overrides: Mapping[str, Any],
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        tokenizer: Any = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        configs: RequestConfigs | None = None,
    ) -> RequestOptions:
        """What `model.generate()` would make of one prompt and these arguments.

        Args:
            model: whose own methods prepare everything.
            prompt: token ids.
            generation_config: of all requests; never changed.
            overrides: this request's attributes of a GenerationConfig, by name, and `seed`: an int, with which its
                text is that of `torch.manual_seed(seed)` before `generate()`.
            logits_processor, stopping_criteria, prefix_allowed_tokens_fn: as of `generate()`, called with the rows of
                this request that have not ended.
            tokenizer: needed for stop strings.
            configs: of the model, where others of its requests have prepared theirs; None: this one's is prepared anew.

        Raises:
            ValueError: an override that is not known, or what `generate()` raises for these arguments.
            NotImplementedError: something that a request of many can't have.
        """
        own = dict(overrides)
        seed = _checked_seed(own.pop(SEED, None))
        device = model.device
        prepared = (configs or RequestConfigs(model)).prepare(generation_config, own, device)
        config = prepared.config
        if prefix_allowed_tokens_fn is not None and (config.num_return_sequences or 1) > 1:
            raise NotImplementedError(
                "not available for one request of many: prefix_allowed_tokens_fn with num_return_sequences > 1; "
                "call generate() for it"
            )
        ids = ints_to_device(prompt, device).unsqueeze(0)
        config = model._prepare_generated_length(
            generation_config=config,
            model_input_name="input_ids",
            inputs_tensor=ids,
            input_ids_length=ids.shape[1],
            **prepared.defaulted,
        )
        model._validate_generated_length(config, ids.shape[1], prepared.defaulted["has_default_max_length"])
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            logits_processor=LogitsProcessorList() if logits_processor is None else logits_processor,
            device=device,
            model_kwargs={},
        )
        config._eos_token_tensor = prepared.eos  # the host looks for them
        criteria = model._get_stopping_criteria(
            generation_config=config,
            stopping_criteria=StoppingCriteriaList() if stopping_criteria is None else stopping_criteria,
            tokenizer=tokenizer,
        )
        if config.do_sample and seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        return cls(config, processors, Stops(criteria), ids.shape[1], seed if config.do_sample else None)

    @property
    def num_sequences(self) -> int:
        """Texts that are asked for."""
        return self.generation_config.num_return_sequences or 1

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self.generation_config.do_sample)

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens that a text may get; None without a limit."""
        return None if self.stops.max_length is None else self.stops.max_length - self.num_prompt

    @cached_property
    def kinds(self) -> ProcessorKinds:
        """What the processors may be called with."""
        return ProcessorKinds.of(self.processors)

    @cached_property
    def merge_key(self) -> Hashable | None:
        """Rows of requests that have the same one may be chosen by one call; None where they may not."""
        key = merge_key(self.processors)
        return None if key is None else (self.samples, key)

    @property
    def takes_likeliest(self) -> bool:
        """The largest of the logits is the next token, whatever comes before."""
        return not (self.processors or self.samples)

    @property
    def reads_text(self) -> bool:
        """Whether processors or criteria look at tokens, so that these must be on the device."""
        return not self.kinds.read_no_text or self.stops.read_text

    @property
    def is_plain(self) -> bool:
        """Nothing but the likeliest token and where it ends counts."""
        return self.takes_likeliest and self.stops.are_known and not self.stops.read_text

    @property
    def may_go_ahead(self) -> bool:
        """Whether tokens may be chosen before it is known that the text goes on, and be taken back.

        Criteria that read the text are left out: the host waits for their answers.
        """
        return self.kinds.known and self.stops.are_known and not self.stops.read_text


def _checked_seed(seed: Any) -> int | None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"seed={seed!r}: an int, as for torch.manual_seed, or None")
    return seed
