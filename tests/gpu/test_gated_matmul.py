"""The gated ops in Triton on a GPU: every activation, and the candidates at real sizes."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.grouped_matmul.test_gated import arrays_of, expected
from tests.kernels.matmul.gates import gate_oracle, near
from tests.kernels.matmul.test_glu import arrays_of as glu_arrays_of
from tilewright.kernels.activations import ACTIVATIONS
from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs, GatedOptions, GatedProblem
from tilewright.kernels.grouped_matmul.triton.gated import TritonGatedGroupedMatmul
from tilewright.modules import gated_grouped_matmul, glu
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: Any, dtype: str):
    pytest.importorskip("triton")
    lhs, gate, up, sizes, d_out = arrays_of(rows=300, k=96, n=80, dtype=dtype, sizes=(50, 0, 190, 40))
    function = functools.partial(gated_grouped_matmul, activation=activation, platform="triton")
    with jax.default_matmul_precision("highest"):
        out, pull_back = jax.jit(lambda *xs: jax.vjp(lambda *ys: function(*ys, sizes), *xs))(lhs, gate, up)
        gradients = jax.jit(lambda pull_back, d_out: pull_back(d_out))(pull_back, d_out)
    got = {"out": out} | dict(zip(("d_lhs", "d_gate", "d_up"), gradients, strict=True))
    near(got, expected(lhs, gate, up, sizes, d_out, activation))


def test_glu():
    pytest.importorskip("triton")
    x, gate, up, d_out = glu_arrays_of(rows=300, k=96, n=80, dtype="bfloat16")
    out, pull_back = jax.vjp(functools.partial(glu, platform="triton"), x, gate, up)
    got = {"out": out} | dict(zip(("d_x", "d_gate", "d_up"), pull_back(d_out), strict=True))
    near(got, gate_oracle("silu", x, gate, up, d_out))


@pytest.mark.parametrize(("rows", "groups"), [(3000, 6), (70, 32)])
def test_candidates_at_real_sizes(rows: int, groups: int):
    """Right, and repeatable bit for bit."""
    pytest.importorskip("triton")
    backend = TritonGatedGroupedMatmul()
    lhs, gate, up, sizes, d_out = arrays_of(rows=rows, k=512, n=704, groups=groups, dtype="bfloat16")
    inputs, device = GatedInputs(lhs, gate, up, sizes, None, GatedOptions("bfloat16", "silu")), current_device()
    want, problem = expected(lhs, gate, up, sizes, d_out), GatedProblem.of(inputs)
    forward, backward = (list(backend.candidates(problem, device, way)) for way in ("forward", "backward"))
    for number in range(max(len(forward), len(backward))):
        params = forward[number % len(forward)], backward[number % len(backward)]

        @jax.jit
        def both(inputs: GatedInputs, d_out: Any, params: Any = params) -> dict[str, Any]:
            out, *kept = backend.forward(inputs, params[0])
            gradients = backend.backward(inputs, kept, d_out, params[1])
            return {"out": out} | {f"d_{name}": x for name, x in gradients.items()}

        got, again = both(inputs, d_out), both(inputs, d_out)
        near(got, want, str(params))
        for name, x in got.items():
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again[name], np.float32))
