"""Calls that cuDNN serves, and what its residuals must be good for; run where it is emulated, and where it is."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tests.kernels.flash_attention.conformance import (
    as_case,
    check_kinds,
    cotangents,
    inputs_of,
    judge,
    oracles,
    pairwise,
)
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cudnn.backend import CudnnFlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.op.backend import Backend
from tilewright.ops.types import Device

BACKEND = CudnnFlashAttention()


def case_of(**options: Any) -> AttentionCase:
    sizes = {"batch": 2, "q_length": 40, "heads": 4, "kv_heads": 2, "head_dim": 24, "dtype": "bfloat16"}
    return AttentionCase("", **sizes | options)


CASES = {
    "plain": case_of(),
    "causal": case_of(causal=True, dtype="float16", softmax_scale=-0.4),
    "wide values": case_of(head_dim=20, value_dim=50, kv_length=64),
    "more queries": case_of(kv_length=26, causal=True),
    "window": case_of(causal=True, sliding_window=5, kv_length=48, dtype="float16"),
    "lengths": case_of(lengths=True, kv_length=70),
    "lengths in a window": case_of(lengths=True, causal=True, sliding_window=7),
    "bias": case_of(bias="bhqk", causal=True),
    "shared bias": case_of(bias="hqk", lengths=True, causal=True, dtype="float16"),
    "bias by rows": case_of(bias="q"),
    "bias by columns": case_of(bias="bk", causal=True),
    "bias in a window": case_of(bias="hqk", causal=True, sliding_window=5),
}


FACTORS: dict[str, Sequence[Any]] = {
    "lengths": [(64, 64), (33, 33), (48, 80), (40, 17), (1, 37)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "dims": [(16, 16), (24, 8), (5, 20)],
    "dtype": ["bfloat16", "float16"],
    "causality": [None, "top_left"],
    "window": [None, (3, 0), (9, 0)],
    "variable": ["", "lengths"],
    "scale": [None, 0.7, -0.2],
}
ABSENT = {"soft_cap": None, "sinks": 0, "mask": None, "bias": None, "dropout": 0.0}
PAIRWISE = [as_case(index, ABSENT | row) for index, row in enumerate(pairwise(FACTORS))]


def inputs_for(case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """Those of a case, with its bias in the query's dtype."""
    inputs = inputs_of(case, seed)
    if inputs.bias is None:
        return inputs
    return inputs.replace(bias=inputs.bias.astype(inputs.query.dtype))


def check_residuals(
    inputs: AttentionInputs,
    device: Device,
    others: Sequence[Backend],
    ours: Backend = BACKEND,
    factor: float = 2.0,
) -> None:
    """Forward and backward, each also with other backends' halves, against the oracle, with a gradient to lse."""
    structs = inputs.structs.replace(return_lse=True)

    def forward(backend: Backend) -> Any:
        params = backend.heuristic(structs, device, "forward")
        return jax.jit(lambda inputs: backend.forward(inputs, params))(inputs)

    def backward(backend: Backend, results: Any) -> Any:
        params = backend.heuristic(structs, device, "backward")
        run = jax.jit(lambda inputs, results, cotangents: backend.backward(inputs, results, cotangents, params))
        return run(inputs, results, (d_out, d_lse))

    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    own = forward(ours)
    assert [x.dtype for x in own] == [inputs.query.dtype, jnp.float32]
    judge(dict(zip(("out", "lse"), own, strict=True)), exact.results, low.results, factor)
    pairs = [(ours, own)]
    for other in others:
        pairs += [(other, own), (ours, forward(other))]
    for backend, results in pairs:
        gradients = backward(backend, results)
        check_kinds(gradients, inputs)
        judge(gradients, exact.gradients, low.gradients, factor, type(backend).__name__)
