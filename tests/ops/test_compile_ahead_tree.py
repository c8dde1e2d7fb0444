"""Compiles what token trees need for GPUs that need not be there, as `test_compile_ahead` does the others.

Run as a script, this file is the subprocess that compiles.
"""

import dataclasses
import functools
import json
import sys

import pytest
import test_compile_ahead as ahead
from test_compile_ahead_kv import STACK_BYTES

# Name -> keywords of `compile_case`, whose defaults are trees of 64 nodes in bf16, 4 x 8 heads of 128.
CASES = {
    "64": {},
    "64-block16-window-cap": {"block_size": 16, "window": 1024, "cap": 50.0},
    "8": {"num_nodes": 8},
    "9-d64-group7": {"num_nodes": 9, "group": 7, "dims": (64, 64)},
    "64-d80-mha": {"group": 1, "dims": (80, 80)},
    "64-d192-d128": {"group": 1, "dims": (192, 128)},
    "64-d256-window-cap": {"group": 2, "dims": (256, 256), "window": 1024, "cap": 50.0},
    "16-d256": {"num_nodes": 16, "group": 2, "dims": (256, 256)},
    "64-fp32": {"dtype": "float32"},
    "64-int8": {"fmt": "int8"},
    "64-fp8": {"fmt": "fp8"},
    "64-int4": {"fmt": "int4"},
    "2-int4": {"fmt": "int4", "num_nodes": 2},
    "64-int8-d64": {"fmt": "int8", "dims": (64, 64)},
    "64-int8-d256": {"fmt": "int8", "dims": (256, 256)},
    "64-int4-d256-block128": {"fmt": "int4", "dims": (256, 256), "block_size": 128},
    "64-int8-block128": {"fmt": "int8", "block_size": 128},
    "64-int4-d80-block32": {"fmt": "int4", "dims": (80, 80), "block_size": 32},
}
#: What to compile for each device test by test.
QUICK = {80: ["64", "64-int4"], 90: ["64", "64-d256-window-cap", "64-int8"]}


def compile_case(
    capability, num_nodes=64, group=4, dims=(128, 128), block_size=64, dtype="bfloat16", fmt=None, window=None, cap=None
):
    """Attends with the nodes of four trees and moves those that are kept; returns the facts of the kernels."""
    import torch

    from hf_turbo.ops import move_kv, paged_attention, quantized_attention
    from hf_turbo.ops.block_ids import MAX_SEGMENTS
    from hf_turbo.ops.kv_format import KV_FORMATS
    from hf_turbo.ops.metadata import LayerKV, QuantizedKV, TreeNodes

    heads, dtype = 8, getattr(torch, dtype)
    module = quantized_attention if fmt else paged_attention
    with ahead.recorded(capability, module, move_kv) as compiled, torch.device("meta"):
        wide, metadata = ahead.make_cache(num_nodes, heads, dims, block_size, dtype, 2, window)
        count = metadata.num_seqs * num_nodes
        nodes = TreeNodes(torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int32))
        metadata = dataclasses.replace(metadata, tree=nodes, code_tables=metadata.block_tables if fmt else None)
        kv = wide
        if fmt:
            fmt = KV_FORMATS[fmt]
            sizes = fmt.key_bytes(block_size, dims[0]), fmt.value_bytes(block_size, dims[1])
            pools = [tuple(torch.empty(1000, heads, size, dtype=torch.uint8) for _ in range(2)) for size in sizes]
            kv = QuantizedKV(wide, LayerKV(*pools, torch.empty(2, MAX_SEGMENTS, dtype=torch.int64), True), fmt)
        q = torch.empty(count, heads * group, dims[0], dtype=dtype)
        module.paged_attention(q, kv, metadata, 0.1, cap)
        path = torch.empty(metadata.num_seqs, 16, dtype=torch.int32)
        move_kv.TokenAddresses([wide, wide]).move(metadata.block_tables, metadata.seq_lens, path, metadata.seq_lens)
    return [ahead.kernel_facts(kernel) for kernel in compiled]


@functools.cache
def compiled(capability):
    """What the tests below look at, compiled by one subprocess a device."""
    return ahead.compile_apart(__file__, capability, QUICK[capability])


def check_kernels(facts, capability, name):
    assert isinstance(facts, list), facts
    kinds = {kernel["name"]: kernel for kernel in facts}
    is_quantized = CASES[name].get("fmt") is not None
    attention = kinds.pop("_quantized_attention_kernel" if is_quantized else "_paged_attention_kernel")
    move = kinds.pop("_move_kv_kernel")
    assert set(kinds) <= {"_merge_splits_kernel"}
    for kernel in facts:
        assert kernel["stack"] <= (STACK_BYTES if is_quantized else ahead.STACK_BYTES), kernel
        assert kernel["shared"] <= ahead.DEVICES[capability][1], kernel
    assert attention["tensor_core_ops"] or "fp32" in name, attention
    assert is_quantized or set(attention["async_copies"]) == {16}, attention
    assert move["vector_loads"] and move["shared"] == 0, move
    assert move["waits"] == (capability >= 90), move


@pytest.mark.parametrize("capability, name", ahead.on_devices(QUICK))
def test_compiles_without_spills(capability, name):
    check_kernels(compiled(capability)[name], capability, name)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_sweep_compiles_without_spills(capability):
    for name, facts in ahead.compile_apart(__file__, capability, list(CASES)).items():
        check_kernels(facts, capability, name)


if __name__ == "__main__":
    results = {}
    for case_name in json.loads(sys.argv[2]):
        try:
            results[case_name] = compile_case(int(sys.argv[1]), **CASES[case_name])
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
