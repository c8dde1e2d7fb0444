"""Rules for the products of a long prompt: cuBLAS computes them; what is between them is kept small.

The widest tensors of a prompt exist a piece at a time: rows go through norm, gate, up and down projection together.
A norm's result is made for the products that read it and let go; a residual is added by the product after it.
"""

from __future__ import annotations

import torch

from ..ops import dispatch
from ..ops.deferred import PRODUCTS, DeferredMode, Value, aten
from ..ops.packed_weight import PackedWeight
from .fusion import STEP_RULES, gate_and_up, multiply, norm_of, siblings
from .patterns import Product, match_gated, match_product, match_sum, pending, product_of

#: Rows from which on these rules apply.
_MANY = 2048
#: Rows that go through an MLP at a time.
_PIECE = 4096


def many_rows_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """A product of many rows, and what else waits for the same norm."""
    if value.func not in PRODUCTS or value.meta.shape[0] < _MANY:
        return None
    product = product_of(value)
    if product is None:
        return None
    if _gated_input(product) is not None:
        return _through_mlp(mode, product, None)
    found = norm_of(product)
    if found is None:
        return None
    x = dispatch.rms_norm(mode.tensor(found[0]).reshape(product.left.shape), found[1])
    for other in siblings(mode, product):
        mode.finish(other.value, multiply(x, other))
    return multiply(x, product)


def many_rows_residual_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """`residual + product` of many rows."""
    terms = match_sum(value)
    if terms is None:
        return None
    for residual, x in (terms, terms[::-1]):
        product = match_product(x)
        if product is None or product.left.shape[0] < _MANY or product.bias is not None or siblings(mode, product):
            continue
        rows = mode.tensor(residual).reshape(product.value.meta.shape)
        if _gated_input(product) is not None:
            return _through_mlp(mode, product, rows).view(value.meta.shape)
        return _plus_product(rows, mode.tensor(product.left), product).view(value.meta.shape)
    return None


#: A model's code holds the embeddings to its end; they are read in the first layer only.
TRANSIENT = frozenset({aten.embedding.default})
PROMPT_RULES = (many_rows_residual_rule, many_rows_rule, *STEP_RULES)


def _gated_input(product: Product) -> tuple[list[Product], str] | None:
    """Gate and up projection, and the activation's name, where a product reads `act(gate) * up`."""
    waiting = pending(product.left, aten.mul.Tensor)
    found = None if waiting is None else match_gated(waiting)
    parts = None if found is None else gate_and_up(found[0], found[1])
    return None if parts is None or found is None else (parts, found[2])


def _through_mlp(mode: DeferredMode, product: Product, residual: torch.Tensor | None) -> torch.Tensor:
    """`act(gate) * up` and the product after it, and the norm before it, a piece at a time."""
    parts, kind = _gated_input(product)  # type: ignore[misc]  # the caller has looked
    norm = norm_of(parts[0])
    source = mode.tensor(parts[0].left if norm is None else norm[0]).reshape(parts[0].left.shape)
    shape = (len(source), product.size)
    out = source.new_empty(shape) if residual is None else residual.clone()
    for piece, result in zip(source.split(_PIECE), out.split(_PIECE), strict=True):
        x = piece if norm is None else dispatch.rms_norm(piece, norm[1])
        gate, up = (multiply(x, p) for p in parts)
        hidden = dispatch.gated(gate, up, kind, out=gate)
        del x, up
        if residual is not None:
            _plus_product(result, hidden, product, out=result)
        else:
            result.copy_(multiply(hidden, product))
    return out


def _plus_product(
    rows: torch.Tensor, x: torch.Tensor, product: Product, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`rows + x @ weight.T`."""
    if isinstance(product.weight, PackedWeight):
        return torch.add(rows, multiply(x, product), out=out)
    return torch.addmm(rows, x, product.weight.t(), out=out)
