"""Which of Transformers' logits processors and stopping criteria answer by their arguments alone.

These may be called once more than they are needed, at a step that is then taken back. What is not named here, the
user's own above all, is called exactly as often as Transformers' loop calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

# Of these NoRepeatNGram and EncoderNoRepeatNGram read the tokens on the host (`tolist`), InfNanRemove, TopH and
# SequenceBias with words of several tokens copy or index by a mask: they wait for the device at each step wherever
# they run. The others only launch work. Watermark (`item`), classifier-free guidance (a forward of its own), SynthID
# (state) and PrefixConstrained (the user's function) are left out.
_PROCESSORS = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "ExponentialDecayLengthPenalty",
    "InfNanRemoveLogitsProcessor", "LogitNormalization",
}  # fmt: skip
#: Those that look at the logits alone.
_READ_NO_TEXT = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization",
}  # fmt: skip
#: Those that keep something of each row of the batch that they were made for.
_BELONG_TO_ROWS = {"EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"}
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria", "MaxTimeCriteria"}


@dataclass(frozen=True)
class ProcessorKinds:
    """What a list of processors may be called with.

    Args:
        known: an extra call of every processor goes unnoticed.
        by_row: they may be called with some rows of the batch, of any lengths.
        read_no_text: what they answer depends on the logits alone.
    """

    known: bool
    by_row: bool
    read_no_text: bool

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> ProcessorKinds:
        """Of the processors that `generate()` made of its arguments."""
        module = "transformers.generation.logits_process"
        known = type(processors) is LogitsProcessorList and all(_is_one_of(p, module, _PROCESSORS) for p in processors)
        names = {type(p).__name__ for p in processors}
        # Transformers 5.24's repetition penalty knows each row's padding.
        of_rows = any(isinstance(getattr(p, "prompt_ignore_length", None), torch.Tensor) for p in processors)
        by_row = known and not names & _BELONG_TO_ROWS and not of_rows
        return cls(known, by_row, known and names <= _READ_NO_TEXT)


def processors_are_known(processors: LogitsProcessorList) -> bool:
    """Whether an extra call of every processor goes unnoticed."""
    return ProcessorKinds.of(processors).known


def criteria_are_known(criteria: StoppingCriteriaList) -> bool:
    """Whether an extra call of every criterion goes unnoticed."""
    module = "transformers.generation.stopping_criteria"
    return all(_is_one_of(c, module, _CRITERIA) for c in criteria)


def _is_one_of(x: Any, module: str, names: set[str]) -> bool:
    return type(x).__module__ == module and type(x).__name__ in names
