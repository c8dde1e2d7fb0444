"""What several deferred operations amount to: norms, gated activations, matrix products and rotary embeddings.

A match is by what is computed, step by step and cast by cast, not by what a model calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ops.deferred import PRODUCTS, Deferred, Value, aten, identity, whole
from ..ops.norm_spec import RMSNorm
from ..ops.packed_weight import PackedWeight

_ACTIVATIONS = {aten.silu.default: "silu", aten.gelu.default: "gelu"}


@dataclass(frozen=True, eq=False)
class Product:
    """`left @ weight.T + bias`: left `[rows, K]`, weight `[N, K]`, quantized or not."""

    value: Value
    left: torch.Tensor
    weight: torch.Tensor | PackedWeight
    bias: torch.Tensor | None

    @property
    def size(self) -> int:
        """N."""
        return self.value.meta.shape[1]

    @property
    def kind(self) -> Any:
        """Equal for products that one kernel may compute together, if they have the same left side."""
        return self.left.shape, isinstance(self.weight, PackedWeight) or self.weight.dtype


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary embedding of `source` `[..., head_dim]`; `cos` and `sin` end in the rotary dimension.

    Args:
        in_float32: computed in fp32 and rounded once, whatever the dtypes.
    """

    source: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rotary_dim: int
    interleaved: bool
    in_float32: bool = False


def pending(x: Any, *funcs: Any) -> Value | None:
    """The operation whose result `x` is (or a reshaped look at it), if it is one of these and not done yet."""
    x = whole(x)
    if isinstance(x, Deferred) and x.value.result is None and x.value.func in funcs:
        return x.value
    return None


def match_product(x: Any) -> Product | None:
    """A product with a matrix that lies row by row in memory, as `nn.Linear`'s does."""
    value = pending(x, *PRODUCTS)
    return None if value is None else product_of(value)


def product_of(value: Value) -> Product | None:
    """The same of a value."""
    if value.kwargs:
        return None
    if value.func is torch.ops.hf_turbo.int4_mm.default:
        left, qweight, scales, zeros, perm, bias, bits, group_size = value.args
        weight = PackedWeight(qweight, scales, zeros, perm, bits, group_size)
        return None if isinstance(bias, Deferred) else Product(value, left, weight, bias)
    bias, left, right = value.args if value.func is aten.addmm.default else (None, *value.args)
    if isinstance(right, Deferred) or isinstance(bias, Deferred) or right.stride(0) != 1:
        return None
    if bias is not None and bias.dim() != 1:
        return None
    return Product(value, left, right.t(), bias)


def match_gated(value: Value) -> tuple[torch.Tensor, torch.Tensor, str] | None:
    """`act(gate) * up`: gate, up and the activation's name."""
    if value.func is not aten.mul.Tensor:
        return None
    for gated, up in either_order(value):
        act = pending(gated, *_ACTIVATIONS)
        if act is not None and all((x.shape, x.dtype) == (up.shape, up.dtype) for x in (act.args[0], value.meta)):
            kind = _ACTIVATIONS[act.func]
            if act.kwargs.get("approximate") == "tanh":
                kind = "gelu_tanh"
            return act.args[0], up, kind
    return None


def match_sum(value: Value) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`a + b` of equal shapes and dtypes."""
    if value.func is not aten.add.Tensor or value.kwargs:
        return None
    a, b = value.args
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_shape(a, b):
        return (a, b) if a.dtype == b.dtype else None
    return None


def match_rms_norm(x: Any) -> tuple[torch.Tensor, RMSNorm] | None:
    """What is normalised over its last dimension, and how (Zhang and Sennrich, 2019, and its variants)."""
    found = _match_rms_norm(x)
    if found is None or found[1].weight is None or found[1].weight.shape == found[0].shape[-1:]:
        return found
    return None


def _match_rms_norm(x: Any) -> tuple[torch.Tensor, RMSNorm] | None:
    fused = pending(x, aten._fused_rms_norm.default)
    if fused is not None:
        source, shape, weight, eps = fused.args
        if len(shape) != 1 or isinstance(weight, Deferred) or eps is None:
            return None
        return source, RMSNorm(weight, eps, plus_one=False, round_first=False)
    product = pending(x, aten.mul.Tensor)
    if product is not None:  # the weight comes last, in the result's dtype
        for weight, normed in either_order(product):
            scale = _scale(weight)
            found = _normalised(_uncast(normed, product.meta.dtype), product.meta.dtype)
            if scale is not None and found is not None:
                source, eps = found
                is_cast = normed.dtype == scale[0].dtype != torch.float32
                if scale[1] and is_cast:
                    return None
                return source, RMSNorm(scale[0], eps, plus_one=scale[1], round_first=not scale[1])
    cast = pending(x, aten._to_copy.default)
    if cast is not None and cast.args[0].dtype == torch.float32:  # the weight comes before the cast, in fp32
        dtype, inner = cast.meta.dtype, cast.args[0]
        product = pending(inner, aten.mul.Tensor)
        for weight, normed in either_order(product) if product is not None else ():
            scale, found = _scale(weight), _normalised(normed, dtype)
            if scale is not None and found is not None:
                return found[0], RMSNorm(scale[0], found[1], plus_one=scale[1], round_first=False)
        found = _normalised(inner, dtype)
        if found is not None:
            return found[0], RMSNorm(None, found[1], plus_one=False, round_first=False)
    return None


def match_rotary(x: Any) -> Rotary | None:
    """Rotary embedding (Su et al., 2021), of halves or of neighbours, of all of a head or of its first part."""
    joined = pending(x, aten.cat.default)
    if joined is not None and joins_last_dim(joined, 1) and len(joined.args[0]) == 2:
        turned, rest = joined.args[0]
        rotary = _rotation(turned)
        if rotary is None or rotary.rotary_dim != turned.shape[-1]:
            return None
        whole_head, first = match_slice(rotary.source), match_slice(rest)
        if whole_head is None or first is None or identity(whole_head[0]) != identity(first[0]):
            return None
        if whole_head[1:] != (0, rotary.rotary_dim, 1) or first[1:] != (rotary.rotary_dim, first[0].shape[-1], 1):
            return None
        return Rotary(whole_head[0], rotary.cos, rotary.sin, rotary.rotary_dim, rotary.interleaved)
    cast = pending(x, aten._to_copy.default)
    rotary = None if cast is None else _rotation(cast.args[0])
    if rotary is not None and cast is not None:
        source = _uncast(rotary.source, torch.float32)
        return replace(rotary, source=source, in_float32=True) if source.dtype == cast.meta.dtype else None
    return _rotation(x)


def _rotation(x: Any) -> Rotary | None:
    total = pending(x, aten.add.Tensor)
    if total is None or total.kwargs:
        return None
    for plain, crossed in either_order(total):
        straight, across = pending(plain, aten.mul.Tensor), pending(crossed, aten.mul.Tensor)
        if straight is None or across is None:
            continue
        for source, cos in either_order(straight):
            for turned, sin in either_order(across):
                style = _turn_of(turned, source)
                if style is None or total.meta.dtype != source.dtype:
                    continue  # cosines of a wider dtype make the result wider than the heads
                if cos.shape[-1:] == source.shape[-1:] == sin.shape[-1:]:
                    return Rotary(source, cos, sin, source.shape[-1], style == "interleaved")
    return None


def _turn_of(x: Any, source: Any) -> str | None:
    """Whether `x` is `source` with its halves, or its neighbours, crossed: (-b, a) of (a, b)."""
    joined = pending(x, aten.cat.default, aten.stack.default)
    if joined is None or len(joined.args[0]) != 2 or not joins_last_dim(joined, 1):
        return None
    minus, first = joined.args[0]
    negated = pending(minus, aten.neg.default)
    if negated is None:
        return None
    a, b, dim = match_slice(first), match_slice(negated.args[0]), source.shape[-1]
    if a is None or b is None or not identity(a[0]) == identity(b[0]) == identity(source):
        return None
    if joined.func is aten.cat.default:
        return "halves" if (a[1:], b[1:]) == ((0, dim // 2, 1), (dim // 2, dim, 1)) else None
    return "interleaved" if (a[1:], b[1:]) == ((0, dim, 2), (1, dim, 2)) else None


def match_slice(x: Any) -> tuple[torch.Tensor, int, int, int] | None:
    """What `x` is a slice of along the last dimension, and from where, to where, in which steps."""
    x = whole(x)
    if not isinstance(x, Deferred) or x.value.result is not None:
        return None
    args = x.value.args
    if x.value.func is aten.slice.Tensor and args[1] in (-1, args[0].dim() - 1):
        size = args[0].shape[-1]
        start, end, step = (*args[2:], *(None, None, 1)[len(args) - 2 :])  # type: ignore[misc]  # three together
        return args[0], start or 0, size if end is None else min(end, size), step
    if x.value.func is aten.split.Tensor and args[2:] in ((-1,), (args[0].dim() - 1,)):
        start = (x.output or 0) * args[1]
        return args[0], start, min(start + args[1], args[0].shape[-1]), 1
    if x.value.func is aten.split_with_sizes.default and args[2:] in ((-1,), (args[0].dim() - 1,)):
        start = sum(args[1][: x.output])
        return args[0], start, start + args[1][x.output or 0], 1
    return None


def _normalised(x: Any, dtype: torch.dtype) -> tuple[torch.Tensor, float] | None:
    """`f * rsqrt(mean(f^2) + eps)` with f a tensor of `dtype` in fp32: that tensor, and eps."""
    product = pending(x, aten.mul.Tensor)
    if product is None or product.meta.dtype != torch.float32:
        return None
    for f, factor in either_order(product):
        root = pending(factor, aten.rsqrt.default)
        total = None if root is None else pending(root.args[0], aten.add.Tensor)
        if total is None or not isinstance(total.args[1], float):
            continue
        mean = pending(total.args[0], aten.mean.dim)
        if mean is None or list(mean.args[1]) != [-1] or mean.args[2:] != (True,):
            continue
        square = pending(mean.args[0], aten.pow.Tensor_Scalar, aten.mul.Tensor)
        if square is None or identity(square.args[0]) != identity(f):
            continue
        if square.func is aten.pow.Tensor_Scalar:
            squared = square.args[1] == 2
        else:
            squared = isinstance(square.args[1], torch.Tensor) and identity(square.args[1]) == identity(f)
        source = _uncast(f, torch.float32)
        same_rows = source.shape[-1] == f.shape[-1] == mean.args[0].shape[-1]  # else it is of groups of a row
        if squared and same_rows and source.dtype == dtype:
            return source, total.args[1]
    return None


def _scale(x: Any) -> tuple[torch.Tensor, bool] | None:
    """A norm's weight `[K]`, and whether it is one plus that."""
    total = pending(x, aten.add.Tensor)
    plus_one = total is not None and not isinstance(total.args[1], torch.Tensor) and total.args[1] == 1
    weight = _uncast(total.args[0] if plus_one and total is not None else x, torch.float32)
    if isinstance(weight, Deferred) or weight.dim() != 1 or not weight.is_contiguous():
        return None
    return weight, plus_one


def _uncast(x: Any, dtype: torch.dtype) -> Any:
    """What `x` was before it was cast to `dtype`, or `x` where it wasn't."""
    cast = pending(x, aten._to_copy.default)
    return x if cast is None or cast.meta.dtype != dtype else cast.args[0]


def either_order(value: Value) -> Iterator[tuple[Any, Any]]:
    """The first two operands of a value, where both are tensors, and the other way round."""
    a, b = value.args[:2]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        yield a, b
        yield b, a


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape


def joins_last_dim(joined: Value, default_args: int) -> bool:
    """Whether `cat` or `stack` joins along the last dimension."""
    dim = joined.args[1] if len(joined.args) > default_args else 0
    return dim in (-1, joined.meta.dim() - 1)
