"""Moves tokens within their sequences, in every layer of a group in one launch (Triton)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import device_facts, next_power_of_2
from .block_ids import MAX_SEGMENTS
from .launch import Launcher
from .metadata import LayerKV
from .store_kv import block_offset

#: Tokens that a program reads before it writes them.
_BLOCK_T = 16
#: What a number is moved as, by its bytes.
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _slots(position, mask, table_ptr, offsets_ptr, STRIDES: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Elements from the first segment's start to each position's slot, without its head, int64."""
    block_id = tl.load(table_ptr + position // BLOCK_SIZE, mask=mask, other=0)
    return block_offset(block_id, offsets_ptr, STRIDES[0], True) + position % BLOCK_SIZE * STRIDES[2]


@triton.jit(
    do_not_specialize=["stride_tb", "stride_pb"],
    do_not_specialize_on_alignment=[
        "addresses_ptr", "offsets_ptr", "block_tables_ptr", "bases_ptr", "path_ptr", "counts_ptr",
    ],
)  # fmt: skip
def _move_kv_kernel(
    addresses_ptr, offsets_ptr, block_tables_ptr, bases_ptr, path_ptr, counts_ptr, stride_tb, stride_pb,
    MAX_COUNT: tl.constexpr, WORD: tl.constexpr, ALIGNMENT: tl.constexpr, STRIDES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one head of one layer's keys, or values, in one sequence.

    A token never moves up, and a later one comes from behind it: so a part of them that is read before any of it is
    written is read as it was, and the parts follow one another.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    tensor = tl.program_id(1)
    seq = tl.program_id(2)
    base = tl.load(bases_ptr + seq)
    count = tl.where(base >= 0, tl.load(counts_ptr + seq), 0)
    if count <= 0:
        return
    tensor_ptr = tl.multiple_of(tl.load(addresses_ptr + tensor).to(tl.pointer_type(WORD)), ALIGNMENT)
    tensor_ptr += head * STRIDES[1]
    tensor_offsets_ptr = tl.load(offsets_ptr + tensor).to(tl.pointer_type(tl.int64))
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
    dim = tl.arange(0, triton.next_power_of_2(DIM))
    for start in tl.static_range(0, MAX_COUNT, BLOCK_T):
        k = start + tl.arange(0, BLOCK_T)
        step = tl.load(path_ptr + seq.to(tl.int64) * stride_pb + k, mask=(k < count) & (k < MAX_COUNT), other=0)
        moves = (k < count) & (k < MAX_COUNT) & (step != k)
        mask = moves[:, None] & (dim < DIM)[None, :]
        source = _slots(base + step, moves, table_ptr, tensor_offsets_ptr, STRIDES, BLOCK_SIZE)
        target = _slots(base + k, moves, table_ptr, tensor_offsets_ptr, STRIDES, BLOCK_SIZE)
        x = tl.load(tensor_ptr + source[:, None] + dim[None, :], mask=mask)
        tl.debug_barrier()  # all of this part is read
        tl.store(tensor_ptr + target[:, None] + dim[None, :], x, mask=mask)


_launch_move = Launcher(_move_kv_kernel)


class TokenAddresses:
    """Where the blocks of several layers lie, on their device, to move tokens in all of them at once.

    Good for as long as the layers' segments stay where they are; segments that are added later are found.

    Args:
        layers: on one GPU, with the same block ids. Keys and values that are alike (shapes, strides, size of a number)
            take one launch.
    """

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        alike: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for kv in layers:
            offsets, row_bytes = kv.segment_offsets, MAX_SEGMENTS * kv.segment_offsets.element_size()
            for row, segments in enumerate((kv.k_segments, kv.v_segments)):
                first = segments[0]
                address = first.data_ptr()
                alignment = next(n for n in (16, 8, 4, 2, 1) if address % n == 0)
                key = (first.element_size(), alignment, first.stride()[:3], *first.shape[1:])
                alike.setdefault(key, []).append((address, offsets.data_ptr() + row * row_bytes))
        self._device = layers[0].segment_offsets.device
        self._alike = [(key, torch.tensor(pairs).t().contiguous().to(self._device)) for key, pairs in alike.items()]

    def move(self, block_tables: torch.Tensor, bases: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Moves tokens as `reference.move_kv` does; nothing is read on the host, so it can be captured.

        Args:
            block_tables, bases, path, counts: on the layers' device; the last dimensions have stride 1.
        """
        num_seqs, max_count = path.shape
        if num_seqs == 0 or max_count == 0:
            return
        block_t = min(_BLOCK_T, next_power_of_2(max_count))
        pdl = device_facts(self._device).capability >= 90
        for (item_size, alignment, strides, heads, block_size, dim), (addresses, offsets) in self._alike:
            constants = (max_count, _WORDS[item_size], alignment, strides, dim, block_size, block_t, pdl)
            with torch.cuda.device_of(addresses):
                _launch_move(
                    (self._device, constants), (heads, len(addresses), num_seqs),
                    addresses, offsets, block_tables, bases, path, counts, block_tables.stride(0), path.stride(0),
                    *constants, num_warps=4 if block_t * dim > 1024 else 1, launch_pdl=pdl, enable_fp_fusion=True,
                )  # fmt: skip


def move_kv(
    layers: Sequence[LayerKV],
    block_tables: torch.Tensor,
    bases: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """`TokenAddresses.move`, once."""
    TokenAddresses(layers).move(block_tables, bases, path, counts)
