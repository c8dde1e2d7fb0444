"""Data-free quantization: one weight, and a loaded model in place."""

import copy
import gc
import logging
import re
import weakref

import pytest
import torch
from tiny_models import build
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from hf_turbo.quantization.data_free import quantize, quantize_weight
from hf_turbo.quantization.int4_linear import Int4Linear
from hf_turbo.quantization.quantize_plan import Options, Plan, make_plan, quantization_config

IDS = torch.arange(3, 20)[None]

SETTINGS = [(4, True), (4, False), (8, True), (8, False)]
settings = pytest.mark.parametrize("bits, symmetric", SETTINGS)


def weight(rows=24, columns=128, heavy=True):
    """Normal values, some far out in every row."""
    values = torch.randn(rows, columns)
    return values + 4 * torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.02) if heavy else values


def llama(**overrides):
    return build("llama", hidden_size=64, intermediate_size=96, **overrides)


def by_group(values, size):
    return values.unflatten(1, (-1, size))


def plain_rounding(values, bits, symmetric, size):
    """The textbook's, in fp16 scales, as the yardstick: values `[N, K]` to what they are rounded to."""
    groups, top = by_group(values, size), 2**bits - 1
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = 2 * torch.maximum(-low, high) / top if symmetric else (high - low) / top
    scale = scale.half().float()
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round()
    return (scale * (((groups / scale).round() + zero).clamp(0, top) - zero)).flatten(1)


def objective(values, rounded, size):
    """What is minimized: squared differences, each times the value's magnitude plus the group's root mean square."""
    groups, differences = by_group(values, size), by_group(values - rounded, size)
    return (differences**2 * (groups.abs() + groups.square().mean(-1, keepdim=True).sqrt())).sum(-1)


class TestWeight:
    @settings
    @pytest.mark.parametrize("size", [16, 64, 128])
    def test_no_group_is_worse_than_plain_rounding(self, bits, symmetric, size):
        values = weight()
        found = quantize_weight(values, Options(bits, size, symmetric)).dequantize(torch.float32)
        ours = objective(values, found, size)
        plain = objective(values, plain_rounding(values, bits, symmetric, size), size)
        # Of a tie between two codes a scale of the other sign takes the other one: nothing else may differ.
        assert (ours <= plain * 1.02).all()
        if bits == 4:  # of 256 codes there is next to nothing to win
            assert ours.sum() < plain.sum() * 0.99

    @settings
    def test_values_that_are_not_clipped_are_within_half_a_step(self, bits, symmetric):
        values, size = weight(), 32
        found = quantize_weight(values, Options(bits, size, symmetric))
        step = found.scales.float().abs().T.repeat_interleave(size, 1)
        codes = found.codes
        inside = (codes > 0) & (codes < 2**bits - 1)
        error = (found.dequantize(torch.float32) - values).abs()
        assert inside.float().mean() > 0.8
        assert (error <= step * 0.5001)[inside].all()
        assert error.max() > step.min() * 0.25  # the bound says something

    @settings
    def test_is_what_its_parts_say(self, bits, symmetric):
        values = weight(columns=64)
        found = quantize_weight(values, Options(bits, 32, symmetric))
        assert found.codes.dtype == torch.uint8 and found.codes.max().item() < 2**bits
        assert found.scales.dtype == torch.float16 and found.scales.shape == (2, 24)
        assert (found.zeros is None) == symmetric and found.perm is None
        zeros = 2 ** (bits - 1) if symmetric else found.zeros.T.repeat_interleave(32, 1).float()
        expected = (found.codes.float() - zeros) * found.scales.T.repeat_interleave(32, 1).float()
        assert torch.equal(found.dequantize(torch.float32), expected)

    def test_largest_magnitude_gets_the_side_with_one_code_more(self):
        values = torch.full((2, 16), 0.01)
        values[0, 3], values[1, 5] = 1.0, -1.0
        found = quantize_weight(values, Options(4, 16))
        assert found.codes[0, 3] == found.codes[1, 5] == 0
        assert found.scales[0, 0] < 0 < found.scales[0, 1]
        assert torch.allclose(found.dequantize(torch.float32)[[0, 1], [3, 5]], torch.tensor([1.0, -1.0]), rtol=1e-3)

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_zero_points_stay_where_every_reader_agrees(self, bits, sign):
        values = sign * (torch.rand(8, 64) + 1.0)  # all of one sign: zero would be the first or the last code
        found = quantize_weight(values, Options(bits, 64, symmetric=False))
        assert found.zeros.min() >= 1 and found.zeros.max() <= 2**bits - 1
        error = (found.dequantize(torch.float32) - values).abs()
        # Half a step, and what is clipped; a whole one if room for the zero point's own code were not made.
        assert (error <= found.scales.float().T * 0.9).all()

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_zeros_and_tiny_values(self, symmetric):
        values = weight()
        values[0], values[1] = 0.0, 1e-12
        found = quantize_weight(values, Options(4, 32, symmetric)).dequantize(torch.float32)
        assert (found[:2] == 0).all() and found.isfinite().all() and found[2:].any()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_takes_what_models_come_in(self, dtype):
        values = weight().to(dtype)
        low, full = (quantize_weight(v, Options(4, 32)) for v in (values, values.float()))
        assert torch.equal(low.codes, full.codes) and torch.equal(low.scales, full.scales)

    def test_rows_do_not_depend_on_slices(self, monkeypatch):
        values = weight(40)
        whole = quantize_weight(values, Options(4, 64, symmetric=False))
        monkeypatch.setattr("hf_turbo.quantization.data_free._SLICE_VALUES", 3 * 128)
        sliced = quantize_weight(values, Options(4, 64, symmetric=False))
        for name in ("codes", "scales", "zeros"):
            assert torch.equal(getattr(whole, name), getattr(sliced, name))

    def test_one_group_a_row(self):
        found = quantize_weight(weight(columns=96), Options(4, -1))
        assert found.group_size == 96 and found.scales.shape == (1, 24)

    @pytest.mark.parametrize("bad, said", [(float("nan"), "nan"), (float("inf"), "inf"), (1e6, "1e\\+06.*fp16")])
    def test_refuses_values_that_fit_no_scale(self, bad, said):
        values = weight()
        values[5, 7] = bad
        with pytest.raises(ValueError, match=said):
            quantize_weight(values, Options(4, 32))

    @settings
    def test_largest_values_that_fit(self, bits, symmetric):
        values = torch.randn(4, 32)
        values[0, :2] = torch.tensor([1.0, -1.0]) * 65504 * 2 ** (bits - 1) / 2
        assert quantize_weight(values, Options(bits, 32, symmetric)).scales.isfinite().all()

    def test_refuses_other_dtypes(self):
        with pytest.raises(ValueError, match="float8"):
            quantize_weight(weight().to(torch.float8_e4m3fn), Options(4, 32))


class TestModel:
    @settings
    def test_is_the_model_of_its_dequantized_weights(self, bits, symmetric):
        model = llama()
        twin = copy.deepcopy(model)
        assert quantize(model, bits, 32, symmetric=symmetric) is model
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Int4Linear)}
        assert len(layers) == 14
        for name, layer in layers.items():
            linear = twin.get_submodule(name)
            expected = quantize_weight(linear.weight, Options(bits, 32, symmetric)).dequantize(torch.float32)
            assert torch.equal(layer.dequantize(torch.float32), expected)
            linear.weight.data.copy_(expected)
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-4, atol=1e-4)

    def test_8_bits_are_near_the_model(self):
        model = llama()
        with torch.no_grad():
            before = model(IDS).logits
            after = quantize(model, 8, 16).eval()(IDS).logits
        assert 0 < (after - before).abs().max() < 0.1 * before.abs().max()

    def test_float_weights_are_gone(self):
        model = llama()
        weights = [weakref.ref(model.get_submodule(name).weight) for name in make_plan(model, Options(4, 32)).linears]
        assert len(weights) == 14
        quantize(model, 4, 32)
        gc.collect()
        assert not [ref for ref in weights if ref() is not None]

    def test_one_weight_at_a_time(self, monkeypatch):
        model = llama()
        refs = [weakref.ref(model.get_submodule(name).weight) for name in make_plan(model, Options(4, 32)).linears]
        alive, from_grouped = [], Int4Linear.from_grouped

        def counted(*arguments):
            alive.append(sum(ref() is not None for ref in refs))
            return from_grouped(*arguments)

        monkeypatch.setattr(Int4Linear, "from_grouped", counted)
        quantize(model, 4, 32)
        assert alive == list(range(14, 0, -1))

    def test_biases_stay(self):
        model = build("qwen2", hidden_size=64, intermediate_size=96)
        bias = model.model.layers[0].self_attn.q_proj.bias.clone()
        layer = quantize(model, 4, 32).model.layers[0].self_attn.q_proj
        assert isinstance(layer, Int4Linear) and bias.any() and torch.equal(layer.bias, bias)

    def test_what_stays_float(self):
        model = quantize(llama(tie_word_embeddings=True), 4, 32)
        assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
        assert {type(child).__name__ for child in model.model.children()} >= {"Embedding", "LlamaRMSNorm"}

    def test_a_weight_that_two_modules_share_stays(self):
        model = llama()
        first, second = (layer.mlp.up_proj for layer in model.model.layers)
        second.weight = first.weight
        quantize(model, 4, 32)
        assert type(model.model.layers[0].mlp.up_proj) is type(model.model.layers[1].mlp.up_proj) is nn.Linear
        assert isinstance(model.model.layers[0].mlp.down_proj, Int4Linear)

    def test_config_says_so(self):
        config = quantize(llama(), 4, 32).config.quantization_config
        meta = config.pop("meta")
        assert meta["quantizer"][0].startswith("hf_turbo:")
        assert config == {
            "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32, "sym": True,
            "desc_act": False, "lm_head": False, "pack_dtype": "int32",
        }  # fmt: skip

    def test_skip(self):
        model = quantize(llama(), 4, 32, skip=["down_proj", "layers.1"])
        found = {name for name, module in model.named_modules() if isinstance(module, Int4Linear)}
        left = [*(f"self_attn.{one}_proj" for one in "qkvo"), "mlp.gate_proj", "mlp.up_proj"]
        assert found == {f"model.layers.0.{name}" for name in left}

    def test_rules_name_what_was_skipped_and_nothing_else(self):
        model = quantize(llama(), 4, 32, skip=["down_proj", "layers.1.self_attn.q_proj"])
        patterns = [rule.removeprefix("-:") for rule in model.config.quantization_config["dynamic"]]
        assert all(rule.startswith("-:") for rule in model.config.quantization_config["dynamic"])
        for name, module in model.named_modules():
            if isinstance(module, Int4Linear):
                assert not any(re.match(pattern, name) for pattern in patterns), name
            if type(module) is nn.Linear and name != "lm_head":
                assert any(re.match(pattern, name) for pattern in patterns), name
        assert len(patterns) == 2  # one for all layers' down_proj

    def test_experts_and_routers_stay(self, caplog):
        model = build("qwen2_moe", hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
        with caplog.at_level(logging.WARNING):
            quantize(model, 4, 16)
        assert "experts of 2 layers" in caplog.text
        found = [name for name, module in model.named_modules() if isinstance(module, Int4Linear)]
        assert found and not [name for name in found if "gate" in name.rsplit(".")[-1] and "proj" not in name]
        rules = model.config.quantization_config["dynamic"]
        assert r"-:^model\.layers\.\d+\.mlp\.experts$" in rules

    @pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "dbrx", "afmoe", "hunyuan_v1_moe", "granitemoe"])
    def test_no_router_is_chosen(self, name):
        # 16 experts: a router of 4 could not be packed, and that would be an error.
        counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 16)
        experts = {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 16, "moe_top_k": 2}, **counts}
        model = build(name, **(experts if name == "dbrx" else counts))
        chosen = make_plan(model, Options(4, 16)).linears
        assert chosen and all(model.get_submodule(linear).out_features != 16 or "proj" in linear for linear in chosen)
        assert not [linear for linear in chosen if re.search(r"router|\.gate(\.|$)|shared_expert_gate", linear)]

    @pytest.mark.parametrize("name", ["llama4_text", "modernbert-decoder"])
    def test_layers_are_found_where_get_decoder_leads_elsewhere(self, name):
        assert any(".layers.0." in linear for linear in make_plan(build(name), Options(4, 16)).linears)

    def test_linears_of_a_vision_tower_stay(self):
        text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 300}
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
        with torch.device("meta"):
            model = Gemma3ForConditionalGeneration(config)
        plan = make_plan(model, Options(4, 32))
        assert len(plan.linears) == 14 and all(".language_model.layers." in name for name in plan.linears)
        assert plan.float_linears and all("vision_tower" in name for name in plan.float_linears)

    def test_training_mode_stays(self):
        assert all(module.training for module in quantize(llama().train(), 4, 32).modules())


def unchanged(model, twin):
    """Whether a model is still the float model that its twin is."""
    same_modules = [type(a) for a in model.modules()] == [type(b) for b in twin.modules()]
    ours, theirs = model.state_dict(), twin.state_dict()
    same_tensors = ours.keys() == theirs.keys() and all(
        torch.equal(ours[key].nan_to_num(), theirs[key].nan_to_num()) for key in ours
    )
    return same_modules and same_tensors and getattr(model.config, "quantization_config", None) is None


class TestRefusals:
    @pytest.mark.parametrize(
        "options, said",
        [
            ({"bits": 3}, "bits=3"),
            ({"group_size": 0}, "group_size=0"),
            ({"group_size": 48}, "group_size=48"),
            ({"group_size": 128}, r"layers\.0\.self_attn\.q_proj has 64 input channels.*group_size=16 or 32 or -1"),
            ({"group_size": 32, "skip": ["upproj"]}, "skip='upproj'"),
            ({"group_size": 32, "skip": ["layers"]}, "no torch.nn.Linear"),
        ],
    )
    def test_arguments(self, options, said):
        model = llama()
        twin = copy.deepcopy(model)
        with pytest.raises(ValueError, match=said):
            quantize(model, **options)
        assert unchanged(model, twin)

    @pytest.mark.parametrize("bad", [float("nan"), 1e6])
    def test_a_bad_weight_in_the_last_layer(self, bad):
        model = llama()
        model.model.layers[1].mlp.down_proj.weight.data[0, 0] = bad
        twin = copy.deepcopy(model)
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: "):
            quantize(model, 4, 32)
        assert unchanged(model, twin)

    def test_a_weight_that_is_elsewhere(self):
        model = llama()
        model.model.layers[1].mlp.down_proj.to("meta")
        with pytest.raises(ValueError, match="meta device or offloaded"):
            quantize(model, 4, 32)
        assert type(model.model.layers[0].mlp.down_proj) is nn.Linear

    def test_outputs_that_fill_no_words(self):
        model = llama()
        model.model.layers[0].mlp.extra = nn.Linear(64, 3)
        with pytest.raises(ValueError, match=r"mlp\.extra is \[3, 64\].*multiples of 8.*skip"):
            quantize(model, 4, 32)
        assert isinstance(quantize(model, 4, 32, skip=["extra"]).model.layers[0].mlp.up_proj, Int4Linear)

    def test_twice(self):
        model = quantize(llama(), 4, 32)
        with pytest.raises(ValueError, match=r"quantized already \(gptq\)"):
            quantize(model, 4, 32)

    def test_models_without_linears(self):
        with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no torch\.nn\.Linear"):
            quantize(build("gpt2"), 4, 16)

    def test_encoders(self):
        with pytest.raises(ValueError, match="decoder-only"):
            quantize(build("t5"), 4, 16)

    def test_what_is_no_model(self):
        with pytest.raises(ValueError, match="not Linear"):
            quantize(nn.Linear(32, 32), 4, 16)


def test_rules_spell_names_out_where_layers_differ():
    plan = Plan(linears=("a.0.x", "a.1.x"), float_linears=("a.2.x", "a.0.y", "a.1.y"), fused_experts=())
    rules = quantization_config(plan, Options())["dynamic"]
    assert list(rules) == [r"-:^a\.2\.x$", r"-:^a\.\d+\.y$"]
