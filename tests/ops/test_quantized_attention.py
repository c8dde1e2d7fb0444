"""The Triton attention over a quantized cache, against plain attention in float64 over numbers quantized by blocks."""

import dataclasses

import pytest
import torch
from combinations import few
from kv_oracle import Rows

from hf_turbo.ops import quantized_attention
from hf_turbo.ops.attention_config import AttentionConfig, DeviceFacts
from hf_turbo.ops.kv_format import KV_FORMATS
from hf_turbo.ops.quantized_attention_config import choose_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = pytest.mark.parametrize("fmt", list(KV_FORMATS))
SIZE = 32
ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * ON_GPU
# Triton's interpreter takes seconds for what a GPU does at once.
HEADS = {"heads": 2, "group": 3} if ON_GPU else {"heads": 1, "group": 2}


class Kernel:
    """`quantized_attention` with a configuration, into an output of NaN."""

    def __init__(self, **changes):
        self.changes = changes

    def paged_attention(self, q, kv, metadata, softmax_scale, logit_softcap, sinks):
        rows = metadata.max_seqlen_q * q.shape[1] // kv.num_kv_heads
        facts = quantized_attention.device_facts(q.device)
        config = choose_config(rows, 64, kv.k_dim, kv.v_dim, kv.block_size, q.dtype, kv.format.bits, facts)
        config = dataclasses.replace(config, **self.changes)
        out = torch.full((*q.shape[:2], kv.v_dim), torch.nan, dtype=q.dtype, device=q.device)
        arguments = (q, kv, metadata, softmax_scale, logit_softcap, sinks)
        assert quantized_attention.paged_attention(*arguments, out, config=config) is out
        return out


def allowed(wanted, dtype):
    """What fp16 keys and weights, and an output in dtype, may be off by."""
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1.2e-2}[dtype] * wanted.abs().max().item()


def check(rows, *forwards, attend_from=0):
    """Runs forwards; those from `attend_from` on attend."""
    for number, q_lens in enumerate(forwards):
        out = rows.forward(q_lens, attend=number >= attend_from)
        if out is None:
            continue
        for i, part in enumerate(out.split(q_lens)):
            if len(part):
                row = rows.rows[i]
                wanted = rows.expected(i, row.length - len(part), row.length)
                error = (part.double() - wanted).abs().max().item()
                assert error <= allowed(wanted, out.dtype), f"row {i}: {error:.2e}"


def make(fmt, lengths, changes=None, **options):
    options = {"block_size": SIZE, "device": DEVICE, "scattered": True, "segments": 2, **HEADS, **options}
    return Rows(fmt, lengths, attention=Kernel(**(changes or {})), **options)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3, 7] if ON_GPU else [1, 5])
def test_steps(fmt, dtype, splits):
    """Rows whose blocks are all wide, few of which are codes, and most; the last splits may have none."""
    rows = make(fmt, [6 * SIZE + 1, 4 * SIZE + 1, SIZE, 2], {"num_splits": splits}, dtype=dtype)
    check(rows, [6 * SIZE - 1, 4 * SIZE - 1, SIZE - 2, 0], [1, 1, 1, 1], [1, 1, 1, 1], attend_from=1)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks(fmt, dtype):
    """Queries of several blocks at once: each sees its own block and the one before wide."""
    rows = make(fmt, [5 * SIZE + 3, SIZE, 3 * SIZE + 1], {"block_m": 32}, dtype=dtype)
    check(rows, [4 * SIZE - 5, SIZE, 3 * SIZE], [SIZE + 8, 0, 1], attend_from=1)


@FORMATS
def test_prompt_through_the_blocks(fmt):
    check(make(fmt, [3 * SIZE + 7, 3], {"block_m": 64}), [3 * SIZE + 7, 3])


@FORMATS
@pytest.mark.parametrize("window", [1, 20, SIZE, 2 * SIZE + 5, 4 * SIZE + 1] if ON_GPU else [20, 2 * SIZE + 5])
def test_sliding_window(fmt, window):
    """Of a block that is half out of the window, of one behind the wide ones, and without the first block."""
    rows = make(fmt, [5 * SIZE + 4, 3 * SIZE + 2], {"block_m": 32}, window=window)
    check(rows, [5 * SIZE - 5, 3 * SIZE], [8, 1], [1, 1], attend_from=1)


VARIANTS = {
    "soft cap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"softcap": 2.0, "sinks": True, "window": 70},
}


@pytest.mark.parametrize("fmt, name", few(KV_FORMATS, VARIANTS))
@pytest.mark.parametrize("splits", [1, 3] if ON_GPU else [3])
def test_soft_cap_and_sinks(fmt, name, splits):
    rows = make(fmt, [5 * SIZE, 3 * SIZE + 3, 1], {"num_splits": splits}, **VARIANTS[name])
    check(rows, [5 * SIZE - 1, 3 * SIZE, 0], [1, 3, 1], attend_from=1)


#: KV heads, query heads of each, key and value size.
SIZES = [(1, 1, 16, 32), (2, 7, 80, 80), (1, 12, 96, 64), (3, 2, 112, 128), (1, 4, 256, 256)]


@pytest.mark.parametrize("fmt, sizes", few(KV_FORMATS, SIZES), ids=str)
def test_heads_and_sizes(fmt, sizes):
    """Head sizes that are no powers of two, keys and values of different size; groups from 1 to 12."""
    heads, group, k_dim, v_dim = sizes
    size = 64  # int4 keys of which have two groups of scales
    rows = make(fmt, [4 * size + 1], block_size=size, heads=heads, group=group, k_dim=k_dim, v_dim=v_dim)
    check(rows, [4 * size], [1], attend_from=1)


@FORMATS
@pytest.mark.parametrize("block_size", [64, 128])
def test_block_sizes(fmt, block_size):
    check(make(fmt, [4 * block_size], block_size=block_size, heads=1), [4 * block_size - 1], [1], attend_from=1)


def test_padding_rows_are_left_alone():
    """Rows of a captured step that no sequence has: their length is 0, their tables are anything."""
    rows = make("int8", [4 * SIZE, 3 * SIZE])
    rows.forward([4 * SIZE - 1, 3 * SIZE], attend=False)
    for row in rows.rows:
        row.length = min(row.length + 1, 4 * SIZE)
    rows.rows[1].length = 0
    metadata = rows.metadata([1, 1])
    metadata.seq_lens[1] = 0
    q = torch.randn(2, HEADS["heads"] * HEADS["group"], 16, device=DEVICE)
    out = Kernel(num_splits=2).paged_attention(q, rows.kv, metadata, 0.25, None, None)
    assert not out.isnan().all()


def test_codes_are_what_is_read():
    """Shown by failing: with the codes of other numbers the error is far beyond what is allowed."""
    rows = make("int4", [6 * SIZE])
    rows.forward([6 * SIZE - 1], attend=False)
    rows.kv.codes.k_segments[0].random_(0, 100)
    with pytest.raises(AssertionError):
        check(rows, [1])


def test_what_is_refused():
    rows = make("int8", [SIZE], heads=2)
    kv, metadata = rows.kv, rows.metadata([0])
    q = torch.randn(1, 6, 16, device=DEVICE)
    metadata.max_seqlen_q = 1
    attend = quantized_attention.paged_attention
    with pytest.raises(ValueError, match="a multiple of 2, 16"):
        attend(q[:, :5], kv, metadata, 1.0)
    with pytest.raises(ValueError, match=r"dtype torch\.float32"):
        attend(q.half(), kv, metadata, 1.0)
    with pytest.raises(ValueError, match="softmax_scale must be positive"):
        attend(q, kv, metadata, 0.0)
    with pytest.raises(ValueError, match="sinks must be"):
        attend(q, kv, metadata, 1.0, sinks=torch.zeros(5))
    with pytest.raises(ValueError, match="out must be"):
        attend(q, kv, metadata, 1.0, out=q[:, :, :8])
    metadata.code_tables = None
    with pytest.raises(ValueError, match="code_tables"):
        attend(q, kv, metadata, 1.0)


def test_configurations():
    """Every one fits what the kernel can do."""
    facts = dataclasses.replace(quantized_attention.device_facts(torch.device("cpu")), capability=90)
    for rows in (1, 7, 9, 64, 65, 4096):
        for dtype in (torch.float32, torch.bfloat16):
            for bits in (4, 8):
                config: AttentionConfig = choose_config(rows, 64, 128, 128, 64, dtype, bits, facts)
                assert (
                    config.block_m >= 8 and config.tile == 64 and config.pdl == (rows <= 64 and dtype == torch.bfloat16)
                )


@pytest.mark.parametrize("bits, rows, num_programs, kind", [
    (4, 4, 66, (4, 2, None)),  # few sequences: half of an H200's multiprocessors
    (4, 4, 67, (2, 3, 168)),
    (4, 16, 67, (4, 2, None)),
    (8, 4, 66, (4, 3, None)),
    (8, 4, 67, (4, 3, None)),
    (8, 16, 67, (4, 2, None)),
])  # fmt: skip
def test_steps_of_few_and_of_many_sequences(bits, rows, num_programs, kind):
    """Warps, blocks in flight and the most registers; int4's codes are unpacked by few warps where there are many."""
    config = choose_config(rows, num_programs, 128, 128, 64, torch.bfloat16, bits, DeviceFacts(132, 90, 232448))
    assert (config.num_warps, config.num_stages, config.max_registers) == kind
