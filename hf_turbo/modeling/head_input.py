"""What a model's head is given: the last hidden states, from which Medusa heads guess later tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class HeadInput:
    """Watches forwards for the operation that reads the weights of the head, and keeps its input.

    No module is touched, and no other thread's forward is seen. Works for any model that has an output embedding,
    whatever it does to logits afterwards, and for quantized heads.

    Args:
        model: with `get_output_embeddings()`.

    Raises:
        NotImplementedError: it has none.
    """

    def __init__(self, model: Any) -> None:
        head: nn.Module | None = model.get_output_embeddings()
        if head is None:
            raise NotImplementedError(f"{type(model).__name__} has no output embeddings, from whose input heads guess")
        self._weights = {id(x) for x in chain(head.parameters(), head.buffers())}
        #: `[rows, columns, hidden_size]`, of the last forward: of the tokens that it gave logits of.
        self.value: torch.Tensor | None = None

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that is watched."""

        def watched(**kwargs: Any) -> Any:
            with _Watch(self):
                return forward(**kwargs)

        return watched

    def take(self) -> torch.Tensor:
        """The value, once.

        Raises:
            NotImplementedError: the last forward did not read the head's weights.
        """
        value, self.value = self.value, None
        if value is None:
            raise NotImplementedError("the model computes logits without its output embeddings")
        return value

    def see(self, args: tuple[Any, ...]) -> None:
        """Keeps the input of an operation if one of its arguments is a weight of the head."""
        if any(id(x) in self._weights for x in args):
            value = next((x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
            self.value = None if value is None or id(value) in self._weights else value


class _Watch(TorchFunctionMode):
    def __init__(self, owner: HeadInput) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if len(args) > 1:
            self._owner.see(args)
        return func(*args, **(kwargs or {}))
