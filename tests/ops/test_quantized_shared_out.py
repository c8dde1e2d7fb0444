"""Attention over a quantized cache whose programs share the keys of all sequences out, against plain attention.

What no kernel has written yet is NaN throughout.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from combinations import few
from kv_oracle import Rows
from oracle import GARBAGE_BLOCK
from test_quantized_attention import DEVICE, FORMATS, HEADS, ON_GPU, SIZE, SIZES, VARIANTS, Kernel, check, make
from test_tree_quantized import SMALL, Trees
from test_tree_quantized import check as check_trees

from hf_turbo.ops import quantized_attention
from hf_turbo.ops.kv_format import KV_FORMATS
from hf_turbo.ops.merge_splits import join_splits
from hf_turbo.ops.metadata import AttentionMetadata, new_arrivals


class SharedOut(Kernel):
    """The kernel with counters, which it must leave as they were."""

    def __init__(self, arrivals=None, **changes):
        super().__init__(**changes)
        self.arrivals = new_arrivals(torch.device(DEVICE)) if arrivals is None else arrivals
        self.before = self.arrivals.clone()

    def paged_attention(self, q, kv, metadata, **arguments):
        out = super().paged_attention(q, kv, dataclasses.replace(metadata, arrivals=self.arrivals), **arguments)
        assert torch.equal(self.arrivals, self.before)
        return out


def shared_out(fmt, lengths, num_splits=3, arrivals=None, programs_per_sm=4, **options):
    rows = make(fmt, lengths, **options)
    rows.attention = SharedOut(arrivals, num_splits=num_splits, programs_per_sm=programs_per_sm)
    return rows


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    empty = torch.empty

    def poisoned_empty(*shape, **options):
        x = empty(*shape, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture
def joins(monkeypatch):
    """What is joined, in Triton's interpreter, which calls what Python finds."""
    if ON_GPU:
        pytest.skip("needs Triton's interpreter")
    calls = []

    def counted(*args):
        calls.append(args)
        return join_splits(*args)

    monkeypatch.setattr("hf_turbo.ops.merge_splits.join_splits", counted)
    return calls


@pytest.mark.parametrize("splits, fmt", few([2, 7], KV_FORMATS))
def test_steps(splits, fmt):
    """Rows whose blocks are all wide, few of which are codes, and most."""
    rows = shared_out(fmt, [6 * SIZE + 1, 4 * SIZE + 1, SIZE, 2], splits, programs_per_sm=4 if splits == 2 else 9)
    check(rows, [6 * SIZE - 1, 4 * SIZE - 1, SIZE - 2, 0], [1, 1, 1, 1], [1, 1, 1, 1], attend_from=1)


def test_only_the_last_to_arrive_joins(joins):
    rows = shared_out("int8", [6 * SIZE, 3], heads=2, group=1)
    check(rows, [6 * SIZE - 1, 2], [1, 1], attend_from=1)
    assert len(joins) == 2  # KV heads; of the short sequence there is nothing to join


@FORMATS
def test_chunks(fmt):
    """Several tiles of rows a sequence, one of which has no queries, and a step among them."""
    rows = shared_out(fmt, [5 * SIZE + 3, SIZE, 4 * SIZE + 1], programs_per_sm=9)
    check(rows, [4 * SIZE - 5, SIZE, 4 * SIZE], [SIZE + 8, 0, 1], attend_from=1)


@pytest.mark.parametrize("fmt, window", few(KV_FORMATS, [1, 20, SIZE, 4 * SIZE + 1] if ON_GPU else [20, 4 * SIZE + 1]))
def test_sliding_window(fmt, window):
    """Of which all blocks are wide; without the first block, which is wide, and codes before the wide ones."""
    rows = shared_out(fmt, [6 * SIZE + 4, 3 * SIZE + 2], window=window)
    check(rows, [6 * SIZE - 5, 3 * SIZE], [8, 1], [1, 1], attend_from=1)


def test_a_window_bounds_the_shares(joins):
    """What a sequence has before it weighs nothing: of two blocks there is nothing to split."""
    lengths = [9 * SIZE, *[SIZE] * 6]
    rows = shared_out("int8", lengths, window=20, programs_per_sm=1)
    check(rows, [n - 1 for n in lengths], [1] * 7, attend_from=1)
    assert not joins


@pytest.mark.parametrize("fmt, name", few(KV_FORMATS, VARIANTS))
def test_soft_cap_and_sinks(fmt, name):
    rows = shared_out(fmt, [5 * SIZE, 3 * SIZE + 3, 1], **VARIANTS[name])
    check(rows, [5 * SIZE - 1, 3 * SIZE, 0], [1, 3, 1], attend_from=1)


@pytest.mark.parametrize("fmt, sizes", few(KV_FORMATS, SIZES), ids=str)
def test_heads_and_sizes(fmt, sizes, request):
    heads, group, k_dim, v_dim = sizes
    rows = shared_out(fmt, [4 * 64 + 1], block_size=64, heads=heads, group=group, k_dim=k_dim, v_dim=v_dim)
    if not ON_GPU:
        joins = request.getfixturevalue("joins")
    check(rows, [4 * 64], [1], attend_from=1)
    assert ON_GPU or joins


@FORMATS
def test_rows_of_a_step_that_are_not_used(fmt):
    """Sequences without queries, or without tokens, and one for the rows that are left over."""
    q_lens = [1, 0, 5, 0, 1, 3]
    rows = shared_out(fmt, [5 * SIZE, 1, 3 * SIZE, 12, 6 * SIZE, 3], sinks=True)
    rows.forward([5 * SIZE - 1, 0, 3 * SIZE - 5, 12, 6 * SIZE - 1, 0], attend=False)
    attention, rows.attention = rows.attention, SimpleNamespace(paged_attention=lambda q, kv, metadata, **_: metadata)
    metadata = rows.forward(q_lens)
    metadata.seq_lens[5] = 0
    metadata.block_tables[5] = metadata.code_tables[5] = GARBAGE_BLOCK
    q = torch.cat([row.q[row.length - n : row.length] for row, n in zip(rows.rows, q_lens)])
    out = attention.paged_attention(q, rows.kv, metadata, **rows.arguments)
    for i, part in enumerate(out.split(q_lens)[:5]):
        wanted = rows.expected(i, rows.rows[i].length - len(part), rows.rows[i].length)
        torch.testing.assert_close(part.double(), wanted, rtol=1e-4, atol=1e-4)
    assert (out[-3:] == 0).all()


def test_no_counter_is_of_two_tiles():
    """Programs that run at once come in any order. Here each tile of each head has two; other counters are spoilt."""
    rows = shared_out("int8", [5 * SIZE] * 3, 2, heads=2, group=1, programs_per_sm=9)
    mine = torch.tensor([0, 1, 4, 5, 8, 9], device=DEVICE)  # first items 0, 2 and 4, of 2 KV heads each
    rows.attention.arrivals.fill_(1000).index_fill_(0, mine, 0)
    rows.attention.before.copy_(rows.attention.arrivals)
    check(rows, [5 * SIZE - 1] * 3, [1] * 3, attend_from=1)


def test_too_few_counters():
    """None is used: those behind them are others', here of a kernel under way."""
    counters = torch.full((64,), 1000, dtype=torch.int32, device=DEVICE)
    counters[:4] = 0
    rows = shared_out("int8", [5 * SIZE, 9], arrivals=counters[:4])
    check(rows, [5 * SIZE - 1, 8], [1, 1], attend_from=1)
    assert (counters[4:] == 1000).all()


def test_trees_do_without():
    rows = Trees("int4", [4 * SIZE, 70], 8, block_size=SIZE, device=DEVICE, **HEADS)
    counters = torch.full((AttentionMetadata.MAX_ARRIVALS,), 1000, dtype=torch.int32, device=DEVICE)
    metadata = dataclasses.replace(rows.store_trees(), arrivals=counters)
    out = torch.full((16, rows.rows[0].q.shape[1], rows.kv.v_dim), torch.nan, device=DEVICE)
    rows.attend(metadata, quantized_attention, out=out, config=dataclasses.replace(SMALL, num_splits=2))
    check_trees(rows, out)
    assert (counters == 1000).all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
@FORMATS
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_real_sizes(fmt, window, dtype):
    """16 ragged rows of an 8B model by the table's own configuration: a grid of so many splits a row gives the same."""
    lengths = [2, 64, 65, 200, 600, 601, 640, 1000, 63, 129, 130, 2048, 700, 1300, 90, 7000]
    options = dict(block_size=64, heads=8, group=4, k_dim=128, dtype=dtype, device=DEVICE, segments=2, scattered=True)
    rows = Rows(fmt, lengths, window=window, **options)
    rows.forward([n - 1 for n in lengths], attend=False)
    outs = []
    counters = new_arrivals(torch.device(DEVICE))

    class Both:
        @staticmethod
        def paged_attention(q, kv, metadata, **arguments):
            for arrivals in (None, counters, counters):
                out = torch.full_like(q, torch.nan)
                given = dataclasses.replace(metadata, max_seqlen_k=8192, arrivals=arrivals)
                outs.append(quantized_attention.paged_attention(q, kv, given, **arguments, out=out))
                assert not counters.any()
            return outs[-1]

    rows.attention = Both
    check(rows, [1] * 16)
    assert torch.equal(outs[1], outs[2])
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(outs[1], outs[0], rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
@FORMATS
def test_captured_graph_is_valid_at_every_length(fmt):
    """Whose rows had no tokens when it was captured."""
    lengths = [300, 64 * 40, 64 * 7 + 1, 2] * 4
    options = dict(block_size=64, heads=2, group=4, k_dim=128, dtype=torch.bfloat16, device=DEVICE)
    rows = Rows(fmt, [n + 3 for n in lengths], **options)
    rows.forward(lengths, attend=False)
    tables = [torch.full((16, 64), GARBAGE_BLOCK, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    step = AttentionMetadata(
        tables[0], torch.zeros(16, dtype=torch.int32, device=DEVICE),
        torch.arange(17, dtype=torch.int32, device=DEVICE), max_seqlen_q=1, max_seqlen_k=4096,
        code_tables=tables[1], arrivals=new_arrivals(torch.device(DEVICE)),
    )  # fmt: skip
    q, out = (torch.zeros(16, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    scale = rows.arguments["softmax_scale"]
    quantized_attention.paged_attention(q, rows.kv, step, scale, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized_attention.paged_attention(q, rows.kv, step, scale, out=out)

    class Replay:
        @staticmethod
        def paged_attention(newest, kv, metadata, **rest):
            q.copy_(newest)
            for target, table in zip(tables, (metadata.block_tables, metadata.code_tables)):
                target[:, : table.shape[1]].copy_(table)
            step.seq_lens.copy_(metadata.seq_lens)
            out.fill_(torch.nan)
            graph.replay()
            assert not step.arrivals.any()
            return out

    rows.attention = Replay
    check(rows, [1] * 16, [1] * 16, [1] * 16)
