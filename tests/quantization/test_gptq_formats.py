"""GPTQ tensors made by hand, word by word, for a weight that is known: zero points, groups and widths of every kind."""

import warnings

import pytest
import torch
from words import headers, pack, same_bytes, signed

from hf_turbo.quantization import spec as spec_module
from hf_turbo.quantization.formats import decode, encode, gptq_spec, linear_specs, settle
from hf_turbo.quantization.weight import GroupedWeight

K, N = 256, 64
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.6.0"]}}


@pytest.fixture(autouse=True)
def every_warning_again():
    spec_module.warn_once.cache_clear()


class HandMade:
    """A linear of random codes, and the tensors that a v1 or v2 file holds for it."""

    def __init__(self, bits=4, group_size=32, g_idx=None, zeros=None, inputs=K, outputs=N):
        self.bits, self.group_size = bits, group_size
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        self.g_idx = torch.arange(inputs) // size if g_idx is None else g_idx
        self.codes = torch.randint(0, 1 << bits, (inputs, outputs))
        self.scales = (torch.rand(groups, outputs) + 0.5).half()
        self.zeros = torch.full((groups, outputs), 1 << (bits - 1)) if zeros is None else zeros

    @property
    def weight(self):
        """fp16 [N, K]"""
        g_idx = self.g_idx.long()
        return (self.scales[g_idx].float() * (self.codes - self.zeros[g_idx])).half().T

    def tensors(self, zero_words, g_idx="own"):
        found = {"qweight": pack(self.codes.T, self.bits).T.contiguous(), "qzeros": zero_words, "scales": self.scales}
        if g_idx is not None:
            found["g_idx"] = (self.g_idx if isinstance(g_idx, str) else g_idx).int()
        return found

    def v2(self, **more):
        return self.tensors(pack(self.zeros, self.bits), **more)

    def v1(self, **more):
        """As gptqmodel writes it: words less one a field, with borrow; 3 bit by fields."""
        if self.bits == 3:
            return self.tensors(pack(self.zeros - 1 & 7, 3), **more)
        ones = sum(1 << shift for shift in range(0, 32, self.bits))
        words = pack(self.zeros, self.bits)
        return self.tensors(torch.tensor([[signed(w - ones) for w in row] for row in words.tolist()]).int(), **more)

    def config(self, **more):
        return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group_size, "sym": False, **more}


def spec_of(tensors, config):
    (spec,) = linear_specs(config, headers({f"m.{name}": tensor for name, tensor in tensors.items()})).values()
    return settle(tensors, spec)


def check(made, tensors, config):
    """The weight is the one that is known, and the file's bytes come back."""
    spec = spec_of(tensors, config)
    weight = decode(tensors, spec)
    assert weight.dequantize().equal(made.weight)
    assert same_bytes(encode(weight, spec), tensors)
    return weight


@pytest.mark.parametrize("bits, stored", [(2, 0x55555555), (4, 0x77777777), (8, 0x7F7F7F7F), (3, None)])
def test_symmetric_v1_stores_one_less(bits, stored):
    made = HandMade(bits)
    tensors = made.v1()
    assert stored is None or tensors["qzeros"].eq(stored).all()
    for writer in ({}, GPTQMODEL):
        assert check(made, tensors, made.config(sym=True, **writer)).zeros is None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_v2_stores_the_zero_point_itself(bits):
    made = HandMade(bits)
    weight = check(made, made.v2(), made.config(checkpoint_format="gptq_v2"))
    assert weight.zeros is None
    # The same tensors of an asymmetric v1 file are another weight.
    assert decode(made.v2(), spec_of(made.v2(), made.config())).zeros.eq((1 << bits - 1) + 1).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zero_points_of_every_value(bits, version):
    zeros = torch.stack([torch.arange(N).roll(shift) % (1 << bits) for shift in range(8)])
    assert (zeros == 0).any()
    made = HandMade(bits, zeros=zeros)
    tensors = made.v2() if version == "gptq_v2" else made.v1()
    weight = check(made, tensors, made.config(checkpoint_format=version, **GPTQMODEL))
    assert weight.zeros.equal(zeros.byte())


def test_a_borrow_reaches_the_next_field():
    zeros = torch.full((8, N), 8)
    zeros[:, 2::8] = 0
    made = HandMade(zeros=zeros)
    tensors = made.v1()
    assert tensors["qzeros"].eq(0x77776F77).all()
    assert check(made, tensors, made.config(**GPTQMODEL)).zeros.equal(zeros.byte())


def test_zero_points_that_auto_gptq_lost_are_read_as_it_reads_them():
    # A zero point of 0 in field 3 sets every field above it, too.
    made = HandMade()
    tensors = made.tensors(torch.full((8, N // 8), signed(0xFFFFF777)).int())
    made.zeros = torch.tensor([8, 8, 8, 0, 0, 0, 0, 0]).repeat(8, N // 8)
    with pytest.warns(UserWarning, match="upper zero points are all ones"):
        check(made, tensors, made.config())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        check(made, tensors, made.config())


def test_zero_points_of_v2_under_the_name_of_v1():
    made = HandMade()
    with pytest.warns(UserWarning, match="checkpoint_format should say gptq_v2"):
        weight = check(made, made.v2(), made.config(sym=True, checkpoint_format="gptq", **GPTQMODEL))
    assert weight.zeros is None
    # An asymmetric file may well hold a zero point of 9 everywhere.
    made.zeros += 1
    assert check(made, made.v1(), made.config(checkpoint_format="gptq", **GPTQMODEL)).zeros.eq(9).all()


@pytest.mark.parametrize("g_idx", ["own", None])
def test_unpacked_zero_points_are_refused(g_idx):
    made = HandMade()
    tensors = made.tensors(made.zeros.int(), g_idx=g_idx)
    with pytest.raises(ValueError, match="qzeros"):
        spec_of(tensors, made.config())


def permuted(group_size, inputs=K):
    """As act-order leaves it."""
    return (torch.arange(inputs) // group_size)[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]


def static(group_size):
    """Groups in order of position, but not of number."""
    return torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])[torch.arange(K) // group_size]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size, g_idx", [
    (32, permuted(32)), (128, permuted(128)), (32, static(32)), (32, None), (128, None), (-1, None), (512, None),
])  # fmt: skip
def test_groups(bits, group_size, g_idx):
    made = HandMade(bits, group_size, g_idx)
    weight = check(made, made.v2(), made.config(checkpoint_format="gptq_v2", desc_act=g_idx is not None))
    assert (weight.perm is None) == (g_idx is None)
    assert weight.group_size == (group_size if 0 < group_size < K else K)
    x = torch.randn(3, K)
    sorted_x = x if weight.perm is None else x[:, weight.perm.long()]
    plain = GroupedWeight(weight.codes, weight.scales, weight.zeros, None, weight.bits, weight.group_size)
    expected = x @ made.weight.float().T
    error = (sorted_x @ plain.dequantize().float().T - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("given", [None, torch.zeros(K)], ids=["missing", "all zero"])
def test_a_g_idx_that_says_nothing(given):
    made = HandMade()
    own = made.v1(g_idx=given)
    assert check(made, own, made.config()).perm is None
    # Also for one who did not settle the spec.
    spec = linear_specs(made.config(), headers({f"m.{name}": tensor for name, tensor in own.items()}))["m"]
    assert decode(own, spec).dequantize().equal(made.weight)


def test_a_short_last_group():
    for g_idx in (None, permuted(32, inputs=80)):
        made = HandMade(g_idx=g_idx, inputs=80)
        weight = check(made, made.v1(), made.config())
        assert weight.num_groups == 3


def test_inputs_and_outputs_that_fill_no_word():
    for bits in (2, 3, 4, 8):
        made = HandMade(bits, inputs=42, outputs=13)
        check(made, made.v2(), made.config(checkpoint_format="gptq_v2"))
        check(made, made.v1(), made.config(**GPTQMODEL))


@pytest.mark.parametrize("change, message", [
    (lambda g: g + 1, "from 0 to 7"), (lambda g: g - 1, "from 0 to 7"),
    (lambda g: torch.where(torch.arange(K) == 0, 1, g), "channels to each group"),
])  # fmt: skip
def test_a_wrong_g_idx(change, message):
    made = HandMade()
    made.g_idx = change(made.g_idx)
    tensors = made.tensors(pack(made.zeros, 4))
    with pytest.raises(ValueError, match=message):
        decode(tensors, spec_of(tensors, made.config()))


def test_a_permuted_weight_needs_a_g_idx_in_the_file():
    made = HandMade(g_idx=permuted(32))
    weight = decode(made.v2(), spec_of(made.v2(), made.config(checkpoint_format="gptq_v2")))
    without = spec_of(made.v2(g_idx=None), made.config(checkpoint_format="gptq_v2"))
    with pytest.raises(ValueError, match="no g_idx"):
        encode(weight, without)


def test_the_settings_of_a_module_come_from_its_rule():
    made = HandMade(8, 64)
    config = {**made.config(checkpoint_format="gptq_v2"), "bits": 4, "group_size": 32}
    rules = {"-:.*other": {}, "+:m$": {"bits": 8, "group_size": 64}, "m": {"bits": 2}}
    check(made, made.v2(), {**config, "dynamic": rules})
    check(made, made.v2(g_idx=None), {**config, "dynamic": {"m": rules["+:m$"]}})
    # auto-round's way to say it.
    check(made, made.v2(), {**config, "extra_config": {"m": {"bits": 8, "group_size": 64}}})
    for wrong in ({}, {"dynamic": {"m": {"bits": 2, "group_size": 64}}}, {"dynamic": {"m": {"bits": 8}}}):
        with pytest.raises(ValueError, match=r"^m: the config"):
            spec_of(made.v2(), {**config, **wrong})
    with pytest.raises(ValueError, match="excludes it"):
        spec_of(made.v2(), {**config, "dynamic": {"-:m": {}}})
    # A rule matches from the start of a name.
    own = headers({f"q.m.{name}": tensor for name, tensor in made.v2().items()})
    assert linear_specs({**config, "dynamic": {"-:m": {}, "q": rules["+:m$"]}}, own)["q.m"].bits == 8


def test_a_config_without_bits_or_group_size():
    made = HandMade(3, 64)
    check(made, made.v2(), {"quant_method": "gptq", "checkpoint_format": "gptq_v2"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype(dtype):
    made = HandMade()
    made.scales = made.scales.to(dtype)
    weight = check(made, made.v1(), made.config())
    assert weight.scales.dtype == dtype
    lossy = GroupedWeight(weight.codes, weight.scales.float() + 1e-6, None, None, 4, 32)
    with pytest.raises(ValueError, match="without loss"):
        encode(lossy, spec_of(HandMade().v1(), made.config()))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_the_spec_of_a_new_module(bits, v2):
    spec = gptq_spec((N, K), bits, 64, v2=v2, symmetric=True, bias_dtype=torch.float16)
    codes = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8)
    weight = GroupedWeight(codes, torch.rand(4, N).half(), None, None, bits, 64)
    tensors = encode(weight, spec, torch.ones(N).half())
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": True}
    read = spec_of(tensors, {**config, "checkpoint_format": "gptq_v2" if v2 else "gptq", **GPTQMODEL})
    assert read == spec
    assert decode(tensors, read).dequantize().equal(weight.dequantize())
    assert gptq_spec((N, K), bits, -1).group_size == K


def test_another_weight_than_the_files():
    spec = gptq_spec((N, K), 4, 64)
    codes = torch.zeros(N, K, dtype=torch.uint8)
    with pytest.raises(ValueError, match="groups of 64"):
        encode(GroupedWeight(codes, torch.ones(8, N), None, None, 4, 32), spec)


@pytest.mark.parametrize("change, message", [
    ({"bits": 5}, "bits"), ({"group_size": 0}, "group_size"), ({"scales": torch.ones(3, N)}, "scales"),
    ({"zeros": torch.ones(4, N)}, "zeros"), ({"perm": torch.arange(K)}, "perm"),
    ({"codes": torch.zeros(N, K)}, "codes"), ({"scales": torch.ones(4, N, dtype=torch.int8)}, "floating"),
])  # fmt: skip
def test_a_weight_whose_parts_do_not_fit(change, message):
    codes = torch.zeros(N, K, dtype=torch.uint8)
    parts = {"codes": codes, "scales": torch.ones(4, N), "zeros": None, "perm": None, "bits": 4, "group_size": 64}
    GroupedWeight(**parts)
    with pytest.raises(ValueError, match=message):
        GroupedWeight(**{**parts, **change})
