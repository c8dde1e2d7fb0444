"""Weights to few bits without data: `quantize` for a loaded model, `quantize_weight` for one weight.

The method is round to nearest with a searched scale a group of input channels: of a grid of scales the one that leaves
the least sum of squared differences, each times the value's magnitude plus the group's root mean square. A symmetric
scale has the sign that gives the largest magnitude the side with one code more.

Why this one: benchmarks/int4_quality.py. Mean divergence from the float model in nats, 4 bits, groups of 64, for
SmolLM2-135M and Gemma 3 270M (both of which come from 4-bit GGUF files):

                                symmetric         asymmetric
    plain rounding              0.457   0.657     0.304   0.490
    least sum of squares        0.461   0.640     0.363   0.377
    HQQ's half-quadratic        0.475   0.660     0.304   0.490
    this                        0.331   0.471     0.305   0.383

The plain sum of squares clips large values, which matter more than it says. HQQ gives them up as outliers, too; it
lives on fractional zero points, which the format does not have, and with whole ones ends where it starts, at plain
rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .formats import LinearSpec, gptq_spec
from .int4_linear import Int4Linear
from .quantize_plan import FLOAT_DTYPES, Options, Plan, make_plan, quantization_config
from .weight import GroupedWeight

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# How far from zero the largest magnitude's code is tried, in halves of the codes: unclipped to 1, beyond it is clipped.
_SPANS = tuple(1 + step / 64 for step in range(-8, 9))
# Asymmetric: scales that are tried, as fractions of the one that covers the group.
_SHRINKS = tuple(1 - step / 40 for step in range(15))

_SLICE_VALUES = 1 << 18  # on a CPU: few enough that a pass finds them in the cache
_SLICE_VALUES_GPU = 1 << 24


@torch.no_grad()
def quantize(
    model: Model,
    bits: int = 4,
    group_size: int = 128,
    *,
    symmetric: bool = True,
    skip: Sequence[str] | None = None,
) -> Model:
    """Quantizes the linears in a model's decoder layers, in place and without data.

    Embeddings, the output embedding, routers of experts, and weights that several modules share stay as they are. Each
    weight is freed before the next one's turn. `model.save_pretrained(folder)` then writes a GPTQ checkpoint.

    Args:
        model: a decoder-only Transformers model, on any device; patch it afterwards.
        bits: 4 or 8.
        group_size: input channels that share a scale: 16, 32, 64, 128, 256, 512 or 1024; -1 for all of a row.
        symmetric: no zero points, which is what the quickest kernels of other readers ask for. With them the text was
            nearer to the float model's in measurements, by less than 20% of the distance.
        skip: linears to leave as they are: names, or dotted parts of names such as `"down_proj"` or `"layers.0"`.

    Returns:
        The model.

    Raises:
        ValueError: an argument that is not allowed; or the model is quantized already, has no such linears, or has one
            whose weight can't be cut into such groups, is not on a device, not in bf16, fp16 or fp32, not finite, or
            too large for scales in fp16. Nothing has been changed then.
    """
    options = Options(bits, group_size, symmetric, tuple(skip or ()))
    plan = make_plan(model, options)
    _check_weights(model, plan, options)
    for name in plan.linears:
        parent, _, attribute = name.rpartition(".")
        linear: Any = model.get_submodule(name)
        setattr(model.get_submodule(parent), attribute, _quantized(linear, options))
        del linear  # the last that holds the float weight
    if plan.fused_experts:
        logger.warning(
            "%s holds the experts of %d layers fused, such as %s: they stay as they are. hf-turbo quantize takes those "
            "that a folder stores one by one.",
            type(model).__name__,
            len(plan.fused_experts),
            plan.fused_experts[0],
        )
    config: Any = model.config
    config.quantization_config = quantization_config(plan, options)
    return model


def _check_weights(model: nn.Module, plan: Plan, options: Options) -> None:
    """Raises for a weight that can't be quantized, before any is."""
    for name in plan.linears:
        weight = model.get_parameter(f"{name}.weight")
        if weight.is_meta:
            raise ValueError(f"{name} is on the meta device or offloaded: load the model with its weights")
        try:
            check_weight(weight, options)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def check_weight(weight: Tensor, options: Options) -> None:
    """Whether a weight can be quantized.

    Raises:
        ValueError: it is not in bf16, fp16 or fp32, holds infinity or NaN, or needs scales that overflow fp16.
    """
    if weight.dtype not in FLOAT_DTYPES:
        raise ValueError(f"the weight is {weight.dtype}; must be one of {', '.join(map(str, FLOAT_DTYPES))}")
    low, high = torch.aminmax(weight)
    largest = float(torch.maximum(low.abs(), high.abs()))
    limit = torch.finfo(torch.float16).max * (1 << (options.bits - 1)) / 2
    if not largest <= limit:
        raise ValueError(f"the weight's largest magnitude is {largest:g}; fp16 scales serve finite ones to {limit:g}")


def _quantized(linear: nn.Linear, options: Options) -> Int4Linear:
    grouped = quantize_weight(linear.weight, options)
    bias: Tensor | None = linear.bias  # which torch's own annotation forgets may be None
    spec = new_spec(grouped, options, None if bias is None else bias.dtype)
    return Int4Linear.from_grouped(grouped, bias, spec).train(linear.training)


def new_spec(weight: GroupedWeight, options: Options, bias_dtype: torch.dtype | None = None) -> LinearSpec:
    """How a weight of these options is stored."""
    return gptq_spec(
        (weight.out_features, weight.in_features),
        weight.bits,
        weight.group_size,
        v2=options.format == "gptq_v2",
        symmetric=options.symmetric,
        bias_dtype=bias_dtype,
    )


@torch.no_grad()
def quantize_weight(weight: Tensor, options: Options) -> GroupedWeight:
    """The quantized weight, on the weight's device. The same device gives the same result, whatever else it does.

    Args:
        weight: `[N, K]`, bf16, fp16 or fp32; K a multiple of the group size.

    Raises:
        ValueError: see `check_weight`.
    """
    check_weight(weight, options)
    rows, columns = weight.shape
    group_size = options.group_size_of(columns)
    groups = columns // group_size
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(groups, rows, dtype=torch.float16, device=weight.device)
    zeros = None if options.symmetric else torch.empty(groups, rows, dtype=torch.uint8, device=weight.device)
    for part in _row_slices(weight):
        values = weight[part].float().unflatten(1, (groups, group_size))
        found = _search(values, options)
        codes[part] = found.codes(values).to(torch.uint8).flatten(1)
        scales[:, part] = found.scale.squeeze(-1).T.half()
        if zeros is not None:
            zeros[:, part] = found.zero.squeeze(-1).T.to(torch.uint8)
    return GroupedWeight(codes, scales, zeros, None, options.bits, group_size)


@dataclass
class _Grid:
    """What groups `[..., size]` are rounded to: `scale * (code - zero)`, scale and zero `[..., 1]` in fp32."""

    scale: Tensor
    zero: Tensor
    levels: int

    def codes(self, values: Tensor) -> Tensor:
        """0 to levels - 1, in fp32."""
        return (values / self.scale).round_().add_(self.zero).clamp_(0, self.levels - 1)

    def error(self, values: Tensor, importance: Tensor) -> Tensor:
        """The sum of squared differences, each times its value's importance: `[..., 1]`."""
        difference = self.codes(values).sub_(self.zero).mul_(self.scale).sub_(values)
        return difference.square_().mul_(importance).sum(-1, keepdim=True)


def _search(values: Tensor, options: Options) -> _Grid:
    """The best of the candidates, group by group; of equals the first."""
    candidates = _symmetric(values, options) if options.symmetric else _asymmetric(values, options)
    importance = values.abs().add_(values.square().mean(-1, keepdim=True).sqrt_())
    best = next(candidates)
    least = best.error(values, importance)
    for candidate in candidates:
        error = candidate.error(values, importance)
        better = error < least
        least = torch.where(better, error, least)
        best.scale = torch.where(better, candidate.scale, best.scale)
    return best


def _symmetric(values: Tensor, options: Options) -> Iterator[_Grid]:
    """Scales of the sign that gives the largest magnitude the side with one code more; first plain rounding's."""
    half = 1 << (options.bits - 1)
    low, high = values.aminmax(dim=-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    zero = torch.full_like(largest, half)
    for steps in (half - 0.5, *(half * fraction for fraction in _SPANS)):
        yield _Grid(_stored(-largest / steps), zero, 2 * half)


def _asymmetric(values: Tensor, options: Options) -> Iterator[_Grid]:
    """Scales around one zero point; the first covers the group and zero, as plain rounding does.

    A zero point is never 0: files of version 1 hold it less one, and readers differ in what they make of -1.
    """
    top = (1 << options.bits) - 1
    low, high = values.amin(-1, keepdim=True).clamp_(max=0), values.amax(-1, keepdim=True).clamp_(min=0)
    scale = (high - low) / top
    zero = (-low / _stored(scale)).round_().clamp_(1, top)
    scale = torch.maximum(scale, high / (top - zero + 0.5))  # more only where the zero point would have been 0
    for fraction in _SHRINKS:
        yield _Grid(_stored(scale * fraction), zero, top + 1)


def _stored(scale: Tensor) -> Tensor:
    """Scales as fp16 has them; 1 where that is 0, as nothing but zeros is left then."""
    scale = scale.half().float()
    return torch.where(scale == 0, 1.0, scale)


def _row_slices(weight: Tensor) -> list[slice]:
    rows, columns = weight.shape
    step = max(1, (_SLICE_VALUES if weight.device.type == "cpu" else _SLICE_VALUES_GPU) // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]
