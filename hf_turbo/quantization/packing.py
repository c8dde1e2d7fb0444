"""Packing of small codes into int32 words, and the orders that file formats put them in. Plain torch, any device.

A row of codes is a dense stream of bits: code j takes bits `bits * j` and up, the lowest bit first, in little-endian
words of 32 bits. For 3 bits that puts 32 codes in three words, two of them across a border.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .weight import row_slices

#: Column `8 * c + AWQ_ORDER[i]` is field i of an AWQ word; its inverse reads the fields in the columns' order.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)

_MARLIN_TILE = 16
_MARLIN_RUN = 1024

# gemv_fast: rows that share an int16, and columns that stay together in it.
_FAST_ROWS = 4
_FAST_COLUMNS = 64


def words_for(count: int, bits: int) -> int:
    """int32 words that hold `count` codes."""
    return -(-count * bits // 32)


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of every row, uint8 `[R, count]`, of int32 `[R, words]` (any strides)."""
    codes = torch.empty(words.shape[0], count, dtype=torch.uint8, device=words.device)
    for rows in row_slices(*codes.shape):
        codes[rows] = _unpack_bytes(_bytes_of(words[rows]), bits)[:, :count]
    return codes


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """The inverse: int32 `[R, words_for(C, bits)]` of uint8 `[R, C]` (any strides); unused bits are 0."""
    count, width = codes.shape[1], words_for(codes.shape[1], bits)
    words = torch.empty(codes.shape[0], width, dtype=torch.int32, device=codes.device)
    # Whole bytes and whole words: 32 codes are a whole number of words at any number of bits.
    missing = -count % 32
    for rows in row_slices(*codes.shape):
        padded = torch.nn.functional.pad(codes[rows], (0, missing)).contiguous()
        words[rows] = _pack_bytes(padded, bits).view(torch.int32)[:, :width]
    return words


def _bytes_of(words: Tensor) -> Tensor:
    # Flat first: a column of single words counts as contiguous whatever its stride, but cannot be viewed as bytes.
    return words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)


def _unpack_bytes(data: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return data
    if bits == 3:
        # Rows that end within three words have no byte left over that a code needs.
        padded = torch.nn.functional.pad(data, (0, -data.shape[1] % 3))
        first, second, third = padded.int().unflatten(1, (-1, 3)).unbind(2)
        eight = first | second << 8 | third << 16
        fields = [(eight >> shift & 7).byte() for shift in range(0, 24, 3)]
    else:
        mask = (1 << bits) - 1
        fields = [data >> shift & mask for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=2).flatten(1)


def _pack_bytes(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    if bits == 3:
        fields = codes.int().unflatten(1, (-1, 8)).unbind(2)
        eight = _combine(list(fields), 3)
        return torch.stack([(eight >> shift & 255).byte() for shift in (0, 8, 16)], dim=2).flatten(1)
    return _combine(list(codes.unflatten(1, (-1, 8 // bits)).unbind(2)), bits).contiguous()


def _combine(fields: list[Tensor], bits: int) -> Tensor:
    combined = fields[0].clone()
    for number, field in enumerate(fields[1:], start=1):
        combined |= field << (bits * number)
    return combined


def ones_per_field(bits: int) -> int:
    """A 1 in every field of a word of 2, 4 or 8 bit fields."""
    return sum(1 << shift for shift in range(0, 32, bits))


def unpack_awq(words: Tensor) -> Tensor:
    """uint8 `[R, 8 * W]` of int32 `[R, W]`: 4-bit fields in AWQ's order."""
    codes = torch.empty(words.shape[0], 8 * words.shape[1], dtype=torch.uint8, device=words.device)
    for rows in row_slices(*codes.shape):
        codes[rows] = _in_eights(unpack_rows(words[rows], 4, codes.shape[1]), AWQ_INVERSE)
    return codes


def pack_awq(codes: Tensor) -> Tensor:
    """The inverse: int32 `[R, C / 8]` of uint8 `[R, C]`."""
    words = torch.empty(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32, device=codes.device)
    for rows in row_slices(*codes.shape):
        words[rows] = pack_rows(_in_eights(codes[rows], AWQ_ORDER), 4)
    return words


def _in_eights(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    return codes.unflatten(1, (-1, 8))[:, :, list(order)].flatten(1)


def unpack_gemv_fast(words: Tensor) -> Tensor:
    """uint8 `[4 * R, K]` of AWQ gemv_fast's int16 `[R, K]`; K a multiple of 64."""
    columns = words.shape[1]
    codes = torch.empty(words.shape[0] * _FAST_ROWS, columns, dtype=torch.uint8, device=words.device)
    for rows in row_slices(words.shape[0], columns * _FAST_ROWS):
        data = _bytes_of(words[rows])
        fields = torch.stack([data & 15, data >> 4], dim=2)
        blocks = fields.view(-1, columns // _FAST_COLUMNS, _FAST_ROWS, _FAST_COLUMNS).transpose(1, 2)
        halves = blocks.reshape(-1, columns // 32, 4, 2, 4).transpose(3, 4)
        pairs = halves.reshape(-1, columns // 32, 4, 4, 2).transpose(2, 3)
        codes[rows.start * _FAST_ROWS : rows.stop * _FAST_ROWS] = pairs.reshape(-1, columns)
    return codes


def pack_gemv_fast(codes: Tensor) -> Tensor:
    """The inverse: int16 `[N / 4, K]` of uint8 `[N, K]`; N a multiple of 4, K of 64."""
    rows_out, columns = codes.shape[0] // _FAST_ROWS, codes.shape[1]
    words = torch.empty(rows_out, columns, dtype=torch.int16, device=codes.device)
    for rows in row_slices(rows_out, columns * _FAST_ROWS):
        part = codes[rows.start * _FAST_ROWS : rows.stop * _FAST_ROWS]
        pairs = part.reshape(-1, columns // 32, 4, 4, 2).transpose(2, 3)
        halves = pairs.reshape(-1, columns // 32, 4, 4, 2).transpose(3, 4)
        blocks = halves.reshape(-1, _FAST_ROWS, columns // _FAST_COLUMNS, _FAST_COLUMNS).transpose(1, 2)
        fields = blocks.reshape(-1, columns, 2, 2)
        data = fields[..., 0] | fields[..., 1] << 4
        words[rows] = data.contiguous().view(torch.int16).flatten(1)
    return words


@cache
def _marlin_order() -> Tensor:
    """Which of 1024 codes of a row of tiles comes where: place i holds code `order[i]`."""
    order = []
    for lane in range(32):
        rows = [2 * (lane % 4) + offset for offset in (0, 1, 8, 9)]
        fragment = [16 * row + lane // 4 + 8 * half for half in (0, 1) for row in rows]
        for tile in range(4):
            order += [place + 256 * tile for place in fragment]
    return torch.tensor(order).view(-1, 8)[:, list(AWQ_ORDER)].flatten()


def unpack_marlin(words: Tensor) -> Tensor:
    """uint8 `[N, K]` of legacy Marlin's int32 `[K / 16, 2 * N]`."""
    order = _marlin_order().to(words.device)
    tiles, columns = words.shape[0], words.shape[1] // 2
    codes = torch.empty(columns, tiles * _MARLIN_TILE, dtype=torch.uint8, device=words.device)
    for rows in row_slices(tiles, _MARLIN_TILE * columns):
        runs = unpack_rows(words[rows], 4, _MARLIN_TILE * columns).view(-1, _MARLIN_RUN)
        plain = torch.empty_like(runs).index_copy_(1, order, runs)
        plain = plain.view(-1, columns // _MARLIN_TILE, _MARLIN_TILE, _MARLIN_TILE)
        transposed = plain.permute(1, 3, 0, 2).reshape(columns, -1)
        codes[:, rows.start * _MARLIN_TILE : rows.stop * _MARLIN_TILE] = transposed
    return codes


def pack_marlin(codes: Tensor) -> Tensor:
    """The inverse: int32 `[K / 16, 2 * N]` of uint8 `[N, K]`; K a multiple of 16, N of 64."""
    order = _marlin_order().to(codes.device)
    columns, tiles = codes.shape[0], codes.shape[1] // _MARLIN_TILE
    words = torch.empty(tiles, 2 * columns, dtype=torch.int32, device=codes.device)
    for rows in row_slices(tiles, _MARLIN_TILE * columns):
        part = codes[:, rows.start * _MARLIN_TILE : rows.stop * _MARLIN_TILE]
        plain = part.reshape(columns // _MARLIN_TILE, _MARLIN_TILE, -1, _MARLIN_TILE).permute(2, 0, 3, 1)
        runs = plain.reshape(-1, _MARLIN_RUN)[:, order]
        words[rows] = pack_rows(runs.reshape(-1, _MARLIN_TILE * columns), 4)
    return words


@cache
def _marlin_scale_order(grouped: bool) -> tuple[int, ...]:
    if grouped:
        return tuple(row + 8 * column for row in range(8) for column in range(8))
    return tuple(2 * row + column for row in range(4) for column in (0, 1, 8, 9, 16, 17, 24, 25))


def unpack_marlin_scales(scales: Tensor, grouped: bool) -> Tensor:
    """Scales `[G, N]` in the columns' order; `grouped`: the groups are shorter than K."""
    order = list(_marlin_scale_order(grouped))
    runs = scales.reshape(-1, len(order))
    plain = torch.empty_like(runs)
    plain[:, order] = runs
    return plain.view(scales.shape)


def pack_marlin_scales(scales: Tensor, grouped: bool) -> Tensor:
    """The inverse."""
    order = list(_marlin_scale_order(grouped))
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape)
