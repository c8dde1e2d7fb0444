"""Speed and memory for Transformers models in place: `hf_turbo.patch(model)`."""

from .cache.paged_cache import PagedCache
from .config import TurboConfig
from .patching import is_patched, paged_cache, patch, patched, release, unpatch
from .quantization.data_free import quantize
from .quantization.loading import load_int4
from .quantization.lora import allow_int4
from .quantization.registry import register_int4, register_missing, unregister_int4
from .report import Report, report

__version__ = "0.1.0"

__all__ = [
    "PagedCache",
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
    "unpatch",
    "unregister_int4",
]

register_missing()
