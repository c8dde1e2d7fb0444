"""Compiles the kernels of a quantized cache for GPUs that need not be there, as `test_compile_ahead` does the others.

Run as a script, this file is the subprocess that compiles.
"""

import functools
import json
import re
import sys

import pytest
import test_compile_ahead as ahead

#: A kernel with registers to spare keeps so much on its stack around the slow path of a division.
STACK_BYTES = 16
#: Where programs share keys out int4 with heads of 256 keeps a little more, none of it within a loop.
SHARED_OUT_STACK_BYTES = 24
#: Of the largest tiles of float8 keys, 64 numbers a thread: so much of what is tried goes through the stack.
TRIES_STACK_BYTES = 288
#: What a turn over int4 codes exchanges through shared memory, at most. Scales that aren't one copy ahead of their use,
#: or that have to change their layout, take 24 more.
EXCHANGES = 64

# Name -> keywords of `compile_case`, whose defaults are a bf16 prompt of 8 heads of 128.
CASES = {
    "int8": {},
    "fp8": {"fmt": "fp8"},
    "int4": {"fmt": "int4"},
    "int4-d80-d112-block32-fp16": {"fmt": "int4", "dims": (80, 112), "block_size": 32, "dtype": "float16"},
    "int4-d256": {"fmt": "int4", "dims": (256, 256)},
    "fp8-d64-block128": {"fmt": "fp8", "dims": (64, 64), "block_size": 128},
    "int8-d96-fp32": {"dims": (96, 96), "dtype": "float32"},
}
#: What to compile for each device test by test.
QUICK = {80: ["int4-d80-d112-block32-fp16"], 86: ["fp8-d64-block128"], 90: ["int8", "int4"]}
# The largest tiles.
SLOW_CASES = CASES | {
    f"{fmt}-d256-block128-fp32": {"fmt": fmt, "dims": (256, 256), "block_size": 128, "dtype": "float32"}
    for fmt in ("int8", "fp8", "int4")
}


def compile_case(capability, fmt="int8", dims=(128, 128), block_size=64, dtype="bfloat16"):
    """Stores a prompt, makes codes of blocks and blocks of codes; returns the facts of the three kernels."""
    import torch

    from hf_turbo.ops import quantize_kv
    from hf_turbo.ops.block_ids import MAX_SEGMENTS
    from hf_turbo.ops.kv_format import KV_FORMATS
    from hf_turbo.ops.metadata import LayerKV, QuantizedKV

    q_len, heads, fmt, dtype = 512, 8, KV_FORMATS[fmt], getattr(torch, dtype)
    with ahead.recorded(capability) as compiled, torch.device("meta"):
        wide, metadata = ahead.make_cache(q_len, heads, dims, block_size, dtype, 2, None)
        metadata.code_tables = metadata.block_tables
        sizes = fmt.key_bytes(block_size, dims[0]), fmt.value_bytes(block_size, dims[1])
        pools = [tuple(torch.empty(1000, heads, size, dtype=torch.uint8) for _ in range(2)) for size in sizes]
        kv = QuantizedKV(wide, LayerKV(*pools, torch.empty(2, MAX_SEGMENTS, dtype=torch.int64), True), fmt)
        k, v = (torch.empty(metadata.num_seqs * q_len, heads, dim, dtype=dtype) for dim in dims)
        quantize_kv.store_kv(k, v, kv, metadata)
        addresses, pairs = quantize_kv.CodeAddresses([kv, kv]), torch.empty(5, 2, dtype=torch.int32)
        addresses.quantize(pairs)
        addresses.dequantize(pairs)
    return [ahead.kernel_facts(kernel) | inexact_steps(kernel.asm["ptx"]) for kernel in compiled]


def compile_attention(
    capability, fmt="int8", dims=(128, 128), block_size=64, dtype="bfloat16", q_len=1, group=4, num_seqs=16,
    window=None, shared_out=False,
):  # fmt: skip
    """Attends, by default in a decode step over a pool that grows; returns the facts of the kernel."""
    import torch

    from hf_turbo.ops import quantized_attention
    from hf_turbo.ops.block_ids import MAX_SEGMENTS
    from hf_turbo.ops.kv_format import KV_FORMATS
    from hf_turbo.ops.metadata import LayerKV, QuantizedKV

    heads, fmt, dtype = 8, KV_FORMATS[fmt], getattr(torch, dtype)
    with ahead.recorded(capability, quantized_attention) as compiled, torch.device("meta"):
        wide, metadata = ahead.make_cache(q_len, heads, dims, block_size, dtype, 2, window, num_seqs)
        metadata.code_tables = metadata.block_tables
        if shared_out:
            metadata.arrivals = torch.empty(metadata.MAX_ARRIVALS, dtype=torch.int32)
        sizes = fmt.key_bytes(block_size, dims[0]), fmt.value_bytes(block_size, dims[1])
        pools = [tuple(torch.empty(1000, heads, size, dtype=torch.uint8) for _ in range(2)) for size in sizes]
        kv = QuantizedKV(wide, LayerKV(*pools, torch.empty(2, MAX_SEGMENTS, dtype=torch.int64), True), fmt)
        q = torch.empty(metadata.num_seqs * q_len, heads * group, dims[0], dtype=dtype)
        quantized_attention.paged_attention(q, kv, metadata, 0.1)
    return [ahead.kernel_facts(kernel) for kernel in compiled]


def inexact_steps(ptx):
    """What would make other codes than `kv_codes` makes."""
    return {
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        "flushed": len(re.findall(r"\.ftz\b", ptx)),
        "approximate": len(re.findall(r"\.(?:approx|full)\b", ptx)),
        "narrow_stores": len(re.findall(r"st\.global\.b8", ptx)),
    }


ATTENTION = {
    "attend-int8": {},
    "attend-fp8": {"fmt": "fp8"},
    "attend-int4": {"fmt": "int4"},
    "attend-int4-few": {"fmt": "int4", "num_seqs": 1},
    "attend-int4-d64": {"fmt": "int4", "dims": (64, 64), "group": 3},
    "attend-int4-d80": {"fmt": "int4", "dims": (80, 80), "group": 1},
    "attend-int8-d256-group12": {"dims": (256, 256), "group": 12},
    "attend-int4-d256": {"fmt": "int4", "dims": (256, 256)},
    "attend-fp8-chunk": {"fmt": "fp8", "q_len": 512},
    "attend-int4-chunk": {"fmt": "int4", "q_len": 512},
    "attend-int8-block128": {"block_size": 128},
    "attend-int4-fp16-block32": {"fmt": "int4", "block_size": 32, "dtype": "float16"},
    "attend-int8-fp32": {"dtype": "float32"},
}
#: Where programs share keys out there is no merge. Chunks are so short that they are split.
SHARED_OUT = {
    f"{name}-shared-out": case | {"shared_out": True} | ({"q_len": 60, "num_seqs": 4} if "chunk" in name else {})
    for name, case in (ATTENTION | {"attend-fp8-window": {"fmt": "fp8", "window": 1024}}).items()
}
ATTENTION |= SHARED_OUT
# fmt: off
QUICK_ATTENTION = {
    80: ["attend-fp8"],
    86: ["attend-int8"],
    90: [
        "attend-int8", "attend-int4", "attend-int4-few", "attend-fp8",
        *(f"attend-{fmt}-shared-out" for fmt in ("int8", "fp8", "int4")),
    ],
}
# fmt: on


@functools.cache
def compiled(capability):
    """What the tests below look at, compiled by one subprocess a device."""
    names = [*QUICK[capability], *QUICK_ATTENTION[capability]]
    return ahead.compile_apart(__file__, capability, {name: (CASES | ATTENTION)[name] for name in names})


def check_kernels(facts, capability, name):
    assert isinstance(facts, list), facts
    assert [kernel["name"] for kernel in facts] == ["_store_quantized_kernel", "_recode_kernel", "_recode_kernel"]
    for kernel in facts:
        assert kernel["stack"] <= (TRIES_STACK_BYTES if name == "fp8-d256-block128-fp32" else STACK_BYTES), kernel
        assert kernel["shared"] <= ahead.DEVICES[capability][1], kernel
        assert kernel["vector_loads"] or "int4-d80" in name, kernel  # whose quarters are of 20 and 28 numbers
        inexact = ("fused", "flushed", "approximate", "narrow_stores")
        assert not any(kernel[name] for name in inexact), kernel


@pytest.mark.parametrize("capability, name", ahead.on_devices(QUICK))
def test_compiles_without_spills(capability, name):
    check_kernels(compiled(capability)[name], capability, name)


def check_attention(facts, capability, name):
    assert isinstance(facts, list), facts
    kernel = facts[0]
    assert kernel["name"] == "_quantized_attention_kernel"
    is_merged = "chunk" not in name and "shared-out" not in name
    assert [other["name"] for other in facts[1:]] == ["_merge_splits_kernel"] * is_merged
    assert kernel["stack"] <= (SHARED_OUT_STACK_BYTES if "shared-out" in name else STACK_BYTES), kernel
    assert kernel["shared"] <= ahead.DEVICES[capability][1], kernel
    if "fp32" not in name:
        assert kernel["tensor_core_ops"], kernel
        assert min(kernel["async_copies"]) >= 4 and kernel["async_copies"].count(16) > 4, kernel
    if name in ("attend-int4", "attend-int4-d80", "attend-int4-shared-out"):
        assert kernel["exchanges_in_loop"][0] <= EXCHANGES, kernel


@pytest.mark.parametrize("capability, name", ahead.on_devices(QUICK_ATTENTION))
def test_attention_compiles_without_spills(capability, name):
    check_attention(compiled(capability)[name], capability, name)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ahead.DEVICES)
def test_sweep_compiles_without_spills(capability):
    for name, facts in ahead.compile_apart(__file__, capability, SLOW_CASES | ATTENTION).items():
        if name in ATTENTION:
            check_attention(facts, capability, name)
        else:
            check_kernels(facts, capability, name)


if __name__ == "__main__":
    results = {}
    for case_name, case in json.loads(sys.argv[2]).items():
        try:
            compiles = compile_attention if case_name in ATTENTION else compile_case
            results[case_name] = compiles(int(sys.argv[1]), **case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
