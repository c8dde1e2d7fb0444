"""How one quantized linear lies in its file, and what a layout has to say of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor

from .weight import SUPPORTED_BITS, GroupedWeight

#: What scales and biases may be stored as.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class TensorHeader(NamedTuple):
    """What a file says of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LinearSpec:
    """How one quantized linear lies in its file: all that is needed beside its weight to write the same bytes again.

    Attributes:
        layout: a name of `formats.LAYOUTS`.
        bits: 2, 3, 4 or 8.
        group_size: 1 to `in_features`.
        in_features: K.
        out_features: N.
        tensors: the file's tensors by their short names ("qweight"), the bias among them.
        zero_offset: GPTQ: how the file's zeros become true ones. "none", or 1 is added: to the whole "words" with
            carry, to each of the "fields" without, or so in a file that may lack some of them ("auto_gptq").
        symmetric: the config says that all zero points are 2**(bits-1).
        unset_g_idx: what fills a `g_idx` that says nothing (0, or -1), None where it says something.
        zero_padding: the zero point in fields behind the last one.
    """

    layout: str
    bits: int
    group_size: int
    in_features: int
    out_features: int
    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)
    zero_offset: str = "none"
    symmetric: bool = False
    unset_g_idx: int | None = None
    zero_padding: int = 0

    @property
    def num_groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def has_bias(self) -> bool:
        """Whether the file holds a bias (auto-gptq writes zeros where the model has none)."""
        return "bias" in self.tensors

    @property
    def default_zero(self) -> int:
        return 1 << (self.bits - 1)


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """One way to store a quantized linear.

    Attributes:
        dtypes: of each tensor that may be there, those allowed.
        optional: the tensors that may be missing.
        shapes: what shape each tensor has.
        decode: tensors to a weight.
        encode: a weight to tensors, without the bias.
        settle: completes a spec by what only values say.
    """

    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    optional: frozenset[str]
    shapes: Callable[[LinearSpec], dict[str, tuple[int, ...]]]
    decode: Callable[[Tensors, LinearSpec], GroupedWeight]
    encode: Callable[[GroupedWeight, LinearSpec], dict[str, Tensor]]
    settle: Callable[[Tensors, LinearSpec], LinearSpec] = lambda tensors, spec: spec

    def check_names(self, module: str, tensors: Mapping[str, TensorHeader]) -> None:
        """Raises for a module without all of its tensors, or with tensors that this layout knows nothing of."""
        if missing := sorted(self.dtypes.keys() - self.optional - tensors.keys()):
            raise ValueError(f"{module}: the checkpoint has {sorted(tensors)} but no {missing}")
        if unknown := sorted(tensors.keys() - self.dtypes.keys()):
            raise NotImplementedError(f"{module}: tensors {unknown} are not of this layout ({sorted(self.dtypes)})")

    def check(self, module: str, spec: LinearSpec) -> None:
        """Raises where the tensors are not what the spec asks for."""
        shapes = self.shapes(spec)
        for name, (dtype, shape) in spec.tensors.items():
            if dtype not in self.dtypes[name]:
                allowed = ", ".join(map(str, self.dtypes[name]))
                raise NotImplementedError(f"{module}.{name} is {dtype}; supported: {allowed}")
            if tuple(shape) != shapes[name]:
                raise ValueError(
                    f"{module}.{name} is {list(shape)}, but {list(shapes[name])} is what {spec.bits} bits with groups "
                    f"of {spec.group_size} for {spec.in_features} inputs and {spec.out_features} outputs take"
                )


def check_bits(bits: Any, where: str, allowed: tuple[int, ...] = SUPPORTED_BITS) -> None:
    """Raises for a width that is not read."""
    if bits not in allowed:
        raise NotImplementedError(f"{where}: {bits} bits; supported: {', '.join(map(str, allowed))}")


def check_ranks(module: str, tensors: Mapping[str, TensorHeader], matrices: tuple[str, ...]) -> None:
    """Raises where one of these is no matrix, or empty."""
    for name in matrices:
        shape = tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{module}.{name} must be a matrix, got {list(shape)}")


def group_size_of(module: str, configured: int | None, in_features: int, groups: int) -> int:
    """The group size of one linear: what the config says (-1: one group), checked against the number of groups.

    Raises:
        ValueError: they contradict each other.
    """
    if configured is None:
        configured = -(-in_features // groups)
    size = in_features if configured == -1 else configured
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{module}: group_size must be positive or -1, got {configured}")
    size = min(size, in_features)
    if -(-in_features // size) != groups:
        raise ValueError(
            f"{module}: the config's group_size {configured} makes {-(-in_features // size)} groups of {in_features} "
            f"inputs, the scales have {groups}"
        )
    return size


def single_value(values: set[Any], what: str) -> Any:
    """The one value that several keys agree on, None where there is none."""
    values = values - {None}
    if len(values) > 1:
        raise ValueError(f"the quantization config contradicts itself on {what}: {sorted(map(str, values))}")
    return next(iter(values), None)


def without_default(zeros: Tensor, spec: LinearSpec) -> Tensor | None:
    """Zeros, or None where all of them are 2**(bits-1)."""
    return None if bool((zeros == spec.default_zero).all()) else zeros.contiguous()


def zeros_or_default(weight: GroupedWeight, spec: LinearSpec) -> Tensor:
    """uint8 `[G, N]`, also where the weight leaves them out."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, spec.default_zero, dtype=torch.uint8)


@cache
def warn_once(message: str) -> None:
    """A warning that is said once, not for each of hundreds of layers."""
    warn(message, stacklevel=2)
