"""What the tests of quantization share."""

import pytest
from transformers.utils import logging

from hf_turbo.quantization.registry import int4_registered


@pytest.fixture
def registered():
    """All methods are this package's, whatever is installed."""
    with int4_registered():
        yield


@pytest.fixture(autouse=True)
def no_progress_bars():
    logging.disable_progress_bar()
