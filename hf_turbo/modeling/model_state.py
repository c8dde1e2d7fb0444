"""What a captured forward took from its model: kept to see that nothing of it has changed since."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn.modules import module as global_hooks
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

from ..quantization.int4_experts import Int4Experts

#: Hooks of Transformers itself that do nothing unless hidden states or attentions are asked for.
_SILENT_HOOKS = ("transformers.utils.output_capturing",)
_READS_POSITIONS = "its rotary embedding chooses frequencies by the positions, on the host"
#: The attribute in which models keep by how much pictures move the positions of what follows them.
_SHIFTS = "rope_deltas"
#: That of a config by which its model's experts are computed.
_EXPERTS = "_experts_implementation_internal"
_CONTAINERS = (dict, list, set)
#: What `nn.Module` keeps that a forward without gradients does not look at.
_NOT_IN_FORWARD = frozenset({
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_non_persistent_buffers_set",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
})  # fmt: skip


class ModelState:
    """A model's parameters, buffers, submodules and attributes, by identity.

    Written-to weights are no change: a captured kernel reads them where they are. Weights that lie somewhere else, a
    module put in another's place, an adapter switched, an attribute set, `eval()` or `train()` are.

    Args:
        model: the model, all of whose modules count.
    """

    def __init__(self, model: nn.Module) -> None:
        #: Parameters and buffers.
        self.tensors = [x for module in model.modules() for x in _tensors(module)]
        self._classes = list({type(module) for module in model.modules()})
        self._places = self._places_now()
        attributes = list(_dicts(model))
        containers = [x for held in attributes for x in _containers(held)]
        self._dicts = attributes + [x for x in containers if isinstance(x, dict)]
        self._others = [x for x in containers if not isinstance(x, dict)]
        self._seen = list(self._visible())

    def same_memory(self) -> bool:
        """Whether weights and buffers are where they were. Quick: for every step, before anything is launched.

        (One that was put in another's place is seen by `unchanged`; until then the old one is kept here.)
        """
        return self._places == self._places_now()

    def unchanged(self) -> bool:
        """Whether all that a forward's Python code could see is as it was."""
        num_visible = sum(map(len, self._dicts)) + sum(map(len, self._others)) + len(self._classes)
        return num_visible == len(self._seen) and all(map(operator.is_, self._visible(), self._seen))

    def _visible(self) -> Iterator[Any]:
        """The values of all attributes, what is in those that are containers, and what runs. (One pass, in C.)"""
        attributes = chain.from_iterable(map(dict.values, self._dicts))
        return chain(attributes, chain.from_iterable(self._others), (cls.forward for cls in self._classes))

    def _places_now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self.tensors))


class CapturedState(ModelState):
    """The same for captured forwards, which go by which experts' code they were captured with, and don't read all.

    `generate()` has prompts and steps computed by different code, where a model has experts: one state serves both.
    Models that take pictures keep by how much these move a text's positions, in a new tensor at each `generate()`. A
    forward that is given its positions only hands it on. So another such tensor is no change, unless some operation of
    a captured forward has read the one before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        attributes = list(_dicts(model))
        self._names = [name for held in attributes for name in held]  # of the first of what is visible
        self._choosers = [held for held in attributes if _EXPERTS in held]
        self._shifted = [held for held in attributes if isinstance(held.get(_SHIFTS), torch.Tensor)]
        #: Ids of the tensors in `set_anew` that captured operations have read.
        self.read: set[int] = set()

    @property
    def experts(self) -> tuple[Any, ...]:
        """Which code computes experts now, by its name in Transformers."""
        return tuple([held.get(_EXPERTS) for held in self._choosers])

    @property
    def set_anew(self) -> dict[int, Callable[[], torch.Tensor | None]]:
        """By the id of each tensor that is set anew, what gives the one that the model has now, if any."""
        return {id(held.get(_SHIFTS)): partial(held.get, _SHIFTS) for held in self._shifted}

    def unchanged(self) -> bool:
        if super().unchanged():
            return True
        now = list(self._visible())
        if len(now) != len(self._seen):
            return False
        pairs = enumerate(zip(now, self._seen, strict=True))
        if not all(x is before or self._may_differ(i, x, before) for i, (x, before) in pairs):
            return False
        self._seen = now
        return True

    def _may_differ(self, place: int, now: Any, before: Any) -> bool:
        name = self._names[place] if place < len(self._names) else None
        if name != _SHIFTS or not isinstance(now, torch.Tensor) or not isinstance(before, torch.Tensor):
            return name == _EXPERTS
        is_alike = (now.dtype, now.device, now.dim()) == (before.dtype, before.device, before.dim())
        return is_alike and id(before) not in self.read


def why_not_captured(model: nn.Module) -> str | None:
    """Why a forward of this model has effects that a captured one would leave out; None if it has none."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        return f"the model is spread over {', '.join(sorted(map(str, devices)))}"
    for name, module in model.named_modules():
        if reason := _foreign_code(name, module):
            return reason
        if module.training and (module is model or (isinstance(module, _DropoutNd) and module.p)):
            return f"{name or 'the model'} is in training mode"
        if _reads_positions(module):
            return _READS_POSITIONS
        if isinstance(module, Int4Experts):
            return "which of its quantized experts run is decided on the host"
    return None


def why_not_kept(model: nn.Module) -> str | None:
    """Why a text's keys and values may depend on more than the tokens so far; None if they don't."""
    for name, module in model.named_modules():
        if reason := _foreign_code(name, module):
            return reason
        if _reads_positions(module):
            return _READS_POSITIONS
    return None


def why_not_together(model: nn.Module) -> str | None:
    """Why texts of different lengths can't be computed together; None if they can."""
    return _READS_POSITIONS if any(map(_reads_positions, model.modules())) else None


def shifts_positions(model: nn.Module) -> bool:
    """Whether a model that is given no positions counts them on from what it has kept of pictures in the text."""
    return any(vars(module).get(_SHIFTS) is not None for module in model.modules())


def has_experts(model: nn.Module) -> bool:
    """Whether rows choose among weights: tensors of several matrices."""
    return any(p.dim() == 3 for p in model.parameters())


def _foreign_code(name: str, module: nn.Module) -> str | None:
    """What runs in a module's forward that is not its class's, and may do anything."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(getattr(hook, "__module__", "") not in _SILENT_HOOKS for hook in hooks):
        return f"{name or 'the model'} has a forward hook"
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        return f"the forward of {name or 'the model'} was replaced"
    return None


def _reads_positions(module: nn.Module) -> bool:
    """Whether a module is one of Transformers' rotary embeddings that look at how long the text is."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for held in (module._parameters, module._buffers):
        for x in held.values():
            if x is not None:
                yield x


def _dicts(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of every module and config of a model."""
    seen: set[int] = set()
    for module in model.modules():
        yield vars(module)
        for x in list(vars(module).values()):
            if isinstance(x, PreTrainedConfig) and id(x) not in seen:
                seen.add(id(x))
                yield vars(x)


def _containers(held: dict[str, Any]) -> Iterator[Any]:
    return (x for name, x in held.items() if isinstance(x, _CONTAINERS) and name not in _NOT_IN_FORWARD)


def settings() -> tuple[Any, ...]:
    """Settings outside of the model that decide which kernels run or how they round."""
    return (
        torch.is_autocast_enabled("cuda"),
        # This follows every way of allowing TF32; the others raise after some. "none" was said by nobody.
        torch.backends.cuda.matmul.fp32_precision.replace("none", "ieee"),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def is_watched() -> bool:
    """Whether somebody sees every operation or every module's call, which captured or fused ones would not show."""
    hooks = global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks
    return bool(hooks or _len_torch_dispatch_stack() or _len_torch_function_stack())
