"""The op: what it takes and gives, beside Equinox's and Flax's, and how it is differentiated, mapped and split."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.support.draws import draw
from tilewright.modules import YarnScaling, rope

X = draw(2, 6, 3, 16)
POSITIONS = jnp.array([[0, 1, 2, 0, 1, 2], [7, 5, 5, 300, -4, 0]])
YARN = YarnScaling(8.0, 64)


def test_what_equinox_and_flax_compute():
    positions = jnp.arange(6)
    heads_outside = jax.vmap(jax.vmap(eqx.nn.RotaryPositionalEmbedding(16), 1, 1))
    np.testing.assert_allclose(rope(X, positions), heads_outside(X), atol=1e-5)
    theirs = nnx.RoPE(theta=500.0)(X.swapaxes(1, 2), POSITIONS[1]).swapaxes(1, 2)
    np.testing.assert_allclose(rope(X, POSITIONS[1], base=500.0), theirs, atol=1e-4)


def test_interleaved_is_halves_of_other_lanes():
    lanes = np.arange(16).reshape(8, 2).T.ravel()
    halves = rope(X[..., lanes], POSITIONS, scaling=YARN)
    np.testing.assert_allclose(rope(X, POSITIONS, scaling=YARN, interleaved=True)[..., lanes], halves, atol=1e-6)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_positions_of_any_integers(kind: Any):
    np.testing.assert_array_equal(rope(X, np.arange(6, dtype=kind)), rope(X, jnp.arange(6)))


def test_positions_broadcast():
    shared = jnp.broadcast_to(POSITIONS[1], (2, 6))
    for positions in (POSITIONS[1], POSITIONS[1:], POSITIONS[1].tolist(), shared):
        np.testing.assert_array_equal(rope(X, positions), rope(X, shared))
    np.testing.assert_array_equal(rope(X[0, 4], POSITIONS[1, 4]), rope(X, shared)[0, 4])
    np.testing.assert_array_equal(rope(X[None], POSITIONS)[0], rope(X, POSITIONS))


@pytest.mark.parametrize("position", [-1000, 65536, 2**24 + 2, 2**31 - 128])
def test_angles_are_rounded_to_float32(position: int):
    x = jnp.array([[[1.0, 0.0]]])
    angle = np.float32(position)  # of the frequency 1
    np.testing.assert_allclose(rope(x, [position])[0, 0], [np.cos(np.float64(angle)), np.sin(angle)], atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"fraction": 0.5}, {"base": 100.0}])
def test_inverse_undoes_it(options: dict[str, Any]):
    for scaling in (None, YARN):
        there = rope(X, POSITIONS, scaling=scaling, **options)
        np.testing.assert_allclose(rope(there, POSITIONS, scaling=scaling, inverse=True, **options), X, atol=1e-5)


def test_scores_depend_on_distance_alone():
    rows = [rope(jnp.broadcast_to(x, (40, 1, 16)), jnp.arange(40))[:, 0] for x in (X[0, 0, 0], X[1, 0, 0])]
    scores = rows[0] @ rows[1].T
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)


def test_what_does_not_turn_stays_bit_for_bit():
    x = X.astype(jnp.bfloat16)
    got = rope(x, POSITIONS, fraction=0.25, scaling=YARN)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(got[..., :4], rope(x[..., :4], POSITIONS, scaling=YARN))


def loss(x: Any, positions: Any) -> Any:
    return jnp.sum(rope(x, positions, scaling=YARN, interleaved=True) ** 3)


def test_mapped_over_rows_or_positions():
    grads = jax.vmap(jax.grad(loss))(X, POSITIONS)
    np.testing.assert_allclose(grads, jax.grad(loss)(X, POSITIONS), rtol=1e-5, atol=1e-5)
    shared = jax.grad(lambda x: jax.vmap(loss, (None, 0))(x, POSITIONS).sum())(X[0])
    np.testing.assert_allclose(shared, sum(jax.grad(loss)(X[0], each) for each in POSITIONS), rtol=1e-5, atol=1e-4)


SPLIT = {
    "rows": (P("a"), P()),
    "rows, and positions": (P("a"), P("a")),
    "tokens": (P(None, "a"), P(None, "a")),
    "heads": (P(None, None, "b"), P()),
    "rows and heads": (P("a", None, "b"), P("a")),
}


@pytest.mark.parametrize("what", SPLIT)
def test_split_over_explicit_axes(what: str):
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4])
    x = X[:, :, jnp.array([0, 1, 2, 0])]
    wanted = jax.grad(loss)(x, POSITIONS)
    with jax.set_mesh(mesh):
        specs = zip((x, POSITIONS), SPLIT[what], strict=True)
        placed = [jax.device_put(each, jax.NamedSharding(mesh, spec)) for each, spec in specs]
        got = jax.jit(jax.grad(loss))(*placed)
    assert jax.typeof(got).sharding.spec == jax.typeof(placed[0]).sharding.spec
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_split_head_is_refused():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="x must be split by its first 3 dimensions alone"):
        jax.jit(rope)(jax.device_put(X, jax.NamedSharding(mesh, P(None, None, None, "a"))), POSITIONS)


def test_a_scan_keeps_nothing_for_the_backward_pass():
    """Neither the argument nor the result is stacked: the gradient needs the positions alone."""

    def layers(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (rope(2.0 * x, POSITIONS), None), x, None, length=5)[0]

    text = str(jax.make_jaxpr(jax.grad(lambda x: layers(x).sum()))(X))
    assert text.count("rope.forward") == text.count("rope.backward") == 1
    assert "f32[2,6,3,16]" in text
    assert "f32[5,2,6,3,16]" not in text


@pytest.mark.parametrize(
    ("error", "said", "arguments", "options"),
    [
        (ValueError, "x must be a floating-point array", (X[0, 0, 0], 0), {}),
        (ValueError, "x must be a floating-point array", (jnp.ones((3, 2, 4), int), 0), {}),
        (TypeError, "positions must hold integers, got positions.dtype=dtype", (X, jnp.arange(6.0)), {}),
        (ValueError, r"broadcast to x.shape\[:-2\]=\(2, 6\).*got positions.shape=\(5,\)", (X, jnp.arange(5)), {}),
        (ValueError, r"x without heads is x\[..., None, :\]", (X[:, :, 0], POSITIONS), {}),
        (ValueError, "an even number of elements to rotate, 2 at least, and fraction=1.0 of 15", (X[..., 1:], 0), {}),
        (ValueError, "fraction=0.2 of 16 are 3", (X, 0), {"fraction": 0.2}),
        (ValueError, "fraction=1.5 of 16", (X, 0), {"fraction": 1.5}),
        (ValueError, "base must be greater than 1", (X, 0), {"base": 1.0}),
        (TypeError, "scaling must be a RopeScaling", (X, 0), {"scaling": YarnScaling}),
        (TypeError, "interleaved must be True or False", (X, 0), {"interleaved": 1}),
    ],
)
def test_what_it_does_not_take(error: type[Exception], said: str, arguments: Any, options: Any):
    with pytest.raises(error, match=said):
        rope(*arguments, **options)
