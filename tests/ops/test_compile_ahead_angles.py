"""Compiles rotary angles and embeddings for GPUs that need not be there, as `test_compile_ahead` does the others.

Run as a script, this file is the subprocess that compiles.
"""

import json
import re
import sys

import pytest
import test_compile_ahead as ahead

# Name -> keywords of `compile_case`.
CASES = {
    "a row of a small model": {"rows": 1, "size": 32, "columns": 576, "join": "halves"},
    "16 rows": {"rows": 16, "size": 64, "columns": 4096, "join": "neighbours"},
    "fp32": {"rows": 3, "size": 40, "columns": 2560, "join": "alone", "dtype": "float32"},
}
#: The reduction of large angles keeps them in memory of the thread's, as torch's cosine does.
ANGLES_STACK = 32


def compile_case(capability, rows, size, columns, join, dtype="bfloat16"):
    """The facts of both kernels, with what of their code says how they compute."""
    import torch

    from hf_turbo.ops import angles, embedding

    dtype = getattr(torch, dtype)
    with ahead.recorded(capability, angles, embedding) as compiled, torch.device("meta"):
        ids = torch.empty(rows, 1, dtype=torch.int64)
        angles.rotary_angles(torch.empty(1, size).expand(rows, -1), ids, join=join, scale=1.0, dtype=dtype)
        embedding.embedding(torch.empty(32000, columns, dtype=dtype), ids)
    return [ahead.kernel_facts(kernel) | how_it_computes(kernel.asm["ptx"]) for kernel in compiled]


def how_it_computes(ptx):
    return {"approximate": re.findall(r"(?:sin|cos)\.approx", ptx), "asserts": "__assertfail" in ptx}


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), ahead.NEWEST])
def test_compiles_as_meant(capability):
    for name, facts in ahead.compile_apart(__file__, capability).items():
        assert isinstance(facts, list), facts
        angles, embedding = facts
        assert [kernel["name"] for kernel in facts] == ["_angles_kernel", "_embedding_kernel"]
        assert angles["stack"] <= ANGLES_STACK and not angles["approximate"], (name, angles)
        assert embedding["stack"] <= ahead.STACK_BYTES and embedding["vector_loads"], (name, embedding)
        assert embedding["asserts"], (name, embedding)
        assert angles["waits"] == (capability >= 90) and not embedding["waits"], (name, facts)


if __name__ == "__main__":
    results = {}
    for case_name, case in CASES.items():
        try:
            results[case_name] = compile_case(int(sys.argv[1]), **case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
