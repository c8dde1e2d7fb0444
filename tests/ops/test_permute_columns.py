import pytest
import torch

from hf_turbo.ops import reference_int4 as reference
from hf_turbo.ops.permute_columns import permute_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, columns, taken", [
    (1, 64, 64), (3, 1500, 1500), (2, 100, 1100), (17, 300, 260), (16, 100, 700), (17, 20, 17000),
])  # fmt: skip
def test_permute_columns(dtype, rows, columns, taken):
    x = torch.randn(rows, columns + 8, device=DEVICE).to(dtype)[:, :columns]
    perm = torch.randint(-1, columns, (taken,), device=DEVICE).int()
    perm[::7] = -1
    assert torch.equal(permute_columns(x, perm), reference.permute_columns(x, perm))


def test_bad_input():
    x, perm = torch.zeros(2, 8, device=DEVICE), torch.arange(8, device=DEVICE)
    with pytest.raises(ValueError, match="in int32"):
        permute_columns(x, perm)
    with pytest.raises(ValueError, match="a last stride of 1"):
        permute_columns(x.t(), perm.int())
