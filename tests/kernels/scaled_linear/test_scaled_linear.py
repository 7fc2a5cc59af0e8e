"""``scaled_linear`` against float64 products of codes from NumPy, its error against float64, and training with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.quantize import literal
from tilewright.modules import Recipe, quantize, scaled_linear

RECIPES = {
    "tensor": Recipe(),
    "row": Recipe("row"),
    "block": Recipe("block"),
    "block of powers of two": Recipe("block", power_of_two=True),
    "int8": Recipe("row", "int8"),
}
ROUNDING = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "int8": 0.0}
"""The greatest relative error of a code that is a normal number; int8 has an absolute one alone."""

STEP = {"e4m3": 2.0**-10, "e5m2": 2.0**-17, "int8": 0.5}
"""The greatest error of a small code, in units of the scale."""


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(x, recipe, format, axis, weight=False):
    """What codes along an axis stand for in float64, and the greatest error of each: by the literal definition."""
    if recipe.scaling == "tensor":
        extents = [None, None]
    elif recipe.scaling == "row":
        extents = [1, None] if axis == 1 else [None, 1]
    else:
        extents = [128, 128] if weight else [1, 128] if axis == 1 else [128, 1]
    codes, scales = literal.quantized(x, format, extents, recipe.power_of_two)
    for along, each in enumerate(extents):
        scales = np.repeat(scales, each or x.shape[along], along).take(range(x.shape[along]), along)
    scales = scales.astype(np.float64)
    return codes.astype(np.float64) * scales, np.maximum(ROUNDING[format] * np.abs(x), STEP[format] * scales)


def exact(x, w, d, recipe):
    """Result and gradients in float64 of the rounded numbers; and bounds of what the rounding changes."""
    first, second = recipe.format, recipe.of_gradients
    pairs = {
        "out": (numbers(x, recipe, first, 1), numbers(w, recipe, first, 0, True), x, w),
        "d_x": (numbers(d, recipe, second, 1), [a.T for a in numbers(w, recipe, first, 1, True)], d, w.T),
        "d_w": ([a.T for a in numbers(x, recipe, first, 0)], numbers(d, recipe, second, 0), x.T, d),
    }
    found = {}
    for name, ((left, left_error), (right, right_error), plain_left, plain_right) in pairs.items():
        bound = left_error @ np.abs(plain_right) + (np.abs(plain_left) + left_error) @ right_error
        plain = plain_left.astype(np.float64) @ plain_right
        found[name] = left @ right, plain, bound, np.abs(left) @ np.abs(right)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_result_and_gradients(name):
    recipe = RECIPES[name]
    x, w, d = drawn(0, 140, 150), drawn(1, 150, 130), drawn(2, 140, 130)

    @jax.jit
    def both(x, w, d):
        out, pull_back = jax.vjp(lambda x, w: scaled_linear(x, w, recipe=recipe), x, w)
        return {"out": out, **dict(zip(("d_x", "d_w"), pull_back(d), strict=True))}

    got = both(x.reshape(2, 70, 150), w, d.reshape(2, 70, 130))
    assert got["out"].shape == (2, 70, 130)
    assert got["d_x"].shape == (2, 70, 150)
    for key, (rounded, plain, bound, sums) in exact(x, w, d, recipe).items():
        found = np.asarray(got[key], np.float64).reshape(rounded.shape)
        assert np.all(np.abs(found - rounded) <= 4e-6 * sums), key
        assert np.all(np.abs(found - plain) <= bound + 4e-6 * sums), key
        assert np.abs(found - plain).max() > 1e-3 * np.abs(plain).max(), f"{key} was not rounded"
    np.testing.assert_array_equal(scaled_linear(x, w, recipe=recipe), got["out"].reshape(140, 130))


def test_dtypes_and_the_bytes_that_are_kept():
    x, w = jnp.asarray(drawn(0, 64, 160), jnp.bfloat16), drawn(1, 160, 96)
    for recipe in (RECIPES["tensor"], RECIPES["block"], RECIPES["int8"]):
        out, pull_back = jax.vjp(lambda x, w, recipe=recipe: scaled_linear(x, w, recipe=recipe), x, w)
        d_x, d_w = pull_back(out)
        assert (out.dtype, d_x.dtype, d_w.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32)
        kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.size >= 96 * 64]
        assert {leaf.dtype.itemsize for leaf in kept} == {1}


def test_a_nan_stays_in_its_row_and_empty_arrays_are_defined():
    x, w = drawn(0, 4, 150), drawn(1, 150, 20)
    x[1, 3] = np.nan
    for name in ("row", "block"):
        got = np.asarray(scaled_linear(x, w, recipe=RECIPES[name]))
        assert np.all(np.isnan(got[1]))
        assert np.all(np.isfinite(got[[0, 2, 3]]))
    for recipe in (RECIPES["tensor"], RECIPES["block"]):
        assert scaled_linear(x[:0], w, recipe=recipe).shape == (0, 20)
        gradient = jax.grad(lambda w, recipe=recipe: scaled_linear(x[:0], w, recipe=recipe).sum())(w)
        np.testing.assert_array_equal(gradient, np.zeros_like(w))


def test_scan_remat_and_vmap_around_a_recipe():
    x, weights = drawn(0, 24, 32), 0.2 * drawn(1, 3, 32, 32)
    recipe = RECIPES["block"]

    def layer(x, w):
        return jnp.tanh(scaled_linear(x, w, recipe=recipe)), None

    def scanned(weights):
        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()

    def unrolled(weights):
        out = x
        for w in weights:
            out, _ = layer(out, w)
        return out.sum()

    np.testing.assert_allclose(*(jax.jit(jax.grad(f))(weights) for f in (scanned, unrolled)), rtol=1e-5, atol=1e-5)
    mapped = jax.vmap(lambda w: scaled_linear(x, w, recipe=recipe))(weights)
    np.testing.assert_allclose(mapped[1], scaled_linear(x, weights[1], recipe=recipe), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tensor", "row", "block"])
def test_losses_beside_those_of_bfloat16(name):
    """A regression to a random network: after the same steps the loss is that of bfloat16, within a tenth."""
    x, teacher = drawn(0, 256, 64), (drawn(1, 64, 128) / 8, drawn(2, 128, 16) / 11)
    y = np.tanh(x @ teacher[0]) @ teacher[1]
    start = (jnp.asarray(drawn(3, 64, 128) / 8), jnp.asarray(drawn(4, 128, 16) / 11))

    def trained(linear):
        def loss(weights):
            hidden = jnp.tanh(linear(jnp.asarray(x, jnp.bfloat16), weights[0]))
            return jnp.mean((linear(hidden, weights[1]).astype(jnp.float32) - y) ** 2)

        def step(weights, _):
            value, gradients = jax.value_and_grad(loss)(weights)
            return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients), value

        return np.asarray(jax.jit(lambda w: jax.lax.scan(step, w, None, 120)[1])(start))

    plain = trained(lambda x, w: x @ w.astype(jnp.bfloat16))
    got = trained(lambda x, w: scaled_linear(x, w, recipe=RECIPES[name]))
    assert plain[-1] < 0.3 * plain[0]
    assert abs(got[-1] / plain[-1] - 1) < 0.1, (got[-1], plain[-1])


def test_wrong_calls_are_refused():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 3))
    for error, message, call in (
        (TypeError, "must be a Recipe", lambda: scaled_linear(x, w, recipe="block")),
        (TypeError, "quantised already", lambda: scaled_linear(quantize(x), w)),
        (ValueError, "same k", lambda: scaled_linear(x, w.T)),
        (ValueError, "weight must be", lambda: scaled_linear(x, w[0])),
        (ValueError, "16 bits or more", lambda: scaled_linear(x.astype(jnp.int32), w)),
        (ValueError, "scaling must be", lambda: Recipe("column")),
        (ValueError, "int8 is multiplied by int8", lambda: Recipe("block", "int8")),
        (ValueError, "int8 is multiplied by int8", lambda: Recipe("row", "e4m3", "int8")),
    ):
        with pytest.raises(error, match=message):
            call()
