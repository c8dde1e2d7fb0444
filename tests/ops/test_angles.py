"""Cosines and sines of rotary embedding against torch, in the dtypes and layouts that models have."""

import re

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_turbo.ops import reference_layers
from hf_turbo.ops.angles import JOINS, rotary_angles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The interpreter cuts numbers off that a GPU rounds to bf16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """What a launch leaves unwritten is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))


def inputs(batch, tokens, size, dtype=torch.int64):
    frequencies = 10000.0 ** -(torch.arange(size, device=DEVICE) / size)
    positions = torch.randint(0, 5000, (batch, tokens), device=DEVICE).to(dtype)
    return frequencies[None].expand(batch, -1), positions


def check(actual, expected):
    """In float32 two units of the last place of 1 on a CPU, whose libraries differ; the last bit on a GPU."""
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous()
        if DEVICE == "cuda":
            assert torch.equal(a, b)
        else:
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=eps, atol=2.4e-7)
            assert (a != b).float().mean() < 0.01 or a.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("batch, tokens, size", [(1, 1, 32), (5, 1, 16), (2, 7, 20), (3, 3, 1)])
def test_equals_torch(join, dtype, batch, tokens, size):
    frequencies, positions = inputs(batch, tokens, size)
    options = dict(join=join, scale=1.0, dtype=dtype)
    check(
        rotary_angles(frequencies, positions, **options),
        reference_layers.rotary_angles(frequencies, positions, **options),
    )


@pytest.mark.parametrize("position_dtype", [torch.int64, torch.int32, torch.float32])
def test_every_row_has_frequencies_and_positions_of_its_own(position_dtype):
    _, positions = inputs(3, 4, 8, position_dtype)
    frequencies = torch.rand(8, 3, device=DEVICE).t()
    positions = positions.t().contiguous().t()
    options = dict(join="halves", scale=1.3, dtype=torch.float32)
    check(
        rotary_angles(frequencies, positions, **options),
        reference_layers.rotary_angles(frequencies, positions, **options),
    )


@pytest.mark.parametrize("position", [0, 1, 131071, 2**24 + 1, 10**9])
def test_closed_form(position):
    """The angle is rounded to float32, and its cosine then exact: of positions that no float32 is, too."""
    frequencies = torch.tensor([[1.0, 0.25]], device=DEVICE)
    cos, sin = rotary_angles(
        frequencies, torch.tensor([[position]], device=DEVICE), join="alone", scale=0.5, dtype=torch.float32
    )
    angle = torch.tensor(float(position)).float().double() * frequencies.cpu().double()
    torch.testing.assert_close(cos[0].cpu().double(), angle.cos() / 2, rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[0].cpu().double(), angle.sin() / 2, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [[[0], [4], [90]], [list(range(60, 75))]])
def test_the_oracle_is_transformers_own(positions, dtype):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "original_max_position_embeddings": 32},
    )
    rotary = LlamaRotaryEmbedding(config)
    ids = torch.tensor(positions)
    expected = rotary(torch.empty(1, dtype=dtype), ids)
    frequencies, scale = rotary.inv_freq[None].expand(len(ids), -1), rotary.attention_scaling
    assert scale != 1
    actual = reference_layers.rotary_angles(frequencies, ids, join="halves", scale=scale, dtype=dtype)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_no_rows():
    frequencies, positions = inputs(2, 0, 8)
    cos, sin = rotary_angles(frequencies, positions, join="halves", scale=1.0, dtype=torch.float32)
    assert cos.shape == sin.shape == (2, 0, 16)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(join="twice"), "join must be one of halves"),
        (dict(frequencies=torch.zeros(8)), "frequencies must be"),
        (dict(frequencies=torch.zeros(2, 8, dtype=torch.float64)), "frequencies must be"),
        (dict(positions=torch.zeros(2, dtype=torch.int64)), "positions must be [2, tokens]"),
        (dict(positions=torch.zeros(3, 1, dtype=torch.int64)), "positions must be [2, tokens]"),
        (dict(positions=torch.zeros(2, 1, dtype=torch.int16)), "positions must be [2, tokens]"),
        (dict(dtype=torch.float64), "dtype must be"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = dict(
        frequencies=torch.zeros(2, 8), positions=torch.zeros(2, 1, dtype=torch.int64), join="halves", scale=1.0,
        dtype=torch.float32,
    ) | change  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(message)):
        rotary_angles(arguments.pop("frequencies"), arguments.pop("positions"), **arguments)


def test_the_oracle_knows_its_joins():
    with pytest.raises(ValueError, match="join must be"):
        reference_layers.rotary_angles(torch.zeros(1, 8), torch.zeros(1, 1), join="twice", scale=1.0, dtype=DTYPES[0])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("scale", [1.0, 1.3465735902799727])
def test_bit_for_bit_what_transformers_computes(join, dtype, scale):
    """By its own operations, its product of matrices included, of every position up to 131,072."""
    frequencies = 500000.0 ** -(torch.arange(64, device=DEVICE) / 64)
    for start in range(0, 131072, 8192):
        positions = torch.arange(start, start + 8192, device=DEVICE)[None]
        f = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        if join != "alone":
            f = torch.cat((f, f), -1) if join == "halves" else f.repeat_interleave(2, -1)
        cos, sin = rotary_angles(frequencies[None], positions, join=join, scale=scale, dtype=dtype)
        assert torch.equal(cos, (f.cos() * scale).to(dtype)) and torch.equal(sin, (f.sin() * scale).to(dtype))
