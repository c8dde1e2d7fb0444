"""The "hf_turbo" attention and mask functions of Transformers' attention interface.

The mask function answers with a `ForwardPlan` in the mask's place; the cache stores the new keys by it and marks
them with their layer; the attention function finds both and reads the blocks. Where either is missing (training, a
stock cache, a 4D mask, ...) the model's own attention runs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..cache.coded_group import CodedGroup
from ..cache.forward_plan import ForwardPlan, PackedUnsuited
from ..cache.paged_cache import LAYER_ATTRIBUTE, MaskLength, PagedLayer
from ..cache.step_cache import StepLayer, StepUnsuited
from ..ops import dispatch, prompt
from ..ops.deferred import DeferredMode
from .key_check import check_keys
from .step_attention import attend_step

NAME = "hf_turbo"

logger = logging.getLogger("hf_turbo")

#: In a captured step, or one that verifies drafts: a mask that is made but that no layer may use.
_OTHER_MASK = object()

#: Arguments that reach an attention function without changing what it computes here.
_HARMLESS = {
    "position_ids", "position_embeddings", "use_cache", "output_hidden_states", "return_dict", "cache_position",
    "past_key_values", "cache", "past_key_value", "sliding_window", "logits_to_keep", "kwargs", "output_router_logits",
    "is_causal", "deterministic",
}  # fmt: skip


class AttentionName(str):
    """The attention implementation's name on a patched model's config, and the one it stands in for.

    A plain string to Transformers. It travels with the config through copies and pickles and is not saved.
    """

    base: str
    prompt_attention: str
    #: Why this model can't use the paged cache after all: found out at its first prompt.
    unsuited: str | None = None

    def __new__(cls, base: str, prompt_attention: str = "auto") -> AttentionName:
        name = super().__new__(cls, NAME)
        name.base, name.prompt_attention = base, prompt_attention
        return name

    def __reduce__(self) -> tuple[type[AttentionName], tuple[str, str]]:
        return AttentionName, (self.base, self.prompt_attention)


def register() -> None:
    """Adds the two functions to Transformers' registries, under our own name."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """A `ForwardPlan` when the keys are in a `PagedCache` and the mask is causal or a window; else the stock mask."""
    stock_mask = partial(
        _stock_mask,
        batch_size=batch_size, q_length=q_length, kv_length=int(kv_length), q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, device=device, config=config, **kwargs,
    )  # fmt: skip
    if not isinstance(kv_length, MaskLength) or config._attn_implementation.unsuited:
        return stock_mask()
    layer: PagedLayer | StepLayer = kv_length.layer
    plain = allow_is_causal_skip and not use_vmap and _is_causal_window(mask_function, local_size)
    fits = plain and layer.group.sliding_window == local_size
    if isinstance(layer, StepLayer):
        return layer.group.plan if fits else _OTHER_MASK
    layout = layer.group.layout
    if layout.unsuited is not None and not fits:
        return _OTHER_MASK
    if layout.tree is not None:
        return layer.group.begin_tree(layer.length, layout.tree, torch.device(device))
    if layout.packed is not None:
        return layer.group.begin_packed(layer.length, layout.packed, batch_size, torch.device(device))
    if not fits:
        return stock_mask()
    if not layout.read_padding(attention_mask, batch_size, layer.length, q_length):
        return stock_mask()
    plan = layer.group.begin(layer.length, batch_size, q_length, torch.device(device), dense=False)
    plan.stock_mask = stock_mask
    return plan


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of `query` `[batch, num_heads, q_len, head_dim]` over the cache that `key` was stored in.

    Returns:
        `[batch, q_len, num_heads, v_head_dim]`, and None or the weights where the model's own attention ran.
    """
    layer: PagedLayer | StepLayer | None = getattr(key, LAYER_ATTRIBUTE, None)
    if isinstance(layer, StepLayer):
        if attention_mask is _OTHER_MASK:
            raise StepUnsuited("the mask is not the causal one, or not of the layers' window")
        if attention_mask is not layer.group.plan or getattr(value, LAYER_ATTRIBUTE, None) is not layer:
            raise StepUnsuited("a layer attends to something else than what it caches")
        if dropout or _unusual(kwargs):
            raise StepUnsuited("dropout, or an attention argument that is not known")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_step(layer, query, key, value, scale, softcap, s_aux), None  # type: ignore[arg-type]
    if DeferredMode.is_active():
        with DeferredMode.set_aside() as mode:
            query, key, value = (mode.tensor(x) for x in (query, key, value))
            return attention(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs)
    plan = attention_mask if isinstance(attention_mask, ForwardPlan) else None
    unchanged = layer is not None and layer.group.plan is plan and getattr(value, LAYER_ATTRIBUTE, None) is layer
    unsuited = None if layer is None else layer.group.layout.unsuited
    if unsuited is None and plan is not None:
        unsuited = plan.unsuited
    if unsuited is not None and (plan is None or plan.unsuited is None or not unchanged):
        raise unsuited("a mask is not the causal one, or a layer attends to something else than what it caches")
    if plan is not None and not unchanged:
        # What is in the cache is not what this layer attends to. In a first prompt it still has all it needs.
        reason = f"{type(module).__name__} changes keys or values after it has cached them, or reads another's"
        if plan.metadata.code_tables is not None:
            raise NotImplementedError(f"kv_cache_dtype can't be had for this model: {reason}")
        _name(module).unsuited = reason
        if plan.start > 0:
            raise NotImplementedError(f"{reason}; start from an empty cache")

    def stock() -> tuple[torch.Tensor, torch.Tensor | None]:
        k, v, mask = key, value, attention_mask
        if layer is not None and layer.group.plan is not None and (plan is None or unchanged):
            k, v = layer.dense_of_plan(layer.group.plan, key, value)
        if plan is not None and plan.stock_mask is not None:
            mask = plan.stock_mask()
        variants = {name: x for name, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None}
        own = _stock_attention(module)
        return own(module, query, k, v, mask, scaling=scaling, dropout=dropout, **variants, **kwargs)

    if layer is None or plan is None or not unchanged or dropout or _unusual(kwargs):
        if unsuited is not None:
            raise unsuited("dropout, or an attention argument that is not known")
        return stock()
    if query.dtype != key.dtype:  # under autocast
        query = query.to(key.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    metadata = plan.metadata.on(query.device)
    if metadata.is_fresh:
        _settle_format(layer, plan, query, key, value, scale, softcap)
        out = prompt.attend_prompt(
            query, key, value, plan.pack, metadata, scale, softcap, s_aux, _name(module).prompt_attention
        )
        if out is None and metadata.code_tables is not None:
            out = prompt.attend_in_blocks(
                plan.pack(query), plan.pack(key), plan.pack(value), metadata, scale, softcap, s_aux
            )
        blocks = layer.group.table.group
        if out is not None:
            blocks.prompts_read_blocks = bool(blocks.prompts_read_blocks)
            return (out if out.dim() == 4 else plan.unpack(out)).contiguous(), None
        blocks.prompts_read_blocks = True
        if plan.keep_last is not None:  # the prompt was not stored whole, as no layer had needed it so far
            return stock()
    if unsuited is PackedUnsuited:
        _settle_format(layer, plan, query, key, value, scale, softcap)
    out = dispatch.paged_attention(plan.pack(query), layer.kv(), metadata, scale, softcap, s_aux)
    return plan.unpack(out).contiguous(), None


def _settle_format(
    layer: PagedLayer,
    plan: ForwardPlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> None:
    """Settles what a layer's codes are, at the first prompt that is long enough to tell, which then is stored anew.

    The cache must hold nothing else: its codes would be of another format.
    """
    blocks = layer.group.table.group
    if not isinstance(blocks, CodedGroup) or blocks.is_settled(layer.layer_idx):
        return
    if any(layer.group.layout.lengths(plan.start)):
        return
    lengths, window = plan.metadata.q_lens_cpu, blocks.sliding_window
    if plan.unsuited is PackedUnsuited:  # the longest of the prompts that lie in a row
        place = lengths.index(max(lengths))
        start = sum(lengths[:place])
        q, k = (plan.pack(x)[start : start + lengths[place]].transpose(0, 1)[None] for x in (query, key))
        verdict = check_keys(q, k, blocks.wanted, blocks.block_size, scale, None, window, softcap)
    else:
        verdict = check_keys(query, key, blocks.wanted, blocks.block_size, scale, lengths, window, softcap)
    if verdict is None:
        return
    if verdict.format != blocks.wanted:
        found = ", ".join(f"{name} {nats:.2g}" for name, nats in verdict.divergences.items())
        logger.warning(
            "hf_turbo keeps the keys and values of layer %d in %s%s; its attention would change by, in nats: %s",
            layer.layer_idx, verdict.format, "" if verdict.fits else ", which is too little, too", found,
        )  # fmt: skip
    blocks.settle(layer.layer_idx, verdict.format)
    layer.store_anew(plan, key, value)


def _is_causal_window(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask function is the causal one, within `window` if given: by what it answers, not by its name."""
    if window is None:
        return mask_function is causal_mask_function
    queries = torch.tensor([2 * window + 3, 5 * window + 1]).repeat_interleave(4)
    steps = torch.tensor([-window, -window + 1, 0, 1]).repeat(2)
    first = torch.tensor(0)
    return mask_function(first, first, queries, queries + steps).tolist() == [False, True, True, False] * 2


def _unusual(kwargs: dict[str, Any]) -> bool:
    """Whether an argument may change the result in a way that the kernels don't know."""
    if kwargs.get("is_causal") is False or kwargs.get("output_attentions"):
        return True
    for name, x in kwargs.items():
        if name not in _HARMLESS and x is not None and not isinstance(x, bool):
            _say_once(f"the attention argument {name} is not known; the model's own attention runs")
            return True
    return False


@cache
def _say_once(reason: str) -> None:
    logger.warning("hf_turbo steps aside: %s", reason)


def _name(module: Any) -> AttentionName:
    return module.config._attn_implementation


def _stock_mask(config: Any, **kwargs: Any) -> Any:
    """The mask of the implementation that ours stands in for."""
    base = config._attn_implementation.base
    if base not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None  # as Transformers does for an implementation without a mask function
    return ALL_MASK_ATTENTION_FUNCTIONS[base](config=config, **kwargs)


def _stock_attention(module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function that ours stands in for."""
    modules = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    eager = next((f for m in modules if (f := getattr(m, "eager_attention_forward", None))), None)
    base = _name(module).base
    if base == "eager" and eager is None:
        raise NotImplementedError(
            f"{type(module).__name__} has no eager_attention_forward beside it; use another attn_implementation"
        )
    return ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)  # type: ignore[arg-type]
