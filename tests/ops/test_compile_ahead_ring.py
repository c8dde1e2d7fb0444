"""Compiles the ring of linears for a GPU that need not be there, and reads in the assembly what its stages rely on.

Run as a script, this file is the subprocess that compiles.
"""

import json
import re

import test_compile_ahead as ahead

# Name -> (rows, sizes, columns, activation, dtype), in the table's configuration: each of the table's with the most
# stages, and short rows, which have as many stages as steps. A residual where nothing else is.
CASES = {
    "gate-up-8": (8, (14336, 14336), 4096, "silu", "bfloat16"),
    "gate-up-16": (16, (14336, 14336), 4096, "silu", "bfloat16"),
    "gate-up-32": (32, (14336, 14336), 4096, "gelu_tanh", "float16"),
    "gate-up-64": (64, (14336, 14336), 4096, "silu", "bfloat16"),
    "gate-up-8-two-steps": (8, (14336, 14336), 256, "silu", "bfloat16"),
    "head-8": (8, (128256,), 4096, None, "bfloat16"),
    "head-16": (16, (128256,), 4096, None, "bfloat16"),
    "head-32-two-steps": (32, (128256,), 256, None, "bfloat16"),
    "head-64": (64, (128256,), 4096, None, "bfloat16"),
    "qkv-8-wide": (8, (4096, 1024, 1024), 4096, None, "bfloat16"),
    "qkv-32-wide": (32, (4096, 1024, 1024), 4096, None, "bfloat16"),
    "qkv-64-wide": (64, (4096, 1024, 1024), 4096, None, "bfloat16"),
    "o-8": (8, (4096,), 4096, None, "bfloat16"),
    "o-16": (16, (4096,), 4096, None, "float16"),
    "o-32": (32, (4096,), 4096, None, "bfloat16"),
    "qkv-16-two-steps": (16, (2048, 1024, 1024), 1024, None, "bfloat16"),
    "down-8": (8, (4096,), 14336, None, "bfloat16"),
    "down-16": (16, (4096,), 14336, None, "bfloat16"),
    "down-32": (32, (4096,), 14336, None, "bfloat16"),
    "down-64": (64, (4096,), 14336, None, "bfloat16"),
}
#: What is read of the assembly: all that touches memory that is shared or waits for it.
OPCODES = r"ACQBULK|LDGSTS|LDG|LDSM|HGMMA|HMMA|BAR|FENCE|WARPGROUP\.DEPBAR|DEPBAR\.LE SB0, 0x\w+|STG"


def choose(rows, sizes, k, activation, dtype):
    import torch

    from hf_turbo.ops.attention_config import DeviceFacts
    from hf_turbo.ops.linear_config import choose_config

    num_sms, shared_memory = ahead.DEVICES[90]
    features = sizes[0] if activation else sum(sizes)
    facts = DeviceFacts(num_sms, 90, shared_memory)
    return choose_config(rows, features, k, activation is not None, getattr(torch, dtype), facts, rings=True)


def compile_case(rows, sizes, k, activation, dtype):
    import torch

    from hf_turbo.ops import linear

    dtype = getattr(torch, dtype)
    with ahead.recorded(90, linear) as compiled, torch.device("meta"):
        linear.linear(
            torch.empty(rows, k, dtype=dtype),
            [torch.empty(size, k, dtype=dtype) for size in sizes],
            residual=torch.empty(rows, *sizes, dtype=dtype) if len(sizes) == 1 else None,
            activation=activation,
        )
    return ahead.kernel_facts(compiled[0]) | {"assembly": assembly(compiled[0].asm["cubin"])}


def assembly(cubin):
    """The instructions of `OPCODES`, in their order, but those that are never executed."""
    lines = [line for line in ahead.assembly(cubin).splitlines() if "@!PT" not in line]
    return re.findall(rf"\b({OPCODES})\b", "\n".join(lines))


def check_before_x(code, config, activation):
    """What is read before the kernel before has ended: weights of all stages but one, and nothing else."""
    each = config.block_n * config.block_k * (1 if activation is None else 2) // (8 * 32 * config.num_warps)
    before = code[: code.index("ACQBULK")]
    assert before.count("LDGSTS") == each * (config.num_stages - 1)
    assert "LDG" not in before and "STG" not in before  # a residual, and results where others may still read


def check_steps(code, num_stages):
    """Each step waits for its own stage, then for the other warps, and only then overwrites the stage before."""
    waits = [i for i, op in enumerate(code) if op.startswith("DEPBAR")]
    assert waits and {int(code[i].split("0x")[1], 16) for i in waits} == {num_stages - 2}
    assert not {"LDSM", "HMMA", "HGMMA"} & set(code[: waits[0]])
    for start, end in zip(waits, [*waits[1:], len(code)], strict=True):
        step = code[start + 1 : end]
        assert step[0] == "BAR", step
        if "HGMMA" in step:
            # Copies become visible to products of a warp group, which have been waited for when the step ends.
            assert "FENCE" in step[: step.index("HGMMA")], step
            last = len(step) - 1 - step[::-1].index("HGMMA")
            assert step[last + 1] == "WARPGROUP.DEPBAR", step
        else:
            assert "HMMA" in step, step


def test_stages_are_waited_for():
    seen = set()
    for name, facts in ahead.compile_apart(__file__, 90).items():
        assert isinstance(facts, dict), (name, facts)
        rows, _, _, activation, _ = CASES[name]
        config = choose(*CASES[name])
        seen.add((config.block_n, config.num_stages, config.split_k, rows, activation is None))
        assert facts["name"] == "linear_ring_kernel", name
        assert facts["stack"] <= ahead.STACK_BYTES and facts["shared"] <= ahead.DEVICES[90][1], (name, facts)
        assert set(facts["async_copies"]) == {16} and facts["waits"] == 1, (name, facts)
        check_before_x(facts["assembly"], config, activation)
        check_steps(facts["assembly"], config.num_stages)
    assert len(seen) == len(CASES)  # no configuration twice


if __name__ == "__main__":
    results = {}
    for case_name, case in CASES.items():
        try:
            results[case_name] = compile_case(*case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
