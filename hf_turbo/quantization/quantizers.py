"""What Transformers' from_pretrained calls for a checkpoint of INT4 weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils import quantization_config as stock

from .checkpoint_files import absent_tensors, odd_weights_file, read_headers
from .formats import linear_specs
from .int4_experts import make_experts, plan_experts
from .int4_linear import FileLinear, Int4Linear
from .load_plan import LoadPlan, Names, cast_back, check_plan, float_dtypes, keep_apart, make_plan, untie
from .module_swap import modules_of, replace_module


class _FileConfig(stock.QuantizationConfigMixin):
    """The quantization config of a checkpoint with all its keys; also one that Transformers cannot parse.

    Subclasses are called as Transformers' own: it compares names where a config is also given to from_pretrained.
    """

    def __init__(self, **config: Any) -> None:
        self.__dict__.update(deepcopy(config))
        self._file = deepcopy(config)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        config = cls(**config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        return deepcopy(self._file)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


class GPTQConfig(_FileConfig, stock.GPTQConfig):
    """Of GPTQ."""


class AwqConfig(_FileConfig, stock.AwqConfig):
    """Of AWQ."""


class AutoRoundConfig(_FileConfig, stock.AutoRoundConfig):
    """Of auto-round's own format."""


class CompressedTensorsConfig(_FileConfig, stock.CompressedTensorsConfig):
    """Of compressed-tensors' packed integers; other formats of it are left to Transformers."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        groups = (config_dict.get("config_groups") or {}).values()
        formats = {config_dict.get("format"), *(group.get("format") for group in groups if isinstance(group, dict))}
        if "pack-quantized" not in formats:
            return stock.CompressedTensorsConfig.from_dict(config_dict, return_unused_kwargs, **kwargs)
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)


CONFIGS: dict[str, type[_FileConfig]] = {
    "gptq": GPTQConfig,
    "awq": AwqConfig,
    "auto-round": AutoRoundConfig,
    "compressed-tensors": CompressedTensorsConfig,
}
STOCK_CONFIGS: dict[str, type] = {name: auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] for name in CONFIGS}
STOCK_QUANTIZERS: dict[str, Any] = {name: auto.AUTO_QUANTIZER_MAPPING[name] for name in CONFIGS}


class Int4Quantizer(HfQuantizer):
    """Loads checkpoints that GPTQ, AWQ, auto-round or llm-compressor wrote into `Int4Linear` layers.

    What is not such a checkpoint (a model to be quantized while it is loaded, another format) goes to the class that
    Transformers has for it.
    """

    requires_calibration = True

    def __new__(cls, quantization_config: Any = None, pre_quantized: bool = True, **kwargs: Any) -> Any:
        ours = isinstance(quantization_config, (_FileConfig, stock.AutoRoundConfig))
        if quantization_config is None or (ours and pre_quantized):  # None: a copy is made
            return super().__new__(cls)
        method = quantization_config.quant_method
        return STOCK_QUANTIZERS[method](quantization_config, pre_quantized=pre_quantized, **kwargs)

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._dtypes: dict[str, torch.dtype] = {}
        self._quantized: list[str] = []

    # Before the model is built: Transformers calls the one or the other with the config, by its release.

    def update_tp_plan(self, config: Any) -> Any:
        return _with_weights_file(config)

    def update_attn_implementation(self, config: Any) -> Any:
        return _with_weights_file(config)

    # Before the weights are read.

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files")
        if not files:
            raise NotImplementedError("an INT4 model is loaded from a folder or a repository, not from a state_dict")
        if getattr(model.config, "distributed_config", None) is not None:
            raise NotImplementedError("INT4 models cannot be split over processes (tensor parallelism) while loading")
        _check_pickle(files)
        headers = read_headers(files)
        specs = linear_specs(self.quantization_config.to_dict(), headers)
        self._quantized = [f"{module}.{tensor}" for module, spec in specs.items() for tensor in spec.tensors]
        names = Names(model, self._quantized)
        plan = make_plan(model, names, specs)
        experts = plan_experts(model, plan.experts)
        check_plan(model, names, plan, specs, headers, absent_tensors(files, headers))

        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        self._dtypes = float_dtypes(model, dtype)
        for name, linears in experts.items():
            replace_module(model, name, make_experts(model.get_submodule(name), linears, dtype))
        self._place_linears(model, plan, dtype)
        untie(model, set(plan.linears))

    def _place_linears(self, model: PreTrainedModel, plan: LoadPlan, dtype: torch.dtype) -> None:
        for name, spec in plan.linears.items():
            no_bias = getattr(model.get_submodule(name), "bias", None) is None
            replace_module(model, name, FileLinear(spec, dtype, drops_zero_bias=no_bias))

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        return keep_apart(weight_conversions, self._quantized)

    # After.

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, layer in modules_of(model, FileLinear):
            replace_module(model, name, layer.to_int4())
        cast_back(model, self._dtypes)
        if getattr(self.quantization_config, "dequantize", False):
            self._dequantize(model, model.dtype)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        return dequantize_linears(model, dtype or model.dtype)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The state dict in the files' format, the weights' part of it in main memory: nothing is held twice."""
        hooks = [layer.register_state_dict_post_hook(_to_main_memory) for _, layer in modules_of(model, Int4Linear)]
        try:
            return model.state_dict(), {}
        finally:
            for hook in hooks:
                hook.remove()

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top of it."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def dequantize_linears(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Puts plain linears in the place of `Int4Linear`, one after another."""
    for name, layer in modules_of(model, Int4Linear):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        linear.weight = nn.Parameter(layer.dequantize(dtype))
        if layer.bias is not None:
            linear.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=layer.bias.requires_grad)
        replace_module(model, name, linear.train(layer.training))
    return model


def _to_main_memory(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any) -> None:
    for name in list(state_dict):
        if name.startswith(prefix):
            state_dict[name] = state_dict[name].cpu()


def _with_weights_file(config: Any) -> Any:
    """The config, told the name of the weights' file where the folder has none by a name that Transformers knows."""
    folder = Path(
        _asked_for("pretrained_model_name_or_path") or config.name_or_path or "", _asked_for("subfolder") or ""
    )
    named = getattr(config, "transformers_weights", None) is not None
    if folder.name and folder.is_dir() and not named and _asked_for("use_safetensors") is not False:
        name = odd_weights_file(folder)
        if name is not None:
            config.transformers_weights = name
    return config


def _check_pickle(files: Sequence[str]) -> None:
    """Raises where weights are pickled and nobody asked for that: Transformers takes such files for want of others."""
    if Path(files[0]).suffix != ".safetensors" and _asked_for("use_safetensors") is not False:
        raise ValueError(f"{files[0]} is a pickle: use_safetensors=False reads it, if you trust where it is from")


def _asked_for(argument: str) -> Any:
    """What the `from_pretrained` that is running was given and does not tell its quantizer; None if unknown."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name == "from_pretrained" and argument in frame.f_locals:
            return frame.f_locals[argument]
        frame = frame.f_back
    return None
