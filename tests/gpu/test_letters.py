"""Small tensors on their way to the host."""

import pytest
import torch
from graph_cases import GPU

from hf_turbo.generation.readback import Letter

pytestmark = GPU


@pytest.mark.parametrize("sizes", [(5, 3, 9, 9, 1), (1, 2, 3, 4, 300, 2)], ids=str)
def test_letters_of_changing_sizes(sizes):
    """One letter's memory serves them all; what is read is the newest."""
    letter, memory = Letter(), set()
    for i, size in enumerate(sizes):
        tokens = torch.arange(size, device="cuda") + 1000 * i
        scores = None if i % 2 else torch.rand(size, 2, device="cuda")
        got = letter.send(tokens, scores).open()
        assert torch.equal(got[0], tokens.cpu()) and got[0].is_pinned()
        assert got[1] is None if scores is None else torch.equal(got[1], scores.cpu())
        memory.add(got[0].data_ptr())
    assert len(memory) < len(set(sizes))


def test_letters_of_changing_dtypes():
    """Of the same shape each time: nothing is made another dtype of on the way."""
    letter = Letter()
    for dtype in (torch.bool, torch.float32, torch.int64):
        x = torch.tensor([0, 3], device="cuda").to(dtype)
        [got] = letter.send(x).open()
        assert got.dtype == dtype and torch.equal(got, x.cpu())
