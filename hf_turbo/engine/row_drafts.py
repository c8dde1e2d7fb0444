"""What drafts for sequences that join, leave and change places between steps, and grow by drafted and plain steps."""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from ..cache.forward_plan import DraftsUnsuited
from ..cache.paged_cache import PagedCache
from ..cache.token_tree import TokenTree
from ..generation.acceptance import Accepted
from ..generation.draft_model import DraftModelDrafter
from ..generation.drafts import Draft, Drafter
from ..generation.medusa import MedusaDrafter
from ..generation.pace import Pace
from ..generation.prompt_lookup import LookupRow, PromptLookup, chain_of
from ..generation.repeats import RowRepeats, lay_found
from ..modeling.head_input import HeadInput
from ..ops.dispatch import argmax
from ..ops.transfer import to_device
from .forwards import RowForwards
from .memory import CacheMemory
from .request import Sequence

#: Tokens that a draft model computes at once of texts that it does not know yet.
_MAX_CHUNK = 2048
_NO_LIMIT = 2**31 - 1


class RowDrafts(Protocol):
    """A drafter at work on an engine's sequences. Whatever it knows of one is kept by the sequence, not by a row."""

    def propose(self, size: int, sequences: Many[Sequence], pace: Pace) -> Draft | None:
        """A draft after the newest tokens of these sequences; None: there is nothing to propose.

        Args:
            size: of the drafter's: tokens of each at most.
            sequences: in the order of the cache's rows; the host knows all of their tokens.
            pace: what rounds with as many rows take.

        Raises:
            NotImplementedError: the drafter can't draft for this model's rows at all.
        """

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        """Takes in what was accepted of the last proposal, by a forward of so many nodes a row."""

    def saw(self, sequences: Many[Sequence], hidden: torch.Tensor) -> None:
        """Takes in what the model's head was given by a plain forward.

        Args:
            sequences: whose next tokens were chosen by it.
            hidden: of each, `[sequences, hidden_size]`.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept of a sequence, if anything."""

    def close(self) -> None:
        """Drops everything."""


def row_drafts(drafter: Drafter, model: Any, watch: HeadInput | None, memory: CacheMemory) -> RowDrafts:
    """How a drafter drafts for an engine's sequences.

    Args:
        model: that verifies.
        watch: where its forwards leave what its head is given, if the drafter reads that.
        memory: of the engine; a draft model's cache has a part of it.

    Raises:
        DraftsUnsuited: it drafts for the rows of one call only, or is a draft model that can't draft for this one.
        PackedUnsuited: a draft model's forwards can't be shared by rows.
    """
    if isinstance(drafter, PromptLookup):
        return LookupRows(drafter, model.device)
    if isinstance(drafter, DraftModelDrafter):
        return DraftModelRows(drafter, model, memory)
    if isinstance(drafter, MedusaDrafter) and watch is not None:
        return MedusaRows(drafter, watch)
    raise DraftsUnsuited(f"a {type(drafter).__name__} drafts for the rows of one call")


def last_positions(sequences: Many[Sequence]) -> list[int]:
    """The last position of each text that is ever computed: drafts beyond it do not stay."""
    limits = [(len(s.request.prompt), s.request.max_new_tokens) for s in sequences]
    return [_NO_LIMIT if limit is None else num_prompt + limit - 2 for num_prompt, limit in limits]


class LookupRows:
    """What followed the last time, in each sequence's own text.

    How much matches promise is learnt from all of them together: no text depends on what is drafted.
    """

    def __init__(self, drafter: PromptLookup, device: torch.device) -> None:
        self._drafter, self._device = drafter, device
        self._rows: dict[Sequence, LookupRow] = {}

    def propose(self, size: int, sequences: Many[Sequence], pace: Pace) -> Draft | None:
        drafter = self._drafter
        for sequence in sequences:
            if sequence not in self._rows:
                self._rows[sequence] = LookupRow(sequence.request.prompt)
            self._rows[sequence].read(sequence.new_tokens, drafter.sizes[-1], drafter.gain)
        tokens = drafter.repeats([self._rows[s] for s in sequences], drafter.gain, pace, size)
        return chain_of(tokens, _newest(sequences, self._device)) if tokens else None

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        pass

    def saw(self, sequences: Many[Sequence], hidden: torch.Tensor) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        self._rows.pop(sequence, None)

    def close(self) -> None:
        self._rows.clear()


class MedusaRows:
    """Guesses from the hidden state that each sequence's newest token was chosen by.

    Args:
        watch: of the model's forwards.
    """

    def __init__(self, drafter: MedusaDrafter, watch: HeadInput) -> None:
        self._drafter, self._watch = drafter, watch
        self._hidden: dict[Sequence, torch.Tensor] = {}
        self._repeats: dict[Sequence, RowRepeats] = {}
        self._asked: list[Sequence] = []

    def propose(self, size: int, sequences: Many[Sequence], pace: Pace) -> Draft | None:
        if any(sequence not in self._hidden for sequence in sequences):
            return None  # a plain step shows it
        hidden = torch.stack([self._hidden[sequence] for sequence in sequences])
        tree, tokens = self._drafter.tree_of(size), self._drafter.guess(hidden, _newest(sequences, hidden.device))
        self._lay_repeats(tokens, sequences)
        self._asked = list(sequences)
        return Draft(tree, tokens[:, : tree.num_nodes], tree.max_depth * len(sequences))

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        hidden = self._watch.take()
        hidden = hidden.reshape(-1, num_nodes, hidden.shape[-1])
        last = accepted.path.gather(1, accepted.counts.unsqueeze(1)).unsqueeze(2)
        self.saw(self._asked, hidden.gather(1, last.expand(-1, 1, hidden.shape[-1]))[:, 0])

    def saw(self, sequences: Many[Sequence], hidden: torch.Tensor) -> None:
        self._hidden.update(zip(sequences, hidden.unbind(), strict=True))

    def forget(self, sequence: Sequence) -> None:
        self._hidden.pop(sequence, None)
        self._repeats.pop(sequence, None)

    def close(self) -> None:
        self._hidden.clear()
        self._repeats.clear()

    def _lay_repeats(self, tokens: torch.Tensor, sequences: Many[Sequence]) -> None:
        """Puts what followed in each sequence's own text in the place of the best guesses."""
        min_match, columns = self._drafter.min_match, self._drafter.columns_of_repeats(tokens.device)
        if min_match is None:
            return
        found = []
        for sequence in sequences:
            if sequence not in self._repeats:
                self._repeats[sequence] = RowRepeats(sequence.request.prompt)
            found.append(self._repeats[sequence].find(sequence.new_tokens, len(columns), min_match))
        lay_found(tokens, columns, found)


class DraftModelRows:
    """Chains of a draft model's likeliest tokens, over a cache with a row for each sequence.

    It is patched as long as there are any. Whatever it lacks of a text but the last two tokens comes first; those two
    are a captured step's: after a draft that was accepted as a whole the last token but one is new to it, too.

    Args:
        memory: as of `row_drafts`, whose errors it raises.
    """

    def __init__(self, drafter: DraftModelDrafter, model: Any, memory: CacheMemory) -> None:
        self._drafter, self._model = drafter, model
        self._vocabulary, self._own_vocabulary = (
            m.config.get_text_config(decoder=True).vocab_size for m in (model, drafter.model)
        )
        self._patched = ExitStack()
        self._forwards: RowForwards | None = None
        self._rows: list[Sequence] = []  # of the draft model's cache
        #: Tokens of each text that its row begins with.
        self._known: dict[Sequence, int] = {}
        self._size = 0  # of the last draft
        #: Bytes that its blocks may take.
        self._capacity = memory.share_with(self._open().cache.pool)
        self._rest()

    def propose(self, size: int, sequences: Many[Sequence], pace: Pace) -> Draft | None:
        forwards = self._forwards or self._open()
        if _most_bytes(forwards.cache, [len(sequence.tokens) + size for sequence in sequences]) > self._capacity:
            return None
        self._arrange(forwards, sequences)
        self._catch_up(forwards, sequences)
        limits, cache = last_positions(sequences), forwards.cache
        tokens = to_device([sequence.tokens[-2:] for sequence in sequences], forwards.device)
        columns = [tokens[:, 1]]
        for _ in range(size):
            tree = TokenTree.chain(tokens.shape[1] - 1)
            logits = forwards.verify(tree, self._known_tokens(tokens), limits)[:, -1]
            cache.keep([length + tree.num_nodes for length in cache.lengths], may_shrink=True)
            columns.append(argmax(logits[:, : self._vocabulary].contiguous()))
            tokens = columns[-1].unsqueeze(1)
        self._known = {sequence: len(sequence.tokens) for sequence in sequences}
        self._size = size
        return Draft(TokenTree.chain(size), torch.stack(columns, dim=1), size * len(sequences))

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        for sequence, count in zip(self._rows, accepted.counts.tolist(), strict=True):
            self._known[sequence] += min(count, self._size - 1)  # the last drafted token was not computed

    def saw(self, sequences: Many[Sequence], hidden: torch.Tensor) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        if self._rows == [sequence]:
            self._rest()
        elif self._forwards is not None and sequence in self._known:
            self._select(self._forwards, [other for other in self._rows if other is not sequence])

    def close(self) -> None:
        self._rest()
        self._pool.shrink({})

    def _open(self) -> RowForwards:
        with self._drafter.patched_for(self._model) as patched:
            forwards = RowForwards(self._drafter.model)
            forwards.probe()
            self._patched = patched.pop_all()
        self._forwards, self._pool = forwards, forwards.cache.pool  # others each time, if its config has changed
        return forwards

    def _rest(self) -> None:
        """Leaves the draft model as it was."""
        self._rows, self._known, self._forwards = [], {}, None
        self._patched.close()

    def _arrange(self, forwards: RowForwards, sequences: Many[Sequence]) -> None:
        """Gives these sequences, and no others, the rows of the cache, in their order."""
        kept = [sequence for sequence in sequences if sequence in self._known]
        new = [sequence for sequence in sequences if sequence not in self._known]
        self._select(forwards, kept)
        forwards.cache.add_rows(len(new))
        places = {sequence: row for row, sequence in enumerate([*kept, *new])}
        forwards.cache.select_rows([places[sequence] for sequence in sequences])
        self._rows = list(sequences)
        self._known |= dict.fromkeys(new, 0)

    def _select(self, forwards: RowForwards, sequences: list[Sequence]) -> None:
        """Gives up the rows of all but these sequences."""
        if sequences:
            places = {sequence: row for row, sequence in enumerate(self._rows)}
            forwards.cache.select_rows([places[sequence] for sequence in sequences])
        else:
            forwards.renew()
            forwards.cache.activate_past_recording()  # a rejected draft takes the cache back
        self._rows = sequences
        self._known = {sequence: self._known[sequence] for sequence in sequences}

    def _catch_up(self, forwards: RowForwards, sequences: Many[Sequence]) -> None:
        """Brings each row to all of its text but the last two tokens, and takes back what is no part of it."""
        ends = [len(sequence.tokens) - 2 for sequence in sequences]
        starts = [min(self._known[sequence], end) for sequence, end in zip(sequences, ends, strict=True)]
        forwards.cache.keep(starts)
        while starts != ends:
            left, q_lens, tokens = _MAX_CHUNK, [], []
            for sequence, start, end in zip(sequences, starts, ends, strict=True):
                q_lens.append(min(end - start, left))
                left -= q_lens[-1]
                tokens += sequence.tokens[start : start + q_lens[-1]]
            known = self._known_tokens(to_device(tokens, forwards.device))
            forwards.packed(known, q_lens, [len(tokens) - 1])
            starts = forwards.cache.lengths

    def _known_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens that the draft model has; one that it lacks becomes its first."""
        return torch.where(tokens < self._own_vocabulary, tokens, 0)


def _most_bytes(cache: PagedCache, lengths: Many[int]) -> int:
    """Bytes of blocks that rows of so many tokens hold at most."""
    total = 0
    for group in cache.groups.values():
        table, window = group.table, group.sliding_window
        most = None if window is None else window + _MAX_CHUNK + table.group.block_size
        held = [length if most is None else min(length, most) for length in lengths]
        total += sum(map(table.num_blocks, held)) * table.group.block_bytes
    return total


def _newest(sequences: Many[Sequence], device: torch.device) -> torch.Tensor:
    """The sequences' last tokens, int64 `[sequences]`."""
    return to_device([sequence.tokens[-1] for sequence in sequences], device)
