"""Matmuls with weights of few bits on a GPU: every candidate against the oracle, and the same bits every time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import check
from tilewright.kernels import kernel
from tilewright.kernels.weight_only.cases import WeightOnlyCase
from tilewright.kernels.weight_only.triton.backend import TritonWeightOnly
from tilewright.ops.utils.device import current_device

BASE = WeightOnlyCase("", dtype="bfloat16", rows=5, k=1024, n=384)
CASES = {
    "int4": {},
    "float16": {"dtype": "float16"},
    "zeros": {"zeros": True, "group": 64},
    "groups_of_32": {"group": 32},
    "one_group": {"group": None, "k": 1000, "n": 200},
    "int8": {"format": "int8", "zeros": True},
    "int8_float16": {"format": "int8", "group": None, "dtype": "float16"},
    "mxfp4": {"format": "mxfp4", "group": 32},
    "mxfp4_float16": {"format": "mxfp4", "group": 32, "dtype": "float16"},
    "scales_of_16_bits": {"scale_dtype": "bfloat16"},
    "ordered": {"ordered": True},
    "64_rows": {"rows": 64},
    "many_rows": {"rows": 300},
    "many_rows_zeros": {"rows": 300, "zeros": True, "group": 64, "dtype": "float16"},
    "many_rows_mxfp4": {"rows": 300, "format": "mxfp4", "group": 32},
    "many_rows_int8": {"rows": 300, "format": "int8", "group": None},
}


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_the_oracle(name: str) -> None:
    op, backend = kernel("weight_only_matmul"), TritonWeightOnly()
    args, options = dataclasses.replace(BASE, name=name, **CASES[name]).arguments()
    inputs = op.prepare(*args, **options)
    if reasons := backend.reasons(inputs.structs, current_device(), "forward"):
        pytest.skip("; ".join(reasons))
    exact = {"out": np.asarray(op.reference(inputs.replace(x=inputs.x.astype(jnp.float32), out_dtype="float32")))}
    for params in backend.candidates(inputs.structs, current_device(), "forward"):
        run = jax.jit(lambda inputs, params=params: backend.forward(inputs, params))
        first, second = run(inputs), run(inputs)
        low = {"out": np.asarray(inputs.x @ inputs.matrix(inputs.x.dtype).T, np.float64)}
        if inputs.order is None:
            check({"out": first}, exact, low, where=params)
        else:
            check({"out": first}, exact, where=params, factor=4.0)
        assert np.array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32)), params
