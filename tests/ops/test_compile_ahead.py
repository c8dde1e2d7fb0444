"""Compiles every kernel for GPUs that need not be there, through the ops' own launch code, and reads it.

A kernel that spills registers, needs more shared memory than the device has, or loads its tiles in pieces of
less than 16 bytes fails here and not on somebody's GPU. Run as a script, this file is the subprocess that
compiles: Triton must not be in interpreter mode there.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

#: Multiprocessors, and bytes of shared memory a block may have.
DEVICES = {80: (108, 166912), 86: (84, 101376), 90: (132, 232448)}

#: Two kernels that use a fraction of the registers have a stack frame of 8 bytes all the same; a spill is larger.
STACK_BYTES = 8

# Name -> keywords of `compile_case`, whose defaults are a bf16 decode step of 32 / 8 heads of 128.
CASES = {
    "decode": {},
    "decode-fp16-block16": {"dtype": "float16", "block_size": 16},
    "decode-fp32": {"dtype": "float32"},
    "decode-d64": {"heads": (14, 2), "dims": (64, 64)},
    "decode-d80-mha": {"heads": (32, 32), "dims": (80, 80)},
    "decode-d256-window-cap": {"heads": (16, 8), "dims": (256, 256), "window": 1024, "cap": 50.0},
    "decode-crowded": {"heads": (64, 64)},
    "decode-sinks-one-segment": {"dims": (64, 64), "sinks": True, "segments": 1},
    "chunk": {"q_len": 512},
    "chunk-fp32": {"q_len": 512, "dtype": "float32"},
    "chunk-d256-window-cap": {
        "q_len": 512,
        "heads": (16, 8),
        "dims": (256, 256),
        "window": 1024,
        "cap": 50.0,
    },
}
#: What to compile for each device when time is short: all for the newest, the largest kernels for the others.
QUICK = {
    80: ["decode", "decode-fp32", "chunk", "chunk-d256-window-cap"],
    86: ["decode-d256-window-cap", "chunk", "chunk-d256-window-cap"],
    90: list(CASES),
}
SLOW_CASES = CASES | {
    f"q{q_len}-{dtype}-d{dims[0]}-{dims[1]}-block{block_size}": {
        "q_len": q_len,
        "dtype": dtype,
        "dims": dims,
        "heads": heads,
        "block_size": block_size,
    }
    for q_len in (1, 8, 512)
    for dtype in ("bfloat16", "float32")
    for heads, dims in (
        ((32, 8), (128, 128)),
        ((8, 8), (40, 40)),
        ((9, 3), (64, 64)),
        ((16, 16), (192, 128)),
        ((71, 1), (64, 64)),
        ((8, 4), (256, 256)),
    )
    for block_size in (16, 64, 192)
}


def compile_case(
    capability,
    q_len=1,
    heads=(32, 8),
    dims=(128, 128),
    block_size=64,
    dtype="bfloat16",
    segments=2,
    window=None,
    cap=None,
    sinks=False,
):
    """Calls both ops on tensors without memory; returns the facts of every kernel they would launch."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from hf_turbo.ops import paged_attention as attention
    from hf_turbo.ops.attention_config import DeviceFacts
    from hf_turbo.ops.block_ids import MAX_SEGMENTS
    from hf_turbo.ops.metadata import AttentionMetadata, LayerKV
    from hf_turbo.ops.store_kv import store_kv

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return capability

        def get_current_stream(self, device):
            return 0

    compiled = []
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(Driver())
    num_sms, shared_memory = DEVICES[capability]
    facts = DeviceFacts(num_sms, capability, shared_memory)
    attention.device_facts, JITFunction.run = lambda device: facts, compile_only
    try:
        with torch.device("meta"):
            num_heads, num_kv_heads = heads
            k_dim, v_dim = dims
            dtype = getattr(torch, dtype)
            num_seqs, max_seqlen_k = 4, 8192
            pools = [
                tuple(torch.empty(1000, num_kv_heads, block_size, dim, dtype=dtype) for _ in range(segments))
                for dim in dims
            ]
            kv = LayerKV(*pools, torch.empty(2, MAX_SEGMENTS, dtype=torch.int64))
            metadata = AttentionMetadata(
                block_tables=torch.empty(num_seqs, max_seqlen_k // block_size, dtype=torch.int32),
                seq_lens=torch.empty(num_seqs, dtype=torch.int32),
                cu_seqlens_q=torch.empty(num_seqs + 1, dtype=torch.int32),
                max_seqlen_q=q_len,
                max_seqlen_k=max_seqlen_k,
                sliding_window=window,
            )
            total_q = num_seqs * q_len
            store_kv(
                torch.empty(total_q, num_kv_heads, k_dim, dtype=dtype),
                torch.empty(total_q, num_kv_heads, v_dim, dtype=dtype),
                kv,
                metadata,
            )
            attention.paged_attention(
                torch.empty(total_q, num_heads, k_dim, dtype=dtype),
                kv,
                metadata,
                k_dim**-0.5,
                cap,
                torch.empty(num_heads) if sinks else None,
            )
    finally:
        JITFunction.run = launch
    return [kernel_facts(kernel) for kernel in compiled]


def kernel_facts(kernel):
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    ptx = kernel.asm["ptx"]
    return {
        "name": kernel.metadata.name,
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "async_copies": [
            int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], 0x(\w+)", ptx)
        ],
        "vector_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "tensor_core_ops": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
    }


def compile_all(capability, cases):
    """Compiles cases in a subprocess; name -> facts of its kernels, or the error."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, __file__, str(capability), json.dumps(cases)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled():
    return {
        capability: compile_all(capability, {name: CASES[name] for name in names})
        for capability, names in QUICK.items()
    }


def check_kernels(facts, capability, case):
    assert isinstance(facts, list), facts
    names = [kernel["name"] for kernel in facts]
    assert names[:2] == ["_store_kv_kernel", "_paged_attention_kernel"]
    for kernel in facts:
        assert kernel["stack"] <= STACK_BYTES, kernel
        assert kernel["shared"] <= DEVICES[capability][1], kernel
    attention = facts[1]
    assert set(attention["async_copies"]) == {16}, attention
    if case.get("dtype") != "float32":
        assert attention["tensor_core_ops"], attention
    return names


@pytest.mark.parametrize("capability, name", [(c, name) for c, names in QUICK.items() for name in names])
def test_compiles_without_spills(compiled, capability, name):
    names = check_kernels(compiled[capability][name], capability, CASES[name])
    if name == "decode":
        assert names[2:] == ["_merge_splits_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", DEVICES)
def test_sweep_compiles_without_spills(capability):
    for name, facts in compile_all(capability, SLOW_CASES).items():
        check_kernels(facts, capability, SLOW_CASES[name])


if __name__ == "__main__":
    results = {}
    for case_name, case in json.loads(sys.argv[2]).items():
        try:
            results[case_name] = compile_case(int(sys.argv[1]), **case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
