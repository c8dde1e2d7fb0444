import dataclasses

import pytest
import torch
from combinations import few
from oracle import allowed_error, expected, make_case

from hf_turbo.ops.attention_config import MAX_PARTIALS, AttentionConfig, choose_num_splits
from hf_turbo.ops.merge_splits import join_splits
from hf_turbo.ops.metadata import AttentionMetadata, new_arrivals
from hf_turbo.ops.paged_attention import _grid, paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = AttentionConfig(block_m=16, tile=16, num_warps=4, num_stages=2)
PEELED = dataclasses.replace(SMALL, peel=True)
SPLIT = dataclasses.replace(SMALL, num_splits=3)


def check(case, config=None):
    """Runs the op into a NaN-filled output and compares it with float64."""
    out = torch.full((case.q.shape[0], case.q.shape[1], case.values[0].shape[2]), torch.nan).to(case.q)
    result = paged_attention(case.q, case.kv, case.metadata, **case.arguments, out=out, config=config)
    assert result is out
    assert not out.isnan().any()
    error = (out.double() - expected(case)).abs().max().item()
    assert error <= allowed_error(case), f"error {error:.2e}, allowed {allowed_error(case):.2e}"
    return out


CONFIGS = {"plain": SMALL, "peeled": PEELED, "split": SPLIT, "shared out": SPLIT}


def shared_out(case, arrivals=None):
    """The same with counters: programs share the keys out."""
    arrivals = new_arrivals(torch.device(DEVICE)) if arrivals is None else arrivals
    return dataclasses.replace(case, metadata=dataclasses.replace(case.metadata, arrivals=arrivals))


def check_shared_out(case, config=SPLIT):
    case = shared_out(case)
    out = check(case, config)
    assert not case.metadata.arrivals.any()
    return out


def check_way(case, way):
    """With one of CONFIGS."""
    return check_shared_out(case) if way == "shared out" else check(case, CONFIGS[way])


@pytest.mark.parametrize("config, block_size", few(CONFIGS, [8, 16, 48, 64]))
def test_decode(config, block_size):
    case = make_case([1, 1, 1], [1, 37, 64], block_size=block_size, num_segments=2, device=DEVICE)
    check_way(case, config)


@pytest.mark.parametrize("config, block_size", few(CONFIGS, [8, 16]))
def test_prompt_chunks(config, block_size):
    """Ragged chunks over filled caches, a sequence without queries, and a fresh one, in one launch."""
    case = make_case([9, 0, 1, 21], [40, 7, 18, 21], block_size=block_size, num_segments=3, device=DEVICE)
    check_way(case, config)


@pytest.mark.parametrize("config, window", few(CONFIGS, [1, 5, 20, 100]))
def test_sliding_window(config, window):
    case = make_case([12, 1, 1], [45, 50, 3], block_size=8, sliding_window=window, num_segments=2, device=DEVICE)
    check_way(case, config)


@pytest.mark.parametrize("config, dtype", few(CONFIGS, [torch.float32, torch.float16]))
def test_soft_cap(config, dtype):
    case = make_case([3, 1], [20, 33], logit_softcap=1.5, dtype=dtype, device=DEVICE)
    check_way(case, config)


def test_soft_cap_of_small_scores_keeps_fp32():
    """A cap far above the scores changes little, and must not cost precision."""
    case = make_case([4], [20], logit_softcap=50.0, device=DEVICE)
    check(case, SMALL)


@pytest.mark.parametrize("config", CONFIGS)
def test_sinks(config):
    case = make_case([3, 1, 1], [20, 33, 1], sinks=True, device=DEVICE)
    check_way(case, config)


@pytest.mark.parametrize("config, sinks", few(CONFIGS, [False, True]))
def test_rows_that_see_nothing_are_zero(config, sinks):
    """The padding sequences of a fixed-shape batch: one query, a length of zero."""
    case = make_case([1, 1], [20, 16], sinks=sinks, num_segments=2, device=DEVICE)
    case.metadata.seq_lens[1] = case.metadata.seq_lens_cpu[1] = 0
    case.metadata.block_tables[1] = (1 << 31) - 1
    if config == "shared out":
        case = shared_out(case)
    out = torch.full_like(case.q, torch.nan)
    paged_attention(case.q, case.kv, case.metadata, **case.arguments, out=out, config=CONFIGS[config])
    assert (out[1] == 0).all()
    error = (out[0].double() - expected(case)[0]).abs().max().item()
    assert error <= allowed_error(case)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(3, 3), (6, 2), (7, 1), (40, 2)])
def test_groups(num_heads, num_kv_heads):
    case = make_case([2, 5], [17, 20], num_heads=num_heads, num_kv_heads=num_kv_heads, device=DEVICE)
    check(case, SMALL)
    check_shared_out(case)


SIZES = [(8, 8), (40, 40), (72, 72), (96, 96), (192, 128), (32, 64), (256, 256)]


@pytest.mark.parametrize("dtype, dims", few([torch.float32, torch.float16], SIZES), ids=str)
def test_head_sizes(dims, dtype):
    case = make_case([2], [19], k_dim=dims[0], v_dim=dims[1], dtype=dtype, num_segments=2, device=DEVICE)
    check(case, SPLIT)
    check_shared_out(case)


@pytest.mark.parametrize("layout", ["hnd", "nhd", "gaps"])
def test_layouts_and_strided_arguments(layout):
    case = make_case([2, 3], [17, 20], layout=layout, strided_q=True, num_segments=2, v_dim=48, device=DEVICE)
    check(case, SMALL)
    wide = torch.full((5, 9, 64), torch.nan, device=DEVICE)
    out = wide[:, 2:6, 8:56]
    paged_attention(case.q, case.kv, case.metadata, **case.arguments, out=out, config=SPLIT)
    assert (out.double() - expected(case)).abs().max().item() <= allowed_error(case)
    wide[:, 2:6, 8:56] = torch.nan
    assert wide.isnan().all()


@pytest.mark.parametrize("tile, block_size", few([32, 64], [16, 64, 192]))
def test_tiles_smaller_and_larger_than_blocks(block_size, tile):
    case = make_case([1, 6], [200, 70], block_size=block_size, num_segments=2, device=DEVICE)
    check(case, dataclasses.replace(PEELED, tile=tile, num_splits=2))


def test_everything_at_once():
    case = make_case(
        [20, 1, 0, 7],
        [70, 33, 12, 7],
        num_heads=6,
        k_dim=40,
        v_dim=24,
        block_size=24,
        num_segments=3,
        layout="gaps",
        sliding_window=18,
        logit_softcap=2.0,
        sinks=True,
        strided_q=True,
        device=DEVICE,
    )
    check(case, dataclasses.replace(PEELED, num_splits=2))
    check(case)
    check_shared_out(case, dataclasses.replace(PEELED, num_splits=2))
    check_shared_out(case, None)


def test_upper_bound_of_lengths_changes_nothing():
    """A captured graph keeps the bound of its capture: the grid is for that, the lengths are the device's."""
    case = make_case([1, 1], [40, 3], max_seqlen_k=4096, device=DEVICE)
    check(case)


def test_many_splits_of_a_short_sequence():
    case = make_case([1], [70], device=DEVICE)
    check(case, dataclasses.replace(SMALL, num_splits=67))


def test_more_splits_than_are_merged_at_once():
    case = make_case([1, 1], [640, 90], num_heads=1, num_kv_heads=1, device=DEVICE)
    check(case, dataclasses.replace(SMALL, num_splits=40))


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that no kernel has written yet holds NaN."""
    empty = torch.empty

    def poisoned_empty(*shape, **options):
        x = empty(*shape, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.mark.parametrize(
    "q_lens, seq_lens",
    [
        ([1, 1, 1], [16, 33, 130]),  # one split has all, some have none, all have some
        ([9, 9, 9], [9, 26, 140]),  # rows of a sequence in tiles of their own, which see as many tiles or one more
        ([9, 1, 4], [26, 16, 140]),  # the merge is not told how many splits there are
    ],
)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("way", ["split", "shared out"])
def test_splits_without_keys_write_nothing(q_lens, seq_lens, window, way, poisoned):
    """Or, with sinks, zeros."""
    sinks = window is not None
    check_way(make_case(q_lens, seq_lens, sliding_window=window, block_size=8, sinks=sinks, device=DEVICE), way)


def test_first_rows_of_a_prompt_have_splits_without_keys(poisoned):
    """They have as many as the last ones, which see more."""
    check_shared_out(make_case([33], [33], device=DEVICE), dataclasses.replace(SPLIT, programs_per_sm=8))


@pytest.mark.parametrize("way", ["split", "shared out"])
def test_splits_of_very_different_scores(way):
    """Of which those of one would be infinite, by the maximum of another."""
    case = make_case([1, 1], [130, 100], device=DEVICE)
    check_way(dataclasses.replace(case, softmax_scale=20.0), way)


@pytest.mark.parametrize("window", [None, 50])
def test_a_long_sequence_among_short_ones(window):
    """It gets the splits that they don't need."""
    case = make_case([1] * 20 + [40], [7] * 12 + [900] + [33] * 7 + [300], sliding_window=window, device=DEVICE)
    check_way(case, "shared out")


@pytest.mark.parametrize("num_seqs", [1, 129, pytest.param(513, marks=pytest.mark.gpu)])
def test_many_sequences_share(num_seqs):
    """513 are more than are looked up: each gets as many splits."""
    lengths = [1 + 7 * i % 40 for i in range(num_seqs)]
    case = make_case([1] * num_seqs, lengths, num_heads=2, num_kv_heads=1, block_size=8, device=DEVICE)
    check_way(case, "shared out")


@pytest.mark.parametrize("window", [None, 30])
def test_rows_of_a_step_that_are_not_used(window):
    """A step of fixed size: sequences without queries, or without tokens, and one for the rows that are left over."""
    q_lens, unused = [1, 0, 17, 0, 1, 22], 5
    options = dict(num_heads=6, sinks=True, sliding_window=window, block_size=8, device=DEVICE)
    case = make_case(q_lens, [70, 0, 40, 12, 150, 22], **options)
    case.metadata.seq_lens[unused] = 0
    case.metadata.block_tables[unused] = (1 << 31) - 1
    case.values[unused].zero_()
    check_shared_out(case)
    check_shared_out(case, dataclasses.replace(PEELED, num_splits=5))


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter calls what Python finds")
def test_only_the_last_to_arrive_joins(monkeypatch):
    """Who comes sooner would read what others have not written yet, and only then write the same as the last."""
    joins = []

    def counted(*args):
        joins.append(args)
        return join_splits(*args)

    monkeypatch.setattr("hf_turbo.ops.merge_splits.join_splits", counted)
    check_shared_out(make_case([1, 1], [130, 5], device=DEVICE))
    assert len(joins) == 2  # KV heads; of the short sequence there is nothing to join


def test_no_counter_is_of_two_tiles():
    """Programs that run at once come in any order. Here each tile of each head has two; other counters are spoilt."""
    case = shared_out(make_case([1] * 3, [130] * 3, device=DEVICE))
    mine = torch.tensor([0, 1, 4, 5, 8, 9], device=DEVICE)  # first items 0, 2 and 4, of 2 KV heads each
    case.metadata.arrivals.fill_(1000).index_fill_(0, mine, 0)
    check(case, SPLIT)
    assert not case.metadata.arrivals[mine].any()


def test_counters_serve_the_next_layer():
    case = shared_out(make_case([1, 9, 1], [130, 64, 7], device=DEVICE))
    assert torch.equal(check(case, SPLIT), check(case, SPLIT))


def test_too_few_counters():
    """None is used: those behind them are others', here of a kernel under way."""
    counters = torch.full((64,), 1000, dtype=torch.int32, device=DEVICE)
    counters[:4] = 0
    check(shared_out(make_case([1, 9], [37, 64], device=DEVICE), counters[:4]), SPLIT)
    assert not counters[:4].any() and (counters[4:] == 1000).all()


@pytest.mark.parametrize("num_tokens, num_splits", [(16, 16), (256, 8), (2048, 1), (3000, 1)])
def test_what_splits_write_is_bounded(num_tokens, num_splits):
    """However long the texts are; without a split nothing is written twice."""
    metadata = AttentionMetadata(
        block_tables=torch.empty(16, 1, dtype=torch.int32, device="meta"),
        seq_lens=torch.empty(16, dtype=torch.int32, device="meta"),
        cu_seqlens_q=torch.empty(17, dtype=torch.int32, device="meta"),
        max_seqlen_q=num_tokens,
        max_seqlen_k=100_000,
        arrivals=torch.empty(AttentionMetadata.MAX_ARRIVALS, device="meta"),
    )
    shape = torch.Size([num_tokens, 32, 128])
    _, splits, lookup = _grid(SMALL, metadata, shape, 8, 132)
    assert lookup == 128 and splits == num_splits
    assert splits == 1 or splits * num_tokens <= MAX_PARTIALS
    too_few = dataclasses.replace(metadata, arrivals=metadata.arrivals[:100])
    assert _grid(SMALL, too_few, shape, 8, 132)[2] == 0


def test_no_queries():
    case = make_case([0, 0], [4, 5], device=DEVICE)
    assert paged_attention(case.q, case.kv, case.metadata, 1.0).shape == (0, 4, 32)


@pytest.mark.parametrize(
    "programs, max_splits, slots, splits",
    [
        (512, 8, 264, 1),
        (256, 64, 264, 1),
        (8, 256, 264, 32),
        (8, 8, 264, 8),
        (160, 64, 264, 3),
        (8, 1, 264, 1),
    ],
)
def test_choice_of_splits(programs, max_splits, slots, splits):
    assert choose_num_splits(programs, max_splits, slots) == splits


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(1, 4, 16)}, "q must be"),
        ({"q": torch.zeros(1, 5, 32)}, "q must be"),
        ({"q": torch.zeros(1, 4, 32, dtype=torch.float16)}, "dtype"),
        ({"q": torch.zeros(1, 32, 4).transpose(1, 2)}, "stride 1"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
        ({"out": torch.zeros(1, 4, 16)}, "out must be"),
    ],
)
def test_wrong_arguments(change, message):
    case = make_case([1], [4])
    arguments = {"q": case.q, "softmax_scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        paged_attention(kv=case.kv, metadata=case.metadata, **arguments)


REAL = [
    {"q_lens": [1] * 4, "seq_lens": [1, 700, 4096, 5000]},
    {"q_lens": [1], "seq_lens": [32768]},
    {"q_lens": [1] * 3, "seq_lens": [900, 129, 2049], "sliding_window": 512, "sinks": True},
    {"q_lens": [300, 1, 0, 1024], "seq_lens": [2000, 700, 5, 1024]},
    {"q_lens": [300, 1, 600], "seq_lens": [2000, 4700, 1624], "sliding_window": 512, "logit_softcap": 50.0},
    {"q_lens": [8] * 5, "seq_lens": [100, 2000, 333, 8, 4096]},
]


#: dtype, (query heads, KV heads, key size, value size), block size
MODELS = [
    (torch.bfloat16, (32, 8, 128, 128), 16),
    (torch.bfloat16, (32, 8, 128, 128), 64),
    (torch.bfloat16, (16, 8, 256, 256), 64),
    (torch.bfloat16, (32, 32, 80, 80), 128),
    (torch.bfloat16, (14, 2, 64, 64), 32),
    (torch.bfloat16, (16, 16, 192, 128), 48),
    (torch.float16, (32, 8, 128, 128), 128),
    (torch.float32, (32, 8, 128, 128), 64),
    (torch.float32, (8, 4, 256, 256), 16),
]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("dtype, heads, block_size", MODELS, ids=str)
@pytest.mark.parametrize("lengths", REAL, ids=str)
@pytest.mark.parametrize("way", ["evenly", "shared out"])
def test_real_sizes(way, dtype, heads, block_size, lengths):
    """The table's own configurations."""
    num_heads, num_kv_heads, k_dim, v_dim = heads
    case = make_case(
        **lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        block_size=block_size,
        dtype=dtype,
        num_segments=2,
        strided_q=True,
        device=DEVICE,
    )
    if way == "shared out":
        check_shared_out(case, None)
    else:
        check(case)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_captured_graph_is_valid_at_every_length():
    long = make_case([1, 1], [3000, 4096], num_heads=32, num_kv_heads=8, k_dim=128, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full_like(long.q, torch.nan)
    paged_attention(long.q, long.kv, long.metadata, **long.arguments, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(long.q, long.kv, long.metadata, **long.arguments, out=out)
    for lengths in ([1, 17], [0, 4096], [3000, 2000]):
        long.metadata.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        short = dataclasses.replace(long)
        short.keys = [k[:n] for k, n in zip(long.keys, lengths, strict=True)]
        short.values = [v[:n] for v, n in zip(long.values, lengths, strict=True)]
        for b, n in enumerate(lengths):
            if n == 0:
                assert (out[b] == 0).all()
                short.keys[b], short.values[b] = long.keys[b][:1], torch.zeros_like(long.values[b][:1])
        assert (out.double() - expected(short)).abs().max().item() <= allowed_error(short)
