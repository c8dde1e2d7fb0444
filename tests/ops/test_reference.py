"""The path that runs on a CPU, and the oracle of the kernels, against plain attention in float64."""

import pytest
import torch
from oracle import allowed_error, expected, make_case

from hf_turbo.ops import reference

PLACEMENTS = ["in order", "last row first", "scattered"]
CASES = {
    "step": dict(q_lens=[1, 1, 1], seq_lens=[37, 37, 37]),
    "ragged step": dict(q_lens=[1, 1, 1], seq_lens=[37, 5, 64]),
    "one row": dict(q_lens=[1], seq_lens=[50]),
    "chunks": dict(q_lens=[7, 0, 20], seq_lens=[30, 12, 20]),
    "window": dict(q_lens=[1, 1], seq_lens=[61, 61], sliding_window=9),
    "window over chunks": dict(q_lens=[5, 17], seq_lens=[40, 17], sliding_window=9),
    "soft cap": dict(q_lens=[1, 1], seq_lens=[33, 33], logit_softcap=2.0),
    "sinks": dict(q_lens=[1, 6], seq_lens=[33, 40], sinks=True),
    "K and V differ": dict(q_lens=[1, 1], seq_lens=[20, 20], k_dim=24, v_dim=40),
}


def attend(case) -> torch.Tensor:
    return reference.paged_attention(case.q, case.kv, case.metadata, **case.arguments)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("num_segments", [1, 2])
def test_attention(name, placement, layout, num_segments):
    case = make_case(**CASES[name], placement=placement, layout=layout, num_segments=num_segments, block_size=8)
    assert (attend(case).double() - expected(case)).abs().max() <= allowed_error(case)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_in_order_are_read_in_place(placement, monkeypatch):
    """Equally long rows whose blocks lie in a row, equally far apart, are neither joined nor read one by one."""
    case = make_case([1, 1, 1], [37, 37, 37], placement=placement, layout="nhd", block_size=8)
    seen = []
    real = reference.attend
    monkeypatch.setattr(reference, "attend", lambda q, k, *rest: seen.append(k) or real(q, k, *rest))
    attend(case)
    [keys] = seen
    in_place = keys.untyped_storage().data_ptr() == case.kv.k_segments[0].untyped_storage().data_ptr()
    assert in_place == (placement == "in order")


@pytest.mark.parametrize("num_segments", [1, 2])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("keep_last", [None, 5])
def test_store(layout, num_segments, keep_last):
    """What is stored is what attention reads; what is not kept stays as it was."""
    options = dict(sliding_window=6) if keep_last else {}
    q_lens = seq_lens = [19, 1, 30]
    case = make_case(q_lens, seq_lens, layout=layout, num_segments=num_segments, block_size=8, fill=False, **options)
    k, v = torch.cat(case.keys), torch.cat(case.values)
    reference.store_kv(k, v, case.kv, case.metadata, keep_last)
    for row, length in enumerate(seq_lens):
        for position in range(length):
            if keep_last is None or position >= length - keep_last:
                segment, block, offset = case.slot(row, position)
                assert torch.equal(case.kv.k_segments[segment][block, :, offset], case.keys[row][position])
                assert torch.equal(case.kv.v_segments[segment][block, :, offset], case.values[row][position])
    written = sum(s.isfinite().all(-1).all(1).sum().item() for s in case.kv.k_segments)
    assert written == sum(min(n, keep_last or n) for n in seq_lens)
