"""`EngineLimits`: how much an engine does at once, and what Transformers' `ContinuousBatchingConfig` says of it."""

from __future__ import annotations

import logging
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

from ..handle import PatchHandle

logger = logging.getLogger("hf_turbo")

#: Prompt tokens beside decoding rows on a GPU: more of them make the others' next token late. With 192 the late chunks
#: of a prompt of 8k take about twice a step's time without one.
_CHUNK_ON_GPU = 192

_MAX_TOKENS, _MAX_ROWS, _MEMORY = 2048, 256, 0.9

#: The orders that Transformers knows. Both are served in the engine's own, which lets no text wait for a prompt.
_ORDERS = ("fifo", "prefill_first")

#: Fields of `ContinuousBatchingConfig` that an engine takes at their word.
TAKEN = frozenset(
    ("num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch", "allow_block_sharing",
     "use_async_batching", "scheduler_type", "return_logprobs", "seed", "cpu_offload_space", "max_queue_size")
)  # fmt: skip

#: Fields without a meaning here, and what there is instead. No text depends on any of them.
WITHOUT_MEANING = {
    "block_size": "patch(model, block_size=...) says how many tokens a block holds",
    "page_size": "patch(model, block_size=...) says how many tokens a block holds",
    "max_blocks_per_request": "a request may have all blocks",
    "use_cuda_graph": "patch(model, cuda_graphs=...) decides",
    "q_padding_interval_size": "captured steps have sizes of their own",
    "kv_padding_interval_size": "captured steps serve every length",
    "varlen_compile_config": "nothing is compiled",
    "decode_compile_config": "nothing is compiled",
    "default_compile_level": "nothing is compiled",
    "use_default_compile_configs": "nothing is compiled",
    "max_cached_graphs": "captured steps are few",
    "safety_margin": "requests are admitted when what they need is free",
    "cpu_offload_space_safety_threshold": "nothing is moved to the host's memory",
    "per_request_processors": "every request has processors of its own",
    "drop_unsupported_processors": "no processor is dropped",
    "disable_nccl_graph_mixing": "there is one process",
    "cpu_group_timeout": "there is one process",
    "auto_switch_to_flash": "the attention is hf_turbo's",
}


@dataclass(frozen=True)
class EngineLimits:
    """How much an engine does at once.

    Args:
        max_tokens: that one step computes.
        max_chunk: prompt tokens of a step in which other texts go on; None without such a limit.
        max_rows: sequences under way.
        num_blocks: of the cache, for each group of layers; None: what `max_memory_percent` has room for.
        max_memory_percent: of the memory that is free when the engine starts, as a fraction.
        goes_ahead: whether the host may launch a step before it has read the last one's tokens; None: on a GPU.
        seed: of the requests that bring none; None: another one every time.
        return_logprobs: whether each token's log probability is kept.
        prefix_cache: whether prompts that begin alike share blocks.

    Raises:
        ValueError: a value that is not allowed.
    """

    max_tokens: int = _MAX_TOKENS
    max_chunk: int | None = None
    max_rows: int = _MAX_ROWS
    num_blocks: int | None = None
    max_memory_percent: float = _MEMORY
    goes_ahead: bool | None = None
    seed: int | None = None
    return_logprobs: bool = False
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_rows"):
            _check_count(name, getattr(self, name))
        for name in ("max_chunk", "num_blocks"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.max_rows > self.max_tokens:
            raise ValueError(f"max_rows={self.max_rows}: each needs one of the {self.max_tokens} tokens of a step")
        if not 0 < self.max_memory_percent <= 1:
            raise ValueError(f"max_memory_percent={self.max_memory_percent!r}: a fraction, more than 0 and at most 1")


def limits_of(config: Any, handle: PatchHandle, device_type: str, reads_along: bool = True) -> EngineLimits:
    """What a `ContinuousBatchingConfig` asks for. Fields without a meaning here are named once in the log.

    Args:
        config: Transformers'. Its blocks hold `block_size` (`page_size`) tokens each, ours what `patch` was told:
            `num_blocks` becomes the number of ours with room for as many tokens.
        handle: of the patched model.
        device_type: of the device that the model is on.
        reads_along: somebody may read texts as they come: no prompt is to make their next tokens late.

    Raises:
        ValueError: a value that is not allowed.
        NotImplementedError: a field that asks for what there is not, or that nothing is known of.
    """
    _refuse(config)
    for name, instead in WITHOUT_MEANING.items():
        if _is_set(config, name):
            _say_once(f"ContinuousBatchingConfig.{name} has no meaning on a patched model: {instead}")
    if config.scheduler_type == "prefill_first":
        _say_once("scheduler_type='prefill_first': texts under way go first all the same, prompts beside them")
    max_tokens = config.max_batch_tokens or _MAX_TOKENS
    tokens_of_a_block = getattr(config, "page_size", None) or config.block_size
    num_blocks = config.num_blocks and -(-config.num_blocks * tokens_of_a_block // handle.pool.block_size)
    return EngineLimits(
        max_tokens=max_tokens,
        max_chunk=_CHUNK_ON_GPU if device_type == "cuda" and reads_along else None,
        max_rows=min(config.max_requests_per_batch or _MAX_ROWS, max_tokens),
        num_blocks=num_blocks,
        max_memory_percent=_MEMORY if config.max_memory_percent is None else config.max_memory_percent,
        goes_ahead=config.use_async_batching,
        seed=config.seed,
        return_logprobs=config.return_logprobs,
        prefix_cache=config.allow_block_sharing,
    )


def _refuse(config: Any) -> None:
    if config.cpu_offload_space != 0:
        raise NotImplementedError(
            f"cpu_offload_space={config.cpu_offload_space!r}: a request that has to give way is computed again, not "
            "moved to the host's memory; leave it at 0"
        )
    if config.scheduler_type not in _ORDERS:
        raise ValueError(f"scheduler_type={config.scheduler_type!r}: one of {', '.join(_ORDERS)}")
    unknown = [f.name for f in fields(config) if f.name not in TAKEN and f.name not in WITHOUT_MEANING]
    if asked_for := [name for name in unknown if _is_set(config, name)]:
        raise NotImplementedError(f"ContinuousBatchingConfig.{', '.join(asked_for)}: not known here; leave it out")


def _is_set(config: Any, name: str) -> bool:
    """Whether a field of a dataclass has another value than it has by default."""
    for field in fields(config):
        if field.name == name and field.default is not MISSING:
            return getattr(config, name) != field.default
    return False


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: a whole number of at least 1")


@cache
def _say_once(text: str) -> None:
    logger.warning("%s", text)
