"""Tokens that move within their sequences: the oracle and the kernel against a copy made slot by slot."""

import random

import pytest
import torch
from oracle import GARBAGE_BLOCK, make_pool

from hf_turbo.ops import dispatch, move_kv, reference
from hf_turbo.ops.block_ids import SEGMENT_BITS, SEGMENT_MASK
from hf_turbo.ops.metadata import LayerKV

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("module", [reference, move_kv], ids=["reference", "kernel"])


def make_layers(block_size, num_blocks, *, segments=1, heads=2, k_dim=16, v_dim=24, layout="nhd", dtype=torch.float32):
    """Three layers of different numbers; what is in no sequence's blocks is random, too, and may not change."""
    layers = []
    for _ in range(3):
        sides = [
            [make_pool(num_blocks, heads, block_size, dim, dtype, DEVICE, layout) for _ in range(segments)]
            for dim in (k_dim, v_dim)
        ]
        for segment in (s for side in sides for s in side):
            segment.copy_(torch.randn(segment.shape))
        layers.append(LayerKV.of(*sides))
    return layers


def make_table(num_seqs, columns, num_blocks, segments):
    """Blocks in a random order, of all segments; one of garbage behind each row's."""
    ids = [(s << SEGMENT_BITS) | i for s in range(segments) for i in range(num_blocks)]
    random.Random(0).shuffle(ids)
    table = torch.full((num_seqs, columns + 1), GARBAGE_BLOCK, dtype=torch.int32)
    table[:, :columns] = torch.tensor(ids[: num_seqs * columns]).view(num_seqs, columns)
    return table.to(DEVICE)


def paths_of(steps):
    """int32 `[num_seqs, most steps + 1]`, garbage behind a row's own; and how many those are."""
    path = torch.full((len(steps), max(map(len, steps)) + 1), 1 << 30, dtype=torch.int32)
    for row, step in zip(path, steps):
        row[: len(step)] = torch.tensor(step, dtype=torch.int32)
    return path.to(DEVICE), torch.tensor([len(step) for step in steps], dtype=torch.int32, device=DEVICE)


def snapshot(layers):
    return [[t.clone() for t in (*kv.k_segments, *kv.v_segments)] for kv in layers]


def wanted(before, layers, table, bases, steps):
    """Every slot of every layer, after the tokens of `before` have been put in their places."""
    after = [[t.clone() for t in tensors] for tensors in before]
    size, count = layers[0].block_size, len(layers[0].k_segments)
    for seq, (base, step) in enumerate(zip(bases, steps)):
        for k, source in enumerate(step if base >= 0 else []):
            ids = [int(table[seq, (base + place) // size]) for place in (source, k)]
            (a, i), (b, j) = ((id >> SEGMENT_BITS, id & SEGMENT_MASK) for id in ids)
            for old, new in zip(before, after):
                for side in (0, count):
                    new[side + b][j, :, (base + k) % size] = old[side + a][i, :, (base + source) % size]
    return after


def check(module, layers, table, bases, steps):
    before = snapshot(layers)
    module.move_kv(layers, table, torch.tensor(bases, dtype=torch.int32, device=DEVICE), *paths_of(steps))
    assert_equal(snapshot(layers), wanted(before, layers, table, bases, steps))
    return before


def assert_equal(found, expected):
    for tensors, others in zip(found, expected, strict=True):
        assert all(map(torch.equal, tensors, others))


#: Moves of no token, of one, of all but the first, across blocks, of more than a kernel reads at once.
STEPS = [[], [0], [3], [0, 2, 5], [0, 1, 2], [1, 2, 3, 4, 9], [0, *range(2, 40)], [0, 1, 7, *range(20, 50)]]


@BOTH
@pytest.mark.parametrize("block_size, segments", [(1, 2), (8, 1), (8, 3), (64, 2)])
def test_paths(module, block_size, segments):
    bases = [3, 0, 5, 7, -1, 8, 13, 2]
    columns = -(-64 // block_size)
    num_blocks = -(-len(bases) * columns // segments) + 2
    layers = make_layers(block_size, num_blocks, segments=segments)
    before = check(module, layers, make_table(len(bases), columns, num_blocks, segments), bases, STEPS)
    assert not torch.equal(before[0][0], layers[0].k_segments[0])


@BOTH
@pytest.mark.parametrize("layout", ["hnd", "nhd", "gaps"])
@pytest.mark.parametrize(
    "dims, dtype", [((16, 16), torch.float16), ((80, 48), torch.bfloat16), ((5, 7), torch.float32)]
)
def test_layouts_and_sizes(module, layout, dims, dtype):
    """Keys and values of one size, which take one launch, and of two."""
    layers = make_layers(8, 6, layout=layout, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    check(module, layers, make_table(2, 3, 6, 1), [2, 7], [[0, 3, 4, 11], [5, 6]])


@BOTH
def test_layers_of_different_sizes(module):
    layers = [*make_layers(8, 6), *make_layers(8, 6, heads=1, k_dim=64, v_dim=64, dtype=torch.float16)]
    check(module, layers, make_table(1, 3, 6, 1), [4], [[0, 2, 9, 10]])


@BOTH
@pytest.mark.parametrize("base", [-1, -12])
def test_unused_rows_are_left_alone(module, base):
    """A table of garbage is not read, whatever the count says."""
    layers = make_layers(8, 6)
    table = make_table(2, 3, 6, 1)
    table[1] = GARBAGE_BLOCK
    check(module, layers, table, [4, base], [[0, 3], [1, 2, 3]])


def test_random_paths():
    for seed in range(5):
        generator = random.Random(seed)
        steps = [sorted(generator.sample(range(64), generator.randint(0, 20))) for _ in range(3)]
        bases = [generator.randint(0, 30) for _ in steps]
        for module in (reference, move_kv):
            check(module, make_layers(4, 80), make_table(3, 24, 80, 1), bases, steps)


def test_addresses_serve_segments_that_come_later_and_other_lengths():
    """What a captured graph keeps: the same object and tensors, with other numbers in them."""
    layers = make_layers(8, 8)
    addresses = move_kv.TokenAddresses(layers)
    more = [make_layers(8, 8)[0] for _ in layers]
    grown = [
        LayerKV.of((*kv.k_segments, *m.k_segments), (*kv.v_segments, *m.v_segments), kv.segment_offsets)
        for kv, m in zip(layers, more)
    ]
    table = make_table(2, 8, 8, 2)
    bases = torch.empty(2, dtype=torch.int32, device=DEVICE)
    path, counts = paths_of([[0] * 9, [0] * 9])
    for numbers, steps in (([3, 9], [[1, 4, 5], [0, 2]]), ([20, -1], [[0, 1, 30], [1]]), ([0, 40], [[], [6]])):
        bases.copy_(torch.tensor(numbers))
        new_path, new_counts = paths_of(steps)
        path.fill_(1 << 30)[:, : new_path.shape[1]] = new_path
        counts.copy_(new_counts)
        before = snapshot(grown)
        addresses.move(table, bases, path, counts)
        assert_equal(snapshot(grown), wanted(before, grown, table, numbers, steps))


def test_dispatch():
    check(dispatch, make_layers(8, 6), make_table(1, 3, 6, 1), [4], [[0, 2, 9, 10]])


@pytest.mark.gpu
def test_captured_graph_is_valid_at_every_length():
    layers = make_layers(16, 300, heads=8, k_dim=128, v_dim=128, dtype=torch.bfloat16)
    addresses, table = move_kv.TokenAddresses(layers), make_table(4, 70, 300, 1)
    bases = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    path, counts = paths_of([[0] * 64] * 4)
    addresses.move(table, bases, path, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        addresses.move(table, bases, path, counts)
    for seed in range(5):
        generator = random.Random(seed)
        steps = [sorted(generator.sample(range(64), generator.randint(0, 64))) for _ in range(4)]
        numbers = [generator.choice([-1, generator.randint(0, 1000)]) for _ in range(4)]
        bases.copy_(torch.tensor(numbers))
        new_path, new_counts = paths_of(steps)
        path.fill_(1 << 30)[:, : new_path.shape[1]] = new_path
        counts.copy_(new_counts)
        before = snapshot(layers)
        graph.replay()
        assert_equal(snapshot(layers), wanted(before, layers, table, numbers, steps))
