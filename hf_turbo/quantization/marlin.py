"""The legacy Marlin layout, as auto-gptq (`B`, `s`) and autoawq (`qweight`, `scales`) name it: 4 bit, symmetric."""

from __future__ import annotations

import torch
from torch import Tensor

from .gptq import Config, Headers, Reader
from .packing import pack_marlin, pack_marlin_scales, unpack_marlin, unpack_marlin_scales
from .spec import Layout, LinearSpec, Tensors, check_bits, check_ranks, group_size_of, single_value
from .weight import GroupedWeight

# Columns that a run of codes, and a run of scales, covers.
_COLUMNS = 64


def _layout(codes: str, scales: str) -> Layout:
    def shapes(spec: LinearSpec) -> dict[str, tuple[int, ...]]:
        return {
            codes: (spec.in_features // 16, 2 * spec.out_features),
            scales: (spec.num_groups, spec.out_features),
            "bias": (spec.out_features,),
        }

    def decode(tensors: Tensors, spec: LinearSpec) -> GroupedWeight:
        plain = unpack_marlin_scales(tensors[scales], spec.num_groups > 1)
        return GroupedWeight(unpack_marlin(tensors[codes]), plain, None, None, 4, spec.group_size)

    def encode(weight: GroupedWeight, spec: LinearSpec) -> dict[str, Tensor]:
        if weight.zeros is not None or weight.perm is not None:
            raise ValueError("the Marlin layout holds no zero points and no permuted groups")
        runs = pack_marlin_scales(weight.scales, spec.num_groups > 1)
        return {codes: pack_marlin(weight.codes), scales: runs}

    floats = (torch.float16,)
    dtypes = {codes: (torch.int32,), scales: floats, "bias": floats}
    return Layout(dtypes, frozenset({"bias"}), shapes, decode, encode)


_NAMES = {"gptq_marlin": ("B", "s"), "awq_marlin": ("qweight", "scales")}
LAYOUTS = {name: _layout(*tensors) for name, tensors in _NAMES.items()}


def reader(config: Config, name: str) -> Reader:
    """Checks a config, and returns what makes specs of Marlin modules.

    Raises:
        NotImplementedError: other than 4 bits, asymmetric, or act-order.
    """
    check_bits(single_value({config.get("bits"), config.get("w_bit")}, "bits") or 4, "the Marlin config", allowed=(4,))
    if config.get("zero_point") or config.get("sym") is False:
        raise NotImplementedError("Marlin checkpoints with zero points; supported: symmetric ones")
    group_size = single_value({config.get("group_size"), config.get("q_group_size")}, "group_size")
    codes, scales = _NAMES[name]
    layout = LAYOUTS[name]

    def read(module: str, tensors: Headers) -> LinearSpec:
        layout.check_names(module, tensors)
        check_ranks(module, tensors, (codes, scales))
        in_features, out_features = 16 * tensors[codes].shape[0], tensors[scales].shape[1]
        if out_features % _COLUMNS:
            raise ValueError(f"{module}: Marlin needs a multiple of {_COLUMNS} outputs, got {out_features}")
        size = group_size_of(module, group_size, in_features, tensors[scales].shape[0])
        spec = LinearSpec(name, 4, size, in_features, out_features, dict(tensors), symmetric=True)
        layout.check(module, spec)
        return spec

    return read
