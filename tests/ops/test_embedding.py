"""Rows of an embedding against torch's."""

import pytest
import torch
import torch.nn.functional as F

from hf_turbo.ops import reference_layers
from hf_turbo.ops.embedding import embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """What a launch leaves unwritten is NaN."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        tensor = new_empty(self, *shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def table(rows, columns, dtype, padding=0):
    """A weight whose surroundings are NaN."""
    whole = torch.full((rows + 2, columns + padding), torch.nan, dtype=dtype, device=DEVICE)
    weight = whole[1:-1, :columns]
    weight.copy_(torch.randn(rows, columns, device=DEVICE))
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("columns, padding", [(64, 0), (576, 0), (1100, 4)])
def test_equals_torch(columns, padding, dtype, id_dtype):
    weight = table(11, columns, dtype, padding)
    ids = torch.tensor([[0, 10], [3, 3], [7, 0]], dtype=id_dtype, device=DEVICE)
    out = embedding(weight, ids)
    assert out.is_contiguous() and torch.equal(out, F.embedding(ids, weight))
    assert torch.equal(out, reference_layers.embedding(weight, ids))
    assert torch.equal(embedding(weight, ids.t()), F.embedding(ids.t(), weight))


def test_no_rows():
    weight = table(3, 8, torch.float32)
    assert embedding(weight, torch.empty(2, 0, dtype=torch.int64, device=DEVICE)).shape == (2, 0, 8)


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion is the end of a process's CUDA")
@pytest.mark.parametrize("index", [-1, 3, 10**15])
def test_out_of_range(index):
    """Nothing outside of the weight is read. (The interpreter leaves assertions out.)"""
    weight = table(3, 8, torch.float32)
    out = embedding(weight, torch.tensor([0, index]))
    assert torch.equal(out[0], weight[0]) and not out[1].any()


@pytest.mark.parametrize(
    "weight, ids, message",
    [
        (torch.zeros(2, 3, 1), torch.zeros(1, dtype=torch.int64), "weight must be"),
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), "weight must be"),
        (torch.zeros(8, 2).t(), torch.zeros(1, dtype=torch.int64), "weight must be"),
        (torch.zeros(2, 8), torch.zeros(1, dtype=torch.int16), "ids must be"),
    ],
)
def test_wrong_arguments(weight, ids, message):
    with pytest.raises(ValueError, match=message):
        embedding(weight, ids)
