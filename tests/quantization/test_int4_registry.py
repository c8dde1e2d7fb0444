"""Which checkpoints Transformers gives to this package, and which it keeps."""

import pytest
from fixtures import checkpoint
from loaded import load, quantized
from transformers import GPTQConfig
from transformers.quantizers import auto

from hf_turbo.quantization import registry
from hf_turbo.quantization.quantizers import CONFIGS, STOCK_CONFIGS, STOCK_QUANTIZERS, Int4Quantizer
from hf_turbo.quantization.registry import int4_registered, register_int4, register_missing, unregister_int4

AT_IMPORT = dict(auto.AUTO_QUANTIZER_MAPPING)

pytestmark = pytest.mark.usefixtures("registered")


def test_other_models_are_loaded_as_ever(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    plain = load(folder).dequantize()
    plain.save_pretrained(tmp_path / "plain")
    model, info = load(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values()) and not quantized(model) and not hasattr(model, "hf_quantizer")


def test_a_config_given_besides_is_no_contradiction(tmp_path):
    folder = checkpoint("gptq_sym_g32", tmp_path)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = load(folder, quantization_config=GPTQConfig(bits=4))
    assert len(quantized(model)) == 14 and isinstance(model.config.quantization_config, GPTQConfig)


def test_quantizing_while_loading_is_left_to_transformers(tmp_path):
    load(checkpoint("gptq_sym_g32", tmp_path)).dequantize().save_pretrained(tmp_path / "plain")
    with pytest.raises(ImportError, match="optimum"):
        load(tmp_path / "plain", quantization_config=GPTQConfig(bits=4))


def test_other_compressed_tensors_are_left_to_transformers():
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {}}}
    with pytest.raises(ImportError, match="compressed-tensors>="):
        auto.AutoHfQuantizer.from_config(config, pre_quantized=True)


def test_all_or_nothing():
    register_int4()
    assert all(auto.AUTO_QUANTIZER_MAPPING[name] is Int4Quantizer for name in CONFIGS)
    assert all(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] is CONFIGS[name] for name in CONFIGS)
    unregister_int4()
    assert all(auto.AUTO_QUANTIZER_MAPPING[name] is STOCK_QUANTIZERS[name] for name in CONFIGS)
    assert all(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] is STOCK_CONFIGS[name] for name in CONFIGS)
    assert not any(issubclass(kept, Int4Quantizer) for kept in STOCK_QUANTIZERS.values())


def test_what_transformers_can_load_stays_its_own(monkeypatch):
    unregister_int4()
    loads = {"gptq": True, "awq": False, "auto-round": True, "compressed-tensors": False}
    monkeypatch.setattr(registry, "_STOCK_LOADS", {name: lambda able=able: able for name, able in loads.items()})
    before = dict(auto.AUTO_QUANTIZER_MAPPING)
    register_missing()
    changed = {name for name, quantizer in auto.AUTO_QUANTIZER_MAPPING.items() if quantizer is not before[name]}
    assert changed == {"awq", "compressed-tensors"}
    assert before.keys() == auto.AUTO_QUANTIZER_MAPPING.keys()


def test_int4_registered_gives_back_what_was_there():
    unregister_int4()
    with int4_registered():
        assert auto.AUTO_QUANTIZER_MAPPING["gptq"] is Int4Quantizer
    assert auto.AUTO_QUANTIZER_MAPPING["gptq"] is STOCK_QUANTIZERS["gptq"]


def test_a_plain_import_is_enough():
    stock_loads = registry._STOCK_LOADS
    assert {name for name in CONFIGS if AT_IMPORT[name] is Int4Quantizer} == {
        name for name in CONFIGS if not stock_loads[name]()
    }
    assert AT_IMPORT.keys() - CONFIGS.keys() and not any(
        AT_IMPORT[name] is Int4Quantizer for name in AT_IMPORT.keys() - CONFIGS.keys()
    )
