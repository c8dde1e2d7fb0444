"""What a quantized cache promises, computed anew at every step from all keys and values, which stay in a stock cache.

Shares the arithmetic of codes with hf_turbo, and nothing else: which tokens a query sees as codes is said here again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from hf_turbo.compat import CACHE_NAME
from hf_turbo.ops import kv_codes
from hf_turbo.ops.kv_format import KV_FORMATS

NAME = "kv_policy_of_tests"


@dataclass
class Policy:
    """What the attention function below needs to know of the model that calls it."""

    kind: str
    block_size: int
    padding: list[int] = field(default_factory=list)
    #: Of layers with a format of their own.
    kinds: dict[int, str] = field(default_factory=dict)
    #: Query tokens that saw at least one code.
    queries_with_codes: int = 0

    def recoded(self, x: torch.Tensor, layer: int, values: bool) -> torch.Tensor:
        """`[heads, tokens, dim]` with every full block as its codes say."""
        heads, tokens, dim = x.shape
        full, fmt = tokens // self.block_size * self.block_size, KV_FORMATS[self.kinds.get(layer, self.kind)]
        if not full:
            return x
        blocks = x[:, :full].reshape(heads, -1, self.block_size, dim)
        if values:
            back = kv_codes.dequantize_values(kv_codes.quantize_values(blocks, fmt), fmt, self.block_size, dim)
        else:
            back = kv_codes.dequantize_keys(kv_codes.quantize_keys(blocks, fmt), fmt, self.block_size, dim)
        return torch.cat([back.reshape(heads, full, dim).to(x.dtype), x[:, full:]], 1)


def follow_policy(model: torch.nn.Module, kind: str, block_size: int) -> torch.nn.Module:
    """Makes a stock model's attention that of a quantized cache. Give its `generate` the cache of `whole_cache`."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.config._attn_implementation = NAME
    policy = model.config.kv_policy = Policy(kind, block_size)

    def read_mask(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        rows = len(kwargs["input_ids"])
        policy.padding = [0] * rows if mask is None else (mask.cumsum(1) == 0).sum(1).tolist()

    model.register_forward_pre_hook(read_mask, with_kwargs=True)
    return model


def whole_cache() -> dict[str, DynamicCache]:
    """A stock cache that keeps what leaves a window, as an argument of `generate`."""
    return {CACHE_NAME: DynamicCache()}


@torch.no_grad()
def text_by_steps(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy tokens after a prompt that is read token by token, as chunks of it are to be seen."""
    text, cache = list(prompt), whole_cache()
    for i in range(len(prompt) + num_tokens - 1):
        logits = model(input_ids=torch.tensor([[text[i]]]), use_cache=True, **cache).logits[0, -1]
        if i + 1 == len(text):
            text.append(logits.argmax().item())
    return text[len(prompt) :]


def _attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **kwargs
):
    policy: Policy = module.config.kv_policy
    layer = module.layer_idx
    (_, heads, q_len, dim), kv_len = query.shape, key.shape[2]
    outs = []
    for row, padding in enumerate(policy.padding):
        mask = attention_mask[row, 0, :, padding:kv_len]
        q, k, v = query[row], key[row, :, padding:], value[row, :, padding:]
        position = torch.arange(kv_len - q_len, kv_len)[:, None] - padding
        block = torch.arange(kv_len - padding)[None] // policy.block_size
        coded = (block >= 1) & (block < position // policy.block_size - 1)
        if q_len == kv_len:  # a prompt sees itself as it is
            coded = torch.zeros_like(coded)
        policy.queries_with_codes += int((coded & (mask > -1e9)).any(1).sum())
        groups = heads // len(k)
        k, v, k_coded, v_coded = (
            x.repeat_interleave(groups, 0)
            for x in (k, v, policy.recoded(k, layer, values=False), policy.recoded(v, layer, values=True))
        )
        scores = torch.where(coded, q @ k_coded.transpose(1, 2), q @ k.transpose(1, 2)) * (scaling or dim**-0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.view(-1, 1, 1).expand(-1, q_len, 1)], -1)
        weights = scores.softmax(-1)[..., : kv_len - padding]
        outs.append((weights * coded) @ v_coded + (weights * ~coded) @ v)
    return torch.stack(outs).transpose(1, 2), None
