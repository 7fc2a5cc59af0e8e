import dataclasses

import numpy as np
import pytest

from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.serialize import from_json, to_json

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

    def test_is_a_value(self, kind):
        params = kind(blocksize_m=64, num_stages=2)
        assert params == kind(blocksize_m=64, num_stages=2) != kind(blocksize_m=64)
        assert len({params, kind(64, num_stages=2), kind()}) == 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            params.num_warps = 4
        with pytest.raises((AttributeError, TypeError)):
            object.__setattr__(params, "unknown", 1)

    @pytest.mark.parametrize("value", [0, -1])
    def test_refuses_what_is_not_positive(self, kind, value):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.num_warps={value}"):
            kind(num_warps=value)

    @pytest.mark.parametrize("value", [True, 1.0, "4", np.int32(4)])
    def test_refuses_what_is_not_an_int(self, kind, value):
        with pytest.raises(TypeError, match=r"q_blocksize="):
            kind(q_blocksize=value)

    def test_round_trips_through_json(self, kind):
        params = kind(*range(1, len(dataclasses.fields(kind)) + 1))
        assert from_json(to_json(params), kind) == params
        assert from_json("{}", kind) == kind()
