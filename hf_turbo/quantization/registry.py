"""Which of Transformers' quantization methods are answered by this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from transformers.quantizers import auto
from transformers.utils import (
    is_accelerate_available,
    is_auto_round_available,
    is_compressed_tensors_available,
    is_gptqmodel_available,
    is_optimum_available,
)

from .quantizers import CONFIGS, STOCK_CONFIGS, STOCK_QUANTIZERS, Int4Quantizer

#: Whether Transformers' own class finds the packages that it calls.
_STOCK_LOADS: dict[str, Callable[[], bool]] = {
    "gptq": lambda: is_optimum_available() and is_gptqmodel_available(),
    "awq": lambda: is_gptqmodel_available() and is_accelerate_available(),
    "auto-round": is_auto_round_available,
    "compressed-tensors": is_compressed_tensors_available,
}


def register_int4() -> None:
    """From now on `from_pretrained` loads all GPTQ, AWQ, auto-round and packed compressed-tensors checkpoints with
    this package, also where the packages that Transformers uses for them are installed.

    Importing hf_turbo does so for those methods whose packages are missing.
    """
    _register(CONFIGS)


def unregister_int4() -> None:
    """Gives all methods back to Transformers' own classes."""
    for name in CONFIGS:
        auto.AUTO_QUANTIZER_MAPPING[name] = STOCK_QUANTIZERS[name]
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] = STOCK_CONFIGS[name]


def register_missing() -> None:
    """Takes the methods that Transformers cannot load by itself, for want of a package. Others stay as they are."""
    _register(name for name in CONFIGS if not _STOCK_LOADS[name]())


def _register(names: Iterable[str]) -> None:
    for name in names:
        auto.AUTO_QUANTIZER_MAPPING[name] = Int4Quantizer
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] = CONFIGS[name]


@contextmanager
def int4_registered() -> Iterator[None]:
    """All methods are this package's meanwhile."""
    quantizers, configs = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    register_int4()
    try:
        yield
    finally:
        for name in CONFIGS:
            auto.AUTO_QUANTIZER_MAPPING[name] = quantizers[name]
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] = configs[name]
