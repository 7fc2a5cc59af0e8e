"""The gated grouped matmul: results and gradients, rows of nobody, residuals, and how it is split and refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.kernels.matmul.gates import gate_oracle, near
from tests.kernels.matmul.grouped_conformance import random_sizes
from tests.kernels.matmul.grouped_oracle import segments
from tests.kernels.matmul.test_grouped_sharding import mesh_of, put
from tilewright.kernels.matmul.cases import GatedGroupedMatmulCase
from tilewright.kernels.matmul.xla.params import XlaBlockParams, XlaGatedBackwardParams
from tilewright.kernels.numerics.activations import ACTIVATIONS
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import gated_grouped_matmul, grouped_matmul
from tilewright.ops.utils.serialize import tagged, untagged

BASE = GatedGroupedMatmulCase("", rows=37, k=24, n=20, groups=4)
RECOMPUTING = PerDirection(backward=Choice("xla", XlaGatedBackwardParams(8, recompute=True)))


def arrays_of(**fields: Any) -> tuple[Any, ...]:
    case = dataclasses.replace(BASE, **fields)
    arrays, _ = case.arguments()
    d_out = np.random.default_rng(1).standard_normal((case.rows, case.n))
    return *arrays, jnp.asarray(d_out, case.dtype)


def all_of(lhs: Any, gate: Any, up: Any, sizes: Any, d_out: Any, **options: Any) -> dict[str, Any]:
    out, pull_back = jax.vjp(lambda *xs: gated_grouped_matmul(*xs, sizes, **options), lhs, gate, up)
    return {"out": out, **dict(zip(("d_lhs", "d_gate", "d_up"), pull_back(d_out), strict=True))}


def expected(lhs: Any, gate: Any, up: Any, sizes: Any, d_out: Any, activation: str = "silu") -> dict[str, Any]:
    """Each group by the definition of one gated linear unit, in float64."""
    lhs, gate, up, d_out = (np.asarray(x).astype(np.float64) for x in (lhs, gate, up, d_out))
    found = {"out": np.zeros(d_out.shape), "d_lhs": np.zeros_like(lhs)}
    found |= {"d_gate": np.zeros_like(gate), "d_up": np.zeros_like(up)}
    for matrix, rows in segments(sizes, lhs.shape[0], gate.shape[0]):
        one = gate_oracle(activation, lhs[rows], gate[matrix], up[matrix], d_out[rows])
        found["out"][rows], found["d_lhs"][rows] = one["out"], one["d_x"]
        found["d_gate"][matrix], found["d_up"][matrix] = one["d_gate"], one["d_up"]
    return found


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(name, dtype) for name in ACTIVATIONS for dtype in ("float32", "bfloat16", "float16")],
)
def test_results_and_gradients(activation: Any, dtype: str):
    arrays = arrays_of(dtype=dtype, sizes=(5, 0, 20, 7))
    got = jax.jit(lambda *xs: all_of(*xs, activation=activation))(*arrays)
    assert {x.dtype.name for x in got.values()} == {dtype}
    near(got, expected(*arrays, activation=activation))


def test_sizes_of_any_kind():
    lhs, gate, up, _, d_out = arrays_of()
    run, random = jax.jit(all_of), np.random.default_rng(3)
    for _ in range(12):
        sizes = random_sizes(random, BASE.rows, BASE.groups)
        near(run(lhs, gate, up, jnp.asarray(sizes), d_out), expected(lhs, gate, up, sizes, d_out), str(sizes))


@pytest.mark.parametrize("shape", [{"rows": 1, "sizes": (0, 0, 1, 0)}, {"rows": 0}, {"n": 0}, {"k": 0}, {"groups": 0}])
def test_small_and_empty_ones(shape: Any):
    arrays = arrays_of(**shape)
    near(all_of(*arrays), expected(*arrays))


def test_rows_of_nobody_reach_nothing():
    lhs, gate, up, sizes, d_out = arrays_of(sizes=(5, 0, 20, 7))
    want = jax.jit(all_of)(lhs, gate, up, sizes, d_out)
    got = jax.jit(all_of)(lhs.at[32:].set(jnp.nan), gate, up, sizes, d_out.at[32:].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(got["out"][32:])
    assert not np.any(got["d_lhs"][32:])


def test_it_is_two_grouped_matmuls():
    lhs, gate, up, sizes, _ = arrays_of()
    want = jax.nn.gelu(grouped_matmul(lhs, gate, sizes)) * grouped_matmul(lhs, up, sizes)
    np.testing.assert_allclose(
        gated_grouped_matmul(lhs, gate, up, sizes, activation="gelu_tanh"), want, rtol=1e-5, atol=1e-5
    )


def test_recomputing_gives_the_same():
    arrays = arrays_of()
    got, want = (jax.jit(lambda *xs, cfg=cfg: all_of(*xs, cfg=cfg))(*arrays) for cfg in (RECOMPUTING, None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


def test_recomputing_keeps_no_pre_activations():
    """Of eight layers each would keep two arrays of 4 MB."""
    case = GatedGroupedMatmulCase("", rows=2048, k=8, n=512, groups=2)
    (lhs, gate, up, sizes), _ = case.arguments()

    def temporary_bytes(cfg: Any) -> int:
        def loss(lhs: Any, gate: Any, up: Any) -> Any:
            layer = lambda x, _: (gated_grouped_matmul(x, gate, up, sizes, cfg=cfg)[:, :8], None)
            return jax.lax.scan(layer, lhs, length=8)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(lhs, gate, up).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary_bytes(RECOMPUTING) < 0.4 * temporary_bytes(None)


@pytest.mark.parametrize(
    ("of_lhs", "of_matrices"),
    [(P("x", None), P()), (P(), P(None, None, "x")), (P(), P("x", None, None)), (P("x", None), P("y", None, None))],
)
def test_split(of_lhs: P, of_matrices: P):
    lhs, gate, up, _, d_out = arrays_of(rows=24, k=16)
    sizes = jnp.array([5, -3, 0, 14])
    mesh = mesh_of()
    of_out = P(of_lhs[0] if of_lhs else None, of_matrices[2] if of_matrices else None)
    with jax.set_mesh(mesh):
        placed = put(mesh, (lhs, gate, up, sizes, d_out), (of_lhs, of_matrices, of_matrices, P(), of_out))
        got = jax.jit(all_of)(*placed)
    near(got, expected(lhs, gate, up, sizes, d_out))
    assert tuple(jax.typeof(got["out"]).sharding.spec)[:2] == tuple(of_out)


@pytest.mark.parametrize("specs", [(P(), P(None, "x", None), P(None, "x", None)), (P(), P("x", None, None), P())])
def test_splits_that_it_does_not_take(specs: Any):
    lhs, gate, up, sizes, _ = arrays_of(rows=24, k=16)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        placed = put(mesh, (lhs, gate, up), specs)
        with pytest.raises(ValueError, match="gated_grouped_matmul: gate and up must be split alike, and k be whole"):
            jax.jit(gated_grouped_matmul)(*placed, sizes)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (r"activation='swish' must be one of 'silu', 'gelu'", {"activation": "swish"}),
        (r"gate and up must have the same shape", {"up": jnp.ones((4, 24, 21))}),
        (r"gate must have a matrix for each of 4 groups", {"gate": jnp.ones((3, 24, 20))}),
        (r"lhs has k=24, and axis 1 of gate", {"gate": jnp.ones((4, 23, 20))}),
        (r"must not be negative, got \[1, 2, -3, 4\]", {"group_sizes": [1, 2, -3, 4]}),
    ],
)
def test_what_it_does_not_take(said: str, change: Any):
    given = dict(zip(("lhs", "gate", "up", "group_sizes"), arrays_of(), strict=False))
    with pytest.raises(ValueError, match=said):
        gated_grouped_matmul(**given | change)


def test_params():
    for params in (XlaBlockParams(16), XlaGatedBackwardParams(32, recompute=True)):
        assert untagged(tagged(params)) == params
    with pytest.raises(TypeError, match=r"needs a bool, got self\.recompute=1"):
        XlaGatedBackwardParams(8, recompute=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_matrices(check_vma: bool):
    """Each device takes the groups of its experts by ``group_offset``, and gives zeros for the rows of others."""
    arrays = arrays_of(sizes=(5, 0, 20, 7))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def on_device(lhs: Any, gate: Any, up: Any, sizes: Any) -> Any:
        first = jax.lax.axis_index("x") * gate.shape[0]
        return jax.lax.psum(gated_grouped_matmul(lhs, gate, up, sizes, group_offset=first), "x")

    specs = (P(), P("x"), P("x"), P())
    split = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    out, pull_back = jax.vjp(lambda *xs: jax.jit(split)(*xs, arrays[3]), *arrays[:3])
    near({"out": out} | dict(zip(("d_lhs", "d_gate", "d_up"), pull_back(arrays[4]), strict=True)), expected(*arrays))


def test_fewer_matrices_than_groups_need_an_offset():
    lhs, gate, up, sizes, _ = arrays_of()
    with pytest.raises(ValueError, match="gated_grouped_matmul: gate must have a matrix for each of 4 groups"):
        gated_grouped_matmul(lhs, gate[:2], up[:2], sizes)
    with pytest.raises(TypeError, match="gated_grouped_matmul: group_offset must be an integer"):
        gated_grouped_matmul(lhs, gate[:2], up[:2], sizes, group_offset=1.0)
