"""Rules that compute several deferred operations in one kernel: what a decoder's layer is made of.

Projections of the same input become one launch over several weights (no weight is copied), with the activation between
them, the residual after them or, of short rows, the norm before them folded in, where the kernel is faster than cuBLAS;
otherwise products go to torch, and the norm after them takes the residual's sum with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..ops import dispatch
from ..ops.deferred import PRODUCTS, Deferred, DeferredMode, Value, aten, identity, whole
from ..ops.norm_spec import RMSNorm
from ..ops.packed_weight import PackedWeight
from .patterns import (
    Product,
    match_gated,
    match_product,
    match_rms_norm,
    match_rotary,
    match_slice,
    match_sum,
    pending,
    product_of,
)
from .rotary_angles import angles_rule

#: Weights that one launch takes.
_MAX_WEIGHTS = 3
#: Up to so many indices torch's kernel for embeddings goes through them one by one.
_FEW_INDICES = 16


def product_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """A product, and with it what else is waiting for the same input."""
    if value.func not in PRODUCTS:
        return None
    product = product_of(value)
    if product is None:
        return None
    if not _serves(mode, [product]):
        return None
    others = siblings(mode, product)[: _MAX_WEIGHTS - 1]
    if not _serves(mode, [product, *others]):
        others = []
    products = [product, *others]
    out = _launch(mode, products)
    parts = out.split([p.size for p in products], dim=1)
    for other, part in zip(others, parts[1:], strict=True):
        mode.finish(other.value, part)
    return parts[0]


def siblings(mode: DeferredMode, product: Product) -> list[Product]:
    """The other products that wait for the same input."""
    others = [product_of(value) for value in mode.products_of(product.left) if value is not product.value]
    return [p for p in others if p is not None and p.kind == product.kind]


def residual_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """`residual + product`."""
    terms = match_sum(value)
    if terms is None:
        return None
    for residual, x in (terms, terms[::-1]):
        product = match_product(x)
        if product is not None and _serves(mode, [product]) and not siblings(mode, product):
            rows = mode.tensor(residual).reshape(product.value.meta.shape)
            return _launch(mode, [product], residual=rows).view(value.meta.shape)
    return None


def gated_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """`act(gate) * up`, from their products where these are two products of one input, or halves of one."""
    found = match_gated(value)
    if found is None:
        return None
    gate, up, kind = found
    products = gate_and_up(gate, up)
    if products is not None and _serves(mode, products, activation=True):
        return _launch(mode, products, activation=kind).view(value.meta.shape)
    shape = value.meta.shape
    gate_rows, up_rows = (mode.tensor(x).reshape(-1, shape[-1]) for x in (gate, up))
    return dispatch.gated(gate_rows, up_rows, kind).view(shape)


def norm_rule(mode: DeferredMode, value: Value) -> torch.Tensor | tuple[torch.Tensor, None] | None:
    """An RMS norm, with the residual's sum before it where that is waiting, too."""
    is_fused = value.func is aten._fused_rms_norm.default
    if not is_fused and value.func not in (aten.mul.Tensor, aten._to_copy.default):
        return None
    found = match_rms_norm(Deferred(value, 0 if is_fused else None, mode.device))
    if found is None:
        return None
    normed = _normed(mode, *found)
    return (normed.view(found[0].shape), None) if is_fused else normed.view(value.meta.shape)


def _normed(
    mode: DeferredMode, source: torch.Tensor, norm: RMSNorm, perm: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of a tensor's rows, `[rows, columns]`, and with it the residual's sum that the tensor may be."""
    size = source.shape[-1]
    found = _sum_before(mode, source)
    if found is None:
        return dispatch.rms_norm(mode.tensor(source).reshape(-1, size), norm, perm=perm)
    total, terms = found
    # A sum last: what the other term is computed from may take it along with a norm.
    ordered = sorted(terms, key=lambda x: pending(x, aten.add.Tensor) is not None)
    b, a = (mode.tensor(x).reshape(-1, size) for x in ordered)
    normed, added = dispatch.rms_norm(b, norm, residual=a, perm=perm)
    mode.finish(total, added.view(total.meta.shape))
    return normed


def _sum_before(mode: DeferredMode, source: torch.Tensor) -> tuple[Value, tuple[torch.Tensor, torch.Tensor]] | None:
    """The residual's sum that a norm's kernel takes along, and its terms; None where a product does."""
    total = pending(source, aten.add.Tensor)
    terms = None if total is None or whole(source).shape[-1] != source.shape[-1] else match_sum(total)
    return None if total is None or terms is None or _takes_residual(mode, total) else (total, terms)


def _norm_within(
    mode: DeferredMode, products: Sequence[Product], activation: bool
) -> tuple[torch.Tensor, RMSNorm] | None:
    """What the products' kernel normalizes itself, and how: where no other product waits for that norm."""
    found, left = norm_of(products[0]), products[0].left
    if found is None or _sum_before(mode, found[0]) is not None:
        return None
    if not {id(value) for value in mode.products_of(left)} <= {id(p.value) for p in products}:
        return None
    weights = [p.weight for p in products]
    serves = dispatch.serves_norm(left.shape[0], weights, mode.device, activation=activation)  # type: ignore[arg-type]
    return found if serves else None


def norm_of(product: Product) -> tuple[torch.Tensor, RMSNorm] | None:
    """The norm that a product reads, if it is over the product's own columns."""
    found = match_rms_norm(product.left)
    return found if found is not None and found[0].shape[-1] == product.left.shape[-1] else None


def expert_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """`weight[expert_ids] @ x`: what a batched mixture of experts gathers and multiplies, without the gathering."""
    if value.func is not aten.bmm.default:
        return None
    gathered, column = value.args
    index = pending(gathered, aten.index.Tensor)
    if index is None or index.args[0].dim() != 3 or len(index.args[1]) != 1 or isinstance(index.args[0], Deferred):
        return None
    weight, [ids] = index.args
    rows = column.shape[0]
    if column.shape[2] != 1 or weight.stride(2) != 1 or ids is None or ids.dim() != 1:
        return None
    x = mode.tensor(column).reshape(rows, -1)
    return dispatch.expert_linear(x, weight, mode.tensor(ids)).view(value.meta.shape)


def embedding_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """Few rows of an embedding."""
    if value.func is not aten.embedding.default:
        return None
    weight, ids = value.args[:2]
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.dtype in _EMBEDDING_DTYPES
    if not is_plain or weight.device != mode.device or weight.stride(1) != 1 or not 0 < ids.numel() <= _FEW_INDICES:
        return None
    return dispatch.embedding(weight, mode.tensor(ids))


def rotary_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """Rotary embedding of `[batch, heads, tokens, head_dim]`, or with heads and tokens the other way round."""
    rotary = match_rotary(Deferred(value, None, mode.device)) if value.func in _ROTARY_ENDS else None
    if rotary is None or rotary.source.dim() != 4 or rotary.cos.shape != rotary.sin.shape or rotary.cos.dim() != 4:
        return None
    batch, second, third, _ = rotary.source.shape
    angles = tuple(rotary.cos.shape[:3])
    heads_first = angles in ((batch, 1, third), (1, 1, third))
    if not heads_first and angles not in ((batch, second, 1), (1, second, 1)):
        return None
    heads_dim = 1 if heads_first else 2
    cos, sin = (mode.tensor(x).squeeze(heads_dim) for x in (rotary.cos, rotary.sin))
    if rotary.in_float32:
        cos, sin = cos.float(), sin.float()
    source = mode.tensor(rotary.source)
    source = source.transpose(1, 2) if heads_first else source
    out = dispatch.rotate(source, cos, sin, rotary_dim=rotary.rotary_dim, interleaved=rotary.interleaved)
    return (out.transpose(1, 2) if heads_first else out).reshape(value.meta.shape)


_EMBEDDING_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROTARY_ENDS = (aten.add.Tensor, aten.cat.default, aten._to_copy.default)

STEP_RULES = (
    rotary_rule, residual_rule, gated_rule, norm_rule, expert_rule, product_rule, angles_rule, embedding_rule,
)  # fmt: skip


def gate_and_up(gate: torch.Tensor, up: torch.Tensor) -> list[Product] | None:
    products = [match_product(gate), match_product(up)]
    if None not in products:
        first, second = products
        same = first.kind == second.kind and identity(first.left) == identity(second.left)  # type: ignore[union-attr]
        return [first, second] if same else None  # type: ignore[list-item]
    halves = [match_slice(gate), match_slice(up)]
    if None in halves:
        return None
    parts = []
    for base, start, end, step in halves:  # type: ignore[misc]
        product = match_product(base)
        if product is None or step != 1 or base.shape[-1] != product.size or isinstance(product.weight, PackedWeight):
            return None
        bias = None if product.bias is None else product.bias[start:end]
        parts.append(Product(product.value, product.left, product.weight[start:end], bias))
    return parts if parts[0].value is parts[1].value else None


def _serves(mode: DeferredMode, products: Sequence[Product], activation: bool = False) -> bool:
    left = products[0].left
    weights = [p.weight for p in products]
    return dispatch.serves_linear(left.shape[0], weights, left.dtype, mode.device, activation=activation)  # type: ignore[arg-type]


def multiply(x: torch.Tensor, product: Product) -> torch.Tensor:
    """The product, with x as its left side, by cuBLAS."""
    if isinstance(product.weight, PackedWeight):
        return dispatch.int4_linear(x, [product.weight], [product.bias])
    return F.linear(x, product.weight, product.bias)


#: What treats each number by itself, whatever stands beside it.
_POINTWISE = (aten.mul.Tensor, aten.div.Tensor, aten.tanh.default, aten._to_copy.default)


def pick_rows(mode: DeferredMode, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`x[rows]` of logits `[batch, 1, vocabulary]`: the head then multiplies these rows only, where it is waiting.

    Args:
        rows: int64 `[picked]`.
    """
    product = match_product(x)
    if product is not None and len(product.left) == len(x):
        picked = replace(product, left=mode.tensor(product.left).index_select(0, rows))
        out = _launch(mode, [picked]) if _serves(mode, [picked]) else multiply(picked.left, picked)
        return out.view(len(rows), *x.shape[1:])
    waiting = pending(x, *_POINTWISE)
    if waiting is not None and waiting.meta.shape == x.shape:  # a soft cap, say
        first, *others = waiting.args
        if isinstance(first, Deferred) and not any(isinstance(other, torch.Tensor) for other in others):
            return waiting.func(pick_rows(mode, first, rows), *others, **waiting.kwargs)
    return mode.tensor(x).index_select(0, rows)


def _takes_residual(mode: DeferredMode, total: Value) -> bool:
    """Whether a sum is computed by the product in it."""
    terms = match_sum(total)
    products = [match_product(x) for x in terms or ()]
    return any(p is not None and _serves(mode, [p]) for p in products)


def _launch(
    mode: DeferredMode,
    products: Sequence[Product],
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    weights, biases = [p.weight for p in products], [p.bias for p in products]
    left, first = products[0].left, weights[0]
    if isinstance(first, PackedWeight):
        if first.perm is not None:
            x = _in_order(mode, left, first)
            weights = [w.in_order() for w in weights]  # type: ignore[union-attr]  # all are quantized, or none
        else:
            x = mode.tensor(left)
        return dispatch.int4_linear(x, weights, biases, residual=residual, activation=activation, places=places)  # type: ignore[arg-type]
    source, norm = _norm_within(mode, products, activation is not None) or (left, None)
    x = mode.tensor(source).reshape(left.shape)
    return dispatch.linear(x, weights, biases, residual=residual, activation=activation, norm=norm)  # type: ignore[arg-type]


def _in_order(mode: DeferredMode, left: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """What a quantized weight multiplies, with its columns in the weight's order: from what computes it, if waiting."""
    if weight.places is not None:
        found, columns = match_rms_norm(left), left.shape[-1]
        if found is not None and found[0].shape[-1] == columns <= dispatch.MAX_COLUMNS_TO_ORDER:
            return _normed(mode, *found, perm=weight.perm)
        waiting = pending(left, aten.mul.Tensor) if left.shape[0] <= dispatch.MAX_ROWS_TO_PLACE else None
        gated = None if waiting is None else match_gated(waiting)
        parts = None if gated is None else gate_and_up(*gated[:2])
        quantized = parts is not None and isinstance(parts[0].weight, PackedWeight)
        if gated is not None and parts is not None and quantized and _serves(mode, parts, activation=True):
            return _launch(mode, parts, activation=gated[2], places=weight.places)
    return dispatch.permute_columns(mode.tensor(left), weight.perm)  # type: ignore[arg-type]  # it has one
