"""A rule for what rotary embedding turns by: cosines and sines of positions times frequencies, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops import dispatch
from ..ops.deferred import DeferredMode, Value, aten, identity
from .patterns import either_order, joins_last_dim, pending

_FUNCTIONS = (aten.cos.default, aten.sin.default)
#: What a result may end in: the cast to a model's dtype, the scaling before it, or neither.
_ENDS = (aten._to_copy.default, aten.mul.Tensor, *_FUNCTIONS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_POSITION_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class Outer:
    """Products of positions and frequencies in fp32.

    Args:
        value: what multiplies them.
        frequencies, positions: `[batch, size]` and `[batch, tokens]`, but for dimensions of size 1.
        batch: how many rows have frequencies of their own.
    """

    value: Value
    frequencies: torch.Tensor
    positions: torch.Tensor
    batch: int


@dataclass(frozen=True, eq=False)
class Angles:
    """`cos(f) * scale` or `sin(f) * scale`, f the products of positions and frequencies.

    Args:
        value: the result.
        function: cosine or sine, as torch's dispatcher has it.
        outer: f.
        join: as of `dispatch.rotary_angles`.
        scale: None where nothing multiplies.
    """

    value: Value
    function: Any
    outer: Outer
    join: str
    scale: float | None

    @property
    def kind(self) -> Any:
        """Equal for a cosine and a sine that one launch gives."""
        return self.outer.value, self.join, self.scale, self.value.meta.dtype


def angles_rule(mode: DeferredMode, value: Value) -> torch.Tensor | None:
    """Cosines, and with them the sines of the same angles, or the other way round."""
    found = match_angles(mode, value)
    if found is None:
        return None
    outer = found.outer
    results = dispatch.rotary_angles(
        mode.tensor(outer.frequencies).reshape(outer.batch, -1),
        mode.tensor(_integers(outer.positions)).reshape(outer.batch, -1),
        join=found.join,
        scale=1.0 if found.scale is None else found.scale,
        dtype=value.meta.dtype,
    )
    partner = _FUNCTIONS[1 - _FUNCTIONS.index(found.function)]
    others = [match_angles(mode, waiting) for waiting in mode.waiting(*_ENDS) if waiting is not value]
    # One at most: what is written to one tensor must not be seen in another.
    other = next((x for x in others if x is not None and x.function is partner and x.kind == found.kind), None)
    if other is not None:
        mode.finish(other.value, results[_FUNCTIONS.index(partner)].view(other.value.meta.shape))
    return results[_FUNCTIONS.index(found.function)].view(value.meta.shape)


def match_angles(mode: DeferredMode, value: Value) -> Angles | None:
    """The rotary angles that a value is, if it is such."""
    if value.func not in _ENDS or value.meta.dtype not in _DTYPES:
        return None
    end: Value | None = value
    if value.func is aten._to_copy.default:
        end = pending(value.args[0], *_ENDS[1:])
    scale = None
    if end is not None and end.func is aten.mul.Tensor:
        scaled, scale = end.args
        end = pending(scaled, *_FUNCTIONS) if isinstance(scale, (int, float)) else None
    if end is None or end.func not in _FUNCTIONS:
        return None
    joined = end.args[0]
    for join, once in (("halves", _twice(joined)), ("neighbours", _each_twice(joined)), ("alone", joined)):
        outer = None if once is None else _product_of_columns(once) or _product_of_matrices(once)
        if outer is not None:
            return Angles(value, end.func, outer, join, scale)
    return None


def _twice(x: Any) -> torch.Tensor | None:
    """The `f` of `cat((f, f))`."""
    joined = pending(x, aten.cat.default)
    if joined is None or len(joined.args[0]) != 2 or not joins_last_dim(joined, 1):
        return None
    first, second = joined.args[0]
    return first if identity(first) == identity(second) else None


def _each_twice(x: Any) -> torch.Tensor | None:
    """The `f` of `f.repeat_interleave(2, -1)`, by what torch makes of that."""
    copied = pending(x, aten.clone.default)
    repeated = None if copied is None else pending(copied.args[0], aten.expand.default)
    column = None if repeated is None else repeated.args[0].value
    if repeated is None or column is None or column.func is not aten.unsqueeze.default or column.result is not None:
        return None
    once = column.args[0]
    is_column = column.meta.shape == (*once.shape, 1)
    return once if is_column and repeated.meta.shape == (*once.shape, 2) else None


def _product_of_columns(x: torch.Tensor) -> Outer | None:
    """`positions [..., tokens, 1] * frequencies [size]`."""
    product = pending(x, aten.mul.Tensor)
    if product is None or x.shape[-1:] != product.meta.shape[-1:]:
        return None
    for positions, frequencies in either_order(product):
        is_column = positions.shape == (*product.meta.shape[:-1], 1)
        if is_column and frequencies.dim() == 1 and positions.dtype == frequencies.dtype == torch.float32:
            return Outer(product, frequencies, positions, 1)
    return None


def _product_of_matrices(x: torch.Tensor) -> Outer | None:
    """`frequencies [batch, size, 1] @ positions [batch, 1, tokens]`, transposed: `x` is `[..., tokens, size]`."""
    turned = pending(x, aten.transpose.int)
    if turned is not None and {dim % x.dim() for dim in turned.args[1:]} != {x.dim() - 2, x.dim() - 1}:
        return None
    product = pending(x if turned is None else turned.args[0], aten.bmm.default)
    if product is None or product.meta.dtype != torch.float32 or product.args[0].shape[2] != 1:
        return None
    if torch.backends.cuda.matmul.fp32_precision == "tf32":  # positions are rounded then as cuBLAS has it
        return None
    batch, size, tokens = product.meta.shape
    as_it_is = turned is None and tokens > 1  # with one token nothing is moved
    if as_it_is or x.shape[-2:] != (tokens, size):
        return None
    frequencies, positions = product.args
    return Outer(product, frequencies, positions, batch)


def _integers(positions: torch.Tensor) -> torch.Tensor:
    """Positions before they were cast to fp32: the same values in the same order."""
    cast = pending(positions, aten._to_copy.default)
    return cast.args[0] if cast is not None and cast.args[0].dtype in _POSITION_DTYPES else positions
