"""What a quantized cache does to a model's predictions, decoded through the cache.

A query of a quantized cache sees codes or wide numbers by its position alone, so that a text may be fed in chunks:
what comes out is what decoding it token by token gives. Only a first chunk would see itself wide however long it is,
so that one is short. The same model reads the same chunks over a wide cache beside it, which is what figures compare
with; no more than a chunk's logits are held at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from ..patching import paged_cache, patched
from ..report import report

#: Tokens of a forward.
CHUNK = 256
#: So many log-probabilities are compared at once, float32.
_NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Quality:
    """A quantized cache against a wide one.

    Args:
        tokens: predictions that were compared: all of every window but of its first token.
        perplexity, wide_perplexity: over the quantized cache, and over the wide one.
        ratio: of the two.
        same_top1: how often the likeliest next token is the same.
        kl: mean divergence from the wide cache's predictions, in nats.
        kv_bytes_per_token, wide_kv_bytes_per_token: as in `hf_turbo.report`.
        protected_layers: how many layers are kept as something else than was asked for.
    """

    tokens: int
    perplexity: float
    wide_perplexity: float
    ratio: float
    same_top1: float
    kl: float
    kv_bytes_per_token: float
    wide_kv_bytes_per_token: float
    protected_layers: int


def measure(model: Any, windows: Sequence[torch.Tensor], kv_cache_dtype: str, **options: Any) -> Quality:
    """Reads each window over a quantized and over a wide cache.

    Args:
        model: patched or not; left as it was.
        windows: token ids `[length]` of at least two tokens; each is a text of its own.
        kv_cache_dtype, options: as of `hf_turbo.patch`.

    Raises:
        ValueError: no windows, or one is too short, or an option is not allowed.
        NotImplementedError: hf_turbo steps aside for this model, or it can't have a quantized cache.
    """
    if not windows or min(map(len, windows)) < 2:
        raise ValueError("give windows of at least two tokens each")
    with patched(model, **{**options, "kv_cache_dtype": None}):
        wide = paged_cache(model)  # it outlives the patch that it was made under
    with patched(model, **options, kv_cache_dtype=kv_cache_dtype), torch.no_grad():
        coded, sums = paged_cache(model), _Sums()
        for window in windows:
            for cache in (wide, coded):
                cache.reset()
            for ids, targets in _chunks(window.to(model.device), 2 * report(model).block_size):
                got = _logits(model, ids, coded)  # first: a model is judged by the first prompt that it sees
                sums.add(_logits(model, ids, wide), got, targets)
        found = report(model)
    return Quality(
        **sums.means(),
        kv_bytes_per_token=found.kv_bytes_per_token,
        wide_kv_bytes_per_token=found.wide_kv_bytes_per_token,
        protected_layers=len(found.protected_layers),
    )


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens, with nothing put around them."""
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def cut_windows(ids: Sequence[int], bos: int | None, length: int, count: int) -> list[torch.Tensor]:
    """At most `count` windows `[length]` of a text's tokens, which share nothing: BOS, if any, and what follows.

    Raises:
        ValueError: the text has no window of this length, or a window would have no prediction.
    """
    start = [] if bos is None else [bos]
    own = length - len(start)
    if length < 2 or len(ids) < own:
        raise ValueError(f"no window of {length:,} tokens in a text of {len(ids):,}: at least 2, at most all of it")
    found = min(count, len(ids) // own)
    return [torch.tensor([*start, *ids[i * own : (i + 1) * own]]) for i in range(found)]


def _chunks(window: torch.Tensor, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What to feed, `[1, n]`, and the token that follows each, `[n]`: `first` tokens, then chunks."""
    end = len(window) - 1
    edges = [0, *range(min(first, end), end, CHUNK), end]
    for start, stop in pairwise(edges):
        yield window[None, start:stop], window[start + 1 : stop + 1]


def _logits(model: Any, ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
    return model(input_ids=ids, use_cache=True, **{CACHE_NAME: cache}).logits[0]


class _Sums:
    """What is added up over predictions."""

    def __init__(self) -> None:
        self.tokens = self.same = 0
        self.wide_surprise = self.surprise = self.divergence = 0.0

    def add(self, wide: torch.Tensor, coded: torch.Tensor, targets: torch.Tensor) -> None:
        """Compares logits `[n, vocabulary]` of both caches, a few rows at a time."""
        rows = max(_NUMBERS_AT_ONCE // wide.shape[1], 1)
        for known, got, wanted in zip(*(x.split(rows) for x in (wide, coded, targets.to(wide.device))), strict=True):
            self._add(known.float().log_softmax(-1), got.float().log_softmax(-1), wanted[:, None])

    def _add(self, known: torch.Tensor, got: torch.Tensor, targets: torch.Tensor) -> None:
        self.tokens += len(targets)
        self.same += int((known.argmax(-1) == got.argmax(-1)).sum())
        self.wide_surprise -= float(known.gather(1, targets).double().sum())
        self.surprise -= float(got.gather(1, targets).double().sum())
        self.divergence += float((known.exp() * (known - got)).sum(-1).double().sum())

    def means(self) -> dict[str, Any]:
        perplexity, wide = (math.exp(x / self.tokens) for x in (self.surprise, self.wide_surprise))
        return dict(
            tokens=self.tokens,
            perplexity=perplexity,
            wide_perplexity=wide,
            ratio=perplexity / wide,
            same_top1=self.same / self.tokens,
            kl=self.divergence / self.tokens,
        )
