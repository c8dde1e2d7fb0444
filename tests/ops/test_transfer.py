"""What goes from the host to a device."""

import pytest
import torch

from hf_turbo.ops.transfer import ints_to_device


@pytest.mark.parametrize("numbers", [[], [7], (3, -1, 2**40), range(5)])
def test_whole_numbers_arrive_in_memory_that_may_be_written_to(numbers):
    there = ints_to_device(numbers, torch.device("cpu"))
    assert there.dtype == torch.int64 and there.shape == (len(numbers),)
    assert there.tolist() == list(numbers)
    there.fill_(4)
    assert there.tolist() == [4] * len(numbers)
