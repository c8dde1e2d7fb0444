"""`train_medusa`: heads for a model from a list of prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..generation.medusa_heads import MedusaHeads, output_projection, projection_device, projection_sizes
from .base_model import frozen
from .config import TrainingConfig
from .continuations import Text, continue_prompts, fitting, read_continuations
from .examples import Batches, make_examples, num_examples
from .folder import TrainingFolder
from .loop import Loop
from .objective import Objective
from .prompts import Prompts, read_prompts
from .record import require_packages

logger = logging.getLogger(__name__)


def train_medusa(
    model: PreTrainedModel,
    tokenizer: Any | None,
    data: Any,
    out: str | Path,
    *,
    field: str | None = None,
    resume: bool = True,
    progress: bool = True,
    **options: Any,
) -> MedusaHeads:
    """Trains Medusa heads on what a model says to prompts. The model itself is not changed.

    The model continues the prompts; its hidden states of these texts are computed once; then heads alone are trained,
    in fp32, to guess the tokens after the next one, as Medusa-1 of arXiv:2401.10774. On texts that are held out it is
    measured how often each guess is right, which trees are searched by.

    `out` gets the heads (`medusa_lm_head.safetensors`, `config.json`), `log.jsonl`, `training.png`, and what a later
    call goes on from: continuations, and states of the training until it is done. Under `accelerate launch` several
    processes share the work, each with the model on a device of its own.

    Args:
        model: a decoder-only language model, quantized or not; patched, which makes the continuations sooner there, or
            not.
        tokenizer: may be None if the data is token ids.
        data: prompts: see `read_prompts`.
        out: a folder.
        field: the column of the data that holds the prompts.
        resume: go on from what an earlier call with the same data and options left in `out`; else begin anew, and
            remove that.
        progress: show bars on stderr.
        options: those of `TrainingConfig`.

    Returns:
        The heads with their `accuracies`, in the model's dtype and on its device, frozen.

    Raises:
        ValueError: an option or the data is not as it should be, or `out` holds a training with other ones.
        ImportError: a package is missing.
        RuntimeError: the loss became infinite or NaN, and at which step.
    """
    config = TrainingConfig.of(options)
    require_packages()
    prompts = _usable(read_prompts(data, tokenizer, field), config)
    folder = TrainingFolder(Path(out), model, prompts.tokens, config)
    accelerator = Accelerator(gradient_accumulation_steps=config.gradient_accumulation, device_placement=False)
    if accelerator.is_main_process:
        folder.prepare(resume)
    accelerator.wait_for_everyone()
    if folder.is_done:
        return MedusaHeads.from_pretrained(folder.path, model)
    training = _Training(model, folder, config, accelerator, progress)
    with frozen(model):
        heads = training.run(prompts)
    heads.base_model_name_or_path = model.config._name_or_path or None
    heads.requires_grad_(False).eval().fit_to(model)
    if accelerator.is_main_process:
        folder.finish(heads)
    accelerator.wait_for_everyone()
    return heads


def _usable(prompts: Prompts, config: TrainingConfig) -> Prompts:
    """Prompts that leave room for a continuation; ready texts as far as `max_length` goes."""
    if prompts.ready:
        usable = [tokens[: config.max_length] for tokens in prompts.tokens if len(tokens) >= 3]
    else:
        usable = fitting(prompts.tokens, config)
    if not usable:
        raise ValueError(f"no prompt leaves room for three tokens in max_length={config.max_length}")
    if left := len(prompts.tokens) - len(usable):
        logger.warning("%d of %d prompts are left out: too long or too short", left, len(prompts.tokens))
    return Prompts(usable, prompts.ready)


class _Training:
    """One training's parts, one after another; each process of several does its share.

    Args:
        model: frozen.
        shown: bars are shown, by the main process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: TrainingFolder,
        config: TrainingConfig,
        accelerator: Accelerator,
        shown: bool,
    ) -> None:
        self.model, self.folder, self.config, self.accelerator = model, folder, config, accelerator
        self.shown = shown and accelerator.is_main_process
        self.share = slice(accelerator.process_index, None, accelerator.num_processes)
        self.spill = folder.path / f"hidden_states.{accelerator.process_index}.bin"

    def run(self, prompts: Prompts) -> MedusaHeads:
        """Heads in fp32, with accuracies."""
        texts = [Text(tokens, 1) for tokens in prompts.tokens] if prompts.ready else self._continue(prompts.tokens)
        trained, held_out = _split(texts, self.config)
        if len(trained) < self.accelerator.num_processes:
            raise ValueError(f"{len(trained)} texts are too few for {self.accelerator.num_processes} processes")
        objective = Objective(_new_heads(self.model, self.config), output_projection(self.model))
        try:
            self._train(objective, trained)
            self._measure(objective, held_out)
        finally:
            self.spill.unlink(missing_ok=True)
        return objective.heads

    def _continue(self, prompts: Sequence[Sequence[int]]) -> list[Text]:
        """Texts with something to guess in them."""
        path = self.folder.continuations
        with self._bar("continuing prompts", len(prompts)) as bar:
            continue_prompts(self.model, prompts, path, self.config, share=self.share, progress=bar.update)
        self.accelerator.wait_for_everyone()
        texts = [text for text in read_continuations(path, len(prompts)) if num_examples(text)]
        if not texts:
            raise ValueError("all continuations end after a token or two: there is nothing to guess in them")
        return texts

    def _train(self, objective: Objective, texts: Sequence[Text]) -> None:
        config, mine = self.config, texts[self.share]
        with self._bar("reading hidden states", len(mine)) as bar:
            examples = make_examples(
                self.model, mine, config.num_heads, config.batch_size, self.spill, progress=bar.update
            )
        rows = max(1, config.batch_tokens // self.accelerator.num_processes)
        batches = Batches(examples, rows, config.seed + self.accelerator.process_index)
        a_step = config.batch_tokens * config.gradient_accumulation
        steps = config.steps or max(1, round(config.epochs * sum(map(num_examples, texts)) / a_step))
        loop = Loop(self.accelerator, objective, batches, config, steps, self.folder.path)
        with self._bar("training heads", steps, loop.step) as bar:

            def show(step: int, loss: list[float], accuracy: list[float]) -> None:
                bar.set_postfix_str(f"loss {sum(loss):.3f}, head 1 right {accuracy[0]:.1%}", refresh=False)
                bar.update(step - bar.n)

            loop.run(show)

    def _measure(self, objective: Objective, texts: Sequence[Text]) -> None:
        config = self.config
        with self._bar("measuring accuracies", len(texts)) as bar:
            examples = make_examples(
                self.model, texts, config.num_heads, config.batch_size, self.spill, progress=bar.update
            )
        objective.heads.accuracies = objective.rank_accuracies(examples)

    @contextmanager
    def _bar(self, label: str, total: int, done: int = 0) -> Iterator[Any]:
        from tqdm.auto import tqdm

        with tqdm(desc=label, total=total, initial=done, disable=not self.shown, dynamic_ncols=True) as bar:
            yield bar


def _split(texts: Sequence[Text], config: TrainingConfig) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts to measure on, drawn; all for both where there is one, or none is to be held out."""
    number = min(max(1, round(config.held_out * len(texts))), len(texts) - 1) if config.held_out else 0
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(config.seed)).tolist()
    drawn = [texts[place] for place in order]
    return drawn[number:], drawn[:number] or drawn


def _new_heads(model: PreTrainedModel, config: TrainingConfig) -> MedusaHeads:
    hidden_size, vocab_size = projection_sizes(model)
    heads = MedusaHeads(
        config.num_heads,
        config.num_layers,
        hidden_size,
        vocab_size,
        own_projection=not config.shared_projection,
        dtype=torch.float32,
        device=projection_device(model),
    )
    if not config.shared_projection:
        heads.copy_projection(_projection_weight(output_projection(model)))
    return heads


def _projection_weight(projection: nn.Module) -> Tensor:
    """`[V, H]`, also of a quantized one."""
    if hasattr(projection, "dequantize"):
        dequantized: Tensor = projection.dequantize(torch.float32)  # type: ignore[operator]
        return dequantized
    weight = projection.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise NotImplementedError(
            f"the vocabulary projection is a {type(projection).__name__}, which can't be copied; use "
            "shared_projection=True"
        )
    return weight.detach()
