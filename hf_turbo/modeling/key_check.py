"""Whether a layer's keys can be stored in few bits, judged at a prompt by what becomes of its attention.

How far keys are from what their codes say tells little: an error of the same size is lost in one layer's scores and
decides another's. So some queries and keys of a prompt are taken, the keys are quantized, and what is measured is how
far the queries' attention goes astray: the divergence of the distributions, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..ops.kv_codes import dequantize_keys, quantize_keys
from ..ops.kv_format import KV_FORMATS, KVFormat

#: Keys and queries of a prompt that are looked at, at most: a bounded sample of one row, whatever the prompt.
SAMPLE_KEYS = 512
SAMPLE_QUERIES = 64
#: Tokens of a prompt that a verdict takes, a block of the default size. Within 64, keys with biases that rotate have
#: shown their range: a third of what 640 tokens give, or more (half, near the limit); within 32, down to a twentieth.
MIN_TOKENS = 64
#: Divergence up to which keys can take a format, in nats. Of int4, over the layers of real models at four texts:
#: SmolLM2-135M median 0.01, worst 0.07; Gemma-3-270m median 0.01, worst 0.04 (scales for 64 tokens; for 32 they are
#: less). `benchmarks/key_bias.py`, perplexities by that of the wide cache:
#:
#:     biases of the keys          first, last layer     int4 everywhere     int8 where the limit is passed
#:     none                        0.001, 0.007          1.001               1.001 (nowhere)
#:     30 times, 3 channels        0.005, 0.022          1.002               1.002 (nowhere)
#:     30 times, 4 channels        0.034, 0.096          1.004               1.004 (nowhere)
#:     300 times, 1 channel        0.093, 0.75           1.006               1.003 (last)
#:     300 times, 3 channels       0.76, 2.5             1.107               1.009 (both)
#:     1000 times, 1 channel       0.79, 4.1             1.036               1.007 (both)
#:
#: Where the limit is passed int8 gives 1/28 to 1/72 of int4's figures, fp8 about the same: the last two cases cost fp8
#: 1.117 and 1.038, and 1.005 and 1.003 with int8 where the limit is passed.
LIMIT = 0.15
_FALLBACK = "int8"


@dataclass(frozen=True)
class KeyVerdict:
    """What a layer's keys are to be stored as.

    Args:
        format: name of the format.
        divergences: of each format that was tried, see `divergence`.
    """

    format: str
    divergences: dict[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the keys can take the format; if not, it is the best there is."""
        return self.divergences[self.format] <= LIMIT


def check_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    wanted: str,
    block_size: int,
    scale: float,
    lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> KeyVerdict | None:
    """The format `wanted` if the layer's keys can take it, else int8; if they can't take that either, the better one.

    Waits for the device: once if the keys can take the format, else twice.

    Args:
        query: `[batch, num_heads, tokens, dim]` of a prompt with nothing before it, after rotary embedding.
        key: the same with `num_kv_heads`; `dim` is even.
        wanted: a name in `KV_FORMATS`.
        scale, sliding_window, softcap: of the layer's attention.
        lengths: real tokens at the end of each row, whose others are padding; None: all are real.

    Returns:
        None if no row has `MIN_TOKENS` tokens: nothing can be said.
    """
    lengths = [key.shape[2]] * len(key) if lengths is None else lengths
    length = max(lengths, default=0)
    if length < MIN_TOKENS:
        return None
    row = lengths.index(length)
    q, k = query[row, :, -length:], key[row, :, -length:]

    def tried(name: str) -> float:
        return float(divergence(q, k, KV_FORMATS[name], block_size, scale, sliding_window, softcap))

    found: dict[str, float] = {}
    for name in (wanted, _FALLBACK):
        found[name] = tried(name)
        if found[name] <= LIMIT:
            return KeyVerdict(name, found)
    return KeyVerdict(min(found, key=lambda name: found[name]), found)


@torch.no_grad()
def divergence(
    query: torch.Tensor,
    key: torch.Tensor,
    fmt: KVFormat,
    block_size: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Mean Kullback-Leibler divergence from a layer's attention to that with quantized keys, over heads and queries.

    Of the last tokens, whole blocks are taken, `SAMPLE_KEYS` tokens at most; of their second half, evenly spread
    queries. All of the sample's keys are quantized: a cache keeps those around a query wide, but every one of them gets
    older, and so the figure does not depend on how long the prompt is. A shorter prompt than a block is one block.

    Args:
        query: `[num_heads, tokens, dim]`; key: `[num_kv_heads, tokens, dim]`. The tokens are a text's last ones.

    Returns:
        A float32 scalar on their device, finite for finite queries and keys.
    """
    tokens = key.shape[1]
    size = min(block_size, tokens)
    kept = min(tokens, max(SAMPLE_KEYS, size)) // size * size
    step = -(-kept // (2 * SAMPLE_QUERIES))
    places = torch.arange(kept - 1, kept // 2 - 1, -step, device=key.device)
    q = query[:, tokens - kept :].index_select(1, places).float().unflatten(0, (len(key), -1))
    k = key[:, tokens - kept :].float()
    distance = places[:, None] - torch.arange(kept, device=key.device)
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window

    def log_probabilities(keys: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("hgqd,hkd->hgqk", q, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return scores.masked_fill_(hidden, torch.finfo(scores.dtype).min).log_softmax(-1)

    wide, coded = log_probabilities(k), log_probabilities(_recoded(k, fmt, size))
    return (wide.exp() * (wide - coded)).sum(-1).mean()


def _recoded(keys: torch.Tensor, fmt: KVFormat, block_size: int) -> torch.Tensor:
    """`[heads, tokens, dim]`, whole blocks, as their codes say."""
    codes = quantize_keys(keys.unflatten(1, (-1, block_size)), fmt)
    return dequantize_keys(codes, fmt, block_size, keys.shape[2]).flatten(1, 2)
