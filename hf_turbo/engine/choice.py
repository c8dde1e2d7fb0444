"""The choice of the next tokens of many requests at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..generation.columns import Columns
from ..ops.dispatch import argmax
from ..ops.transfer import to_device
from .merging import pad_texts
from .options import RequestOptions


class RequestChoice:
    """What belongs to one request while its tokens are chosen: its random numbers and its texts on the device.

    A text is on the device only where processors or criteria read it.

    Args:
        options: what the request asks for.
        prompt: token ids.
        device: where tokens are chosen.
    """

    def __init__(self, options: RequestOptions, prompt: Sequence[int], device: torch.device) -> None:
        self.options = options
        #: Tokens may be chosen before it is known that the text goes on.
        self.may_go_ahead = options.may_go_ahead
        #: Rows of requests with equal ones may be chosen by one call.
        self.group: Hashable = object() if options.merge_key is None else options.merge_key
        #: Texts are kept on the device.
        self.keeps_texts = options.reads_text
        #: A choice leaves something behind, a longer text or random numbers that are drawn, which may be taken back.
        self.leaves_traces = self.keeps_texts or options.samples
        self._device = device
        self._live = list(range(options.num_sequences))  # whose texts these are
        self._texts: Columns | None = None
        if self.keeps_texts:
            self._texts = Columns(to_device([list(prompt)], device, torch.int64).expand(len(self._live), -1))
        self._random: torch.Generator | None = None
        if options.samples:
            self._random = torch.Generator(device)
            self._random.manual_seed(options.seed or 0)
        #: For each choice since the last `settle()`: where the random numbers stood before it.
        self._before: list[Any] = []

    def settle(self) -> None:
        """Says that the choices so far stay."""
        self._before.clear()

    def undo(self, steps: int) -> None:
        """Takes back the last choices of all sequences: texts and random numbers are as if they had not been made.

        Raises:
            ValueError: so many have not been made since the last `settle()`.
        """
        if not self.leaves_traces:
            return
        if not 0 <= steps <= len(self._before):
            raise ValueError(f"{steps} choices to take back: {len(self._before)} were made since the last settle()")
        if steps == 0:
            return
        if self._random is not None:
            self._random.set_state(self._before[-steps])
        del self._before[-steps:]
        if self._texts is not None:
            self._texts.length -= steps

    def keep(self, index: int, new: list[int], length: int) -> tuple[list[int], bool]:
        """Those of a sequence's new tokens that are before its end, and whether it has ended, as `Stops.keep` says.

        Args:
            index: which of the request's sequences; it was live when the tokens were chosen.
            new: tokens that have been chosen, and not been taken back.
            length: tokens before them, the prompt's included.
        """
        return self.options.stops.keep(new, length, lambda end: self.text(index)[:, :end])

    def ends(self, index: int, tokens: list[int]) -> bool:
        """Whether a sequence ends with the last of its tokens; see `keep`."""
        return self.keep(index, tokens[-1:], len(tokens) - 1)[1]

    def text(self, index: int) -> torch.Tensor:
        """All tokens of a live sequence, int64 `[1, columns]`.

        Raises:
            ValueError: texts are not kept, or not of this sequence.
        """
        if self._texts is None or index not in self._live:
            raise ValueError(f"the text of sequence {index} is not on the device")
        row = self._live.index(index)
        return self._texts.view[row : row + 1]

    def texts(self, live: Sequence[int]) -> torch.Tensor:
        """The texts that processors read, int64 `[live, columns]`; without columns where they read none."""
        if self._texts is None or self.options.kinds.read_no_text:
            return torch.empty(len(live), 0, dtype=torch.int64, device=self._device)
        # Code that we don't know may need them contiguous.
        return self._texts.view if self.options.kinds.known else self._texts.view.contiguous()

    def start(self, live: Sequence[int]) -> None:
        """Begins a choice that leaves traces for these sequences; the others have ended."""
        if live != self._live:
            if self._texts is not None:
                self._texts.reorder(to_device([self._live.index(index) for index in live], self._device))
            self._live = list(live)
        self._before.append(None if self._random is None else self._random.get_state())

    def draw(self, out: torch.Tensor) -> None:
        """Fills fp32 `[live, vocabulary]` with the choice's random numbers, exponentially distributed.

        `generate()` draws for all its rows, those that have ended included; each row has its own part.
        """
        num_sequences = self.options.num_sequences
        if len(out) == num_sequences:
            out.exponential_(1, generator=self._random)
            return
        drawn = out.new_empty(num_sequences, out.shape[1]).exponential_(1, generator=self._random)
        torch.index_select(drawn, 0, to_device(self._live, out.device), out=out)

    def append(self, tokens: torch.Tensor) -> None:
        """Puts what was chosen behind texts that are kept, int64 `[live]`."""
        if self._texts is not None:
            self._texts.append(tokens)


#: A request, and its sequences that go on: a row of logits each.
Taker = tuple[RequestChoice, Sequence[int]]


@dataclass
class Chosen:
    """The tokens of one step. Row by row in the order of the logits.

    Args:
        tokens: int64 `[rows]` on the device.
        logprobs: fp32 `[rows]` on the device, of the distributions that the processors have made; None where they are
            not asked for.
        doubts: bool `[rows]` on the device, true where probabilities were no numbers, for which `generate()` raises
            `not_numbers()`; None where nothing was sampled.
        errors: what the processors of a request have raised. Its tokens mean nothing.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    doubts: torch.Tensor | None = None
    errors: dict[RequestChoice, Exception] = field(default_factory=dict)


class _Party(NamedTuple):
    """What is to be known of takers beside who they are.

    Args:
        sizes: rows of each.
        traced: those whose choices leave traces.
        are_alike: all can be chosen for together.
    """

    takers: Sequence[Taker]
    num_rows: int
    sizes: list[int]
    traced: list[Taker]
    are_alike: bool

    @classmethod
    def of(cls, takers: Sequence[Taker]) -> _Party:
        sizes = [len(live) for _, live in takers]
        traced = [taker for taker in takers if taker[0].leaves_traces]
        groups = [choice.group for choice, _ in takers]
        return cls(takers, sum(sizes), sizes, traced, groups.count(groups[0]) == len(groups) if groups else True)


def not_numbers() -> RuntimeError:
    """What a request fails with whose probabilities were no numbers."""
    return RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")


class Chooser:
    """Chooses tokens for many requests with as few operations as their differences allow.

    Rows whose requests do the same to their logits are processed together, rows of greedy requests without processors
    see nothing but one `argmax`. Logits are left as they are.

    Args:
        return_logprobs: the log probability of each chosen token is asked for.
    """

    def __init__(self, return_logprobs: bool = False) -> None:
        self._return_logprobs = return_logprobs
        self._party = _Party.of([])
        self._order: list[int] = []
        self._there = self._back = torch.empty(0, dtype=torch.int64)

    @property
    def traced(self) -> list[Taker]:
        """Of the last takers, those whose choices leave traces."""
        return self._party.traced

    def forget(self) -> None:
        """Lets go of the last takers."""
        self._party = _Party.of([])

    def needs_logits(self, options: RequestOptions) -> bool:
        """Whether of such a request's logits more is asked for than what is likeliest."""
        return self._return_logprobs or not options.takes_likeliest

    def choose(self, logits: torch.Tensor, takers: Sequence[Taker]) -> Chosen:
        """The next tokens. They are put behind the texts of the requests that keep these.

        Args:
            logits: `[rows, vocabulary]` of any dtype; or, where nobody needs them, what is likeliest: int64 `[rows]`.
            takers: whose the rows are, in their order: one for each sequence. A request is there once. Not to be
                changed afterwards.

        Raises:
            ValueError: there are more or fewer rows than sequences.
        """
        party = self._party
        if takers is not party.takers:  # the same go on for many steps
            party = self._party = _Party.of(takers)
        if party.num_rows != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {party.num_rows} sequences")
        for choice, live in party.traced:
            choice.start(live)
        if logits.dim() == 1:
            chosen = Chosen(logits)
        elif party.are_alike:
            chosen = self._choose(logits, takers)
        else:
            chosen = self._choose_by_group(logits, takers, party.sizes)
        if any(choice.keeps_texts for choice, _ in party.traced):
            for (choice, _), tokens in zip(takers, chosen.tokens.split(party.sizes), strict=True):
                choice.append(tokens)
        return chosen

    def _choose_by_group(self, logits: torch.Tensor, takers: Sequence[Taker], sizes: Sequence[int]) -> Chosen:
        members, order = _groups(takers, sizes)
        if order != self._order:  # the same requests go on for many steps
            places = sorted(range(len(order)), key=order.__getitem__)
            self._order, (self._there, self._back) = order, to_device([order, places], logits.device).unbind()
        rows = logits[self._there]
        counts = [sum(len(live) for _, live in group) for group in members]
        parts = [self._choose(part, group) for part, group in zip(rows.split(counts), members, strict=True)]
        return self._join(parts)

    def _choose(self, logits: torch.Tensor, takers: Sequence[Taker]) -> Chosen:
        """The tokens of one group."""
        options = takers[0][0].options
        if not self.needs_logits(options):
            return Chosen(argmax(logits))  # that of rounded numbers is that of the same numbers in fp32
        chosen = Chosen(torch.empty(0))
        scores = _scores(logits, takers, chosen.errors)
        if options.samples:
            chosen.tokens, chosen.doubts = _sample(scores, takers)
        else:
            chosen.tokens = argmax(scores)
        if self._return_logprobs:
            chosen.logprobs = torch.log_softmax(scores, dim=-1).gather(1, chosen.tokens.unsqueeze(1)).squeeze(1)
        return chosen

    def _join(self, parts: Sequence[Chosen]) -> Chosen:
        """The groups' tokens in the order of the logits."""
        whole = Chosen(torch.cat([part.tokens for part in parts])[self._back])
        if self._return_logprobs:
            whole.logprobs = torch.cat([part.logprobs for part in parts if part.logprobs is not None])[self._back]
        if any(part.doubts is not None for part in parts):
            none = [torch.zeros_like(part.tokens, dtype=torch.bool) for part in parts]
            doubts = [no if part.doubts is None else part.doubts for part, no in zip(parts, none, strict=True)]
            whole.doubts = torch.cat(doubts)[self._back]
        for part in parts:
            whole.errors.update(part.errors)
        return whole


def _groups(takers: Sequence[Taker], sizes: Sequence[int]) -> tuple[list[list[Taker]], list[int]]:
    """Those that can be chosen for together, and which rows the groups have, one group after another."""
    members: dict[Hashable, list[Taker]] = {}
    rows: dict[Hashable, list[int]] = {}
    end = 0
    for taker, size in zip(takers, sizes, strict=True):
        key = taker[0].group
        members.setdefault(key, []).append(taker)
        rows.setdefault(key, []).extend(range(end, end + size))
        end += size
    return list(members.values()), [row for group in rows.values() for row in group]


def _scores(logits: torch.Tensor, takers: Sequence[Taker], errors: dict[RequestChoice, Exception]) -> torch.Tensor:
    """What the processors of a group make of its logits, fp32 `[rows, vocabulary]`."""
    try:
        return _process(logits, takers)
    except Exception as error:
        if len(takers) == 1:
            errors[takers[0][0]] = error
            return logits.float()
    # It may be the row of one request that they can't take.
    parts = zip(logits.split([len(live) for _, live in takers]), takers, strict=True)
    return torch.cat([_scores(part, [taker], errors) for part, taker in parts])


def _process(logits: torch.Tensor, takers: Sequence[Taker]) -> torch.Tensor:
    # A copy: the model may write its next logits to the same memory, and processors may write to what they get.
    last = logits.to(torch.float32, copy=True)
    processors: Any = takers[0][0].options.processors
    if not processors:
        return last
    scores = processors(pad_texts([choice.texts(live) for choice, live in takers]), last)
    if scores.shape != last.shape:
        raise ValueError(f"logits processors made {list(scores.shape)} of scores {list(last.shape)}: keep their shape")
    return scores


def _sample(scores: torch.Tensor, takers: Sequence[Taker]) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch.multinomial does for one sample without waiting, and where probabilities were no numbers, bool."""
    probabilities = torch.softmax(scores, dim=-1)
    noise = torch.empty_like(probabilities)
    for (choice, _), rows in zip(takers, noise.split([len(live) for _, live in takers]), strict=True):
        choice.draw(rows)
    largest, tokens = torch.div(probabilities, noise, out=noise).max(dim=-1)
    return tokens, largest.isnan()
