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
        self._coming: _Elements | None = None
        self._lock = threading.Lock()

    def of(self, model: nn.Module, waits: bool = True) -> tuple[int, str | None]:
        """The number now, and why a text's keys may depend on more than that and its tokens; None if they don't.

        Args:
            waits: for the elements of the weights, which a GPU gives after all that it has to do. False: they are sent
                for, and compared by a later call of this kind, once they are there: until then `is_looking` is true,
                and no other change is looked for. The number is that of the model when they were sent for.
        """
        with self._lock:
            if not (self._is_same() if waits else self._was_same()):
                self._number += 1
                self._state = state = ModelState(model)
                self._reason, self._coming = why_not_kept(model), None
                if any(x.is_inference() or x.is_meta or x.layout != torch.strided for x in state.tensors):
                    self._reason, self._weights, self._elements = "changes of its weights can't be seen", [], []
                else:
                    self._weights = [_Weight(x) for x in state.tensors]
                    self._elements = _Elements(state.tensors).read()
            return self._number, self._reason

    @property
    def is_looking(self) -> bool:
        """Whether elements have been sent for that have not been compared."""
        return self._coming is not None

    def forget(self) -> None:
        """Holds on to nothing of the model; the number will be another one."""
        with self._lock:
            self._state, self._weights, self._elements, self._coming = None, [], [], None

    def __reduce__(self) -> tuple[type[ModelVersion], tuple[()]]:
        return ModelVersion, ()  # a copied model is another one

    def _is_same(self) -> bool:
        """Whether nothing has changed up to now."""
        return self._looks_same() and _Elements(self._tensors).read() == self._elements

    def _was_same(self) -> bool:
        """The same as of when elements were last sent for, as far as these are there; sends for them if none are."""
        if self._coming is None:
            if not self._looks_same():
                return False
            self._coming = _Elements(self._tensors)
        if not self._coming.are_there:
            return True
        came, self._coming = self._coming, None
        return came.read() == self._elements

    def _looks_same(self) -> bool:
        """Whether all but the elements of the weights is as it was. Asks nothing of a device."""
        state = self._state
        if state is None or not state.same_memory() or not state.unchanged():
            return False
        return all(weight.is_same(x) for weight, x in zip(self._weights, self._tensors, strict=True))

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """Of which changes are looked for."""
        return self._state.tensors if self._state is not None and self._weights else []


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


class _Elements:
    """One element of each tensor, from its middle, on the way to the host. Holds on to none of the tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for x in tensors:
            if x.numel():
                middle = sum((n // 2) * step for n, step in zip(x.shape, x.stride(), strict=True))
                one = x.detach().as_strided((1,), (1,), x.storage_offset() + middle)
                alike[x.device, x.dtype].append(one)
        cuda = {device for device, _ in alike if device.type == "cuda"}
        # A copy from there that does not wait goes to pinned memory.
        self._parts = [torch.cat(each).to("cpu", non_blocking=key[0] in cuda) for key, each in alike.items()]
        self._events: list[torch.cuda.Event] = []
        for device in cuda:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(device))

    @property
    def are_there(self) -> bool:
        """Whether `read` does not wait."""
        return all(event.query() for event in self._events)

    def read(self) -> list[list[float]]:
        """The elements by device and dtype; waits for them."""
        for event in self._events:
            event.synchronize()
        return [part.tolist() for part in self._parts]


def numeric_settings() -> tuple[object, ...]:
    """Settings outside of the model that decide how keys and values round."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in kinds]
    return (*settings(), *autocast)
