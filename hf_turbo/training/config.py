"""What can be chosen about the training of Medusa heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

#: What the continuations depend on; the rest only matters to the training after them.
_OF_CONTINUATIONS = ("max_length", "new_tokens", "temperature", "batch_size", "seed")
_AT_LEAST_ONE = (
    "num_heads",
    "num_layers",
    "new_tokens",
    "batch_size",
    "batch_tokens",
    "gradient_accumulation",
    "checkpoint_every",
)


@dataclass(frozen=True)
class TrainingConfig:
    """Options of `train_medusa`.

    Args:
        num_heads: how many tokens beyond the next one are guessed.
        num_layers: blocks of each head.
        shared_projection: the model's own vocabulary projection serves all heads; else each gets a copy of it that is
            trained, too, which takes 16 bytes for each of its numbers during training.
        max_length: tokens of a prompt and its continuation together; longer prompts are left out.
        new_tokens: tokens of a continuation, at most.
        temperature: of the continuations; 0 takes the most likely token. Use what the model will be used with.
        batch_size: sequences that the model sees at once.
        batch_tokens: positions that a step trains on, over all processes.
        gradient_accumulation: such batches before the weights change.
        learning_rate: the highest; it rises linearly over `warmup` of the steps and falls as a cosine to 0.
        warmup: a fraction of the steps.
        weight_decay: of AdamW.
        head_decay: head i, from 0, weighs `head_decay ** i` in the loss.
        epochs: how often each position is seen.
        steps: changes of the weights, instead of `epochs`.
        held_out: the fraction of sequences that accuracies are measured on, and that no head is trained on; with 0 they
            are measured on what heads were trained on.
        checkpoint_every: steps between states that a later call can go on from.
        seed: of everything that is drawn.

    Raises:
        ValueError: a value that is not allowed, and which are.
    """

    num_heads: int = 3
    num_layers: int = 1
    shared_projection: bool = True
    max_length: int = 1024
    new_tokens: int = 256
    temperature: float = 0.0
    batch_size: int = 64
    batch_tokens: int = 4096
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.0
    head_decay: float = 0.8
    epochs: float = 2.0
    steps: int | None = None
    held_out: float = 0.05
    checkpoint_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [f"{name}={getattr(self, name)}: at least 1" for name in _AT_LEAST_ONE if getattr(self, name) < 1]
        if self.max_length < 4:
            wrong.append(f"max_length={self.max_length}: at least 4, a prompt and what the first head can learn from")
        if self.steps is not None and self.steps < 1:
            wrong.append(f"steps={self.steps}: at least 1, or None")
        wrong += [
            f"{name}={value}: more than 0"
            for name in ("learning_rate", "head_decay", "epochs")
            if not (isfinite(value := getattr(self, name)) and value > 0)
        ]
        wrong += [
            f"{name}={value}: at least 0"
            for name in ("temperature", "weight_decay")
            if not (isfinite(value := getattr(self, name)) and value >= 0)
        ]
        wrong += [
            f"{name}={value}: from 0 to less than 1"
            for name in ("warmup", "held_out")
            if not 0 <= (value := getattr(self, name)) < 1
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TrainingConfig:
        """A config of these options.

        Raises:
            ValueError: there is no such option, or a value is not allowed.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(options.keys() - known):
            raise ValueError(f"no such option: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return cls(**options)

    def of_continuations(self) -> dict[str, Any]:
        """The options that the continuations depend on."""
        return {name: getattr(self, name) for name in _OF_CONTINUATIONS}

    def of_training(self) -> dict[str, Any]:
        """All other options."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OF_CONTINUATIONS}
