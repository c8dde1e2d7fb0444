"""The table of the attention kernel, where it goes by what is beside it."""

import pytest
import torch

from hf_turbo.ops.attention_config import DeviceFacts, choose_config

H200 = DeviceFacts(132, 90, 232448)


@pytest.mark.parametrize(("dim", "expected"), [(64, 3), (128, 2), (256, 2)])
def test_gemvs_are_left_room_for_loads(dim, expected):
    """By smaller programs: nothing that a result depends on."""
    config = choose_config(4, 8, dim, dim, torch.bfloat16, H200, beside_gemv=True)
    usual = choose_config(4, 8, dim, dim, torch.bfloat16, H200)
    assert (config.num_stages, usual.num_stages) == (expected, 3)
    assert (config.tile, config.block_m, config.num_warps) == (usual.tile, usual.block_m, usual.num_warps)
