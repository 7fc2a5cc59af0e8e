"""Short runs of the kernels for Hopper and of those in CUDA C++ for `make memcheck`: ragged ends
everywhere, the sanitizer watches every access."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import cotangents, inputs_of
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cuda.backend import CudaBackwardParams, CudaFlashAttention, CudaForwardParams
from tilewright.kernels.flash_attention.hopper import backend as pallas_gpu
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.op.backend import Backend
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)

PALLAS, CUDA = PallasGpuFlashAttention(), CudaFlashAttention()

DTYPE: dict[str, Any] = {"dtype": "bfloat16"}
SIZES: dict[str, Any] = {"heads": 2, **DTYPE}
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


def run(backend: Backend, inputs: AttentionInputs, forward: Iterable[Any], backward: Iterable[Any]) -> None:
    """Every config of both directions; the sanitizer judges, but nothing that they write may be missing either."""
    d = cotangents(inputs)
    for config in forward:
        results = jax.jit(lambda inputs, config=config: backend.forward(inputs, config))(inputs)
        assert not any(bool(jnp.isnan(array).any()) for array in results)
    for config in backward:
        gradients = jax.jit(lambda inputs, results, d, config=config: backend.backward(inputs, results, d, config))
        for array in jax.tree.leaves(gradients(inputs, results, d)):
            assert np.isfinite(np.asarray(array, np.float32)).all()


@pytest.mark.parametrize("name", CASES)
def test_in_bounds(name: str):
    inputs = inputs_of(CASES[name])
    structs, device = inputs.structs, current_device()
    kinds = {config.deterministic: config for config in PALLAS.candidates(structs, device, "backward")[::-1]}
    with mock.patch.object(pallas_gpu, "convert_kernel", wraps=pallas_gpu.convert_kernel) as convert:
        run(PALLAS, inputs, PALLAS.candidates(structs, device, "forward")[:2], kinds.values())
    if name == "converted early":
        assert convert.call_args.args[3] is not None


CUDA_CASES = {
    "float32, window": AttentionCase("", 2, 333, 270, heads=4, kv_heads=2, head_dim=60, causal=True, sliding_window=77),
    "float32, d200": AttentionCase("", 1, 101, 170, heads=2, head_dim=200, logits_soft_cap=5.0),
    "d512": AttentionCase("", 1, 130, 201, heads=2, head_dim=512, causal=True, **DTYPE),
    "plain": AttentionCase("", 2, 333, 270, heads=2, head_dim=128, causal=True, **DTYPE),
    "packed": AttentionCase("", 1, 500, heads=2, head_dim=64, causal=True, packed=True, **DTYPE),
    "bias and sinks": AttentionCase("", 2, 190, 211, heads=2, head_dim=64, bias="hqk", sinks=1, **DTYPE),
    "mask and dropout": AttentionCase("", 2, 259, heads=2, head_dim=72, mask="bhqk", dropout_prob=0.2, **DTYPE),
    "more queries": AttentionCase(
        "", 1, 300, 90, heads=2, head_dim=96, value_dim=40, causal=True, causal_alignment="bottom_right", **DTYPE
    ),
}


@pytest.mark.parametrize("name", CUDA_CASES)
def test_cuda_in_bounds(name: str):
    inputs = inputs_of(CUDA_CASES[name])
    reasons = CUDA.not_supported_reasons(inputs.structs, current_device(), "backward")
    if reasons:
        pytest.skip("; ".join(reasons))
    run(CUDA, inputs, [CudaForwardParams()], [CudaBackwardParams(None, form) for form in (False, True)])
