"""What the tests of managers share."""

import pytest
from helpers import build

import hf_turbo


@pytest.fixture(scope="module")
def shared():
    return hf_turbo.patch(build("llama"))


@pytest.fixture
def model(shared):
    """A patched model; a manager that a test has kept goes with the test."""
    yield shared
    shared.destroy_cached_continuous_batching_manager()
