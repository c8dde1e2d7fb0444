"""Prompt lookup on the device: the rows' texts, which a round's follower appends to and finds the next draft in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.token_tree import TokenTree
from ..modeling.step_graph import bucket_of
from ..ops.attention_config import next_power_of_2
from ..ops.dispatch import lay_repeats, repeat_text
from ..ops.reference_drafts import MAX_MATCH
from ..ops.reference_rounds import Round
from .texts import Texts

#: Tokens that a text has room for at least, and how many new ones are made room for at once.
_LEAST_ROOM, _NEW_ROOM = 2048, 4096


class DeviceTexts:
    """Texts of rows up to a number, of tokens up to a number; the `Guesses` of prompt lookup.

    A token's place is that of its keys in the cache, so what a round has added follows from the cache's lengths alone,
    and adding it twice changes nothing.

    Args:
        num_rows, room: the numbers.
        num_tokens: of a draft.
        min_match: tokens that a repeated piece has at least.
    """

    reads_hidden = False
    keeps_text = True

    def __init__(self, num_rows: int, room: int, num_tokens: int, min_match: int, device: torch.device) -> None:
        self.tree = TokenTree.chain(num_tokens)
        self.num_columns = self.tree.num_nodes + 1  # the last one: how long a piece it follows
        self.room = room
        self.key = num_rows, room, device
        self._num_tokens, self._min_match = num_tokens, min_match
        with torch.inference_mode(False):  # they outlive the call
            self._text = torch.zeros(num_rows, room, dtype=torch.int32, device=device)

    def load(self, texts: Texts, left_out: Sequence[int], newest: torch.Tensor | None = None) -> torch.Tensor:
        """Takes in all of the rows' tokens; nothing waits for the device. The answer is as of `find`.

        Args:
            left_out: columns of each row before the first one that the cache holds.
            newest: those after the ones that the host knows, int64 `[rows]`, if there are such.
        """
        return self.find(*self._take_in(texts, left_out, newest))

    def load_over(
        self,
        texts: Texts,
        left_out: Sequence[int],
        columns: torch.Tensor,
        drafts: Sequence[torch.Tensor],
        newest: torch.Tensor | None = None,
    ) -> None:
        """The same, but what is found is laid over drafts; see `lay_over`."""
        self.lay_over(*self._take_in(texts, left_out, newest), columns, drafts)

    def follow(self, after: Round, out: Sequence[torch.Tensor]) -> None:
        self.find(after.outcome, after.lengths, out)

    def skip(self, after: Round) -> None:
        self.lay_over(after.outcome, after.lengths, after.lengths[:0], ())

    def lay_over(
        self, outcome: torch.Tensor, lengths: torch.Tensor, columns: torch.Tensor, drafts: Sequence[torch.Tensor]
    ) -> None:
        """Takes in what a round has added, and lays what followed over drafts; see `lay_repeats`."""
        lay_repeats(self._text[: len(lengths)], outcome, lengths, columns, self._min_match, drafts)

    def find(self, outcome: torch.Tensor, lengths: torch.Tensor, out: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Takes in what a round has added; int64 `[rows, nodes + 1]`: the next draft, and how long a piece it follows.

        Where nothing has been there before the draft is the newest token again and again, after a piece of 0 tokens.

        Args:
            outcome, lengths: as of `accept_round`.
            out: as of `repeat_text`.
        """
        text = self._text[: len(lengths)]
        return repeat_text(text, outcome, lengths, self._num_tokens, self._min_match, out=out)

    def _take_in(
        self, texts: Texts, left_out: Sequence[int], newest: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies texts; the outcome and the lengths of a round that has brought each row's newest token."""
        tokens, lengths = texts.without(left_out)
        self._text[: texts.num_rows, : tokens.shape[1]].copy_(tokens)
        if newest is None:
            newest, lengths = texts.last, lengths - 1
        return torch.stack([newest, torch.zeros_like(newest)], dim=1), lengths


class SpareTexts:
    """Those that no call uses at present.

    Args:
        num_tokens, min_match: as of `DeviceTexts`.
    """

    def __init__(self, num_tokens: int, min_match: int) -> None:
        self._num_tokens, self._min_match = num_tokens, min_match
        self._spare: dict[tuple[int, int, torch.device], list[DeviceTexts]] = {}

    def __reduce__(self) -> tuple[type[SpareTexts], tuple[int, int]]:
        return SpareTexts, (self._num_tokens, self._min_match)  # a copy of the model makes its own

    @property
    def can_serve(self) -> bool:
        """Whether pieces as long as are asked for can be compared."""
        return self._min_match <= MAX_MATCH

    def exchange(
        self, present: DeviceTexts | None, num_rows: int, longest: int, limit: int | None, device: torch.device
    ) -> DeviceTexts:
        """Those with room for so many rows of up to `longest` tokens and for new ones: `present` if they have.

        Args:
            limit: tokens that a text may come to; None: any number.
        """
        most = longest + _NEW_ROOM if limit is None else min(longest + _NEW_ROOM, limit)
        rows, room = next_power_of_2(bucket_of(num_rows) or num_rows), max(next_power_of_2(most), _LEAST_ROOM)
        key = rows, room, device
        if present is not None:
            if present.key == key:
                return present
            self.give_back(present)
        try:
            return self._spare[key].pop()
        except (KeyError, IndexError):  # asked for first, as another thread may take the last one
            return DeviceTexts(rows, room, self._num_tokens, self._min_match, device)

    def give_back(self, texts: DeviceTexts) -> None:
        """Of a call that needs them no more."""
        self._spare.setdefault(texts.key, []).append(texts)

    def clear(self) -> None:
        """Gives the memory back."""
        self._spare.clear()


class CallTexts:
    """The texts of one call's rows on the device, with room for them; given back at its end.

    Args:
        spare: where they come from.
        texts: the rows.
        lengths: tokens of each row that are cached: those of the prompt.
        max_new: tokens that a row may get; None without a limit.
    """

    def __init__(self, spare: SpareTexts, texts: Texts, lengths: Sequence[int], max_new: int | None) -> None:
        self._spare, self._texts = spare, texts
        #: Columns of each row before the first one that the cache holds.
        self.left_out = [texts.num_prompt - length for length in lengths]
        self._limit = None if max_new is None else max(lengths) + max_new
        self.on_device = self._fitting(None)

    @property
    def device(self) -> torch.device:
        return self._texts.device

    @property
    def are_outgrown(self) -> bool:
        """Whether there is no room for what the host knows."""
        return self._longest > self.on_device.room

    def fit(self) -> None:
        """Takes larger ones, or ones for fewer rows, if need be."""
        self.on_device = self._fitting(self.on_device)

    def load(self, newest: torch.Tensor | None = None) -> torch.Tensor:
        """See `DeviceTexts.load`."""
        return self.on_device.load(self._texts, self.left_out, newest)

    def load_over(
        self, columns: torch.Tensor, drafts: Sequence[torch.Tensor], newest: torch.Tensor | None = None
    ) -> None:
        """See `DeviceTexts.load_over`."""
        self.on_device.load_over(self._texts, self.left_out, columns, drafts, newest)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows; the host's texts are selected, too, before anything else is asked for."""
        self.left_out = [self.left_out[row] for row in rows]

    def close(self) -> None:
        """Gives them back."""
        self._spare.give_back(self.on_device)

    def _fitting(self, present: DeviceTexts | None) -> DeviceTexts:
        return self._spare.exchange(present, len(self.left_out), self._longest, self._limit, self._texts.device)

    @property
    def _longest(self) -> int:
        return max(length - n for length, n in zip(self._texts.lengths, self.left_out, strict=True))
