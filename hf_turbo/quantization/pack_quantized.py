"""compressed-tensors' pack-quantized layout: 4 or 8 bit, packed along the inputs, signed codes with an offset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .gptq import Config, Headers, Reader
from .group_index import g_idx_of, perm_of, settle_g_idx, sort_columns, unsort_columns
from .packing import pack_rows, unpack_rows, words_for
from .spec import (
    FLOATS,
    Layout,
    LinearSpec,
    Tensors,
    check_bits,
    check_ranks,
    group_size_of,
    without_default,
    zeros_or_default,
)
from .weight import GroupedWeight

_FORMAT = "pack-quantized"


def _shapes(spec: LinearSpec) -> dict[str, tuple[int, ...]]:
    return {
        "weight_packed": (spec.out_features, words_for(spec.in_features, spec.bits)),
        "weight_scale": (spec.out_features, spec.num_groups),
        "weight_zero_point": (words_for(spec.out_features, spec.bits), spec.num_groups),
        "weight_shape": (2,),
        "weight_g_idx": (spec.in_features,),
        "bias": (spec.out_features,),
    }


def _settle(tensors: Tensors, spec: LinearSpec) -> LinearSpec:
    return settle_g_idx(tensors.get("weight_g_idx"), spec)


def _decode(tensors: Tensors, spec: LinearSpec) -> GroupedWeight:
    shape = tensors["weight_shape"].tolist()
    if shape != [spec.out_features, spec.in_features]:
        raise ValueError(f"weight_shape says {shape}, the tensors are [{spec.out_features}, {spec.in_features}]")
    perm = perm_of(tensors.get("weight_g_idx"), spec)
    codes = unpack_rows(tensors["weight_packed"], spec.bits, spec.in_features)
    zeros = None
    if "weight_zero_point" in tensors:
        fields = unpack_rows(tensors["weight_zero_point"].T, spec.bits, spec.out_features)
        zeros = without_default(fields, spec)
    scales = tensors["weight_scale"].T.contiguous()
    return GroupedWeight(sort_columns(codes, perm), scales, zeros, perm, spec.bits, spec.group_size)


def _encode(weight: GroupedWeight, spec: LinearSpec) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": pack_rows(unsort_columns(weight), spec.bits),
        "weight_scale": weight.scales.T.contiguous(),
        "weight_shape": torch.tensor([spec.out_features, spec.in_features], device=weight.codes.device),
        **g_idx_of(weight, spec, "weight_g_idx"),
    }
    if "weight_zero_point" in spec.tensors:
        tensors["weight_zero_point"] = pack_rows(zeros_or_default(weight, spec), spec.bits).T.contiguous()
    elif weight.zeros is not None:
        raise ValueError("a weight with zero points cannot be stored: the checkpoint is symmetric")
    return tensors


LAYOUT = Layout(
    {
        "weight_packed": (torch.int32,),
        "weight_scale": FLOATS,
        "weight_zero_point": (torch.int32,),
        "weight_shape": (torch.int64,),
        "weight_g_idx": (torch.int32,),
        "bias": FLOATS,
    },
    optional=frozenset({"weight_zero_point", "weight_g_idx", "bias"}),
    shapes=_shapes,
    decode=_decode,
    encode=_encode,
    settle=_settle,
)


def reader(config: Config) -> Reader:
    """Checks a compressed-tensors config, and returns what makes specs of its modules.

    Raises:
        NotImplementedError: anything but weights of 4 or 8 bits in the pack-quantized format.
    """
    _check_config(config)
    groups: dict[str, Mapping[str, Any]] = config["config_groups"]
    for name, group in groups.items():
        _check_group(name, group)

    def read(module: str, tensors: Headers) -> LinearSpec:
        LAYOUT.check_names(module, tensors)
        check_ranks(module, tensors, ("weight_packed", "weight_scale"))
        weights = _group_of(module, groups)["weights"]
        bits = weights["num_bits"]
        out_features, words = tensors["weight_packed"].shape
        # The exact number of inputs is in weight_shape, a value: checked once it is read.
        in_features = words * 32 // bits
        configured = -1 if weights["strategy"] == "channel" else weights["group_size"]
        size = group_size_of(module, configured, in_features, tensors["weight_scale"].shape[1])
        if weights.get("symmetric") is False and "weight_zero_point" not in tensors:
            raise ValueError(f"{module}: the config says it is asymmetric, but it has no weight_zero_point")
        spec = LinearSpec("pack_quantized", bits, size, in_features, out_features, dict(tensors))
        LAYOUT.check(module, spec)
        return spec

    return read


def _check_config(config: Config) -> None:
    _only("format", config.get("format"), _FORMAT)
    _only("quantization_status", config.get("quantization_status"), None, "compressed")
    _only("kv_cache_scheme", config.get("kv_cache_scheme"), None)
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise NotImplementedError(f"compressed-tensors with sparsity ({config['sparsity_config']['format']})")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise NotImplementedError("compressed-tensors with a transform_config (rotated weights)")
    if not config.get("config_groups"):
        raise ValueError("the compressed-tensors config has no config_groups")


def _check_group(name: str, group: Mapping[str, Any]) -> None:
    _only(f"format of {name}", group.get("format"), None, _FORMAT)
    for key in ("input_activations", "output_activations"):
        _only(f"{key} of {name}", group.get(key), None)
    weights = group.get("weights") or {}
    check_bits(weights.get("num_bits"), f"compressed-tensors {name}", allowed=(4, 8))
    _only(f"type of {name}", weights.get("type"), "int")
    _only(f"strategy of {name}", weights.get("strategy"), "group", "channel")
    _only(f"dynamic of {name}", weights.get("dynamic"), None, False)
    _only(f"block_structure of {name}", weights.get("block_structure"), None)


def _only(what: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        names = ", ".join("nothing" if choice is None else str(choice) for choice in allowed)
        raise NotImplementedError(f"compressed-tensors {what} {value!r}; supported: {names}")


def _group_of(module: str, groups: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The group whose targets name the module or match its name, else the one for its class."""
    by_class = None
    for group in groups.values():
        for target in group.get("targets") or []:
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return group
            if target == "Linear":
                by_class = by_class or group
    if by_class is None:
        raise ValueError(f"{module} is quantized, but no config_group has it as a target")
    return by_class
