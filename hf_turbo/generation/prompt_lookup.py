"""Drafts that repeat the text: what followed the last time that it said what it says now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..cache.token_tree import TokenTree
from .acceptance import Accepted
from .drafts import Draft, DraftContext, chain_sizes, check_num_tokens, cost_to_verify
from .suffix_index import SuffixIndex
from .texts import Texts


class PromptLookup:
    """Proposes what followed the longest piece of the row's text that is also its end, the most recent one of several.

    For texts that quote: summaries, answers from documents, code that is edited. Costs nothing where nothing repeats.
    (Prompt lookup decoding, A. Saxena 2023; Transformers' `prompt_lookup_num_tokens` takes the first match of a
    fixed length.)

    Args:
        num_tokens: drafted at most, 1 to 63.
        min_match: tokens that a repeated piece has at least.
        adaptive: fewer tokens, or none, where few are accepted.

    Raises:
        ValueError: a number is not allowed.
    """

    reads_hidden = False

    def __init__(self, num_tokens: int = 15, min_match: int = 2, adaptive: bool = True) -> None:
        self.sizes = chain_sizes(check_num_tokens(num_tokens), adaptive)
        if not isinstance(min_match, int) or min_match < 1:
            raise ValueError(f"min_match={min_match!r}: a repeated piece has at least 1 token")
        self.min_match, self.adaptive = min_match, adaptive

    def __repr__(self) -> str:
        return f"PromptLookup(num_tokens={self.sizes[-1]}, min_match={self.min_match}, adaptive={self.adaptive})"

    def attach(self, model: Any) -> PromptLookup:
        """Any model will do."""
        return self

    def cost(self, size: int) -> float:
        """Of verifying it."""
        return cost_to_verify(size + 1)

    def tree_of(self, size: int) -> TokenTree:
        """A chain."""
        return TokenTree.chain(size)

    def serves(self, speculation: Any) -> bool:
        """All of the same numbers do."""
        return True

    def release(self) -> None:
        """Nothing is held."""

    def begin(self, context: DraftContext) -> _Session:
        """Reads the prompts, left padding left out."""
        return _Session(context, self.sizes, self.min_match)


class _Session:
    guesses = None
    foresees = True
    is_stale = False

    def __init__(self, context: DraftContext, sizes: tuple[int, ...], min_match: int) -> None:
        self._sizes, self._min_match = sizes, min_match
        texts, mask = context.texts, context.attention_mask
        rows = [texts.row(row)[0].tolist() for row in range(texts.num_rows)]
        if mask is not None:
            leading = (mask[:, : texts.num_prompt].cumsum(1) == 0).sum(1).tolist()
            rows = [row[pad:] for row, pad in zip(rows, leading, strict=True)]
        self._indices = [SuffixIndex(row) for row in rows]
        self._seen = [0] * len(rows)  # new tokens that are in the index

    def propose(self, size: int, texts: Texts, num_unknown: int = 0) -> Draft | None:
        proposals = []
        for row, (index, new) in enumerate(zip(self._indices, texts.new, strict=True)):
            index.extend(new[self._seen[row] :])
            self._seen[row] = len(new)
            # The tokens that are not known are taken for those that followed the last time.
            proposals.append(index.propose(size + num_unknown, self._min_match)[num_unknown:])
        longest = max(map(len, proposals))
        if longest == 0:
            return None
        length = next(n for n in self._sizes if n >= longest)
        filled = [proposal + [-1] * (length - len(proposal)) for proposal in proposals]
        last = texts.last.unsqueeze(1)
        tokens = torch.cat([last, torch.tensor(filled).to(last.device, non_blocking=True)], dim=1)
        return Draft(TokenTree.chain(length), tokens, sum(map(len, proposals)))

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        pass

    def miss(self) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self._indices = [self._indices[row] for row in rows]
        self._seen = [self._seen[row] for row in rows]

    def close(self) -> None:
        pass
