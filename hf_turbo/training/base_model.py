"""The model that heads are trained for: kept as it is, and asked for its last hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.medusa_heads import output_projection


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter of the model gets a gradient and no dropout draws within the block; then all is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in gradients:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, wanted in gradients:
            parameter.requires_grad_(wanted)


@contextmanager
def hidden_states_of(model: PreTrainedModel) -> Iterator[Callable[[Sequence[Sequence[int]]], Tensor]]:
    """A function from sequences of tokens to what the model's output embedding reads, `[B, L, H]`, padded on the right.

    That is the same thing in every decoder, and what heads read while text is generated. The output embedding computes
    one position instead of all, as its logits are not asked for.
    """
    seen: list[Tensor] = []

    def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (hidden,) = args or kwargs.values()
        seen.append(hidden)
        return (hidden[:, -1:],), {}

    @torch.no_grad()
    def compute(sequences: Sequence[Sequence[int]]) -> Tensor:
        input_ids, _ = pad(sequences, model.device)
        model(input_ids=input_ids, use_cache=False)  # no position sees the pads behind it: quicker without a mask
        hidden = seen.pop()
        if hidden.shape[:2] != input_ids.shape:
            raise NotImplementedError(
                f"{type(model).__name__} does not give its output embedding the hidden states of all positions, but "
                f"{list(hidden.shape)}; heads can't be trained for it"
            )
        return hidden

    hook = output_projection(model).register_forward_pre_hook(take, with_kwargs=True)
    try:
        yield compute
    finally:
        hook.remove()


def pad(sequences: Sequence[Sequence[int]], device: torch.device, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Sequences as `input_ids` and `attention_mask`, both `[B, longest]`; pads are token 0."""
    longest = max(map(len, sequences))
    input_ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(sequences):
        place = slice(longest - len(tokens), None) if left else slice(len(tokens))
        input_ids[row, place] = torch.as_tensor(tokens, dtype=torch.int64)
        attention_mask[row, place] = 1
    return input_ids.to(device), attention_mask.to(device)
