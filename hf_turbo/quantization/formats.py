"""The layouts of quantized linears in checkpoint files: what is there, reading it, and writing the same bytes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import awq, gptq, marlin, pack_quantized
from .gptq import Config, Reader, gptq_spec
from .spec import Layout, LinearSpec, TensorHeader, Tensors
from .weight import GroupedWeight

__all__ = ["LAYOUTS", "LinearSpec", "TensorHeader", "decode", "encode", "gptq_spec", "linear_specs", "settle"]

LAYOUTS: dict[str, Layout] = {
    "gptq": gptq.LAYOUT,
    "awq_gemm": awq.GEMM,
    "awq_gemv": awq.GEMV,
    "awq_gemv_fast": awq.GEMV_FAST,
    **marlin.LAYOUTS,
    "pack_quantized": pack_quantized.LAYOUT,
}

# A module with all of one of these is quantized.
_CODES = ({"qweight"}, {"weight_packed"}, {"B", "s"})
# One with any of these is, too, and lacks its codes.
_PARTS = {"qzeros", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}


def _gptq_reader(config: Config) -> Reader:
    if gptq.checkpoint_format(config) == "marlin":
        return marlin.reader(config, "gptq_marlin")
    return gptq.reader(config)


def _auto_round_reader(config: Config) -> Reader:
    name = config.get("packing_format")
    if name not in _AUTO_ROUND:
        raise NotImplementedError(f"auto-round packing_format {name!r}; supported: {', '.join(_AUTO_ROUND)}")
    if config.get("data_type", "int") != "int" or (config.get("act_bits") or 16) < 16:
        raise NotImplementedError("auto-round checkpoints of other than whole-number weights and float activations")
    return _AUTO_ROUND[name](config)


_AUTO_ROUND: dict[str, Callable[[Config], Reader]] = {
    "auto_round:auto_gptq": gptq.reader,
    "auto_round:auto_awq": awq.reader,
}
_METHODS: dict[str, Callable[[Config], Reader]] = {
    "gptq": _gptq_reader,
    "marlin": _gptq_reader,
    "awq": awq.reader,
    "auto-round": _auto_round_reader,
    "compressed-tensors": pack_quantized.reader,
}


def linear_specs(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, LinearSpec]:
    """Which modules of a checkpoint are quantized, and how each of them lies in it. Reads no tensor.

    Args:
        config: `quantization_config` of config.json, or the content of an old tool's quantize_config.json or
            quant_config.json.
        headers: dtype and shape of every tensor of the checkpoint, by its full name.

    Returns:
        Module name to spec, for every module that has codes, whatever the config's lists of exceptions say.

    Raises:
        NotImplementedError: a method, layout, number of bits or packing that is not read; names it.
        ValueError: tensors that are missing, of wrong shapes, or that contradict the config.
    """
    read = _METHODS[_method(config)](config)
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        module, _, short = name.rpartition(".")
        modules.setdefault(module, {})[short] = TensorHeader(header[0], tuple(header[1]))
    specs = {}
    for module, tensors in modules.items():
        if _is_quantized(module, tensors):
            specs[module] = read(module, tensors)
    if not specs:
        raise ValueError("the checkpoint has a quantization config, but no quantized weights")
    return specs


def settle(tensors: Tensors, spec: LinearSpec) -> LinearSpec:
    """The spec with what only the tensors' values say: a `g_idx` that says nothing, v2's zero points in a v1 file.

    Args:
        tensors: by their short names ("qweight"), on any device.

    Raises:
        ValueError: values that could not be written back.
    """
    return LAYOUTS[spec.layout].settle(tensors, spec)


def decode(tensors: Tensors, spec: LinearSpec) -> GroupedWeight:
    """The weight in a module's tensors, on their device. The bias is not looked at.

    Args:
        tensors: by their short names ("qweight").
        spec: of `linear_specs`, settled or not.

    Raises:
        ValueError: a `g_idx` that gives no equal groups, or values out of range.
        NotImplementedError: zero points that are no whole numbers.
    """
    return LAYOUTS[spec.layout].decode(tensors, settle(tensors, spec))


def encode(weight: GroupedWeight, spec: LinearSpec, bias: Tensor | None = None) -> dict[str, Tensor]:
    """A module's tensors by their short names, bit for bit those that `decode` read.

    Args:
        spec: settled, where the file may be one of the odd ones that `settle` tells apart.
        bias: written where the spec has one; None: zeros.

    Raises:
        ValueError: a weight or a bias that the spec's tensors cannot hold.
    """
    shape = (spec.out_features, spec.in_features)
    if weight.codes.shape != shape or (weight.bits, weight.group_size) != (spec.bits, spec.group_size):
        raise ValueError(
            f"the checkpoint holds {list(shape)} of {spec.bits} bits in groups of {spec.group_size}, the weight is "
            f"{list(weight.codes.shape)} of {weight.bits} bits in groups of {weight.group_size}"
        )
    if bias is not None and not spec.has_bias:
        raise ValueError("a bias cannot be stored: the checkpoint has none for this module")
    tensors = LAYOUTS[spec.layout].encode(weight, spec)
    if spec.has_bias:
        header = spec.tensors["bias"]
        zeros = torch.zeros(header.shape, dtype=header.dtype, device=weight.codes.device)
        tensors["bias"] = zeros if bias is None else bias
    return {name: _in_dtype(name, tensor, spec.tensors[name].dtype) for name, tensor in tensors.items()}


def _in_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.to(dtype)
    if stored.dtype != tensor.dtype and not torch.equal(stored.to(tensor.dtype), tensor):
        raise ValueError(f"{name} is {tensor.dtype} and cannot be stored as {dtype} without loss")
    return stored


def _method(config: Mapping[str, Any]) -> str:
    """quant_method, also of old files that do not say it."""
    name = config.get("quant_method") or config.get("method")
    if name is None and ("w_bit" in config or "zero_point" in config):
        name = "awq"
    elif name is None and "bits" in config and ("desc_act" in config or "sym" in config):
        name = "gptq"
    name = str(name).lower()
    if name not in _METHODS:
        raise NotImplementedError(f"quant_method {name!r}; supported: {', '.join(_METHODS)}")
    return name


def _is_quantized(module: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Raises for a module with half of what a quantized one has, or with a plain weight besides."""
    names = tensors.keys()
    if any(codes <= names for codes in _CODES):
        if "weight" in names:
            raise ValueError(f"{module} has both a weight and a quantized one: {sorted(names)}")
        return True
    if names & _PARTS:
        raise ValueError(f"{module} has {sorted(names)}, but none of the codes of a quantized weight")
    if "scales" in names:
        raise NotImplementedError(f"{module} has scales of activations (AWQ's ScaledActivation)")
    return False
