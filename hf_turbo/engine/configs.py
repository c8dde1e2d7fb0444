"""Generation configs of requests as `generate()` prepares them: what many requests ask for is prepared once."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from .supported import check_names, check_values

#: Configs that are kept: those that were asked for last.
_MAX_KEPT = 64


@dataclass(frozen=True)
class PreparedConfig:
    """What is the same for all prompts.

    Args:
        config: defaults and special tokens filled in, lengths not yet. Whoever gets it may set its attributes.
        defaulted: which of its lengths nobody has named, as `generate()` finds them.
        eos: the end-of-text tokens on the host, int64 `[n]`; None without any. (The config's own are on the model's
            device, which makes whoever reads them wait for all that it has to do.)
    """

    config: GenerationConfig
    defaulted: dict[str, bool]
    eos: torch.Tensor | None


@dataclass(frozen=True)
class _Kept:
    prepared: PreparedConfig
    #: The attributes of the model's config at that time.
    model_config: dict[str, Any]


class RequestConfigs:
    """Prepares the generation configs of one model's requests. For many threads.

    What Transformers makes of a config and of a request's overrides is kept for the next request with equal ones. Equal
    means of the same values: a config that has been changed is another one, the model's own included. Requests that
    differ in nothing but `max_new_tokens` share. What Transformers logs of a config is said when it is seen first.

    Args:
        model: whose own methods prepare everything.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self, given: GenerationConfig | None, overrides: Mapping[str, Any], device: torch.device
    ) -> PreparedConfig:
        """What `generate()` would make of these.

        Args:
            given: None for the model's own; never changed.
            overrides: attributes of a GenerationConfig by name.
            device: the model's.

        Raises:
            ValueError, NotImplementedError: as `RequestOptions.of`.
        """
        limit = overrides.get("max_new_tokens")
        if type(limit) is int and limit > 0:  # nothing else depends on it; what is not allowed goes the long way
            shared = {**overrides, "max_new_tokens": 1}
        else:
            shared, limit = dict(overrides), None
        key = self._key(given, shared, device)
        prepared = self._find(key)
        if prepared is None:
            model_config = dict(vars(self._model.config))
            prepared = self._prepare(given, shared, device)
            if key is not None and key == self._key(given, shared, device):  # or one was changed meanwhile
                self._keep(key, _Kept(prepared, model_config))
        config = copy.copy(prepared.config)
        if limit is not None:
            config.max_new_tokens = limit
        return PreparedConfig(config, prepared.defaulted, prepared.eos)

    def _key(self, given: GenerationConfig | None, overrides: dict[str, Any], device: torch.device) -> bytes | None:
        """The values of all that is prepared; None: they can't be told."""
        values = type(given), given and vars(given), vars(self._model.generation_config), overrides
        try:
            return pickle.dumps((*values, str(device)))
        except Exception:  # of whatever somebody has put into a config
            return None

    def _find(self, key: bytes | None) -> PreparedConfig | None:
        with self._lock:
            kept = None if key is None else self._kept.get(key)
            if key is None or kept is None:
                return None
            self._kept.move_to_end(key)
        try:
            # Nothing of the model's config counts but whether an attribute of a GenerationConfig was set there.
            return kept.prepared if kept.model_config == vars(self._model.config) else None
        except Exception:  # values that can't be compared
            return None

    def _keep(self, key: bytes, kept: _Kept) -> None:
        with self._lock:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)

    def _prepare(
        self, given: GenerationConfig | None, overrides: dict[str, Any], device: torch.device
    ) -> PreparedConfig:
        check_names(overrides)
        model, own = self._model, self._model.generation_config
        defaulted = {
            f"has_default_{name}": overrides.get(name) is None
            and (given is None or getattr(given, name) is None)
            and getattr(own, name) is None
            for name in ("max_length", "min_length")
        }
        # Overrides come last, as generate()'s arguments do, but are not given along: both at once are deprecated.
        config, _ = model._prepare_generation_config(given)
        config.update(**copy.deepcopy(overrides))  # their values may be changed later by who has given them
        check_values(config, own)
        model._validate_generation_mode(config.get_generation_mode(), config, {})
        model._prepare_special_tokens(config, True, device=device, batch_size=1)
        eos = config._eos_token_tensor
        return PreparedConfig(config, defaulted, None if eos is None else eos.cpu())
