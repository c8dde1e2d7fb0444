"""The class of a patched instance: a subclass of the model's own, made in memory."""

from __future__ import annotations

import inspect
from functools import cache, partial, wraps
from typing import Any

import torch

from .compat import CACHE_NAME
from .engine.batch_mixin import ManyRequestsMixin
from .modeling.prompt_forward import forward_prompt
from .modeling.prompt_steps import run_prompt


@cache
def patched_class(original: Any) -> Any:
    """A subclass of `original` under the same name, with our mixin first."""
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_hf_turbo_original_class": original,
        "__reduce_ex__": _reduce,
        "forward": _forward_of(original),
    }
    return type(original.__name__, (ManyRequestsMixin, original), body)


def _forward_of(original: Any) -> Any:
    """The forward of a patched class: by a captured step where it is one, else the model's own.

    Transformers reads the names of the arguments off it.
    """

    parameters = list(inspect.signature(original.forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own, handle = partial(original.forward, self), self._hf_turbo
        if handle.model_reason or torch.compiler.is_compiling() or len(args) > len(names):
            return own(*args, **kwargs)
        named = dict(zip(names, args, strict=False))
        if not kwargs.keys().isdisjoint(named):
            return own(*args, **kwargs)  # an error that the model's own words fit
        kwargs |= named
        if "tokenizer" not in names:
            kwargs.pop("tokenizer", None)  # generate() hands on what it has read stop strings with
        watch = getattr(kwargs.get(CACHE_NAME), "head_input", None)
        if watch is not None:
            own = watch.wrapped(own)
        output = handle.steps.run(self, own, kwargs)
        if output is None and handle.config.cuda_graphs:
            output = run_prompt(self, own, kwargs)
        if output is None and handle.fuses_prompts:
            output = forward_prompt(self, own, kwargs, handle.refuse_prompts)
        return own(**kwargs) if output is None else output

    return forward


def original_class(model: Any) -> Any:
    """The class that a patched instance had before."""
    return type(model)._hf_turbo_original_class


def _reduce(self: Any, protocol: Any) -> Any:
    """Copies and pickles by way of the original class: the patched one exists in memory only."""
    original = self._hf_turbo_original_class
    return (_make_patched, (original,), *original.__reduce_ex__(self, protocol)[2:])


def _make_patched(original: Any) -> Any:
    cls = patched_class(original)
    return cls.__new__(cls)
