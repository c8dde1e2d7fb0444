"""Quantized keys and values on a CPU, against plain attention in float64 over numbers quantized block by block."""

from __future__ import annotations

import random

import pytest
import torch
from combinations import few
from kv_oracle import Rows, at, make_layer
from oracle import make_case

from hf_turbo.ops import dispatch, kv_codes, reference, reference_kv
from hf_turbo.ops.block_ids import SEGMENT_BITS
from hf_turbo.ops.kv_format import KV_FORMATS, end_of_codes
from hf_turbo.ops.metadata import CodedRows

FORMATS = list(KV_FORMATS)
SIZE = 8


def check(rows, out, q_lens):
    """That a forward gave each of its queries what the oracle does."""
    for i, (row, part) in enumerate(zip(rows.rows, out.split(q_lens))):
        if len(part):
            torch.testing.assert_close(
                part.double(), rows.expected(i, row.length - len(part), row.length), rtol=1e-5, atol=1e-5
            )


def run(rows, *forwards):
    for q_lens in forwards:
        check(rows, rows.forward(q_lens), q_lens)
    return rows


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_length(fmt):
    """Steps of one token over five blocks: every position sees what the policy says."""
    run(Rows(fmt, [5 * SIZE]), *[[1]] * 5 * SIZE)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("edge", [1, 2, 3, 5])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_prompt_around_block_edges(fmt, edge, past):
    length = edge * SIZE + past
    rows = run(Rows(fmt, [length + 2]), [length])
    assert sorted(rows.rows[0].codes) == list(range(1, end_of_codes(length, SIZE)))
    run(rows, [1], [1])


def test_oracle_tells_codes_from_wide_numbers():
    """Each of the checks above could fail: codes are far from the numbers that they are made of."""
    for fmt in FORMATS:
        rows = Rows(fmt, [6 * SIZE])
        wanted = rows.expected(0, 3 * SIZE, 6 * SIZE)
        rows.fake_quantized = lambda row: [row.keys.double(), row.values.double()]
        assert (rows.expected(0, 3 * SIZE, 6 * SIZE) - wanted).abs().amax((1, 2)).min() > 3e-4


def cut(total, generator):
    """Random sizes of forwards, small and large ones, that make `total`."""
    sizes = []
    while sum(sizes) < total:
        largest = generator.choice([1, 2, SIZE, 5 * SIZE])
        sizes.append(min(generator.randint(1, largest), total - sum(sizes)))
    return sizes


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_forwards_of_any_size_give_the_same(fmt, seed):
    """One long forward and the same tokens in several: equal attention, and the same bytes, which never change."""
    total = 9 * SIZE + seed
    options = {"scattered": seed % 2 == 1, "segments": 1 + seed % 3}
    whole, pieces = Rows(fmt, [total], **options), Rows(fmt, [total], **options)
    wanted, outs, written = whole.forward([total]), [], {}
    for q_len in cut(total, random.Random(seed)):
        outs.append(pieces.forward([q_len]))
        now = pieces.code_bytes(0)
        assert written.keys() <= now.keys()
        assert all(torch.equal(a, b) for block in written for a, b in zip(written[block], now[block]))
        written = now
    assert len(outs) > 1
    torch.testing.assert_close(torch.cat(outs), wanted, rtol=1e-5, atol=1e-5)
    at_once = whole.code_bytes(0)
    assert list(range(1, end_of_codes(total, SIZE))) == sorted(at_once) and written
    assert all(torch.equal(a, b) for block in written for a, b in zip(written[block], at_once[block]))


CASES = {
    "soft cap": dict(softcap=3.0),
    "sinks": dict(sinks=True),
    "both": dict(softcap=3.0, sinks=True),
    "no groups": dict(group=1),
    "one head": dict(heads=1, group=4),
    "K and V differ": dict(k_dim=24, v_dim=40),
    "80": dict(k_dim=80),
    "96": dict(k_dim=96),
    "112": dict(k_dim=112),
    "scattered": dict(scattered=True, segments=3),
    "window": dict(window=4 * SIZE + 3),
    "window and sinks": dict(window=5 * SIZE, sinks=True),
    "window of two blocks": dict(window=2 * SIZE),
    "small window": dict(window=3),
    "blocks of 32": dict(block_size=32),
}


@pytest.mark.parametrize("fmt, name", few(FORMATS, CASES))
def test_attention(name, fmt):
    """Rows of different lengths, some without queries; few queries and many; a step of equally long rows."""
    rows = Rows(fmt, [82, 81, 61], **CASES[name])
    run(rows, [30, 0, 41], [21, 40, 0], [1, 0, 3], [1, 13, 9], [0, 0, 0], [1, 1, 1], [27, 6, 6], [0, 20, 0], [1, 1, 1])
    assert [row.length for row in rows.rows] == [82, 81, 61]


def test_equally_long_rows_are_one_batch(monkeypatch):
    rows = Rows("int8", [52, 52, 52, 43], scattered=True)
    run(rows, [49, 49, 49, 40])
    batches = []
    real = reference_kv._attend_by_pieces
    monkeypatch.setattr(reference_kv, "_attend_by_pieces", lambda q, *rest: batches.append(len(q)) or real(q, *rest))
    run(rows, [1, 1, 1, 1])
    assert batches == [3, 1]
    batches.clear()  # several queries a row need more memory: one row at a time
    run(rows, [2, 2, 2, 2])
    assert batches == [1, 1, 1, 1]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("window", [None, 45])
def test_codes_in_several_pieces(fmt, q_len, window, monkeypatch):
    monkeypatch.setattr(reference_kv, "_PIECE", 3 * 2 * SIZE * 16)
    rows = Rows(fmt, [140, 140], window=window)
    run(rows, [100, 100], [q_len, q_len])


def test_blocks_in_a_row_are_read_in_place():
    layer = make_layer("int8", 6, SIZE, 2, 16, 16, segments=2)
    segments = layer.codes.k_segments
    in_a_row = reference_kv._blocks(segments, [(1 << SEGMENT_BITS) + i for i in (2, 3, 4)])
    assert in_a_row.data_ptr() == segments[1][2].data_ptr() and len(in_a_row) == 3
    segments[0][5], segments[1][0] = 5, 6
    across = reference_kv._blocks(segments, [5, 1 << SEGMENT_BITS])
    assert torch.equal(across[:, 0, 0], torch.tensor([5, 6], dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_half_precision(fmt, dtype):
    """Outputs in the queries' dtype, from sums in float32."""
    rows = Rows(fmt, [60], dtype=dtype)
    for q_len in (50, 1, 9):
        out = rows.forward([q_len])
        wanted = rows.expected(0, rows.rows[0].length - q_len, rows.rows[0].length)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("length", [1, SIZE, 2 * SIZE, 2 * SIZE + 1, 3 * SIZE, 5 * SIZE - 1, 5 * SIZE, 5 * SIZE + 1])
def test_prompt_that_leaves_few_blocks(fmt, length):
    """A prompt that attends to itself holds the first block and the last two, and goes on as one that holds all."""
    few, all_held = Rows(fmt, [length + 20]), Rows(fmt, [length + 20])
    few.forward([length], attend=False, holds_new=False)
    all_held.forward([length])
    wide = sorted({0, *range(max(few.own(length) - 1, 0), few.own(length) + 1)})
    assert sorted(few.rows[0].wide) == wide
    for block, sides in all_held.code_bytes(0).items():
        assert all(map(torch.equal, sides, few.code_bytes(0)[block]))
    run(few, [1], [12], [7])


@pytest.mark.parametrize("holds_new, window, length", few([False, True], [2, SIZE + 2, 2 * SIZE, 35], [5, 40, 41, 60]))
def test_window_keeps_the_last(length, window, holds_new):
    """A prompt of which only the window is stored: later steps see what they would have seen."""
    rows = Rows("int8", [length + 40], window=window)
    rows.forward([length], attend=False, holds_new=holds_new, keep_last=window - 1)
    first = max(length - window + 1, 0) // SIZE
    assert min([*rows.rows[0].wide, *rows.rows[0].codes]) >= first
    run(rows, *[[1]] * 20, [20])


@pytest.mark.parametrize("fmt", FORMATS)
def test_only_blocks_that_are_kept_are_written(fmt):
    """Whole blocks with one of the last tokens, wide or as codes, though others have a place as well."""
    rows = Rows(fmt, [50])
    rows.forward([50], attend=False, keep_last=12)  # tokens from 38 on, which lies in block 4
    [row] = rows.rows
    written = {b: bool(at(rows.kv.wide.k_segments, place).isfinite().any()) for b, place in row.wide.items()}
    assert written == {b: b >= 4 for b in range(7)}
    assert {b: any((side != 0xFF).any() for side in sides) for b, sides in rows.code_bytes(0).items()} == {
        1: False, 2: False, 3: False, 4: True,
    }  # fmt: skip
    assert at(rows.kv.wide.k_segments, row.wide[4]).isfinite().all()


@pytest.mark.parametrize("back", [0, 1, SIZE, 2 * SIZE + 3, 4 * SIZE])
@pytest.mark.parametrize("fmt", FORMATS)
def test_crop(fmt, back):
    """Blocks that are wide again are what their codes said; everything goes on from there."""
    rows = Rows(fmt, [100])
    run(rows, [60], *[[1]] * 3)
    length = 63 - back
    wide = set(rows.rows[0].wide)
    rows.crop(length)
    assert bool(set(rows.rows[0].wide) - wide) == (back >= SIZE)
    run(rows, [1], [1], [30], [1])


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_to_codes_and_back(fmt, as_tensor, monkeypatch):
    """In every layer, in pieces, across segments; no other block is touched."""
    monkeypatch.setattr(reference_kv, "_PIECE", 2 * 2 * SIZE * 24)
    layers = [make_layer(fmt, 4, SIZE, 2, 16, 24, segments=2) for _ in range(2)]
    second = 1 << SEGMENT_BITS
    pairs = [(3, 1), (second, second + 2), (second + 1, second + 3)]
    numbers = torch.randn(2, 3, 2, SIZE, 40)
    for layer, blocks in zip(layers, numbers):
        for (wide, _), block in zip(pairs, blocks):
            at(layer.wide.k_segments, wide).copy_(block[..., :16])
            at(layer.wide.v_segments, wide).copy_(block[..., 16:])
    ids = torch.tensor(pairs, dtype=torch.int32) if as_tensor else pairs
    dispatch.quantize_blocks(layers, ids)
    for layer, blocks in zip(layers, numbers):
        wanted = make_layer(fmt, 4, SIZE, 2, 16, 24, segments=2).codes
        for (_, place), block in zip(pairs, blocks):
            at(wanted.k_segments, place).copy_(kv_codes.quantize_keys(block[..., :16], layer.format))
            at(wanted.v_segments, place).copy_(kv_codes.quantize_values(block[..., 16:], layer.format))
        for name in ("k_segments", "v_segments"):
            assert all(map(torch.equal, getattr(layer.codes, name), getattr(wanted, name)))
    back = [(1, 0), (second + 2, 2)]
    dispatch.dequantize_blocks(layers, torch.tensor(back, dtype=torch.int32) if as_tensor else back)
    for layer, blocks in zip(layers, numbers):
        for (_, place), block in zip(back, blocks):
            for segments, x in ((layer.wide.k_segments, block[..., :16]), (layer.wide.v_segments, block[..., 16:])):
                found = at(segments, place)
                assert not torch.equal(found, x)
                assert (found - x).abs().max() < (0.5 if fmt == "int4" else 0.15)
        assert layer.wide.k_segments[0].isfinite().flatten(1).all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("first_column", [0, 3, 11, 45])
def test_gather(window, first_column):
    """Dense columns: wide where they are, codes otherwise, zeros at padding and for what is gone."""
    rows = Rows("int8", [60, 44, 3], window=window)
    run(rows, [50, 34, 0], [10, 10, 3])
    metadata, padding = rows.metadata([1, 1, 1]), [0, 16, 57]
    found = dispatch.gather_kv(
        rows.kv, metadata.block_ids_cpu, metadata.first_blocks_cpu, metadata.coded_rows, padding, first_column, 60
    )
    for i, (row, pad) in enumerate(zip(rows.rows, padding)):
        for x, fake, out in zip((row.keys, row.values), rows.fake_quantized(row), found):
            wanted = torch.zeros(60, *x.shape[1:])
            for token in range(row.length):
                block = token // SIZE
                source = x if block in row.wide else fake if block in row.codes else torch.zeros_like(x)
                wanted[pad + token] = source[token]
            assert torch.equal(out[i], wanted[first_column:].transpose(0, 1))
    assert any(row.codes for row in rows.rows)


def test_gather_without_tail():
    """A row that has nothing stored yet."""
    layer = make_layer("int8", 2, SIZE, 2, 16, 24)
    keys, values = reference_kv.gather_kv(layer, [[]], [0], CodedRows([None], [[]], [1]), [4], 0, 4)
    assert keys.shape == (1, 2, 4, 16) and values.shape == (1, 2, 4, 24)
    assert not keys.any() and not values.any()


def test_dispatch_by_the_kind_of_cache():
    """On a CPU both kinds of cache are served, each by its own module."""
    rows = Rows("int8", [40], ops=dispatch, attention=dispatch)
    run(rows, [30], [1])
    case = make_case([5], [20])
    out = dispatch.paged_attention(case.q, case.kv, case.metadata, **case.arguments)
    assert torch.equal(out, reference.paged_attention(case.q, case.kv, case.metadata, **case.arguments))
    dense = dispatch.gather_kv(case.kv, case.metadata.block_ids_cpu, [0], [0], 0, 20)
    assert torch.equal(dense[0][0], case.keys[0].transpose(0, 1))


def test_metadata_without_codes_is_refused():
    rows = Rows("int8", [40])
    rows.forward([30])
    metadata = rows.metadata([1])
    metadata.coded_rows = None
    with pytest.raises(ValueError, match="coded_rows"):
        reference_kv.paged_attention(rows.rows[0].q[:1], rows.kv, metadata, 1.0)
