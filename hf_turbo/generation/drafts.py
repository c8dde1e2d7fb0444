"""What drafters are: they propose tokens that may follow each row's text, for the model to verify together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..cache.token_tree import TokenTree
from ..modeling.head_input import HeadInput
from .acceptance import Accepted
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
    """

    tree: TokenTree
    tokens: torch.Tensor
    num_drafted: int
    probabilities: torch.Tensor | None = None


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
    """

    model: Any
    texts: Texts
    attention_mask: torch.Tensor | None
    samples: bool
    draws: bool
    head_input: HeadInput | None
    max_new: int | None


class Guesses(Protocol):
    """Drafts that are computed on the device from what the model's head was given."""

    tree: TokenTree

    def guess(self, hidden: torch.Tensor | None, roots: torch.Tensor) -> torch.Tensor:
        """Tokens of the tree, int64 `[rows, nodes]`, after the rows' newest tokens, int64 `[rows]`.

        Args:
            hidden: `[rows, hidden_size]`, what the newest tokens were chosen by; None where the drafter does not read it.
        """


class DraftSession(Protocol):
    """A drafter at work on the rows of one call.

    Attributes:
        guesses: how drafts are made on the device, if they are.
        foresees: can propose what follows tokens that are not known yet.
        is_stale: it has to `learn` before it can propose.
    """

    guesses: Guesses | None
    foresees: bool
    is_stale: bool

    def propose(self, size: int, texts: Texts, num_unknown: int = 0) -> Draft | None:
        """A draft of so many tokens a row at most, one of the drafter's sizes; None: there is nothing to propose.

        Args:
            num_unknown: tokens that each row has more than are known; the draft follows them.
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
    """What proposes tokens for one model.

    Attributes:
        name: for `report()`.
        sizes: the lengths that its drafts may have (of trees, their depths), ascending.
        adaptive: how much is drafted follows what is accepted; otherwise it is always the largest size.
        reads_hidden: it needs what the model's head is given.
    """

    name: str
    sizes: tuple[int, ...]
    adaptive: bool
    reads_hidden: bool

    def tree_of(self, size: int) -> TokenTree:
        """The shape of a draft of this size."""

    def serves(self, speculation: Any) -> bool:
        """Whether it is what a `Speculation` asks for that prints the same."""

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
