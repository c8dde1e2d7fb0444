"""How the codes of an INT4 (or INT8) weight lie on a CPU: as torch's operator `_weight_int4pack_mm_for_cpu` takes them.

Rows are in blocks. A block holds its columns one after the other, and a column is `rows / 2` bytes with a code in each
half. How many rows a block has, and which of them share a byte, depends on the processor: torch is asked for it.

A code of 8 bits is two of 4: a matrix `[N, 2 K]` whose first K columns are the upper halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

#: Rows that a weight is padded to: the operator's.
ROW_ALIGNMENT = 16

#: Codes that are packed or unpacked at a time: bounds what is held beside them.
_SLICE_CODES = 1 << 22

#: Rows of a block, and the order within it, where torch has no such operator.
_PLAIN_BLOCK = 64


@dataclass(frozen=True)
class Blocks:
    """Blocks of one size that follow each other.

    Args:
        data: uint8 `[blocks, columns, rows / 2]`, part of the weight's; of 8 bits there are twice the columns.
        first_row: of the weight.
        order: int64 `[rows]`: half h of byte j has row `order[h * rows / 2 + j]` of the block, the lower half first.
        places: the inverse.
        in_order: both are the identity.
    """

    data: torch.Tensor
    first_row: int
    order: torch.Tensor
    places: torch.Tensor
    in_order: bool

    @property
    def rows(self) -> slice:
        """The rows of the weight, with those that are padding."""
        return slice(self.first_row, self.first_row + len(self.data) * len(self.order))

    def pack(self, codes: torch.Tensor) -> None:
        """Takes the codes `[rows, columns]`, in 4 bits; rows that are padding may be missing."""
        missing = self.rows.stop - self.rows.start - len(codes)
        padded = torch.nn.functional.pad(codes, (0, 0, 0, missing)) if missing else codes
        fields = padded.unflatten(0, (len(self.data), -1))
        if not self.in_order:
            fields = fields.index_select(1, self.order)
        lower, upper = fields.chunk(2, 1)
        self.data.copy_((lower | upper << 4).transpose(1, 2))

    def unpack(self, bits: int) -> torch.Tensor:
        """The codes: uint8 `[columns, rows]`, with rows that are padding."""
        data = self.data.transpose(0, 1).contiguous()
        fields = torch.stack((data & 15, data >> 4), 2).flatten(2)
        if bits == 8:
            upper, lower = fields.chunk(2)
            fields = upper << 4 | lower
        return (fields if self.in_order else fields.index_select(2, self.places)).flatten(1)


def has_operator() -> bool:
    """Whether torch multiplies by such weights itself."""
    return hasattr(torch, "_weight_int4pack_mm_for_cpu")


def packed_shape(rows: int, columns: int, bits: int) -> tuple[int, int]:
    """Shape of the packed codes of `[rows, columns]`: two codes of 4 bits a byte, of rows padded to 16."""
    padded, fields = -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT, columns * bits // 4
    return (padded // 2, fields) if fields % 2 else (padded, fields // 2)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes.

    Args:
        codes: uint8 `[N, K]`, each below `2**bits`.
        bits: 4 or 8.

    Returns:
        uint8 of `packed_shape(N, K, bits)`. Rows that are padding have code 0.
    """
    rows, columns = codes.shape
    packed = torch.empty(packed_shape(rows, columns, bits), dtype=torch.uint8, device=codes.device)
    for part in blocks_of(packed, columns, bits, _SLICE_CODES):
        own = codes[part.rows]
        part.pack(own if bits == 4 else torch.cat((own >> 4, own & 15), 1))
    return packed


def unpack_codes(packed: torch.Tensor, bits: int, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 `[rows, columns]`."""
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=packed.device)
    for part in blocks_of(packed, columns, bits, _SLICE_CODES):
        own = codes[part.rows]
        own.copy_(part.unpack(bits).t()[: len(own)])
    return codes


def blocks_of(packed: torch.Tensor, columns: int, bits: int, codes: int) -> Iterator[Blocks]:
    """The blocks of a packed weight, about `codes` codes at a time, at least one block."""
    fields = columns * bits // 4
    rows = 2 * packed.numel() // fields
    data = packed.reshape(-1)
    size = block_rows()
    full = rows // size * size
    step = max(1, codes // (size * columns)) * size
    bounds = [*range(0, full, step), full]
    if full < rows:
        bounds.append(rows)
    for start, end in pairwise(bounds):
        own = min(size, end - start)
        part = data[start * fields // 2 : end * fields // 2].view(-1, fields, own // 2)
        yield Blocks(part, start, *_orders(own, data.device))


@cache
def block_rows() -> int:
    """Rows of a whole block."""
    if not has_operator():
        return _PLAIN_BLOCK
    rows, columns = _places(256)
    size = 2 * int((columns[:, 0] == 0).int().argmin())  # bytes before the second column
    expected = torch.arange(64).repeat_interleave(size // 2).repeat(256 // size)
    if not torch.equal(columns, expected[:, None].expand_as(columns)) or not (rows[: size // 2] < size).all():
        raise RuntimeError("this release of torch packs INT4 weights in a way that is not known here")
    return size


@cache
def _orders(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """`order`, `places` and `in_order` of a block of so many rows."""
    order = torch.arange(rows)
    if has_operator():
        order = _places(rows)[0][: rows // 2].t().flatten()
    places = order.argsort()
    return order.to(device), places.to(device), torch.equal(order, places) and torch.equal(order, torch.arange(rows))


def _places(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of the codes of `[rows, 64]` as torch packs them: int64 `[bytes, 2]`, lower halves first."""
    row, column = torch.arange(rows), torch.arange(64)
    found = []
    for numbers in (row[:, None].expand(-1, 64), column.expand(rows, -1)):
        digits = [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers >> shift & 15).int(), 1).flatten()
            for shift in (0, 4)
        ]
        low, high = (torch.stack((data & 15, data >> 4), 1).long() for data in digits)
        found.append(low + 16 * high)
    return found[0], found[1]
