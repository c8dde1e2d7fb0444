import pytest

from hf_turbo.ops.norm_spec import RMSNorm


def test_one_plus_the_weight_is_not_rounded_first():
    assert RMSNorm(None, 1e-5, plus_one=True, round_first=False).plus_one
    with pytest.raises(ValueError, match="round_first=False"):
        RMSNorm(None, 1e-5, plus_one=True)
