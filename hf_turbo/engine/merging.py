"""Which logits processors may be called once for the rows of many requests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from ..generation.known import ProcessorKinds


def merge_key(processors: LogitsProcessorList) -> Hashable | None:
    """What is equal for lists of processors that do the same to rows of any requests; None where no rows may be added.

    Those may be merged that look at the logits alone, and repetition penalties: which tokens a text has is all that
    these ask of it, so texts of different lengths can be padded with tokens that they have already.
    """
    others = LogitsProcessorList(p for p in processors if not _is_penalty(p))
    if type(processors) is not LogitsProcessorList or not ProcessorKinds.of(others).read_no_text:
        return None
    return tuple((type(p), *((name, _plain(value)) for name, value in sorted(vars(p).items()))) for p in processors)


def pad_texts(texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Texts of many requests, each int64 `[rows, columns]`, as one `[all rows, most columns]`.

    Shorter rows go on with their own last token.
    """
    if len(texts) == 1:
        return texts[0]
    longest = max(text.shape[1] for text in texts)
    padded = texts[0].new_empty(sum(map(len, texts)), longest)
    for rows, text in zip(padded.split([len(text) for text in texts]), texts, strict=True):
        rows[:, : text.shape[1]] = text
        rows[:, text.shape[1] :] = text[:, -1:]
    return padded


def _is_penalty(processor: Any) -> bool:
    return type(processor) is RepetitionPenaltyLogitsProcessor and processor.prompt_ignore_length is None


def _plain(value: Any) -> Hashable:
    """A parameter as something that can be compared; what can't be is equal to itself alone."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), *value.flatten().tolist())
    return value if isinstance(value, (int, float, str, type(None))) else id(value)
