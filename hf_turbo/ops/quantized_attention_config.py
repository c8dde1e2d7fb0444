"""How the kernel over quantized blocks is compiled and spread over a device: a static table."""

from __future__ import annotations

from functools import lru_cache

import torch

from .attention_config import AttentionConfig, DeviceFacts, next_power_of_2


@lru_cache(maxsize=4096)
def choose_config(
    rows: int,
    num_programs: int,
    k_dim: int,
    v_dim: int,
    block_size: int,
    dtype: torch.dtype,
    bits: int,
    facts: DeviceFacts,
    is_tree: bool = False,
) -> AttentionConfig:
    """The table, by rows of a sequence (query tokens times heads of a group), (sequence, KV head) pairs, head sizes,
    dtype, bits of a code, device, and whether queries are nodes of trees (for which it is chosen not to spill). A tile
    is always a block. Measured on an H200 with heads of 128 and blocks of 64.
    """
    pdl = facts.capability >= 90
    dim = max(next_power_of_2(k_dim), next_power_of_2(v_dim))
    if dtype == torch.float32:
        return AttentionConfig(block_m=16, tile=block_size, num_warps=8, num_stages=2)
    if is_tree:
        block_m = max(8, min(_most_tree_rows(dim, block_size, bits), next_power_of_2(rows)))
        warps = 8 if block_m == 32 or dim * block_size > 256 * 64 else 4
        return AttentionConfig(block_m, block_size, warps, 2, programs_per_sm=4 if block_m == 8 else 2, pdl=pdl)
    if rows > 64:
        block_m = 32 if bits == 8 and dim <= 128 else 16
        return AttentionConfig(block_m, block_size, num_warps=4, num_stages=2)
    block_m = max(8, next_power_of_2(rows))
    is_short = block_m == 8 and dim * block_size <= 128 * 64
    if bits == 4 and is_short and num_programs * 2 > facts.num_sms:
        # Unpacking is what takes the time. Two warps repeat less of what is the same for all of a tile; with so few
        # registers that six such programs fit, one or two are computing while others wait. (With few sequences most
        # programs of a captured step have nothing to do or one wide block, and 1 x 128 took 4.13 ms for 3.86.)
        fits = k_dim % 128 == 0 and v_dim % 128 == 0  # heads that are padded take more registers
        programs, registers = (6, 168) if fits or dim < 128 else (5, 200)
        return AttentionConfig(block_m, block_size, 2, 3, programs_per_sm=programs, pdl=pdl, max_registers=registers)
    warps = 8 if dim > 128 and block_m > 8 else 4
    # One more block in flight: among a model's other kernels 77.7 us for 81.4 of a layer, though not alone.
    stages = 3 if bits == 8 and is_short else 2
    return AttentionConfig(block_m, block_size, warps, stages, programs_per_sm=4 if block_m == 8 else 2, pdl=pdl)


def _most_tree_rows(dim: int, block_size: int, bits: int) -> int:
    """Rows whose outputs, over codes and over wide blocks, fit in registers beside a block's numbers."""
    if dim > 128:
        return 8 if bits == 8 or block_size > 64 else 16
    return 32 if bits == 8 and block_size <= 64 else 16
