"""The rows of a call whose text is drafted: what they have said, which of them have ended, what the caller gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from .acceptance import Accepted
from .known import ProcessorKinds, criteria_are_known
from .node_choice import NodeChoice
from .stopping import StopRules, TokenStops
from .texts import Texts


class Rows:
    """Rows that end at different times.

    Args:
        input_ids: the prompt, int64 `[rows, columns]`.
        processors, criteria, generation_config, streamer: as of `_sample`.
        keeps_cache: the caller sees the cache afterwards, so rows that have ended stay in it.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: Any,
        streamer: Any,
        keeps_cache: bool,
    ) -> None:
        kinds, device = ProcessorKinds.of(processors), input_ids.device
        self.prompt, self.config, self.keeps_cache = input_ids, generation_config, keeps_cache
        #: Drafts may be drawn by way of the processors.
        self.draws = kinds.by_row
        #: No code of the caller's runs between the steps.
        self.is_alone = kinds.known and criteria_are_known(criteria) and streamer is None
        self.texts = Texts(input_ids, processors)
        waits = device.type == "cpu" or not kinds.known
        self.stops = TokenStops(criteria)
        ends = self.stops.ends_with if waits and len(input_ids) == 1 else None
        self.choice = NodeChoice(self.texts, generation_config, bool(processors), device, waits, ends)
        self._reminder = StopRules(criteria, device)
        #: Nothing but the likeliest token and where it ends counts.
        self.is_plain = self.choice.is_plain and self.is_alone and not self._reminder.reads_sequences
        #: The new tokens of all rows, and which of them each row at work is.
        self.new: list[list[int]] = [[] for _ in range(len(input_ids))]
        self.done = [False] * len(input_ids)
        self._origins = list(range(len(input_ids)))
        self._streamer = streamer
        self._num_streamed = 0

    @property
    def max_new(self) -> int | None:
        """Tokens that a row may get; None without a limit."""
        return None if self.stops.max_length is None else self.stops.max_length - self.prompt.shape[1]

    @property
    def padding(self) -> int:
        """What a row goes on with once it has ended."""
        padding = self.config._pad_token_tensor
        return 0 if padding is None else int(padding)

    def take(self, accepted: Accepted) -> tuple[list[int], int]:
        """Reads what was accepted. Its tokens are written behind the texts.

        Returns:
            How many tokens each row has got, and how many drafted ones were accepted.
        """
        return self.take_written(self.numbers_of(accepted).tolist())

    @staticmethod
    def numbers_of(accepted: Accepted) -> torch.Tensor:
        """What the host reads of it, int64 `[rows, depth + 2]`."""
        return torch.cat([accepted.tokens, accepted.counts.unsqueeze(1)], dim=1)

    def take_written(self, numbers: Sequence[Sequence[int]]) -> tuple[list[int], int]:
        """The same for what has been read already: a row each, tokens and at the end how many drafts were accepted."""
        new, num_accepted = self._cut(numbers)
        self.choice.take([len(tokens) for tokens in new])
        self.texts.append(new)
        self._stream()
        return [len(tokens) for tokens in new], num_accepted

    def take_numbers(self, numbers: Sequence[Sequence[int]]) -> tuple[list[int], int]:
        """The same for tokens that only the host has so far."""
        new, num_accepted = self._cut(numbers)
        self.texts.append_unwritten(new)
        return [len(tokens) for tokens in new], num_accepted

    def select(self, rows: Sequence[int]) -> None:
        """Only these go on."""
        self.texts.select(rows)
        self.choice.select(rows)
        self._origins = [self._origins[row] for row in rows]
        self.done = [self.done[row] for row in rows]

    def result(self, cache: PagedCache) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `_sample` returns."""
        if self._streamer is not None:
            self._streamer.end()
        num_new = max(map(len, self.new))
        rows = [new + [self.padding] * (num_new - len(new)) for new in self.new]
        new_tokens = torch.tensor(rows, dtype=self.prompt.dtype).to(self.prompt.device)
        sequences = torch.cat([self.prompt, new_tokens], dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        fields: dict[str, Any] = {
            "sequences": sequences,
            "scores": self.choice.kept("scores"),
            "logits": self.choice.kept("logits"),
            CACHE_NAME: cache,
        }
        return GenerateDecoderOnlyOutput(**fields)

    def _cut(self, numbers: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
        """Each row's new tokens up to its end, and how many drafted ones were accepted."""
        new: list[list[int]] = []
        num_accepted = 0
        for row, (*tokens, count) in enumerate(numbers):
            if self.done[row]:
                new.append([])
                continue
            num_accepted += count
            length = self.texts.lengths[row]
            kept, self.done[row] = self.stops.cut(
                tokens[: count + 1],
                length,
                lambda end, row=row: self.texts.row(row, end),  # type: ignore[misc]
                lambda n, row=row: self.choice.scores_with(row, n),  # type: ignore[misc]
            )
            new.append(kept)
            self.new[self._origins[row]] += kept
            for end in range(length + 1, length + len(kept) + 1):
                self._reminder.remind(end)
        return new, num_accepted

    def _stream(self) -> None:
        """Hands on the columns that are known of all rows, those of rows that have ended being padding."""
        if self._streamer is None:
            return
        ended = [True] * len(self.new)
        for row, done in zip(self._origins, self.done, strict=True):
            ended[row] = done
        open_rows = [len(new) for new, done in zip(self.new, ended, strict=True) if not done]
        known = min(open_rows) if open_rows else max(map(len, self.new))
        for column in range(self._num_streamed, known):
            tokens = [new[column] if column < len(new) else self.padding for new in self.new]
            self._streamer.put(torch.tensor(tokens))
        self._num_streamed = max(self._num_streamed, known)
