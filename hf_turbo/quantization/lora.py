"""LoRA on top of quantized layers, with PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .int4_linear import Int4Linear

if TYPE_CHECKING:
    from peft import LoraConfig


def allow_int4(config: LoraConfig) -> LoraConfig:
    """Tells a `LoraConfig` that `Int4Linear` may carry adapters, which PEFT must hear from each config.

    Adapters on `Int4Linear` run and train as on any linear. They cannot be merged into it, and what needs the base
    weight itself (DoRA, PiSSA and the like) raises an error: `model.dequantize()` first.

    Returns:
        The same config.
    """
    from peft.tuners.lora.layer import Linear

    config._register_custom_module({Int4Linear: Linear})
    return config
