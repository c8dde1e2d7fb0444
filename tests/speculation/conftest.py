"""Blocks that nobody holds say NaN at every moment of these tests."""

import sys
from pathlib import Path

import pytest

from hf_turbo.cache.block_table import BlockTable
from hf_turbo.cache.coded_group import CodeStore

# Small checkpoints are written by what the tests of quantization have for it.
sys.path.append(str(Path(__file__).parents[1] / "quantization"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every block that is given back is filled with NaN, codes with 0xFF."""

    def poison(method):
        def poisoning(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            holds_codes = any(isinstance(store, CodeStore) for store in self.group.stores.values())
            self.group.fill(0xFF if holds_codes else float("nan"))
            return result

        return poisoning

    for name in ("grow", "truncate", "select"):
        monkeypatch.setattr(BlockTable, name, poison(getattr(BlockTable, name)))
