"""Short runs of the Hopper kernels for `make memcheck`: ragged ends everywhere, the sanitizer watches every access."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import cotangents, inputs_of
from tilewright.kernels.flash_attention import pallas_gpu
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.pallas_gpu import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)

BACKEND = PallasGpuFlashAttention()

SIZES: dict[str, Any] = {"heads": 2, "dtype": "bfloat16"}
CASES = {
    # Enough work items for each program that the first heads are complete before the last begin.
    "converted early": AttentionCase("", 16, 500, head_dim=64, causal=True, **SIZES | {"heads": 32, "kv_heads": 16}),
    "causal": AttentionCase("", 2, 333, 270, head_dim=128, causal=True, **SIZES),
    "window, d96": AttentionCase("", 1, 301, head_dim=96, causal=True, sliding_window=77, **SIZES),
    "bias and sinks": AttentionCase("", 2, 190, 211, head_dim=64, bias="hqk", sinks=1, **SIZES),
    "segments and dropout": AttentionCase("", 2, 259, head_dim=128, segments=True, dropout_prob=0.2, **SIZES),
    "d192, d128": AttentionCase("", 1, 203, 171, head_dim=192, value_dim=128, causal=True, **SIZES),
    "d256": AttentionCase("", 1, 201, head_dim=256, causal=True, **SIZES),
}


@pytest.mark.parametrize("name", CASES)
def test_in_bounds(name: str):
    inputs = inputs_of(CASES[name])
    problem, device = AttentionProblem.of(inputs), current_device()
    d = cotangents(inputs)
    for config in BACKEND.candidates(problem, device, "forward")[:2]:
        results = jax.jit(lambda inputs, config=config: BACKEND.forward(inputs, config))(inputs)
        assert all(bool(jnp.isfinite(array).all()) for array in results)
    kinds = {config.deterministic: config for config in BACKEND.candidates(problem, device, "backward")[::-1]}
    with mock.patch.object(pallas_gpu, "convert_kernel", wraps=pallas_gpu.convert_kernel) as convert:
        for config in kinds.values():
            backward = jax.jit(lambda inputs, results, d, config=config: BACKEND.backward(inputs, results, d, config))
            for array in jax.tree.leaves(backward(inputs, results, d)):
                assert np.isfinite(np.asarray(array, np.float32)).all()
    if name == "converted early":
        assert convert.call_args.args[3] is not None
