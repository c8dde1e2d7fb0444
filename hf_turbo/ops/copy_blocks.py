"""Copies whole blocks in every layer of a group in one launch (Triton)."""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .attention_config import ceil_div
from .block_ids import MAX_SEGMENTS, SEGMENT_BITS, SEGMENT_MASK
from .launch import Launcher
from .metadata import LayerKV

_SEGMENT_BITS = tl.constexpr(SEGMENT_BITS)
_SEGMENT_MASK = tl.constexpr(SEGMENT_MASK)

#: 4-byte words that a program copies.
_WORDS = 2048


@triton.jit
def _address(block, base, offsets_ptr, BLOCK_WORDS: tl.constexpr, ITEM_SIZE: tl.constexpr):
    """Where a block of one layer's keys, or values, begins: in words from the first segment's beginning."""
    offset = tl.load(offsets_ptr + (block >> _SEGMENT_BITS)) * ITEM_SIZE // 4
    words = offset + (block & _SEGMENT_MASK).to(tl.int64) * BLOCK_WORDS
    return base.to(tl.pointer_type(tl.int32)) + tl.multiple_of(words, 4)


@triton.jit
def _copy_blocks_kernel(
    bases_ptr, offsets_ptr, pairs_ptr,
    BLOCK_WORDS: tl.constexpr, ITEM_SIZE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program: WORDS words of one block of one layer's keys or values."""
    tensor = tl.program_id(1)
    pair = tl.program_id(2)
    base = tl.multiple_of(tl.load(bases_ptr + tensor), 16)
    offsets = tl.load(offsets_ptr + tensor).to(tl.pointer_type(tl.int64))
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = word < BLOCK_WORDS
    source_id, target_id = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    if source_id == target_id:
        return
    source = _address(source_id, base, offsets, BLOCK_WORDS, ITEM_SIZE)
    target = _address(target_id, base, offsets, BLOCK_WORDS, ITEM_SIZE)
    tl.store(target + word, tl.load(source + word, mask=mask), mask=mask)


_launch_copy = Launcher(_copy_blocks_kernel)


class LayerAddresses:
    """Where the blocks of several layers lie, on the device.

    Args:
        layers: with blocks of one size, each block in one piece.
    """

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        bases, offsets = [], []
        for kv in layers:
            for row, segments in enumerate((kv.k_segments, kv.v_segments)):
                bases.append(segments[0].data_ptr())
                offsets.append(kv.segment_offsets.data_ptr() + row * MAX_SEGMENTS * kv.segment_offsets.element_size())
        first = layers[0].k_segments[0]
        self.device, self.item_size = first.device, first.element_size()
        self.block_bytes = first[0].numel() * self.item_size
        self.bases, self.offsets = torch.tensor([bases, offsets]).to(self.device)

    @staticmethod
    def serve(layers: Sequence[LayerKV]) -> bool:
        """Whether these layers can be copied together."""
        tensors = [segments[0] for kv in layers for segments in (kv.k_segments, kv.v_segments)]
        first = tensors[0]
        alike = all(t.shape[1:] == first.shape[1:] and t.dtype == first.dtype for t in tensors)
        in_one_piece = all(t[0].is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
        return alike and in_one_piece and first[0].numel() * first.element_size() % 16 == 0

    def copy(self, pairs: torch.Tensor) -> None:
        """Copies blocks, int32 `[pairs, 2]`, from and to by their ids; no block is copied from and to. Equal ids: none.
        """
        words = self.block_bytes // 4
        constants = (words, self.item_size, _WORDS)
        with torch.cuda.device(self.device):
            _launch_copy(
                (self.device, constants), (ceil_div(words, _WORDS), len(self.bases), len(pairs)),
                self.bases, self.offsets, pairs, *constants, num_warps=4,
            )  # fmt: skip
