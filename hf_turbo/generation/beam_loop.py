"""The loop for beam search: Transformers' `_beam_search` with few operations and one wait a step.

The device works out the candidates, as Transformers does, by the same operations. The host fetches them, which it
must for the cache's blocks, remembers which beam each came from, and puts the sequences together in the end. What
has ended is looked at while the next forward runs, wherever it can't be the end of the search.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateBeamDecoderOnlyOutput

from ..cache.ahead_rows import AheadRows
from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from .columns import Columns
from .finished_beams import Candidates, FinishedBeams
from .known import criteria_are_known, processors_are_known
from .loop import runs_ahead
from .prefix import keep_text
from .step import DecodeSteps, is_stock, knows_steps
from .stopping import StopRules

_STOCK_METHODS = (
    "_beam_search", "_get_top_k_continuations", "_get_running_beams_for_next_iteration", "_update_finished_beams",
    "_check_early_stop_heuristic", "_beam_search_has_unfinished_sequences",
)  # fmt: skip


def can_search(
    model: Any,
    input_ids: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> bool:
    """Whether `beam_search` gives what Transformers' own loop would give. Arguments as of `_beam_search`."""
    return (
        not synced_gpus
        and not generation_config.do_sample
        and not generation_config.low_memory
        and type(stopping_criteria) is StoppingCriteriaList
        and StopRules(stopping_criteria, input_ids.device).max_length == generation_config.max_length
        and not hasattr(model, "_reorder_cache")
        and all(is_stock(model, name) for name in _STOCK_METHODS)
        and knows_steps(model, input_ids, generation_config, model_kwargs)
    )


def beam_search(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> GenerateBeamDecoderOnlyOutput | torch.Tensor:
    """The best of `num_beams` beams, where `can_search`. Arguments and results as of `_beam_search`."""
    cache: PagedCache = model_kwargs[CACHE_NAME]
    outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
    beams = _Beams(model, input_ids, logits_processor, stopping_criteria, generation_config)
    alone = processors_are_known(logits_processor) and criteria_are_known(stopping_criteria)
    steps = DecodeSteps(model, outputs, model_kwargs, alone)
    with steps, _Ahead(cache, steps, goes=alone and runs_ahead(input_ids.device)) as ahead:
        while True:
            beams.choose(outputs.logits)
            del outputs  # the logits of a prompt may be large
            outputs = None if beams.are_done else ahead.forward(beams)
            step = beams.fetch()
            rows = beams.rows_to_go_on(step)
            if outputs is not None:
                beams.finished.add(step)  # the device is busy meanwhile
                ahead.catch_up(rows, keep_step=not beams.finished.search_is_over)
            else:
                if beams.are_done:
                    beams.keep_texts(cache)
                cache.select_rows(rows)
            goes_on = outputs is not None or beams.finished.surely_goes_on(step)
            if not goes_on:
                beams.finished.add(step)
            if beams.finished.search_is_over:
                return beams.result(cache)
            if outputs is None:
                outputs = steps.forward(beams.tokens)
                if goes_on:
                    beams.finished.add(step)  # the device is busy meanwhile


class _Ahead:
    """Steps that are launched before the host knows which beams go on. A context: it holds spare blocks.

    Args:
        goes: whether to do so at all.
    """

    def __init__(self, cache: PagedCache, steps: DecodeSteps, goes: bool) -> None:
        self._cache, self._steps, self._goes = cache, steps, goes
        self._rows: AheadRows | None = None

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        if self._rows is not None:
            self._rows.release()

    def forward(self, beams: _Beams) -> Any:
        """The outputs of the chosen beams, or None: they have to wait for the host."""
        if not (self._goes and self._cache.model_is_as_it_was and self._steps.are_captured):
            return None
        if self._rows is None and AheadRows.is_possible(self._cache):
            self._rows = AheadRows(self._cache, beams.tokens.device)
        if self._rows is None:
            return None
        outputs = self._steps.forward_ahead(beams.tokens, beams.origins, self._rows)
        if outputs is None:  # from here on, the host's account is the newest
            self._rows.release()
            self._rows = None
        return outputs

    def catch_up(self, rows: list[int], keep_step: bool) -> None:
        if self._rows is not None:
            self._rows.catch_up(rows, keep_step)


class _Beams:
    """The beams of all prompts.

    Args:
        input_ids: the prompts, int64 `[prompts * beams, columns]`.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: Any,
    ) -> None:
        self._config = generation_config
        self._device = device = input_ids.device
        self._prompt = input_ids
        self._beams = generation_config.num_beams
        self._prompts = len(input_ids) // self._beams
        eos = generation_config._eos_token_tensor
        self._candidates = max(2, 1 + (0 if eos is None else len(eos))) * self._beams
        self._processors: Any = processors
        self._rules = StopRules(criteria, device)
        # Whole sequences are kept at each step only for those who read them.
        self._ids = Columns(input_ids)
        self._keeps_ids = bool(processors) or self._rules.reads_sequences
        self._first_beam = torch.arange(self._prompts, device=device).view(-1, 1) * self._beams
        self._parcel = _Parcel(self._prompts, self._candidates, self._beams, device)
        self._parcel.running.fill_(-1e9)[:, 0] = 0  # so that a prompt's beams, all equal, go different ways
        self._vocabulary = 0
        #: of each step: its candidates' places, and the candidates that went on
        self._history: list[tuple[list[list[int]], list[list[int]]]] = []
        keeps = generation_config.return_dict_in_generate
        self._scores: list[torch.Tensor] | None = [] if keeps and generation_config.output_scores else None
        self._logits: list[torch.Tensor] | None = [] if keeps and generation_config.output_logits else None
        self._num_steps = 0
        #: The newest token of each beam, and the row that it comes from, int64 `[prompts * beams]`.
        self.tokens = self.origins = input_ids[:, :0]
        self.finished = FinishedBeams(model, self._prompts, self._candidates, input_ids.shape[1], generation_config)

    @property
    def are_done(self) -> bool:
        """Whether the last step was the last that the length allows."""
        return self._rules.is_last(self._prompt.shape[1] + self._num_steps)

    def choose(self, logits: torch.Tensor) -> None:
        """Chooses the beams that go on, by logits `[prompts * beams, columns, vocabulary]`."""
        parcel = self._parcel
        log_probs = self._log_probabilities(logits)
        self._vocabulary = log_probs.shape[-1]
        total = log_probs.reshape(self._prompts, self._beams, -1) + parcel.running.unsqueeze(2)
        torch.topk(total.view(self._prompts, -1), k=self._candidates, out=(parcel.scores, parcel.places))
        self._mark_hits()
        # 0 or -1e9 to each score: exact, fused or not
        still_running = torch.add(parcel.scores, parcel.hits, alpha=-1.0e9)
        torch.topk(still_running, k=self._beams, out=(parcel.running, parcel.chosen))
        going_on = parcel.places.gather(1, parcel.chosen)
        self.tokens = (going_on % self._vocabulary).view(-1)
        self.origins = self._rows(going_on)
        if self._keeps_ids:
            self._ids.reorder(self.origins)
            self._ids.append(self.tokens)
        parcel.send()
        self._num_steps += 1

    def fetch(self) -> Candidates:
        """What was chosen, on the host."""
        candidates = self._parcel.fetch()
        self._history.append((candidates.places, candidates.chosen))
        return candidates

    def rows_to_go_on(self, step: Candidates) -> list[int]:
        """The row that each beam comes from."""
        return [
            prompt * self._beams + step.places[prompt][place] // self._vocabulary
            for prompt, chosen in enumerate(step.chosen)
            for place in chosen
        ]

    def keep_texts(self, cache: PagedCache) -> None:
        """Has the blocks of the beams that ran before the last step kept for texts that begin alike."""
        step = len(self._history) - 2
        if cache.prefix_domain is not None and step >= 0:
            for row, prompt in enumerate(self._prompt.tolist()):
                number, beam = divmod(row, self._beams)
                place = self._history[step][1][number][beam]
                _, tokens, _ = self._trace(number, beam, step * self._candidates + place)
                keep_text(cache, row, prompt + tokens)

    def result(self, cache: PagedCache) -> GenerateBeamDecoderOnlyOutput | torch.Tensor:
        """What `_beam_search` returns."""
        count = self._config.num_return_sequences
        best = [(prompt, beam, ref) for prompt, refs in enumerate(self.finished.refs) for beam, ref in enumerate(refs)]
        traced = [self._trace(prompt, beam, ref) for prompt, beam, ref in best if beam < count]
        longest = max(len(tokens) for _, tokens, _ in traced)
        sequences = torch.full((len(traced), longest), self._fill_value())
        beam_indices = torch.full((len(traced), longest), -1, dtype=torch.int32)
        for row, (_, tokens, origins) in enumerate(traced):
            sequences[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            beam_indices[row, : len(origins)] = torch.tensor(origins, dtype=torch.int32)
        prompts = self._prompt[[first for first, _, _ in traced]]
        sequences = torch.cat([prompts, sequences.to(self._device)], dim=1)
        if not self._config.return_dict_in_generate:
            return sequences
        scores = self.finished.scores[:, :count].contiguous().flatten().to(self._device)
        fields: dict[str, Any] = {
            "sequences": sequences,
            "sequences_scores": scores if self._config.output_scores else None,
            "scores": None if self._scores is None else tuple(self._scores),
            "logits": None if self._logits is None else tuple(self._logits),
            "beam_indices": beam_indices.to(self._device),
            CACHE_NAME: cache,
        }
        return GenerateBeamDecoderOnlyOutput(**fields)

    def _log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        last = logits[:, -1, :].to(copy=self._logits is not None, dtype=torch.float32, device=self._device)
        log_probs = torch.log_softmax(last, dim=-1)
        if self._processors:
            log_probs = self._processors(self._ids.view, log_probs)
        if self._logits is not None:
            self._logits.append(last)
        if self._scores is not None:
            self._scores.append(log_probs.clone())
        return log_probs

    def _mark_hits(self) -> None:
        """Notes which candidates end here."""
        parcel, length = self._parcel, self._prompt.shape[1] + self._num_steps + 1
        self._rules.remind(length)
        tokens = (parcel.places % self._vocabulary).view(-1)

        def sequences() -> torch.Tensor:
            before = self._ids.view.index_select(0, self._rows(parcel.places))
            return torch.cat([before, tokens.unsqueeze(1)], dim=1)

        done = self._rules.done(tokens, sequences, self._scores)
        if done is None or self._rules.is_last(length):
            parcel.hits.fill_(self._rules.is_last(length))
        else:
            parcel.hits.copy_(done.view_as(parcel.hits))

    def _rows(self, places: torch.Tensor) -> torch.Tensor:
        """The rows that these places continue, int64, flat."""
        return (places // self._vocabulary + self._first_beam).view(-1)

    def _trace(self, prompt: int, beam: int, ref: int) -> tuple[int, list[int], list[int]]:
        """The row that a finished beam began in, its tokens, and the row it was in before each of them."""
        if ref < 0:
            return prompt * self._beams + beam, [], []
        tokens, origins = [], []
        step, place = divmod(ref, self._candidates)
        for number in range(step, -1, -1):
            beam, token = divmod(self._history[number][0][prompt][place], self._vocabulary)
            tokens.append(token)
            origins.append(prompt * self._beams + beam)
            place = self._history[number - 1][1][prompt][beam] if number else 0
        return origins[-1], tokens[::-1], origins[::-1]

    def _fill_value(self) -> int:
        """What Transformers puts after the end of a shorter sequence."""
        pad, eos = self._config._pad_token_tensor, self._config._eos_token_tensor
        if eos is None:
            return -1
        return int((pad or eos[0]).item())


class _Parcel:
    """What a step's operations write and the host reads, in one piece of memory: one copy to the host a step.

    `running` stays until the next step, which needs it.
    """

    def __init__(self, prompts: int, candidates: int, beams: int, device: torch.device) -> None:
        shapes = [
            (prompts, candidates, torch.int64),
            (prompts, beams, torch.int64),
            (prompts, candidates, torch.float32),
            (prompts, beams, torch.float32),
            (prompts, candidates, torch.bool),
        ]
        words = [-(-rows * columns * dtype.itemsize // 8) for rows, columns, dtype in shapes]
        self._there = torch.zeros(sum(words), dtype=torch.int64, device=device)
        self._here = torch.zeros(sum(words), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

        def views(memory: torch.Tensor) -> list[torch.Tensor]:
            parts = zip(memory.split(words), shapes, strict=True)
            return [part.view(dtype)[: n * m].view(n, m) for part, (n, m, dtype) in parts]

        self.places, self.chosen, self.scores, self.running, self.hits = views(self._there)
        self._views_here = views(self._here)

    def send(self) -> None:
        """Begins to copy it to the host."""
        self._here.copy_(self._there, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def fetch(self) -> Candidates:
        """What was sent, on the CPU, until the next `send`; waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        places, chosen, scores, running, hits = self._views_here
        return Candidates(scores, hits, running, places.tolist(), chosen.tolist())
