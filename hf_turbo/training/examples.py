"""What heads are trained on: the model's hidden states, computed once, and the tokens to guess there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.medusa_heads import projection_device, projection_sizes
from .base_model import hidden_states_of
from .continuations import Text

#: Marks that there is nothing to guess: `cross_entropy` passes it over.
NO_TARGET = -100


class Examples(NamedTuple):
    """Positions of all texts, one after another; pads are none.

    Attributes:
        hidden: `[N, H]` in the model's dtype: on its device, or in a file where it does not fit there.
        targets: `[N, num_heads]` int64: head i's is the token i + 2 places on, NO_TARGET behind the text's end.
    """

    hidden: Tensor
    targets: Tensor


def num_examples(text: Text) -> int:
    """Positions of a text: from the last of the prompt on, as far as there is a token for the first head."""
    return max(0, len(text.tokens) - 1 - text.num_prompt_tokens)


def targets_of(text: Text, num_heads: int) -> Tensor:
    """The tokens that heads are to guess, `[num_examples, num_heads]`."""
    tokens = torch.tensor([*text.tokens, *[NO_TARGET] * (num_heads - 1)])
    return tokens.unfold(0, num_heads, 1)[text.num_prompt_tokens + 1 : len(text.tokens)]


def make_examples(
    model: PreTrainedModel,
    texts: Sequence[Text],
    num_heads: int,
    batch_size: int,
    spill: Path,
    progress: Callable[[int], Any],
) -> Examples:
    """Runs the model over all texts once.

    Args:
        model: frozen.
        spill: the file that holds the hidden states if they would take more than half of the device's free memory;
            memory of the host is taken as it is read. Remove it afterwards.
        progress: called with numbers of texts that are done.
    """
    in_order = sorted(texts, key=lambda text: len(text.tokens))  # batches of them need few pads
    targets = torch.cat([targets_of(text, num_heads) for text in in_order])
    hidden = _room(len(targets), model, spill)
    filled = 0
    with hidden_states_of(model) as compute:
        for start in range(0, len(in_order), batch_size):
            batch = in_order[start : start + batch_size]
            states = compute([text.tokens for text in batch])
            chosen = states.flatten(0, 1)[_places(batch, states.shape[1]).to(states.device)]
            hidden[filled : filled + len(chosen)].copy_(chosen)
            filled += len(chosen)
            progress(len(batch))
    return Examples(hidden, targets.to(projection_device(model)))


def _places(batch: Sequence[Text], width: int) -> Tensor:
    """Where the examples of a batch are in its hidden states, rows of `width` one after another."""
    starts = [row * width + text.num_prompt_tokens - 1 for row, text in enumerate(batch)]
    return torch.cat(
        [torch.arange(start, start + num_examples(text)) for start, text in zip(starts, batch, strict=True)]
    )


def _room(num_positions: int, model: PreTrainedModel, spill: Path) -> Tensor:
    """`[N, H]` without content."""
    hidden_size, device = projection_sizes(model)[0], projection_device(model)
    size = num_positions * hidden_size * model.dtype.itemsize
    if device.type == "cuda" and size < torch.cuda.mem_get_info(device)[0] // 2:
        return torch.empty(num_positions, hidden_size, dtype=model.dtype, device=device)
    spill.unlink(missing_ok=True)  # what an earlier tensor still shows of it stays
    with spill.open("wb") as file:
        os.truncate(file.fileno(), size)
    flat = torch.from_file(str(spill), shared=True, size=num_positions * hidden_size, dtype=model.dtype)
    return flat.view(num_positions, hidden_size)


class Batches:
    """Which examples each step trains on: all of them in an order drawn anew for each epoch, one epoch after another.

    A step's rows depend on its number alone, so training can begin at any step.
    """

    def __init__(self, examples: Examples, rows: int, seed: int) -> None:
        self.examples, self.rows, self.seed = examples, rows, seed
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def __getitem__(self, number: int) -> Examples:
        """Batch `number`, on the device that the heads are on: `[rows, H]` and `[rows, num_heads]`."""
        size = len(self.examples.targets)
        pieces, start, end = [], number * self.rows, (number + 1) * self.rows
        while start < end:
            epoch, offset = divmod(start, size)
            pieces.append(self._order(epoch)[offset : offset + end - start])
            start += len(pieces[-1])
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        device = self.examples.targets.device
        return Examples(self.examples.hidden[rows].to(device), self.examples.targets[rows.to(device)])

    def _draw_order(self, epoch: int) -> Tensor:
        drawn = torch.randperm(
            len(self.examples.targets), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        )
        return drawn.to(self.examples.hidden.device)
