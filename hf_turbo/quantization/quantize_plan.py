"""Which linears of a model get quantized, how, and what the model's config then says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BITS = (4, 8)
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # those that other readers of the format know

#: What a weight may come in.
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Options:
    """How to quantize.

    Args:
        bits: 4 or 8.
        group_size: input channels that share a scale: 16, 32, 64, 128, 256, 512 or 1024; -1 for all of a row.
        symmetric: no zero points are searched; all are 2**(bits-1).
        skip: linears to leave as they are: names, or dotted parts of names such as `"down_proj"` or `"layers.0"`.

    Raises:
        ValueError: a value that is not allowed.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r}: must be 4 or 8")
        if self.group_size not in (-1, *GROUP_SIZES):
            raise ValueError(
                f"group_size={self.group_size!r}: must be one of {', '.join(map(str, GROUP_SIZES))}, "
                "or -1 for one group a row"
            )

    def group_size_of(self, in_features: int) -> int:
        """The group size in channels."""
        return in_features if self.group_size == -1 else self.group_size

    @property
    def format(self) -> str:
        """What the config calls the layout. They differ in how zero points are stored, and gptqmodel takes
        asymmetric ones of another tool in the second only."""
        return "gptq" if self.symmetric else "gptq_v2"


@dataclass(frozen=True)
class Plan:
    """What of a model gets quantized.

    Attributes:
        linears: the names of the linears to quantize.
        float_linears: those of all others, the output embedding's left out.
        fused_experts: modules in the decoder's layers that hold the weights of many experts in one parameter, which
            stay as they are.
    """

    linears: tuple[str, ...]
    float_linears: tuple[str, ...]
    fused_experts: tuple[str, ...]


def make_plan(model: Any, options: Options) -> Plan:
    """Chooses the linears: those inside the decoder's layers, without routers, tied ones and what is to be skipped.

    Args:
        model: a Transformers model; it may be on the meta device.

    Raises:
        ValueError: it is quantized already, has no such linears, one of them can't be cut into such groups, or an entry
            of `skip` names nothing.
    """
    _refuse_quantized(model)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    inside = [name for name in _inside_layers(model) if name in linears]
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    candidates = [name for name in inside if not _is_router(model, name) and uses[id(linears[name].weight)] == 1]
    fused = [name for name in _inside_layers(model) if _is_fused(model.get_submodule(name))]
    _refuse_unknown(options.skip, [*linears, *fused])
    chosen = tuple(name for name in candidates if not is_skipped(name, options.skip))
    if not chosen:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Linear in its decoder's layers to quantize")
    check_shapes({name: tuple(linears[name].weight.shape) for name in chosen}, options)
    head = model.get_output_embeddings()
    rest = tuple(name for name, linear in linears.items() if name not in set(chosen) and linear is not head)
    return Plan(chosen, rest, tuple(fused))


def is_skipped(name: str, skip: Sequence[str]) -> bool:
    """Whether an entry of `skip` is the name, or a dotted part of it."""
    return any(f".{entry}." in f".{name}." for entry in skip)


def check_shapes(shapes: dict[str, tuple[int, ...]], options: Options) -> None:
    """Whether weights `[out, in]` can be cut into groups and packed.

    Raises:
        ValueError: one that can't be, and what to do.
    """
    per_word = 32 // options.bits
    for name, (out_features, in_features) in shapes.items():
        if in_features % options.group_size_of(in_features):
            fits = [str(size) for size in GROUP_SIZES if not any(shape[1] % size for shape in shapes.values())]
            instead = " or ".join([*fits, "-1 (one group a row)"])
            raise ValueError(
                f"{name} has {in_features} input channels, no multiple of group_size={options.group_size}; "
                f"give all linears group_size={instead}, or skip this one"
            )
        if in_features % per_word or out_features % per_word:
            raise ValueError(
                f"{name} is [{out_features}, {in_features}]; the format packs multiples of {per_word} at "
                f"{options.bits} bits: skip it"
            )


def quantization_config(plan: Plan, options: Options) -> dict[str, Any]:
    """What config.json says under `quantization_config`, in the keys of GPTQ."""
    from .. import __version__

    config = {
        "quant_method": "gptq",
        "checkpoint_format": options.format,
        "bits": options.bits,
        "group_size": options.group_size,
        "sym": options.symmetric,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"hf_turbo:{__version__}"], "method": "data-free"},
    }
    float_modules = [*plan.float_linears, *plan.fused_experts]
    if float_modules:
        # Readers take every linear for quantized, but for what these regular expressions match.
        config["dynamic"] = {f"-:{pattern}": {} for pattern in _patterns(float_modules, plan.linears)}
    return config


def _refuse_quantized(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise ValueError(f"quantizes Transformers models, not {type(model).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"quantizes decoder-only models; {type(model).__name__} has an encoder, too")
    found = getattr(config, "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
        raise ValueError(f"the model is quantized already ({getattr(method, 'value', method)})")


def _inside_layers(model: Any) -> Iterator[str]:
    """The names of the modules inside the decoder's layers."""
    # Of some models get_decoder makes the head, whose name is `decoder`.
    stacks = [*_stacks(model.get_decoder())] or [*_stacks(model.base_model)]
    inside = {id(module) for stack in stacks for layer in stack for module in layer.modules() if module is not layer}
    return (name for name, module in model.named_modules() if id(module) in inside)


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _stacks(child)


def _is_router(model: Any, name: str) -> bool:
    """Whether a linear chooses among experts, or weighs them: by its name, or as it is beside them."""
    is_named_so = not {"router", "gate"}.isdisjoint(name.split("."))
    return is_named_so or hasattr(model.get_submodule(name.rpartition(".")[0]), "experts")


def _is_fused(module: nn.Module) -> bool:
    """Whether a module holds the matrices of many experts in one parameter."""
    is_convolution = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return not is_convolution and any(
        parameter.dim() == 3 and min(parameter.shape) > 1 for parameter in module.parameters(recurse=False)
    )


def _refuse_unknown(skip: Sequence[str], names: Sequence[str]) -> None:
    for entry in skip:
        if not any(is_skipped(name, [entry]) for name in names):
            raise ValueError(f"skip={entry!r} names no linear; give names, or dotted parts of names")


def _patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Regular expressions that match each of `names` as a whole, and none of `others`; names of all layers as one."""

    def numbered(name: str) -> str:
        return re.sub(r"(?<=\\\.)\d+(?=\\\.)", lambda _: r"\d+", re.escape(name))

    taken = {numbered(name) for name in others}
    found = (re.escape(name) if numbered(name) in taken else numbered(name) for name in names)
    return [f"^{pattern}$" for pattern in dict.fromkeys(found)]
