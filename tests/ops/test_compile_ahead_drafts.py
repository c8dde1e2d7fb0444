"""Compiles what follows a verified draft for GPUs that need not be there, as `test_compile_ahead` does the others.

Run as a script, this file is the subprocess that compiles.
"""

import json
import sys

import pytest
import test_compile_ahead as ahead

# Name -> keywords of `compile_case`.
CASES = {
    "chain-5": {"nodes": 5, "steps": 5, "columns": 50257, "num": 4},
    "16-nodes": {"nodes": 16, "steps": 5, "columns": 49152, "num": 8, "size": 576},
    "64-nodes": {"nodes": 64, "steps": 6, "columns": 128256, "num": 10, "size": 4096},
    "chain-64-fp32": {"nodes": 64, "steps": 64, "columns": 262144, "num": 16, "size": 960, "dtype": "float32"},
}
KERNELS = ["_chunk_argmax_kernel", "_accept_round_kernel", "_chunk_ranks_kernel", "_place_ranks_kernel"]
# Name -> keywords of `compile_block`.
BLOCKS = {
    "smollm2-1": {"rows": 1, "heads": 4, "size": 576, "own_rows": True},
    "smollm2-8": {"rows": 8, "heads": 5, "size": 576, "own_rows": True},
    "llama-1": {"rows": 1, "heads": 5, "size": 4096},
    "llama-64": {"rows": 64, "heads": 5, "size": 4096},
    "odd-8": {"rows": 8, "heads": 3, "size": 8200, "own_rows": True, "dtype": "float16"},
}


def compile_case(capability, nodes, steps, columns, num, size=None, dtype="bfloat16"):
    """Four rows' verdicts and next guesses; returns the facts of the kernels."""
    import torch

    from hf_turbo.ops import accept_round, argmax, tree_tokens

    with ahead.recorded(capability, accept_round, argmax, tree_tokens) as compiled, torch.device("meta"):
        tokens, table = (torch.empty(*shape, dtype=torch.int64) for shape in ((4, nodes), (nodes, steps)))
        node = torch.empty(nodes, dtype=torch.int64)
        seq_lens = torch.empty(4, dtype=torch.int32)
        dtype = getattr(torch, dtype)
        tree = node, table, table, node, node
        after = accept_round.accept_round(
            torch.empty(4 * nodes, columns, dtype=dtype), tokens, torch.empty(1, 4, nodes, dtype=torch.int64), seq_lens,
            node[:1], *tree, None if size is None else torch.empty(4 * nodes, size, dtype=dtype), nodes,
        )  # fmt: skip
        following = after.result[:, steps + 2 :]
        logits = torch.empty(4, 3, columns, dtype=dtype)
        tree_tokens.tree_tokens(logits, following[:, 0], node, node, num, (following, tokens))
    return [ahead.kernel_facts(kernel) for kernel in compiled]


def compile_block(capability, rows, heads, size, own_rows=False, dtype="bfloat16"):
    """One block of several heads; returns the facts of its kernel."""
    import torch

    from hf_turbo.ops import head_block

    dtype = getattr(torch, dtype)
    with ahead.recorded(capability, head_block) as compiled, torch.device("meta"):
        x = torch.empty(*((rows, heads, size) if own_rows else (rows, size)), dtype=dtype)
        head_block.head_block(x, torch.empty(heads, size, size, dtype=dtype), torch.empty(heads, size, dtype=dtype))
    return [ahead.kernel_facts(kernel) for kernel in compiled]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), ahead.NEWEST])
def test_compiles_without_spills(capability):
    for name, facts in ahead.compile_apart(__file__, capability).items():
        assert isinstance(facts, list), (name, facts)
        for kernel in facts:
            assert kernel["stack"] <= ahead.STACK_BYTES, (name, kernel)
            assert kernel["shared"] <= ahead.DEVICES[capability][1], (name, kernel)
            assert kernel["waits"] == (capability >= 90), (name, kernel)
        if name in CASES:
            assert [kernel["name"] for kernel in facts] == KERNELS
            if CASES[name]["columns"] % 16 == 0:
                assert facts[0]["vector_loads"] and facts[2]["vector_loads"], (name, facts)
        else:
            [kernel] = facts
            is_one_row = BLOCKS[name]["rows"] == 1
            assert kernel["name"] == ("_one_row_kernel" if is_one_row else "_few_rows_kernel")
            assert (kernel["tensor_core_ops"] == 0) == is_one_row
            assert kernel["vector_loads"] or {*kernel["async_copies"]} == {16}, kernel


if __name__ == "__main__":
    results = {}
    for compiler, cases in ((compile_case, CASES), (compile_block, BLOCKS)):
        for case_name, case in cases.items():
            try:
                results[case_name] = compiler(int(sys.argv[1]), **case)
            except Exception as error:  # reported as that case's failure
                results[case_name] = repr(error)
    print(json.dumps(results))
