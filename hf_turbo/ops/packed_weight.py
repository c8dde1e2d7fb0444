"""A quantized weight as the kernels take it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import cpu_int4_layout
from .int4_layout import COLUMN_ALIGNMENT, pack_codes, unpack_codes

#: Group sizes below `COLUMN_ALIGNMENT` that a step of the kernels holds a whole number of.
_SMALL_GROUPS = (32, 64)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """`W[n, c] = scales[g, n] * (code[n, k] - zeros[g, n])`, g = k // group_size; column k is channel c = perm[k].

    Args:
        qweight: the codes: int32 as `int4_layout.pack_codes` lays them, which is what the kernels take, or uint8 as
            `cpu_int4_layout.pack_codes` does, which is for a CPU (and read anywhere, slowly).
        scales: `[G, N]`, fp16, bf16 or fp32.
        zeros: uint8 `[G, N]`, or None: all `2**(bits - 1)`.
        perm: int32 `[columns]`, or None: column k is channel k. Columns that are padding have -1.
        bits: width of a code's field, 4 or 8.
        group_size: columns of a group; G = ceil(columns / group_size). For the kernels 32, 64 or a multiple of 128.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    bits: int
    group_size: int

    @property
    def out_features(self) -> int:
        return self.scales.shape[1]

    @property
    def places(self) -> torch.Tensor | None:
        """Where each channel of x stands in the order of `perm`, int32 `[K]`; None where `perm` is, or has padding."""
        perm = self.perm
        if perm is None:
            return None
        if perm not in _places:
            _places[perm] = None if perm.lt(0).any() else perm.argsort().int()
        return _places[perm]

    def in_order(self) -> PackedWeight:
        """The same for an x whose columns are in the order of `perm`."""
        return replace(self, perm=None)

    def stored_columns(self, in_features: int) -> int:
        """Columns of the codes, with those that pad groups."""
        return in_features if self.perm is None else len(self.perm)


#: Of every `perm` that was asked for. (Nobody writes to one: others may hold it.)
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
#: Orders of columns that are held somewhere, by device and content.
_orders: WeakValueDictionary[tuple[torch.device, bytes], torch.Tensor] = WeakValueDictionary()


def one_of_equals(perm: torch.Tensor | None) -> torch.Tensor | None:
    """An order's tensor, the same for all equal ones: so the kernels see which weights may be multiplied together."""
    if perm is None or perm.is_meta:
        return perm
    content = hashlib.sha256(perm.cpu().numpy().tobytes()).digest()
    return _orders.setdefault((perm.device, content), perm)


def has_layout_of(qweight: torch.Tensor, device: torch.device) -> bool:
    """Whether codes lie as is best for a device."""
    return (qweight.dtype == torch.uint8) == (device.type == "cpu")


def same_format(weights: Sequence[PackedWeight]) -> bool:
    """Whether one kernel launch can read all of them."""
    formats = {
        (
            w.bits, w.group_size, w.scales.dtype, w.scales.shape[0], w.qweight.shape[1], w.zeros is None,
            None if w.perm is None else len(w.perm),
        )
        for w in weights
    }  # fmt: skip
    return len(formats) == 1


def pack_for_device(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bits: int,
    group_size: int,
) -> PackedWeight:
    """Packs a weight as is best for the device that it is on; see `pack_weight`."""
    if codes.device.type != "cpu":
        return pack_weight(codes, scales, zeros, perm, bits, group_size)
    packed = cpu_int4_layout.pack_codes(codes, bits)
    return PackedWeight(packed, scales.contiguous(), zeros, perm, bits, group_size)


def pack_weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bits: int,
    group_size: int,
) -> PackedWeight:
    """Packs a weight whose groups are of any size, for the kernels.

    Args:
        codes: uint8 `[N, K]`, below `2**bits`.
        scales, zeros, perm: as `PackedWeight` has them, with columns as in `codes`.
        bits: 4 or 8.
        group_size: 1 to K; the last group may be shorter.

    Returns:
        The packed weight. Groups of a size that the kernels don't take are padded to one, with -1 in `perm`.
    """
    columns, groups = codes.shape[1], len(scales)
    padded = padded_group_size(group_size, columns)
    if padded != group_size and groups > 1:
        sources = torch.arange(groups * padded, device=codes.device).view(groups, padded)
        offset = sources % padded
        sources = sources // padded * group_size + offset
        real = (offset < group_size) & (sources < columns)
        channels = torch.arange(columns, device=codes.device) if perm is None else perm
        perm = torch.where(real, channels[sources.clamp(max=columns - 1)], -1).flatten().int()
        spread = codes.new_zeros(len(codes), groups * padded)
        spread[:, real.flatten()] = codes
        codes = spread
    return PackedWeight(pack_codes(codes, bits), scales.contiguous(), zeros, perm, bits, padded)


def unpack_weight(weight: PackedWeight, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The codes, uint8 `[N, columns]`, and the channels of their columns (None: in order), without padding."""
    perm = weight.perm
    if weight.qweight.dtype == torch.uint8:
        return cpu_int4_layout.unpack_codes(weight.qweight, weight.bits, weight.out_features, columns), perm
    codes = unpack_codes(weight.qweight, weight.bits, weight.out_features, weight.stored_columns(columns))
    if perm is None:
        return codes, None
    real = perm >= 0
    codes, perm = codes[:, real], perm[real]
    in_order = torch.equal(perm, torch.arange(columns, dtype=perm.dtype, device=perm.device))
    return codes, None if in_order else perm


def padded_group_size(group_size: int, columns: int) -> int:
    """The smallest group size that the kernels take and that holds a group of this size."""
    size = min(group_size, columns)
    small = next((s for s in _SMALL_GROUPS if size <= s), None)
    return small or -(-size // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
