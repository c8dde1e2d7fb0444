"""Which beams have ended, and whether the search goes on: kept on the host, by Transformers' own functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Candidates:
    """The best continuations at one step, on the CPU: `prompts` rows of K candidates each, best first.

    The tensors are those of the newest step only.

    Args:
        scores: fp32 `[prompts, K]`, summed log-probabilities.
        hits: bool `[prompts, K]`, which of them end.
        running: fp32 `[prompts, beams]`, the scores of those that go on.
        places: `beam * vocabulary + token` of each candidate.
        chosen: of each beam that goes on, its place among the candidates.
    """

    scores: torch.Tensor
    hits: torch.Tensor
    running: torch.Tensor
    places: list[list[int]]
    chosen: list[list[int]]


class FinishedBeams:
    """The best beams that have ended so far.

    They are kept as numbers, `step * K + candidate`, where Transformers keeps whole sequences. Its functions see no
    difference. They run on the CPU here: on a GPU, a score divided by its length may differ in its last bit.

    Args:
        prompt_length: columns of the prompt.
        num_candidates: K.
    """

    def __init__(
        self, model: Any, num_prompts: int, num_candidates: int, prompt_length: int, generation_config: Any
    ) -> None:
        self._model = model
        self._config = generation_config
        self._beams = beams = generation_config.num_beams
        self._prompt_length = prompt_length
        self._num_steps = 0
        self._numbers = torch.arange(num_candidates).view(1, -1, 1).expand(num_prompts, -1, -1)
        self._is_top = torch.arange(num_candidates) < beams
        self._may_improve = torch.ones(num_prompts, 1, dtype=torch.bool)
        self._is_finished = torch.zeros(num_prompts, beams, dtype=torch.bool)
        self._refs = torch.full((num_prompts, beams, 1), -1)
        self._room = [beams] * num_prompts
        #: fp32 `[prompts, beams]`
        self.scores = torch.full((num_prompts, beams), -1e9)
        self.search_is_over = False

    @property
    def refs(self) -> list[list[int]]:
        """`step * K + candidate` of the best beams of each prompt; -1 where none has ended."""
        return self._refs[:, :, 0].tolist()

    def surely_goes_on(self, step: Candidates) -> bool:
        """Whether `add(step)` is certain to leave `search_is_over` False, told by a look.

        It is when one prompt keeps a beam open that has not ended (then "improvement" counts as possible while the
        running score is above -1e9, and not all beams are finished) and not every candidate ends.
        """
        ends = step.hits[:, : self._beams].sum(1).tolist()
        divisor = self._hypothetical_length(self._num_steps + 1) ** self._config.length_penalty
        best = step.running[:, 0].tolist()
        return any(
            room > end and score / divisor > -5e8 for room, end, score in zip(self._room, ends, best, strict=True)
        )

    def add(self, step: Candidates) -> None:
        """Takes in the next step's candidates."""
        config, model = self._config, self._model
        columns = self._prompt_length + self._num_steps
        numbers = self._numbers + self._num_steps * self._is_top.numel()
        self._refs, self.scores, _, self._is_finished = model._update_finished_beams(
            sequences=self._refs,
            topk_running_sequences=numbers,
            beam_scores=self.scores,
            topk_log_probs=step.scores,
            beam_indices=self._refs,
            topk_running_beam_indices=numbers,
            is_early_stop_heuristic_unsatisfied=self._may_improve,
            is_sent_finished=self._is_finished,
            next_token_hits_stopping_criteria=step.hits,
            top_num_beam_mask=self._is_top,
            num_beams=self._beams,
            cur_len=columns,
            decoder_prompt_len=self._prompt_length,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
        )
        self._num_steps += 1
        self._may_improve = model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=self._may_improve,
            running_beam_scores=step.running,
            beam_scores=self.scores,
            is_sent_finished=self._is_finished,
            cur_len=columns + 1,
            max_length=config.max_length,
            decoder_prompt_len=self._prompt_length,
            early_stopping=config.early_stopping,
            length_penalty=config.length_penalty,
        )
        self.search_is_over = not model._beam_search_has_unfinished_sequences(
            self._may_improve, self._is_finished, step.hits, config.early_stopping
        )
        room = self._beams - self._is_finished.sum(1)
        self._room = (room * self._may_improve[:, 0]).tolist()

    def _hypothetical_length(self, num_steps: int) -> int:
        """What Transformers divides the best running score by, before the penalty."""
        if self._config.early_stopping == "never" and self._config.length_penalty > 0:
            return self._config.max_length - self._prompt_length
        return num_steps
