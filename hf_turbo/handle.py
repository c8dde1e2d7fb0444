"""`PatchHandle`: what belongs to one patched instance."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .cache.block_pool import BlockPool
from .cache.paged_cache import PagedCache
from .config import TurboConfig
from .modeling.attention import AttentionName
from .modeling.graphs import StepGraphs
from .modeling.model_version import ModelVersion, numeric_settings
from .quantization.take_over import TakenOver

#: Of the memory of a device, what `prefix_cache=True` keeps for blocks that nothing uses.
_CACHED_SHARE = 10
#: Tokens that a row gets room for at most: who asks for a million new tokens seldom means it.
_MAX_ROOM = 8192

logger = logging.getLogger("hf_turbo")


class PatchHandle:
    """One patched instance's options, its blocks, what to undo, and what stepped aside.

    Args:
        config: the options.
        device_type: of the device that the model is on.
    """

    def __init__(self, config: TurboConfig, device_type: str) -> None:
        self.config = config
        limit = _cache_limit(config.prefix_cache, device_type)
        self.pool = BlockPool(config.block_size_on(device_type), config.kv_cache_dtype, cache_limit=limit)
        self.version = ModelVersion()
        self.stepped_aside: Counter[str] = Counter()
        self.num_caches = 0
        #: Why the whole model steps aside; None where it is accelerated.
        self.model_reason: str | None = None
        #: Per layer, how many tokens a query sees; None for all.
        self.sliding_windows: list[int | None] = []
        self.attention: AttentionName | None = None
        self.decoder_config: PreTrainedConfig | None = None
        #: (module, attribute, value before): what `unpatch` puts back, newest last.
        self.undo: list[tuple[nn.Module, str, Any]] = []
        #: (original, the model's copy, the copy's attributes as it was made): what was set since goes to the original.
        self.configs: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = []
        #: Quantized linears of other libraries that ours stand in for.
        self.taken_over = TakenOver()
        self.steps = StepGraphs(self)
        #: The `Paced` drafter that proposes tokens at every call; None where that is not asked for.
        self.speculation: Any = None
        #: By what was asked for: a `Paced` drafter.
        self.drafters: dict[str, Any] = {}
        #: Whether drafts have been verified with this model; and by kinds of calls, why they can't be.
        self.drafts_work = False
        self.no_drafts: dict[Any, str] = {}
        #: Whether a forward has been shared by rows that bring different numbers of tokens.
        self.packs_rows = False
        #: Makes a context in which another model is patched; see `patching.Borrowed`.
        self.borrow: Any = None
        #: The manager of many requests that was kept for the next session; see `engine.manager`.
        self.manager: Any = None
        #: A `PromptFacts`, once there was a prompt.
        self.prompt_facts: Any = None
        #: Whether long prompts go through the fused forward: not where that has failed.
        self.fuses_prompts = config.fused_layers

    def new_cache(self, copies_per_row: int = 1, expected_length: int = 0) -> PagedCache:
        """An empty cache on this model's pool.

        Args:
            copies_per_row: so many neighbouring rows of the first prompt are equal.
            expected_length: tokens a row may come to.
        """
        self.num_caches += 1
        return PagedCache(self.pool, self.sliding_windows, copies_per_row, min(expected_length, _MAX_ROOM))

    def prefix_domain(self, model: nn.Module, salt: str = "", waits: bool = True) -> bytes | None:
        """All that a text's keys and values depend on beside its tokens. Looks at every weight: not for every step.

        Args:
            model: the patched instance.
            salt: texts share blocks only with those of the same one.
            waits: for the device; False: as of `ModelVersion.of`.

        Returns:
            None: no blocks are kept for other texts, or it can't be told what this model's depend on.
        """
        if not self.pool.index.is_on or self.model_reason:
            return None
        version, reason = self.version.of(model, waits)
        if reason is not None:
            self.step_aside(f"the prefix cache is not used: {reason}")
            return None
        return repr((version, salt, sorted(self.pool.formats.items()), numeric_settings())).encode()

    def attention_is_ours(self) -> bool:
        """Whether the model still calls our attention function."""
        return self.decoder_config is not None and self.decoder_config._attn_implementation is self.attention

    def refuse_prompts(self, reason: str) -> None:
        """Long prompts go the model's own way from here on."""
        self.fuses_prompts = False
        self.step_aside(reason)

    def step_aside(self, reason: str) -> None:
        """Counts a reason, and says it the first time."""
        if not self.stepped_aside[reason]:
            logger.warning("hf_turbo steps aside: %s", reason)
        self.stepped_aside[reason] += 1


def _cache_limit(prefix_cache: bool | int, device_type: str) -> int:
    """Bytes of blocks that are kept while nothing uses them."""
    if prefix_cache is not True:
        return int(prefix_cache)
    if device_type == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // _CACHED_SHARE
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _CACHED_SHARE
