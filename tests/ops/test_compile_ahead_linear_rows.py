"""Compiles linears whose warps load straight into registers, for GPUs that need not be there, and reads the assembly.

Run as a script, this file is the subprocess that compiles.
"""

import json
import re
import sys

import pytest
import test_compile_ahead as ahead

# Name -> (rows, sizes, columns, activation, dtype, the dtype of the weight of a norm within), in the table's
# configuration; a residual where nothing else is.
CASES = {
    "qkv-16": (16, (576, 192, 192), 576, None, "bfloat16", None),
    "down-32": (32, (576,), 1536, None, "bfloat16", None),
    "gate-up-16": (16, (1536, 1536), 576, "silu", "bfloat16", None),
    "gate-up-32": (32, (1536, 1536), 576, "gelu_tanh", "float16", None),
    "most-columns": (2, (1536, 1536), 2048, "silu", "bfloat16", None),
    "most-weights": (9, (1024,), 2048, None, "float16", None),
    "most-rows": (32, (768,), 2048, None, "bfloat16", None),
    "qkv-norm-24": (24, (576, 192, 192), 576, None, "bfloat16", "bfloat16"),
    "gate-up-norm-16": (16, (1536, 1536), 576, "silu", "bfloat16", "bfloat16"),
    "gate-up-most-columns-norm-8": (8, (1536, 1536), 1024, "silu", "float16", "float32"),
    "gate-up-most-columns-norm-32": (32, (768, 768), 1024, "gelu", "bfloat16", "float32"),
}


def choose(capability, rows, sizes, k, activation, dtype, norm_dtype):
    import torch

    from hf_turbo.ops.attention_config import DeviceFacts
    from hf_turbo.ops.linear_config import choose_config

    num_sms, shared_memory = ahead.DEVICES[capability]
    features = sizes[0] if activation else sum(sizes)
    facts = DeviceFacts(num_sms, capability, shared_memory)
    gated, norm = activation is not None, norm_dtype is not None
    return choose_config(rows, features, k, gated, getattr(torch, dtype), facts, norm)


def compile_case(capability, rows, sizes, k, activation, dtype, norm_dtype):
    import torch

    from hf_turbo.ops import linear
    from hf_turbo.ops.norm_spec import RMSNorm

    dtype = getattr(torch, dtype)
    with ahead.recorded(capability, linear) as compiled, torch.device("meta"):
        linear.linear(
            torch.empty(rows, k, dtype=dtype),
            [torch.empty(size, k, dtype=dtype) for size in sizes],
            residual=torch.empty(rows, *sizes, dtype=dtype) if len(sizes) == 1 else None,
            activation=activation,
            norm=RMSNorm(torch.empty(k, dtype=getattr(torch, norm_dtype)), 1e-5) if norm_dtype else None,
        )
    (kernel,) = compiled
    return ahead.kernel_facts(kernel) | {"assembly": opcodes(kernel.asm["cubin"])}


def opcodes(cubin):
    """Those of loads, products and exchanges, in their order."""
    return re.findall(r"\b(LDG\.E\S*128|HMMA|LDS|LDSM|STS|STSM|SHFL|BAR)\b", ahead.assembly(cubin))


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), ahead.NEWEST])
def test_loads_then_products_then_one_exchange(capability):
    for name, facts in ahead.compile_apart(__file__, capability).items():
        assert isinstance(facts, dict), facts
        assert facts["name"] == "linear_rows_kernel"
        assert facts["stack"] <= ahead.STACK_BYTES, (name, facts)
        assert facts["waits"] == (capability >= 90), (name, facts)
        assembly = facts["assembly"]
        first = assembly.index("HMMA")
        rows, _, k, activation, _, norm_dtype = CASES[name]
        config = choose(capability, *CASES[name])
        slices = -(-k // (32 * config.num_warps))
        gated = 1 if activation is None else 2
        rows_each = 8 if config.weights_first else max(16, 1 << (rows - 1).bit_length())
        barrier = assembly.index("BAR")  # this is what holds them apart
        loads, between = assembly[:barrier], assembly[barrier + 1 : first]
        rows_loaded = config.block_n * gated + rows_each + {None: 0, "bfloat16": 8, "float32": 16}[norm_dtype]
        assert len(loads) == slices * rows_loaded // 8, (name, assembly)
        # A norm's sums meet there; x and weights are waited for once.
        assert between == [] if norm_dtype is None else set(between) == {"SHFL", "STS", "BAR", "LDS"}, (name, assembly)
        assert all(code.startswith("LDG") for code in loads), (name, assembly)
        last = len(assembly) - assembly[::-1].index("HMMA")
        assert set(assembly[first:last]) == {"HMMA"}, (name, assembly)
        # Warps meet once: all that follows is written, then read.
        assert re.fullmatch("(BAR )?(STS )+BAR( LDS)+", " ".join(assembly[last:])), (name, assembly)


if __name__ == "__main__":
    results = {}
    for case_name, case in CASES.items():
        try:
            results[case_name] = compile_case(int(sys.argv[1]), *case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
