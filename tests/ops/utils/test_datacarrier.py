import dataclasses

import numpy as np
import pytest

from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

DOCUMENTED = {
    FwdParams: "blocksize_m blocksize_k blocksize_n q_blocksize kv_blocksize blocksize_heads blocksize_keys "
    "num_key_splits num_warps num_stages",
    BwdParams: "blocksize_m blocksize_k blocksize_n q_blocksize kv_blocksize num_warps num_stages",
}


@pytest.mark.parametrize("kind", [FwdParams, BwdParams])
class TestParams:
    def test_fields_and_defaults_are_the_documented_ones(self, kind):
        assert [field.name for field in dataclasses.fields(kind)] == DOCUMENTED[kind].split()
        assert set(dataclasses.astuple(kind())) == {None}

    @pytest.mark.parametrize("value", [0, -1])
    def test_refuses_what_is_not_positive(self, kind, value):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.num_warps={value}"):
            kind(num_warps=value)

    @pytest.mark.parametrize("value", [True, 1.0, "4", np.int32(4)])
    def test_refuses_what_is_not_an_int(self, kind, value):
        with pytest.raises(TypeError, match=r"q_blocksize="):
            kind(q_blocksize=value)
