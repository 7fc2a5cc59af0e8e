"""Conformance of the gated ops in Triton, by Triton's interpreter; their params, and what they decline."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100, H100
from tests.kernels.matmul.gates import gate_oracle, near, of_arguments
from tests.kernels.matmul.grouped_conformance import random_sizes
from tests.kernels.matmul.test_gated import BASE, arrays_of, expected
from tests.kernels.matmul.test_glu import arrays_of as glu_arrays_of
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.ops.gated_grouped_matmul import GatedGroupedMatmul
from tilewright.kernels.matmul.ops.glu import Glu
from tilewright.kernels.matmul.triton.backend import TritonGatedGroupedMatmul, TritonGlu
from tilewright.kernels.matmul.triton.params import TritonGatedBackwardParams, TritonGatedForwardParams
from tilewright.kernels.matmul.xla.backend import XlaGlu
from tilewright.kernels.numerics.activations import ACTIVATIONS
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonGatedGroupedMatmul()
TILE = TritonTile(16, 16, 16, 1, 1)
FORWARD = TritonGatedForwardParams(TILE)
BACKWARD = TritonGatedBackwardParams(TILE, TILE)


def inputs_of(lhs: Any, gate: Any, up: Any, sizes: Any, activation: str = "silu", offset: Any = None) -> MatmulInputs:
    return MatmulInputs(lhs, gate, lhs.dtype.name, up, sizes, offset, activation=activation)


def both(inputs: MatmulInputs, d_out: Any, backward: TritonGatedBackwardParams = BACKWARD) -> dict[str, Any]:
    out, *kept = BACKEND.forward(inputs, FORWARD)
    gradients = BACKEND.backward(inputs, kept, d_out, backward)
    return {"out": out} | of_arguments(gradients)


def interpreted(function: Any, *args: Any) -> Any:
    with interpret_triton():
        return jax.block_until_ready(jax.jit(function)(*args))


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(name, dtype) for name in ACTIVATIONS for dtype in ("float32", "bfloat16", "float16")],
)
def test_results_and_gradients(activation: str, dtype: str):
    arrays = arrays_of(dtype=dtype, sizes=(5, 0, 20, 7))
    got = interpreted(lambda *xs: both(inputs_of(*xs[:4], activation=activation), xs[4]), *arrays)
    assert {x.dtype.name for x in got.values()} == {dtype}
    near(got, expected(*arrays, activation=activation))


def test_sizes_of_any_kind():
    lhs, gate, up, _, d_out = arrays_of(k=33, n=37)
    run, random = jax.jit(lambda sizes: both(inputs_of(lhs, gate, up, sizes), d_out)), np.random.default_rng(3)
    for _ in range(12):
        sizes = random_sizes(random, BASE.rows, BASE.groups)
        with interpret_triton():
            got = jax.block_until_ready(run(jnp.asarray(sizes)))
        near(got, expected(lhs, gate, up, sizes, d_out), str(sizes))


@pytest.mark.parametrize("shape", [{"rows": 1, "sizes": (0, 0, 1, 0)}, {"rows": 0}, {"n": 0}, {"k": 0}, {"groups": 0}])
def test_small_and_empty_ones(shape: Any):
    arrays = arrays_of(**shape)
    near(interpreted(lambda *xs: both(inputs_of(*xs[:4]), xs[4]), *arrays), expected(*arrays))


@pytest.mark.parametrize("offset", [1, -1, 3, 2**31 - 1])
def test_matrices_of_some_groups(offset: int):
    lhs, gate, up, sizes, d_out = arrays_of(sizes=(9, 8, 13, 4))
    gate, up = gate[:2], up[:2]
    got = interpreted(
        lambda *xs: both(inputs_of(*xs[:3], sizes, offset=jnp.int32(offset)), xs[3]), lhs, gate, up, d_out
    )
    # The groups that have a matrix, and one without rows for each matrix that has no group; rows before are moved away.
    first = sum((9, 8, 13, 4)[: max(offset, 0)])
    of_matrices = [(9, 8, 13, 4)[i + offset] if 0 <= i + offset < 4 else 0 for i in range(2)]
    rolled = (jnp.roll(x, -first, axis=0) for x in (lhs, d_out))
    lhs, d_out = rolled
    want = expected(lhs, gate, up, np.asarray(of_matrices), d_out)
    near(got, want | {name: np.roll(want[name], first, axis=0) for name in ("out", "d_lhs")})


def test_rows_of_nobody_reach_nothing():
    lhs, gate, up, sizes, d_out = arrays_of(sizes=(5, 0, 20, 7))
    run = lambda lhs, d_out: interpreted(lambda *xs: both(inputs_of(xs[0], gate, up, sizes), xs[1]), lhs, d_out)
    want, got = run(lhs, d_out), run(lhs.at[32:].set(jnp.nan), d_out.at[32:].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(got["out"][32:])
    assert not np.any(got["d_lhs"][32:])


def test_recomputing_gives_the_same():
    arrays = arrays_of()
    recomputing = dataclasses.replace(BACKWARD, recompute=TILE)
    got, want = (
        interpreted(lambda *xs, each=each: both(inputs_of(*xs[:4]), xs[4], each), *arrays)
        for each in (recomputing, BACKWARD)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", ["gated", "glu"])
def test_pre_activations_are_written_for_gradients_alone(name: str):
    """By the kernels' stages: a call without gradients, and one from which gradients are to come."""
    arrays = arrays_of()[:4]
    kernel: Any = GatedGroupedMatmul()
    if name == "glu":
        arrays, kernel = (arrays[0], arrays[1][0], arrays[2][0]), Glu()
    inputs = kernel.prepare(*arrays)
    cfg, shape = Choice("triton", FORWARD), (1, BASE.rows, BASE.n)
    with interpret_triton(), recorded_launches() as launches:
        out = jax.block_until_ready(kernel.run(inputs, cfg=cfg))
        again, kept = jax.block_until_ready(kernel.forward_with_residuals(inputs, cfg=cfg))
    assert [[x.shape for x in each.outputs] for each in launches] == [[shape, (0,), (0,)], [shape] * 3]
    np.testing.assert_array_equal(again, out)
    np.testing.assert_allclose(jax.nn.silu(kept[0]) * kept[1], out, rtol=1e-5, atol=1e-6)


def test_vmap_over_any_operand():
    lhs, gate, up, _, d_out = arrays_of()
    sizes = jnp.asarray([random_sizes(np.random.default_rng(i), BASE.rows, BASE.groups) for i in range(2)])
    stacked = [jnp.stack([x, -2 * x]) for x in (lhs, gate, up)]
    for axes in ((0, None, None, 0), (None, 0, None, None), (None, None, None, 0), (0, 0, 0, 0)):
        pairs = zip(axes, (lhs, gate, up, sizes[0]), (*stacked, sizes), strict=True)
        given = [many if axis == 0 else one for axis, one, many in pairs]
        got = interpreted(jax.vmap(lambda *xs: both(inputs_of(*xs), d_out), axes), *given)
        for i in range(2):
            one = [x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)]
            near({name: x[i] for name, x in got.items()}, expected(*one, d_out), str(axes))


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_glu(leading: Any):
    x, gate, up, d_out = glu_arrays_of(leading=leading)
    backend = TritonGlu()

    def run(x: Any, gate: Any, up: Any, d_out: Any) -> dict[str, Any]:
        inputs = MatmulInputs(x, gate, "float32", up, activation="silu")
        out, *kept = backend.forward(inputs, FORWARD)
        gradients = backend.backward(inputs, kept, d_out, BACKWARD)
        return {"out": out} | of_arguments(gradients, "x")

    got = interpreted(run, x, gate, up, d_out)
    assert got["out"].shape == d_out.shape
    assert got["d_x"].shape == x.shape
    flat = {name: got[name].reshape(-1, got[name].shape[-1]) for name in ("out", "d_x")}
    near(got | flat, gate_oracle("silu", x.reshape(-1, x.shape[-1]), gate, up, d_out.reshape(-1, d_out.shape[-1])))


def test_glu_comes_behind_xla():
    x, gate, up, _ = glu_arrays_of()
    inputs = MatmulInputs(x, gate, "float32", up, activation="silu")
    assert TritonGlu().deprioritized(inputs, H100, "forward")
    assert not XlaGlu().deprioritized(inputs, H100, "forward")


def test_what_it_declines():
    def reasons(device: Device = A100, **dtypes: Any) -> str:
        inputs = inputs_of(*arrays_of()[:4]).structs
        changed = {name: jax.ShapeDtypeStruct(inputs.arrays[name].shape, dtype) for name, dtype in dtypes.items()}
        return "; ".join(BACKEND.not_supported_reasons(inputs.replace(**changed), device, "forward"))

    assert not reasons()
    assert "up must be one of" in reasons(up="float8_e4m3fn")
    assert "lhs must be one of" in reasons(lhs="float64", rhs="float64", up="float64")
    assert "all must have one dtype, got lhs float32, gate bfloat16, up float32" in reasons(rhs="bfloat16")
    assert "needs a CUDA GPU" in reasons(Device("cpu", "cpu"))
    rows, matrix = jax.ShapeDtypeStruct((4, 1 << 16), "bfloat16"), jax.ShapeDtypeStruct((1 << 16, 1 << 15), "float32")
    large = MatmulInputs(rows, matrix, "float32", matrix, activation="silu")  # type: ignore[arg-type]
    said = "; ".join(TritonGlu().not_supported_reasons(large, A100, "forward"))
    assert "counted by 32 bits" in said
    assert "all must have one dtype, got x bfloat16" in said


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("groups", [2, 64])
def test_params(dtype: str, groups: int):
    inputs = inputs_of(*arrays_of(rows=512, k=32, n=32, groups=groups, dtype=dtype)[:4])
    for direction in ("forward", "backward"):
        listed = list(BACKEND.candidates(inputs, A100, direction))
        assert len(listed) == len(set(listed)) > 1
        for params in listed:
            assert untagged(tagged(params)) == params
            assert BACKEND.footprints(inputs, A100, direction, params)
