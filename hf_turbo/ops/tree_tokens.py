"""The tokens of a tree of guesses, from the heads' logits (Triton): two launches, where torch has a dozen.

The first finds the few largest of every part of a head's logits, the second the few largest of these, and puts them
where the tree wants them.
"""

# A Triton kernel's parameters have no types that Python could check.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_config import ceil_div, device_facts, next_power_of_2
from .launch import Launcher
from .reference_heads import check_tree

#: Columns of a program: each of its 128 threads has 16 of them in registers.
_COLUMNS = 2048
#: Below the key of any value.
_LEAST = tl.constexpr(-(2**63))
_MAX_INT32 = tl.constexpr(2**31 - 1)


@triton.jit
def _keys(x, column):
    """One int64 a value, greater for greater values (float32), and among equals for lower columns; never equal.

    A float's bits, as an integer, are in order where it is positive and in reverse where it is negative.
    """
    x = tl.where(x == 0, 0.0, x)  # both zeros are equal
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ _MAX_INT32, bits)
    bits = tl.where(x != x, _MAX_INT32, bits)
    return (bits.to(tl.int64) << 32) + (column ^ _MAX_INT32)  # a lower column, a greater number


@triton.jit(do_not_specialize=["num_heads"])
def _chunk_ranks_kernel(
    x_ptr, keys_ptr, num_columns, num_heads, stride_xr, stride_xh,
    NUM: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the greatest keys of COLUMNS columns of one head, in order; the least possible beyond its own."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x_ptr += place // num_heads * stride_xr + place % num_heads * stride_xh
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < num_columns
    x = tl.load(x_ptr + column, mask=mask, other=0).to(tl.float32)
    keys = tl.where(mask, _keys(x, column), _LEAST)
    keys_ptr += (place * tl.num_programs(0) + chunk) * NUM
    for rank in tl.static_range(NUM):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + rank, best)
        keys = tl.where(keys == best, _LEAST, keys)


@triton.jit
def _place_ranks_kernel(
    keys_ptr, roots_ptr, heads_ptr, ranks_ptr, out_ptr, other_ptr, num_keys, stride_root, stride_out, stride_other,
    NUM: tl.constexpr, KEYS: tl.constexpr, NODES: tl.constexpr, BLOCK_NODES: tl.constexpr, OTHER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the tokens of one row's nodes that are one head's; the first head's has the root, too.

    OTHER: of how many nodes, from the first on, the tokens go to the other place as well.
    """
    if PDL:
        gdc_launch_dependents()
    node = tl.arange(0, BLOCK_NODES)
    is_node = node < NODES
    # No kernel writes the tree: it can be read while the one before still runs.
    head_of = tl.load(heads_ptr + node, mask=is_node, other=-2)
    rank_of = tl.load(ranks_ptr + node, mask=is_node, other=-1)
    if PDL:
        gdc_wait()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(roots_ptr + row * stride_root + node * 0)
    place = tl.arange(0, KEYS)
    keys_ptr += (row * tl.num_programs(0) + head) * num_keys
    keys = tl.load(keys_ptr + place, mask=place < num_keys, other=_LEAST)
    for rank in tl.static_range(NUM):
        best = tl.max(keys, 0)
        guess = (best & _MAX_INT32) ^ _MAX_INT32
        token = tl.where((rank_of == rank) & (head_of == head), guess, token)
        keys = tl.where(keys == best, _LEAST, keys)
    mine = tl.where(head_of == -1, 0, head_of) == head
    tl.store(out_ptr + row * stride_out + node, token, mask=mine)
    if OTHER > 0:
        tl.store(other_ptr + row * stride_other + node, token, mask=mine & (node < OTHER))


_launch_chunks = Launcher(_chunk_ranks_kernel)
_launch_place = Launcher(_place_ranks_kernel)


def tree_tokens(
    logits: torch.Tensor,
    roots: torch.Tensor,
    heads: torch.Tensor,
    ranks: torch.Tensor,
    num: int,
    out: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """See `reference_heads.tree_tokens`.

    The tree's tensors (`heads` and `ranks`) must not be written by work that is still under way on the device: on GPUs
    that can, they are read before the kernel in front has ended.
    """
    check_tree(logits, roots, heads, ranks, num, out)
    (rows, num_heads, columns), nodes, device = logits.shape, len(heads), logits.device
    if not out:
        out = (torch.empty(rows, nodes, dtype=torch.int64, device=device),)
    if not rows:
        return out[0]
    chunks = ceil_div(columns, _COLUMNS)
    keys = torch.empty(rows, num_heads, chunks * num, dtype=torch.int64, device=device)
    pdl = device_facts(device).capability >= 90
    strides = tuple(logits.stride()[:2])
    key = (device, logits.dtype, columns, strides, logits.data_ptr() % 16, num, pdl)
    stores = (*out, out[0])[:2]
    of_rows = tuple(x.stride(0) for x in (roots, *stores))
    aligned = tuple(x.data_ptr() % 16 == 0 for x in (roots, heads, ranks, *stores))
    with torch.cuda.device_of(logits):
        _launch_chunks(
            key, (chunks, rows * num_heads, 1), logits, keys, columns, num_heads, *strides, num, _COLUMNS, pdl,
            num_warps=4, launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
        padded = next_power_of_2(chunks * num)
        other = out[1].shape[1] if len(out) > 1 else 0
        constants = (num, padded, nodes, next_power_of_2(nodes), other, pdl)
        _launch_place(
            (device, chunks, of_rows, aligned, constants), (num_heads, rows, 1),
            keys, roots, heads, ranks, *stores, chunks * num, *of_rows, *constants,
            num_warps=min(max(padded // 256, 1), 8), launch_pdl=pdl, enable_fp_fusion=True,
        )  # fmt: skip
    return out[0]
