"""Compiles every kernel for GPUs that need not be there, through the ops' own launch code, and reads it.

A kernel that spills registers, needs more shared memory than the device has, or loads its tiles in pieces of
less than 16 bytes fails here and not on somebody's GPU. Run as a script, this file is the subprocess that
compiles: Triton must not be in interpreter mode there.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

#: Multiprocessors, and bytes of shared memory a block may have.
DEVICES = {80: (108, 166912), 86: (84, 101376), 90: (132, 232448)}
#: Compiled for by default; the others where there is time.
NEWEST = 90

#: Two kernels that use a fraction of the registers have a stack frame of 8 bytes all the same; a spill is larger.
STACK_BYTES = 8


TENSOR_CORE = r"wgmma\.mma_async|mma\.sync"

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
    "decode-shared-out": {"shared_out": True},
    "chunk-shared-out": {"q_len": 128, "shared_out": True},  # of 2,048 tokens in all nothing is split
    "chunk-d256-shared-out": {"q_len": 128, "heads": (16, 8), "dims": (256, 256), "shared_out": True},
    "decode-d256-shared-out": {"heads": (16, 8), "dims": (256, 256), "shared_out": True},
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
#: What to compile for each device test by test: all for the newest, the largest kernels for the others.
QUICK = {
    80: ["decode", "decode-fp32", "chunk", "chunk-d256-window-cap"],
    86: ["decode-d256-window-cap", "chunk", "chunk-d256-window-cap"],
    90: list(CASES),
}
# Name -> keywords of `compile_layer_case`; all for every device, they are small.
LAYER_CASES = {
    "layer-decode": {},
    "layer-decode-norms": {"norms": True, "kind": "gelu_tanh"},
    "layer-prompt": {"q_len": 512},
    "layer-prompt-interleaved-norms-fp32": {
        "q_len": 512,
        "heads": (16, 8),
        "dim": 256,
        "rotary_dim": 128,
        "columns": (16384, 5000),
        "dtype": "float32",
        "interleaved": True,
        "norms": True,
        "kind": "gelu",
    },
    "layer-prompt-d80-long-rows": {"q_len": 512, "dim": 80, "rotary_dim": 32, "columns": (20000, 2560)},
}
# Name -> keywords of `compile_linear_case`; all for every device.
LINEAR_CASES = {
    "linear-qkv": {"sizes": (4096, 1024, 1024)},
    "linear-gate-up-2": {"rows": 2, "sizes": (14336, 14336), "activation": "silu"},
    "linear-gate-up-4": {"rows": 4, "sizes": (14336, 14336), "activation": "silu"},
    "linear-down-16": {"rows": 16, "sizes": (4096,), "k": 14336, "residual": True},
    "linear-gate-up-64": {"rows": 64, "sizes": (14336, 14336), "activation": "gelu_tanh"},
    "linear-small": {"sizes": (576, 192, 192), "k": 576},
    "linear-small-norm": {"sizes": (576, 192, 192), "k": 576, "norm": True},
    "linear-small-gate-up-norm": {"sizes": (1536, 1536), "k": 576, "activation": "silu", "norm": True},
    "linear-small-gate-up-8": {"rows": 8, "sizes": (1536, 1536), "k": 576, "activation": "silu"},
    "linear-head-64": {"rows": 64, "sizes": (128256,)},
    "linear-fp32-32": {"rows": 32, "sizes": (4096,), "dtype": "float32", "residual": True},
}
# Name -> keywords of `compile_int4_case`.
INT4_CASES = {
    "int4-qkv-1": {"sizes": (4096, 1024, 1024), "perm": True, "bias": True},
    "int4-gate-up-1-places": {"sizes": (14336, 14336), "activation": "silu", "places": True},
    "int4-asymmetric-group32-1-fp16": {"sizes": (14336,), "zeros": True, "group_size": 32, "dtype": "float16"},
    "int4-8bit-1": {"bits": 8, "residual": True},
    "int4-gate-up-16-asymmetric": {"rows": 16, "sizes": (14336, 14336), "activation": "silu", "zeros": True},
    "int4-down-16": {"rows": 16, "k": 14336, "residual": True},
    "int4-8bit-16-asymmetric-fp16": {"rows": 16, "bits": 8, "zeros": True, "dtype": "float16"},
    "int4-fp32-16": {"rows": 16, "dtype": "float32"},
    "int4-qkv-64": {"rows": 64, "sizes": (4096, 1024, 1024), "bias": True},
    "int4-gate-up-64-asymmetric-group32": {
        "rows": 64,
        "sizes": (14336, 14336),
        "activation": "silu",
        "zeros": True,
        "group_size": 32,
    },
    "int4-fp32-64": {"rows": 64, "dtype": "float32", "residual": True},
    "int4-8bit-64-fp16": {"rows": 64, "bits": 8, "dtype": "float16"},
    "int4-65-asymmetric": {"rows": 65, "zeros": True},
}
#: What of them to compile for each device test by test.
QUICK_INT4 = {
    80: ["int4-gate-up-1-places", "int4-down-16", "int4-gate-up-64-asymmetric-group32", "int4-65-asymmetric"],
    86: ["int4-8bit-1", "int4-fp32-16", "int4-qkv-64", "int4-8bit-64-fp16"],
    90: [
        "int4-qkv-1", "int4-gate-up-1-places", "int4-asymmetric-group32-1-fp16", "int4-8bit-1", "int4-down-16",
        "int4-fp32-16", "int4-qkv-64", "int4-gate-up-64-asymmetric-group32", "int4-65-asymmetric",
    ],
}  # fmt: skip
#: The kernel that serves up to so many rows.
INT4_KERNELS = {16: "int4_rows_kernel", 64: "int4_tiles_kernel", 65: "int4_dequantize_kernel"}
#: Bytes of registers that are spilled all the same.
KNOWN_SPILLS = {"int4-gate-up-64-asymmetric-group32": 96}
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
    shared_out=False,
):
    """Calls both ops on tensors without memory; returns the facts of every kernel they would launch."""
    import torch

    from hf_turbo.ops import paged_attention as attention
    from hf_turbo.ops.store_kv import store_kv

    dtype = getattr(torch, dtype)
    num_heads, num_kv_heads = heads
    k_dim, v_dim = dims
    with recorded(capability, attention) as compiled, torch.device("meta"):
        kv, metadata = make_cache(q_len, num_kv_heads, dims, block_size, dtype, segments, window)
        if shared_out:
            metadata.arrivals = torch.empty(metadata.MAX_ARRIVALS, dtype=torch.int32)
        total_q = metadata.num_seqs * q_len
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
    return [kernel_facts(kernel) for kernel in compiled]


def compile_layer_case(
    capability, q_len=1, heads=(32, 8), dim=128, rotary_dim=128, columns=(4096, 14336), dtype="bfloat16", **style
):
    """Calls the small ops of a layer in the order in which a layer does; `style`: norms, interleaved, kind."""
    import torch

    from hf_turbo.ops import activation, norm, rotary
    from hf_turbo.ops.norm_spec import RMSNorm

    dtype = getattr(torch, dtype)
    num_heads, num_kv_heads = heads
    with recorded(capability, norm, rotary, activation) as compiled, torch.device("meta"):
        kv, metadata = make_cache(q_len, num_kv_heads, (dim, dim), 64, dtype, 2, None)
        rows = metadata.num_seqs * q_len
        x = torch.empty(rows, columns[0], dtype=dtype)
        norm.rms_norm(x, RMSNorm(torch.empty(columns[0], dtype=dtype), 1e-6, False, True), residual=x)
        qkv = torch.empty(rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
        cos = torch.empty(rows, rotary_dim, dtype=dtype)
        head_norm = RMSNorm(torch.empty(dim, dtype=dtype), 1e-6, True, False) if style.get("norms") else None
        options = dict(interleaved=style.get("interleaved", False), q_norm=head_norm, k_norm=head_norm)
        rotary.rotary_store_kv(q, k, v, cos, cos, kv, metadata, rotary_dim=rotary_dim, **options)
        gate, up = torch.empty(rows, 2 * columns[1], dtype=dtype).chunk(2, -1)
        activation.gated(gate, up, style.get("kind", "silu"))
    return [kernel_facts(kernel) for kernel in compiled]


def compile_linear_case(
    capability, rows=1, sizes=(4096,), k=4096, dtype="bfloat16", residual=False, activation=None, norm=False
):
    """Calls a linear, and with few rows one of experts, in the table's configurations."""
    import torch

    from hf_turbo.ops import linear
    from hf_turbo.ops.norm_spec import RMSNorm

    dtype = getattr(torch, dtype)
    with recorded(capability, linear) as compiled, torch.device("meta"):
        x = torch.empty(rows, k, dtype=dtype)
        linear.linear(
            x,
            [torch.empty(size, k, dtype=dtype) for size in sizes],
            [torch.empty(size, dtype=dtype) for size in sizes],
            residual=torch.empty(rows, sizes[0], dtype=dtype) if residual else None,
            activation=activation,
            norm=RMSNorm(torch.empty(k, dtype=dtype), 1e-5) if norm else None,
        )
        if rows == 1:
            linear.expert_linear(x, torch.empty(8, *sizes[:1], k, dtype=dtype), torch.empty(1, dtype=torch.int64))
    return [kernel_facts(kernel) for kernel in compiled]


def compile_int4_case(
    capability, rows=1, sizes=(4096,), k=4096, dtype="bfloat16", bits=4, group_size=128, zeros=False, perm=False,
    bias=False, residual=False, activation=None, places=False,
):  # fmt: skip
    """Calls a linear of quantized weights in the table's configurations; with `perm` the norm before it, too."""
    import torch

    from hf_turbo.ops import int4_linear, norm, permute_columns
    from hf_turbo.ops.int4_layout import packed_shape
    from hf_turbo.ops.norm_spec import RMSNorm
    from hf_turbo.ops.packed_weight import PackedWeight

    assert int4_linear.USE_ASM
    dtype = getattr(torch, dtype)
    with recorded(capability, int4_linear, norm, permute_columns) as compiled, torch.device("meta"):
        x = torch.empty(rows, k, dtype=dtype)
        order = torch.empty(k, dtype=torch.int32) if perm else None
        if perm:
            norm.rms_norm(x, RMSNorm(torch.empty(k, dtype=dtype), 1e-6, False, True), perm=order)
        weights = [
            PackedWeight(
                torch.empty(packed_shape(size, k, bits), dtype=torch.int32),
                torch.empty(k // group_size, size, dtype=torch.float16),
                torch.empty(k // group_size, size, dtype=torch.uint8) if zeros else None,
                order,
                bits,
                group_size,
            )
            for size in sizes
        ]
        int4_linear.int4_linear(
            x,
            weights,
            [torch.empty(size, dtype=dtype) for size in sizes] if bias else None,
            residual=torch.empty(rows, sizes[0], dtype=dtype) if residual else None,
            activation=activation,
            places=torch.empty(sizes[0], dtype=torch.int32) if places else None,
        )
    return [kernel_facts(kernel) for kernel in compiled]


@contextmanager
def recorded(capability, *modules):
    """Launches compile for a device of this capability instead; gives the list of what they compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from hf_turbo.ops.attention_config import DeviceFacts

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
    for module in modules:
        module.device_facts = lambda device: facts
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch


def make_cache(q_len, num_kv_heads, dims, block_size, dtype, segments, window, num_seqs=4):
    """The blocks and the geometry of some sequences."""
    import torch

    from hf_turbo.ops.block_ids import MAX_SEGMENTS
    from hf_turbo.ops.metadata import AttentionMetadata, LayerKV

    max_seqlen_k = 8192
    pools = [
        tuple(torch.empty(1000, num_kv_heads, block_size, dim, dtype=dtype) for _ in range(segments)) for dim in dims
    ]
    kv = LayerKV(*pools, torch.empty(2, MAX_SEGMENTS, dtype=torch.int64), segments > 1)
    metadata = AttentionMetadata(
        block_tables=torch.empty(num_seqs, max_seqlen_k // block_size, dtype=torch.int32),
        seq_lens=torch.empty(num_seqs, dtype=torch.int32),
        cu_seqlens_q=torch.empty(num_seqs + 1, dtype=torch.int32),
        max_seqlen_q=q_len,
        max_seqlen_k=max_seqlen_k,
        sliding_window=window,
    )
    return kv, metadata


def assembly(cubin):
    """What a device executes, an instruction a line."""
    return dump(cubin, "-sass")


def dump(cubin, what):
    """What Triton's own cuobjdump tells of a kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = os.pathsep.join([str(tools), os.environ["PATH"]])  # it calls nvdisasm
        command = [str(tools / "cuobjdump"), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path}).stdout


def kernel_facts(kernel):
    usage = dump(kernel.asm["cubin"], "-res-usage")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    ptx = kernel.asm["ptx"]
    return {
        "name": kernel.metadata.name,
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "async_copies": [
            int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global\S* [^;]*?\], 0x(\w+)", ptx)
        ],
        "vector_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "waits": len(re.findall(r"griddepcontrol\.wait", ptx)),
        "tensor_core_ops": len(re.findall(TENSOR_CORE, ptx)),
        "exchanges_in_loop": [
            len(re.findall(r"(?:ld|st)\.shared|ldmatrix|stmatrix|shfl\.sync|bar(?:rier)?\.sync", body))
            for body in loops(ptx)
            if re.search(TENSOR_CORE, body)
        ],
    }


def loops(ptx):
    """The bodies of a kernel's loops: from a label to a branch back to it."""
    for label in re.finditer(r"^(\$\w+):", ptx, re.MULTILINE):
        back = re.compile(rf"\bbra(?:\.uni)?\s+{re.escape(label[1])};").search(ptx, label.end())
        if back:
            yield ptx[label.end() : back.start()]


def compile_apart(script, capability, *arguments):
    """What a script prints that compiles without the interpreter: by case the facts of its kernels, or the error."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, script, str(capability), *map(json.dumps, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@functools.cache
def compiled(capability):
    """What the tests below look at, compiled by one subprocess a device."""
    int4 = {name: INT4_CASES[name] for name in QUICK_INT4[capability]}
    cases = {name: CASES[name] for name in QUICK[capability]} | LAYER_CASES | LINEAR_CASES | int4
    return compile_apart(__file__, capability, cases)


def on_devices(quick):
    """`capability, name` of a test: all but the newest device's are slow."""
    return [
        pytest.param(capability, name, marks=[] if capability == NEWEST else pytest.mark.slow)
        for capability, names in quick.items()
        for name in names
    ]


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


@pytest.mark.parametrize("capability, name", on_devices(QUICK))
def test_compiles_without_spills(capability, name):
    names = check_kernels(compiled(capability)[name], capability, CASES[name])
    if name == "decode":
        assert names[2:] == ["_merge_splits_kernel"]


@pytest.mark.parametrize("capability, name", on_devices(dict.fromkeys(DEVICES, LAYER_CASES)))
def test_layer_compiles_without_spills(capability, name):
    facts = compiled(capability)[name]
    assert isinstance(facts, list), facts
    assert [kernel["name"] for kernel in facts] == ["_rms_norm_kernel", "_rotary_store_kv_kernel", "_gated_kernel"]
    for kernel in facts:
        assert kernel["stack"] <= STACK_BYTES, kernel
        assert kernel["vector_loads"], kernel
        assert kernel["waits"] == (capability >= 90), kernel


@pytest.mark.parametrize("capability, name", on_devices(dict.fromkeys(DEVICES, LINEAR_CASES)))
def test_linear_compiles_without_spills(capability, name):
    facts = compiled(capability)[name]
    assert isinstance(facts, list), facts
    for kernel in facts:
        assert kernel["stack"] <= STACK_BYTES, kernel
        assert kernel["shared"] <= DEVICES[capability][1], kernel
        assert kernel["waits"] == (capability >= 90), kernel
        if kernel["name"] in ("dot_kernel", "linear_ring_kernel"):
            assert "fp32" in name or (kernel["tensor_core_ops"] and set(kernel["async_copies"]) == {16}), kernel
        elif kernel["name"] != "add_splits_kernel":
            assert kernel["vector_loads"], kernel


def int4_kernels(case):
    """The kernels that a case takes, in their order."""
    kernel = next(name for most, name in INT4_KERNELS.items() if case.get("rows", 1) <= most)
    return [*(["_rms_norm_kernel", "_permute_columns_kernel"] if case.get("perm") else []), kernel]


@pytest.mark.parametrize("capability, name", on_devices(QUICK_INT4))
def test_int4_compiles_without_spills(capability, name):
    check_int4_kernels(compiled(capability)[name], capability, name)


def check_int4_kernels(facts, capability, name):
    wanted = int4_kernels(INT4_CASES[name])
    assert isinstance(facts, list), facts
    names = [kernel["name"] for kernel in facts]
    assert names in (wanted, [*wanted, "add_splits_kernel"])
    for kernel in facts:
        assert kernel["stack"] <= KNOWN_SPILLS.get(name, STACK_BYTES), kernel
        assert kernel["shared"] <= DEVICES[capability][1], kernel
        assert kernel["waits"] == (capability >= 90 and kernel["name"] != "int4_dequantize_kernel"), kernel
        if kernel["name"] in ("int4_rows_kernel", "int4_tiles_kernel"):
            assert kernel["tensor_core_ops"], kernel
            assert kernel["vector_loads"] or 16 in kernel["async_copies"], kernel  # the codes


@pytest.mark.parametrize("capability, name", on_devices(QUICK_INT4))
def test_int4_goes_from_memory_to_tensor_cores(capability, name):
    """With up to 16 rows each warp works by itself: the loop over columns has no shared memory and no shuffles."""
    for kernel in compiled(capability)[name]:
        if kernel["name"] == "int4_rows_kernel":
            wanted = [] if name == "int4-qkv-1" else [0]  # that one is done in two steps
            assert kernel["exchanges_in_loop"] == wanted, kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", DEVICES)
def test_sweep_compiles_without_spills(capability):
    for name, facts in compile_apart(__file__, capability, SLOW_CASES).items():
        check_kernels(facts, capability, SLOW_CASES[name])
    for name, facts in compile_apart(__file__, capability, INT4_CASES).items():
        check_int4_kernels(facts, capability, name)


if __name__ == "__main__":
    results = {}
    for case_name, case in json.loads(sys.argv[2]).items():
        try:
            compile_it = compile_case
            if case_name in LAYER_CASES:
                compile_it = compile_layer_case
            elif case_name in LINEAR_CASES:
                compile_it = compile_linear_case
            elif case_name in INT4_CASES:
                compile_it = compile_int4_case
            results[case_name] = compile_it(int(sys.argv[1]), **case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
