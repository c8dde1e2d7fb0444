"""Which implementation of an op runs: the torch reference on a CPU, Triton on a GPU that has it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from . import (
    cpu_int4,
    reference,
    reference_drafts,
    reference_heads,
    reference_int4,
    reference_kv,
    reference_layers,
    reference_linear,
    reference_rounds,
)
from .int4_config import MAX_STREAM_ROWS
from .metadata import AttentionMetadata, LayerKV, QuantizedKV
from .packed_weight import PackedWeight

__all__ = [
    "accept_round",
    "argmax",
    "code_addresses",
    "dequantize_blocks",
    "embedding",
    "expert_linear",
    "gated",
    "gather_kv",
    "head_block",
    "int4_dequantize",
    "int4_linear",
    "lay_repeats",
    "layer_addresses",
    "linear",
    "move_kv",
    "paged_attention",
    "permute_columns",
    "quantize_blocks",
    "repeat_text",
    "rms_norm",
    "rotary_angles",
    "rotary_store_kv",
    "rotate",
    "serves_linear",
    "serves_norm",
    "store_kv",
    "token_addresses",
    "tree_tokens",
    "uses_triton",
]


#: The longest rows whose columns `rms_norm` takes into another order.
MAX_COLUMNS_TO_ORDER = 16384
#: The most rows whose outputs `int4_linear` puts in other places as it stores them.
MAX_ROWS_TO_PLACE = MAX_STREAM_ROWS
#: The most rows whose `head_block` is one launch.
_MAX_HEAD_ROWS = 64


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Whether the Triton kernels serve tensors on this device."""
    return device.type == "cuda" and _has_triton()


@cache
def _kernels(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)  # triton is imported when a kernel is first needed


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: LayerKV | QuantizedKV,
    metadata: AttentionMetadata,
    keep_last: int | None = None,
) -> None:
    """Writes new keys and values into their blocks; see `reference.store_kv` and `reference_kv.store_kv`."""
    if isinstance(kv, QuantizedKV):
        module = _kernels("quantize_kv") if uses_triton(k.device) else reference_kv
    else:
        module = _kernels("store_kv") if uses_triton(k.device) else reference
    module.store_kv(k, v, kv, metadata, keep_last)


def paged_attention(
    q: torch.Tensor,
    kv: LayerKV | QuantizedKV,
    metadata: AttentionMetadata,
    softmax_scale: float,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new queries over a filled cache; see `reference.paged_attention`."""
    if isinstance(kv, QuantizedKV):
        module = _kernels("quantized_attention") if uses_triton(q.device) else reference_kv
    else:
        module = _kernels("paged_attention") if uses_triton(q.device) else reference
    return module.paged_attention(q, kv, metadata, softmax_scale, logit_softcap, sinks)


def gather_kv(kv: LayerKV | QuantizedKV, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense keys and values; see `reference.gather_kv` and `reference_kv.gather_kv`."""
    if isinstance(kv, QuantizedKV):
        return reference_kv.gather_kv(kv, *args, **options)
    return reference.gather_kv(kv, *args, **options)


def quantize_blocks(layers: Sequence[QuantizedKV], pairs: reference_kv.Pairs) -> None:
    """Writes the codes of full wide blocks; see `reference_kv.quantize_blocks`."""
    _module_of(layers).quantize_blocks(layers, pairs)


def dequantize_blocks(layers: Sequence[QuantizedKV], pairs: reference_kv.Pairs) -> None:
    """Makes wide blocks of codes; see `reference_kv.dequantize_blocks`."""
    _module_of(layers).dequantize_blocks(layers, pairs)


def _module_of(layers: Sequence[QuantizedKV]) -> ModuleType:
    return _kernels("quantize_kv") if uses_triton(layers[0].wide.k_segments[0].device) else reference_kv


def code_addresses(layers: Sequence[QuantizedKV]) -> Any:
    """`quantize_kv.CodeAddresses` of layers on GPUs."""
    return _kernels("quantize_kv").CodeAddresses(layers)


def layer_addresses(layers: Sequence[LayerKV]) -> Any:
    """`copy_blocks.LayerAddresses` of layers on a GPU; None where they can't be copied together."""
    addresses = _kernels("copy_blocks").LayerAddresses
    return addresses(layers) if addresses.serve(layers) else None


def token_addresses(layers: Sequence[LayerKV]) -> Any:
    """`move_kv.TokenAddresses` of layers on GPUs."""
    return _kernels("move_kv").TokenAddresses(layers)


def move_kv(
    layers: Sequence[LayerKV],
    block_tables: torch.Tensor,
    bases: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Moves tokens within their sequences, once; see `reference.move_kv`. Again and again: `token_addresses`."""
    module = _kernels("move_kv") if uses_triton(bases.device) else reference
    module.move_kv(layers, block_tables, bases, path, counts)


def rotary_store_kv(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Norms of heads, rotary embedding and `store_kv` in one; see `reference_layers.rotary_store_kv`."""
    module = _kernels("rotary") if uses_triton(q.device) else reference_layers
    return module.rotary_store_kv(q, *args, **options)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the largest of each row of `[rows, columns]`, the first of equals."""
    if _kernels_take_logits(x):
        return _kernels("argmax").argmax(x)
    return torch.argmax(x, dim=-1)


def _kernels_take_logits(x: torch.Tensor) -> bool:
    """Whether the kernels that choose among the numbers of a row take `[..., columns]` of this kind."""
    return uses_triton(x.device) and x.stride(-1) == 1 and x.dtype != torch.float64


def accept_round(logits: torch.Tensor, *args: Any, **options: Any) -> reference_rounds.Round:
    """What follows the forward of a draft; see `reference_rounds.accept_round`."""
    module = _kernels("accept_round") if _kernels_take_logits(logits) else reference_rounds
    return module.accept_round(logits, *args, **options)


def head_block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A residual block of all Medusa heads; see `reference_heads.head_block`."""
    is_for_kernels = uses_triton(x.device) and not torch.is_grad_enabled() and 1 <= len(x) <= _MAX_HEAD_ROWS
    # Under autocast, which torch's products follow, the weights may be of another dtype.
    if is_for_kernels and x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype:
        return _kernels("head_block").head_block(x, weight, bias)
    return reference_heads.head_block(x, weight, bias)


def tree_tokens(
    logits: torch.Tensor,
    roots: torch.Tensor,
    heads: torch.Tensor,
    ranks: torch.Tensor,
    num: int,
    out: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The tokens of a tree of heads' guesses; see `reference_heads.tree_tokens`."""
    if _kernels_take_logits(logits) and num <= reference_drafts.MAX_RANKS:
        return _kernels("tree_tokens").tree_tokens(logits, roots, heads, ranks, num, out)
    best = logits.topk(num, dim=-1).indices  # quicker on a CPU than the oracle's sort; of equals any
    return reference_heads.place_ranks(best, roots, heads, ranks, out)


def repeat_text(text: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """What followed the last time that texts ended as they do; see `reference_drafts.repeat_text`."""
    module = _kernels("repeat_text") if uses_triton(text.device) else reference_drafts
    return module.repeat_text(text, *args, **options)


def lay_repeats(text: torch.Tensor, *args: Any) -> None:
    """Lays what followed the last time over other drafts; see `reference_drafts.lay_repeats`."""
    module = _kernels("repeat_text") if uses_triton(text.device) else reference_drafts
    module.lay_repeats(text, *args)


def rotate(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Rotary embedding; see `reference_layers.rotate`."""
    module = _kernels("rotate") if uses_triton(x.device) else reference_layers
    return module.rotate(x, *args, **options)


def rotary_angles(
    frequencies: torch.Tensor, positions: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary embedding; see `reference_layers.rotary_angles`."""
    module = _kernels("angles") if uses_triton(positions.device) else reference_layers
    return module.rotary_angles(frequencies, positions, **options)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding; see `reference_layers.embedding`."""
    module = _kernels("embedding") if uses_triton(weight.device) else reference_layers
    return module.embedding(weight, ids)


def rms_norm(x: torch.Tensor, *args: Any, **options: Any) -> Any:
    """An RMS norm, after a residual's sum if asked; see `reference_layers.rms_norm`."""
    module = _kernels("norm") if uses_triton(x.device) else reference_layers
    return module.rms_norm(x, *args, **options)


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`act(gate) * up`; see `reference_layers.gated`."""
    module = _kernels("activation") if uses_triton(gate.device) else reference_layers
    return module.gated(gate, up, kind, out=out)


def linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor] | Sequence[PackedWeight], *args: Any, **options: Any
) -> torch.Tensor:
    """Products of a few rows with one to three weights; see `reference_linear.linear`."""
    if isinstance(weights[0], PackedWeight):
        return int4_linear(x, weights, *args, **options)  # type: ignore[arg-type]  # all are, or none
    module = _kernels("linear") if uses_triton(x.device) else reference_linear
    return module.linear(x, weights, *args, **options)


def expert_linear(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Products of rows with the weights of their experts; see `reference_linear.expert_linear`."""
    module = _kernels("linear") if uses_triton(x.device) else reference_linear
    return module.expert_linear(x, *args, **options)


def serves_linear(
    rows: int,
    weights: Sequence[torch.Tensor] | Sequence[PackedWeight],
    dtype: torch.dtype,
    device: torch.device,
    *,
    activation: bool,
) -> bool:
    """Whether `linear` is the faster way there."""
    if not uses_triton(device):
        return False
    if isinstance(weights[0], PackedWeight):
        return _kernels("int4_linear").supports(rows, weights, dtype, activation=activation)
    return _kernels("linear").supports(rows, weights, dtype, device, activation=activation)


def serves_norm(rows: int, weights: Sequence[torch.Tensor], device: torch.device, *, activation: bool) -> bool:
    """Whether `linear`, where it serves these weights, is faster with an RMS norm than after one."""
    return uses_triton(device) and _kernels("linear").supports_norm(rows, weights, device, activation=activation)


def int4_linear(x: torch.Tensor, weights: Sequence[PackedWeight], *args: Any, **options: Any) -> torch.Tensor:
    """Linears of one to three quantized weights; see `int4_linear.int4_linear`."""
    is_for_kernels = uses_triton(x.device) and all(w.qweight.dtype == torch.int32 for w in weights)
    module = _kernels("int4_linear") if is_for_kernels else cpu_int4
    return module.int4_linear(x, weights, *args, **options)


def permute_columns(x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Columns in another order; see `permute_columns.permute_columns`."""
    module = _kernels("permute_columns") if uses_triton(x.device) else reference_int4
    return module.permute_columns(x, perm)


def int4_dequantize(weight: PackedWeight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight itself; see `reference_int4.dequantize`."""
    is_for_kernels = uses_triton(weight.qweight.device) and weight.qweight.dtype == torch.int32
    module = _kernels("int4_linear") if is_for_kernels else cpu_int4
    return module.dequantize(weight, columns, dtype)
