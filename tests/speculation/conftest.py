"""Blocks that nobody holds say NaN at every moment of these tests."""

import sys
from pathlib import Path

import pytest
from helpers import poison_what_is_freed

# Small checkpoints are written by what the tests of quantization have for it.
sys.path.append(str(Path(__file__).parents[1] / "quantization"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every block that is given back is filled with NaN, codes with 0xFF."""
    poison_what_is_freed(monkeypatch)
