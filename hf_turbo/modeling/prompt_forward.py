"""Long prompts: the model's own forward with its layers fused, computed through the deferred mode.

The host works longer on each operation this way, so it is for forwards whose operations take the GPU longer still.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from ..ops.deferred import DeferredMode
from ..ops.dispatch import uses_triton
from .model_state import is_watched, why_not_captured
from .prompt_fusion import PROMPT_RULES, TRANSIENT
from .step_graph import Forward

#: Tokens from which on it pays.
MIN_TOKENS = 4096


def forward_prompt(model: Any, forward: Forward, kwargs: dict[str, Any]) -> Any:
    """What `forward(**kwargs)` returns, or None: this is not a long prompt, or one that goes the model's own way."""
    inputs = kwargs.get("inputs_embeds")
    inputs = kwargs.get("input_ids") if inputs is None else inputs
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2 or inputs.shape[0] * inputs.shape[1] < MIN_TOKENS:
        return None
    if not isinstance(kwargs.get(CACHE_NAME), PagedCache) or torch.is_grad_enabled() or not uses_triton(inputs.device):
        return None
    if is_watched() or why_not_captured(model) is not None:
        return None
    mode = DeferredMode(PROMPT_RULES, inputs.device, transient=TRANSIENT)
    with mode:
        output = forward(**kwargs)
    return tree_map(mode.tensor, output)
