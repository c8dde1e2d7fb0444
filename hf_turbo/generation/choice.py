"""The choice of each row's next token, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList

from ..ops.dispatch import argmax


class Choice:
    """Greedy or sampled tokens, as Transformers chooses them: the same processors, the same random numbers.

    Args:
        processors: called as they are.
        device: where the tokens are.
        can_undo: keep what `undo` needs.
    """

    def __init__(
        self, processors: LogitsProcessorList, generation_config: Any, device: torch.device, can_undo: bool
    ) -> None:
        keeps = generation_config.return_dict_in_generate
        self.scores: list[torch.Tensor] | None = [] if keeps and generation_config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if keeps and generation_config.output_logits else None
        self._processors: Any = processors
        self._samples = bool(generation_config.do_sample)
        self._device = device
        # An argmax of rounded numbers is that of the same numbers in fp32: nothing to copy.
        self._is_plain = not (processors or self._samples or keeps)
        #: fp32 `[rows]`, NaN where the last step's probabilities were; None where that has been looked at.
        self.check: torch.Tensor | None = None
        self._random = DeviceRandom(device) if can_undo and self._samples else None

    def __call__(self, sequences: Callable[[], torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int64 `[rows]`.

        Args:
            sequences: makes int64 `[rows, length]`, all tokens so far.
            logits: `[rows, columns, vocabulary]`; the last column counts.
        """
        last = logits[:, -1]
        if self._is_plain:
            return argmax(last).to(self._device)
        # A copy: the model may write its next logits to the same memory.
        last = last.to(copy=True, dtype=torch.float32, device=self._device)
        scores = self._processors(sequences(), last) if self._processors else last
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(last)
        return self._sample(scores) if self._samples else argmax(scores)

    def undo(self, steps: int) -> None:
        """Forgets the last steps, at most one, and the random numbers that they took."""
        if not steps:
            return
        for kept in (self.scores, self.logits):
            if kept is not None:
                del kept[-steps:]
        if self._random is not None:
            self._random.rewind(0)

    def _sample(self, scores: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(scores, dim=-1)
        if self._random is not None:
            self._random.start()
            self._random.before_draw()
        if self._device.type == "cuda":
            return self._sample_without_checks(probabilities)
        return torch.multinomial(probabilities, num_samples=1).squeeze(1)

    def _sample_without_checks(self, probabilities: torch.Tensor) -> torch.Tensor:
        """What torch.multinomial does for one sample, without its checks, for which it waits twice.

        A row of softmax is all numbers or has NaN, which is then its largest.
        """
        noise = torch.empty_like(probabilities).exponential_(1)
        self.check, tokens = torch.div(probabilities, noise, out=noise).max(dim=-1)
        return tokens


class DeviceRandom:
    """Where a device's default generator stood before the last draws: for those that turn out not to be needed."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
        else:
            self._generator = torch.default_generator
        self._before: list[Any] = []

    def start(self) -> None:
        """Forgets the draws so far."""
        self._before.clear()

    def before_draw(self) -> None:
        """Call before each draw."""
        self._before.append(self._generator.get_offset() if self._on_gpu else self._generator.get_state())

    def rewind(self, kept: int) -> None:
        """As if no more than the first draws had been: what is sampled next is what it would be without the others."""
        if kept >= len(self._before):
            return
        if self._on_gpu:
            self._generator.set_offset(self._before[kept])
        else:
            self._generator.set_state(self._before[kept])
