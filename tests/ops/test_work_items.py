import random

import pytest
import torch
import triton
import triton.language as tl

from hf_turbo.ops.work_items import find_item, items_of_a_wave, most_items, seqs_of_a_lookup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _find_all(
    out_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_seqs, max_splits,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SEQS: tl.constexpr,
    WIDE_WEIGHT: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    seq, row_tile, split, num_splits, first = find_item(
        item, seq_lens_ptr, cu_seqlens_q_ptr, num_seqs, tl.num_programs(0), max_splits,
        GROUP, BLOCK_M, TILE, WINDOW, SEQS, WIDE_WEIGHT,
    )  # fmt: skip
    tl.store(out_ptr + item * 5, seq)
    tl.store(out_ptr + item * 5 + 1, row_tile)
    tl.store(out_ptr + item * 5 + 2, split)
    tl.store(out_ptr + item * 5 + 3, num_splits)
    tl.store(out_ptr + item * 5 + 4, first)


def items(
    q_lens, seq_lens, slots=None, max_splits=16, group=4, block_m=16, tile=16, window=0, wide_weight=1, num_items=None
):
    """`{(sequence, tile of rows): [(split, splits, item, first item)]}`."""
    if num_items is None:
        num_items = most_items(sum(q_lens), len(q_lens), 2, group, block_m, slots)
    out = torch.full((num_items, 5), -1, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).to(torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    num_seqs = len(q_lens)
    _find_all[(num_items,)](
        out, lens, starts, num_seqs, max_splits, group, block_m, tile, window, seqs_of_a_lookup(num_seqs), wide_weight
    )
    found = {}
    for item, (seq, row_tile, split, num_splits, first) in enumerate(out.tolist()):
        if seq < num_seqs:
            found.setdefault((seq, row_tile), []).append((split, num_splits, item, first))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_piece_is_found_once(seed):
    source = random.Random(seed)
    q_lens = [source.choice([0, 1, 1, 1, 5, 40]) for _ in range(source.randint(1, 140))] + [1]
    seq_lens = [n + source.choice([0, 3, 100, 900]) for n in q_lens]
    seq_lens[0] = source.choice([seq_lens[0], 0])  # rows of a captured step that are not used
    group, max_splits, window = source.choice([1, 3, 4]), source.choice([1, 4, 16]), source.choice([0, 0, 50])
    slots, weight = source.choice([8, 64, 264]), seed % 2 * 2 + 1
    num_items = None
    if weight > 1:
        num_items = items_of_a_wave(sum(q_lens), len(q_lens), max(q_lens), 2, group, 16, slots)
    found = items(q_lens, seq_lens, slots, max_splits, group, window=window, wide_weight=weight, num_items=num_items)
    for seq, n in enumerate(q_lens):
        for row_tile in range(-(-n * group // 16)):
            pieces = sorted(found.pop((seq, row_tile)))
            assert [split for split, *_ in pieces] == list(range(pieces[0][1])) and len(pieces) <= max_splits
            assert all(first == item - split for split, _, item, first in pieces)
    assert not found


def test_pieces_are_even():
    """One long text among short ones: it is split until a piece is as long as an even share, or one of theirs."""
    found = items([1] * 32, [64] * 31 + [8000], slots=128)
    assert {len(found[seq, 0]) for seq in range(31)} == {1}
    assert len(found[31, 0]) == 16
    alike = items([1] * 8, [512] * 8, slots=128)
    assert {len(pieces) for pieces in alike.values()} == {8}  # 8 tiles of rows and 64 more pieces


def test_a_window_bounds_the_keys():
    found = items([1, 1], [8000, 100], slots=32, window=100)
    assert len(found[0, 0]) == len(found[1, 0])


def test_a_sequence_without_queries_has_no_share():
    """However long it is, for which the others' pieces would be as long as a 16th of it."""
    found = items([1] * 8 + [0], [512] * 8 + [100_000], slots=128)
    assert {len(pieces) for pieces in found.values()} == {8}


@pytest.mark.parametrize("num_seqs, looked_at", [(1, 128), (128, 128), (129, 512), (512, 512), (513, 0)])
def test_few_kernels_for_all_numbers_of_sequences(num_seqs, looked_at):
    assert seqs_of_a_lookup(num_seqs) == looked_at


def test_a_chunk_of_a_window_weighs_what_its_tiles_see():
    """Not the window with all of the chunk: then nobody would be split."""
    found = items([512, 1], [8000, 8000], slots=600, window=128)
    assert len(found[0, 0]) == len(found[1, 0]) == 3


def test_tiles_are_shared_out_by_weight():
    """Of 12 tiles three are wide and weigh 3: 18, as much as three sequences of two tiles."""
    for weight, splits in ((1, [4, 1, 1, 1]), (3, [3, 1, 1, 1])):
        found = items([1] * 4, [12 * 16] + [2 * 16] * 3, num_items=10, wide_weight=weight)
        assert [len(found[seq, 0]) for seq in range(4)] == splits


def test_a_window_without_the_first_tile_has_two_wide_ones():
    """12 tiles weigh 16 and not 18: in pieces of 4 that is one piece fewer."""
    for seq_len, splits in ((12 * 16, 5), (40 * 16, 4)):
        found = items([1], [seq_len], num_items=6, window=12 * 16 - 1, wide_weight=3)
        assert len(found[0, 0]) == splits


@pytest.mark.parametrize("num_seqs, max_seqlen_q, num_items", [
    (1, 1, 66), (16, 1, 66), (22, 1, 66), (23, 1, 67), (64, 1, 108), (2, 40, 79), (64, 40, 172),
])  # fmt: skip
def test_items_of_a_wave(num_seqs, max_seqlen_q, num_items):
    """What runs at once, 528 programs for 8 KV heads, or two thirds of it and the tiles of rows, of 8 rows each.

    Packed batches of 64 tokens more than sequences.
    """
    num_tokens = num_seqs if max_seqlen_q == 1 else num_seqs + 64
    assert items_of_a_wave(num_tokens, num_seqs, max_seqlen_q, 8, 4, 8, 528) == num_items
