"""Steps of the engine that verify drafted tokens: each sequence gets those that its own plain steps would choose."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.forward_plan import DraftsUnsuited, PackedUnsuited
from ..generation.acceptance import Accepted, accept_greedy, accept_matching
from ..generation.drafts import Draft
from ..generation.pace import Pace
from ..generation.paced import Paced
from ..modeling.step_graph import bucket_of
from ..ops.dispatch import argmax
from ..ops.transfer import to_device
from .choice import Chooser, Chosen, RequestChoice, not_numbers
from .forwards import RowForwards
from .limits import EngineLimits
from .memory import CacheMemory
from .news import News
from .request import Request, Sequence
from .row_drafts import RowDrafts, last_positions, row_drafts


@dataclass
class _Step:
    """What a step has to tell a pace: with a size of 0 it was a plain one."""

    pace: Pace
    num_rows: int
    size: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def note(self, seconds: float) -> None:
        drafted = min(self.num_drafted, self.size * self.num_rows)
        size, accepted = self.size if drafted else 0, min(self.num_accepted, drafted)
        self.pace.note(size, drafted, accepted, seconds, self.num_rows)


class DraftedSteps:
    """Rounds of a draft, a forward and a look at what stays, in the place of decode steps.

    A text is that of plain steps, whatever is drafted: each request chooses every token itself, with its own random
    numbers and processors, and takes back what it has chosen after its draft went wrong.

    Args:
        model: patched, with `speculation`.
        limits: of the engine, as all that follows.
    """

    def __init__(
        self, model: Any, limits: EngineLimits, forwards: RowForwards, memory: CacheMemory, chooser: Chooser
    ) -> None:
        self._handle = model._hf_turbo
        self._limits, self._forwards, self._memory, self._chooser = limits, forwards, memory, chooser
        self._paced: Paced = self._handle.speculation
        #: By whether tokens are sampled, and for greedy ones by how many rows there are.
        self._paces: dict[tuple[bool, int | None], Pace] = {}
        self._held = ExitStack()  # what the paces are had from
        self._drafts: RowDrafts | None = None
        self._last: _Step | None = None
        try:
            self._drafts = row_drafts(self._paced.drafter, model, forwards.watch, memory)
        except (DraftsUnsuited, PackedUnsuited) as error:
            self._stop(str(error))

    @property
    def may_draft(self) -> bool:
        """Whether the next step may be one with drafts, for which the host must know all tokens."""
        rows = self._memory.rows
        return self._drafts is not None and self._suit(rows) and self._pace(rows).stats().is_on

    def run(self, sequences: Many[Sequence], choices: Mapping[Request, RequestChoice]) -> list[News] | None:
        """One round: a token or more for each sequence; None, and nothing has happened, where a plain step is due.

        Args:
            sequences: of all rows of the cache, in order. Each misses its last token only.
            choices: of their requests.
        """
        drafts = self._drafts
        if drafts is None or not self._suit(sequences):
            return None
        pace = self._pace(sequences)
        try:
            draft = self._propose(drafts, pace, sequences)
            if draft is None:
                return None
            logits = self._forwards.verify(draft.tree, draft.tokens.clamp_min(0), last_positions(sequences))
        except (DraftsUnsuited, PackedUnsuited) as error:
            self._stop(str(error))
            return None
        of_rows = [choices[sequence.request] for sequence in sequences]
        accepted, walked = self._accept(draft, logits, of_rows, sequences)
        drafts.learn(accepted, draft.tree.num_nodes)
        if not draft.tree.is_chain:
            self._forwards.cache.move_accepted(accepted.path, accepted.counts + 1)
        news = _read(accepted, walked, of_rows, sequences)
        self._last = _Step(pace, len(sequences), draft.tree.num_nodes - 1, draft.num_drafted)
        for one in news:
            self._last.num_accepted += len(one.tokens) - 1
            one.sequence.num_cached += len(one.tokens)
        # Rows whose texts end before the last of these tokens are given up anyway.
        self._forwards.cache.keep([sequence.num_cached for sequence in sequences])
        return news

    def saw(self, ready: Many[Sequence], is_step: bool) -> None:
        """Takes in a plain forward.

        Args:
            ready: whose next tokens are chosen by it, in the order of their rows.
            is_step: it brought one token of each row.
        """
        if self._drafts is None:
            return
        if is_step and self._suit(ready):
            self._last = _Step(self._pace(ready), len(ready))
        if self._forwards.watch is None:
            return
        try:
            hidden = self._forwards.watch.take().flatten(0, 1)
        except NotImplementedError as error:
            self._stop(str(error))
            return
        if len(hidden) > len(ready):  # a step, of which not all rows are
            hidden = hidden.index_select(0, to_device([sequence.held_row for sequence in ready], hidden.device))
        self._drafts.saw(ready, hidden)

    def note(self, seconds: float) -> None:
        """Takes in how long the last step took, where it was a round or one token of each row."""
        if self._last is not None:
            self._last.note(seconds)
        self._last = None

    def forget(self, request: Request) -> None:
        """A request is over."""
        if self._drafts is not None:
            for sequence in request.sequences:
                self._drafts.forget(sequence)

    def close(self) -> None:
        """Gives back what drafters hold."""
        if self._drafts is not None:
            self._drafts.close()
        self._held.close()

    def _suit(self, sequences: Many[Sequence]) -> bool:
        """Whether these sequences' tokens may be chosen after drafted ones, and be taken back."""
        each = [(sequence.request.num_sequences, sequence.request.options) for sequence in sequences]
        return bool(each) and all(n == 1 and options.kinds.known and options.stops.are_known for n, options in each)

    def _pace(self, sequences: Many[Sequence]) -> Pace:
        samples = any(sequence.request.options.samples for sequence in sequences)
        key = samples, None if samples else bucket_of(len(sequences))
        if key not in self._paces:
            self._paces[key] = self._held.enter_context(self._paced.pace(len(sequences), samples))
        return self._paces[key]

    def _propose(self, drafts: RowDrafts, pace: Pace, sequences: Many[Sequence]) -> Draft | None:
        """A draft that is worth it and that there is room for."""
        if any(sequence.num_unknown or not sequence.num_cached for sequence in sequences):
            return None
        size = self._fitting(pace.choose(), sequences)
        return drafts.propose(size, sequences, pace) if size else None

    def _fitting(self, wanted: int, sequences: Many[Sequence]) -> int:
        """The largest size of a draft, up to a wanted one, that a step and the memory have room for; 0: none is."""
        drafter = self._paced.drafter
        for size in reversed([n for n in drafter.sizes if n <= wanted]):
            num_nodes = drafter.tree_of(size).num_nodes
            if len(sequences) * num_nodes > self._limits.max_tokens:
                continue
            if sum(self._memory.cost(sequence, num_nodes) for sequence in sequences) <= self._memory.available:
                return size
        return 0

    def _accept(
        self, draft: Draft, logits: torch.Tensor, choices: Many[RequestChoice], sequences: Many[Sequence]
    ) -> tuple[Accepted, list[Chosen]]:
        """What stays of a draft, and the choices that were made by the way.

        Args:
            logits: `[rows, nodes, vocabulary]`.
        """
        tree, tokens = draft.tree, draft.tokens
        if all(choice.options.is_plain for choice in choices) and not self._limits.return_logprobs:
            return accept_greedy(tree, tokens, argmax(logits.flatten(0, 1)).view(tokens.shape)), []
        takers = [(choice, [sequence.index]) for choice, sequence in zip(choices, sequences, strict=True)]
        rows = torch.arange(len(tokens), device=tokens.device)
        walked: list[Chosen] = []

        def choose(depth: int, nodes: torch.Tensor) -> torch.Tensor:
            walked.append(self._chooser.choose(logits[rows, nodes], takers))
            return walked[-1].tokens

        def all_ended(ended: torch.Tensor) -> bool:
            return bool(ended.all().item())

        waits = tokens.device.type == "cpu"
        return accept_matching(tree, tokens, choose, all_ended if waits else None), walked

    def _stop(self, reason: str) -> None:
        """Nothing is drafted any more."""
        if self._drafts is not None:
            self._drafts.close()
        self._drafts = None
        self._forwards.watch = self._forwards.cache.head_input = None
        self._handle.step_aside(f"no drafts for requests together: {reason}")


def _read(
    accepted: Accepted, walked: Many[Chosen], choices: Many[RequestChoice], sequences: Many[Sequence]
) -> list[News]:
    """What the sequences have got, on the host."""
    doubts = [chosen.doubts.unsqueeze(1) for chosen in walked if chosen.doubts is not None]
    logprobs = [chosen.logprobs for chosen in walked if chosen.logprobs is not None]
    numbers = torch.cat([accepted.counts.unsqueeze(1), accepted.tokens, *doubts], dim=1).tolist()
    by_row = torch.stack(logprobs, dim=1).tolist() if logprobs else None
    num_tokens, news = accepted.tokens.shape[1], []
    for row, (sequence, (count, *rest)) in enumerate(zip(sequences, numbers, strict=True)):
        end, of_row = count + 1, rest[num_tokens:]
        failures: dict[int, Exception] = {i: not_numbers() for i, doubt in enumerate(of_row[:end]) if doubt}
        for i, chosen in enumerate(walked[:end]):
            if (error := chosen.errors.get(choices[row])) is not None:
                failures[i] = error
        news.append(News(sequence, rest[:end], None if by_row is None else by_row[row][:end], failures, len(walked)))
    return news
