"""`TurboConfig`: everything a user can choose, checked when it is made."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import Any, get_args

from typing_extensions import Literal

PromptAttention = Literal["auto", "torch", "triton", "flash_attn"]


@dataclass(frozen=True)
class TurboConfig:
    """Options of `patch`.

    Args:
        block_size: tokens a cache block holds; a multiple of 8 from 8 to 256, or a power of two below 8.
        prompt_attention: what attends within a prompt that has nothing cached before it: "torch" (its FlashAttention),
            "flash_attn" (the package of that name; an error when it is missing), "triton" (the kernel that reads the
            blocks), or "auto": the first of these that was measured faster on the device and supports the layer.

    Raises:
        ValueError: a value that is not allowed.
        ImportError: a package asked for by name is missing.
    """

    block_size: int = 16
    prompt_attention: PromptAttention = "auto"

    def __post_init__(self) -> None:
        size = self.block_size
        if not isinstance(size, int) or isinstance(size, bool) or not (size in (1, 2, 4) or (8 <= size <= 256 and size % 8 == 0)):
            raise ValueError(f"block_size={size!r}: give 1, 2, 4 or a multiple of 8 up to 256")
        if self.prompt_attention not in get_args(PromptAttention):
            raise ValueError(f"prompt_attention={self.prompt_attention!r}: one of {', '.join(get_args(PromptAttention))}")
        if self.prompt_attention == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
            raise ImportError('prompt_attention="flash_attn" needs the flash-attn package: pip install "hf-turbo[flash]"')

    @classmethod
    def of(cls, config: TurboConfig | None, options: dict[str, Any]) -> TurboConfig:
        """`config` with `options` on top.

        Raises:
            TypeError: `config` is not a `TurboConfig`.
            ValueError: an option's name is unknown, or a value is not allowed.
        """
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config is a {type(config).__name__}; give a TurboConfig, or options by name")
        names = [f.name for f in fields(cls)]
        if unknown := sorted(set(options) - set(names)):
            raise ValueError(f"unknown option {', '.join(unknown)}; there are {', '.join(names)}")
        kept = {name: getattr(config, name) for name in names} if config is not None else {}
        return cls(**{**kept, **options})
