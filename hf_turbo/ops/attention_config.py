"""How the paged attention kernel is compiled and spread over a device: a static table, by simple facts.

(Triton's autotuner needs a device and takes time at the first call of every shape, and its choice would
change the last bits of a result from run to run.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

#: Queries of a sequence that are taken for drafted tokens.
MAX_DRAFTED = 64
#: Rows of a program, and splits of a sequence, at most, where the queries are a few drafted tokens.
DRAFT_BLOCK_M = 16
DRAFT_SPLITS = 8

#: A split of fewer keys would cost more to merge than it saves; of small heads, fewer than four times as many.
MIN_KEYS_PER_SPLIT = 128
SMALL_HEAD = 64

#: Where programs share out the keys of all sequences: splits of a sequence at most, and tokens times splits (32 heads
#: of 128 take 32 MB then).
MAX_SHARED_SPLITS = 16
MAX_PARTIALS = 2048


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    # Triton's own, and its cdiv, take microseconds on the host.
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class AttentionConfig:
    """How the kernel is compiled and spread over the device.

    Args:
        block_m: rows (query tokens times heads of a group) of a program; a power of two from 16.
        tile: keys a step; a power of two from 16, independent of the block size.
        num_warps, num_stages: Triton's.
        peel: loop without masks over the tiles that every row sees in full: less arithmetic, twice the code.
        programs_per_sm: how many programs the number of splits aims at.
        num_splits: fixes the number of splits.
        pdl: each kernel starts while the last programs of the one before are still running, and waits for them
            before it reads anything (programmatic dependent launch, compute capability 9.0 and above).
        max_registers: of a thread, where fewer than the compiler would take let one more program fit.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    peel: bool = False
    programs_per_sm: int = 2
    num_splits: int | None = None
    pdl: bool = False
    max_registers: int | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice looks at: multiprocessors, compute capability (times 10), shared memory of a block."""

    num_sms: int
    capability: int
    shared_memory: int


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":  # Triton's interpreter
        return DeviceFacts(num_sms=4, capability=0, shared_memory=1 << 17)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        properties.multi_processor_count,
        properties.major * 10 + properties.minor,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # not in torch's stubs
    )


@lru_cache(maxsize=4096)
def choose_config(
    rows: int,
    num_programs: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    facts: DeviceFacts,
    is_tree: bool = False,
    max_seqlen_q: int = 1,
    beside_gemv: bool = False,
) -> AttentionConfig:
    """The table, by rows of a sequence (query tokens times heads of a group), (sequence, KV head) pairs, head
    size, dtype, device, whether queries are nodes of trees, the queries of a sequence, and whether the linears beside
    it are GEMVs. Measured on an H200 by benchmarks/attention.py and in whole steps; elsewhere, and for trees, chosen
    not to spill.
    """
    k_pad, v_pad = next_power_of_2(k_dim), next_power_of_2(v_dim)
    dim = max(k_pad, v_pad)
    hopper = facts.capability // 10 == 9
    if dtype == torch.float32:
        # Dots on the CUDA cores hold their operands in registers: small tiles over many warps, or they spill.
        config = AttentionConfig(block_m=16, tile=32 if dim <= 128 else 16, num_warps=8, num_stages=2)
    elif rows <= 64:
        # Bound by memory: tiles of about 32 KB, two in flight, masks for free. Three such programs fit on a
        # multiprocessor; a few more would be a second wave that is mostly idle, so those get half the tile.
        crowded = rows <= 16 and num_programs > 3 * facts.num_sms
        tile = max(32, min(128, 8192 // dim) // (2 if crowded else 1))
        if max_seqlen_q > 1:  # with 8 splits what counts is how long a program takes: 6.1 us for 8 nodes, not 7.4
            tile = SMALL_HEAD if dim <= SMALL_HEAD else max(tile, 16384 // dim)
        elif dim <= SMALL_HEAD and num_programs <= facts.num_sms // 4:
            tile = SMALL_HEAD  # one row of SmolLM2, with the splits below: 3.6 us a layer for 5.2
        config = AttentionConfig(
            # One token's heads stay together: they read their keys once. Tokens of a draft find them in the cache.
            block_m=max(16, next_power_of_2(rows)) if max_seqlen_q == 1 else DRAFT_BLOCK_M,
            tile=tile,
            num_warps=2 if crowded else 4,
            # What programs take of shared memory, GEMVs lack as a cache for the loads on their way: with two tiles in
            # flight a step of 8B took 4.04 ms, with one 3.75; at 32,768 tokens 5.14 and 5.09.
            num_stages=2 if beside_gemv and dim > SMALL_HEAD else 3,
            pdl=facts.capability >= 90,
        )
    elif is_tree and dim <= 128:
        # A few sequences: smaller row tiles than a prompt's, for more programs. They find the keys in the cache.
        tile = 64 if hopper else 32
        config = AttentionConfig(64, tile, num_warps=4, num_stages=3, pdl=facts.capability >= 90)
    elif is_tree:
        pdl = facts.capability >= 90
        config = AttentionConfig(64, 32, num_warps=8, num_stages=3, peel=True, programs_per_sm=1, pdl=pdl)
    elif dim <= 128 and hopper:
        config = AttentionConfig(block_m=64, tile=64, num_warps=4, num_stages=3, peel=True)
    elif dim <= 128:
        config = AttentionConfig(block_m=128, tile=32, num_warps=8, num_stages=3, peel=True, programs_per_sm=1)
    elif hopper:
        # A tile of 64 spills two dozen registers (and was 12% faster in spite of it, 365 against 414 us).
        config = AttentionConfig(block_m=128, tile=32, num_warps=8, num_stages=3, peel=True, programs_per_sm=1)
    else:
        config = AttentionConfig(block_m=64, tile=32, num_warps=8, num_stages=2, peel=True, programs_per_sm=1)

    def shared_memory() -> int:
        return dtype.itemsize * (config.block_m * k_pad + config.num_stages * config.tile * (k_pad + v_pad))

    while shared_memory() > facts.shared_memory and config.num_stages > 2:
        config = replace(config, num_stages=config.num_stages - 1)
    while shared_memory() > facts.shared_memory and config.tile > 32:
        config = replace(config, tile=config.tile // 2)
    while shared_memory() > facts.shared_memory and config.block_m > 16:
        config = replace(config, block_m=config.block_m // 2)
    return config


def most_splits(num_keys: int, max_seqlen_q: int, dim: int = 2 * SMALL_HEAD) -> int:
    """Splits of so many keys at most, by the queries of a sequence and the size of a head.

    Few drafted tokens have many rows, each of which every split writes and the merge reads again: on an H200, 16 tokens
    over 512 take 8.4 us with 8 splits and 12.5 with the 33 that fill the device at longer texts.
    """
    limit = ceil_div(num_keys, MIN_KEYS_PER_SPLIT * (4 if dim <= SMALL_HEAD else 1))
    return min(limit, DRAFT_SPLITS) if 1 < max_seqlen_q <= MAX_DRAFTED else limit


@lru_cache(maxsize=4096)
def choose_num_splits(programs: int, max_splits: int, slots: int) -> int:
    """The fewest splits whose programs fill whole waves of `slots` to within a twentieth of the best."""
    if max_splits <= 1 or programs >= 4 * slots:
        return 1

    def filled(splits: int) -> float:
        waves = programs * splits / slots
        return waves / math.ceil(waves)

    candidates = range(1, min(max_splits, ceil_div(2 * slots, programs)) + 1)
    best = max(filled(splits) for splits in candidates)
    return next(splits for splits in candidates if filled(splits) >= 0.95 * best)
