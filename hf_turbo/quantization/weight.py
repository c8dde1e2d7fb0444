"""One quantized weight in the one form that every file format is decoded to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUPPORTED_BITS = (2, 3, 4, 8)

# Values that a pass over the rows of a weight holds at once as a wider type.
_SLICE_VALUES = 1 << 22


def row_slices(rows: int, columns: int) -> list[slice]:
    """Slices of the rows of a `[rows, columns]` matrix, few enough in each that wider temporaries stay small."""
    step = max(1, _SLICE_VALUES // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight `[N, K]` (out, in) of unsigned codes with a scale and a zero point a group of input channels.

    `W[n, c] = scales[g, n] * (codes[n, k] - zeros[g, n])` with `g = k // group_size`, where column `k` of `codes`
    belongs to input channel `c = perm[k]` (`perm` None: `c = k`).

    Attributes:
        codes: uint8 `[N, K]`, 0 to 2**bits - 1. The columns are sorted so that every group is contiguous; the last
            group may be short.
        scales: `[G, N]` with `G = ceil(K / group_size)`, in the dtype of the file: fp16, bf16 or fp32.
        zeros: uint8 `[G, N]`, the true zero points (GPTQ v1 can store 2**bits, too); None where all are 2**(bits-1).
        perm: int32 `[K]`, None where it is the identity.
        bits: 2, 3, 4 or 8.
        group_size: 1 to K.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise ValueError(f"bits must be one of {SUPPORTED_BITS}, got {self.bits}")
        if self.codes.dim() != 2 or self.codes.dtype != torch.uint8:
            raise ValueError(f"codes must be uint8 [N, K], got {self.codes.dtype} {list(self.codes.shape)}")
        if not 1 <= self.group_size <= self.in_features:
            raise ValueError(f"group_size must be from 1 to K = {self.in_features}, got {self.group_size}")
        if not self.scales.is_floating_point():
            raise ValueError(f"scales must be of a floating type, got {self.scales.dtype}")
        groups = (self.num_groups, self.out_features)
        self._check("scales", self.scales, groups, self.scales.dtype)
        self._check("zeros", self.zeros, groups, torch.uint8)
        self._check("perm", self.perm, (self.in_features,), torch.int32)

    @staticmethod
    def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            raise ValueError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        return -(-self.in_features // self.group_size)

    def dequantize(self, dtype: torch.dtype = torch.float16) -> Tensor:
        """The weight `[N, K]` in the input channels' own order; products in fp32, rounded once to `dtype`."""
        out = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        channels = None if self.perm is None else self.perm.long()
        for rows in row_slices(self.out_features, self.in_features):
            values = self._values(rows).to(dtype)
            if channels is None:
                out[rows] = values
            else:
                out[rows].index_copy_(1, channels, values)
        return out

    def _values(self, rows: slice) -> Tensor:
        """fp32 `[rows, K]`, columns in the order of `codes`."""
        zeros = 1 << (self.bits - 1) if self.zeros is None else self._a_column(self.zeros[:, rows].float())
        return (self.codes[rows].float() - zeros).mul_(self._a_column(self.scales[:, rows].float()))

    def _a_column(self, of_groups: Tensor) -> Tensor:
        """`[G, N]` repeated to `[N, K]`."""
        return of_groups.T.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]
