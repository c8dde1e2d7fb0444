"""Linears of quantized weights on a CPU.

A few rows in bf16 go to torch's own operator, which multiplies by the codes as they lie and sums in fp32. It knows
`scale * (code - 8) + offset`, both in bf16. Everything else is multiplied by the weight itself, made part by part: in
fp32, so that fp32 and fp16 lose nothing, or for bf16 in bf16 where the processor has matrix units for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from . import reference_int4
from .cpu_int4_layout import ROW_ALIGNMENT, Blocks, blocks_of, halves, has_operator
from .packed_weight import PackedWeight
from .reference_linear import apply_activation

_multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default if has_operator() else None

#: Sizes of groups that torch's operator takes, the best first.
_OPERATOR_GROUPS = (256, 128, 64, 32)

#: Rows up to which torch's operator, whose cost grows with each row, costs less than making the weight.
_FEW_ROWS, _FEW_ROWS_BESIDE_MATRIX_UNITS = 48, 20

#: Values of a weight that are made at a time: few enough to stay in a core's cache.
_TILE_VALUES = 1 << 18


class _Operand(NamedTuple):
    """What torch's operator takes beside x and the codes; kept with the tensor of the codes.

    Args:
        group_size: None where the operator does not take the weight.
        pairs: bf16 `[G, N, 2]`, scales and offsets.
        scales, zeros, versions: what they were made of.
    """

    group_size: int | None
    pairs: torch.Tensor | None
    scales: torch.Tensor
    zeros: torch.Tensor | None
    versions: tuple[int, int]


def int4_linear(
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """See `int4_linear.int4_linear`; any number of weights, on any device."""
    if any(weight.qweight.dtype != torch.uint8 for weight in weights):
        return reference_int4.int4_linear(x, weights, biases, residual=residual, activation=activation)
    if biases is None:
        biases = [None] * len(weights)
    parts = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if activation is not None:
        gate, up = parts
        result = apply_activation(gate, activation) * up
    else:
        result = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return result if residual is None else residual + result


def dequantize(weight: PackedWeight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`[N, columns]` in `dtype`: products in fp32, rounded once."""
    if weight.qweight.dtype != torch.uint8:
        return reference_int4.dequantize(weight, columns, dtype)
    out = torch.empty(weight.out_features, columns, dtype=dtype, device=weight.qweight.device)
    channels = None if weight.perm is None else weight.perm.long()
    for part in blocks_of(weight.qweight, columns, weight.bits, _TILE_VALUES):
        target = out[part.rows]
        values = part.join(_values(weight, part, columns))[:, : len(target)].t()
        if channels is None:
            target.copy_(values)
        else:
            target.index_copy_(1, channels, values.to(dtype))
    return out


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`[M, N]` of x `[M, K]`, which lies on the weight's device."""
    if x.dtype is torch.bfloat16 and x.device.type == "cpu" and 0 < len(x) <= _few_rows():
        operand = _operand_of(weight, x.shape[1])
        if operand.group_size is not None:
            return _by_operator(x, weight, operand, bias)
    return _by_values(x, weight, bias)


def forget_operand(qweight: torch.Tensor) -> None:
    """To be called when what belongs to these codes has changed in place."""
    qweight.__dict__.pop("_operand", None)


def _operand_of(weight: PackedWeight, columns: int) -> _Operand:
    """What was made at the first call; made again where scales or zeros are others, or were changed."""
    operand: _Operand | None = weight.qweight.__dict__.get("_operand")
    versions = _version(weight.scales), _version(weight.zeros)
    if (
        operand is None
        or operand.scales is not weight.scales
        or operand.zeros is not weight.zeros
        or operand.versions != versions
    ):
        operand = _Operand(*_operator_pairs(weight, columns), weight.scales, weight.zeros, versions)
        weight.qweight._operand = operand  # type: ignore[attr-defined]
    return operand


def _by_operator(
    x: torch.Tensor, weight: PackedWeight, operand: _Operand, bias: torch.Tensor | None
) -> torch.Tensor:
    """`[M, N]` of x `[M, K]` in bf16."""
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    if weight.bits == 8:
        x = torch.cat((x, x), 1)
    out = _multiply(x.contiguous(), weight.qweight, operand.group_size, operand.pairs)
    if out.shape[1] != weight.scales.shape[1]:
        out = out[:, : weight.scales.shape[1]].contiguous()
    return out if bias is None else out.add_(bias)


def _version(tensor: torch.Tensor | None) -> int:
    """Another number after the tensor was changed, where torch counts that."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _operator_pairs(weight: PackedWeight, columns: int) -> tuple[int | None, torch.Tensor | None]:
    """`group_size` and `pairs` of an `_Operand`."""
    scales = weight.scales.float()
    size = columns if len(scales) == 1 else weight.group_size
    group = next((g for g in _OPERATOR_GROUPS if math.gcd(size, columns) % g == 0), None)
    if group is None or not has_operator():
        return None, None
    zeros: torch.Tensor | int = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros.float()
    if weight.bits == 4:
        parts = [(scales, scales * (8 - zeros))]
    else:  # a code is 16 * (upper - 8) + (lower - 8) + 136
        offsets = scales * (136 - zeros)
        coarse = offsets.bfloat16().float()
        parts = [(scales * 16, coarse), (scales, offsets - coarse)]
    made = [torch.stack(part, -1).bfloat16().repeat_interleave(size // group, 0)[: columns // group] for part in parts]
    padding = -scales.shape[1] % ROW_ALIGNMENT
    return group, torch.nn.functional.pad(torch.cat(made), (0, 0, 0, padding))


def _by_values(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`[M, N]` of x `[M, K]` in any dtype, through the weight's values."""
    rows, columns = x.shape
    dtype = _product_dtype(x)
    left = (x if weight.perm is None else x.index_select(1, weight.perm)).to(dtype)
    out = left.new_empty(rows, weight.out_features)
    for part in blocks_of(weight.qweight, columns, weight.bits, _TILE_VALUES):
        values = _values(weight, part, columns).flatten(2).to(dtype)
        products = torch.stack((left @ values[0], left @ values[1])).view(2, rows, len(part.data), -1)
        target = out[:, part.rows]
        target.copy_(part.join(products)[:, : target.shape[1]])
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def _values(weight: PackedWeight, part: Blocks, columns: int) -> torch.Tensor:
    """Values of the weight where their codes lie: fp32 `[2, columns, blocks, rows / 2]`, lower halves first."""
    wide = torch.int8 if weight.bits == 4 else torch.int16  # holds any difference of a code and a zero point
    codes = halves(part.data.transpose(0, 1).contiguous(), weight.bits).to(wide)
    scales = part.separate(weight.scales).float()
    if weight.zeros is None:
        codes -= 1 << (weight.bits - 1)
    else:
        for own, zeros in _by_group(codes, part.separate(weight.zeros).to(wide), weight.group_size):
            own -= zeros
    values = codes.float()
    for own, factors in _by_group(values, scales, weight.group_size):
        own *= factors
    return values


def _by_group(
    values: torch.Tensor, of_groups: torch.Tensor, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of `[2, columns, ...]` and `[2, groups, ...]` that broadcast: the whole groups, then a shorter last one."""
    whole = values.shape[1] // size
    if whole:
        yield values[:, : whole * size].unflatten(1, (whole, size)), of_groups[:, :whole, None]
    if whole < of_groups.shape[1]:
        yield values[:, whole * size :].unsqueeze(1), of_groups[:, whole:, None]


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    """What products of x are made in."""
    is_quick = x.device.type != "cpu" or _has_matrix_units()
    return torch.bfloat16 if x.dtype == torch.bfloat16 and is_quick else torch.float32


def _few_rows() -> int:
    return _FEW_ROWS_BESIDE_MATRIX_UNITS if _has_matrix_units() else _FEW_ROWS


@cache
def _has_matrix_units() -> bool:
    """Whether the processor multiplies matrices of bf16 several times as fast as those of fp32."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
