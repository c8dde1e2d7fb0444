"""Speed and memory for Transformers models in place: `hf_turbo.patch(model)`."""

from .cache.paged_cache import PagedCache
from .config import TurboConfig
from .patching import is_patched, paged_cache, patch, patched, release, unpatch
from .report import Report, report

__version__ = "0.1.0"

__all__ = [
    "PagedCache",
    "Report",
    "TurboConfig",
    "is_patched",
    "paged_cache",
    "patch",
    "patched",
    "release",
    "report",
    "unpatch",
]
