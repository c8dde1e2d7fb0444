"""The few names and meanings that differ between the supported Transformers releases."""

from __future__ import annotations

import inspect

from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask

#: What forward(), generate() and outputs call the cache: renamed after 5.23.
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

#: Whether `crop(n)` with a positive n means "keep n tokens"; later releases raise.
_POSITIVE_CROP_IS_LENGTH = "Legacy" in inspect.getsource(DynamicLayer.crop) and "warning_once" in inspect.getsource(
    DynamicLayer.crop
)


def crop_argument(tokens_to_remove: int, length: int) -> int:
    """How many tokens `Cache.crop(tokens_to_remove)` removes from `length` in the installed release.

    Raises:
        ValueError: the number is positive and the release no longer takes that.
    """
    if tokens_to_remove <= 0:
        return -tokens_to_remove
    if not _POSITIVE_CROP_IS_LENGTH:
        raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the tokens to remove")
    return max(length - tokens_to_remove, 0)
