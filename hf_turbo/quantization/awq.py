"""AWQ's layouts gemm, gemv and gemv_fast: 4 bit, true zero points, groups in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import marlin
from .gptq import Config, Headers, Reader, check_pack_dtype
from .packing import pack_awq, pack_gemv_fast, pack_rows, unpack_awq, unpack_gemv_fast, unpack_rows
from .spec import (
    FLOATS,
    Layout,
    LinearSpec,
    Tensors,
    check_bits,
    check_ranks,
    group_size_of,
    single_value,
    without_default,
    zeros_or_default,
)
from .weight import GroupedWeight

_WORDS = {"qweight": (torch.int32,), "qzeros": (torch.int32,), "scales": FLOATS, "bias": FLOATS}
_FAST_WORDS = {"qweight": (torch.int16,), "qzeros": (torch.float16,), "scales": (torch.float16,), "bias": FLOATS}
_OPTIONAL = frozenset({"bias"})

# Groups whose zero points gemv pads together, by group size: the kernel's loads.
_GEMV_PADDING = {64: 2, 32: 4}


def _gemm_shapes(spec: LinearSpec) -> dict[str, tuple[int, ...]]:
    return {
        "qweight": (spec.in_features, spec.out_features // 8),
        "qzeros": (spec.num_groups, spec.out_features // 8),
        "scales": (spec.num_groups, spec.out_features),
        "bias": (spec.out_features,),
    }


def _decode_gemm(tensors: Tensors, spec: LinearSpec) -> GroupedWeight:
    zeros = without_default(unpack_awq(tensors["qzeros"]), spec)
    codes = unpack_awq(tensors["qweight"]).T.contiguous()
    return GroupedWeight(codes, tensors["scales"], zeros, None, 4, spec.group_size)


def _encode_gemm(weight: GroupedWeight, spec: LinearSpec) -> dict[str, Tensor]:
    qzeros = pack_awq(zeros_or_default(weight, spec))
    return {"qweight": pack_awq(weight.codes.T), "qzeros": qzeros, "scales": weight.scales}


GEMM = Layout(_WORDS, _OPTIONAL, _gemm_shapes, _decode_gemm, _encode_gemm)


def padded_words(spec: LinearSpec) -> int:
    """Words of eight groups in a row of gemv's zero points."""
    multiple = _GEMV_PADDING.get(spec.group_size, 1)
    return -(-spec.num_groups // (8 * multiple)) * multiple


def _gemv_shapes(spec: LinearSpec) -> dict[str, tuple[int, ...]]:
    width = padded_words(spec)
    return {
        "qweight": (spec.out_features, spec.in_features // 8),
        "qzeros": (spec.out_features, width),
        "scales": (spec.out_features, 8 * width),
        "bias": (spec.out_features,),
    }


def _decode_gemv(tensors: Tensors, spec: LinearSpec) -> GroupedWeight:
    fields = unpack_rows(tensors["qzeros"], 4, 8 * padded_words(spec))
    _check_padding("qzeros", fields[:, spec.num_groups :])
    _check_padding("scales", tensors["scales"][:, spec.num_groups :])
    zeros = without_default(fields[:, : spec.num_groups].T, spec)
    scales = tensors["scales"][:, : spec.num_groups].T.contiguous()
    codes = unpack_rows(tensors["qweight"], 4, spec.in_features)
    return GroupedWeight(codes, scales, zeros, None, 4, spec.group_size)


def _encode_gemv(weight: GroupedWeight, spec: LinearSpec) -> dict[str, Tensor]:
    missing = 8 * padded_words(spec) - spec.num_groups
    zeros = torch.nn.functional.pad(zeros_or_default(weight, spec).T, (0, missing))
    scales = torch.nn.functional.pad(weight.scales.T, (0, missing)).contiguous()
    return {"qweight": pack_rows(weight.codes, 4), "qzeros": pack_rows(zeros, 4), "scales": scales}


GEMV = Layout(_WORDS, _OPTIONAL, _gemv_shapes, _decode_gemv, _encode_gemv)


def _fast_shapes(spec: LinearSpec) -> dict[str, tuple[int, ...]]:
    rows = 8 * padded_words(spec)
    return {
        "qweight": (spec.out_features // 4, spec.in_features),
        "qzeros": (rows, spec.out_features),
        "scales": (rows, spec.out_features),
        "bias": (spec.out_features,),
    }


def _decode_fast(tensors: Tensors, spec: LinearSpec) -> GroupedWeight:
    for name in ("qzeros", "scales"):
        _check_padding(name, tensors[name][spec.num_groups :])
    scales, products = tensors["scales"][: spec.num_groups], tensors["qzeros"][: spec.num_groups]
    # A group of zeros has no zero point to recover.
    zeros = torch.where(scales == 0, 0, -products.float() / scales.float()).round().clamp(0, 15).byte()
    if not torch.equal(_products(scales, zeros), products):
        raise NotImplementedError("gemv_fast qzeros that are not -scales times a whole number from 0 to 15")
    codes = unpack_gemv_fast(tensors["qweight"])
    return GroupedWeight(codes, scales.contiguous(), without_default(zeros, spec), None, 4, spec.group_size)


def _encode_fast(weight: GroupedWeight, spec: LinearSpec) -> dict[str, Tensor]:
    padding = (0, 0, 0, 8 * padded_words(spec) - spec.num_groups)
    products = _products(weight.scales, zeros_or_default(weight, spec))
    return {
        "qweight": pack_gemv_fast(weight.codes),
        "qzeros": torch.nn.functional.pad(products, padding),
        "scales": torch.nn.functional.pad(weight.scales, padding),
    }


def _products(scales: Tensor, zeros: Tensor) -> Tensor:
    return -(scales.float() * zeros.float()).half()


GEMV_FAST = Layout(_FAST_WORDS, _OPTIONAL, _fast_shapes, _decode_fast, _encode_fast)


def _check_padding(name: str, padding: Tensor) -> None:
    if bool((padding != 0).any()):
        raise ValueError(f"{name} must be 0 behind the last group")


def _gemm_size(tensors: Headers) -> tuple[int, int]:
    rows, words = tensors["qweight"].shape
    return rows, 8 * words


def _gemv_size(tensors: Headers) -> tuple[int, int]:
    rows, words = tensors["qweight"].shape
    return 8 * words, rows


def _fast_size(tensors: Headers) -> tuple[int, int]:
    rows, columns = tensors["qweight"].shape
    return columns, 4 * rows


_Size = Callable[[Headers], tuple[int, int]]
_VERSIONS: dict[str, tuple[Layout, _Size]] = {
    "gemm": (GEMM, _gemm_size),
    "gemv": (GEMV, _gemv_size),
    "gemv_fast": (GEMV_FAST, _fast_size),
}


def reader(config: Config) -> Reader:
    """Checks an AWQ config, and returns what makes specs of its modules.

    Raises:
        NotImplementedError: bits, a packing or a version that is not read.
        ValueError: keys that contradict each other.
    """
    version = _version(config)
    check_pack_dtype(config)
    check_bits(_either(config, "bits", "w_bit") or 4, "the AWQ config", allowed=(4,))
    if version == "marlin":
        return marlin.reader(config, "awq_marlin")
    group_size = _either(config, "group_size", "q_group_size")
    if group_size is None and version != "gemm":
        raise ValueError(f"AWQ {version} pads its groups: the config must say what group_size is")
    layout, size_of = _VERSIONS[version]

    def read(module: str, tensors: Headers) -> LinearSpec:
        layout.check_names(module, tensors)
        check_ranks(module, tensors, ("qweight", "qzeros", "scales"))
        in_features, out_features = size_of(tensors)
        groups = tensors["scales"].shape[0] if version == "gemm" else _gemv_groups(module, group_size, in_features)
        spec = LinearSpec(
            layout=f"awq_{version}",
            bits=4,
            group_size=group_size_of(module, group_size, in_features, groups),
            in_features=in_features,
            out_features=out_features,
            tensors=dict(tensors),
        )
        if version == "gemv_fast" and in_features % 64:
            raise ValueError(f"{module}: AWQ gemv_fast needs a multiple of 64 inputs, got {in_features}")
        layout.check(module, spec)
        return spec

    return read


def _gemv_groups(module: str, group_size: int, in_features: int) -> int:
    size = in_features if group_size == -1 else group_size
    if size not in _GEMV_PADDING and size < 128:
        raise NotImplementedError(f"{module}: AWQ gemv with groups of {size}; supported: 32, 64, 128 and more, -1")
    if in_features % size:
        raise ValueError(f"{module}: AWQ gemv needs whole groups, got {in_features} inputs in groups of {size}")
    return in_features // size


def _version(config: Config) -> str:
    if config.get("backend") == "llm-awq":
        raise NotImplementedError("AWQ checkpoints of llm-awq; supported: those of autoawq and gptqmodel")
    keys = ("version", "format", "checkpoint_format")
    named = {str(config[key]).lower() for key in keys if config.get(key)}
    version = single_value(named, "version") or "gemm"
    if version not in (*_VERSIONS, "marlin"):
        raise NotImplementedError(f"AWQ version {version!r}; supported: {', '.join(_VERSIONS)}, marlin")
    return version


def _either(config: Config, name: str, old: str) -> Any:
    """A key's value, also under the name that old files have for it."""
    return single_value({config.get(name), config.get(old)}, name)
