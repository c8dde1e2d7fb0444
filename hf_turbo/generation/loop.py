"""The loop for greedy and sampled text: Transformers' `_sample` with few operations a step and no wait in it.

On a GPU the loop learns one step late that every row is done. The step that was launched meanwhile is taken back:
its token, scores, random numbers and place in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from .choice import Choice
from .columns import Columns
from .known import criteria_are_known, processors_are_known
from .readback import Readback
from .step import DecodeSteps, is_stock, knows_steps
from .stopping import StopRules


def runs_ahead(device: torch.device) -> bool:
    """Whether the host is worth sending ahead of a device."""
    return device.type == "cuda"


def can_sample(
    model: Any,
    input_ids: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> bool:
    """Whether `sample` gives what Transformers' own loop would give. Arguments as of `_sample`."""
    return (
        not synced_gpus
        and type(stopping_criteria) is StoppingCriteriaList
        and is_stock(model, "_sample")
        and knows_steps(model, input_ids, generation_config, model_kwargs)
    )


def sample(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Greedy or sampled text, where `can_sample`. Arguments and results as of `_sample`."""
    cache: PagedCache = model_kwargs[CACHE_NAME]
    outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
    text = _Text(input_ids, logits_processor, stopping_criteria, generation_config, streamer, cache)
    steps = DecodeSteps(model, outputs, model_kwargs, alone=text.is_alone and streamer is None)
    with model._optimize_model_for_decode(), steps:
        tokens = text.add_token(outputs.logits)
        del outputs  # the logits of a prompt may be large
        while tokens is not None:
            tokens = text.add_token(steps.forward(tokens).logits)
    text.take_back_steps()
    if streamer is not None:
        streamer.end()
    return text.result(generation_config)


class _Text:
    """The rows so far, and whether they go on.

    Args:
        input_ids: the prompt, int64 `[rows, columns]`; no columns where embeddings were the prompt.
        cache: of the model's steps.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: Any,
        streamer: Any,
        cache: PagedCache,
    ) -> None:
        device = input_ids.device
        processors_known, criteria_known = processors_are_known(processors), criteria_are_known(criteria)
        ahead = runs_ahead(device) and processors_known and criteria_known and not _records_past(cache)
        self._cache = cache
        self._ids = Columns(input_ids)
        self._choice = Choice(processors, generation_config, device, can_undo=ahead)
        self._rules = StopRules(criteria, device)
        self._readback = Readback(streamer, ahead)
        # The one row of a batch needs no padding, and is done when the text is.
        self._is_single = len(input_ids) == 1
        self.is_alone = processors_known and criteria_known
        self._done: torch.Tensor | None = None  # bool [rows]
        self._padding = generation_config._pad_token_tensor
        if self._padding is not None:
            self._padding = self._padding.to(device)

    def add_token(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Chooses each row's next token, int64 `[rows]`, by logits `[rows, columns, vocabulary]`.

        None when the text ends.
        """
        tokens = self._choice(self._sequences, logits)
        if self._rules.pads and self._done is not None and not self._is_single:
            tokens = torch.where(self._done, self._padding, tokens)
        self._ids.append(tokens)
        self._rules.remind(self._ids.length)
        self._note_done(tokens)
        stops = self._readback.after_step(self._verdict(), tokens, self._rules.is_last(self._ids.length))
        return None if stops else tokens

    def take_back_steps(self) -> None:
        """Forgets what was launched after the end of the text."""
        steps = self._readback.steps_to_undo
        self._choice.undo(steps)
        self._ids.length -= steps
        if steps:
            self._cache.crop(-steps)

    def result(self, generation_config: Any) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `_sample` returns."""
        sequences = self._ids.view.clone(memory_format=torch.contiguous_format)
        if not generation_config.return_dict_in_generate:
            return sequences
        scores, logits = self._choice.scores, self._choice.logits
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": None if scores is None else tuple(scores),
            "logits": None if logits is None else tuple(logits),
            CACHE_NAME: self._cache,
        }
        return GenerateDecoderOnlyOutput(**fields)

    def _sequences(self) -> torch.Tensor:
        """All tokens, int64 `[rows, length]`; contiguous, as code that we don't know may need them."""
        return self._ids.view.contiguous() if not self.is_alone else self._ids.view

    def _note_done(self, tokens: torch.Tensor) -> None:
        done = self._rules.done(tokens, self._sequences, self._choice.scores)
        if done is not None:
            self._done = done if self._done is None or self._is_single else self._done | done

    def _verdict(self) -> torch.Tensor | None:
        done, check = self._done, self._choice.check
        if done is None:
            return None if check is None else check.amax()
        if check is None:
            return done[0] if self._is_single else done.all()
        votes = torch.where(done, -1.0, check)
        return votes[0] if self._is_single else votes.amax()


def _records_past(cache: PagedCache) -> bool:
    """Whether somebody is to take back tokens of this cache, for which a crop of ours would leave nothing."""
    return any(group.record_past for group in cache.groups.values())
