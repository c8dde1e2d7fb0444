"""Many requests at once on a patched model: what Transformers calls continuous batching."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..cache.forward_plan import PackedUnsuited
from ..generation.mixin import TurboGenerationMixin
from .by_generate import by_generate
from .limits import limits_of
from .manager import Manager
from .outputs import Handler, Submission

logger = logging.getLogger("hf_turbo")

#: Seconds between two looks at the progress bar and at the manager's thread.
_GLANCE = 0.5


class ManyRequestsMixin(TurboGenerationMixin):
    """First base of a patched instance's class: the ways into continuous batching."""

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Any:
        """A manager of hf_turbo's engine, or Transformers' own where the model steps aside.

        Args:
            generation_config: of requests that say nothing else; None for the model's own.
            continuous_batching_config: how much is done at once; see docs/batching.md.
            workload_hints: Transformers sizes its cache by them; ours grows as it is needed.

        Raises:
            ValueError, NotImplementedError: a field of the config, by name.
        """
        manager = self._own_manager(generation_config, continuous_batching_config)
        if manager is not None:
            return manager
        return super().init_continuous_batching(
            generation_config=generation_config,
            continuous_batching_config=continuous_batching_config,
            workload_hints=workload_hints,
        )

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Gives back what a manager holds that was kept for the next session."""
        if self._hf_turbo.manager is not None:
            self._hf_turbo.manager.destroy()
        super().destroy_cached_continuous_batching_manager()  # type: ignore[misc]

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Texts for many prompts, computed together; each is what `generate()` gives for its prompt alone.

        Args:
            inputs: prompts: lists of token ids, without padding.
            generation_config: None for the model's own.
            continuous_batching_config: how much is done at once; see docs/batching.md.
            record_timestamps: whether results say when each token came.
            progress_bar: whether a bar shows how many texts have ended, and tokens a second.
            persistent_manager: keep manager and cache for the next call.
            warmup: make the engine before the requests; it is made in any case.
            kwargs: any option of `Manager.add_request`, for all prompts. `seed` may also be a list, one for each.

        Returns:
            By request id, in the order of `inputs`, a request's further sequences after its first: Transformers'
            `GenerationOutput`. A request whose own processor or criterion raised says so in `error`.

        Raises:
            ValueError, NotImplementedError: as `add_request`, or a prompt that can never fit; nothing was computed.
            Exception: what the engine died of.
        """
        if len(inputs) == 0:
            return {}
        generate_calls = kwargs.pop("cache_implementation", None)
        if generate_calls not in (None, "paged"):
            raise ValueError(f"cache_implementation={generate_calls!r}: generate_batch() has the engine's own cache")
        prompts = _without_padding(inputs, kwargs)
        kwargs["seed"] = _seeds(kwargs.get("seed"), len(prompts))
        if (kwargs.get("num_beams") or getattr(generation_config or self.generation_config, "num_beams", 1) or 1) > 1:  # type: ignore[attr-defined]
            results = by_generate(self, prompts, generation_config, kwargs, progress_bar)
        elif (manager := self._own_manager(generation_config, continuous_batching_config, reads_along=False)) is None:
            return super().generate_batch(  # type: ignore[misc]
                inputs, generation_config, continuous_batching_config, record_timestamps, progress_bar,
                persistent_manager, warmup, **kwargs,
            )  # fmt: skip
        else:
            results = _served(
                manager, prompts, generation_config, kwargs, record_timestamps, progress_bar, persistent_manager
            )
        return _as_generate_reads(self, inputs, results) if generate_calls else results

    def _own_manager(
        self,
        generation_config: GenerationConfig | None,
        config: ContinuousBatchingConfig | None,
        reads_along: bool = True,
    ) -> Manager | None:
        """A manager with its engine: the kept one where it fits; None where the model steps aside."""
        handle = self._hf_turbo
        if handle.model_reason or not handle.attention_is_ours():
            return None
        if handle.attention is not None and handle.attention.unsuited:
            return None
        config = config or getattr(generation_config, "continuous_batching_config", None)
        if (kept := handle.manager) is not None:
            wanted = None if config is None else limits_of(config, handle, self.device.type, reads_along)  # type: ignore[attr-defined]
            if wanted in (None, kept.limits):
                kept.generation_config = generation_config
                return kept
            kept.destroy()
        manager = Manager(self, generation_config, config, reads_along=reads_along)
        try:
            manager.warmup()
        except PackedUnsuited as reason:
            handle.step_aside(f"many requests at once: {reason}")
            return None
        return manager


def _served(
    manager: Manager,
    prompts: list[Any],
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
    record_timestamps: bool,
    progress_bar: bool,
    keep: bool,
) -> dict[str, GenerationOutput]:
    """Results of `generate_batch`, in order."""
    seeds = options.pop("seed")
    each = zip(prompts, seeds, strict=True)
    try:
        submissions = [
            manager.prepare(prompt, None, {**options, "seed": seed}, generation_config) for prompt, seed in each
        ]
    except BaseException:
        if manager.model._hf_turbo.manager is not manager:
            manager.destroy()
        raise
    for submission in submissions:
        submission.record_timestamps = record_timestamps
    arrived: SimpleQueue[GenerationOutput] = SimpleQueue()
    is_done = False
    manager.start()
    try:
        manager.submit(submissions, Handler(arrived.put))
        results = _gather(manager, arrived, submissions, progress_bar)
        is_done = True
    finally:
        manager.stop(block=True, timeout=5, keep_for_next_session=keep, hard_stop=not is_done)
    if manager.fatal_error is not None:
        raise manager.fatal_error
    for submission in submissions:
        if submission.was_refused and submission.request.error is not None:
            raise submission.request.error
    if failed := [name for name, output in results.items() if output.error is not None]:
        logger.error("requests %s have failed; their results say why", ", ".join(failed))
    return results


def _gather(
    manager: Manager, arrived: SimpleQueue[GenerationOutput], submissions: list[Submission], progress_bar: bool
) -> dict[str, GenerationOutput]:
    from tqdm import tqdm

    results: dict[str, GenerationOutput | None] = {name: None for one in submissions for name in one.names}
    with tqdm(total=len(results), disable=not progress_bar, desc="generate_batch", unit="request") as bar:
        num_missing = len(results)
        while num_missing:
            try:
                output = arrived.get(timeout=_GLANCE)
            except Empty:
                if not manager.is_running() and arrived.empty():
                    raise RuntimeError("the manager was stopped before all requests had ended") from manager.fatal_error
            else:
                results[output.request_id] = output
                num_missing -= 1
                bar.update()
            if progress_bar and manager.metrics is not None:
                bar.set_postfix_str(f"{manager.metrics.tokens_per_second:.0f} tokens/s")
    return {name: output for name, output in results.items() if output is not None}


def _seeds(seed: Any, num_prompts: int) -> list[Any]:
    """A seed, or None, for each prompt.

    Raises:
        ValueError: there are more or fewer.
    """
    seeds = list(seed) if isinstance(seed, (list, tuple)) else [seed] * num_prompts
    if len(seeds) != num_prompts:
        raise ValueError(f"seed: {len(seeds)} numbers for {num_prompts} prompts; give one for each, or one for all")
    return seeds


def _without_padding(inputs: Iterable[Any], options: dict[str, Any]) -> list[Any]:
    """The prompts, without what `attention_mask` hides; takes what belongs to prompts out of the options."""
    prompts = list(inputs)
    options.pop("input_ids", None)  # generate(cache_implementation="paged") gives them twice
    mask = options.pop("attention_mask", None)
    if mask is None:
        return prompts
    rows = mask.bool().tolist() if isinstance(mask, torch.Tensor) else mask
    pairs = zip(prompts, rows, strict=True)
    return [[token for token, is_real in zip(ids, row, strict=True) if is_real] for ids, row in pairs]


def _as_generate_reads(
    model: Any, inputs: Iterable[Any], results: dict[str, GenerationOutput]
) -> dict[str, GenerationOutput]:
    """Results for `generate(cache_implementation="paged")`: it wants req_0, req_1, ..., each of the same length."""
    outputs, prompts = list(results.values()), list(inputs)
    longest = max(len(output.generated_tokens) for output in outputs)
    pad = model.generation_config.pad_token_id
    for i, output in enumerate(outputs):
        output.prompt_ids = list(prompts[i * len(prompts) // len(outputs)])
        if pad is not None:
            output.generated_tokens += [pad] * (longest - len(output.generated_tokens))
    return {f"req_{i}": output for i, output in enumerate(outputs)}
