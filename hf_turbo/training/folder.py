"""The folder of a training: which training it is of, and what stays when it is done."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..generation.medusa_files import replace_file
from ..generation.medusa_heads import MedusaHeads, projection_sizes
from .config import TrainingConfig
from .loop import states
from .record import draw, read_log


class TrainingFolder:
    """Knows what belongs to one training.

    Args:
        path: the folder; need not be there.
        model, prompts, config: what the training depends on.
    """

    def __init__(
        self, path: Path, model: PreTrainedModel, prompts: Sequence[Sequence[int]], config: TrainingConfig
    ) -> None:
        self.path = path
        self.continuations = path / "continuations"
        self.log = path / "log.jsonl"
        self._file = path / "settings.json"
        self._settings = _settings(model, prompts, config)

    def prepare(self, resume: bool) -> None:
        """Makes the folder, or looks whether what is in it is of this training.

        Args:
            resume: keep what is there; else all of an earlier training is removed.

        Raises:
            ValueError: it is of another one; all differences are listed. Nothing has changed.
        """
        if self._file.is_file() and resume:
            if differences := list(_differences(json.loads(self._file.read_text()), self._settings)):
                raise ValueError(
                    f"{self.path} holds a training with other settings: {'; '.join(differences)}. Take another "
                    "folder, or resume=False, which removes it"
                )
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for old in (self.continuations, *states(self.path)):
            shutil.rmtree(old, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        self._write(done=False)

    @property
    def is_done(self) -> bool:
        """The heads are there."""
        done: bool = json.loads(self._file.read_text())["done"]
        return done

    def finish(self, heads: MedusaHeads) -> None:
        """Writes the heads and the picture, and removes the states."""
        heads.save_pretrained(self.path)
        name = heads.base_model_name_or_path or self._settings["model"]["class"]
        draw(read_log(self.log), self.path / "training.png", f"Medusa heads for {name}")
        self._write(done=True)
        for state in states(self.path):
            shutil.rmtree(state)

    def _write(self, done: bool) -> None:
        with replace_file(self._file) as target:
            target.write_text(json.dumps({**self._settings, "done": done}, indent=2) + "\n")


def _settings(model: PreTrainedModel, prompts: Sequence[Sequence[int]], config: TrainingConfig) -> dict[str, Any]:
    digest = hashlib.sha256()
    for tokens in prompts:
        digest.update(json.dumps(tokens).encode())
    hidden_size, vocab_size = projection_sizes(model)
    return {
        "model": {
            "class": type(model).__name__,
            "name": model.config._name_or_path,
            "dtype": str(model.dtype),
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
        },
        "data": {"prompts": len(prompts), "sha256": digest.hexdigest()},
        "continuations": config.of_continuations(),
        "training": config.of_training(),
    }


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for part, values in now.items():
        for name, value in values.items():
            if before[part].get(name) != value:
                yield f"{name} was {before[part].get(name)} and is {value}"
