import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from words import pack

from hf_turbo.quantization import packing, weight

BITS = (2, 3, 4, 8)
# K, N: several tiles, runs and blocks of every order; no squares.
SHAPES = [(16, 64), (64, 192), (192, 64), (128, 128)]


@pytest.fixture(params=[None, 200], ids=["one slice", "many slices"])
def slices(request, monkeypatch):
    """Once with all rows at a time, once with few: what a large weight goes through."""
    if request.param:
        monkeypatch.setattr(weight, "_SLICE_VALUES", request.param)


def random_codes(rows, columns, bits=4):
    return torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)


@given(st.sampled_from(BITS), st.integers(1, 3), st.integers(1, 70), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_row_is_a_dense_stream_of_bits(bits, rows, columns, random):
    codes = torch.tensor([[random.randrange(1 << bits) for _ in range(columns)] for _ in range(rows)]).byte()
    words = packing.pack_rows(codes, bits)
    assert words.equal(pack(codes, bits))
    assert packing.unpack_rows(words, bits, columns).equal(codes)


@pytest.mark.parametrize("code", range(8))
def test_every_3_bit_code_at_every_place(code):
    # A row a place: that code there, and its complement everywhere else.
    codes = torch.where(torch.eye(32, dtype=torch.bool), code, 7 - code).byte()
    words = pack(codes, 3)
    assert packing.pack_rows(codes, 3).equal(words)
    assert packing.unpack_rows(words, 3, 32).equal(codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [96, 4])  # 4: one word a row
def test_words_of_any_strides(slices, bits, columns):
    codes = random_codes(40, columns, bits)
    words = packing.pack_rows(codes.T.contiguous().T, bits)
    assert words.equal(pack(codes, bits))
    turned = torch.empty(words.shape[::-1], dtype=torch.int32).copy_(words.T).T
    assert turned.stride() == (1, 40)
    assert packing.unpack_rows(turned, bits, columns).equal(codes)


def test_an_awq_word_holds_even_columns_first(slices):
    codes = torch.arange(8, dtype=torch.uint8)[None]
    assert packing.pack_awq(codes).tolist() == [[0x75316420]]
    codes = random_codes(40, 64)
    assert packing.unpack_awq(packing.pack_awq(codes)).equal(codes)


def fast_oracle(words):
    """The published order of gemv_fast, undone step by step."""
    rows, columns = words.shape
    fields = (words.numpy().view(np.uint16)[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)) & 15
    blocks = fields.reshape(rows, columns // 64, 4, 64).transpose(0, 2, 1, 3)
    eights = blocks.reshape(4 * rows, columns // 32, 4, 2, 4).transpose(0, 1, 2, 4, 3)
    pairs = eights.reshape(4 * rows, columns // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    return torch.from_numpy(pairs.reshape(4 * rows, columns).astype(np.uint8))


@pytest.mark.parametrize("shape", [(4, 64), (12, 192), (64, 128)])
def test_gemv_fast(slices, shape):
    codes = random_codes(*shape)
    words = packing.pack_gemv_fast(codes)
    assert words.dtype == torch.int16 and words.shape == (shape[0] // 4, shape[1])
    assert fast_oracle(words).equal(codes)
    assert packing.unpack_gemv_fast(words).equal(codes)


def marlin_order():
    order = []
    for i in range(32):
        rows = (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1)
        place = [16 * row + i // 4 + 8 * half for half in (0, 1) for row in rows]
        order += [p + 256 * j for j in range(4) for p in place]
    return [order[start + j] for start in range(0, 1024, 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)]


@pytest.mark.parametrize("columns, rows", SHAPES)
def test_marlin(slices, columns, rows):
    codes = random_codes(rows, columns)
    # [K, N] in tiles of 16 x 16, a row of tiles flat, in runs of 1024.
    tiles = codes.T.reshape(columns // 16, 16, rows // 16, 16).transpose(1, 2)
    runs = tiles.reshape(-1, 1024)[:, marlin_order()]
    words = pack(runs.reshape(columns // 16, -1), 4)
    assert packing.pack_marlin(codes).equal(words)
    assert packing.unpack_marlin(words).equal(codes)


@pytest.mark.parametrize("grouped, order", [
    (True, [i + 8 * j for i in range(8) for j in range(8)]),
    (False, [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]),
])  # fmt: skip
def test_marlin_scales(grouped, order):
    scales = torch.randn(3, 192).half()
    stored = packing.pack_marlin_scales(scales, grouped)
    run = len(order)
    assert stored[1, :run].equal(scales[1, :run][order]) and stored[2, run : 2 * run].equal(scales[2, run:][order])
    assert packing.unpack_marlin_scales(stored, grouped).equal(scales)
