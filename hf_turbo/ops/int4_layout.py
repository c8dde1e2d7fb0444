"""How the codes of an INT4 (or INT8) weight lie in memory: in the order in which a GPU's tensor cores take them.

A unit is 16 rows and 64 columns (32 for 8 bit): 512 bytes, 16 for each thread of a warp, in one load. A thread's codes
are the elements of its registers in the first operand of `mma.m16n8k16` (PTX manual, matrix fragments), so that
nothing has to change threads between memory and multiplication (the idea of Marlin, Frantar et al., 2024). Which
column is which k of the product is free, as long as x agrees: of every 32 columns thread t of four has columns 8 t to
8 t + 7, so that it reads its part of x in one load, too. A word's halves hold codes of an even column and, in the same
places, of the odd one after it: one shift and one mask make a register of two.

Rows are padded to 16 and columns to whole steps; padding is code 0 and meets zeros of x or is not stored.
"""

from __future__ import annotations

import torch

#: Rows of a unit.
UNIT_ROWS = 16
#: int32 words of a unit.
UNIT_WORDS = 128

#: Columns that a weight is padded to.
COLUMN_ALIGNMENT = 128

#: Rows that are packed or unpacked at a time: bounds what is held beside the codes.
_SLICE_ROWS = 4096


def unit_columns(bits: int) -> int:
    """Columns of a unit: 64 of 4 bits, 32 of 8."""
    if bits not in (4, 8):
        raise ValueError(f"codes are packed in 4 or 8 bits, got {bits}")
    return 256 // bits


def packed_shape(rows: int, columns: int, bits: int) -> tuple[int, int, int]:
    """Shape of the packed codes of `[rows, columns]`: units down, units across, words of a unit."""
    padded = -(-columns // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    return -(-rows // UNIT_ROWS), padded // unit_columns(bits), UNIT_WORDS


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes.

    Args:
        codes: uint8 `[N, K]`, each below `2**bits`.
        bits: 4 or 8.

    Returns:
        int32 of `packed_shape(N, K, bits)`.
    """
    rows, columns = codes.shape
    packed = torch.empty(packed_shape(rows, columns, bits), dtype=torch.int32, device=codes.device)
    for start in range(0, rows, _SLICE_ROWS):
        part = packed[start // UNIT_ROWS : -(-(start + _SLICE_ROWS) // UNIT_ROWS)]
        part.copy_(_pack(codes[start : start + _SLICE_ROWS], part.shape, bits))
    return packed


def unpack_codes(packed: torch.Tensor, bits: int, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 `[rows, columns]`."""
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=packed.device)
    for start in range(0, rows, _SLICE_ROWS):
        part = packed[start // UNIT_ROWS : -(-(start + _SLICE_ROWS) // UNIT_ROWS)]
        target = codes[start : start + _SLICE_ROWS]
        target.copy_(_unpack(part, bits)[: len(target), :columns])
    return codes


def _pack(codes: torch.Tensor, shape: tuple[int, ...], bits: int) -> torch.Tensor:
    down, across = shape[:2]
    padded = codes.new_zeros(down * UNIT_ROWS, across * unit_columns(bits))
    padded[: codes.shape[0], : codes.shape[1]] = codes
    # From [unit, half, row] x [unit, (slice,) thread, columns by the bits of their number] to words by unit, thread
    # and the columns' upper bits; in a word, from its lowest bits: half of the rows and the columns' lower bits.
    if bits == 8:
        fields = padded.view(down, 2, 8, across, 4, 2, 2, 2).permute(0, 3, 2, 4, 5, 6, 1, 7)
        data = fields.reshape(down, across, UNIT_WORDS * 4)
        return data.contiguous().view(torch.int32)
    fields = padded.view(down, 2, 8, across, 2, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 8, 7, 1)
    nibbles = fields.reshape(down, across, UNIT_WORDS * 4, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    down, across = packed.shape[:2]
    data = packed.contiguous().view(torch.uint8)
    if bits == 8:
        fields = data.view(down, across, 8, 4, 2, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7)
    else:
        nibbles = torch.stack((data & 15, data >> 4), -1)
        fields = nibbles.view(down, across, 8, 4, 2, 2, 2, 2, 2).permute(0, 8, 2, 1, 4, 3, 5, 7, 6)
    return fields.reshape(down * UNIT_ROWS, across * unit_columns(bits))
