"""Compiles what follows a verified draft for GPUs that need not be there, as `test_compile_ahead` does the others.

Run as a script, this file is the subprocess that compiles.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_compile_ahead as ahead

# Name -> keywords of `compile_case`.
CASES = {
    "chain-5": {"nodes": 5, "steps": 5, "columns": 50257, "num": 4},
    "64-nodes": {"nodes": 64, "steps": 6, "columns": 128256, "num": 10},
    "chain-64-fp32": {"nodes": 64, "steps": 64, "columns": 262144, "num": 16, "dtype": "float32"},
}
KERNELS = ["_accept_drafts_kernel", "_chunk_ranks_kernel", "_merge_ranks_kernel"]


def compile_case(capability, nodes, steps, columns, num, dtype="bfloat16"):
    """Four rows' verdicts and next guesses; returns the facts of the kernels."""
    import torch

    from hf_turbo.ops import accept_drafts, top_ranks

    with ahead.recorded(capability, accept_drafts, top_ranks) as compiled, torch.device("meta"):
        tokens, table = (torch.empty(*shape, dtype=torch.int64) for shape in ((4, nodes), (nodes, steps)))
        node = torch.empty(nodes, dtype=torch.int64)
        seq_lens = torch.empty(4, dtype=torch.int32)
        accept_drafts.accept_drafts(tokens, tokens, seq_lens, node, table, table, node, node)
        top_ranks.top_ranks(torch.empty(4, columns, dtype=getattr(torch, dtype)), num)
    return [ahead.kernel_facts(kernel) for kernel in compiled]


def compile_all(capability):
    """Compiles the cases in a subprocess; name -> facts of its kernels, or the error."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, __file__, str(capability)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), ahead.NEWEST])
def test_compiles_without_spills(capability):
    for name, facts in compile_all(capability).items():
        assert isinstance(facts, list), facts
        assert [kernel["name"] for kernel in facts] == KERNELS
        for kernel in facts:
            assert kernel["stack"] <= ahead.STACK_BYTES, (name, kernel)
            assert kernel["shared"] <= ahead.DEVICES[capability][1], (name, kernel)
            assert kernel["waits"] == (capability >= 90), (name, kernel)
        if CASES[name]["columns"] % 16 == 0:
            assert facts[1]["vector_loads"], (name, facts[1])


if __name__ == "__main__":
    results = {}
    for case_name, case in CASES.items():
        try:
            results[case_name] = compile_case(int(sys.argv[1]), **case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
