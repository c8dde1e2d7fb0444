"""What drafters are: they propose tokens that may follow each row's text, for the model to verify together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..cache.token_tree import TokenTree
from ..modeling.head_input import HeadInput
from ..ops.reference_rounds import Round
from .acceptance import Accepted
from .expectation import Expectation
from .pace import Pace
from .texts import Texts

#: Lengths that a chain of drafted tokens may have: few, as a captured step serves one.
_CHAIN_LENGTHS = (1, 3, 7, 15, 31, 63)
#: Tokens that can be drafted at once.
MAX_DRAFTED = _CHAIN_LENGTHS[-1]


@dataclass(frozen=True)
class Draft:
    """One proposal for every row.

    Args:
        tree: its shape, the same for all rows.
        tokens: int64 `[rows, nodes]`; the root is the row's last token, -1 stands where nothing is proposed.
        num_drafted: tokens that are proposed, over all rows.
        probabilities: fp32 `[rows, nodes, vocabulary]`: what each node's children were drawn from, if they were drawn.
        typical: accept what is typical of the model where tokens are sampled, with this threshold and this factor; see
            `accept_typical`. The text's distribution is no longer the model's. None: exactly.
    """

    tree: TokenTree
    tokens: torch.Tensor
    num_drafted: int
    probabilities: torch.Tensor | None = None
    typical: tuple[float, float] | None = None


@dataclass(frozen=True)
class DraftContext:
    """What a drafter gets to know of a call of `generate()`.

    Args:
        model: that verifies.
        texts: the rows; the prompt is in, no new token yet.
        attention_mask: of the prompt, int64 `[rows, columns]`; None: all ones.
        samples: tokens are drawn, not the likeliest ones taken.
        draws: drafts may be drawn from probabilities, too, by way of `Texts.process`.
        head_input: where forwards leave what the model's head is given, if the drafter asked for it.
        max_new: tokens that a row may get; None without a limit.
        pace: what rounds take.
        lengths: tokens of each row that are cached: those of the prompt.
        goes_ahead: tokens are the likeliest ones, and the host may be one round behind.
    """

    model: Any
    texts: Texts
    attention_mask: torch.Tensor | None
    samples: bool
    draws: bool
    head_input: HeadInput | None
    max_new: int | None
    pace: Pace
    lengths: Sequence[int]
    goes_ahead: bool

    def prompts(self) -> list[list[int]]:
        """Each row's tokens, left padding left out."""
        rows = [self.texts.row(row)[0].tolist() for row in range(self.texts.num_rows)]
        if self.attention_mask is None:
            return rows
        leading = (self.attention_mask[:, : self.texts.num_prompt].cumsum(1) == 0).sum(1).tolist()
        return [row[pad:] for row, pad in zip(rows, leading, strict=True)]


class Guesses(Protocol):
    """Drafts that are made on the device, after each round by what it came to. Captured followers refer to them.

    Equal ones compute the same.
    """

    @property
    def tree(self) -> TokenTree:
        """The shape of the largest; smaller ones are its beginnings."""

    @property
    def num_columns(self) -> int:
        """Of a draft as `follow` leaves it: one a node, and what the host is told besides."""

    @property
    def reads_hidden(self) -> bool:
        """Whether it needs what the model's head is given."""

    @property
    def keeps_text(self) -> bool:
        """Whether it has to know of all rounds, also of those after which nothing is drafted."""

    def follow(self, after: Round, out: Sequence[torch.Tensor]) -> None:
        """Leaves the next draft of each row.

        Args:
            after: the round, with hidden states where they are read.
            out: int64 `[rows, num_columns]`, whose first column has the newest tokens already, and one of fewer columns
                for the first nodes.
        """

    def skip(self, after: Round) -> None:
        """Takes in a round after which nothing is drafted."""


class DraftSession(Protocol):
    """A drafter at work on the rows of one call."""

    @property
    def is_stale(self) -> bool:
        """Whether it has to `learn` before it can propose, and rounds can go on ahead."""

    def propose(self, size: int, texts: Texts) -> Draft | None:
        """A draft of so many tokens a row at most, one of the drafter's sizes; None: there is nothing to propose."""

    def begin_ahead(self, newest: torch.Tensor | None = None) -> Guesses | None:
        """How drafts are made on the device in the rounds that follow, all of which go ahead; None: they are not.

        Args:
            newest: the rows' tokens after those that the host knows, int64 `[rows]`, if there are such.
        """

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        """Takes in what was accepted of the last forward's nodes, before the host knows it."""

    def miss(self) -> None:
        """Rounds have passed without `learn`."""

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows."""

    def close(self) -> None:
        """Gives back what the session holds."""


class Drafter(Protocol):
    """What proposes tokens for one model."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens its drafts may have, ascending."""

    @property
    def adaptive(self) -> bool:
        """Whether how much is drafted follows what is accepted; otherwise it is always the largest size."""

    @property
    def decides(self) -> bool:
        """Whether the drafter itself sees at each round what is worth drafting."""

    @property
    def reads_hidden(self) -> bool:
        """Whether it needs what the model's head is given."""

    def cost(self, size: int) -> float:
        """What a round with a draft of this size takes, in plain steps, as far as it can be said without measuring."""

    def expectation(self) -> Expectation:
        """What drafts of these sizes may bring, before any has been seen."""

    def tree_of(self, size: int) -> TokenTree:
        """The shape of a draft of this size."""

    def serves(self, speculation: Any) -> bool:
        """Whether it is what a `Speculation` asks for that prints the same."""

    def release(self) -> None:
        """Gives back the memory that is held between calls."""

    def begin(self, context: DraftContext) -> DraftSession:
        """A session for the rows of a call.

        Raises:
            DraftsUnsuited: this call's rows can't be drafted for. The message says why.
        """


class Speculation(Protocol):
    """What a user gives as `speculation=`: how to draft, not yet for which model."""

    def attach(self, model: Any) -> Drafter:
        """A drafter for a model.

        Raises:
            ValueError: it does not fit this model.
        """


def cost_to_verify(num_nodes: int) -> float:
    """In plain steps: reading the weights is most of a step, and they are read once for all nodes."""
    return 1 + num_nodes / 64


def chain_sizes(longest: int, adaptive: bool) -> tuple[int, ...]:
    """The lengths of chains of up to so many drafted tokens."""
    shorter = tuple(n for n in _CHAIN_LENGTHS if n < longest) if adaptive else ()
    return (*shorter, longest)


def check_num_tokens(num_tokens: object) -> int:
    """A number of drafted tokens that a chain can have.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or not 1 <= num_tokens <= MAX_DRAFTED:
        raise ValueError(f"num_tokens={num_tokens!r}: 1 to {MAX_DRAFTED} tokens can be drafted at once")
    return num_tokens
