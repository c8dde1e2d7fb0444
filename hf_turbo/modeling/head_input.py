"""What a model's head is given: the last hidden states, from which Medusa heads guess later tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

#: Who asks for it in this thread; None: nobody.
_asking = threading.local()


class HeadInput:
    """Keeps what the head of a model is given while a forward runs by way of `wrapped`.

    The head must have been made watchable before. Other threads' forwards are not seen.
    """

    def __init__(self) -> None:
        #: `[rows, columns, hidden_size]`, of the last forward: of the tokens that it gave logits of.
        self.value: torch.Tensor | None = None

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that is watched."""

        def watched(**kwargs: Any) -> Any:
            before, _asking.input = getattr(_asking, "input", None), self
            try:
                return forward(**kwargs)
            finally:
                _asking.input = before

        return watched

    def take(self) -> torch.Tensor:
        """The value, once.

        Raises:
            NotImplementedError: the last forward did not call the model's output embeddings.
        """
        value, self.value = self.value, None
        if value is None:
            raise NotImplementedError("the model computes logits without its output embeddings")
        return value


class _Watchable:
    """First base of a head's class: leaves what it is given with who asks for it, and does nothing else."""

    _hf_turbo_original_class: type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        asking: HeadInput | None = getattr(_asking, "input", None)
        if asking is not None:
            asking.value = next(iter((*args, *kwargs.values())))
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles by way of the original class: this one exists in memory only."""
        state = super().__reduce_ex__(protocol)[2:]
        return (_make, (self._hf_turbo_original_class,), *state)


@cache
def watchable_class(original: Any) -> Any:
    """A subclass of a head's class under the same name, of which a `HeadInput` sees what it is given.

    Only an instance is given it, as a patched model is given a subclass of its own class.
    """
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_hf_turbo_original_class": original,
    }
    return type(original.__name__, (_Watchable, original), body)


def make_watchable(model: Any) -> tuple[nn.Module, str, Any] | None:
    """Lets a `HeadInput` see what a model's head is given.

    Returns:
        The head, the attribute that has changed and what it was, for who undoes it; None: nothing had to change.
    """
    head = model.get_output_embeddings()
    if isinstance(head, _Watchable):
        return None
    before: Any = type(head)
    head.__class__ = watchable_class(before)
    return head, "__class__", before


def _make(original: Any) -> Any:
    cls = watchable_class(original)
    return cls.__new__(cls)
