"""`TurboConfig`: everything a user can choose, checked when it is made."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

PromptAttention = Literal["auto", "torch", "triton", "flash_attn"]
KVCacheDtype = Literal["int8", "fp8", "int4"]

#: What `ops.kv_format` has kernels for.
_KV_BLOCK_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class TurboConfig:
    """Options of `patch`.

    Args:
        block_size: tokens a cache block holds; a multiple of 8 from 8 to 256, or 1, 2 or 4. None: 64 where the model
            is on a GPU, as prompt chunks were measured 20% faster with it than with 16 or 32 and decode steps the
            same; 16 elsewhere, as smaller blocks leave less unused. With `kv_cache_dtype` 32, 64 or 128; None: 64.
        prompt_attention: what attends on a GPU within a prompt that has nothing cached before it: "torch" (its
            FlashAttention), "flash_attn" (the package of that name; an error when it is missing) or "triton" (the
            kernel that reads the blocks). "auto" is "torch", which was measured faster than the kernel. Layers that
            the choice does not serve (soft caps, sinks, fp32) use the kernel.
        cuda_graphs: on a GPU, capture the decode step of each number of rows once and replay it.
        fused_layers: in captured steps and long prompts, compute norms, projections, activations, rotary embeddings
            and residuals together where a kernel knows how.
        kv_cache_dtype: what keys and values of older blocks are kept as: "int8", "fp8" (e4m3) or "int4". The first
            block of a text and the last ones stay in the model's dtype. None: all do.
        speculation: `PromptLookup()`, `DraftModel(model)` or `Medusa(path)`: proposes tokens at every call of
            `generate()`, which are verified together; the text stays the model's own. None: only calls that ask for
            it by Transformers' arguments draft.
        prefix_cache: keep what `generate()` has computed of texts for texts that begin alike. A number: bytes of blocks
            that are kept while nothing else uses them. True: a tenth of the device's memory, on a CPU of the machine's.

    Raises:
        TypeError: `speculation` is none of these.
        ValueError: a value that is not allowed.
        ImportError: a package asked for by name is missing.
    """

    block_size: int | None = None
    prompt_attention: PromptAttention = "auto"
    cuda_graphs: bool = True
    fused_layers: bool = True
    kv_cache_dtype: KVCacheDtype | None = None
    speculation: Any = None
    prefix_cache: bool | int = False

    def __post_init__(self) -> None:
        size = self.block_size
        if size is not None and not _is_block_size(size):
            raise ValueError(f"block_size={size!r}: give 1, 2, 4, a multiple of 8 up to 256, or None")
        if self.kv_cache_dtype is not None:
            self._check_kv_cache_dtype()
        if not isinstance(self.prefix_cache, int) or self.prefix_cache < 0:
            raise ValueError(f"prefix_cache={self.prefix_cache!r}: True, False or a number of bytes")
        if self.speculation is not None and not hasattr(self.speculation, "attach"):
            raise TypeError(f"speculation={self.speculation!r}: give PromptLookup(), DraftModel(model) or Medusa(path)")
        if self.prompt_attention not in get_args(PromptAttention):
            raise ValueError(
                f"prompt_attention={self.prompt_attention!r}: one of {', '.join(get_args(PromptAttention))}"
            )
        for name in ("cuda_graphs", "fused_layers"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: True or False")
        if self.prompt_attention == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
            raise ImportError(
                'prompt_attention="flash_attn" needs the flash-attn package: pip install "hf-turbo[flash]"'
            )

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

    def block_size_on(self, device_type: str) -> int:
        """The block size of a model on such a device."""
        return self.block_size or (64 if device_type == "cuda" or self.kv_cache_dtype else 16)

    def _check_kv_cache_dtype(self) -> None:
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            kinds = ", ".join(get_args(KVCacheDtype))
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r}: one of {kinds}, or None")
        if self.block_size is not None and self.block_size not in _KV_BLOCK_SIZES:
            sizes = ", ".join(map(str, _KV_BLOCK_SIZES))
            raise ValueError(f"block_size={self.block_size}: with kv_cache_dtype give {sizes}, or None")


def _is_block_size(size: object) -> bool:
    if not isinstance(size, int) or isinstance(size, bool):
        return False
    return size in (1, 2, 4) or (8 <= size <= 256 and size % 8 == 0)
