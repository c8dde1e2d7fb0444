"""AWQ and compressed-tensors modules made by hand; and what is refused, by name and before a tensor is read."""

import pytest
import torch
from fixtures import quantization_config, tensors
from words import headers, pack, same_bytes

from hf_turbo.quantization.formats import decode, encode, linear_specs, settle

K, N, GROUP = 256, 64, 32
AWQ_FIELDS = [8 * c + j for c in range(N // 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)]


class HandMade:
    def __init__(self, bits=4, group_size=GROUP, zeros=None, dtype=torch.float16, g_idx=None):
        groups = -(-K // group_size)
        self.bits, self.group_size = bits, group_size
        self.codes = torch.randint(0, 1 << bits, (N, K))
        self.scales = (torch.rand(groups, N) + 0.5).to(dtype)
        self.zeros = torch.full((groups, N), 1 << (bits - 1)) if zeros is None else zeros
        self.g_idx = torch.arange(K) // group_size if g_idx is None else g_idx

    @property
    def weight(self):
        """fp32 [N, K]"""
        return (self.scales[self.g_idx].float() * (self.codes.T - self.zeros[self.g_idx])).T

    def gemm(self):
        codes = self.codes.T[:, AWQ_FIELDS]
        return {"qweight": pack(codes, 4), "qzeros": pack(self.zeros[:, AWQ_FIELDS], 4), "scales": self.scales}

    def gemv(self):
        missing = {32: 32, 64: 16, 128: 8}[self.group_size] - len(self.scales)
        zeros, scales = (torch.nn.functional.pad(t.T, (0, missing)).contiguous() for t in (self.zeros, self.scales))
        return {"qweight": pack(self.codes, 4), "qzeros": pack(zeros, 4), "scales": scales}

    def packed(self, *, zeros):
        found = {
            "weight_packed": pack(self.codes, self.bits),
            "weight_scale": self.scales.T.contiguous(),
            "weight_shape": torch.tensor([N, K]),
        }
        return {**found, "weight_zero_point": pack(self.zeros, self.bits).T.contiguous()} if zeros else found


def named(module, own):
    return headers({f"{module}.{short}": tensor for short, tensor in own.items()})


def check(made, own, config, module="m"):
    spec = settle(own, linear_specs(config, named(module, own))[module])
    weight = decode(own, spec)
    assert weight.dequantize(torch.float32).equal(made.weight)
    assert same_bytes(encode(weight, spec), own)
    return weight


def all_zeros(bits=4, groups=K // GROUP):
    return torch.stack([torch.arange(N).roll(shift) % (1 << bits) for shift in range(groups)])


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_awq_zero_points_of_every_value(version):
    made = HandMade(zeros=all_zeros())
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": version}
    weight = check(made, getattr(made, version)(), config)
    assert weight.zeros.equal(made.zeros.byte()) and (weight.zeros == 0).any()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_gemv_pads_its_groups(group_size):
    made = HandMade(group_size=group_size)
    check(made, made.gemv(), {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemv"})


@pytest.mark.parametrize("scales", [None, torch.bfloat16])
def test_symmetric_awq(scales):
    made = HandMade(dtype=scales or torch.float16)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False, "format": "gemm"}
    weight = check(made, made.gemm(), config)
    assert weight.zeros is None and weight.scales.dtype == made.scales.dtype


def test_awq_with_one_group():
    made = HandMade(group_size=K)
    check(made, made.gemm(), {"quant_method": "awq", "bits": 4, "group_size": -1})


@pytest.mark.parametrize("change, error, message", [
    (lambda own: own["qzeros"].__setitem__((3, 3), 1), ValueError, "qzeros must be 0 behind the last group"),
    (lambda own: own["scales"].__setitem__((3, 8), 1), ValueError, "scales must be 0 behind the last group"),
])  # fmt: skip
def test_gemv_with_something_behind_the_last_group(change, error, message):
    own = HandMade().gemv()
    change(own)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemv"}
    with pytest.raises(error, match=message):
        decode(own, linear_specs(config, named("m", own))["m"])


def test_gemv_fast_with_a_zero_point_between_two_codes():
    module = "model.layers.0.self_attn.q_proj"
    own = {k.rpartition(".")[2]: t.clone() for k, t in tensors("awq_gemv_fast_g32").items() if k.startswith(module)}
    spec = linear_specs(quantization_config("awq_gemv_fast_g32"), named("m", own))["m"]
    own["qzeros"][0, 0] = -own["scales"][0, 0] * 7.5
    with pytest.raises(NotImplementedError, match="whole number"):
        decode(own, spec)


def ct_config(**weights):
    plain = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": {**plain, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compressed_tensors(bits, dtype):
    made = HandMade(bits, dtype=dtype)
    assert check(made, made.packed(zeros=False), ct_config(num_bits=bits)).zeros is None
    made = HandMade(bits, dtype=dtype, zeros=all_zeros(bits))
    assert check(made, made.packed(zeros=True), ct_config(num_bits=bits, symmetric=False)).zeros is not None


def test_compressed_tensors_by_channel():
    made = HandMade(group_size=K, zeros=all_zeros(groups=1))
    config = ct_config(strategy="channel", group_size=None, symmetric=False)
    check(made, made.packed(zeros=True), config)


@pytest.mark.parametrize("unset", [False, True])
def test_compressed_tensors_with_act_order(unset):
    g_idx = (torch.arange(K) // GROUP)[torch.randperm(K)]
    made = HandMade(zeros=all_zeros(), g_idx=None if unset else g_idx)
    own = made.packed(zeros=True) | {"weight_g_idx": torch.full((K,), -1).int() if unset else g_idx.int()}
    weight = check(made, own, ct_config(symmetric=False, actorder="group"))
    assert (weight.perm is None) == unset


def test_config_groups_have_their_own_targets():
    config = ct_config()
    group = {**config["config_groups"]["group_0"], "targets": ["re:.*mlp.*", "head"]}
    group["weights"] = {**group["weights"], "num_bits": 8, "strategy": "channel", "group_size": None}
    config["config_groups"]["group_1"] = group
    made = HandMade()
    check(made, made.packed(zeros=False), config, "layers.0.attn.q")
    for module in ("layers.0.mlp.up", "head"):
        made = HandMade(8, K)
        check(made, made.packed(zeros=False), config, module)
    config["config_groups"]["group_0"]["targets"] = ["re:.*k$"]
    with pytest.raises(ValueError, match="no config_group"):
        linear_specs(config, named("layers.0.attn.q", HandMade().packed(zeros=False)))


def test_compressed_tensors_of_another_shape():
    own = HandMade().packed(zeros=False)
    spec = linear_specs(ct_config(), named("m", own))["m"]
    own["weight_shape"][1] -= 3
    with pytest.raises(ValueError, match="weight_shape"):
        decode(own, spec)
    with pytest.raises(ValueError, match="no weight_zero_point"):
        linear_specs(ct_config(symmetric=False), named("m", own))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


def in_group(**change):
    config = ct_config()
    config["config_groups"]["group_0"].update(change)
    return config


@pytest.mark.parametrize("config, message", [
    ({**GPTQ, "quant_method": "bitsandbytes"}, "bitsandbytes"), ({"load_in_4bit": True}, "quant_method"),
    ({**GPTQ, "checkpoint_format": "bitblas"}, "bitblas"), ({**GPTQ, "checkpoint_format": "gptq_p"}, "gptq_p"),
    ({**GPTQ, "format": "gptq_v3"}, "gptq_v3"), ({**GPTQ, "checkpoint_format": "gemm"}, "gemm"),
    ({**GPTQ, "pack_dtype": "int16"}, "int16"), ({**GPTQ, "dynamic": {"m": {"pack_dtype": "int8"}}}, "int8"),
    ({**GPTQ, "dynamic": {"m": {"format": "gptq_v2"}}, "format": "gptq"}, "gptq_v2"),
    *[({**GPTQ, "bits": bits}, f"{bits} bits") for bits in (1, 5, 6, 7)],
    ({**GPTQ, "dynamic": {".*": {"bits": 6}}}, "6 bits"),
    ({**GPTQ, "is_marlin_format": True, "bits": 8}, "8 bits"),
    ({**GPTQ, "is_marlin_format": True, "sym": False}, "zero points"),
    *[({**AWQ, "version": name}, name) for name in ("exllama", "llm-awq", "ipex", "gemm2")],
    ({**AWQ, "backend": "llm-awq"}, "llm-awq"), ({**AWQ, "bits": 8}, "8 bits"),
    ({**AWQ, "version": "gemv", "group_size": 16}, "groups of 16"),
    ({**AWQ, "version": "marlin", "zero_point": True}, "zero points"),
    ({**AWQ, "pack_dtype": "int64"}, "int64"),
    *[({"quant_method": "auto-round", "bits": 4, "packing_format": name}, str(name))
      for name in (None, "auto_round:llm_compressor", "auto_round:gptqmodel")],
    ({**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "act_bits": 8}, "activations"),
    *[({**ct_config(), "format": name}, name) for name in ("int-quantized", "nvfp4-pack-quantized", "marlin-24")],
    ({**ct_config(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({**ct_config(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ({**ct_config(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({**ct_config(), "quantization_status": "frozen"}, "frozen"),
    (ct_config(num_bits=3), "3 bits"), (ct_config(type="float"), "float"), (ct_config(strategy="block"), "block"),
    (ct_config(dynamic=True), "dynamic"), (ct_config(block_structure=[2, 2]), "block_structure"),
    (in_group(input_activations={"num_bits": 8}), "input_activations"), (in_group(format="marlin-24"), "marlin-24"),
])  # fmt: skip
def test_refused_configs(config, message):
    made = HandMade()
    tensors_of = {"awq": made.gemv, "compressed-tensors": lambda: made.packed(zeros=False)}
    own = tensors_of.get(config.get("quant_method"), gptq_module)()
    with pytest.raises(NotImplementedError, match=message):
        linear_specs(config, named("m", own))


def gptq_module(**change):
    shapes = {"qweight": (32, N), "qzeros": (8, 8), "scales": (8, N), "g_idx": (K,)}
    dtypes = dict.fromkeys(shapes, torch.int32) | {"scales": torch.float16}
    own = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()} | change
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("change, error, message", [
    *[({name: None}, ValueError, name) for name in ("qzeros", "scales")],
    ({"qweight": None}, ValueError, "none of the codes"),
    ({"qweight": meta(31, N)}, ValueError, "the config says 4 bits"),
    ({"qweight": meta(32, 8 * N)}, ValueError, "qweight is"),
    ({"qzeros": meta(8, N)}, ValueError, "qzeros is"), ({"qzeros": meta(7, 8)}, ValueError, "qzeros is"),
    ({"scales": meta(7, N, dtype=torch.float16)}, ValueError, "makes 8 groups"),
    ({"scales": meta(8 * N, dtype=torch.float16)}, ValueError, "must be a matrix"),
    ({"g_idx": meta(K - 9)}, ValueError, "the config says 4 bits"),
    ({"g_idx": meta(K, 1)}, ValueError, "the config says 4 bits"),
    ({"bias": meta(K, dtype=torch.float16)}, ValueError, "bias is"),
    ({"weight": meta(N, K)}, ValueError, "both a weight"),
    ({"qweight": meta(32, N, dtype=torch.int64)}, NotImplementedError, "int64"),
    ({"scales": meta(8, N, dtype=torch.float64)}, NotImplementedError, "float64"),
    ({"lora": meta(8)}, NotImplementedError, "lora"),
])  # fmt: skip
def test_refused_tensors(change, error, message):
    linear_specs(GPTQ, named("m", gptq_module()))
    with pytest.raises(error, match=message):
        linear_specs(GPTQ, named("m", gptq_module(**change)))


def test_scales_of_activations_are_refused():
    own = HandMade().gemm()
    scaled = named("m", own) | named("act", {"scales": torch.ones(8)})
    with pytest.raises(NotImplementedError, match="act has scales of activations"):
        linear_specs(AWQ, scaled)


def test_a_checkpoint_of_plain_weights():
    with pytest.raises(ValueError, match="no quantized weights"):
        linear_specs(GPTQ, named("m", {"weight": torch.ones(2, 2)}))


def test_compressed_tensors_with_unpacked_zero_points():
    own = HandMade().packed(zeros=False) | {"weight_zero_point": torch.zeros(N, K // GROUP, dtype=torch.int8)}
    with pytest.raises(NotImplementedError, match="int8"):
        linear_specs(ct_config(symmetric=False), named("m", own))


def test_keys_that_contradict_each_other():
    two_formats = {"checkpoint_format": "gptq", "format": "gptq_v2"}
    for more in (two_formats, {"checkpoint_format": "gptq", "is_marlin_format": True}):
        with pytest.raises(ValueError, match="contradicts itself"):
            linear_specs({**GPTQ, **more}, named("m", gptq_module()))
    for more in ({"version": "gemm", "format": "gemv"}, {"q_group_size": 64}, {"w_bit": 3}):
        with pytest.raises(ValueError, match="contradicts itself"):
            linear_specs({**AWQ, **more}, named("m", HandMade().gemm()))
