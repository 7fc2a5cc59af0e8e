"""The gated ops: results and gradients, residuals, and how they are split and refused."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.kernels.matmul.gates import near
from tests.kernels.matmul.grouped_conformance import GATED, GLU, cotangent_of, inputs_of
from tests.kernels.matmul.grouped_oracle import oracle
from tests.kernels.matmul.test_grouped_sharding import mesh_of, put
from tilewright.kernels.matmul.cases import ProductCase
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.xla.params import XlaBlockParams, XlaGatedBackwardParams, XlaGluBackwardParams
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import gated_grouped_matmul, glu, grouped_matmul
from tilewright.ops.utils.serialize import tagged, untagged

CASES = {"grouped": GATED, "glu": GLU}
RECOMPUTING = {
    "grouped": PerDirection(backward=Choice("xla", XlaGatedBackwardParams(8, recompute=True))),
    "glu": PerDirection(backward=Choice("xla", XlaGluBackwardParams(recompute=True))),
}


def arrays_of(case: ProductCase = GATED, **fields: Any) -> tuple[Any, ...]:
    """The arguments of a call, and cotangents of its result."""
    case = dataclasses.replace(case, **fields)
    return *case.arguments()[0], cotangent_of(inputs_of(case))


glu_arrays_of = functools.partial(arrays_of, GLU)


def all_of(rows: Any, gate: Any, up: Any, *rest: Any, **options: Any) -> dict[str, Any]:
    """Results and gradients of a call of either op, of which the grouped one has sizes before the cotangents."""
    *sizes, d_out = rest
    op: Any = gated_grouped_matmul if sizes else glu
    out, pull_back = jax.vjp(lambda *xs: op(*xs, *sizes, **options), rows, gate, up)
    return {"out": out, **dict(zip(("d_lhs", "d_gate", "d_up"), pull_back(d_out), strict=True))}


def expected(
    rows: Any, gate: Any, up: Any, *rest: Any, activation: str = "silu", transpose_rhs: bool = False
) -> dict[str, Any]:
    """The same by the definition, in float64."""
    *sizes, d_out = rest
    inputs = MatmulInputs(
        rows, gate, "float32", up, sizes[0] if sizes else None, activation=activation, transpose_rhs=transpose_rhs
    )
    found = oracle(inputs, d_out)
    return found | {"d_gate": found.pop("d_rhs")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, dtype: str):
    """By the functions; each activation is among the cases of the backends."""
    fields: dict[str, Any] = {"sizes": (5, 0, 20, 7)} if name == "grouped" else {"leading": (2, 3)}
    arrays = arrays_of(CASES[name], dtype=dtype, **fields)
    for cfg in (None, RECOMPUTING[name]):
        got = jax.jit(functools.partial(all_of, activation="gelu", cfg=cfg))(*arrays)
        assert {x.dtype.name for x in got.values()} == {dtype}
        near(got, expected(*arrays, activation="gelu"))


@pytest.mark.parametrize("activation", ["sigmoid", "tanh"])
@pytest.mark.parametrize("name", CASES)
def test_transposed_matrices_have_transposed_gradients(name: str, activation: str):
    fields: dict[str, Any] = {"sizes": (5, 0, 20, 7)} if name == "grouped" else {"leading": (2, 3)}
    arrays = arrays_of(CASES[name], transpose_rhs=True, **fields)
    for cfg in (None, RECOMPUTING[name]):
        got = jax.jit(functools.partial(all_of, activation=activation, transpose_rhs=True, cfg=cfg))(*arrays)
        assert got["d_gate"].shape == arrays[1].shape
        near(got, expected(*arrays, activation=activation, transpose_rhs=True))
    plain = (arrays[0], *(x.swapaxes(-1, -2) for x in arrays[1:3]), *arrays[3:])
    near(all_of(*plain, activation=activation), expected(*plain, activation=activation))


def test_it_is_two_grouped_matmuls():
    lhs, gate, up, sizes, _ = arrays_of()
    want = jax.nn.gelu(grouped_matmul(lhs, gate, sizes)) * grouped_matmul(lhs, up, sizes)
    np.testing.assert_allclose(
        gated_grouped_matmul(lhs, gate, up, sizes, activation="gelu_tanh"), want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("name", "share"), [("grouped", 0.4), ("glu", 0.6)])
def test_recomputing_keeps_no_pre_activations(name: str, share: float):
    """Of eight layers each would keep two arrays of 4 MB."""
    fields = {"rows": 2048, "k": 8, "n": 512} | ({"groups": 2} if name == "grouped" else {})
    x, *rest, _ = arrays_of(CASES[name], **fields)

    def temporary_bytes(cfg: Any) -> int:
        def loss(x: Any, *rest: Any) -> Any:
            if name == "grouped":
                return jax.lax.scan(lambda x, _: (gated_grouped_matmul(x, *rest, cfg=cfg)[:, :8], None), x, length=8)[
                    0
                ].sum()
            for _ in range(8):  # not lax.scan: in one computation XLA would find what is computed twice
                x = glu(x, *rest, cfg=cfg)[:, :8]
            return x.sum()

        wanted = (0, 1, 2) if name == "grouped" else 0
        compiled = jax.jit(jax.grad(loss, wanted)).lower(x, *rest).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary_bytes(RECOMPUTING[name]) < share * temporary_bytes(None)


@pytest.mark.parametrize(
    ("name", "of_rows", "of_matrices", "of_out"),
    [
        ("grouped", P("x", None), P(), P("x", None)),
        ("grouped", P(), P(None, None, "x"), P(None, "x")),
        ("grouped", P(), P("x", None, None), P(None, None)),
        ("grouped", P("x", None), P("y", None, None), P("x", None)),
        ("glu", P("x", None), P(), P("x", None)),
        ("glu", P(), P(None, "x"), P(None, "x")),
        ("glu", P("x", None), P(None, "y"), P("x", "y")),
    ],
)
def test_split(name: str, of_rows: P, of_matrices: P, of_out: P):
    arrays = arrays_of(CASES[name], rows=24, k=16)
    if name == "grouped":
        arrays = (*arrays[:3], jnp.array([5, -3, 0, 14]), arrays[4])
    mesh = mesh_of()
    of_sizes = [P()] if name == "grouped" else []
    with jax.set_mesh(mesh):
        got = jax.jit(all_of)(*put(mesh, arrays, (of_rows, of_matrices, of_matrices, *of_sizes, of_out)))
    near(got, expected(*arrays))
    assert tuple(jax.typeof(got["out"]).sharding.spec)[:2] == tuple(of_out)


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("gated_grouped_matmul", (P(), P(None, "x", None), P(None, "x", None))),
        ("gated_grouped_matmul", (P(), P("x", None, None), P())),
        ("glu", (P(None, "x"), P("x", None), P("x", None))),
    ],
)
def test_splits_that_they_do_not_take(name: str, specs: Any):
    (*arrays, _), op = (arrays_of(rows=24, k=16), gated_grouped_matmul) if "grouped" in name else (glu_arrays_of(), glu)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        placed = put(mesh, arrays[:3], specs)
        with pytest.raises(ValueError, match=f"{name}: gate and up must be split alike, and k be whole"):
            jax.jit(op)(*placed, *arrays[3:])


@pytest.mark.parametrize(
    ("op", "said", "change"),
    [
        (gated_grouped_matmul, r"activation='swish' must be one of 'silu', 'gelu'", {"activation": "swish"}),
        (gated_grouped_matmul, r"gate and up must have the same shape", {"up": jnp.ones((4, 24, 21))}),
        (gated_grouped_matmul, r"gate must have a matrix for each of 4 groups", {"gate": jnp.ones((3, 24, 20))}),
        (gated_grouped_matmul, r"lhs has k=24, and axis 1 of gate", {"gate": jnp.ones((4, 23, 20))}),
        (gated_grouped_matmul, r"must not be negative, got \[1, 2, -3, 4\]", {"group_sizes": [1, 2, -3, 4]}),
        (glu, r"x must be a floating-point array \[\.\.\., k\]", {"x": jnp.ones((3, 24), jnp.int32)}),
        (glu, r"gate must be a floating-point array \[k, n\] with k=23", {"x": jnp.ones((3, 23))}),
        (glu, r"up must be a floating-point array", {"up": jnp.ones((24, 21))}),
        (glu, r"activation='gelu_new' must be one of", {"activation": "gelu_new"}),
        (glu, r"gate must be .* \[n, k\], as transpose_rhs=True says, with k=24", {"transpose_rhs": True}),
        (glu, r"up must be a floating-point array \[k, n\]", {"up": jnp.ones((1, 24, 20))}),
        (gated_grouped_matmul, r"lhs has k=24, and axis 2 of gate", {"transpose_rhs": True}),
    ],
)
def test_what_they_do_not_take(op: Any, said: str, change: Any):
    names, arrays = (
        (("x", "gate", "up"), glu_arrays_of()) if op is glu else (("lhs", "gate", "up", "group_sizes"), arrays_of())
    )
    with pytest.raises(ValueError, match=said):
        op(**dict(zip(names, arrays, strict=False)) | change)


def test_params():
    for params in (
        XlaBlockParams(16),
        XlaGatedBackwardParams(32, recompute=True),
        XlaGluBackwardParams(recompute=True),
    ):
        assert untagged(tagged(params)) == params
    with pytest.raises(TypeError, match=r"needs a bool, got self\.recompute=1"):
        XlaGatedBackwardParams(8, recompute=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a bool"):
        XlaGluBackwardParams(recompute=0)  # type: ignore[arg-type]


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
