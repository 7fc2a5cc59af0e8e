"""Conformance of the backends of ``linear_sample``: calls, and a draw from logits in float64 as the oracle."""

from typing import Any

import jax
import numpy as np

from tests.kernels.conformance import Conformance, Found
from tests.kernels.sampling.conformance import check_draw, drawn, named
from tilewright.kernels import kernel
from tilewright.kernels.sampling.cases import LinearSampleCase
from tilewright.kernels.sampling.inputs import LinearSampleInputs

CASES = (
    LinearSampleCase("plain", rows=5, d=48, vocab=300),
    LinearSampleCase("vocab_first", rows=3, d=40, vocab=256, vocab_first=True, temperature=0.5),
    LinearSampleCase("bias", rows=4, d=16, vocab=200, bias=True, temperature=2.0),
    LinearSampleCase("cap", rows=4, d=33, vocab=130, logits_soft_cap=1.5),
    LinearSampleCase("greedy", rows=4, d=32, vocab=700, temperature=0.0),
    LinearSampleCase("bfloat16", rows=20, d=64, vocab=520, dtype="bfloat16"),
    LinearSampleCase("float16", rows=2, d=64, vocab=129, dtype="float16", vocab_first=True),
    LinearSampleCase("one_token", rows=2, d=8, vocab=1),
    LinearSampleCase("no_rows", rows=0, d=8, vocab=20),
)


def inputs_of(case: LinearSampleCase) -> LinearSampleInputs:
    args, kwargs = case.arguments()
    found: LinearSampleInputs = kernel("linear_sample").prepare(*args, **kwargs)
    return found


def logits_of(inputs: LinearSampleInputs) -> np.ndarray:
    weight = np.asarray(inputs.weight, np.float64)
    logits = np.asarray(inputs.x, np.float64) @ (weight.T if inputs.vocab_first else weight)
    if inputs.bias is not None:
        logits = logits + np.asarray(inputs.bias, np.float64)
    cap = inputs.logits_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def oracle_of(inputs: LinearSampleInputs) -> Found:
    temperature = np.ones(inputs.rows) if inputs.temperature is None else np.asarray(inputs.temperature)
    rows = zip(logits_of(inputs), np.asarray(inputs.key), temperature, strict=True)
    found = [drawn(row, key, float(t), 0, 1.0, 0.0) for row, key, t in rows]
    tokens, log_probs = (np.array([each[i] for each in found]) for i in range(2))
    return {"tokens": tokens.astype(np.int32), "log_probs": log_probs}


class LinearSampleConformance(Conformance[LinearSampleCase, LinearSampleInputs]):
    """A backend of ``linear_sample``."""

    cases = CASES
    repeated = CASES[0]

    def inputs(self, case: LinearSampleCase) -> LinearSampleInputs:
        return inputs_of(case)

    def cotangents(self, inputs: LinearSampleInputs) -> None:
        return None

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return named(results)

    def dtypes(self, inputs: LinearSampleInputs) -> dict[str, Any]:
        return {"tokens": np.int32, "log_probs": np.float32}

    def oracle(self, inputs: LinearSampleInputs, cotangents: Any) -> tuple[Found, None]:
        return oracle_of(inputs), None

    def compiled(self, inputs: Any) -> Any:
        run = super().compiled(inputs)

        def exact(inputs: Any, cotangents: Any) -> Found:
            with jax.default_matmul_precision("highest"):
                return run(inputs, cotangents)

        return exact

    def check(
        self, got: Found, inputs: LinearSampleInputs, cotangents: Any, factor: float = 2.0, where: object = ""
    ) -> None:
        check_draw(got, oracle_of(inputs), tolerance=2e-5)

    def test_logits_that_are_not_finite(self):
        inputs = inputs_of(LinearSampleCase("", rows=4, d=16, vocab=200))
        x, bias = np.array(inputs.x), np.zeros(200, np.float32)
        x[1], bias[:] = np.nan, -np.inf
        bias[[3, 150, 151]] = 0.0
        given = inputs.replace(x=jax.device_put(x), bias=jax.device_put(bias))
        got = self.compiled(given)(given, None)
        check_draw(got, oracle_of(given), tolerance=2e-5)
        assert set(np.asarray(got["tokens"])[[0, 2, 3]].tolist()) <= {3, 150, 151}
        assert got["tokens"][1] == 0
        assert got["log_probs"][1] == -np.inf
