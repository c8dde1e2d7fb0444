"""`patch` and `unpatch`: give one model instance a faster class, and back."""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .cache.paged_cache import PagedCache
from .config import TurboConfig
from .generation.paced import paced
from .handle import PatchHandle
from .modeling.attention import AttentionName, register
from .ops.kv_format import KV_FORMATS
from .patched_class import original_class, patched_class
from .quantization.take_over import take_over

Model = TypeVar("Model", bound=nn.Module)

_HANDLE = "_hf_turbo"
_MISSING = object()

#: Model types that nothing in their structure gives away, and why they step aside.
_OUT_OF_REACH = {"doge": "the model computes with the attention mask itself"}


def patch(model: Model, config: TurboConfig | None = None, **options: Any) -> Model:
    """Makes `model.generate()` and pipelines run over a paged cache. Only this instance changes.

    Quantized linears that gptqmodel or compressed-tensors have loaded are replaced by ours where these compute the
    same; `unpatch` puts them back.

    Args:
        model: a Transformers decoder-only language model, or a PEFT model around one. Changed in place and
            returned. One that can't be accelerated keeps working as it is; `report(model)` says why.
        config: options; `options` by name go on top. Patching a patched model replaces its options.

    Raises:
        TypeError: not a Transformers model.
        ValueError: the model can't generate, or an option is not allowed. Nothing has changed then.
        NotImplementedError: `kv_cache_dtype` was asked for and this model can't have it; nothing has changed, either.
    """
    turbo_config = TurboConfig.of(config, options)
    target = _target(model)
    kind = turbo_config.kv_cache_dtype
    if kind is not None and (reason := why_not(target) or _why_no_codes(target, kind)):
        raise NotImplementedError(f"kv_cache_dtype={kind!r} can't be had: {reason}")
    if is_patched(target):
        unpatch(target)
    register()
    handle = PatchHandle(turbo_config, target.device.type)
    handle.borrow = Borrowed
    if reason := why_not(target):
        handle.model_reason = reason
        handle.step_aside(reason)
    else:
        _fill(handle, target)
    target.__dict__[_HANDLE] = handle
    target.__class__ = patched_class(type(target))  # type: ignore[arg-type]
    if turbo_config.speculation is not None and not handle.model_reason:
        try:
            handle.speculation = paced(target, turbo_config.speculation)
        except BaseException:
            unpatch(target)
            raise
    return model


def unpatch(model: Model) -> Model:
    """Gives back exactly what was there before `patch`. A model that isn't patched stays as it is.

    What was set on the model's config meanwhile stays set.
    """
    target = _target(model)
    if is_patched(target):
        _end_manager(target)
        handle: PatchHandle = target.__dict__.pop(_HANDLE)
        handle.steps.drop()
        target.__class__ = original_class(target)
        _undo(target, handle)
        for original, own, before in handle.configs:
            vars(original).update({name: x for name, x in vars(own).items() if before.get(name, _MISSING) is not x})
    return model


@contextmanager
def patched(model: Model, config: TurboConfig | None = None, **options: Any) -> Iterator[Model]:
    """`patch` for the length of a `with` block. A model that was patched before is so again afterwards."""
    before = handle_of(model).config if is_patched(model) else None
    patch(model, config, **options)
    try:
        yield model
    finally:
        unpatch(model)
        if before is not None:
            patch(model, before)


class Borrowed:
    """A model of the user's that another one needs patched: within a `with` block, and as it was outside of it.

    What was captured of it is kept between the blocks. Blocks may nest, also in several threads.

    Args:
        model: nothing is done to one that is patched already.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._num_users = 0
        self._handle: PatchHandle | None = None  # while nobody uses it
        self._own: list[tuple[nn.Module, str, Any]] = []
        self._configs: list[tuple[PreTrainedConfig, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Any:
        with self._lock:
            if self._num_users or not is_patched(self._model):
                if not self._num_users:
                    self._patch()
                self._num_users += 1
        return self._model

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._num_users:
                self._num_users -= 1
                if not self._num_users:
                    self._put_back()

    def release(self) -> None:
        """Gives back the memory of its cache blocks and captured steps."""
        handle = self._handle
        if handle is not None:
            handle.steps.drop()
            handle.pool.release()

    def _patch(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None or any(vars(config) != before for config, before in self._configs):
            patch(self._model)
            return
        for module, name, value in self._own:
            setattr(module, name, value)
        self._model.__dict__[_HANDLE] = handle
        cls: Any = type(self._model)
        self._model.__class__ = patched_class(cls)

    def _put_back(self) -> None:
        handle = handle_of(self._model)
        if handle.model_reason or handle.taken_over.layers or not handle.attention_is_ours():
            unpatch(self._model)
            return
        self._own = [(module, name, getattr(module, name)) for module, name, _ in handle.undo]
        self._configs = [(original, dict(vars(original))) for original, *_ in handle.configs]
        del self._model.__dict__[_HANDLE]
        self._model.__class__ = original_class(self._model)
        _undo(self._model, handle)
        self._handle = handle


def release(model: nn.Module) -> None:
    """Gives back the memory of a patched model's cache blocks that nothing holds, and of its captured steps.

    Those of a draft model, too, that is patched only while it drafts, and of a manager of many requests that was kept.
    """
    handle = handle_of(model)
    _end_manager(_target(model))
    handle.steps.drop()
    handle.version.forget()
    handle.pool.release()
    for known in handle.drafters.values():
        known.drafter.release()


def paged_cache(model: nn.Module) -> PagedCache:
    """An empty cache for a loop of one's own: pass it as the model's cache, forward after forward.

    Raises:
        ValueError: the model isn't patched.
        NotImplementedError: hf_turbo steps aside for this model.
    """
    handle = handle_of(model)
    if handle.model_reason:
        raise NotImplementedError(f"hf_turbo steps aside for this model: {handle.model_reason}")
    return handle.new_cache()


def is_patched(model: nn.Module) -> bool:
    """Whether `patch` was called on this model."""
    return _HANDLE in _target(model).__dict__


def handle_of(model: nn.Module) -> PatchHandle:
    """The handle of a patched model.

    Raises:
        ValueError: it isn't patched.
    """
    target = _target(model)
    if _HANDLE not in target.__dict__:
        raise ValueError("this model isn't patched; call hf_turbo.patch(model) first")
    return target.__dict__[_HANDLE]


def why_not(model: PreTrainedModel) -> str | None:
    """Why a model can't be accelerated at all; None if it can."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models keep two caches"
    if not _uses_attention_interface(model):
        return "the model does not use Transformers' attention interface"
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _OUT_OF_REACH:
        return _OUT_OF_REACH[config.model_type]
    if getattr(config, "num_kv_shared_layers", None):
        return "layers read the keys of other layers"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "attention_chunk_size", None
    ):
        return "chunked attention"
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"layers with a {type(layer).__name__} (linear attention, convolution or an index) have other states"
    return None


def _why_no_codes(model: PreTrainedModel, kind: str) -> str | None:
    """Why a model's keys can't be kept as such codes, as far as its config shows it."""
    config, parts = model.config.get_text_config(decoder=True), KV_FORMATS[kind].parts
    size = getattr(config, "head_dim", None)
    if size is None and getattr(config, "hidden_size", None) and getattr(config, "num_attention_heads", None):
        size = config.hidden_size // config.num_attention_heads
    wrong = isinstance(size, int) and size % parts
    return f"it takes head sizes that are multiples of {parts}, not {size}" if wrong else None


def _uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether layers look their attention function up by name. (A class may say so, but not all do.)"""
    modules = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in modules)


def _fill(handle: PatchHandle, model: PreTrainedModel) -> None:
    """Changes what is inside of the model: all of it, or, where that fails, nothing."""
    handle.sliding_windows = _sliding_windows(model.config.get_text_config(decoder=True))
    handle.pool.protect_short_windows(handle.sliding_windows)
    try:
        _take_over_linears(model, handle)
        _take_over_attention(model, handle)
    except BaseException:
        _undo(model, handle)
        raise


def _end_manager(model: PreTrainedModel) -> None:
    """Ends a manager that was kept for the next session."""
    manager = model.__dict__[_HANDLE].manager
    if manager is not None:
        manager.destroy()


def _undo(model: PreTrainedModel, handle: PatchHandle) -> None:
    for module, name, value in reversed(handle.undo):
        setattr(module, name, value)
    handle.taken_over.undo(model)


def _take_over_linears(model: PreTrainedModel, handle: PatchHandle) -> None:
    """Puts our linears in the place of other libraries' quantized ones; says of those that stay why."""
    handle.taken_over = take_over(model)
    reasons = Counter(handle.taken_over.left.values())
    for name, reason in handle.taken_over.left.items():
        if count := reasons.pop(reason, 0):
            others = f" and {count - 1} more" if count > 1 else ""
            handle.step_aside(f"{name}{others} stay quantized as they were loaded: {reason}")


def _take_over_attention(model: PreTrainedModel, handle: PatchHandle) -> None:
    """Gives the model a config of its own, with our attention's name on the decoder's part.

    The config object may be shared with another model, so it is copied and replaced wherever a module holds it.
    """
    originals = _configs(model.config)
    own = copy.deepcopy(model.config)
    replaced = dict(zip(map(id, originals), _configs(own), strict=True))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in replaced:
                handle.undo.append((module, name, value))
                setattr(module, name, replaced[id(value)])
    handle.decoder_config = own.get_text_config(decoder=True)
    base = str(handle.decoder_config._attn_implementation or "eager")
    handle.attention = AttentionName(base, handle.config.prompt_attention)
    handle.decoder_config._attn_implementation_internal = handle.attention
    handle.configs = [(original, c, dict(vars(c))) for original, c in zip(originals, _configs(own), strict=True)]


def _target(model: nn.Module) -> PreTrainedModel:
    """The Transformers model itself, out of what PEFT puts around it."""
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a {type(model).__name__} is not a Transformers model")
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} can't generate; give the model with the language modelling head")
    return model


def _sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    layers = DynamicCache(config=config).layers
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A config and those inside it."""
    found = [config]
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            found += _configs(inner)
    return found
