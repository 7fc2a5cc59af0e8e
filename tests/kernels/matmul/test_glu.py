"""``glu``: results and gradients for every activation, residuals, how it is split, and what it does not take."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.matmul.gates import gate_oracle, near
from tests.kernels.matmul.test_grouped_sharding import mesh_of, put
from tilewright.kernels.matmul.cases import GluCase
from tilewright.kernels.matmul.xla.params import XlaGluBackwardParams
from tilewright.kernels.numerics.activations import ACTIVATIONS
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import glu
from tilewright.ops.utils.serialize import tagged, untagged

BASE = GluCase("", rows=13, k=24, n=20)
RECOMPUTING = PerDirection(backward=Choice("xla", XlaGluBackwardParams(recompute=True)))


def arrays_of(**fields: Any) -> tuple[Any, ...]:
    case = dataclasses.replace(BASE, **fields)
    arrays, _ = case.arguments()
    d_out = np.random.default_rng(1).standard_normal((*case.leading, case.rows, case.n))
    return *arrays, jnp.asarray(d_out, case.dtype)


def all_of(x: Any, gate: Any, up: Any, d_out: Any, **options: Any) -> dict[str, Any]:
    out, pull_back = jax.vjp(lambda *xs: glu(*xs, **options), x, gate, up)
    return {"out": out, **dict(zip(("d_x", "d_gate", "d_up"), pull_back(d_out), strict=True))}


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(name, dtype) for name in ACTIVATIONS for dtype in ("float32", "bfloat16", "float16")],
)
def test_results_and_gradients(activation: Any, dtype: str):
    arrays = arrays_of(dtype=dtype)
    got = jax.jit(lambda *xs: all_of(*xs, activation=activation))(*arrays)
    assert {x.dtype.name for x in got.values()} == {dtype}
    near(got, gate_oracle(activation, *arrays))


def test_leading_dimensions_and_recomputing():
    x, gate, up, d_out = arrays_of(leading=(2, 3))
    want = gate_oracle("silu", x.reshape(-1, 24), gate, up, d_out.reshape(-1, 20))
    for cfg in (None, RECOMPUTING):
        got = jax.jit(lambda *xs, cfg=cfg: all_of(*xs, cfg=cfg))(x, gate, up, d_out)
        assert got["out"].shape == (2, 3, 13, 20)
        near(got | {name: got[name].reshape(-1, got[name].shape[-1]) for name in ("out", "d_x")}, want)


def test_recomputing_keeps_no_pre_activations():
    x, gate, up, _ = arrays_of(rows=2048, k=8, n=512)

    def temporary_bytes(cfg: Any) -> int:
        def loss(x: Any) -> Any:
            for _ in range(8):  # not lax.scan: in one computation XLA would find what is computed twice
                x = glu(x, gate, up, cfg=cfg)[:, :8]
            return x.sum()

        compiled = jax.jit(jax.grad(loss)).lower(x).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary_bytes(RECOMPUTING) < 0.6 * temporary_bytes(None)


@pytest.mark.parametrize(
    ("of_x", "of_matrices", "of_out"),
    [(P("x", None), P(), P("x", None)), (P(), P(None, "x"), P(None, "x")), (P("x", None), P(None, "y"), P("x", "y"))],
)
def test_split(of_x: P, of_matrices: P, of_out: P):
    arrays = arrays_of(rows=16)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        got = jax.jit(all_of)(*put(mesh, arrays, (of_x, of_matrices, of_matrices, of_out)))
    near(got, gate_oracle("silu", *arrays))
    assert tuple(jax.typeof(got["out"]).sharding.spec)[:2] == tuple(of_out)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (r"x must be a floating-point array \[\.\.\., k\]", {"x": jnp.ones((3, 24), jnp.int32)}),
        (r"gate must be a floating-point array \[k, n\] with k=23", {"x": jnp.ones((3, 23))}),
        (r"up must be a floating-point array", {"up": jnp.ones((24, 21))}),
        (r"activation='gelu_new' must be one of", {"activation": "gelu_new"}),
    ],
)
def test_what_it_does_not_take(said: str, change: Any):
    given = dict(zip(("x", "gate", "up"), arrays_of(), strict=False))
    with pytest.raises(ValueError, match=said):
        glu(**given | change)


def test_k_must_be_whole():
    x, gate, up, _ = arrays_of()
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        placed = put(mesh, (x, gate, up), (P(None, "x"), P("x", None), P("x", None)))
        with pytest.raises(ValueError, match="glu: gate and up must be split alike, and k be whole"):
            jax.jit(glu)(*placed)


def test_params():
    params = XlaGluBackwardParams(recompute=True)
    assert untagged(tagged(params)) == params
    with pytest.raises(TypeError, match="needs a bool"):
        XlaGluBackwardParams(recompute=0)  # type: ignore[arg-type]
