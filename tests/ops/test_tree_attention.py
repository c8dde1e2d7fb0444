"""Attention of token trees: the oracle, and the kernel, against float64 over each node's keys gathered one by one."""

import dataclasses

import pytest
import torch
from combinations import few
from tree_oracle import allowed_error, expected, make_tree_case

from hf_turbo.ops import reference
from hf_turbo.ops.attention_config import DRAFT_BLOCK_M, AttentionConfig, DeviceFacts, choose_config
from hf_turbo.ops.metadata import AttentionMetadata, TreeNodes
from hf_turbo.ops.paged_attention import paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = AttentionConfig(block_m=16, tile=16, num_warps=4, num_stages=2)
SPLIT = dataclasses.replace(SMALL, peel=True, num_splits=3)
CONFIGS = {"plain": SMALL, "peeled and split": SPLIT}
COMMITTED = [0, 5, 37, 64]


def check_reference(case, trees):
    out = reference.paged_attention(case.q, case.kv, case.metadata, **case.arguments)
    error = (out.double() - expected(case, trees)).abs().max().item()
    assert error <= allowed_error(case, trees), f"error {error:.2e}, allowed {allowed_error(case, trees):.2e}"
    return out


def check(case, trees, config=None):
    """Runs the kernel into an output of NaN and compares it with float64."""
    out = torch.full((*case.q.shape[:2], case.values[0].shape[2]), torch.nan).to(case.q)
    paged_attention(case.q, case.kv, case.metadata, **case.arguments, out=out, config=config)
    error = (out.double() - expected(case, trees)).abs().max().item()
    assert error <= allowed_error(case, trees), f"error {error:.2e}, allowed {allowed_error(case, trees):.2e}"
    return out


VARIANTS = {
    "plain": {},
    "one node": {"num_nodes": 1},
    "64 nodes": {"num_nodes": 64, "committed": [40], "num_heads": 2},
    "window": {"sliding_window": 20},
    "window of less than the tree": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "soft cap": {"logit_softcap": 1.5},
    "sinks": {"sinks": True},
    "window, soft cap and sinks": {"sliding_window": 9, "logit_softcap": 2.0, "sinks": True},
    "one KV head": {"num_heads": 5, "num_kv_heads": 1},
    "no groups": {"num_heads": 3, "num_kv_heads": 3},
    "heads of 80, values of 48": {"k_dim": 80, "v_dim": 48},
    "blocks of one": {"block_size": 1},
    "blocks of 64": {"block_size": 64},
    "three segments, gaps": {"num_segments": 3, "layout": "gaps", "strided_q": True},
    "an unused row": {"unused": [1]},
    "unused rows with sinks and a window": {"unused": [0], "sinks": True, "sliding_window": 6},
}


def make(name, **changes):
    options = {"committed": COMMITTED, "num_nodes": 12, "block_size": 16, "device": DEVICE}
    return make_tree_case(**(options | VARIANTS[name] | changes))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("placement", ["in order", "scattered"])
def test_reference(name, placement):
    check_reference(*make(name, placement=placement))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_reference_in_half_precision(dim):
    check_reference(*make("plain", k_dim=dim, dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [None, 7])
def test_chain_is_a_chunk(window):
    """A tree without branches sees what the tokens of a prompt see."""
    case, _ = make_tree_case(COMMITTED, 9, chain=True, block_size=8, sliding_window=window, device=DEVICE)
    chunk = dataclasses.replace(case.metadata, tree=None)
    for attend in (reference.paged_attention, paged_attention):
        as_tree = attend(case.q, case.kv, case.metadata, **case.arguments)
        as_chunk = attend(case.q, case.kv, chunk, **case.arguments)
        torch.testing.assert_close(as_tree, as_chunk, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, config", few(VARIANTS, CONFIGS))
def test_kernel(name, config):
    """Rows of a sequence fill several tiles; splits may have nothing that some row, or any, sees."""
    case, trees = make(name, **({} if "committed" in VARIANTS[name] else {"committed": [37, 5]}))
    out = check(case, trees, CONFIGS[config])
    for row in VARIANTS[name].get("unused", []):
        assert (out[12 * row : 12 * (row + 1)] == 0).all()


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 30])
def test_nodes_anywhere_in_a_tile(tile, window):
    """64 nodes from the first, the second, the last slot of a tile or of a word of 32 on, reaching into others."""
    committed = [0, 1, 31, 32, 63, 64, 127, 130]
    case, trees = make_tree_case(
        committed, 64, num_heads=1, num_kv_heads=1, k_dim=16, sliding_window=window, device=DEVICE
    )
    check(case, trees, AttentionConfig(block_m=64, tile=tile, num_warps=4, num_stages=2))


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (256, 256)])
def test_kernel_head_sizes_in_half_precision(dims):
    case, trees = make("plain", committed=[33], k_dim=dims[0], v_dim=dims[1], dtype=torch.float16, num_segments=2)
    check(case, trees, SPLIT)


@pytest.mark.parametrize("name", ["64 nodes", "window"])
def test_kernel_as_configured(name):
    check(*make(name, max_seqlen_k=4096))


@pytest.mark.parametrize(
    "facts", [DeviceFacts(132, 90, 232448), DeviceFacts(108, 80, 166912), DeviceFacts(84, 86, 101376)]
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [4, 33, 64, 256, 512])
def test_configurations(rows, dim, facts):
    """Row tiles small enough for a few sequences to fill a device, and what fits there."""
    config = choose_config(rows, 8, dim, dim, torch.bfloat16, facts, is_tree=True, max_seqlen_q=max(rows // 4, 2))
    assert config.block_m == (DRAFT_BLOCK_M if rows <= 64 else 64)
    assert 2 * dim * (config.block_m + 2 * config.num_stages * config.tile) <= facts.shared_memory
    assert config.pdl == (facts.capability == 90)


@pytest.mark.parametrize("rows", [4, 32, 64])
def test_heads_of_one_token_stay_together(rows):
    """A step of many query heads a KV head reads its keys once; a draft's tokens may read them each from the cache."""
    facts = DeviceFacts(132, 90, 232448)
    step = choose_config(rows, 1, 64, 64, torch.bfloat16, facts)
    draft = choose_config(rows, 1, 64, 64, torch.bfloat16, facts, max_seqlen_q=4)
    assert (step.block_m, draft.block_m) == (max(rows, 16), DRAFT_BLOCK_M)


def test_each_tree_has_its_own_nodes():
    """Shown by failing: with the masks of another order the result is another."""
    case, trees = make("plain")
    case.metadata.tree.masks.copy_(case.metadata.tree.masks.flip(0))
    for check_one in (check_reference, check):
        with pytest.raises(AssertionError):
            check_one(case, trees)


def test_moves_to_a_device_with_the_rest():
    case, _ = make("plain")
    there = case.metadata.on(torch.device("meta"))
    assert there.tree.masks.device.type == there.tree.depths.device.type == "meta"
    assert case.metadata.on(case.q.device).tree is case.metadata.tree


@pytest.mark.parametrize(
    "masks, depths, message",
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), "masks must be int64"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "depths int32"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), "one of each"),
        (torch.zeros(6, dtype=torch.int64)[::2], torch.zeros(3, dtype=torch.int32), "contiguous"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32), "one dimension"),
    ],
)
def test_wrong_nodes(masks, depths, message):
    with pytest.raises(ValueError, match=message):
        TreeNodes(masks, depths)


def test_too_many_nodes():
    nodes = TreeNodes(torch.zeros(65, dtype=torch.int64), torch.zeros(65, dtype=torch.int32))
    table = torch.zeros(1, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match="at most 64 nodes"):
        AttentionMetadata(table, table[0, :1], table[0, :2], 65, 65, tree=nodes)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64), (16, 8, 256)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 300, "logit_softcap": 30.0, "sinks": True}], ids=["", "all"]
)
def test_captured_graph_is_valid_at_every_length(heads, options):
    """The table's configurations; a graph that is captured at one length serves others, and rows without any."""
    num_heads, num_kv_heads, dim = heads
    options = options | {"k_dim": dim, "dtype": torch.bfloat16, "device": DEVICE, "max_seqlen_k": 4096}
    options |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "block_size": 64}

    def other(seed, committed, unused=()):
        return make_tree_case(committed, 64, seed=seed, unused=unused, **options)

    case, trees = other(0, [3000, 1024])
    out = check(case, trees)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(case.q, case.kv, case.metadata, **case.arguments, out=out)
    for seed, committed, unused in ((1, [2900, 70], ()), (2, [0, 1], ()), (3, [5, 2000], (0,))):
        now, trees = other(seed, committed, unused)
        case.q.copy_(now.q)
        if now.arguments["sinks"] is not None:
            case.sinks.copy_(now.sinks)
        for here, there in (
            (case.kv.k_segments[0], now.kv.k_segments[0]),
            (case.kv.v_segments[0], now.kv.v_segments[0]),
        ):
            here.fill_(torch.nan)[: len(there)] = there
        table = now.metadata.block_tables
        case.metadata.block_tables.fill_((1 << 31) - 1)[:, : table.shape[1]] = table
        case.metadata.seq_lens.copy_(now.metadata.seq_lens)
        case.metadata.tree.masks.copy_(now.metadata.tree.masks)
        case.metadata.tree.depths.copy_(now.metadata.tree.depths)
        out.fill_(torch.nan)
        graph.replay()
        assert (out.double() - expected(now, trees)).abs().max().item() <= allowed_error(now, trees)
