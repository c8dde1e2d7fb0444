"""Deferred computation: a forward whose operations wait until their results are needed.

Inside a `DeferredMode`, cheap operations and matrix products return `Deferred` tensors: a record of the operation
instead of its result. Whatever needs the numbers (an operation that is not deferred, a kernel of ours) asks for them,
and by then the mode has seen what surrounds the operation: a list of rules looks at the record and computes several
of them in one kernel where it knows one. A rule that finds nothing leaves the operation to torch. So a model's own
code decides what is computed, whatever it is called and however it is wired, and what is never asked for is never
computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from . import int4  # noqa: F401  # defines the operators

aten = torch.ops.aten

#: Matrix products, and which argument is their left side.
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, torch.ops.hf_turbo.int4_mm.default: 0}

#: What a norm multiplies by its weight with, and what it may make of that before: a rule takes the weight itself then.
_NORMS = frozenset({
    aten.mul.Tensor, aten._fused_rms_norm.default, aten.add.Tensor, aten._to_copy.default,
})  # fmt: skip

#: Operations that only look at their first argument in another way.
VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor,
    aten.select.int, aten.alias.default, aten.detach.default, aten.split.Tensor, aten.split_with_sizes.default,
})  # fmt: skip

#: What waits: pointwise operations, the sums of norms, looked up rows, and matrix products.
DEFERRED = frozenset({
    aten._to_copy.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
    aten.pow.Tensor_Scalar, aten.mean.dim, aten.rsqrt.default, aten.silu.default, aten.gelu.default,
    aten.sigmoid.default, aten.tanh.default, aten.cat.default, aten.stack.default, aten.clone.default,
    aten._fused_rms_norm.default, aten.bmm.default, aten.index.Tensor, aten.cos.default, aten.sin.default,
    aten.embedding.default, *PRODUCTS,
})  # fmt: skip

#: Computes a value: its result, or None where the rule has nothing to say.
Rule = Callable[["DeferredMode", "Value"], "torch.Tensor | tuple[torch.Tensor, None] | None"]


#: What `_result_spec` has found out: so many at most, then anew.
_MAX_RESULTS = 4096
_results: dict[Any, Any] = {}
#: One spec for all tensors that are alike: it stands for them in the keys above.
_specs: dict[Any, TensorSpec] = {}


class TensorSpec:
    """What a tensor is without its numbers, read once: a step asks for the same thousands of times.

    Args:
        meta: the tensor on the meta device.
    """

    __slots__ = ("dtype", "is_contiguous", "meta", "numel", "offset", "shape", "stride")

    def __init__(self, meta: torch.Tensor) -> None:
        self.meta, self.shape, self.stride, self.dtype = meta, meta.shape, meta.stride(), meta.dtype
        self.offset, self.numel, self.is_contiguous = meta.storage_offset(), meta.numel(), meta.is_contiguous()

    def in_order_of(self, other: TensorSpec) -> bool:
        """Whether a view of a tensor like `other` leaves every number in its place in memory."""
        return self.numel == other.numel and self.is_contiguous and other.is_contiguous


class Value:
    """One operation that was asked for, and its result once there is one.

    Args:
        spec: of the result, or of each of several.
    """

    __slots__ = ("__weakref__", "args", "func", "is_view", "kwargs", "result", "spec")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], spec: Any) -> None:
        self.func, self.args, self.kwargs, self.spec = func, args, kwargs, spec
        self.is_view = func in VIEWS
        self.result: Any = None

    @property
    def meta(self) -> torch.Tensor:
        """The only result, on the meta device."""
        return self.spec.meta


class Deferred(torch.Tensor):
    """A tensor without numbers: one of the outputs of a `Value` (None where it has one)."""

    value: Value
    output: int | None
    spec: TensorSpec

    @staticmethod
    def __new__(cls, value: Value, index: int | None, device: torch.device) -> Deferred:
        spec = value.spec if index is None else value.spec[index]
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, spec.stride, spec.offset, dtype=spec.dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)  # a kernel launched by hand would read from address 0
        tensor.value, tensor.output, tensor.spec = value, index, spec
        return tensor

    @property
    def meta(self) -> torch.Tensor:
        return self.spec.meta

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs have neither cls nor func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} was called on a deferred tensor outside of its forward")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class DeferredMode(TorchDispatchMode):
    """Defers operations while it is active.

    Args:
        rules: what knows how to compute a value better than torch; the first that answers counts.
        device: only operations that come out on this device are deferred.
        transient: operations whose results are made anew for each that asks, and not kept: large, and cheap to make.
    """

    def __init__(self, rules: Sequence[Rule], device: torch.device, transient: frozenset[Any] = frozenset()) -> None:
        super().__init__()
        self.rules = rules
        self.device = device
        self._transient = transient
        self._deferred = DEFERRED | transient
        self.num_launched = 0
        #: Operations that wrote to a tensor.
        self.num_writes = 0
        #: Where the numbers lie that have been computed or written since the mode began.
        self._made: set[int | None] = set()
        self._asked_for: list[weakref.ref[Value]] = []
        self._products: dict[Any, list[weakref.ref[Value]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._deferred and self._is_ours(args, kwargs) and not self._has_made_weight(func, args):
            return self._defer(func, args, kwargs)
        if func in VIEWS:
            if not isinstance(args[0], Deferred):
                return func(*args, **kwargs)
            if args[0].value.result is None:
                return self._defer(func, args, kwargs)
        elif func._schema.is_mutable:
            self._before_write(func, args, kwargs)
        elif func.namespace != "aten" or func is aten.as_strided.default:
            args, kwargs = _mapped(self._in_one_piece, (args, kwargs))
        args, kwargs = _mapped(self.tensor, (args, kwargs))
        result = func(*args, **kwargs)
        if func not in VIEWS:
            self._made |= _storages(result) - _storages(args)  # others look at a tensor in another way, too
        return result

    @staticmethod
    @contextmanager
    def set_aside() -> Iterator[DeferredMode]:
        """The active mode; until the end of the block operations run as they are called.

        Raises:
            RuntimeError: none is active.
        """
        mode = _get_current_dispatch_mode()
        if not isinstance(mode, DeferredMode):
            raise RuntimeError("no deferred forward is under way")
        with _disable_current_modes():
            yield mode

    @staticmethod
    def is_active() -> bool:
        """Whether a deferred forward is under way in this thread."""
        return bool(_len_torch_dispatch_stack()) and isinstance(_get_current_dispatch_mode(), DeferredMode)

    def tensor(self, x: Any) -> Any:
        """The numbers of a deferred tensor; anything else as it is."""
        if not isinstance(x, Deferred):
            return x
        value = x.value
        if value.result is None:
            if value.func in self._transient:
                return self._compute(value)
            self.finish(value, self._view(value) if value.is_view else self._compute(value))
        return value.result if x.output is None else value.result[x.output]

    def finish(self, value: Value, result: Any) -> None:
        """Gives a value its result. What it was computed from is let go."""
        value.result, value.args = result, ()
        if not value.is_view:
            self._made |= _storages(result)

    def products_of(self, x: torch.Tensor) -> Iterator[Value]:
        """The matrix products with `x` as their left side that nobody has asked for yet, oldest first."""
        for ref in self._products.get(identity(x), ()):
            value = ref()
            if value is not None and value.result is None:
                yield value

    def waiting(self, *funcs: Any) -> list[Value]:
        """The values of these operations that nobody has asked for yet, oldest first."""
        return [value for value in self._pending() if value.func in funcs]

    def _pending(self) -> list[Value]:
        """All values that have no result yet, oldest first."""
        values = [value for ref in self._asked_for if (value := ref()) is not None and value.result is None]
        self._asked_for = [weakref.ref(value) for value in values]
        return values

    def _has_made_weight(self, func: Any, args: Any) -> bool:
        """Whether a product's or a norm's weight or bias is no parameter, but has been computed or written just now.

        Kernels read weights before those in front of them have ended.
        """
        if func in PRODUCTS:
            weights = [x for i, x in enumerate(args) if i != PRODUCTS[func]]
        elif func in _NORMS:
            weights = [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 1]
        else:
            return False
        numbers = (x for x in weights if isinstance(x, torch.Tensor) and not isinstance(x, Deferred))
        return any(_storage(x) in self._made for x in numbers)

    def _is_ours(self, args: Any, kwargs: dict[str, Any]) -> bool:
        if isinstance(args[0], Deferred) and "device" not in kwargs:  # nearly always
            return True
        tensors = [x for x in _leaves(args) if isinstance(x, torch.Tensor)]
        if any(isinstance(x, Deferred) for x in tensors):
            return kwargs.get("device") in (None, self.device)
        floats = _is_float(kwargs.get("dtype")) or all(x.is_floating_point() for x in tensors[:1])
        moved = kwargs.get("device") not in (None, self.device)
        return floats and not moved and any(x.device == self.device and x.dim() > 0 for x in tensors)

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        spec = _result_spec(func, args, kwargs)
        value = Value(func, args, kwargs, spec)
        self._asked_for.append(weakref.ref(value))
        if func in PRODUCTS:
            self._products.setdefault(identity(args[PRODUCTS[func]]), []).append(weakref.ref(value))
        if isinstance(spec, TensorSpec):
            return Deferred(value, None, self.device)
        return type(spec)([Deferred(value, i, self.device) for i in range(len(spec))])

    def _in_one_piece(self, x: Any) -> Any:
        """The numbers of a tensor for code that reads memory by itself: contiguous where that was said."""
        numbers = self.tensor(x)
        return numbers.contiguous() if isinstance(x, Deferred) and x.spec.is_contiguous else numbers

    def _compute(self, value: Value) -> Any:
        with _without_modes():
            for rule in self.rules:
                result = rule(self, value)
                if result is not None:
                    return result
            self.num_launched += 1
            args, kwargs = _mapped(self.tensor, (value.args, value.kwargs))
            return value.func(*args, **kwargs)

    def _view(self, value: Value) -> Any:
        with _without_modes():
            base = self.tensor(value.args[0])
            rest = value.args[1:]
            try:
                return value.func(base, *rest, **value.kwargs)
            except RuntimeError:  # a kernel's output may have other strides than torch's would
                return value.func(base.contiguous(), *rest, **value.kwargs)

    def _before_write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Computes what still has to read a tensor that is about to be written."""
        self.num_writes += 1
        schema = func._schema.arguments
        named = [*zip((a.name for a in schema), args, strict=False), *kwargs.items()]
        written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        tensors = [x for name, xs in named if name in written for x in _leaves(xs) if isinstance(x, torch.Tensor)]
        for x in tensors:
            base = _base(x)
            if isinstance(base, Deferred) and base.value.func in self._transient:
                self.finish(base.value, self._compute(base.value))  # from here on it is what is written
        targets = {_storage(self.tensor(x)) for x in tensors}
        self._made |= targets
        for value in self._pending():
            reads = (_storage(x) for x in _leaves(value.args) if isinstance(x, torch.Tensor))
            if value.result is None and not targets.isdisjoint(reads):
                self.finish(value, self._view(value) if value.is_view else self._compute(value))


def whole(x: Any) -> Any:
    """Under `x`, through views that keep every number in its place in memory: the value they all look at."""
    while isinstance(x, Deferred) and x.value.is_view and x.value.result is None:
        base = x.value.args[0]
        if not isinstance(base, Deferred) or not x.spec.in_order_of(base.spec):
            break
        x = base
    return x


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point


def _without_modes() -> AbstractContextManager[Any]:
    """No mode sees what runs in the block. (While torch calls a mode, that one is off; looking takes torch 4 us.)"""
    return _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """An operation's arguments with `function` of each. (torch's own for any nesting takes several times as long.)"""
    if isinstance(x, (tuple, list)):
        return type(x)([_mapped(function, one) for one in x])
    if isinstance(x, dict):
        return {name: _mapped(function, one) for name, one in x.items()}
    return function(x)


def _leaves(x: Any) -> Iterator[Any]:
    """What an operation's arguments are made of."""
    if isinstance(x, (tuple, list)):
        for one in x:
            yield from _leaves(one)
    else:
        yield x


def _result_spec(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation would give. The layers of a model ask for the same again and again."""
    described = _described(args), _described(tuple(kwargs.items())) if kwargs else ()
    key = func, *described, torch.get_default_dtype()
    spec = _results.get(key)
    if spec is None:
        if len(_results) >= _MAX_RESULTS:
            _results.clear()
            _specs.clear()
        spec = _results[key] = _mapped(_spec_of, _computed_meta(func, args, kwargs))
    return spec


def _computed_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation's result on the meta device."""
    with _without_modes():
        meta_args, meta_kwargs = _mapped(_meta, (args, kwargs))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        return func(*meta_args, **meta_kwargs)


def _spec_of(meta: torch.Tensor) -> TensorSpec:
    """Its spec, the same object for all that are alike."""
    return _specs.setdefault(_described(meta), TensorSpec(meta))


def _described(x: Any) -> Any:
    """Equal for arguments with which an operation gives tensors of the same shape, strides and dtype."""
    if isinstance(x, Deferred):
        return x.spec
    if type(x) is int:
        return x  # 1 is neither 1.0 nor True, whose types stand beside them below
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.storage_offset() if x.device.type == "meta" else 0
    if isinstance(x, (tuple, list)):
        return tuple([_described(one) for one in x])
    return type(x), x


def _meta(x: Any) -> Any:
    if isinstance(x, Deferred):
        return x.spec.meta
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x


def identity(x: torch.Tensor) -> Any:
    """Equal for tensors that hold the same numbers in the same order."""
    x = whole(x)
    if isinstance(x, Deferred):
        return id(x.value), x.output
    layout = x.numel() if x.is_contiguous() else (x.shape, x.stride())
    return x.data_ptr(), layout, x.dtype


def _base(x: torch.Tensor) -> torch.Tensor:
    """What `x` is a view of: a tensor with numbers, or a deferred one that is no view."""
    while isinstance(x, Deferred):
        if x.value.result is not None:
            x = x.value.result if x.output is None else x.value.result[x.output]
        elif x.value.is_view:
            x = x.value.args[0]
        else:
            break
    return x


def _storages(x: Any) -> set[int | None]:
    """Where the numbers of all tensors among arguments or results lie."""
    return {_storage(one) for one in _leaves(x) if isinstance(one, torch.Tensor)}


def _storage(x: torch.Tensor) -> int | None:
    """Where the numbers of a tensor lie; None if nowhere yet."""
    base = _base(x)
    if isinstance(base, Deferred):
        return None
    try:
        return base.untyped_storage().data_ptr()
    except RuntimeError:  # another library's tensor, whose numbers are in tensors of its own
        return -id(base)
