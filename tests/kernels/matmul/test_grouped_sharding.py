"""The grouped matmul split over devices: by rows, k, n and matrices, and as ``shard_map`` hands out matrices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.matmul.test_grouped_op import all_of, expected, operands
from tilewright.modules import grouped_matmul

SPLITS: dict[str, tuple[P, P, P]] = {
    "rows": (P("x", None), P(), P("x", None)),
    "n": (P(), P(None, None, "x"), P(None, "x")),
    "k": (P(None, "x"), P(None, "x", None), P(None, None)),
    "k of lhs alone": (P(None, "x"), P(), P(None, None)),
    "matrices": (P(), P("x", None, None), P(None, None)),
    "rows and n": (P("x", None), P(None, None, "y"), P("x", "y")),
    "rows and matrices": (P("x", None), P("y", None, None), P("x", None)),
    "n and matrices": (P(), P("y", None, "x"), P(None, "x")),
    "rows by two axes": (P(("x", "y"), None), P(), P(("x", "y"), None)),
    "nothing": (P(), P(), P()),
    "rows, and matrices over their axis": (P("x", None), P("x", None, None), P("x", None)),
    "rows, and parameters over their axis": (P("x", None), P(None, "x", "y"), P("x", "y")),
}
"""For each split how lhs and rhs are split, and how the result is."""

SIZES = jnp.array([5, -3, 0, 14])
"""There are 24 rows: most devices have some of several groups, one has rows of nobody."""


def arrays_of(dtype: str = "float32") -> tuple[Any, ...]:
    lhs, rhs, _, d_out = operands(rows=24, k=16, n=8, dtype=dtype)
    return lhs, rhs, SIZES, d_out


def mesh_of(kind: AxisType = AxisType.Explicit) -> Any:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


def put(mesh: Any, arrays: Any, specs: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in SPLITS for kind in (AxisType.Explicit, AxisType.Auto)],
)
def test_split(name: str, kind: AxisType):
    arrays = arrays_of()
    of_lhs, of_rhs, of_out = SPLITS[name]
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = put(mesh, arrays, (of_lhs, of_rhs, P(), of_out))
        got = jax.jit(all_of)(*placed)
    for each, want in expected(*arrays).items():
        np.testing.assert_allclose(got[each], want, rtol=1e-5, atol=1e-5)
    if kind == AxisType.Explicit:
        specs = {each: jax.typeof(x).sharding.spec for each, x in got.items()}
        for each, spec in (("out", of_out), ("d_lhs", of_lhs), ("d_rhs", of_rhs)):
            assert tuple(specs[each])[: len(spec)] == tuple(spec)


def test_parts_of_k_are_summed_before_they_are_rounded():
    arrays = arrays_of("bfloat16")
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays[:2], SPLITS["k"], strict=False)
        ]
        got = jax.jit(grouped_matmul)(*placed, SIZES)
    assert got.dtype == jnp.bfloat16
    want = jnp.asarray(expected(*arrays)["out"], jnp.bfloat16)
    assert np.mean(np.asarray(got) == np.asarray(want)) > 0.98


@pytest.mark.parametrize(
    ("name", "dtype"), [("matrices", "bf16"), ("rows and matrices", "bf16"), ("n and matrices", "f32")]
)
def test_what_one_device_has_is_summed_as_it_is(name: str, dtype: str):
    """Of the gradient of a row the device with its matrix has everything, unless columns are split, too."""
    lhs, rhs, sizes, d_out = arrays_of("bfloat16")
    of_lhs, of_rhs, of_out = SPLITS[name]
    mesh = mesh_of()
    gradient = lambda lhs, rhs, sizes, d_out: jax.vjp(lambda x: grouped_matmul(x, rhs, sizes), lhs)[1](d_out)[0]
    with jax.set_mesh(mesh):
        placed = put(mesh, (lhs, rhs, sizes, d_out), (of_lhs, of_rhs, P(), of_out))
        lowered = jax.jit(gradient).lower(*placed)
        got = lowered.compile()(*placed)
    (found,) = re.findall(r"all_reduce.*?\}\) : \(tensor<[\dx]*x(\w+)>\)", lowered.as_text(), re.DOTALL)
    assert found == dtype
    mine, want = (np.asarray(x, np.float32) for x in (got, gradient(lhs, rhs, sizes, d_out)))
    np.testing.assert_allclose(mine, want, rtol=0.0, atol=0.0 if dtype == "bf16" else 2.0**-7 * np.abs(want).max())


def test_the_sharding_of_the_result():
    lhs, rhs, sizes, d_out = arrays_of()
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((lhs, rhs), SPLITS["k"], strict=False)
        ]
        for given in (P("x", None), NamedSharding(mesh, P("x", None))):
            got = jax.jit(lambda *xs, given=given: grouped_matmul(*xs, sizes, None, None, None, given))(*placed)
            assert jax.typeof(got).sharding.spec == P("x", None)
        weighted = lambda lhs, rhs: (grouped_matmul(lhs, rhs, sizes, out_sharding=P("x", None)) * d_out).sum()
        gradient = jax.jit(jax.grad(weighted))(*placed)
    np.testing.assert_allclose(gradient, expected(lhs, rhs, sizes, d_out)["d_lhs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("of_lhs", "of_rhs", "said"),
    [
        (P(None, "x"), P(None, "y", None), "k must be split alike"),
        (P(None, "x"), P(None, None, "x"), "must be split by different axes"),
    ],
)
def test_splits_that_would_need_more_communication(of_lhs: P, of_rhs: P, said: str):
    lhs, rhs, sizes, _ = arrays_of()
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        lhs, rhs = put(mesh, (lhs, rhs), (of_lhs, of_rhs))
        with pytest.raises(ValueError, match=f"grouped_matmul: .*{said}.*reshard"):
            jax.jit(grouped_matmul)(lhs, rhs, sizes)


def test_blocks_of_scales_are_not_cut():
    lhs, rhs, sizes, _ = operands(rows=8, k=256, n=8)
    scale, mesh = jnp.ones((8, 2)), mesh_of()
    with jax.set_mesh(mesh):
        (placed,) = put(mesh, (lhs,), (P(None, "x"),))
        got = jax.jit(lambda x: grouped_matmul(x, rhs, sizes, lhs_scale=2 * scale))(placed)
        placed = jax.device_put(lhs, NamedSharding(mesh, P(None, ("x", "y"))))
        with pytest.raises(
            ValueError, match="lhs_scale has a scale for 128 elements, so k=256 cannot be split among 4"
        ):
            jax.jit(lambda x: grouped_matmul(x, rhs, sizes, lhs_scale=scale))(placed)
    np.testing.assert_allclose(got, grouped_matmul(2 * lhs, rhs, sizes), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_matrices(check_vma: bool):
    """Each device takes the groups of its experts by ``group_offset``; their results are summed."""
    lhs, rhs, sizes, d_out = arrays_of()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def on_device(lhs: Any, rhs: Any) -> Any:
        first = lax.axis_index("x").astype(jnp.int32) * rhs.shape[0]
        return lax.psum(grouped_matmul(lhs, rhs, sizes, group_offset=first), "x")

    split = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=check_vma)
    out, pull_back = jax.vjp(jax.jit(split), lhs, rhs)
    d_lhs, d_rhs = pull_back(d_out)
    for each, got in (("out", out), ("d_lhs", d_lhs), ("d_rhs", d_rhs)):
        np.testing.assert_allclose(got, expected(lhs, rhs, sizes, d_out)[each], rtol=1e-5, atol=1e-5)
