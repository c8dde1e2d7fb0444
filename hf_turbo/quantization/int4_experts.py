"""Experts whose linears are quantized one by one, in the place of a module that holds them merged."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist

from .int4_linear import FileLinear
from .load_plan import Merged

_DOWN = "down_proj"
_RELATIVE = re.compile(r"(\d+)\.(\w+)")


class Int4Experts(nn.Module):
    """Experts of a mixture, each with linears of its own by the names that its checkpoint has.

    Args:
        merged: the module that the model's class has here, of which only the activation is used; it is left without
            weights.
        experts: for each expert, its linears by name.
        inner: the names of the linears that make the inner activations, in order; the last is `outer`.
    """

    def __init__(
        self, merged: nn.Module, experts: Sequence[Mapping[str, nn.Module]], inner: list[str], outer: str
    ) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer
        self.num_experts = len(experts)
        for index, linears in enumerate(experts):
            self.add_module(str(index), nn.ModuleDict(dict(linears)))
        for name in [name for name, _ in merged.named_parameters(recurse=False)]:
            delattr(merged, name)
        self._merged = (merged,)  # no child: Transformers would look for its weights

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sums the chosen experts' results.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: `[tokens, k]`, int, the experts of each token; other numbers than experts have are left out.
            top_k_weights: `[tokens, k]`.

        Returns:
            `[tokens, hidden]` in the dtype of `hidden_states`.
        """
        out = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if 0 <= expert < self.num_experts:
                tokens, place = torch.where(top_k_index == expert)
                result = self._expert(expert, hidden_states[tokens]) * top_k_weights[tokens, place, None]
                out.index_add_(0, tokens, result.to(out.dtype))
        return out

    def _expert(self, index: int, x: Tensor) -> Tensor:
        linears = self.get_submodule(str(index))
        inner = torch.cat([linears[name](x) for name in self.inner], dim=-1)  # type: ignore[index]
        (merged,) = self._merged
        inner = merged._apply_gate(inner) if merged.has_gate else merged.act_fn(inner)  # type: ignore[operator]
        return linears[self.outer](inner)  # type: ignore[index]


def plan_experts(model: nn.Module, experts: Mapping[str, Merged]) -> dict[str, dict[str, Merged]]:
    """Checks that quantized parts of merged parameters are experts as `Int4Experts` runs them; changes nothing.

    Args:
        experts: by the names that they have apart, as in a `LoadPlan`.

    Returns:
        The name of each module to replace, and its linears by their names in it.

    Raises:
        NotImplementedError: they are not, or only some of a module's experts are quantized.
        ValueError: other shapes than the model's.
    """
    modules: dict[str, dict[str, Merged]] = defaultdict(dict)
    for name, merged in experts.items():
        owner = merged.parameter.rpartition(".")[0]
        modules[owner][name.removeprefix(f"{owner}.")] = merged
    for owner, linears in modules.items():
        _check(owner, model.get_submodule(owner), linears)
    return modules


def make_experts(module: nn.Module, linears: Mapping[str, Merged], dtype: torch.dtype) -> Int4Experts:
    """The module for experts that `plan_experts` let pass, its linears waiting for their files."""
    inner, outer = _names(linears)
    experts = [
        {leaf: FileLinear(linears[f"{index}.{leaf}"].spec, dtype, drops_zero_bias=True) for leaf in (*inner, outer)}
        for index in range(_count(linears))
    ]
    return Int4Experts(module, experts, inner, outer)


def _check(owner: str, module: nn.Module, linears: Mapping[str, Merged]) -> None:
    example = next(iter(linears.values())).module
    parameters = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    gated = getattr(module, "has_gate", None)
    known = (
        gated is not None
        and not module.has_bias
        and not module.is_transposed
        and module.is_concatenated
        and parameters == {"gate_up_proj" if gated else "up_proj", _DOWN}
        and all(_RELATIVE.fullmatch(name) for name in linears)
        and all(_merges_experts(merged) for merged in linears.values())
    )
    if not known:
        raise NotImplementedError(
            f"{example} is quantized in the checkpoint; in this model it is a part of {owner} "
            f"({type(module).__name__}), which holds its weights merged in a way that is not known here"
        )
    inner, outer = _names(linears)
    count = module.get_parameter(_DOWN).shape[0]
    wanted = {f"{index}.{leaf}" for index in range(count) for leaf in (*inner, outer)}
    if missing := sorted(wanted - linears.keys()):
        raise NotImplementedError(
            f"{owner}: {len(missing)} of its experts' linears are not quantized in the checkpoint, such as {missing[0]}"
        )
    for leaves, parameter in ((inner, next(iter(parameters - {_DOWN}))), ([outer], _DOWN)):
        _check_shapes(owner, linears, count, leaves, parameter, module.get_parameter(parameter))


def _check_shapes(
    owner: str, linears: Mapping[str, Merged], count: int, leaves: list[str], parameter: str, whole: Tensor
) -> None:
    for index in range(count):
        specs = [linears[f"{index}.{leaf}"].spec for leaf in leaves]
        shape = (sum(spec.out_features for spec in specs), specs[0].in_features)
        if shape != tuple(whole.shape[1:]) or len({spec.in_features for spec in specs}) > 1:
            raise ValueError(
                f"{owner}.{index}: {' and '.join(leaves)} are {list(shape)} in the checkpoint; "
                f"{parameter} has {list(whole.shape[1:])}"
            )


def _merges_experts(merged: Merged) -> bool:
    """Whether the converter stacks experts, and puts the outputs of their linears one after another."""
    operations = merged.converter.operations
    stacks = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    if len(merged.converter.source_patterns) == 1:
        return stacks and len(operations) == 1
    return stacks and len(operations) == 2 and isinstance(operations[1], Concatenate) and operations[1].dim == 1


def _names(linears: Mapping[str, Merged]) -> tuple[list[str], str]:
    """The linears' names in an expert: the inner ones in the order in which they are merged, and the outer one."""
    inner: dict[int, str] = {}
    outer = ""
    for name, merged in linears.items():
        leaf = name.rpartition(".")[2]
        if merged.parameter.endswith(f".{_DOWN}"):
            outer = leaf
        else:
            inner[merged.converter.source_patterns.index(merged.pattern)] = leaf
    return [inner[position] for position in sorted(inner)], outer


def _count(linears: Mapping[str, Merged]) -> int:
    return len({name.partition(".")[0] for name in linears})
