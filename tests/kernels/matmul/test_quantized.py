"""Matmuls of ``Quantized`` operands against float64 products of the numbers that they stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import H100
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.matmul.hopper.backend import HopperMatmul
from tilewright.kernels.matmul.ops.matmul import MATMUL
from tilewright.modules import Quantized, grouped_matmul, matmul, quantize

BLOCK = {"scaling": "block"}
WEIGHT = {"scaling": "block", "block": (128, 128)}
PAIRS = {
    "tensor": ({}, {}),
    "rows and columns": ({"scaling": "row"}, {"scaling": "row", "axis": -2}),
    "blocks": (BLOCK, WEIGHT),
    "blocks and one": (BLOCK, {}),
    "rows and blocks": ({"scaling": "row"}, WEIGHT),
    "blocks of both axes": (WEIGHT, WEIGHT),
}


def drawn(*shape, seed=0):
    random = np.random.default_rng(seed)
    # Rows and blocks of different sizes, so that a scale in the wrong place shows.
    sizes = (
        2.0 ** random.integers(-6, 6, (shape[-2], 1))
        * 2.0 ** random.integers(-4, 4, -(-shape[-1] // 64)).repeat(64)[: shape[-1]]
    )
    return jnp.asarray(random.standard_normal(shape) * sizes, jnp.float32)


def close(got, want, sums):
    """Within float32's rounding of the sums of magnitudes, and bfloat16's of the result."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.all(np.abs(got - want) <= 2.0**-8 * np.abs(want) + 2.0**-20 * sums)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("format", ["e4m3", "int8"])
def test_dense(name, format, transposed):
    of_lhs, of_rhs = PAIRS[name]
    x, w = (
        quantize(drawn(2, 5, 200), format=format, **of_lhs),
        quantize(drawn(200, 140, seed=1), format=format, **of_rhs),
    )
    if format == "int8" and "block" in name:
        # What no sum in int32 has.
        with pytest.raises(ValueError, match="no scales of blocks"):
            matmul(x, w)
        return
    left, right = np.asarray(x.dequantize(), np.float64), np.asarray(w.dequantize(), np.float64)
    got = jax.jit(lambda x, w: matmul(x, w.mT if transposed else w, transpose_rhs=transposed))(x, w)
    assert got.dtype == jnp.bfloat16
    close(got, left @ right, np.abs(left) @ np.abs(right))
    wide = matmul(x, w, preferred_element_type=jnp.float32)
    assert np.abs(np.asarray(wide, np.float64) - left @ right).max() <= 2e-6 * (np.abs(left) @ np.abs(right)).max()


def test_dense_with_lhs_transposed_and_two_formats():
    x, w = quantize(drawn(200, 6), format="e5m2", **WEIGHT), quantize(drawn(200, 130, seed=1), **WEIGHT)
    left, right = np.asarray(x.dequantize(), np.float64).T, np.asarray(w.dequantize(), np.float64)
    close(matmul(x, w, transpose_lhs=True), left @ right, np.abs(left) @ np.abs(right))


def test_int8_sums_are_exact():
    x, w = (Quantized(jnp.full((300, 300), -127, jnp.int8), jnp.ones((1, 1)), "int8", (None, None)) for _ in range(2))
    assert np.all(np.asarray(matmul(x, w, preferred_element_type=jnp.float32)) == 300 * 127 * 127)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("options", [({}, {}), (BLOCK, WEIGHT), ({"scaling": "row"}, WEIGHT)])
def test_grouped(options, transposed):
    x, w = quantize(drawn(9, 200), **options[0]), quantize(drawn(3, 200, 140, seed=1), **options[1])
    sizes = np.array([4, 0, 3])
    got = grouped_matmul(x, w.mT if transposed else w, sizes, transpose_rhs=transposed)
    left, right = np.asarray(x.dequantize(), np.float64), np.asarray(w.dequantize(), np.float64)
    want, sums = np.zeros((9, 140)), np.zeros((9, 140))
    for group, (first, last) in enumerate(((0, 4), (4, 4), (4, 7))):
        want[first:last] = left[first:last] @ right[group]
        sums[first:last] = np.abs(left[first:last]) @ np.abs(right[group])
    close(got, want, sums)


def test_a_nan_stays_in_its_row():
    x = drawn(4, 200).at[1, 7].set(jnp.nan)
    got = np.asarray(matmul(quantize(x, **BLOCK), quantize(drawn(200, 130, seed=1), **WEIGHT)), np.float32)
    assert np.all(np.isnan(got[1]))
    assert np.all(np.isfinite(got[[0, 2, 3]]))


def test_what_has_no_kernel_is_refused():
    x, w = drawn(4, 200), drawn(200, 130, seed=1)
    q, weight = quantize(x, **BLOCK), quantize(w, **WEIGHT)
    integers = [quantize(each, format="int8") for each in (x, w[None])]
    for error, message, call in (
        (TypeError, "must all be Quantized", lambda: matmul(q, w)),
        (TypeError, "must all be Quantized", lambda: grouped_matmul(x, quantize(w[None], **WEIGHT), [4])),
        (TypeError, "int8 by int8|multiplied by int8 alone", lambda: matmul(quantize(x, format="int8"), weight)),
        (ValueError, "change along k", lambda: matmul(quantize(x, scaling="row", axis=-2), weight)),
        (ValueError, "change along k", lambda: matmul(q, quantize(w, scaling="row"))),
        (ValueError, "each column and block", lambda: matmul(q, quantize(w, scaling="block", axis=-2))),
        (ValueError, "same k", lambda: matmul(q, weight.mT)),
        (TypeError, "must be left out", lambda: grouped_matmul(q, quantize(w[None], **WEIGHT), [4], lhs_scale=2.0)),
        (ValueError, "for each column", lambda: grouped_matmul(q, quantize(w[None], scaling="row", axis=-2), [4])),
        (TypeError, "int8 have no kernel", lambda: grouped_matmul(*integers, [4])),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_hopper_multiplies_dense_codes_as_one_group():
    q, weight = quantize(drawn(2, 20, 272), **BLOCK), quantize(drawn(200, 272, seed=1), **WEIGHT)
    inputs = MATMUL.prepare(
        q.values, weight.values, transpose_rhs=True, preferred_element_type=jnp.float32, lhs_scale=q.scales,
        rhs_scale=weight.scales,
    )  # fmt: skip
    backend, (params, *_) = HopperMatmul(), HopperMatmul().candidates(inputs.structs, H100, "forward")
    assert not backend.not_supported_reasons(inputs.structs, H100, "forward")
    assert not backend.deprioritized(inputs.structs, H100, "forward")
    with interpret_mosaic():
        out = jax.block_until_ready(jax.jit(functools.partial(backend.forward, params=params))(inputs)).out
    left, right = np.asarray(q.dequantize(), np.float64), np.asarray(weight.dequantize(), np.float64)
    assert out.shape == (2, 20, 200)
    assert np.all(np.abs(np.asarray(out, np.float64) - left @ right.T) <= 2e-6 * (np.abs(left) @ np.abs(right.T)))
    wide = inputs.replace(lhs=inputs.lhs.astype(jnp.float32), rhs=inputs.rhs.astype(jnp.float32))
    np.testing.assert_allclose(MATMUL.reference(wide), left @ right.T, rtol=1e-4, atol=1e-4 * np.abs(left).max())
    for wrong, reason in (
        ({"transpose_rhs": False}, "K in their rows"),
        ({"out_dtype": "float8_e4m3fn"}, "result must be"),
    ):
        assert reason in str(backend.reasons(inputs.structs.replace(**wrong), H100, "forward"))


def test_gradients_of_dense_numbers_with_scales():
    """Codes have none, but bfloat16 operands with scales do; by JAX's own derivative of the oracle."""
    x, w = drawn(5, 200).astype(jnp.bfloat16), drawn(200, 140, seed=1).astype(jnp.bfloat16)
    scales = {
        "lhs_scale": jnp.exp2(jnp.arange(10.0).reshape(5, 2) - 5),
        "rhs_scale": jnp.exp2(-jnp.arange(4.0)).reshape(2, 2),
    }
    call = lambda x, w: matmul(x, w, preferred_element_type=jnp.float32, **scales).sum()
    oracle = lambda x, w: MATMUL.reference(MATMUL.prepare(x, w, preferred_element_type=jnp.float32, **scales)).sum()
    for got, want in zip(jax.grad(call, (0, 1))(x, w), jax.grad(oracle, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2)
