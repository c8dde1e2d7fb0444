"""Quantized linears that another library has loaded: known by what they hold, checked by what they compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint_folder import CheckpointFolder, open_folder
from .formats import decode, linear_specs, settle
from .int4_linear import FileLinear, Int4Linear, weight_tensors
from .module_swap import replace_module
from .spec import LinearSpec, TensorHeader

#: What the tensors are called that hold codes.
_CODES = ("qweight", "weight_packed")
_NAMES = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape")

#: How far apart the results may be, relative to their size: both sides round to 10 bits or, in bf16, to 8.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 3e-2}

_ROWS = 4

#: Where a module holds its tensors.
_HELD = ("_parameters", "_buffers")


@dataclass
class TakenOver:
    """What `take_over` has replaced.

    Attributes:
        layers: name -> the layer now in the model.
        left: name -> why a quantized module was left as it is.
    """

    layers: dict[str, Int4Linear] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _replaced: dict[str, _Replaced] = field(default_factory=dict)

    def undo(self, model: nn.Module) -> None:
        """Puts the other library's modules back, with the same tensors bit for bit.

        Each goes where its layer is by now, as PEFT may have put something around it.
        """
        places = _places(model)
        while self.layers:
            name, layer = self.layers.popitem()
            replaced = self._replaced.pop(name)
            replaced.fill_again(layer)
            for place in places[layer]:
                replace_module(model, place, replaced.module)


@dataclass(frozen=True)
class _Replaced:
    """A module that is out of the model.

    Attributes:
        emptied: its layer has taken its tensors, and can give them back; else they are in main memory.
    """

    module: nn.Module
    emptied: bool

    def fill_again(self, layer: Int4Linear) -> None:
        if not self.emptied:
            self.module.to(layer.qweight.device)
            return
        for name, tensor in layer.file_tensors().items():
            _put(self.module, name, tensor)

    def let_go(self, layer: Int4Linear) -> None:
        """Frees the memory that the module's tensors have on the device."""
        if not self.emptied:
            self.module.to("cpu")
            return
        for name in weight_tensors(layer.spec):
            _put(self.module, name, torch.empty(0, dtype=getattr(self.module, name).dtype, device="meta"))


@torch.no_grad()
def take_over(model: nn.Module, folder: str | Path | None = None) -> TakenOver:
    """Puts `Int4Linear` in the place of the quantized linears that gptqmodel or compressed-tensors have loaded.

    A module is known by its tensors, not by its class. Libraries rearrange tensors for their kernels, so what it holds
    is read in each way that its shapes allow; where none fits, its tensors are read from the checkpoint's folder.
    Either way the module is replaced only if the layer gives what the module's own forward gives on random rows.
    compressed-tensors' modules are not called for that, since their first call unpacks them; they hold what the file
    has.

    One module is replaced after another. A replaced one gives its tensors away, or waits in main memory where its
    layer is from the folder, so that nothing is held twice on a GPU.

    Args:
        model: on any devices; modules on the meta device are left.
        folder: the checkpoint's; None: the one that the model says it was loaded from.

    Returns:
        What was replaced and what was not; `undo` reverses it. An error on the way is raised when it has been undone.
    """
    taken = TakenOver()
    source = _Source(model, folder)
    try:
        for module, names in _places(model).items():
            if _is_foreign(module):
                _take(taken, source, model, module, names)
    except BaseException:
        taken.undo(model)
        raise
    return taken


def _take(taken: TakenOver, source: _Source, model: nn.Module, module: nn.Module, names: list[str]) -> None:
    """Replaces one module wherever it is, or notes why not."""
    found, emptied = _read(module), True
    if isinstance(found, str):
        reason, emptied = found, False
        found = source.layer(names[0], module) or reason
    if isinstance(found, str):
        taken.left[names[0]] = found
        return
    taken._replaced[names[0]] = _Replaced(module, emptied)
    taken.layers[names[0]] = found.train(module.training)
    for name in names:
        replace_module(model, name, found)
    taken._replaced[names[0]].let_go(found)


def _places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every name of every module: PEFT, for one, holds some under two."""
    places: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        places[module].append(name)
    return places


class _Source:
    """The checkpoint that a model came from, if it is at hand; opened when it is first needed."""

    def __init__(self, model: nn.Module, folder: str | Path | None) -> None:
        self._folder = folder or getattr(getattr(model, "config", None), "name_or_path", None)
        self._checkpoint: CheckpointFolder | None = None
        self._opened = False

    def layer(self, name: str, module: nn.Module) -> Int4Linear | None:
        """The layer of this name in the files, if it computes what the module computes."""
        device = next((tensor.device for tensor in (*module.buffers(), *module.parameters())), torch.device("meta"))
        checkpoint = self._open()
        if checkpoint is None or name not in checkpoint.specs or device.type == "meta":
            return None
        tensors = checkpoint.read(name, device)
        spec = settle(tensors, checkpoint.specs[name])
        layer = Int4Linear.from_grouped(decode(tensors, spec), _bias(module), spec)
        return layer if _computes_the_same(module, layer) else None

    def _open(self) -> CheckpointFolder | None:
        if not self._opened and self._folder and Path(self._folder).is_dir():
            with suppress(OSError, ValueError, NotImplementedError):
                self._checkpoint = open_folder(Path(self._folder))
        self._opened = True
        return self._checkpoint


def _is_foreign(module: nn.Module) -> bool:
    return not isinstance(module, Int4Linear | FileLinear) and any(_holds(module, codes) for codes in _CODES)


def _holds(module: nn.Module, name: str) -> bool:
    return isinstance(module._buffers.get(name, module._parameters.get(name)), Tensor)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor


def _read(module: nn.Module) -> Int4Linear | str:
    """The layer that does what a module does, or why there is none."""
    tensors = {name: getattr(module, name) for name in _NAMES if _holds(module, name)}
    tensors = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
    if any(tensor.is_meta for tensor in tensors.values()):
        return "its tensors are on the meta device"
    reasons = []
    for config in _configs(module, tensors):
        try:
            layer = _layer(module, tensors, config)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            reasons.append(str(error))
            continue
        if "weight_packed" in tensors or _computes_the_same(module, layer):
            return layer
        reasons.insert(0, "a layer of its tensors does not compute what it computes itself")
    return reasons[0] if reasons else "it does not say how many bits and what group size it has"


def _configs(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """What the quantization config of a checkpoint with such tensors could say."""
    if "weight_packed" in tensors:
        scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if scheme is not None:
            yield _packed_config(scheme, tensors)
        return
    bits, group_size = getattr(module, "bits", None), getattr(module, "group_size", None)
    if not isinstance(bits, int) or not isinstance(group_size, int):
        return
    common = {"bits": bits, "group_size": group_size}
    for version in ("gptq_v2", "gptq"):
        # gptqmodel writes zero points of 0 so that they come back; it holds them so, too.
        yield {**common, "quant_method": "gptq", "checkpoint_format": version, "meta": {"quantizer": ["gptqmodel:7"]}}
    for version in ("gemm", "gemv", "gemv_fast", "marlin"):
        yield {**common, "quant_method": "awq", "version": version, "zero_point": version != "marlin"}


def _packed_config(scheme: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    group_size = getattr(scheme, "group_size", None) or -1
    weights = {
        "num_bits": scheme.num_bits,
        "type": "int",
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": group_size,
        "symmetric": "weight_zero_point" not in tensors,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group": group}}


def _layer(module: nn.Module, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Int4Linear:
    if config.get("version") == "marlin":
        tensors = {name: tensors[name] for name in ("qweight", "scales") if name in tensors}
    elif config["quant_method"] == "awq":
        tensors = {name: tensor for name, tensor in tensors.items() if name != "g_idx"}
    headers = {f"module.{name}": TensorHeader(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    spec: LinearSpec = settle(tensors, linear_specs(config, headers)["module"])
    shape = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    if shape != (spec.out_features, spec.in_features):
        held = f"{spec.out_features} x {spec.in_features}"
        raise ValueError(f"it says it is {shape[0]} x {shape[1]}, its tensors are {held}")
    return Int4Linear.from_grouped(decode(tensors, spec), _bias(module), spec)


def _bias(module: nn.Module) -> nn.Parameter | None:
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter) or not isinstance(bias, Tensor):
        return bias
    return nn.Parameter(bias, requires_grad=False)


def _computes_the_same(module: nn.Module, layer: Int4Linear) -> bool:
    """On rows of both signs, in the first dtype that the module takes."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(_ROWS, layer.in_features, device=layer.qweight.device, generator=_generator(layer)).to(dtype)
        try:
            with _left_as_it_was(module):
                given = module(x)
        except (RuntimeError, ValueError, NotImplementedError, AssertionError):
            continue
        if not isinstance(given, Tensor) or given.shape != (_ROWS, layer.out_features):
            return False
        wanted = layer(x.float())
        return bool((given.float() - wanted).norm() <= _TOLERANCE[dtype] * wanted.norm())
    return False


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Undoes what a call does to a module: some put other tensors in the place of theirs when they are first called."""
    attributes = [(vars(m), dict(vars(m))) for m in module.modules()]
    attributes += [(held[name], dict(held[name])) for held, _ in list(attributes) for name in _HELD]
    tensors = [(x, x.detach()) for x in (*module.parameters(), *module.buffers())]
    try:
        yield
    finally:
        for held, before in attributes:
            held.clear()
            held.update(before)
        for x, data in tensors:
            if (x.data_ptr(), x.dtype) != (data.data_ptr(), data.dtype):
                x.data = data


def _generator(layer: Int4Linear) -> torch.Generator:
    """Its own: the user's random numbers stay as they are."""
    return torch.Generator(layer.qweight.device).manual_seed(0)
