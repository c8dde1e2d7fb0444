"""Linears of quantized weights on a CPU.

A few rows in bf16 go to torch's own operator, which multiplies by the codes as they lie and sums in fp32. It knows
`scale * (code - 8) + offset`, both in bf16. Everything else is multiplied by the weight itself, made part by part: in
fp32, so that fp32 and fp16 lose nothing, or for bf16 in bf16 where the processor has matrix units for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from . import reference_int4
from .cpu_int4_layout import ROW_ALIGNMENT, Blocks, blocks_of
from .packed_weight import PackedWeight
from .reference_linear import apply_activation

_multiply = getattr(torch, "_weight_int4pack_mm_for_cpu", None)  # called so, it takes half as long as from torch.ops

#: Sizes of groups that torch's operator takes, the best first.
_OPERATOR_GROUPS = (256, 128, 64, 32)

#: Rows up to which torch's operator, whose cost grows with each row, costs less than making the weight.
_FEW_ROWS, _FEW_ROWS_BESIDE_MATRIX_UNITS = 64, 40

#: What a number of `_by_groups`' sums costs, as a multiple of what a number of `_by_values`' values does.
_BY_GROUPS_COST = 4

#: Values of a weight that are made at a time: few enough to stay in a core's cache.
_TILE_VALUES = 1 << 20

#: What each thread writes values to.
_buffers = threading.local()


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
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `int4_linear.int4_linear`; any number of weights, on any device."""
    if len(weights) == 1 and residual is None and activation is None and places is None:  # nothing but the product
        return linear(x, weights[0], biases[0] if biases else None)
    if biases is None:
        biases = [None] * len(weights)
    parts = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if activation is not None:
        gate, up = parts
        result = apply_activation(gate, activation) * up
    else:
        result = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    result = result if residual is None else residual + result
    return result if places is None else torch.empty_like(result).index_copy_(1, places.long(), result)


def dequantize(weight: PackedWeight, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`[N, columns]` in `dtype`: products in fp32, rounded once."""
    if weight.qweight.dtype != torch.uint8:
        return reference_int4.dequantize(weight, columns, dtype)
    out = torch.empty(weight.out_features, columns, dtype=dtype, device=weight.qweight.device)
    channels = None if weight.perm is None else weight.perm.long()
    for part in blocks_of(weight.qweight, columns, weight.bits, _TILE_VALUES):
        values = _values(weight, part).t()
        if channels is None:
            out[part.rows] = values
        else:
            out[part.rows].index_copy_(1, channels, values.to(dtype))
    return out


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`[M, N]` of x `[M, K]`, which lies on the weight's device."""
    if weight.qweight.dtype is not torch.uint8:
        return reference_int4.int4_linear(x, [weight], [bias])
    if x.dtype is torch.bfloat16 and x.device.type == "cpu" and 0 < len(x) <= _few_rows():
        operand = _operand_of(weight, x.shape[1])
        if operand.group_size is not None:
            return _by_operator(x, weight, operand, bias)
    left = x if weight.perm is None else x.index_select(1, weight.perm)
    size = x.shape[1] if len(weight.scales) == 1 else weight.group_size
    if 0 < len(x) * _BY_GROUPS_COST <= size and x.shape[1] % size == 0:
        out = _by_groups(left.float(), weight)
    else:  # contiguous: with matrix units, torch reads what lies between the rows, and a NaN there is in the result
        out = _by_values(left.to(_product_dtype(x)).contiguous(), weight)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


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


def _by_operator(x: torch.Tensor, weight: PackedWeight, operand: _Operand, bias: torch.Tensor | None) -> torch.Tensor:
    """`[M, N]` of x `[M, K]` in bf16."""
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    if weight.bits == 8:
        x = torch.cat((x, x), 1)
    out: torch.Tensor = _multiply(x.contiguous(), weight.qweight, operand.group_size, operand.pairs)  # type: ignore[misc]
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
    if group is None or _multiply is None:
        return None, None
    zeros: torch.Tensor | int = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros.float()
    if weight.bits == 4:
        parts = [(scales, scales * (8 - zeros))]
    else:  # code - zero is 16 * (upper - 8) + (lower - 8) + 8 + (128 - zero)
        offsets = scales.bfloat16().float() * 8 + scales * (128 - zeros)
        coarse = offsets.bfloat16().float()
        parts = [(scales * 16, coarse), (scales, offsets - coarse)]
    made = [torch.stack(part, -1).bfloat16().repeat_interleave(size // group, 0)[: columns // group] for part in parts]
    padding = -scales.shape[1] % ROW_ALIGNMENT
    return group, torch.nn.functional.pad(torch.cat(made), (0, 0, 0, padding))


def _by_groups(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`[M, N]` of x `[M, K]`, both fp32, with whole groups: each is multiplied by its codes, and the sums are scaled.

    That leaves out a pass over the weight's values, and adds some over `[groups, M, N]`.
    """
    rows, columns = x.shape
    size = min(weight.group_size, columns)
    by_group = x.reshape(rows, -1, size).transpose(0, 1)
    out = x.new_empty(rows, weight.out_features)
    for part in blocks_of(weight.qweight, columns, weight.bits, _TILE_VALUES):
        codes = _scratch(_centred_codes(weight, part), torch.float32)
        sums = torch.bmm(by_group, codes.unflatten(0, (-1, size)))
        sums *= weight.scales[:, None, part.rows]
        torch.sum(sums, 0, out=out[:, part.rows])
    if weight.zeros is not None:
        shifts = weight.scales.float() * (weight.zeros.float() - (1 << (weight.bits - 1)))
        out.addmm_(by_group.sum(2).t(), shifts, alpha=-1)
    return out


def _by_values(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`[M, N]` of x `[M, K]`, both of one dtype, through the weight's values in that dtype."""
    out = x.new_empty(len(x), weight.out_features)
    for part in blocks_of(weight.qweight, x.shape[1], weight.bits, _TILE_VALUES):
        values = _values(weight, part)
        out[:, part.rows] = x @ (values if x.dtype == values.dtype else _scratch(values, x.dtype))
    return out


def _centred_codes(weight: PackedWeight, part: Blocks) -> torch.Tensor:
    """The codes less the middle of their range: int8 `[columns, rows]`, without rows that are padding."""
    codes = part.unpack(weight.bits)[:, : weight.out_features - part.first_row]
    return codes.sub_(1 << (weight.bits - 1)).view(torch.int8)  # wraps around, as wanted


def _values(weight: PackedWeight, part: Blocks) -> torch.Tensor:
    """Values of the weight: fp32 `[columns, rows]`, in memory that the thread's next call uses again."""
    codes = _centred_codes(weight, part)
    zeros = None if weight.zeros is None else weight.zeros[:, part.rows] - (1 << (weight.bits - 1))
    if zeros is not None and weight.bits == 4:  # the difference still fits
        _by_group(torch.Tensor.sub_, codes, zeros.view(torch.int8), weight.group_size)
        zeros = None
    values = _scratch(codes, torch.float32)
    if zeros is not None:
        _by_group(torch.Tensor.sub_, values, zeros.view(torch.int8).float(), weight.group_size)
    _by_group(torch.Tensor.mul_, values, weight.scales[:, part.rows].float(), weight.group_size)
    return values


def _by_group(
    change: Callable[[torch.Tensor, torch.Tensor], object], values: torch.Tensor, of_groups: torch.Tensor, size: int
) -> None:
    """Changes `[columns, rows]` in place, each column by what its group has in `[groups, rows]`."""
    whole = len(values) // size
    if whole:
        change(values[: whole * size].unflatten(0, (whole, size)), of_groups[:whole, None])
    if whole < len(of_groups):  # a shorter last group
        change(values[whole * size :], of_groups[whole])


def _scratch(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in `dtype`, in memory that the thread's next call for `dtype` uses again.

    New memory of this size comes from the system every time, and its first touch can cost more than all that is done
    with it.
    """
    if values.device.type != "cpu":
        return values.to(dtype)
    buffers: dict[torch.dtype, torch.Tensor] = _buffers.__dict__.setdefault("by_dtype", {})
    if dtype not in buffers or buffers[dtype].numel() < values.numel():
        with torch.inference_mode(False):  # what is made within it could not be written to outside
            buffers[dtype] = torch.empty(values.numel(), dtype=dtype)
    return buffers[dtype][: values.numel()].view(values.shape).copy_(values)


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
