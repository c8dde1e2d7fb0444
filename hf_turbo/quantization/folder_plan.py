"""The tensors of a folder of safetensors, and which of them belong to the linears of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .quantize_plan import Options, Plan, check_shapes, is_skipped, make_plan

_SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_QUANTIZE_CONFIGS = ("quantize_config.json", "quant_config.json")

#: How names of tensors end that only quantized checkpoints have.
_QUANTIZED_ENDINGS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".quant_state", ".absmax")

#: What a weight may come in, as safetensors calls it.
FLOAT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: the file's name, the dtype as safetensors calls it, the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model's config and safetensors, as saved by `save_pretrained`.

    Attributes:
        config: config.json as it is.
        tensors: all tensors by name, from the files' headers.
        files: the files' names, in order.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]

    @property
    def files(self) -> list[str]:
        return sorted({stored.file for stored in self.tensors.values()})

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return sum((self.folder / file).stat().st_size for file in self.files)

    @property
    def has_index(self) -> bool:
        return (self.folder / INDEX).is_file()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads config and headers; no weights.

    Raises:
        ValueError: the folder is no such checkpoint, lacks a file, or is quantized already.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it is no model's folder")
    config = json.loads((folder / "config.json").read_text())
    aside = [name for name in _QUANTIZE_CONFIGS if (folder / name).is_file()]
    if aside or config.get("quantization_config") is not None:
        raise ValueError(f"{folder} is quantized already, says its {aside[0] if aside else 'config.json'}")
    tensors = {name: stored for file in _files(folder) for name, stored in _headers(folder, file)}
    if found := next((name for name in tensors if name.endswith(_QUANTIZED_ENDINGS)), None):
        raise ValueError(f"{folder} is quantized already: it holds {found}")
    return Checkpoint(folder, config, tensors)


def _files(folder: Path) -> list[str]:
    """The names of the folder's safetensors files."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{folder / INDEX} names a file outside the folder: {outside[0]}")
    elif (folder / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        raise ValueError(
            f"{folder} has neither {_SINGLE} nor {INDEX}; save the model with save_pretrained, which writes them"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which its index names")
    return names


def _headers(folder: Path, file: str) -> Iterator[tuple[str, Stored]]:
    from safetensors import safe_open

    with safe_open(folder / file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  the file is no dict
            header = tensors.get_slice(name)
            yield name, Stored(file, header.get_dtype(), tuple(header.get_shape()))


def plan_checkpoint(checkpoint: Checkpoint, options: Options) -> tuple[Plan, frozenset[str]]:
    """Chooses the weights by the structure that the config stands for, built without weights.

    Experts that the model fuses but the files store one by one are linears of the plan, under the files' names.

    Returns:
        The plan, and the names of the weights to quantize as the files call them.

    Raises:
        ValueError: as `make_plan`; or the files lack a weight, have one of another shape, or in a dtype that is not
            bf16, fp16 or fp32.
        NotImplementedError: Transformers makes a linear of the model from tensors of another form.
    """
    model = _empty_model(checkpoint)
    plan = make_plan(model, options)
    names = _Names(model)
    chosen = {f"{name}.weight": tuple(model.get_submodule(name).weight.shape) for name in plan.linears}
    weights: dict[str, str] = {}  # the files' name of each weight by the model's
    experts: dict[str, str] = {}  # the module that fuses it by the files' name of each expert's weight
    converted: dict[str, str] = {}
    for stored, tensor in checkpoint.tensors.items():
        target, merges = names.of(stored)
        module = target.rpartition(".")[0]
        if merges and module in plan.fused_experts and len(tensor.shape) == 2 and stored.endswith(".weight"):
            if not is_skipped(module, options.skip) and not is_skipped(_module(stored), options.skip):
                experts[stored] = module
        elif target in chosen:
            (weights if merges is None else converted)[target] = stored
    _check_weights(checkpoint, weights, converted, chosen)
    check_shapes({_module(name): checkpoint.tensors[name].shape for name in experts}, options)
    _check_dtypes(checkpoint, [*weights.values(), *experts])
    whole = Plan(
        linears=(*plan.linears, *map(_module, experts)),
        float_linears=plan.float_linears,
        fused_experts=tuple(name for name in plan.fused_experts if name not in set(experts.values())),
    )
    return whole, frozenset([*weights.values(), *experts])


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _check_weights(
    checkpoint: Checkpoint, weights: dict[str, str], converted: dict[str, str], chosen: dict[str, tuple[int, ...]]
) -> None:
    if converted:
        raise NotImplementedError(
            f"Transformers makes {next(iter(converted))} from {next(iter(converted.values()))}, a tensor of another "
            "form: load the model, call hf_turbo.quantize(model) and save it"
        )
    if missing := [name for name in chosen if name not in weights]:
        raise ValueError(f"{checkpoint.folder} lacks {len(missing)} of the weights to quantize, such as {missing[0]}")
    for name, stored in weights.items():
        shape = checkpoint.tensors[stored].shape
        if shape != chosen[name]:
            raise ValueError(f"{checkpoint.folder}: {stored} is {list(shape)}, config.json says {list(chosen[name])}")


def _check_dtypes(checkpoint: Checkpoint, names: list[str]) -> None:
    for name in names:
        if (dtype := checkpoint.tensors[name].dtype) not in FLOAT_DTYPES:
            raise ValueError(f"{checkpoint.folder}: {name} is {dtype}; must be one of {', '.join(FLOAT_DTYPES)}")


def _empty_model(checkpoint: Checkpoint) -> Any:
    """The model on the meta device."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        of_name = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if of_name is not None:
                return of_name._from_config(config)
            return transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["unknown"])[0]
        raise ValueError(f"Transformers can't build the model of {checkpoint.folder}: {reason}") from error


class _Names:
    """What Transformers calls the tensors of a file when it loads them into a model."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(model)
        self._converters: list[Any] = [one for one in transforms if isinstance(one, WeightConverter)]
        self._renamings: list[Any] = [one for one in transforms if not isinstance(one, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()

    def of(self, stored: str) -> tuple[str, bool | None]:
        """The model's name of a file's tensor, and whether the model stacks it, as it is, with others of its kind;
        None where it is taken as it is."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, rename_source_key

        name, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._state)
        if pattern is None:
            return name, None
        operations = next(one.operations for one in self._converters if pattern in one.source_patterns)
        stacks = any(isinstance(one, MergeModulelist) for one in operations)
        return name, stacks and all(isinstance(one, (MergeModulelist, Concatenate)) for one in operations)
