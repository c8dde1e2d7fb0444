import pytest
import torch
from oracle import make_case

from hf_turbo.ops.store_kv import store_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pack_new(case, dense, strided=False):
    """The last q_len rows of each sequence, packed as a forward's k or v."""
    packed = torch.cat([x[len(x) - n :] for x, n in zip(dense, case.metadata.q_lens_cpu, strict=True)])
    if strided:  # as a slice of a fused projection
        return torch.cat([packed, packed, packed], 1)[:, packed.shape[1] : 2 * packed.shape[1]]
    return packed


def check_stored(case, keep_last=None):
    """Every slot that should be written holds its value, and every other one is still NaN."""
    for segments, dense in ((case.kv.k_segments, case.keys), (case.kv.v_segments, case.values)):
        wanted = [torch.full_like(segment, torch.nan) for segment in segments]
        for b, (q_len, seq_len) in enumerate(zip(case.metadata.q_lens_cpu, case.metadata.seq_lens_cpu, strict=True)):
            first = max(seq_len - q_len, seq_len - keep_last if keep_last else 0)
            for position in range(first, seq_len):
                segment, block, row = case.slot(b, position)
                wanted[segment][block, :, row] = dense[b][position]
        for segment, want in zip(segments, wanted, strict=True):
            torch.testing.assert_close(segment, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_size", [8, 16, 48, 64])
@pytest.mark.parametrize("num_segments", [1, 3])
def test_prompt_chunks(block_size, num_segments):
    case = make_case(
        [33, 0, 1, 70],
        [33, 9, 20, 75],
        block_size=block_size,
        num_segments=num_segments,
        device=DEVICE,
        fill=False,
    )
    store_kv(pack_new(case, case.keys), pack_new(case, case.values), case.kv, case.metadata)
    check_stored(case)


def test_more_sequences_than_are_looked_at_at_once():
    q_lens = [1, 0, 2, 1, 1] * 14
    case = make_case(q_lens, [n + 5 * i % 17 for i, n in enumerate(q_lens)], num_segments=2, device=DEVICE, fill=False)
    store_kv(pack_new(case, case.keys), pack_new(case, case.values), case.kv, case.metadata)
    check_stored(case)


@pytest.mark.parametrize("layout", ["hnd", "nhd", "gaps"])
@pytest.mark.parametrize("dims", [(32, 32), (80, 48), (40, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layouts_and_dims(layout, dims, dtype):
    case = make_case(
        [5, 2],
        [5, 19],
        k_dim=dims[0],
        v_dim=dims[1],
        dtype=dtype,
        layout=layout,
        num_segments=2,
        device=DEVICE,
        fill=False,
    )
    store_kv(pack_new(case, case.keys, True), pack_new(case, case.values, True), case.kv, case.metadata)
    check_stored(case)


def test_decode_step_skips_padding_rows():
    """A fixed-shape batch gives its padding sequences one query and a length of zero: position -1."""
    case = make_case([1, 1, 1], [1, 16, 17], num_segments=2, device=DEVICE, fill=False)
    k, v = pack_new(case, case.keys), pack_new(case, case.values)
    case.metadata.seq_lens[1] = case.metadata.seq_lens_cpu[1] = 0
    store_kv(k, v, case.kv, case.metadata)
    check_stored(case)


def test_keep_last_reads_no_dead_table_entry():
    case = make_case([40, 3, 1], [40, 3, 30], sliding_window=10, num_segments=2, device=DEVICE, fill=False)
    case.metadata.block_tables[0, :1] = (1 << 31) - 1  # positions 0 to 15 have left the window
    store_kv(pack_new(case, case.keys), pack_new(case, case.values), case.kv, case.metadata, keep_last=10)
    check_stored(case, keep_last=10)


def test_no_queries():
    case = make_case([0, 0], [4, 5], device=DEVICE, fill=False)
    store_kv(pack_new(case, case.keys), pack_new(case, case.values), case.kv, case.metadata)
    check_stored(case)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize(
    "q_lens, seq_lens", [([1] * 32, list(range(100, 3300, 100))), ([777, 2048, 1], [777, 3000, 5])]
)
def test_real_sizes(q_lens, seq_lens):
    case = make_case(
        q_lens,
        seq_lens,
        num_kv_heads=8,
        num_heads=8,
        k_dim=128,
        dtype=torch.bfloat16,
        device=DEVICE,
        fill=False,
    )
    store_kv(pack_new(case, case.keys, True), pack_new(case, case.values, True), case.kv, case.metadata)
    check_stored(case)


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
    case = make_case([2], [4], device=DEVICE, fill=False)
    k, v = change(pack_new(case, case.keys), pack_new(case, case.values))
    with pytest.raises(ValueError, match=message):
        store_kv(k, v, case.kv, case.metadata)


def test_wrong_keep_last():
    case = make_case([2], [4], device=DEVICE, fill=False)
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        store_kv(pack_new(case, case.keys), pack_new(case, case.values), case.kv, case.metadata, keep_last=0)
