import math
from dataclasses import replace

import pytest
import torch
from combinations import few
from oracle import make_case

from hf_turbo.ops import reference_layers
from hf_turbo.ops.metadata import LayerKV
from hf_turbo.ops.norm_spec import RMSNorm
from hf_turbo.ops.rotary import RotaryConfig, rotary_store_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: In Triton's interpreter sums in bf16 are wrong.
HALF_PRECISION = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def empty_case(q_lens, seq_lens, **options):
    """A cache of NaN, and a random q, k and v that are slices of one buffer if their heads are equally large."""
    case = make_case(q_lens, seq_lens, device=DEVICE, fill=False, **options)
    k, v = (
        torch.cat([x[len(x) - n :] for x, n in zip(dense, q_lens, strict=True)]) for dense in (case.keys, case.values)
    )
    q = case.q
    if k.shape == v.shape:
        qkv = torch.cat([q, k, v], 1)
        q, k, v = qkv.split([q.shape[1], k.shape[1], v.shape[1]], 1)
    return case, q, k, v


def random_angles(rows, rotary_dim, dtype):
    """Numbers in place of cosines and sines, another for each element, so that no mix-up goes unseen."""
    return tuple(torch.randn(rows, rotary_dim, device=DEVICE).to(dtype) for _ in range(2))


def random_norm(dim, dtype, **form):
    weight = torch.randn(dim, device=DEVICE).to(dtype)
    return RMSNorm(weight, 1e-3, **({"plus_one": False, "round_first": True} | form))


def clone_kv(kv):
    return LayerKV.of([x.clone() for x in kv.k_segments], [x.clone() for x in kv.v_segments])


def run_both(case, q, k, v, cos, sin, config=None, **options):
    """The kernel's and the oracle's q and blocks; q goes into a wider buffer of NaN, whose margin must stay that."""
    oracle_kv = clone_kv(case.kv)
    expected = reference_layers.rotary_store_kv(q, k, v, cos, sin, oracle_kv, case.metadata, **options)
    tokens, heads, dim = q.shape
    buffer = torch.full((tokens, heads + 1, dim + 16), torch.nan, dtype=q.dtype, device=q.device)
    q_out = buffer[:, 1:, 8:-8]
    source = q.clone()
    actual = rotary_store_kv(q, k, v, cos, sin, case.kv, case.metadata, q_out=q_out, config=config, **options)
    assert actual is q_out
    torch.testing.assert_close(q, source, rtol=0, atol=0)
    assert buffer[:, 0].isnan().all() and buffer[..., :8].isnan().all() and buffer[..., -8:].isnan().all()
    return (actual, *case.kv.k_segments, *case.kv.v_segments), (expected, *oracle_kv.k_segments, *oracle_kv.v_segments)


def check_same(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert not actual[0].isnan().any()
    assert any(not segment.isnan().all() for segment in actual[1:])


def check_normed(actual, expected):
    """The norm's sum may be in another order: a few elements may round the other way, and their products follow."""
    for ours, theirs in zip(actual, expected, strict=True):
        eps = torch.finfo(theirs.dtype).eps
        tight = theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=(32 if tight else 4) * eps, equal_nan=True)
        if not tight:
            assert ((ours != theirs) & ~theirs.isnan()).float().mean() < 0.01
    assert not actual[0].isnan().any()


#: Head size, and how much of it turns.
DIMS = [(32, 32), (80, 80), (96, 24), (80, 2)]


@pytest.mark.parametrize(
    "dims, angle_dtype, dtype, interleaved",
    few(DIMS, ["as q", "float32"], [torch.float32, torch.float16], [False, True], together=2),
)
def test_decode_step(dims, angle_dtype, dtype, interleaved):
    dim, rotary_dim = dims
    case, q, k, v = empty_case([1, 1, 1], [1, 16, 37], k_dim=dim, dtype=dtype, num_segments=2, num_heads=6)
    angles = random_angles(3, rotary_dim, dtype if angle_dtype == "as q" else torch.float32)
    check_same(*run_both(case, q, k, v, *angles, rotary_dim=rotary_dim, interleaved=interleaved))


@pytest.mark.parametrize(
    "block_size, layout, interleaved", few([8, 48], ["hnd", "nhd", "gaps"], [False, True], together=2)
)
def test_prompt_chunks(interleaved, layout, block_size):
    case, q, k, v = empty_case(
        [19, 0, 1, 6], [19, 9, 20, 57], k_dim=40, v_dim=24, num_heads=5, num_kv_heads=5,
        block_size=block_size, layout=layout, num_segments=2, dtype=torch.float16,
    )  # fmt: skip
    angles = random_angles(26, 40, torch.float16)
    check_same(*run_both(case, q, k, v, *angles, rotary_dim=40, interleaved=interleaved))


def test_more_sequences_than_are_looked_at_at_once():
    q_lens = [1, 0, 2, 1, 1] * 14
    case, q, k, v = empty_case(q_lens, [n + 5 * i % 17 for i, n in enumerate(q_lens)], num_segments=2)
    check_same(*run_both(case, q, k, v, *random_angles(70, 32, torch.float32), rotary_dim=32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("interleaved, rotary_dim", [(False, 80), (False, 32), (True, 80), (True, 32)])
@pytest.mark.parametrize("form", [dict(), dict(plus_one=True, round_first=False), dict(round_first=False)])
def test_norms(dtype, interleaved, rotary_dim, form):
    case, q, k, v = empty_case([1, 3], [5, 21], k_dim=80, dtype=dtype, num_segments=2)
    norms = {name: random_norm(80, dtype, **form) for name in ("q_norm", "k_norm")}
    norms["k_norm"] = replace(norms["k_norm"], eps=0.5)
    angles = random_angles(4, rotary_dim, dtype)
    check_normed(*run_both(case, q, k, v, *angles, rotary_dim=rotary_dim, interleaved=interleaved, **norms))


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_norm_of_one_and_without_weight(which):
    case, q, k, v = empty_case([1, 3], [5, 21], dtype=torch.float16)
    norm = RMSNorm(None, 1e-3, plus_one=False, round_first=False)
    angles = random_angles(4, 32, torch.float16)
    check_normed(*run_both(case, q, k, v, *angles, rotary_dim=32, **{which: norm}))


def test_no_rotation():
    case, q, k, v = empty_case([1, 3], [5, 21], k_dim=80, dtype=torch.float16)
    check_same(*run_both(case, q, k, v, None, None, rotary_dim=0))
    check_normed(*run_both(case, q, k, v, None, None, rotary_dim=0, q_norm=random_norm(80, torch.float16)))


@pytest.mark.parametrize("q_lens", [[1, 1], [3, 2]])
def test_one_row_of_angles_for_all(q_lens):
    case, q, k, v = empty_case(q_lens, [7, 19])
    check_same(*run_both(case, q, k, v, *random_angles(1, 32, torch.float32), rotary_dim=32))


def test_padding_rows_are_not_stored():
    """A fixed-shape batch gives its padding sequences one query and a length of zero: position -1."""
    case, q, k, v = empty_case([1, 1, 1], [1, 16, 17], num_segments=2)
    case.metadata.seq_lens[1] = case.metadata.seq_lens_cpu[1] = 0
    check_same(*run_both(case, q, k, v, *random_angles(3, 32, torch.float32), rotary_dim=32))


def test_one_query_of_some_sequences():
    """A token is then not its sequence."""
    case, q, k, v = empty_case([1, 0, 1], [5, 9, 20], num_segments=2)
    check_same(*run_both(case, q, k, v, *random_angles(2, 32, torch.float32), rotary_dim=32))


def test_keep_last_reads_no_dead_table_entry():
    case, q, k, v = empty_case([40, 3, 1], [40, 3, 30], sliding_window=10, num_segments=2)
    case.metadata.block_tables[0, :1] = (1 << 31) - 1  # positions 0 to 15 have left the window
    check_same(*run_both(case, q, k, v, *random_angles(44, 32, torch.float32), rotary_dim=32, keep_last=10))


@pytest.mark.parametrize("block_t, block_h", [(1, 1), (16, 2), (2, 16)])
def test_tiles_of_other_sizes(block_t, block_h):
    case, q, k, v = empty_case([9, 1], [9, 30], num_heads=6, dtype=torch.float16)
    config = RotaryConfig(block_t, block_h, num_warps=1, pdl=False)
    angles = random_angles(10, 32, torch.float16)
    check_same(*run_both(case, q, k, v, *angles, config=config, rotary_dim=32))


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(interleaved):
    case, q, k, v = empty_case([1, 3], [5, 21], dtype=torch.float16)
    angles = random_angles(4, 32, torch.float16)
    expected = reference_layers.rotary_store_kv(
        q, k, v, *angles, clone_kv(case.kv), case.metadata, rotary_dim=32, interleaved=interleaved
    )
    result = rotary_store_kv(q, k, v, *angles, case.kv, case.metadata, rotary_dim=32, interleaved=interleaved, q_out=q)
    assert result is q
    torch.testing.assert_close(q, expected, rtol=0, atol=0)


def test_no_queries():
    case, q, k, v = empty_case([0, 0], [4, 5])
    assert rotary_store_kv(q, k, v, None, None, case.kv, case.metadata, rotary_dim=0).shape == q.shape
    assert case.kv.k_segments[0].isnan().all()


# Transformers' own functions, given cosines of real angles.


def real_angles(tokens, rotary_dim):
    """Float32 angles `[tokens, rotary_dim // 2]` of positions from 1000."""
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=DEVICE) / rotary_dim)
    return torch.arange(1000, 1000 + tokens, device=DEVICE)[:, None] * frequency


def rotate_with(model, q, k, rotary_dim):
    """What a model family of Transformers makes of packed q and k; and cos, sin, options for our op."""
    from importlib import import_module

    module = import_module(f"transformers.models.{model}.modeling_{model}")
    angles = real_angles(len(q), rotary_dim)
    halves = torch.cat([angles, angles], -1)
    interleaved = angles.repeat_interleave(2, -1)
    given = interleaved if model == "cohere" else halves
    ours = halves if model == "llama" else interleaved
    dtype = q.dtype
    heads_first = [x.transpose(0, 1)[None] for x in (q, k)]
    theirs = module.apply_rotary_pos_emb(*heads_first, given.cos().to(dtype)[None], given.sin().to(dtype)[None])
    cos, sin = ours.cos().to(dtype), ours.sin().to(dtype)
    if model == "cohere":  # computes in float32
        cos, sin = cos.float(), sin.float()
    return [x[0].transpose(0, 1) for x in theirs], (cos, sin), dict(interleaved=model != "llama", rotary_dim=rotary_dim)


def check_transformers(model, q_lens, seq_lens, dim, rotary_dim, **options):
    case, q, k, v = empty_case(q_lens, seq_lens, k_dim=dim, dtype=HALF_PRECISION, num_segments=2, **options)
    (q_rotated, k_rotated), angles, rotary = rotate_with(model, q, k, rotary_dim)
    expected_kv = clone_kv(case.kv)
    reference_layers.rotary_store_kv(q, k_rotated, v, None, None, expected_kv, case.metadata, rotary_dim=0)
    out = rotary_store_kv(q, k, v, *angles, case.kv, case.metadata, **rotary, q_out=torch.full_like(q, torch.nan))
    expected = (q_rotated, *expected_kv.k_segments, *expected_kv.v_segments)
    check_same((out, *case.kv.k_segments, *case.kv.v_segments), expected)


@pytest.mark.parametrize("model, dim, rotary_dim", [("llama", 32, 32), ("glm", 32, 16), ("cohere", 32, 32)])
@pytest.mark.parametrize("q_lens, seq_lens", [([1, 1], [5, 30]), ([7, 3], [7, 30])])
def test_transformers(model, dim, rotary_dim, q_lens, seq_lens):
    check_transformers(model, q_lens, seq_lens, dim, rotary_dim)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize(
    "model, dim, rotary_dim", [("llama", 128, 128), ("llama", 80, 80), ("glm", 128, 64), ("cohere", 128, 128)]
)
@pytest.mark.parametrize(
    "q_lens, seq_lens",
    [([1], [100]), ([1] * 32, list(range(100, 3300, 100))), ([777, 2048, 1], [777, 3000, 5])],
)
def test_transformers_real_sizes(model, dim, rotary_dim, q_lens, seq_lens):
    check_transformers(model, q_lens, seq_lens, dim, rotary_dim, num_heads=32, num_kv_heads=8, block_size=64)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("form", [dict(), dict(plus_one=True, round_first=False)])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("q_lens, seq_lens", [([1] * 4, [100, 200, 1, 64]), ([777, 1], [777, 5])])
def test_norms_in_bf16(form, dim, q_lens, seq_lens):
    case, q, k, v = empty_case(
        q_lens, seq_lens, k_dim=dim, num_heads=16, num_kv_heads=8, block_size=64, dtype=torch.bfloat16
    )
    norms = {name: random_norm(dim, torch.bfloat16, **form) for name in ("q_norm", "k_norm")}
    angles = random_angles(len(q), dim, torch.bfloat16)
    check_normed(*run_both(case, q, k, v, *angles, rotary_dim=dim, **norms))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.zeros(2, 32)), r"q must be \[total_q, num_heads"),
        (dict(q=torch.zeros(2, 4, 16)), "q must be"),
        (dict(k=torch.zeros(2, 1, 32)), "k must be"),
        (dict(v=torch.zeros(3, 2, 32)), "v must be"),
        (dict(v=torch.zeros(2, 2, 32, dtype=torch.float64)), "dtype"),
        (dict(k=torch.zeros(2, 32, 2).transpose(1, 2)), "last stride of 1"),
        (dict(q_out=torch.zeros(2, 4, 16)), "q_out must be"),
        (dict(cos=None), "both"),
        (dict(cos=torch.zeros(3, 32)), "cos must be"),
        (dict(sin=torch.zeros(2, 16)), "sin must be"),
        (dict(sin=torch.zeros(2, 32, dtype=torch.float16)), "cos and sin must both be"),
        (dict(rotary_dim=64), "rotary_dim must be even"),
        (dict(rotary_dim=3), "rotary_dim must be even"),
        (dict(q_norm=RMSNorm(torch.zeros(16), 1e-6, False, True)), "the norm's weight"),
        (dict(keep_last=0), "keep_last must be at least 1"),
    ],
)
def test_wrong_arguments(change, message):
    case = make_case([2], [4], fill=False)
    heads = {"q": torch.zeros(2, 4, 32), "k": torch.zeros(2, 2, 32), "v": torch.zeros(2, 2, 32)}
    angles = {"cos": torch.zeros(2, 32), "sin": torch.zeros(2, 32)}
    arguments = heads | angles | {"rotary_dim": 32} | change
    with pytest.raises(ValueError, match=message):
        rotary_store_kv(kv=case.kv, metadata=case.metadata, **arguments)


def test_the_oracle_rounds_as_often_as_its_angles_say():
    """With cosines of q's dtype the products are rounded; with float32 ones only the sum is."""
    case, q, k, v = empty_case([64], [64], dtype=HALF_PRECISION)
    cos, sin = random_angles(64, 32, HALF_PRECISION)
    once, thrice = (
        reference_layers.rotary_store_kv(q, k, v, *angles, clone_kv(case.kv), case.metadata, rotary_dim=32)
        for angles in ((cos.float(), sin.float()), (cos, sin))
    )
    changed = (once != thrice).float().mean().item()
    assert 0.05 < changed < 0.9 and math.isfinite(changed)
