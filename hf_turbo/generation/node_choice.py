"""The model's own tokens at the nodes of a draft: chosen as Transformers chooses them, with what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache.token_tree import TokenTree
from ..ops.dispatch import argmax
from .acceptance import Accepted, accept_by_rejection, accept_greedy, accept_matching, accept_typical
from .choice import DeviceRandom
from .drafts import Draft
from .texts import Texts


class NodeChoice:
    """Accepts drafts by what the model says at their nodes.

    Args:
        texts: the rows, with their processors.
        generation_config: of the call.
        processors: whether there are any.
        device: where the tokens are.
        waits: the host may look at what has been accepted so far, to choose no token that is not needed: on a CPU, or
            for processors that must be called as often as there are tokens.
        ends: of one row, if the host may look: whether a token ends a text that has so many columns with it.
    """

    def __init__(
        self,
        texts: Texts,
        generation_config: Any,
        processors: bool,
        device: torch.device,
        waits: bool,
        ends: Callable[[int, int], bool] | None = None,
    ) -> None:
        keeps = generation_config.return_dict_in_generate
        self._texts = texts
        self._samples = bool(generation_config.do_sample)
        self._waits, self._ends = waits, ends
        #: Which row of the call each row at work is.
        self._origins = list(range(texts.num_rows))
        #: By kind, for each row of the call: one `[vocabulary]` a new token.
        self._kept: dict[str, list[list[torch.Tensor]]] = {
            kind: [[] for _ in range(texts.num_rows)]
            for kind in ("scores", "logits")
            if keeps and getattr(generation_config, f"output_{kind}")
        }
        #: The likeliest token counts, and nothing is kept of it.
        self.is_plain = not (processors or self._samples or self._kept)
        self._random = DeviceRandom(device) if self._samples and texts.num_rows == 1 else None
        #: Of the last round, by kind and depth: `[rows, vocabulary]`.
        self._newest: dict[str, list[torch.Tensor]] = {}
        self._doubts: list[torch.Tensor] = []  # of the last round, bool: where probabilities are no numbers

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Accepted:
        """What stays of a draft, and the model's own next tokens. They are written behind the texts.

        Args:
            logits: `[rows, nodes, vocabulary]`.
        """
        tree, tokens = draft.tree, draft.tokens
        if self.is_plain:
            chosen = argmax(logits.flatten(0, 1)).view(tokens.shape)
            accepted = accept_greedy(tree, tokens, chosen)
            self._texts.write(0, accepted.tokens)
            return accepted
        self._newest, self._doubts = {kind: [] for kind in self._kept}, []
        if self._random is not None:
            self._random.start()
        if draft.probabilities is not None:
            scores, last = self._scores(logits)
            probabilities = torch.softmax(scores, dim=-1)
            self._doubts.append(probabilities[..., 0].isnan().any())  # a row of softmax is all numbers or none
            accepted = accept_by_rejection(tree, tokens, probabilities, draft.probabilities)
        elif draft.typical is not None and self._samples and self._texts.reads_no_text:
            scores, last = self._scores(logits)
            self._doubts.append(torch.softmax(scores, dim=-1)[..., 0].isnan().any())
            accepted = accept_typical(tree, tokens, scores, *draft.typical, 1.0)  # scores have been divided already
        else:
            return self._walk(tree, tokens, logits)
        rows = torch.arange(len(tokens), device=tokens.device)
        for nodes in accepted.path.unbind(1) if self._kept else ():
            self._keep(scores[rows, nodes], last[rows, nodes])
        self._texts.write(0, accepted.tokens)
        return accepted

    def _scores(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the processors make of all nodes' logits, and these, fp32 `[rows, nodes, vocabulary]`."""
        last = logits.float()
        return self._texts.process_nodes(last), last

    def take(self, counts: Sequence[int]) -> None:
        """Keeps what was asked for of each row's first so many tokens of the last round.

        Raises:
            RuntimeError: probabilities were no numbers.
        """
        if self._doubts and torch.stack(self._doubts).any().item():
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        for kind, by_depth in self._newest.items():
            for row, count in enumerate(counts):
                self._kept[kind][self._origins[row]] += [x[row] for x in by_depth[:count]]
        if self._random is not None:
            self._random.rewind(counts[0])

    def select(self, rows: Sequence[int]) -> None:
        """Only these rows go on."""
        self._origins = [self._origins[row] for row in rows]

    def kept(self, kind: str) -> tuple[torch.Tensor, ...] | None:
        """For each token `[rows, vocabulary]`, zeros for rows that have ended before; None where it was not asked for.
        """
        if kind not in self._kept:
            return None
        by_row = self._kept[kind]
        longest = max(by_row, key=len)
        return tuple(
            torch.stack([row[i] if i < len(row) else torch.zeros_like(longest[i]) for row in by_row])
            for i in range(len(longest))
        )

    def scores_with(self, row: int, count: int) -> tuple[torch.Tensor, ...] | None:
        """A row's scores, `[1, vocabulary]` a token, with so many of the last round."""
        if "scores" not in self._kept:
            return None
        newest = [x[row] for x in self._newest.get("scores", [])[:count]]
        return tuple(x[None] for x in (*self._kept["scores"][self._origins[row]], *newest))

    def _walk(self, tree: TokenTree, tokens: torch.Tensor, logits: torch.Tensor) -> Accepted:
        rows = torch.arange(len(tokens), device=tokens.device)
        newest = tokens[:, 0]
        length = self._texts.lengths[0]

        def choose(depth: int, nodes: torch.Tensor) -> torch.Tensor:
            nonlocal newest, length
            # A copy: the model may write its next logits to the same memory.
            last = logits[rows, nodes].to(copy=True, dtype=torch.float32)
            scores = self._texts.process(last, depth)
            self._keep(scores, last)
            chosen = self._sample(scores) if self._samples else argmax(scores)
            self._texts.write(depth, chosen)
            newest, length = chosen, length + 1
            return chosen

        def all_ended(ended: torch.Tensor) -> bool:
            return bool(ended.all().item()) or (self._ends is not None and self._ends(int(newest.item()), length))

        return accept_matching(tree, tokens, choose, all_ended if self._waits else None)

    def _keep(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        for kind, x in (("scores", scores), ("logits", logits)):
            if kind in self._newest:
                self._newest[kind].append(x)

    def _sample(self, scores: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(scores, dim=-1)
        if self._random is not None:
            self._random.before_draw()
        if probabilities.device.type != "cuda":
            return torch.multinomial(probabilities, num_samples=1).squeeze(1)
        self._doubts.append(probabilities[..., 0].isnan().any())
        noise = torch.empty_like(probabilities).exponential_(1)  # as `Choice` draws
        return torch.div(probabilities, noise, out=noise).argmax(dim=-1)
