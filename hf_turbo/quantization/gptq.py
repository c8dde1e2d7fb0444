"""GPTQ's layout, v1 and v2: codes packed along the inputs, zero points along the outputs, both in plain order.

v1 stores each zero point less one. A zero point of 0 then wraps, and writers differ in how: gptqmodel subtracts from
the whole 32-bit word, with borrow (2, 4 and 8 bit); auto-gptq from each field, and sets every bit above a wrapped one:
what belongs there is lost.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .group_index import g_idx_of, perm_of, settle_g_idx, sort_columns, unsort_columns
from .packing import ones_per_field, pack_rows, unpack_rows, words_for
from .spec import (
    FLOATS,
    Layout,
    LinearSpec,
    TensorHeader,
    Tensors,
    check_bits,
    check_ranks,
    group_size_of,
    single_value,
    warn_once,
    without_default,
    zeros_or_default,
)
from .weight import SUPPORTED_BITS, GroupedWeight

Config = Mapping[str, Any]
Headers = Mapping[str, TensorHeader]
#: Tensors of one module to its spec.
Reader = Callable[[str, Headers], LinearSpec]

_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def shapes(spec: LinearSpec) -> dict[str, tuple[int, ...]]:
    """Of every tensor a GPTQ module may have."""
    columns = words_for(spec.out_features, spec.bits)
    return {
        "qweight": (words_for(spec.in_features, spec.bits), spec.out_features),
        "qzeros": (spec.num_groups, columns),
        "scales": (spec.num_groups, spec.out_features),
        "g_idx": (spec.in_features,),
        "bias": (spec.out_features,),
    }


def settle(tensors: Tensors, spec: LinearSpec) -> LinearSpec:
    """Adds what the values of `g_idx` and of the zero points say."""
    spec = settle_g_idx(tensors.get("g_idx"), spec)
    if spec.symmetric and spec.zero_offset != "none" and _says_v2(tensors["qzeros"], spec):
        warn_once(
            "A GPTQ checkpoint says it is symmetric and of format 'gptq' (v1), but its zero points are those of "
            "'gptq_v2': they are read as v2. Its checkpoint_format should say gptq_v2."
        )
        spec = dataclasses.replace(spec, zero_offset="none")
    padding = _true_zeros(tensors["qzeros"], spec)[:, spec.out_features :]
    if padding.numel():
        value = int(padding[0, 0])
        if not bool((padding == value).all()):
            raise ValueError("qzeros holds different values behind the last output: these could not be written back")
        spec = dataclasses.replace(spec, zero_padding=value)
    return spec


def decode(tensors: Tensors, spec: LinearSpec) -> GroupedWeight:
    """A settled spec's tensors as a weight."""
    if spec.zero_offset == "auto_gptq":
        _warn_of_lost_zeros(tensors["qzeros"], spec.bits)
    perm = perm_of(tensors.get("g_idx"), spec)
    codes = unpack_rows(tensors["qweight"].T, spec.bits, spec.in_features)
    zeros = _true_zeros(tensors["qzeros"], spec)[:, : spec.out_features]
    return GroupedWeight(
        sort_columns(codes, perm),
        tensors["scales"],
        without_default(zeros, spec),
        perm,
        spec.bits,
        spec.group_size,
    )


def encode(weight: GroupedWeight, spec: LinearSpec) -> dict[str, Tensor]:
    """The inverse of `decode`."""
    return {
        "qweight": pack_rows(unsort_columns(weight), spec.bits).T.contiguous(),
        "qzeros": _stored_zeros(zeros_or_default(weight, spec), spec),
        "scales": weight.scales,
        **g_idx_of(weight, spec, "g_idx"),
    }


LAYOUT = Layout(
    {"qweight": (torch.int32,), "qzeros": (torch.int32,), "scales": FLOATS, "g_idx": (torch.int32,), "bias": FLOATS},
    optional=frozenset({"g_idx", "bias"}),
    shapes=shapes,
    decode=decode,
    encode=encode,
    settle=settle,
)


def _true_zeros(qzeros: Tensor, spec: LinearSpec) -> Tensor:
    """uint8 `[G, fields]`, with the fields behind the last output."""
    fields = qzeros.shape[1] * 32 // spec.bits
    if spec.zero_offset == "words":
        return unpack_rows(qzeros + ones_per_field(spec.bits), spec.bits, fields)
    zeros = unpack_rows(qzeros, spec.bits, fields)
    if spec.zero_offset != "none":
        zeros = zeros + 1 & (1 << spec.bits) - 1
    return zeros


def _stored_zeros(zeros: Tensor, spec: LinearSpec) -> Tensor:
    fields = words_for(spec.out_features, spec.bits) * 32 // spec.bits
    zeros = torch.nn.functional.pad(zeros, (0, fields - spec.out_features), value=spec.zero_padding)
    if spec.zero_offset == "words":
        return pack_rows(zeros, spec.bits) - ones_per_field(spec.bits)
    if spec.zero_offset != "none":
        zeros = zeros - 1 & (1 << spec.bits) - 1
    return pack_rows(zeros, spec.bits)


def _says_v2(qzeros: Tensor, spec: LinearSpec) -> bool:
    """Whether every stored zero point is what only v2 stores for a symmetric weight."""
    zeros = unpack_rows(qzeros, spec.bits, spec.out_features)
    return bool((zeros == spec.default_zero).all())


def _warn_of_lost_zeros(qzeros: Tensor, bits: int) -> None:
    # A wrapped field sets every bit above it. Two such fields at the top of a word may also be two true zeros.
    top = ((1 << 2 * bits) - 1) << (32 - 2 * bits)
    if bool(((qzeros.long() & top) == top).any()):
        warn_once(
            "A GPTQ checkpoint holds words whose upper zero points are all ones: auto-gptq writes those where a zero "
            "point is 0, over the zero points that belong there. They are read as 0, as auto-gptq reads them. Weights "
            "may differ from those that were quantized; a checkpoint made by gptqmodel has no such words."
        )


def reader(config: Config) -> Reader:
    """Checks a GPTQ config, and returns what makes specs of its modules.

    Raises:
        NotImplementedError: bits, a packing or a checkpoint_format that is not read.
        ValueError: keys that contradict each other.
    """
    version = _VERSIONS[checkpoint_format(config)]
    check_pack_dtype(config)
    dynamic = config.get("dynamic") or {}
    for pattern, rule in dynamic.items():
        _check_rule(pattern, rule or {}, config)
    if not dynamic:
        check_bits(config.get("bits", 4), "the GPTQ config")
    offset = "none" if version == 2 else "words" if _made_by_gptqmodel(config) else "auto_gptq"

    def read(module: str, tensors: Headers) -> LinearSpec:
        LAYOUT.check_names(module, tensors)
        check_ranks(module, tensors, ("qweight", "qzeros", "scales"))
        settings = _settings(module, config, dynamic)
        bits, in_features = _width(module, tensors, settings.get("bits"))
        size = group_size_of(module, settings.get("group_size"), in_features, tensors["scales"].shape[0])
        spec = LinearSpec(
            layout="gptq",
            bits=bits,
            group_size=size,
            in_features=in_features,
            out_features=tensors["scales"].shape[1],
            tensors=dict(tensors),
            zero_offset="fields" if offset == "words" and bits == 3 else offset,
            symmetric=settings.get("sym") is True,
        )
        LAYOUT.check(module, spec)
        return spec

    return read


def checkpoint_format(config: Config) -> str:
    """ "gptq", "gptq_v2" or "marlin", in whichever of its spellings.

    Raises:
        NotImplementedError: any other.
    """
    named = {str(config[key]).lower() for key in ("checkpoint_format", "format") if config.get(key)}
    if config.get("is_marlin_format") or config.get("quant_method") == "marlin":
        named.add("marlin")
    name = single_value(named, "checkpoint_format") or "gptq"
    if name not in (*_VERSIONS, "marlin"):
        raise NotImplementedError(f"GPTQ checkpoint_format {name!r}; supported: gptq, gptq_v2, marlin")
    return name


def check_pack_dtype(config: Config) -> None:
    """Raises for words of other than 32 bits."""
    name = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    if name != "int32":
        raise NotImplementedError(f"pack_dtype {name}; supported: int32")


def _made_by_gptqmodel(config: Config) -> bool:
    writers = (config.get("meta") or {}).get("quantizer") or []
    return any(str(writer).startswith("gptqmodel") for writer in ([writers] if isinstance(writers, str) else writers))


def _check_rule(pattern: str, rule: Mapping[str, Any], config: Config) -> None:
    """A `dynamic` rule may change bits, group size and the like, not the layout."""
    check_pack_dtype(rule)
    for key in ("checkpoint_format", "format", "method", "quant_method"):
        if key in rule and rule[key] != config.get(key, rule[key]):
            own = config.get(key)
            raise NotImplementedError(f"dynamic rule {pattern!r} sets {key} {rule[key]!r}; supported: {own!r}")


def _settings(module: str, config: Config, dynamic: Mapping[str, Any]) -> Config:
    """The config as it stands for one module: the first `dynamic` rule that matches its name counts.

    Raises:
        ValueError: the rule excludes the module, which is quantized all the same.
    """
    for pattern, rule in dynamic.items():
        sign = pattern[:2] if pattern[:2] in ("+:", "-:") else ""
        if re.match(pattern.removeprefix(sign), module):
            if sign == "-:":
                raise ValueError(f"{module} is quantized, but the config's dynamic rule {pattern!r} excludes it")
            return {**config, **(rule or {})}
    # auto-round's overrides, by the module's name.
    return {**config, **((config.get("extra_config") or {}).get(module) or {})}


def _width(module: str, tensors: Headers, configured: Any) -> tuple[int, int]:
    """Bits and inputs of a module, by its tensors.

    Raises:
        ValueError: they say something else than the config.
        NotImplementedError: bits that are not read.
    """
    if configured is not None:
        check_bits(configured, module)
    rows, outputs = tensors["qweight"].shape
    if "g_idx" in tensors:
        in_features = tensors["g_idx"].shape[0] if len(tensors["g_idx"].shape) == 1 else 0
        fitting = [bits for bits in SUPPORTED_BITS if words_for(in_features, bits) == rows]
    else:
        fitting = [bits for bits in SUPPORTED_BITS if words_for(outputs, bits) == tensors["qzeros"].shape[1]]
    bits = configured if configured is not None or len(fitting) != 1 else fitting[0]
    if bits not in fitting:
        held = {name: list(header.shape) for name, header in tensors.items()}
        raise ValueError(f"{module}: the config says {configured} bits, the tensors could have {fitting}: {held}")
    return bits, tensors["g_idx"].shape[0] if "g_idx" in tensors else rows * 32 // bits


def gptq_spec(
    weight_shape: Sequence[int],
    bits: int,
    group_size: int,
    *,
    v2: bool = False,
    symmetric: bool = False,
    scales_dtype: torch.dtype = torch.float16,
    bias_dtype: torch.dtype | None = None,
) -> LinearSpec:
    """The spec of a new GPTQ module, with a `g_idx`, as gptqmodel would write it.

    Args:
        weight_shape: `[N, K]`.
        group_size: -1: one group.
        v2: store the zero points as they are.
        symmetric: all zero points are 2**(bits-1).
        bias_dtype: None: no bias.
    """
    out_features, in_features = weight_shape
    check_bits(bits, "a new GPTQ module")
    offset = "none" if v2 else "fields" if bits == 3 else "words"
    size = in_features if group_size == -1 else min(group_size, in_features)
    spec = LinearSpec("gptq", bits, size, in_features, out_features, {}, offset, symmetric)
    dtypes = {"scales": scales_dtype, "bias": bias_dtype}
    tensors = {
        name: TensorHeader(dtypes.get(name) or torch.int32, shape)
        for name, shape in shapes(spec).items()
        if name != "bias" or bias_dtype is not None
    }
    return dataclasses.replace(spec, tensors=tensors)
