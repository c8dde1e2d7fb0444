"""Compiles lookups in a text for GPUs that need not be there, as `test_compile_ahead` does the others.

Run as a script, this file is the subprocess that compiles.
"""

import json
import sys

import pytest
import test_compile_ahead as ahead

# Name -> keywords of `compile_case`.
CASES = {
    "plain": {"depth": 0, "room": 2048, "num_tokens": 15},
    "15 drafted": {"depth": 15, "room": 32768, "num_tokens": 15},
    "63 drafted": {"depth": 63, "room": 1 << 20, "num_tokens": 63},
}


def compile_case(capability, depth, room, num_tokens):
    """Eight rows' texts after a chain; returns the facts of the kernels."""
    import torch

    from hf_turbo.ops import repeat_text

    with ahead.recorded(capability, repeat_text) as compiled, torch.device("meta"):
        text, lengths = torch.empty(8, room, dtype=torch.int32), torch.empty(8, dtype=torch.int64)
        result, draft = (torch.empty(8, n, dtype=torch.int64) for n in (depth + 5 + num_tokens, depth + 1))
        outcome = torch.empty(8, depth + 2, dtype=torch.int64)
        repeat_text.repeat_text(text, outcome, lengths, num_tokens, 1, (result[:, depth + 3 :], draft))
        columns = torch.empty(num_tokens, dtype=torch.int64)
        repeat_text.lay_repeats(text, outcome, lengths, columns, 2, (result, draft))
        repeat_text.lay_repeats(text, outcome, lengths, columns, 2, ())
    return [ahead.kernel_facts(kernel) for kernel in compiled]


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), ahead.NEWEST])
def test_compiles_without_spills(capability):
    for name, facts in ahead.compile_apart(__file__, capability).items():
        assert isinstance(facts, list), facts
        names = ["_match_text_kernel", "_go_on_kernel", "_match_text_kernel", "_lay_over_kernel", "_lay_over_kernel"]
        assert [kernel["name"] for kernel in facts] == names
        for kernel in facts:
            assert kernel["stack"] <= ahead.STACK_BYTES, (name, kernel)
            assert kernel["shared"] <= ahead.DEVICES[capability][1], (name, kernel)
            assert kernel["waits"] == (capability >= 90), (name, kernel)


if __name__ == "__main__":
    results = {}
    for case_name, case in CASES.items():
        try:
            results[case_name] = compile_case(int(sys.argv[1]), **case)
        except Exception as error:  # reported as that case's failure
            results[case_name] = repr(error)
    print(json.dumps(results))
