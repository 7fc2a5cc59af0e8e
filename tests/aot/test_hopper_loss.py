"""Configs of the Hopper cross-entropy that selection or tuning can take: no spills, and no serialised wgmmas."""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiler import H100, compile_for_h100, missing_packages
from tilewright.kernels.linear_cross_entropy.hopper import backend
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossResults
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages())

DEVICE = find_device(H100).device
BACKEND = backend.HopperLinearCrossEntropy()


def struct(*shape: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def inputs_of(tokens: int, d: int, vocab: int, *, bias: bool = False, **options: Any) -> LossInputs:
    weight: Any = struct(*((vocab, d) if options.get("vocab_first") else (d, vocab)))
    x: Any = struct(tokens, d)
    labels: Any = struct(tokens, dtype="int32")
    given: Any = struct(vocab) if bias else None
    return LossInputs(x, weight, labels, given, **options)


CALLS = {
    "kept": inputs_of(8192, 4096, 131072, keeps_gradients=True),
    "kept, soft cap": inputs_of(8192, 2304, 256000, keeps_gradients=True, vocab_first=True, logits_soft_cap=30.0),
    "recomputed": inputs_of(8192, 4096, 131072),
    "all options": inputs_of(
        4096, 768, 50257, bias=True, keeps_gradients=True, vocab_first=True, logits_soft_cap=30.0, z_loss=1e-4,
        label_smoothing=0.1, gradient_epsilon=1e-6,
    ),
}  # fmt: skip

SPILLS = {"all options": 96}
"""Bytes of the statistics with a bias, a soft cap and the sum of the logits of a vocabulary that no tile divides."""


def each_config() -> Iterator[Any]:
    for name, direction in itertools.product(CALLS, ("forward", "backward")):
        inputs = CALLS[name]
        assert not BACKEND.not_supported_reasons(inputs, DEVICE, direction)
        for number, params in enumerate(BACKEND.candidates(inputs, DEVICE, direction)):
            yield pytest.param(name, direction, params, id=f"{name}-{direction}-{number}")


@pytest.mark.parametrize(("name", "direction", "params"), each_config())
def test_no_spills(name: str, direction: Direction, params: Any):
    inputs = CALLS[name]
    # The kernels of gradients run where they are recomputed.
    inputs = inputs if direction == "forward" else inputs.replace(keeps_gradients=False)
    vector, scalar = struct(*inputs.labels.shape, dtype="float32"), struct(dtype="float32")
    results = LossResults((vector, vector, vector if inputs.needs_sum else None))

    def call(inputs: LossInputs, results: LossResults, total: jax.Array) -> Any:
        if direction == "forward":
            return BACKEND.forward(inputs, params)
        return BACKEND.backward(inputs, results, LossResults(total=total), params)

    with mock.patch.object(backend, "num_sms", return_value=132):
        reports = compile_for_h100(call, inputs, results, scalar)
    assert reports or (direction == "backward" and not params.recompute)
    assert not any(report.serialised for report in reports)
    assert max((report.spill_stores for report in reports), default=0) <= SPILLS.get(name, 0)
