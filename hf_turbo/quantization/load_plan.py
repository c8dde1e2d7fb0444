"""Which modules of a model the quantized tensors of a checkpoint belong to; decided before any module is replaced."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, rename_source_key
from transformers.pytorch_utils import Conv1D

from .checkpoint_files import some
from .spec import LinearSpec, TensorHeader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Names:
    """What Transformers makes of a checkpoint's names while it loads them into a model.

    Args:
        quantized: the names of the checkpoint's quantized tensors.
    """

    def __init__(self, model: PreTrainedModel, quantized: Collection[str]) -> None:
        conversions = keep_apart(get_model_conversion_mapping(model), quantized)
        self.renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._prefix = model.base_model_prefix

    def target(self, name: str, expected: dict[str, Any]) -> tuple[str, str | None]:
        """The model's name of a tensor, and the pattern by which it is merged with others on the way, if it is.

        Args:
            expected: has all names of the model as its keys, and no value that is None.
        """
        renamed, pattern = rename_source_key(name, self.renamings, self.converters, self._prefix, expected)
        if renamed not in expected and name in expected:  # as Transformers does
            renamed, pattern = rename_source_key(name, [], [], self._prefix, expected)
        return renamed, pattern

    def merged(self, module: str, spec: LinearSpec, parameter: str, pattern: str) -> Merged:
        converter = next(entry for entry in self.converters if pattern in entry.source_patterns)
        return Merged(module, spec, parameter, converter, pattern)

    def before_merging(self, module: str, parameter: str) -> str:
        """What the model would call a module if its weight stayed apart from the rest of a parameter."""
        name, _ = rename_source_key(f"{module}.weight", self.renamings, [])
        owner = parameter.rpartition(".")[0]
        return f"{owner}.{name.removesuffix('.weight').rpartition(owner.rpartition('.')[2] + '.')[2]}"


def keep_apart(conversions: Sequence[WeightTransform], quantized: Collection[str]) -> list[WeightTransform]:
    """The conversions, where those that merge weights no longer match quantized tensors (`.weight_packed`), too."""
    trial = deepcopy(conversions)  # they note which of them were used
    renamings = [entry for entry in trial if isinstance(entry, WeightRenaming)]
    names = [rename_source_key(name, renamings, [])[0] for name in quantized]
    return [
        _whole_names_only(entry)
        if isinstance(entry, WeightConverter) and any(copy.rename_source_key(name)[1] for name in names)
        else entry
        for entry, copy in zip(conversions, trial, strict=True)
    ]


def _whole_names_only(converter: WeightConverter) -> WeightConverter:
    strict = WeightConverter(
        [pattern if pattern.endswith("$") else f"{pattern}$" for pattern in converter._original_source_patterns],
        converter._original_target_patterns,
        converter.operations,
        converter.force_cpu,
    )
    strict.scope_prefix, strict.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return strict


@dataclass
class LoadPlan:
    """What becomes of a model before the tensors are read.

    Attributes:
        linears: the model's name -> how the linear lies in the file.
        experts: the same for linears that the model's class holds merged, by the names they have apart.
        skipped: quantized modules that this model does not have (a head, where only the base model is loaded).
    """

    linears: dict[str, LinearSpec] = field(default_factory=dict)
    experts: dict[str, Merged] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Merged:
    """A linear of the file that is a part of one parameter of the model.

    Attributes:
        module: the file's name of it.
        parameter: the model's name of the whole.
        converter: what makes the parameter of the file's tensors.
        pattern: that of the converter's sources which the linear's weight matches.
    """

    module: str
    spec: LinearSpec
    parameter: str
    converter: WeightConverter
    pattern: str


def make_plan(model: PreTrainedModel, names: Names, specs: Mapping[str, LinearSpec]) -> LoadPlan:
    """Finds a place for every quantized module, and changes nothing.

    Args:
        model: on the meta device, as its class builds it.
        specs: the file's name of each quantized module -> how it lies there.

    Raises:
        NotImplementedError: a quantized module is no plain linear in this model.
        ValueError: its shape is not the model's, or it lacks the model's bias.
    """
    expected: dict[str, Any] = dict(model.state_dict())
    plan = LoadPlan()
    for module, spec in specs.items():
        target, pattern = names.target(f"{module}.weight", expected)
        owner = target.removesuffix(".weight")
        if pattern is not None:
            plan.experts[names.before_merging(module, target)] = names.merged(module, spec, target, pattern)
        elif target in expected:
            plan.linears[owner] = _fitted(owner, model.get_submodule(owner), spec)
        else:
            plan.skipped.append(module)
    return plan


def check_plan(
    model: PreTrainedModel,
    names: Names,
    plan: LoadPlan,
    specs: Mapping[str, LinearSpec],
    headers: Mapping[str, TensorHeader],
    absent: list[str],
) -> None:
    """That each tensor will come to where the plan wants it, and that no weight will be made up for want of one.

    Args:
        headers: of all tensors of the checkpoint.
        absent: the tensors that the checkpoint's index promises in vain.

    Raises:
        NotImplementedError: Transformers would rename a tensor in another way, or the model holds quantized modules
            merged that the checkpoint has under names that are not known.
        ValueError: tensors that are nowhere, or quantized modules that the model lacks while it lacks weights.
    """
    expected = _expected_after(dict(model.state_dict()), plan)
    _check_names(names, specs, plan, expected)
    _check_complete(model, names, plan, headers, absent, expected)


def _fitted(name: str, module: nn.Module, spec: LinearSpec) -> LinearSpec:
    """The spec of a linear, with the model's own number of inputs where the file's shapes leave that open."""
    if isinstance(module, Conv1D):
        shape = (module.nf, module.nx)
    elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        shape = (module.out_features, module.in_features)
    else:
        kind = type(module).__name__
        raise NotImplementedError(f"{name} is quantized in the checkpoint, but no plain linear in the model: {kind}")
    padding = spec.in_features - shape[1]
    if "weight_shape" in spec.tensors and 0 < padding < 32 // spec.bits:  # whole words: the rest is no input
        spec = dataclasses.replace(spec, in_features=shape[1], group_size=min(spec.group_size, shape[1]))
    if shape != (spec.out_features, spec.in_features):
        raise ValueError(
            f"{name} is {spec.out_features} x {spec.in_features} in the checkpoint and "
            f"{shape[0]} x {shape[1]} in the model"
        )
    if getattr(module, "bias", None) is not None and not spec.has_bias:
        raise ValueError(f"{name} has a bias in the model, but none in the checkpoint")
    return spec


def _expected_after(expected: dict[str, Any], plan: LoadPlan) -> dict[str, Any]:
    """The names of the model once the plan has been carried out."""
    gone = {f"{name}.{tensor}" for name in plan.linears for tensor in ("weight", "bias")}
    gone |= {merged.parameter for merged in plan.experts.values()}
    quantized = {**plan.linears, **{name: merged.spec for name, merged in plan.experts.items()}}
    new = {f"{name}.{tensor}": True for name, spec in quantized.items() for tensor in spec.tensors}
    return {name: True for name in expected if name not in gone} | new


def _check_names(names: Names, specs: Mapping[str, LinearSpec], plan: LoadPlan, expected: dict[str, Any]) -> None:
    """That Transformers will bring each tensor to where the plan wants it."""
    skipped = set(plan.skipped)
    for module, spec in specs.items():
        for tensor in () if module in skipped else spec.tensors:
            target, _ = names.target(f"{module}.{tensor}", expected)
            if target not in expected:
                raise NotImplementedError(f"{module}.{tensor}: Transformers calls it {target}, which the model lacks")


def _check_complete(
    model: PreTrainedModel,
    names: Names,
    plan: LoadPlan,
    headers: Mapping[str, TensorHeader],
    absent: list[str],
    expected: dict[str, Any],
) -> None:
    """That no weight is made up for want of a tensor, where the checkpoint should have it."""
    given = {names.target(name, expected)[0] for name in headers} | model.all_tied_weights_keys.keys()
    ignored = _ignored(model._keys_to_ignore_on_load_missing)
    missing = [name for name in expected if name not in given and not ignored(name)]
    owners = {name.rpartition(".")[0] for name in missing}
    promised = [name for name in absent if names.target(name, expected)[0].rpartition(".")[0] in owners]
    if promised:
        raise ValueError(f"the checkpoint's index names {len(promised)} tensors that no file has: {some(promised)}")
    surplus = {module.rpartition(".")[2]: module for module in plan.skipped}
    for name in owners:
        if (leaf := name.rpartition(".")[2]) in surplus:
            raise ValueError(
                f"the model has {name}, for which the checkpoint has no weight; it has {surplus[leaf]}, "
                "which the model has not: is this the model's class?"
            )
    state = model.state_dict()
    merged = [name for name in missing if name in state and state[name].dim() > 2]
    if merged and plan.skipped:
        raise NotImplementedError(
            f"the model holds {merged[0]} in one piece, of which the checkpoint has quantized parts by other names: "
            f"{some(plan.skipped)}"
        )


def _ignored(patterns: Any) -> Callable[[str], bool]:
    compiled = re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None
    return lambda name: compiled is not None and compiled.search(name) is not None


def untie(model: PreTrainedModel, quantized: set[str]) -> None:
    """A head that is quantized on its own is not tied to the embeddings, whatever the config says."""
    tied = model.all_tied_weights_keys
    own = [name for name in tied if name.rpartition(".")[0] in quantized]
    for name in own:
        del tied[name]
    if own and not tied:
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False


def float_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameter -> the dtype that it should be loaded in, for a model that is built but not loaded."""
    kept = [(_pattern(glob), kept_dtype) for glob, kept_dtype in model._get_dtype_plan(dtype).items()]
    return {
        name: next((other for pattern, other in kept if pattern.search(name)), value.dtype)
        for name, value in model.named_parameters()
        if value.is_floating_point()
    }


def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile(glob.replace("*", ".*"))


def cast_back(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts what some releases leave in the file's dtype: parameters with another name in the file than here."""
    for name, value in model.named_parameters():
        dtype = dtypes.get(name, value.dtype)
        if dtype != value.dtype and not value.is_meta:
            value.data = value.data.to(dtype)
