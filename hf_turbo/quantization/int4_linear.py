"""The linear layer of a quantized weight, and what stands in its place while a file is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

from ..ops import (
    cpu_int4,
    dispatch,
    int4,  # noqa: F401  registers torch.ops.hf_turbo.int4_*
)
from ..ops.cpu_int4_layout import block_rows
from ..ops.packed_weight import PackedWeight, has_layout_of, one_of_equals, pack_for_device, unpack_weight
from .formats import decode, encode, settle
from .spec import LinearSpec, TensorHeader
from .weight import GroupedWeight

_BUFFERS = ("qweight", "scales", "zeros", "perm")


class Int4Linear(nn.Module):
    """`x @ W.T + bias` with a weight of 2, 3, 4 or 8 bits a value; x and the result are of any floating dtype.

    The weight is held once, as the kernels take it. Its scales keep the dtype of the file whatever the model is cast to
    (`to(dtype)`, `half()`, ...), since rounding them would change the weight; the bias follows the model.
    `state_dict()` has the tensors of the format that the weight came in, bit for bit, and `load_state_dict` takes them.

    There is no `weight`: `dequantize()` makes one.

    Attributes:
        in_features, out_features: K and N.
        bits, group_size: of the weight, as its file has them.
        spec: how the weight lies in its file.
        qweight, scales, zeros, perm: buffers, see `PackedWeight`.
        bias: `[N]` or None.
        zero_bias: the file has a bias of nothing but zeros, which the model has not: it is only saved again.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, spec: LinearSpec) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bits, self.group_size = weight.bits, weight.group_size
        self.spec = spec
        self.zero_bias = False
        for name in _BUFFERS:
            self.register_buffer(name, None)
        self._hold(weight)
        self.bias = None if bias is None else as_parameter(bias)

    @classmethod
    def from_grouped(cls, weight: GroupedWeight, bias: Tensor | None, spec: LinearSpec) -> Int4Linear:
        """A layer of this weight, on the weight's device.

        Args:
            bias: `[N]`, or None.
            spec: the format that it is saved in.
        """
        return cls(weight, bias, spec)

    @property
    def packed(self) -> PackedWeight:
        """The weight as the kernels take it; its tensors are the layer's own."""
        held = self._buffers  # attributes take nn.Module ten times as long
        return PackedWeight(
            *(held["qweight"], held["scales"], held["zeros"], held["perm"]),  # type: ignore[arg-type]  # the first two are set
            bits=self.field_bits,
            group_size=self._packed_group_size,
        )

    @property
    def field_bits(self) -> int:
        """Bits that a value takes in memory: 4 or 8."""
        return max(self.bits, 4)

    @property
    def infeatures(self) -> int:
        """`in_features`, as auto-gptq's layers call it; PEFT knows quantized layers by this name."""
        return self.in_features

    @property
    def outfeatures(self) -> int:
        """`out_features`."""
        return self.out_features

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]` in x's dtype."""
        is_seen = torch.compiler.is_compiling() or _len_torch_dispatch_stack() or torch.is_grad_enabled()
        if type(x) is Tensor and not is_seen:  # nobody has to see the operator, and finding it takes the host a while
            rows = x.reshape(-1, self.in_features)
            if x.is_cpu:
                out = cpu_int4.linear(rows, self.packed, self.bias)
            else:
                out = dispatch.int4_linear(rows, [self.packed], [self.bias])
            return out.view(*x.shape[:-1], self.out_features)
        return torch.ops.hf_turbo.int4_linear(
            x, self.qweight, self.scales, self.zeros, self.perm, self.bias, self.field_bits, self._packed_group_size
        )

    def dequantize(self, dtype: torch.dtype = torch.float16) -> Tensor:
        """The weight `[N, K]`: products in fp32, rounded once."""
        return torch.ops.hf_turbo.int4_dequantize(
            self.qweight,
            self.scales,
            self.zeros,
            self.perm,
            self.field_bits,
            self._packed_group_size,
            self.in_features,
            dtype,
        )

    def to_grouped(self) -> GroupedWeight:
        """The weight as it was given."""
        codes, perm = unpack_weight(self.packed, self.in_features)
        zeros = None if self._middle_zeros else self.zeros
        return GroupedWeight(codes, self.scales, zeros, perm, self.bits, self.group_size)

    def file_tensors(self) -> dict[str, Tensor]:
        """The tensors of the weight as its file has them, by their short names; no bias."""
        with torch.no_grad():
            tensors = encode(self.to_grouped(), self.spec)
        tensors.pop("bias", None)
        return tensors

    def _hold(self, weight: GroupedWeight) -> None:
        """Packs a weight into the buffers: into their memory where that fits, since others may hold it too."""
        zeros = weight.zeros
        self._middle_zeros = zeros is None
        if zeros is None and weight.bits < self.field_bits:  # the kernels' own default is the middle of the field
            zeros = torch.full_like(weight.scales, 1 << (weight.bits - 1), dtype=torch.uint8)
        packed = pack_for_device(weight.codes, weight.scales, zeros, weight.perm, self.field_bits, weight.group_size)
        self._packed_group_size = packed.group_size
        self.perm = one_of_equals(packed.perm)
        for name in ("qweight", "scales", "zeros"):
            old, new = getattr(self, name), getattr(packed, name)
            if _fits(old, new):
                old.copy_(new)
            else:
                setattr(self, name, None if new is None else new.contiguous())
        cpu_int4.forget_operand(self.qweight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.file_tensors().items():
            destination[prefix + name] = tensor
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()
        elif self.zero_bias:
            header = self.spec.tensors["bias"]
            destination[prefix + "bias"] = torch.zeros(header.shape, dtype=header.dtype, device=self.qweight.device)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        bias = given.pop("bias", None)
        names = weight_tensors(self.spec)
        missing = [name for name in names if name not in given]
        missing_keys.extend(prefix + name for name in missing)
        if strict:
            unexpected_keys.extend(prefix + name for name in given if name not in names)
        if not missing:
            error_msgs.extend(f"{prefix}{text}" for text in self._load_weight(given))
        if bias is not None:
            error_msgs.extend(f"{prefix}{text}" for text in self._load_bias(bias))
        elif self.bias is not None:
            missing_keys.append(prefix + "bias")

    def _load_weight(self, given: dict[str, Tensor]) -> list[str]:
        """Takes the tensors of a file; what is wrong with them."""
        wrong = [
            f"{name}: {given[name].dtype} {list(given[name].shape)} where {header.dtype} {list(header.shape)} belongs"
            for name, header in weight_tensors(self.spec).items()
            if (given[name].dtype, tuple(given[name].shape)) != (header.dtype, tuple(header.shape))
        ]
        if not wrong:
            tensors = {name: given[name].to(self.qweight.device) for name in weight_tensors(self.spec)}
            self.spec = settle(tensors, self.spec)
            with torch.no_grad():
                self._hold(decode(tensors, self.spec))
        return wrong

    def _load_bias(self, bias: Tensor) -> list[str]:
        if bias.shape != (self.out_features,):
            return [f"bias: {list(bias.shape)} where {[self.out_features]} belongs"]
        if self.bias is None and not (self.zero_bias and not bias.any()):
            self.bias = as_parameter(bias.to(self.qweight.device, copy=True))
        elif self.bias is not None:
            with torch.no_grad():
                self.bias.copy_(bias)
        return []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4Linear:
        """What `to`, `half`, `cuda`, ... do: the scales keep their dtype, the codes get the new device's layout."""
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        if not self.qweight.is_meta and not has_layout_of(self.qweight, self.qweight.device):
            self._hold(self.to_grouped())
        self.perm = one_of_equals(self.perm)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block_rows": block_rows()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError for what was pickled on a processor that has the codes in another layout."""
        rows = state.pop("_block_rows")
        super().__setstate__(state)
        if self.qweight.dtype == torch.uint8 and rows != block_rows():
            raise RuntimeError(
                "this model was pickled on a CPU of another kind, which holds INT4 weights in another layout: "
                "save_pretrained writes files for any"
            )

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError("Int4Linear holds no weight that could be read or changed; dequantize() makes one")
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, layout={self.spec.layout!r}, bias={self.bias is not None}"
        )


class FileLinear(nn.Module):
    """The tensors of one quantized linear as its file has them, until all are read: buffers, on the meta device first.

    Args:
        spec: how the weight lies in its file.
        dtype: the model's, for a bias.
        drops_zero_bias: the model has no bias: the file's is dropped if it turns out to be zero.
    """

    #: Some models initialize a child's weight by name. This one need not be; see Transformers' `init`.
    weight: Tensor

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, drops_zero_bias: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.drops_zero_bias = drops_zero_bias
        for name, header in weight_tensors(spec).items():
            self.register_buffer(name, torch.empty(header.shape, dtype=header.dtype, device="meta"))
        bias = torch.empty(spec.out_features, dtype=dtype, device="meta")
        self.bias = as_parameter(bias) if spec.has_bias else None
        self.weight = torch.empty(spec.out_features, spec.in_features, device="meta")
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> NoReturn:
        raise RuntimeError("this layer's file has not been read yet")

    @torch.no_grad()
    def to_int4(self) -> Int4Linear:
        """The layer, on the tensors' device.

        Raises:
            RuntimeError: some of the tensors were not read.
        """
        # What is kept in fp32 by the model's wish comes so; that is exact, and so is the way back.
        tensors = {name: getattr(self, name).to(header.dtype) for name, header in weight_tensors(self.spec).items()}
        if unread := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise RuntimeError(f"tensors that were not read: {', '.join(unread)}")
        spec = settle(tensors, self.spec)
        layer = Int4Linear.from_grouped(decode(tensors, spec), self.bias, spec)
        if self.drops_zero_bias and layer.bias is not None and not layer.bias.is_meta and not layer.bias.any():
            layer.zero_bias, layer.bias = True, None
        return layer.train(self.training)


def weight_tensors(spec: LinearSpec) -> dict[str, TensorHeader]:
    """The tensors of a spec but the bias."""
    return {name: header for name, header in spec.tensors.items() if name != "bias"}


def as_parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def _fits(old: Tensor | None, new: Tensor | None) -> bool:
    return (
        old is not None
        and new is not None
        and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        and not old.is_meta
    )
