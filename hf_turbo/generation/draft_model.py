"""Drafts of a smaller model, over a paged cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..cache.forward_plan import DraftsUnsuited
from ..cache.paged_cache import PagedCache
from ..cache.token_tree import TokenTree
from ..compat import CACHE_NAME
from ..ops.dispatch import argmax
from .acceptance import Accepted, sample
from .drafts import Draft, DraftContext, chain_sizes, check_num_tokens, cost_to_verify
from .expectation import OfChains
from .texts import Texts
from .tree_steps import TreeSteps

#: Vocabularies that differ by no more are taken for one with different padding.
MAX_PADDING = 1024


class DraftModel:
    """A smaller model with the same tokenizer proposes a chain of tokens.

    With sampling the drafts are drawn from the draft model's probabilities after the same temperature and filters, and
    accepted by rejection sampling, so that the text's distribution is the large model's (arXiv:2211.17192).

    Args:
        model: a Transformers decoder. Patched while it drafts, and as it was in between.
        num_tokens: drafted at most, 1 to 63.
        adaptive: fewer tokens, or none, where few are accepted.

    Raises:
        ValueError: `num_tokens` is not allowed.
    """

    def __init__(self, model: Any, num_tokens: int = 7, adaptive: bool = True) -> None:
        self.model, self.num_tokens, self.adaptive = model, check_num_tokens(num_tokens), adaptive

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        return f"DraftModel({kind} at {id(self.model):#x}, num_tokens={self.num_tokens}, adaptive={self.adaptive})"

    def attach(self, model: Any) -> DraftModelDrafter:
        """Sees whether the two models' vocabularies fit.

        Raises:
            ValueError: they don't.
        """
        sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (model, self.model)]
        if abs(sizes[0] - sizes[1]) > MAX_PADDING:
            raise ValueError(
                f"the draft model has a vocabulary of {sizes[1]} tokens, the model one of {sizes[0]}: they need the "
                "same tokenizer. With another one pass assistant_model, tokenizer and assistant_tokenizer to generate()"
            )
        mine, its = (sum(x.nbytes for x in (*m.parameters(), *m.buffers())) for m in (self.model, model))
        return DraftModelDrafter(self.model, self.num_tokens, self.adaptive, mine / max(its, 1))


class DraftModelDrafter:
    """A draft model whose vocabulary fits.

    Args:
        share: its weights over those of the model that verifies.
    """

    decides = False
    reads_hidden = False

    def __init__(self, model: Any, num_tokens: int, adaptive: bool, share: float) -> None:
        self.model, self.adaptive, self._share = model, adaptive, share
        self.sizes = chain_sizes(num_tokens, adaptive)
        #: A context in which the model is patched; set by who can patch models.
        self.borrowed: Any = None

    def cost(self, size: int) -> float:
        """Of so many steps of the draft model, by its share of the weights, and of verifying their tokens."""
        return cost_to_verify(size + 1) + size * self._share

    def expectation(self) -> OfChains:
        """Of the longest chain."""
        return OfChains(self.sizes[-1])

    def tree_of(self, size: int) -> TokenTree:
        """A chain."""
        return TokenTree.chain(size)

    def serves(self, speculation: Any) -> bool:
        """Whether it is what such a `DraftModel` asks for."""
        return speculation.model is self.model

    def release(self) -> None:
        """Gives back what the draft model holds, where it is patched only while it drafts."""
        if self.borrowed is not None:
            self.borrowed.release()

    def patched_for(self, model: Any) -> ExitStack:
        """Has the draft model patched until what is returned is closed.

        Args:
            model: that verifies.

        Raises:
            DraftsUnsuited: hf_turbo steps aside for the draft model, or that is on another device.
        """
        if self.model.device != model.device:
            raise DraftsUnsuited(f"the draft model is on {self.model.device}, the model on {model.device}")
        with ExitStack() as stack:
            if self.borrowed is not None:
                stack.enter_context(self.borrowed)
            if reason := self.model._hf_turbo.model_reason:
                raise DraftsUnsuited(f"hf_turbo steps aside for the draft model: {reason}")
            return stack.pop_all()

    def begin(self, context: DraftContext) -> _Session:
        """Computes the prompts.

        Raises:
            DraftsUnsuited: the prompt is no tokens, or as of `patched_for`.
        """
        if context.texts.num_prompt == 0:
            raise DraftsUnsuited("a draft model reads tokens, and the prompt has none")
        with self.patched_for(context.model) as stack:
            session = _Session(self.model, self.model._hf_turbo.new_cache(), context)
            session.on_close = stack.pop_all()
        return session


class _Session:
    """A chain of decode steps for each draft.

    The first of them takes the last two tokens of each row: after a draft that was accepted as a whole the last token
    but one has not been in the draft model either.
    """

    is_stale = False

    def __init__(self, model: Any, cache: PagedCache, context: DraftContext) -> None:
        self.on_close = ExitStack()
        self._vocabulary = context.model.config.get_text_config(decoder=True).vocab_size
        self._own_vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._samples = context.samples and context.draws
        self._processes = context.draws
        cache.activate_past_recording()  # a rejected draft takes the cache back
        texts, mask = context.texts, context.attention_mask
        prompt = torch.cat([texts.row(row) for row in range(texts.num_rows)])
        if mask is None:
            mask = torch.ones_like(prompt)
        # The last token of the prompt comes with the first draft; a prompt of one token has nothing before it.
        kwargs = {"attention_mask": mask, "use_cache": True, CACHE_NAME: cache, "logits_to_keep": 1}
        kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        outputs = model(input_ids=self._known(prompt), **kwargs)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
        first = prompt[:, -1:]
        self._steps = TreeSteps(model, kwargs, self._known(first), context.max_new, alone=True)

    def propose(self, size: int, texts: Texts) -> Draft | None:
        # All of a row's text but its last two tokens is in the cache, and perhaps what has been rejected.
        known = [length - pad - 2 for length, pad in zip(texts.lengths, self._padding(texts), strict=True)]
        self._steps.keep([n - length for n, length in zip(known, self._steps.lengths, strict=True)])
        tokens, drawn = texts.last_two, []
        columns = [texts.last]
        for offset in range(size):
            tree = TokenTree.chain(tokens.shape[1] - 1)
            logits = self._steps.forward(tree, self._known(tokens))[:, -1]
            self._steps.keep([tree.num_nodes] * texts.num_rows, may_shrink=True)
            token, probabilities = self._choose(logits, texts, offset)
            texts.write(offset, token)
            columns.append(token)
            drawn.append(probabilities)
            tokens = token.unsqueeze(1)
        by_node = None
        if self._samples:  # the last node has no children
            by_node = torch.stack([*drawn, torch.zeros_like(drawn[0])], dim=1)
        return Draft(TokenTree.chain(size), torch.stack(columns, dim=1), size * texts.num_rows, by_node)

    def begin_ahead(self, newest: torch.Tensor | None = None) -> None:
        pass

    def learn(self, accepted: Accepted, num_nodes: int) -> None:
        pass

    def miss(self) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self._steps.select(rows)

    def close(self) -> None:
        self._steps.close()
        self._steps.cache.reset()
        self.on_close.close()

    def _padding(self, texts: Texts) -> list[int]:
        """Leading columns of each row that are no tokens of it."""
        return self._steps.cache.layout.left_padding()

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens that the draft model has; one that it lacks becomes its first."""
        return torch.where(tokens < self._own_vocabulary, tokens, 0)

    def _choose(self, logits: torch.Tensor, texts: Texts, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's next drafted token, int64 `[rows]`, and what it was drawn from, fp32 `[rows, vocabulary]`."""
        missing = self._vocabulary - logits.shape[-1]
        logits = logits[:, : self._vocabulary].float()
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        if self._processes:
            logits = texts.process(logits, offset)
        if not self._samples:
            return argmax(logits), logits
        probabilities = torch.softmax(logits, dim=-1)
        return sample(probabilities)[:, 0], probabilities
