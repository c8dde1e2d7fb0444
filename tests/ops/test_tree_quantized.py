"""Token trees over a quantized cache: the oracle, and the kernel, against float64 over each node's keys one by one.

What a node sees as codes goes by its position, its depth after the committed tokens, and not by where it is stored.
"""

import dataclasses

import pytest
import torch
from combinations import few
from kv_oracle import Rows
from oracle import GARBAGE_BLOCK
from tree_oracle import random_tree, tree_nodes, visible_slots

from hf_turbo.ops import quantized_attention, reference_kv
from hf_turbo.ops.attention_config import AttentionConfig
from hf_turbo.ops.kv_format import KV_FORMATS, end_of_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = pytest.mark.parametrize("fmt", list(KV_FORMATS))
SMALL = AttentionConfig(block_m=16, tile=0, num_warps=4, num_stages=2)


class Trees(Rows):
    """Rows of a quantized cache that each have a tree after their committed tokens."""

    def __init__(self, fmt, committed, num_nodes, *, chain=False, **options):
        super().__init__(fmt, [n + num_nodes for n in committed], **options)
        self.trees = [random_tree(num_nodes, seed, chain) for seed in range(len(committed))]
        self.num_nodes, self.committed = num_nodes, committed
        self.forward(committed, attend=False)

    def store_trees(self, unused=()):
        """Stores the nodes and answers with their forward's metadata; unused rows have no length and no blocks."""
        pairs = []
        for row, tree in zip(self.rows, self.trees):
            reach = row.length + 1 + max(map(tree.depth, range(self.num_nodes)))
            oldest = max(row.length - self.window + 1, 0) // self.size if self.window else 0
            for block in range(max(oldest, 1), min(end_of_codes(reach, self.size), row.length // self.size)):
                if block not in row.codes:
                    row.codes[block] = self.free["codes"].pop()
                    pairs.append((row.wide[block], row.codes[block]))
        if pairs:
            self.ops.quantize_blocks([self.kv], pairs)
        for row in self.rows:
            first = row.length // self.size - 1
            self.give_up(row.wide, "wide", [block for block in row.wide if 0 < block < first])
            row.length += self.num_nodes
            for block in range(max(first, 0), (row.length - 1) // self.size + 1):
                if block not in row.wide:
                    row.wide[block] = self.free["wide"].pop()
        metadata = self.metadata([self.num_nodes] * len(self.rows))
        metadata = dataclasses.replace(metadata, tree=tree_nodes(self.trees, self.window, self.device))
        for i in unused:
            self.rows[i].length = metadata.seq_lens[i] = metadata.seq_lens_cpu[i] = 0
            metadata.block_tables[i] = metadata.code_tables[i] = GARBAGE_BLOCK
            metadata.block_ids_cpu[i], metadata.coded_rows.code_ids[i] = [], []
        new = [slice(n, n + self.num_nodes) for n in self.committed]
        keys, values = (torch.cat([getattr(r, x)[s] for r, s in zip(self.rows, new)]) for x in ("keys", "values"))
        before = [row.codes and self.code_bytes(i) for i, row in enumerate(self.rows)]
        self.ops.store_kv(keys, values, self.kv, metadata)
        for i, codes in enumerate(before):
            assert all(map(torch.equal, codes[b], self.code_bytes(i)[b]) for b in codes)
        return metadata

    def attend(self, metadata, module, **options):
        new = [slice(n, n + self.num_nodes) for n in self.committed]
        q = torch.cat([row.q[part] for row, part in zip(self.rows, new)])
        return module.paged_attention(q, self.kv, metadata, **self.arguments, **options)

    def expected_of_trees(self):
        """Float64 `[nodes of all rows, heads, v_dim]`; zeros for rows without a length."""
        return torch.cat([self._expected_node(i, j) for i in range(len(self.rows)) for j in range(self.num_nodes)])

    def _expected_node(self, i, node):
        row, tree, committed = self.rows[i], self.trees[i], self.committed[i]
        if row.length == 0:
            return torch.zeros(1, row.q.shape[1], row.values.shape[2], dtype=torch.float64, device=row.q.device)
        own = (committed + tree.depth(node)) // self.size
        first_wide = min(own - 1, committed // self.size)
        wide, coded = (row.keys.double(), row.values.double()), self.fake_quantized(row)
        slots = visible_slots(tree, committed, node, self.window)
        chosen = [wide if s // self.size == 0 or s // self.size >= first_wide else coded for s in slots]
        group = row.q.shape[1] // row.keys.shape[1]
        keys, values = (
            torch.stack([sides[x][s] for sides, s in zip(chosen, slots)]).repeat_interleave(group, 1) for x in (0, 1)
        )
        scores = torch.einsum("hd,thd->ht", row.q[committed + node].double(), keys) * self.arguments["softmax_scale"]
        cap, sinks = self.arguments["logit_softcap"], self.arguments["sinks"]
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.exp()
        total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp())
        return (torch.einsum("ht,thd->hd", weights, values) / total[:, None])[None]


def check(rows, out, rtol=2e-5):
    wanted = rows.expected_of_trees()
    assert not out.isnan().any()
    error = (out.double() - wanted).abs().max().item()
    assert error <= rtol * wanted.abs().max().item(), f"{error:.2e}"


#: Committed tokens around the edges of blocks, in blocks and tokens.
EDGES = [(0, 3), (1, 0), (2, -1), (3, -2), (4, -3), (4, 0), (4, 1), (5, -1)]
OPTIONS = {
    "plain": {},
    "soft cap and sinks": {"softcap": 3.0, "sinks": True},
    "window": {"window": 20},
    "window of less than the tree": {"window": 3},
    "window of a few blocks": {"window": 70},
    "heads of 80, values of 48": {"k_dim": 80, "v_dim": 48, "scattered": True, "segments": 2},
    "a chain": {"chain": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@FORMATS
def test_reference(fmt, name):
    rows = Trees(fmt, [8 * blocks + more for blocks, more in EDGES], 8, **OPTIONS[name])
    check(rows, rows.attend(rows.store_trees(), reference_kv))


@FORMATS
def test_reference_many_nodes_and_unused_rows(fmt):
    """More nodes than are attended to piece by piece."""
    rows = Trees(fmt, [64 - 4, 70, 130], 30, block_size=32)
    out = rows.attend(rows.store_trees(unused=[1]), reference_kv)
    check(rows, out)
    assert (out[30:60] == 0).all()


def test_chain_is_a_chunk():
    """A tree without branches sees what the tokens of a prompt see."""
    trees, chunk = (Trees("int4", [30, 38, 47], 8, chain=True) for _ in range(2))
    as_tree = trees.attend(trees.store_trees(), reference_kv)
    torch.testing.assert_close(as_tree, chunk.forward([8, 8, 8]), rtol=1e-5, atol=1e-5)


def run_kernel(fmt, committed, num_nodes, unused=(), num_splits=1, **options):
    rows = Trees(fmt, committed, num_nodes, **{"block_size": 32, "heads": 1, "group": 2, "device": DEVICE} | options)
    metadata = rows.store_trees(unused)
    config = dataclasses.replace(SMALL, tile=32, num_splits=num_splits)
    count = len(committed) * num_nodes
    out = torch.full((count, *rows.rows[0].q.shape[1:2], rows.kv.v_dim), torch.nan, device=DEVICE)
    rows.attend(metadata, quantized_attention, out=out, config=config)
    return rows, out


@pytest.mark.parametrize("fmt, name", few(KV_FORMATS, OPTIONS))
def test_kernel(fmt, name):
    """Rows fill two tiles; positions lie in one block or in two, or a tree in one block and they in another."""
    edges = [(0, 3), (4, -3), (4, 1)]
    rows, out = run_kernel(fmt, [32 * blocks + more for blocks, more in edges], 9, **OPTIONS[name])
    check(rows, out)


@pytest.mark.parametrize("fmt, num_splits", few(KV_FORMATS, [2, 5]))
def test_kernel_splits_and_unused_rows(fmt, num_splits):
    rows, out = run_kernel(fmt, [32 * 4 - 2, 40, 3], 8, unused=[1], num_splits=num_splits, sinks=num_splits == 2)
    check(rows, out)
    assert (out[8:16] == 0).all()


@FORMATS
def test_kernel_one_node(fmt):
    """A root alone is a decode step."""
    rows, out = run_kernel(fmt, [32 * 4, 65], 1)
    check(rows, out)


def test_depths_decide_what_is_codes():
    """Shown by failing: where all nodes pass for roots, those beyond a block's edge see too much wide."""
    rows = Trees("int4", [32 * 4 - 2], 9, block_size=32, heads=1, group=2, device=DEVICE)
    metadata = rows.store_trees()
    metadata.tree.depths.zero_()
    config = dataclasses.replace(SMALL, tile=32)
    for module, options in ((reference_kv, {}), (quantized_attention, {"config": config})):
        with pytest.raises(AssertionError):
            check(rows, rows.attend(metadata, module, **options))
