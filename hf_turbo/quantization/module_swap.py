"""Going through the modules of a model while some of them are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, cast

from torch import nn

M = TypeVar("M", bound=nn.Module)


def modules_of(model: nn.Module, kind: type[M]) -> Iterator[tuple[str, M]]:
    """The modules of a class by name, of those that are there at the start; replaced ones can be freed meanwhile."""
    for name in [name for name, module in model.named_modules() if isinstance(module, kind)]:
        yield name, cast(M, model.get_submodule(name))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module in another's place, with the hook by which accelerate moves its tensors or its inputs."""
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    old = owner.get_submodule(leaf)
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(old)
        add_hook_to_module(module, hook)
    owner._modules[leaf] = module
