"""The gated ops and the matmul on a GPU: every activation, and the candidates at real sizes."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.matmul.gates import gate_oracle, near, of_arguments
from tests.kernels.matmul.test_gated import arrays_of, expected, glu_arrays_of
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.triton.backend import TritonGatedGroupedMatmul
from tilewright.kernels.numerics.activations import ACTIVATIONS
from tilewright.modules import gated_grouped_matmul, glu, matmul
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


PLATFORMS = pytest.mark.parametrize("platform", ["triton", "pallas"])


def needs(platform: str) -> None:
    if platform == "triton":
        pytest.importorskip("triton")
    elif current_device().capability != (9, 0):
        pytest.skip("needs a Hopper GPU")


@PLATFORMS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: Any, dtype: str, platform: str):
    needs(platform)
    if platform == "pallas" and dtype == "float32":
        pytest.skip("computes in 16 bits")
    lhs, gate, up, sizes, d_out = arrays_of(rows=300, k=96, n=80, dtype=dtype, sizes=(50, 0, 190, 40))
    function = functools.partial(gated_grouped_matmul, activation=activation, platform=platform)
    with jax.default_matmul_precision("highest"):
        out, pull_back = jax.jit(lambda *xs: jax.vjp(lambda *ys: function(*ys, sizes), *xs))(lhs, gate, up)
        gradients = jax.jit(lambda pull_back, d_out: pull_back(d_out))(pull_back, d_out)
    got = {"out": out} | dict(zip(("d_lhs", "d_gate", "d_up"), gradients, strict=True))
    near(got, expected(lhs, gate, up, sizes, d_out, activation=activation))


@PLATFORMS
@pytest.mark.parametrize("transposed", [False, True])
def test_glu(platform: str, transposed: bool):
    needs(platform)
    x, gate, up, d_out = glu_arrays_of(rows=300, k=96, n=80, dtype="bfloat16")
    given = (gate.T, up.T) if transposed else (gate, up)
    out, pull_back = jax.vjp(functools.partial(glu, platform=platform, transpose_rhs=transposed), x, *given)
    d_x, *of_matrices = pull_back(d_out)
    d_gate, d_up = (each.T if transposed else each for each in of_matrices)
    got = {"out": out, "d_x": d_x, "d_gate": d_gate, "d_up": d_up}
    near(got, gate_oracle("silu", x, gate, up, d_out))


@pytest.mark.parametrize(("rows", "groups"), [(3000, 6), (70, 32)])
def test_candidates_at_real_sizes(rows: int, groups: int):
    """Right, and repeatable bit for bit."""
    pytest.importorskip("triton")
    backend = TritonGatedGroupedMatmul()
    lhs, gate, up, sizes, d_out = arrays_of(rows=rows, k=512, n=704, groups=groups, dtype="bfloat16")
    inputs, device = MatmulInputs(lhs, gate, "bfloat16", up, sizes, activation="silu"), current_device()
    want = expected(lhs, gate, up, sizes, d_out)
    forward, backward = (list(backend.candidates(inputs, device, way)) for way in ("forward", "backward"))
    for number in range(max(len(forward), len(backward))):
        params = forward[number % len(forward)], backward[number % len(backward)]

        @jax.jit
        def both(inputs: MatmulInputs, d_out: Any, params: Any = params) -> dict[str, Any]:
            out, *kept = backend.forward(inputs, params[0])
            gradients = backend.backward(inputs, kept, d_out, params[1])
            return {"out": out} | of_arguments(gradients)

        got, again = both(inputs, d_out), both(inputs, d_out)
        near(got, want, str(params))
        for name, x in got.items():
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again[name], np.float32))


@pytest.mark.parametrize("flags", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("size", [(1000, 1096, 520), (264, 4096, 8)])
def test_matmul_on_hopper(flags: tuple[bool, bool], size: tuple[int, int, int]):
    """All layouts, of sizes that no tile divides, and both gradients, beside float64."""
    needs("pallas")
    (m, n, k), random = size, np.random.default_rng(0)
    shapes = ((k, m) if flags[0] else (m, k)), ((n, k) if flags[1] else (k, n)), (m, n)
    lhs, rhs, d_out = (jax.numpy.asarray(random.standard_normal(shape), "bfloat16") for shape in shapes)
    function = functools.partial(matmul, transpose_lhs=flags[0], transpose_rhs=flags[1], platform="pallas")
    out, pull_back = jax.vjp(function, lhs, rhs)
    a, b, d = (np.asarray(x, np.float64) for x in (lhs, rhs, d_out))
    a, b = a.T if flags[0] else a, b.T if flags[1] else b
    want = [a @ b, d @ b.T, a.T @ d]
    want[1:] = [x.T if flag else x for x, flag in zip(want[1:], flags, strict=True)]
    got = dict(zip(("out", "d_lhs", "d_rhs"), (out, *pull_back(d_out)), strict=True))
    near(got, dict(zip(got, want, strict=True)))
