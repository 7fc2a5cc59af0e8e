"""``matmul``: results and gradients in every layout and dtype, how it is split, and what it does not take."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.matmul.test_grouped_sharding import mesh_of, put
from tilewright.kernels.matmul.cases import MatmulCase
from tilewright.modules import matmul
from tilewright.ops.tuning.numerics import violations

BASE = MatmulCase("", rows=13, k=24, n=20)
CASES = {
    case.name: case
    for case in (
        dataclasses.replace(BASE, name="float32"),
        dataclasses.replace(BASE, name="bfloat16", dtype="bfloat16", leading=(2, 3)),
        dataclasses.replace(BASE, name="float16", dtype="float16", transpose_rhs=True),
        dataclasses.replace(BASE, name="transposed_lhs", transpose_lhs=True),
        dataclasses.replace(BASE, name="both_transposed", transpose_lhs=True, transpose_rhs=True, dtype="bfloat16"),
        dataclasses.replace(BASE, name="preferred", dtype="bfloat16", preferred_element_type="float32"),
        dataclasses.replace(BASE, name="two_dtypes", dtype="bfloat16", rhs_dtype="float32", transpose_rhs=True),
        dataclasses.replace(BASE, name="no_rows", rows=0),
        dataclasses.replace(BASE, name="no_k", k=0),
    )
}


def both(case: MatmulCase) -> tuple[Any, Any, dict[str, Any], Any]:
    (lhs, rhs), options = case.arguments()
    out = jax.eval_shape(lambda *xs: matmul(*xs, **options), lhs, rhs)
    d_out = jnp.asarray(np.random.default_rng(1).standard_normal(out.shape), out.dtype)
    return lhs, rhs, options, d_out


def all_of(lhs: Any, rhs: Any, d_out: Any, **options: Any) -> dict[str, Any]:
    out, pull_back = jax.vjp(lambda *xs: matmul(*xs, **options), lhs, rhs)
    return {"out": out, **dict(zip(("d_lhs", "d_rhs"), pull_back(d_out), strict=True))}


def expected(case: MatmulCase, lhs: Any, rhs: Any, d_out: Any) -> dict[str, Any]:
    lhs, rhs, d_out = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, d_out))
    left, right = lhs.T if case.transpose_lhs else lhs, rhs.T if case.transpose_rhs else rhs
    d_left = d_out @ right.T
    rows = math.prod(left.shape[:-1])
    d_right = left.reshape(rows, case.k).T @ d_out.reshape(rows, case.n)
    return {
        "out": left @ right,
        "d_lhs": d_left.T if case.transpose_lhs else d_left,
        "d_rhs": d_right.T if case.transpose_rhs else d_right,
    }


def check(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, exact in want.items():
        rounded = np.asarray(jnp.asarray(exact, got[name].dtype), np.float64)
        assert not violations(np.asarray(got[name]), exact, rounded), name


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str):
    case = CASES[name]
    lhs, rhs, options, d_out = both(case)
    got = jax.jit(lambda *xs: all_of(*xs, **options))(lhs, rhs, d_out)
    assert got["out"].dtype == jnp.dtype(case.preferred_element_type or case.rhs_dtype or case.dtype)
    check(got, expected(case, lhs, rhs, d_out))


def test_float64():
    with jax.enable_x64(True):
        lhs, rhs, d_out = (np.random.default_rng(i).standard_normal(s) for i, s in enumerate(((5, 7), (7, 4), (5, 4))))
        got = all_of(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(d_out))
        wide = matmul(jnp.asarray(lhs, jnp.float32), jnp.asarray(rhs, jnp.float32), preferred_element_type=jnp.float64)
    for name, want in {"out": lhs @ rhs, "d_lhs": d_out @ rhs.T, "d_rhs": lhs.T @ d_out}.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-12, atol=1e-12)
    exact = np.float32(lhs).astype(np.float64) @ np.float32(rhs).astype(np.float64)
    np.testing.assert_allclose(wide, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("specs", "transposed"),
    [
        ((P("x", None), P(), P("x", None)), False),
        ((P(None, "x"), P("x", None), P(None, None)), False),
        ((P("x", None), P(None, "y"), P("x", "y")), False),
        ((P("x", "y"), P("y", None), P("x", None)), False),
        ((P("x", "y"), P(None, "x"), P("y", None)), True),
    ],
)
def test_split(specs: Any, transposed: bool):
    case = dataclasses.replace(BASE, rows=16, transpose_lhs=transposed, transpose_rhs=transposed)
    lhs, rhs, options, d_out = both(case)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *xs: all_of(*xs, **options))(*put(mesh, (lhs, rhs, d_out), specs))
    check(got, expected(case, lhs, rhs, d_out))
    assert tuple(jax.typeof(got["out"]).sharding.spec)[:2] == tuple(specs[2])


def test_parts_of_k_are_summed_before_they_are_rounded():
    case = dataclasses.replace(BASE, dtype="bfloat16", k=64)
    lhs, rhs, _, d_out = both(case)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        got = jax.jit(matmul)(*put(mesh, (lhs, rhs), (P(None, ("x", "y")), P(("x", "y"), None))))
    assert got.dtype == jnp.bfloat16
    want = jnp.asarray(expected(case, lhs, rhs, d_out)["out"], jnp.bfloat16)
    assert np.mean(np.asarray(got) == np.asarray(want)) > 0.98


def test_vmap_and_forward_mode():
    lhs, rhs, _, _ = both(BASE)
    stack = jnp.stack([rhs, 2 * rhs])
    np.testing.assert_allclose(jax.vmap(matmul, (None, 0))(lhs, stack)[1], 2 * (lhs @ rhs), rtol=1e-5, atol=1e-5)
    _, along = jax.jvp(matmul, (lhs, rhs), (2 * lhs, rhs))
    np.testing.assert_allclose(along, 3 * (lhs @ rhs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "lhs", "options"),
    [
        (r"lhs must be a floating-point array \[\.\.\., k\]", jnp.float32(1.0), {}),
        (r"lhs must be a floating-point array \[k, m\]", jnp.ones((2, 24, 13)), {"transpose_lhs": True}),
        (r"axis 1 of lhs and axis 0 of rhs must be equal", jnp.ones((3, 25)), {}),
        (r"axis 1 of lhs and axis 1 of rhs", jnp.ones((3, 24)), {"transpose_rhs": True}),
        (r"preferred_element_type must be floating-point", jnp.ones((3, 24)), {"preferred_element_type": "int32"}),
    ],
)
def test_what_it_does_not_take(said: str, lhs: Any, options: Any):
    with pytest.raises(ValueError, match=said):
        matmul(lhs, jnp.ones((24, 20)), **options)
