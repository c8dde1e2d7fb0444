"""What all tests share: one thread, fixed seeds, and the modules beside this file under their own names."""

import sys
from pathlib import Path

import pytest
import torch

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
