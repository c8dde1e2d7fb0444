"""What Transformers' `ContinuousBatchingConfig` comes to, and what of it is refused."""

from dataclasses import fields
from unittest.mock import patch

import pytest
from helpers import build
from transformers import ContinuousBatchingConfig

import hf_turbo
from hf_turbo.engine import limits as limits_module
from hf_turbo.engine.limits import TAKEN, WITHOUT_MEANING, EngineLimits, limits_of
from hf_turbo.patching import handle_of


@pytest.fixture(scope="module")
def handle():
    return handle_of(hf_turbo.patch(build("llama")))


def test_every_field_of_transformers_config_is_decided_on():
    assert {field.name for field in fields(ContinuousBatchingConfig)} <= TAKEN | WITHOUT_MEANING.keys()
    assert not TAKEN & WITHOUT_MEANING.keys()


def test_limits_are_what_the_config_says(handle):
    assert limits_of(ContinuousBatchingConfig(), handle, "cpu") == EngineLimits()
    assert limits_of(ContinuousBatchingConfig(), handle, "cuda").max_chunk == 192
    assert limits_of(ContinuousBatchingConfig(), handle, "cuda", reads_along=False).max_chunk is None
    config = ContinuousBatchingConfig(
        max_batch_tokens=64, max_requests_per_batch=8, num_blocks=3, max_memory_percent=0.5, use_async_batching=False,
        seed=3, return_logprobs=True, allow_block_sharing=False,
    )  # fmt: skip
    assert handle.pool.block_size == 16  # Transformers' hold 256 tokens
    assert limits_of(config, handle, "cpu") == EngineLimits(64, None, 8, 48, 0.5, False, 3, True, False)
    assert limits_of(ContinuousBatchingConfig(max_batch_tokens=10), handle, "cpu").max_rows == 10


def test_limits_say_no(handle, caplog):
    for error, match, options in (
        (NotImplementedError, "cpu_offload_space", dict(cpu_offload_space=1.0)),
        (NotImplementedError, "cpu_offload_space", dict(cpu_offload_space=None)),
        (ValueError, "scheduler_type", dict(scheduler_type="best")),
        (ValueError, "max_memory_percent", dict(max_memory_percent=1.5)),
        (ValueError, "max_tokens", dict(max_batch_tokens=-1)),
    ):
        with pytest.raises(error, match=match):
            limits_of(ContinuousBatchingConfig(**options), handle, "cpu")
    with pytest.raises(ValueError, match="max_rows"):
        EngineLimits(max_tokens=4, max_rows=5)
    with patch.dict(limits_module.WITHOUT_MEANING):
        del limits_module.WITHOUT_MEANING["safety_margin"]  # as if a new release had it
        with pytest.raises(NotImplementedError, match="safety_margin"):
            limits_of(ContinuousBatchingConfig(safety_margin=0.2), handle, "cpu")
    limits_module._say_once.cache_clear()
    for _ in range(2):
        limits_of(ContinuousBatchingConfig(q_padding_interval_size=64), handle, "cpu")
    assert caplog.text.count("q_padding_interval_size") == 1
