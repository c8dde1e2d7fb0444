"""Blocks of a quantized cache: every byte that should be written is `kv_codes`', every other one stays as it was."""

from __future__ import annotations

import math

import pytest
import torch
from combinations import few

from hf_turbo.ops import kv_codes
from hf_turbo.ops.block_ids import SEGMENT_BITS, SEGMENT_MASK
from hf_turbo.ops.kv_format import KV_FORMATS
from hf_turbo.ops.metadata import AttentionMetadata, LayerKV, QuantizedKV
from hf_turbo.ops.quantize_kv import CodeAddresses, dequantize_blocks, quantize_blocks, store_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE_BLOCK = (1 << 31) - 1
FORMATS = list(KV_FORMATS)


def casts_are_right(dtype):
    """Triton's interpreter truncates what it casts to bf16, and reads bf16's subnormals wrong."""
    return DEVICE == "cuda" or dtype != torch.bfloat16


def make_layer(fmt, num_blocks, *, block_size=32, heads=2, dims=(64, 64), dtype=torch.float32, segments=2, cpu=False):
    """NaN in every wide number and 0xFF in every byte of codes; `cpu`: wide blocks laid out as on a CPU."""
    fmt = KV_FORMATS[fmt]

    def wide(dim):
        shape = (num_blocks, block_size, heads, dim) if cpu else (num_blocks, heads, block_size, dim)
        blocks = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
        return blocks.transpose(1, 2) if cpu else blocks

    def codes(num_bytes):
        return torch.full((num_blocks, heads, num_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)

    sizes = fmt.key_bytes(block_size, dims[0]), fmt.value_bytes(block_size, dims[1])
    return QuantizedKV(
        LayerKV.of(*([wide(dim) for _ in range(segments)] for dim in dims)),
        LayerKV.of(*([codes(size) for _ in range(segments)] for size in sizes)),
        fmt,
    )


def tensors_of(layer):
    return [*layer.wide.k_segments, *layer.wide.v_segments, *layer.codes.k_segments, *layer.codes.v_segments]


def at(segments, block_id):
    return segments[block_id >> SEGMENT_BITS][block_id & SEGMENT_MASK]


def random(shape, dtype, seed=0):
    """Numbers of all sizes: channels 300 times as large as others, 2000, 1e-4, zeros, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., 0] *= 300
    x[..., 1] = 2000 + x[..., 1]
    x[..., 2] *= 1e-4
    x[..., 3] = 0
    x[..., 4] *= torch.finfo(torch.float32).tiny / 50 if casts_are_right(dtype) else 1e-30
    x[..., 5] = 1e-4
    x[:2, ..., :] *= 1e-6
    return x.to(DEVICE, dtype)


def codes_of(keys, values, fmt):
    """The bytes of a block `[block_size, heads, dim]`."""
    keys, values = (x.transpose(0, 1).cpu() for x in (keys, values))
    return kv_codes.quantize_keys(keys, fmt).to(DEVICE), kv_codes.quantize_values(values, fmt).to(DEVICE)


class StoreCase:
    """Sequences of which the tokens before the last q_len are in the cache.

    Poison is everywhere but in the old rows of the blocks that must be held; table entries that must not be read
    are far outside.
    """

    def __init__(self, q_lens, seq_lens, fmt="int8", *, holds_new=True, keep_last=None, padding=(), **layer):
        self.q_lens, self.seq_lens, self.holds_new = q_lens, seq_lens, holds_new
        self.keep_last = keep_last
        counts = [math.ceil(n / layer.get("block_size", 32)) for n in seq_lens]
        segments = layer.get("segments", 2)
        per_segment = math.ceil(sum(counts) / segments) + 1
        self.layer = make_layer(fmt, per_segment, **layer)
        dtype = self.layer.wide.k_segments[0].dtype
        heads = self.layer.num_kv_heads
        self.keys = [random((n, heads, self.layer.k_dim), dtype, 10 + b) for b, n in enumerate(seq_lens)]
        self.values = [random((n, heads, self.layer.v_dim), dtype, 90 + b) for b, n in enumerate(seq_lens)]
        ids = [(s << SEGMENT_BITS) | i for s in range(segments) for i in range(per_segment)]
        generator = torch.Generator().manual_seed(1)
        orders = [iter(torch.randperm(len(ids), generator=generator).tolist()) for _ in range(2)]
        self.tables = [torch.full((len(seq_lens), max(counts) + 1), GARBAGE_BLOCK, dtype=torch.int32) for _ in orders]
        for b in range(len(seq_lens)):
            if b not in padding:
                for table, blocks, order in zip(self.tables, (self.held(b), self.coded(b)), orders, strict=True):
                    for block in blocks:
                        table[b, block] = ids[next(order)]
                self.fill_old(b)
        self.metadata = AttentionMetadata(
            block_tables=self.tables[0].to(DEVICE),
            seq_lens=torch.tensor([0 if b in padding else n for b, n in enumerate(seq_lens)]).to(DEVICE, torch.int32),
            cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).to(DEVICE, torch.int32),
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(seq_lens),
            code_tables=self.tables[1].to(DEVICE),
            holds_new=holds_new,
        )
        self.padding = padding

    def geometry(self, b):
        """The first kept block, the first new token, and its and the last token's blocks."""
        size, old, new = self.layer.block_size, self.seq_lens[b] - self.q_lens[b], self.seq_lens[b]
        kept = 0 if self.keep_last is None else max(new - self.keep_last, 0) // size
        return kept, old, old // size, (new - 1) // size

    def held(self, b):
        """Numbers of the wide blocks that there are."""
        kept, old, f, own = self.geometry(b)
        first = max(f - 1, 0) if self.holds_new else own - 1
        has_some = [block >= kept or block * self.layer.block_size < old for block in range(own + 1)]
        return [block for block in range(own + 1) if has_some[block] and (block == 0 or block >= first)]

    def coded(self, b):
        """Numbers of the blocks that become codes."""
        kept, _, f, own = self.geometry(b)
        return range(max(f - 1, 1, kept), own - 1)

    def fill_old(self, b):
        """The rows that are there already."""
        size, old = self.layer.block_size, self.seq_lens[b] - self.q_lens[b]
        for block in self.held(b):
            rows = max(min(old - block * size, size), 0)
            self.write_rows(self.layer, b, block, 0, rows)

    def write_rows(self, layer, b, block, first, end):
        tokens = slice(block * layer.block_size + first, block * layer.block_size + end)
        for segments, dense in ((layer.wide.k_segments, self.keys[b]), (layer.wide.v_segments, self.values[b])):
            at(segments, int(self.tables[0][b, block]))[:, first:end] = dense[tokens].transpose(0, 1)

    def new(self, dense):
        """The new tokens of each sequence, packed as a slice of a fused projection."""
        packed = torch.cat([x[len(x) - n :] for x, n in zip(dense, self.q_lens, strict=True)])
        return torch.cat([packed, packed, packed], 1)[:, packed.shape[1] : 2 * packed.shape[1]]

    def expected(self):
        """What the layer's tensors hold afterwards."""
        layer = self.layer
        wide, codes = (
            LayerKV(tuple(t.clone() for t in x.k_segments), tuple(t.clone() for t in x.v_segments), x.segment_offsets)
            for x in (layer.wide, layer.codes)
        )
        result, size = QuantizedKV(wide, codes, layer.format), layer.block_size
        for b, new in enumerate(self.seq_lens):
            if b in self.padding:
                continue
            kept, old, _, _ = self.geometry(b)
            for block in self.held(b):
                first, end = max(old - block * size, 0), min(new - block * size, size)
                if first < end and block >= kept:
                    self.write_rows(result, b, block, first, end)
            for block in self.coded(b):
                rows = slice(block * size, (block + 1) * size)
                code_id = int(self.tables[1][b, block])
                keys, values = codes_of(self.keys[b][rows], self.values[b][rows], layer.format)
                at(codes.k_segments, code_id)[:], at(codes.v_segments, code_id)[:] = keys, values
        return tensors_of(result)

    def check(self):
        """Stores and compares everything; gives how many blocks should become codes."""
        expected = self.expected()
        store_kv(self.new(self.keys), self.new(self.values), self.layer, self.metadata, self.keep_last)
        for got, want in zip(tensors_of(self.layer), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        return sum(len(self.coded(b)) for b in range(len(self.seq_lens)) if b not in self.padding)


@pytest.mark.parametrize("dtype, fmt", few([torch.float32, torch.float16, torch.bfloat16], FORMATS))
def test_fresh_prompts(fmt, dtype):
    """Of three lengths: with codes, without, and of a few tokens."""
    case = StoreCase([33 * 4, 40, 2], [33 * 4, 40, 2], fmt, holds_new=False, dtype=dtype)
    assert len(case.coded(0)) == 2 and case.held(0) == [0, 3, 4]
    assert case.check()


@pytest.mark.parametrize("fmt, old", [("int8", 64), ("fp8", 65), ("int4", 95)])
def test_chunks_behind_old_tokens(fmt, old):
    """From the first, the second and the last row of a block on: old rows come from wide blocks."""
    case = StoreCase([70, 64, 3, 1, 0], [old + 70, old + 64, old + 3, old + 1, old], fmt, segments=3)
    assert case.coded(0)[0] == 1 and case.held(0)[:3] == [0, 1, 2]
    assert case.check()


def test_few_tokens_over_a_block_boundary():
    case = StoreCase([2, 2, 2], [97, 96, 98])
    assert [list(case.coded(b)) for b in range(3)] == [[1], [], []]
    assert case.check()


def test_short_sequences_have_no_codes():
    case = StoreCase([64, 33, 2], [64, 65, 33])
    assert not any(len(case.coded(b)) for b in range(3))
    assert not case.check()


def test_a_step_goes_to_wide_blocks():
    case = StoreCase([1, 1, 1], [96, 97, 1], padding=(1,))
    assert not case.check()


def test_padding_rows_are_not_stored():
    case = StoreCase([70, 70, 70], [134, 134, 90], padding=(1,))
    assert case.check()


@pytest.mark.parametrize("keep_last", [40, 64, 70, 1000])
def test_keep_last_writes_whole_blocks(keep_last):
    """A block with some token that is kept is written in full: it will be read, or become codes, as a whole."""
    case = StoreCase([200, 90], [200, 90], "fp8", holds_new=False, keep_last=keep_last)
    assert bool(case.check()) == (keep_last != 40)


def test_keep_last_of_a_chunk():
    case = StoreCase([170], [240], "int4", keep_last=100)
    assert list(case.coded(0)) == [4, 5] and case.check()


@pytest.mark.parametrize("dims, fmt", few([(80, 48), (96, 112), (16, 128), (256, 64)], FORMATS))
def test_head_sizes(fmt, dims):
    case = StoreCase([193], [258], fmt, dims=dims, heads=1, segments=1, block_size=64)
    assert case.check() == 2


@pytest.mark.parametrize("block_size, fmt", few([64, 128], FORMATS))
def test_block_sizes_and_strides(fmt, block_size):
    case = StoreCase([block_size + 3], [3 * block_size + 2], fmt, block_size=block_size, cpu=True, dtype=torch.float16)
    assert case.check()


def wide_block(layer, seed):
    shape = (layer.block_size, layer.num_kv_heads)
    dtype = layer.wide.k_segments[0].dtype
    return random((*shape, layer.k_dim), dtype, seed), random((*shape, layer.v_dim), dtype, seed + 1)


# int4, whose keys have two groups of scales, in float32: both ways then, wherever this runs.
@pytest.mark.parametrize("dtype, fmt", few([torch.float16, torch.bfloat16, torch.float32], FORMATS))
def test_blocks_to_codes_and_back(fmt, dtype):
    """In layers of two kinds; nothing but the targets is written, and nothing of pairs that are none."""
    layers = [make_layer(fmt, 3, dtype=dtype, dims=dims, block_size=64) for dims in ((64, 64), (80, 48), (64, 64))]
    later = 1 << SEGMENT_BITS
    pairs = torch.tensor([[1, later + 2], [later, 0]], dtype=torch.int32)
    blocks = [[wide_block(layer, 10 * i + j) for j in range(2)] for i, layer in enumerate(layers)]
    expected = []
    for layer, contents in zip(layers, blocks, strict=True):
        for (wide_id, _), (keys, values) in zip(pairs.tolist(), contents, strict=True):
            at(layer.wide.k_segments, wide_id)[:] = keys.transpose(0, 1)
            at(layer.wide.v_segments, wide_id)[:] = values.transpose(0, 1)
        wanted = [t.clone() for t in tensors_of(layer)]
        for (_, code_id), (keys, values) in zip(pairs.tolist(), contents, strict=True):
            key_codes, value_codes = codes_of(keys, values, layer.format)
            at(wanted[4:6], code_id)[:], at(wanted[6:8], code_id)[:] = key_codes, value_codes
        expected.append(wanted)
    quantize_blocks(layers, torch.nn.functional.pad(pairs, (0, 0, 1, 2), value=-1).to(DEVICE))
    check_layers(layers, expected)
    if not casts_are_right(dtype):
        return

    pairs_back = torch.tensor([[later + 2, later + 1], [0, 0]], dtype=torch.int32)
    for layer, wanted in zip(layers, expected, strict=True):
        for code_id, wide_id in pairs_back.tolist():
            size, dims = layer.block_size, (layer.k_dim, layer.v_dim)
            key_codes, value_codes = at(wanted[4:6], code_id).cpu(), at(wanted[6:8], code_id).cpu()
            keys = kv_codes.dequantize_keys(key_codes, layer.format, size, dims[0])
            values = kv_codes.dequantize_values(value_codes, layer.format, size, dims[1])
            at(wanted[0:2], wide_id)[:], at(wanted[2:4], wide_id)[:] = keys.to(dtype), values.to(dtype)
    dequantize_blocks(layers, pairs_back.to(DEVICE))
    check_layers(layers, expected)


def check_layers(layers, expected):
    for layer, wanted in zip(layers, expected, strict=True):
        for got, want in zip(tensors_of(layer), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x * 0,
        lambda x: x * 1e30,
        lambda x: x * 1e-38,
        lambda x: x * 1e-44,
        lambda x: x * 0 - 3e38,
        lambda x: torch.linspace(-448, 448, x.numel()).view(x.shape),
        lambda x: torch.where(x > 0, x, -0.0),
        lambda x: (x * 8).round() / 16,
    ],
    ids=["zeros", "huge", "subnormal", "tiny", "one-number", "line", "negative-zeros", "ties"],
)
def test_extreme_numbers(fmt, fill):
    layer = make_layer(fmt, 1, heads=1, segments=1)
    keys, values = (fill(torch.randn(32, 1, 64)).to(DEVICE) for _ in range(2))
    layer.wide.k_segments[0][0] = keys.transpose(0, 1)
    layer.wide.v_segments[0][0] = values.transpose(0, 1)
    quantize_blocks([layer], torch.zeros(1, 2, dtype=torch.int32, device=DEVICE))
    wanted = codes_of(keys, values, layer.format)
    assert torch.equal(layer.codes.k_segments[0][0], wanted[0])
    assert torch.equal(layer.codes.v_segments[0][0], wanted[1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_numbers_of_one_sign_beside_dimensions_that_are_not_there(fmt):
    """A head of 80 is read as one of 128; of its tokens' minimum, or of their maximum, those zeros are no part."""
    layer = make_layer(fmt, 1, heads=1, dims=(80, 80), segments=1)
    x = torch.rand(32, 1, 80).to(DEVICE) + 5
    x[16:] *= -1
    layer.wide.k_segments[0][0] = layer.wide.v_segments[0][0] = x.transpose(0, 1)
    quantize_blocks([layer], torch.zeros(1, 2, dtype=torch.int32, device=DEVICE))
    wanted = codes_of(x, x, layer.format)
    assert torch.equal(layer.codes.k_segments[0][0], wanted[0])
    assert torch.equal(layer.codes.v_segments[0][0], wanted[1])


def test_every_float8_comes_back():
    """Each code of a value, in units of 1, and each of a key with a scale of 1 and a zero of 0."""
    layer = make_layer("fp8", 1, heads=1, segments=1)
    codes = torch.arange(256, dtype=torch.uint8).where(torch.arange(256) % 128 != 127, 0).repeat(8).view(32, 64)
    numbers = codes.view(torch.float8_e4m3fn).float()
    key_bytes, value_bytes = layer.codes.k_segments[0][0, 0], layer.codes.v_segments[0][0, 0]
    low, high = codes.to(torch.int16).chunk(2, 1)
    words = (low | high << 8).to(DEVICE)
    key_bytes[:2048].view(torch.int16)[:], value_bytes[:2048].view(torch.int16)[:] = words.flatten(), words.T.flatten()
    key_bytes[2048:2176].view(torch.float16)[:], key_bytes[2176:] = 1, 0
    value_bytes[2048:2112].view(torch.float16)[:], value_bytes[2112:2116].view(torch.float32)[:] = 448, 1
    dequantize_blocks([layer], torch.zeros(1, 2, dtype=torch.int32, device=DEVICE))
    assert torch.equal(layer.wide.k_segments[0][0, 0].cpu(), numbers)
    assert torch.equal(layer.wide.v_segments[0][0, 0].cpu(), numbers)


def test_no_blocks():
    layer = make_layer("int8", 1)
    CodeAddresses([layer]).quantize(torch.empty(0, 2, dtype=torch.int32, device=DEVICE))
    assert all((t == 0xFF).all() for t in layer.codes.k_segments)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda k, v: (k[:, :1], v), "k and v must be"),
        (lambda k, v: (k, v[..., :8]), "k and v must be"),
        (lambda k, v: (k.double(), v), "dtype"),
        (lambda k, v: (k.transpose(1, 2).contiguous().transpose(1, 2), v), "stride 1"),
    ],
)
def test_wrong_arguments(change, message):
    case = StoreCase([2], [40])
    k, v = change(case.new(case.keys), case.new(case.values))
    with pytest.raises(ValueError, match=message):
        store_kv(k, v, case.layer, case.metadata)


def test_wrong_keep_last_and_missing_table():
    case = StoreCase([2], [40])
    k, v = case.new(case.keys), case.new(case.values)
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        store_kv(k, v, case.layer, case.metadata, keep_last=0)
    case.metadata.code_tables = None
    with pytest.raises(ValueError, match="code_tables"):
        store_kv(k, v, case.layer, case.metadata)


def test_wrong_block_size():
    with pytest.raises(ValueError, match="block size must be one of"):
        CodeAddresses([make_layer("int8", 1, block_size=16)])
