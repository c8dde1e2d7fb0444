"""The loop that trains heads: steps, a line of log now and then, and states to go on from."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from .config import TrainingConfig
from .examples import Batches
from .objective import Objective, Outcome
from .record import Log

_LOG_EVERY = 20
_MAX_GRADIENT_NORM = 1.0
_STATE = "checkpoint-"

#: Called with the step, and the loss and accuracy of each head since the last call.
Progress = Callable[[int, list[float], list[float]], Any]


class Loop:
    """Training from step 0, or from the last state in a folder, to the last step.

    Args:
        objective: the heads and their loss; the heads are changed.
        batches: of this process.
        steps: changes of the weights in all.
        folder: for log and states; the training begins at the last state in it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective,
        batches: Batches,
        config: TrainingConfig,
        steps: int,
        folder: Path,
    ) -> None:
        self.accelerator, self.config = accelerator, config
        self.batches, self.steps, self.folder = batches, steps, folder
        parameters = list(objective.parameters())
        fused = parameters[0].is_cuda
        optimizer = AdamW(parameters, config.learning_rate, weight_decay=config.weight_decay, fused=fused)
        self.schedule = LambdaLR(optimizer, lambda step: learning_rate_at(step, steps, config.warmup))
        self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        accelerator.register_for_checkpointing(self.schedule)
        self.weights = config.head_decay ** torch.arange(objective.heads.num_heads, device=parameters[0].device)
        self.step = self._load()
        self._since: list[Tensor] = []  # outcomes that the host has not read yet

    def run(self, progress: Progress) -> None:
        """Does the steps that are left.

        Raises:
            RuntimeError: the loss of a step is infinite or NaN. The last state is from before it.
        """
        log = Log(self.folder / "log.jsonl", self.step) if self.accelerator.is_main_process else None
        self.objective.train()
        while self.step < self.steps:
            self._since.append(self._take_step())
            self.step += 1
            is_last, is_state = self.step == self.steps, self.step % self.config.checkpoint_every == 0
            if is_last or is_state or self.step % _LOG_EVERY == 0:
                self._read(log, progress)
            if is_state and not is_last:
                self._save()

    def _take_step(self) -> Tensor:
        """Changes the weights once; gives loss and accuracy, `[2, num_heads]`, which nobody has waited for."""
        outcomes = []
        for number in range(self.config.gradient_accumulation):
            hidden, targets = self.batches[self.step * self.config.gradient_accumulation + number]
            with self.accelerator.accumulate(self.objective):
                outcome: Outcome = self.objective(hidden, targets)
                self.accelerator.backward((outcome.loss * self.weights).sum())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.objective.parameters(), _MAX_GRADIENT_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()
            outcomes.append(torch.stack([outcome.loss.detach(), outcome.accuracy]))
        self.schedule.step()
        return torch.stack(outcomes).mean(0)

    def _read(self, log: Log | None, progress: Progress) -> None:
        since = torch.stack(self._since)
        self._since.clear()
        numbers = self.accelerator.reduce(since, reduction="mean").tolist()
        first = self.step - len(numbers) + 1
        for step, (losses, _) in enumerate(numbers, first):
            if not all(map(math.isfinite, losses)):
                raise RuntimeError(
                    f"the loss of step {step} is {losses}: lower learning_rate ({self.config.learning_rate}), or look "
                    "at the model's dtype"
                )
        loss, accuracy = torch.tensor(numbers).mean(0).tolist()
        if log is not None:
            rate = self.config.learning_rate * learning_rate_at(self.step - 1, self.steps, self.config.warmup)
            log.add(self.step, loss, accuracy, rate)
        progress(self.step, loss, accuracy)

    def _save(self) -> None:
        """A state has its name once it is whole; older ones go then."""
        unfinished = self.folder / "unfinished"
        if self.accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(unfinished))
        if self.accelerator.is_main_process:
            (unfinished / "step.json").write_text(json.dumps({"step": self.step}))
            older = states(self.folder)
            unfinished.rename(self.folder / f"{_STATE}{self.step}")
            for path in older:
                shutil.rmtree(path)
        self.accelerator.wait_for_everyone()

    def _load(self) -> int:
        found = states(self.folder)
        if not found:
            return 0
        self.accelerator.load_state(str(found[-1]))
        step: int = json.loads((found[-1] / "step.json").read_text())["step"]
        return step


def states(folder: Path) -> list[Path]:
    """The states in a folder, the latest last."""
    found = [path for path in folder.glob(f"{_STATE}*") if path.name.removeprefix(_STATE).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_STATE)))


def learning_rate_at(step: int, steps: int, warmup: float) -> float:
    """The learning rate of a step as a fraction of the highest: a line up, then half a cosine down to 0."""
    rising = warmup * steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))
