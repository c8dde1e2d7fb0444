from __future__ import annotations

import pytest
import torch

from hf_turbo.ops.argmax import argmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cases(device, dtypes, sizes):
    for dtype in dtypes:
        for rows, columns in sizes:
            yield torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(dtype).to(device)


def check(device, dtypes, sizes):
    for x in cases(device, dtypes, sizes):
        x = x[:, 1:] if x.shape[1] > 5000 else x  # another alignment and stride
        assert torch.equal(argmax(x), x.argmax(-1))
        x[:, x.shape[1] // 2 :] = x.max() + 1  # many equals: the first counts
        assert argmax(x).tolist() == [x.shape[1] // 2] * len(x)
        x[-1, -1] = torch.nan
        assert argmax(x)[-1] == x.shape[1] - 1
    assert argmax(torch.full((2, 9), -torch.inf, device=device)).tolist() == [0, 0]


def test_argmax():
    check("cpu", (torch.float32, torch.float16), ((1, 7), (3, 4096), (2, 9001)))


@pytest.mark.gpu
def test_argmax_on_the_device():
    check("cuda", (torch.float32, torch.float16, torch.bfloat16), ((1, 7), (3, 4096), (2, 9001), (5, 128256)))


def test_refuses_other_shapes():
    with pytest.raises(ValueError, match="last stride"):
        argmax(torch.zeros(4, 3).t())
