"""Speed and memory for Transformers models in place: `hf_turbo.patch(model)`."""

from .cache.paged_cache import PagedCache
from .config import TurboConfig
from .generation.draft_model import DraftModel
from .generation.medusa import Medusa
from .generation.prompt_lookup import PromptLookup
from .patching import is_patched, paged_cache, patch, patched, release, unpatch
from .quantization.data_free import quantize
from .quantization.loading import load_int4
from .quantization.lora import allow_int4
from .quantization.registry import register_int4, register_missing, unregister_int4
from .report import Report, report

__version__ = "0.1.0"

__all__ = [
    "DraftModel",
    "Medusa",
    "PagedCache",
    "PromptLookup",
    "Report",
    "TurboConfig",
    "allow_int4",
    "is_patched",
    "load_int4",
    "paged_cache",
    "patch",
    "patched",
    "quantize",
    "register_int4",
    "release",
    "report",
    "train_medusa",
    "unpatch",
    "unregister_int4",
]

register_missing()


def __getattr__(name: str) -> object:
    if name == "train_medusa":  # needs packages that nothing else does
        from .training.medusa import train_medusa

        return train_medusa
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
