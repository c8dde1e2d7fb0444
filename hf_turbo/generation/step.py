"""What the loops pass to the model at each step, the same as Transformers' own loops, with few operations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin

from ..cache.ahead_rows import AheadRows
from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from .columns import Columns

#: Steps whose position ids are computed at once.
_POSITIONS = 256

#: Methods that say what a step is given. A model or instance with its own keeps Transformers' loop.
_STOCK_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def knows_steps(model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether `DecodeSteps` gives this model what Transformers' loops would give it.

    Args:
        input_ids: the prompt, int64 `[rows, columns]`.
    """
    mask = model_kwargs.get("attention_mask")
    return (
        isinstance(model_kwargs.get(CACHE_NAME), PagedCache)
        and bool(model_kwargs.get("use_cache"))
        and not model.config.is_encoder_decoder
        and not generation_config.output_attentions
        and not generation_config.output_hidden_states
        and not generation_config.is_assistant
        and generation_config.compile_config is None
        and (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2))
        and input_ids.dim() == 2
        and input_ids.device == model.device
        and makes_stock_steps(model)
    )


def makes_stock_steps(model: Any) -> bool:
    """Whether a model's steps are given what all models of Transformers are given, and nothing of its own."""
    return not model.is_remote_code() and all(is_stock(model, name) for name in _STOCK_METHODS)


def is_stock(model: Any, method: str) -> bool:
    """Whether a model's method, before patching, is the one that all models of Transformers inherit."""
    own = getattr(model._hf_turbo_original_class, method)
    return own is getattr(GenerationMixin, method) and method not in vars(model)


class DecodeSteps:
    """One forward after another, a token a row.

    The arguments of the first come from the model's own methods. Later ones differ in the tokens, in position ids that
    grow by one, and in a mask that grows by ones. A context: within it the cache knows that only ones follow, which
    spares it to fetch each mask from the device.

    Args:
        outputs: of the prompt's forward.
        model_kwargs: what `generate()` handed to the loop, as `_prefill` left it.
        alone: no code of the caller's runs between the steps.
    """

    def __init__(self, model: Any, outputs: Any, model_kwargs: dict[str, Any], alone: bool) -> None:
        self._model = model
        self._alone = alone
        self._cache: PagedCache = model_kwargs[CACHE_NAME]
        self._kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        self._inputs: dict[str, Any] = {}
        self._is_taken = False
        self._mask: Columns | None = None
        self._positions: torch.Tensor | None = None
        self._used = 0

    def __enter__(self) -> DecodeSteps:
        layout = self._cache.layout
        layout.only_ones_follow = layout.columns_read == self._cache.get_seq_length()
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.layout.only_ones_follow = False
        self._cache.model_is_as_it_was = False

    def forward(self, tokens: torch.Tensor) -> Any:
        """The model's outputs for these tokens, int64 `[rows]`, contiguous."""
        self._take(tokens)
        outputs = self._model(**self._inputs)
        self._is_taken = False
        self._cache.model_is_as_it_was = self._alone
        return outputs

    @property
    def are_captured(self) -> bool:
        """Whether there is any captured step that could go ahead."""
        return self._model._hf_turbo.steps.num_graphs > 0

    def forward_ahead(self, tokens: torch.Tensor, origins: torch.Tensor, rows: AheadRows) -> Any:
        """The same for rows that the host does not know yet, by a captured step.

        None: there is none for them. Call `forward` once the host knows.
        """
        self._take(tokens)
        outputs = self._model._hf_turbo.steps.run_ahead(self._cache, self._inputs, rows, origins)
        self._is_taken = outputs is None
        return outputs

    def _take(self, tokens: torch.Tensor) -> None:
        """Makes the step's arguments, unless that has been done."""
        column = tokens.unsqueeze(1)
        if self._is_taken:
            pass
        elif self._inputs:
            self._advance(column)
        else:
            self._prepare(column)

    def _prepare(self, column: torch.Tensor) -> None:
        self._inputs = self._model.prepare_inputs_for_generation(column, next_sequence_length=1, **self._kwargs)
        self._inputs["return_dict"] = True
        if (mask := self._inputs.get("attention_mask")) is not None:
            self._mask = Columns(mask, fill=1)
            self._inputs["attention_mask"] = self._mask.view

    def _advance(self, column: torch.Tensor) -> None:
        self._inputs["input_ids"] = column
        if self._mask is not None:
            self._mask.append()
            self._inputs["attention_mask"] = self._mask.view
        if (positions := self._inputs.get("position_ids")) is not None:
            self._inputs["position_ids"] = self._next_positions(positions)

    def _next_positions(self, last: torch.Tensor) -> torch.Tensor:
        if self._positions is None or self._used == _POSITIONS:
            steps = torch.arange(1, _POSITIONS + 1, dtype=last.dtype, device=last.device)
            self._positions, self._used = last + steps.view(-1, *[1] * last.dim()), 0
        positions = self._positions[self._used]
        self._used += 1
        return positions
