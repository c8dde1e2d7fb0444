"""What all tests share: Triton's interpreter, one thread, fixed seeds, and the modules beside this file by name."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter. Triton decides that as it is imported, which the first
# test module that imports Transformers may do, so it is said here.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def poison_pool():
    """Fills every block that nobody owns with NaN, so that a read of an unwritten slot spoils the text."""
    from helpers import fill_free_blocks  # found once the path above is set

    return lambda model: fill_free_blocks(model, float("nan"))
