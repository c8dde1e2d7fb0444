"""Long prompts: the model's own forward with its layers fused, computed through the deferred mode.

The host works longer on each operation this way, so it is for forwards whose operations take the GPU longer still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..cache.paged_cache import PagedCache
from ..compat import CACHE_NAME
from ..ops.deferred import DeferredMode
from ..ops.dispatch import uses_triton
from ..quantization.int4_linear import Int4Linear
from .model_state import has_experts, is_watched, why_not_captured, why_not_together
from .prompt_fusion import PROMPT_RULES, TRANSIENT
from .step_graph import Forward

#: Multiply-adds of a layer that make up for the host's time here: about 5 ms, by what a large GPU does in twice that.
LONG_WORK = 3.5e12


@dataclass(frozen=True)
class PromptFacts:
    """What decides which way a model's prompts go, as it was at its first one: reading it takes a millisecond.

    Args:
        work: multiply-adds that each token costs in a layer.
        has_experts: as of `has_experts`.
        together: whether texts of different lengths can be computed together.
    """

    work: float
    has_experts: bool
    together: bool

    @classmethod
    def of(cls, model: Any) -> PromptFacts:
        """Those of a patched model."""
        handle = model._hf_turbo
        if handle.prompt_facts is None:
            weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)  # experts have three dimensions
            weights += sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Int4Linear))
            work = weights / len(handle.sliding_windows)
            handle.prompt_facts = cls(work, has_experts(model), why_not_together(model) is None)
        return handle.prompt_facts


def forward_prompt(model: Any, forward: Forward, kwargs: dict[str, Any], refuse: Callable[[str], None]) -> Any:
    """What `forward(**kwargs)` returns, or None: this is not a long prompt, or one that goes the model's own way.

    Args:
        refuse: takes the reason why this model's prompts can't be fused.
    """
    inputs = kwargs.get("inputs_embeds")
    inputs = kwargs.get("input_ids") if inputs is None else inputs
    cache = kwargs.get(CACHE_NAME)
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2 or inputs.shape[1] == 1:
        return None
    if not isinstance(cache, PagedCache) or torch.is_grad_enabled() or not uses_triton(inputs.device):
        return None
    if cache.layout.packed is not None:  # what fails there is the engine's to take back
        return None
    if inputs.shape[0] * inputs.shape[1] * PromptFacts.of(model).work < LONG_WORK:
        return None
    if is_watched() or torch.is_autocast_enabled("cuda") or why_not_captured(model) is not None:
        return None
    mode = DeferredMode(PROMPT_RULES, inputs.device, transient=TRANSIENT)
    length = cache.get_seq_length()
    try:
        with mode:
            output = forward(**kwargs)
        watch = cache.head_input
        if watch is not None and watch.value is not None:
            watch.value = mode.tensor(watch.value)
        return tree_map(mode.tensor, output)
    except torch.OutOfMemoryError:
        raise  # the model's own way takes more
    except Exception as error:  # whatever the model's code says to tensors without numbers
        cache.finish_step(length)
        refuse(f"long prompts are not fused: {error}".splitlines()[0])
        return None
