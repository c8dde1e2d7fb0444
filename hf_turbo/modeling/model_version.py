"""Whether a model computes what it computed when it was last asked, whatever has been done to it since."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .model_state import ModelState, settings, why_not_kept


class ModelVersion:
    """A number that changes whenever a model may have changed: its attributes, adapters, weights, what is in them.

    Weights are known by their storage, by the count that torch keeps of writes to them, and by one element of each,
    since writes through `.data` are not counted. A number never comes back.
    """

    def __init__(self) -> None:
        self._number = 0
        self._reason: str | None = None
        self._state: ModelState | None = None
        self._weights: list[_Weight] = []
        self._elements: list[list[float]] = []
        self._lock = threading.Lock()

    def of(self, model: nn.Module) -> tuple[int, str | None]:
        """The number now, and why a text's keys may depend on more than that and its tokens; None if they don't."""
        with self._lock:
            if not self._is_same():
                self._number += 1
                self._state = state = ModelState(model)
                self._reason = why_not_kept(model)
                if any(x.is_inference() or x.is_meta or x.layout != torch.strided for x in state.tensors):
                    self._reason, self._weights, self._elements = "changes of its weights can't be seen", [], []
                else:
                    self._weights, self._elements = [_Weight(x) for x in state.tensors], _elements(state.tensors)
            return self._number, self._reason

    def forget(self) -> None:
        """Holds on to nothing of the model; the number will be another one."""
        with self._lock:
            self._state, self._weights, self._elements = None, [], []

    def __reduce__(self) -> tuple[type[ModelVersion], tuple[()]]:
        return ModelVersion, ()  # a copied model is another one

    def _is_same(self) -> bool:
        state = self._state
        if state is None or not state.same_memory() or not state.unchanged():
            return False
        if not self._weights:
            return True
        same = all(weight.is_same(x) for weight, x in zip(self._weights, state.tensors, strict=True))
        return same and _elements(state.tensors) == self._elements


class _Weight:
    """What is known of a weight without a look at all of it."""

    __slots__ = ("place", "storage", "writes")

    def __init__(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self.storage = StorageWeakRef(storage)  # while it is there, no other storage has this one's address
        self.place = _place(x, storage)
        self.writes = x._version

    def is_same(self, x: torch.Tensor) -> bool:
        return x._version == self.writes and _place(x, x.untyped_storage()) == self.place


def _place(x: torch.Tensor, storage: torch.UntypedStorage) -> tuple[object, ...]:
    return storage._cdata, x.data_ptr(), x.dtype, x.shape, x.stride()


def _elements(tensors: list[torch.Tensor]) -> list[list[float]]:
    """One element of each, from its middle."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for x in tensors:
        if x.numel():
            middle = sum((n // 2) * step for n, step in zip(x.shape, x.stride(), strict=True))
            one = x.detach().as_strided((1,), (1,), x.storage_offset() + middle)
            alike[x.device, x.dtype].append(one)
    return [torch.cat(each).tolist() for each in alike.values()]


def numeric_settings() -> tuple[object, ...]:
    """Settings outside of the model that decide how keys and values round."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in kinds]
    return (*settings(), *autocast)
