"""Rows of a fixed-shape batch that no sequence has: they have queries and a length of 0.

Nothing is written for them and their table, which holds anything, is not read; attention gives zeros.
"""

import pytest
import torch
from combinations import few
from kv_oracle import Rows
from oracle import GARBAGE_BLOCK, allowed_error, expected, make_case

from hf_turbo.ops import (
    paged_attention,
    quantize_kv,
    quantized_attention,
    reference,
    reference_kv,
    reference_layers,
    rotary,
    store_kv,
)
from hf_turbo.ops.attention_config import AttentionConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Queries of each row: a decode step, and what several nodes or a prompt's chunk take.
Q_LENS = pytest.mark.parametrize("q_len", [1, 2, 20])
SPLIT = AttentionConfig(block_m=32, tile=32, num_warps=4, num_stages=2, peel=True, num_splits=2)


def empty(metadata, row):
    """Takes a row's tokens and blocks from it, and leaves its queries."""
    metadata.seq_lens[row] = metadata.seq_lens_cpu[row] = 0
    metadata.block_ids_cpu[row], metadata.first_blocks_cpu[row] = [], 0
    metadata.block_tables[row] = GARBAGE_BLOCK
    if metadata.code_tables is not None:
        metadata.code_tables[row] = GARBAGE_BLOCK
        metadata.coded_rows.code_ids[row], metadata.coded_rows.anchors[row] = [], None
    return metadata


def make(q_len, **options):
    """Three rows, of which the middle one is unused; and its queries."""
    case = make_case([q_len] * 3, [q_len + 7, q_len + 9, q_len + 20], num_segments=2, device=DEVICE, **options)
    empty(case.metadata, 1)
    return case, slice(q_len, 2 * q_len)


def store(module, k, v, case):
    if module is store_kv or module is reference:
        module.store_kv(k, v, case.kv, case.metadata)
    else:
        options = dict(cos=None, sin=None, kv=case.kv, metadata=case.metadata, rotary_dim=0)
        assert not module.rotary_store_kv(torch.zeros(len(k), 4, 32, device=DEVICE), k, v, **options).isnan().any()


@Q_LENS
@pytest.mark.parametrize("module", [reference, store_kv, reference_layers, rotary], ids=lambda m: m.__name__)
def test_nothing_is_stored(module, q_len):
    """The other rows' tokens have their slots, and all other slots are still NaN."""
    case, _ = make(q_len, fill=False)
    k, v = (torch.cat([x[len(x) - q_len :] for x in dense]) for dense in (case.keys, case.values))
    store(module, k, v, case)
    for segments, dense in ((case.kv.k_segments, case.keys), (case.kv.v_segments, case.values)):
        wanted = [torch.full_like(segment, torch.nan) for segment in segments]
        for row in (0, 2):
            for position in range(len(dense[row]) - q_len, len(dense[row])):
                segment, block, offset = case.slot(row, position)
                wanted[segment][block, :, offset] = dense[row][position]
        torch.testing.assert_close(list(segments), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options, q_len", few([{}, {"sinks": True, "sliding_window": 6}], [1, 2, 20]))
@pytest.mark.parametrize("module", [reference, paged_attention], ids=lambda m: m.__name__)
def test_attention_gives_zeros(module, options, q_len):
    case, unused = make(q_len, **options)
    case.keys[1], case.values[1] = case.keys[1][:q_len], torch.zeros_like(case.values[1][:q_len])
    for extra in ({}, {"config": SPLIT}) if module is paged_attention else ({},):
        out = module.paged_attention(case.q, case.kv, case.metadata, **case.arguments, **extra)
        assert (out[unused] == 0).all()
        assert (out.double() - expected(case)).abs().max() <= allowed_error(case)


@Q_LENS
@pytest.mark.parametrize("ops, attention", [(reference_kv, reference_kv), (quantize_kv, quantized_attention)])
def test_quantized_cache(ops, attention, q_len):
    """Stores and attends with one row in the midst unused; its blocks stay poison."""
    size = 32
    options = dict(block_size=size, heads=1, group=2, device=DEVICE, scattered=True, segments=2)
    rows = Rows("int8", [4 * size + q_len, q_len, 3 * size + q_len], **options)
    rows.forward([4 * size, 0, 3 * size], attend=False)

    class Emptied:
        """The attention, or the store, with the middle row's metadata taken from it."""

        @staticmethod
        def paged_attention(q, kv, metadata, **arguments):
            return attention.paged_attention(q, kv, empty(metadata, 1), **arguments)

        @staticmethod
        def store_kv(k, v, kv, metadata, keep_last):
            ops.store_kv(k, v, kv, empty(metadata, 1), keep_last)

        quantize_blocks = staticmethod(reference_kv.quantize_blocks)

    rows.ops = rows.attention = Emptied
    out = rows.forward([q_len] * 3)
    for i, part in enumerate(out.split(q_len)):
        row = rows.rows[i]
        if i == 1:
            assert (part == 0).all()
            wide = [rows.kv.wide.k_segments[place >> 23][place & (1 << 23) - 1] for place in row.wide.values()]
            assert wide and all(block.isnan().all() for block in wide)
        else:
            wanted = rows.expected(i, row.length - q_len, row.length)
            assert (part.double() - wanted).abs().max() <= 2e-5 * wanted.abs().max()
