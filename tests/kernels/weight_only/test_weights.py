"""Weights of few bits: readers of checkpoints, rounding, and their expansion to eight bits, against literal ones."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.kernels.weight_only import literal
from tilewright.modules import PackedWeight, from_awq, from_gptq, from_mxfp4, mxfp4_to_e4m3, quantize_weight


def words(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(0, 1 << 32, shape, np.uint32).view(np.int32)


@pytest.mark.parametrize("order", ["none", "runs", "act-order"])
@pytest.mark.parametrize(("bits", "version"), [(4, 1), (4, 2), (8, 1), (8, 2)])
def test_gptq(bits: int, version: int, order: str):
    random, per_word, k, n, group = np.random.default_rng(0), 32 // bits, 96, 24, 32
    qweight, qzeros = words(random, k // per_word, n), words(random, k // group, n // per_word)
    scales = random.uniform(0.01, 1, (k // group, n)).astype(np.float16)
    runs = np.arange(k) // group
    g_idx = random.permutation(runs) if order == "act-order" else runs
    found = from_gptq(
        qweight, qzeros, scales, None if order == "none" else g_idx.astype(np.int32), bits=bits, version=version
    )
    want = literal.gptq_weight(qweight, qzeros, scales, g_idx, bits, 1 if version == 1 else 0)
    assert found.shape == (k, n)
    assert found.group == group
    assert (found.order is None) == (order != "act-order")
    np.testing.assert_array_equal(found.dequantize(), want)


def test_gptq_of_a_short_last_group():
    random = np.random.default_rng(1)
    qweight, qzeros, g_idx = words(random, 12, 8), words(random, 2, 1), random.permutation(np.arange(96) // 64)
    scales = random.uniform(0.01, 1, (2, 8)).astype(np.float32)
    found = from_gptq(qweight, qzeros, scales, g_idx)
    assert found.group == 64
    np.testing.assert_array_equal(found.dequantize(), literal.gptq_weight(qweight, qzeros, scales, g_idx, 4, 1))
    with pytest.raises(ValueError, match="g_idx must name"):
        from_gptq(qweight, qzeros, scales, np.r_[np.zeros(40, np.int32), np.ones(56, np.int32)])


def test_awq():
    random, k, n, group = np.random.default_rng(2), 64, 24, 32
    qweight, qzeros = words(random, k, n // 8), words(random, k // group, n // 8)
    scales = random.uniform(0.01, 1, (k // group, n)).astype(np.float16)
    found = from_awq(qweight, qzeros, scales)
    assert found.group == group
    np.testing.assert_array_equal(found.dequantize(), literal.awq_weight(qweight, qzeros, scales, group))


def test_mxfp4_of_stacked_matrices():
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (2, 5, 3, 16), np.uint8)
    scales = random.integers(60, 200, (2, 5, 3), np.uint8)
    scales[0, 1, 2] = 255
    found = from_mxfp4(blocks, scales)
    assert found.shape == (2, 96, 5)
    assert found.group == 32
    want = [literal.mxfp4_weight(*each) for each in zip(blocks, scales, strict=True)]
    np.testing.assert_array_equal(found.dequantize(), want)
    assert np.isnan(np.asarray(found.dequantize())[0, 64:, 1]).all()


@pytest.mark.parametrize(
    ("reader", "given", "said"),
    [
        (from_gptq, {"qweight": (4, 8), "qzeros": (2, 1), "scales": (2, 9)}, "qweight must be"),
        (from_gptq, {"qweight": (4, 8), "qzeros": (3, 1), "scales": (3, 8)}, "every group has as many rows"),
        (from_gptq, {"qweight": (4, 8), "qzeros": (2, 1), "scales": (2, 8), "bits": 3}, "bits must be"),
        (from_awq, {"qweight": (4, 1), "qzeros": (3, 1), "scales": (3, 8)}, "multiple of groups"),
        (from_awq, {"qweight": (4, 1), "qzeros": (2, 1), "scales": (8,)}, "scales must be"),
    ],
)
def test_arrays_that_do_not_fit(reader: Any, given: dict[str, Any], said: str):
    made = {
        name: x if not isinstance(x, tuple) else np.ones(x, np.float32 if name == "scales" else np.int32)
        for name, x in given.items()
    }
    with pytest.raises((ValueError, TypeError), match=said):
        reader(**made)
    with pytest.raises((ValueError, TypeError), match="blocks must be"):
        from_mxfp4(np.ones((3, 2, 15), np.uint8), np.ones((3, 2), np.uint8))


def by_group(weight: np.ndarray, group: int | None) -> list[np.ndarray]:
    k = weight.shape[0]
    return [weight[at : at + (group or k)] for at in range(0, k, group or k)]


@pytest.mark.parametrize("group", [32, 100, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_rounding_to_integers(format: str, symmetric: bool, group: int | None):
    weight = np.random.default_rng(4).standard_normal((130, 6)).astype(np.float32)
    weight[:, 1] = 0.0
    weight[:, 2] = np.abs(weight[:, 2]) + 3  # zero is a code although no element is near it
    found = quantize_weight(weight, format=format, group=group, symmetric=symmetric)
    got, half = np.asarray(found.dequantize(), np.float64), 8 if format == "int4" else 128
    for index, rows in enumerate(by_group(weight, group)):
        if symmetric:
            want = np.abs(rows).max(0) / (half - 1)
        else:
            want = (np.maximum(rows.max(0), 0) - np.minimum(rows.min(0), 0)) / (2 * half - 1)
        want[1] = 1.0
        scale = np.asarray(found.scales, np.float64)[index]
        np.testing.assert_allclose(scale, want, rtol=1e-6)
        error = np.abs(got[index * (group or 130) :][: len(rows)] - rows)
        # A zero point is rounded, too, so that the ends of the range may be one half of a step off.
        assert np.all(error <= scale * (0.5001 if symmetric else 1.0001))
    assert np.all(got[:, 1] == 0)
    assert (found.zeros is None) == symmetric


def test_rounding_to_e2m1_is_that_of_ml_dtypes():
    random = np.random.default_rng(5)
    weight = (random.standard_normal((64, 40)) * np.exp2(random.integers(-20, 20, (2, 40))).repeat(32, 0)).astype(
        np.float32
    )
    weight[:32, 0], weight[:8, 1] = 0.0, [-0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0]
    weight[8:32, 1] = 0.0
    found = quantize_weight(weight, format="mxfp4")
    rows = weight.reshape(2, 32, 40).astype(np.float64)
    amax = np.abs(rows).max(1)
    exponent = np.where(amax == 0, 0, np.floor(np.log2(np.where(amax == 0, 1, amax))) - 2)
    np.testing.assert_array_equal(np.asarray(found.scales), exponent + 127)
    scaled = np.clip(rows / np.exp2(exponent)[:, None], -6, 6)
    want = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.exp2(exponent)[:, None]
    np.testing.assert_array_equal(np.asarray(found.dequantize(), np.float64), want.reshape(64, 40))


@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4"])
def test_what_is_not_finite_stays_in_its_group(format: str):
    weight = np.random.default_rng(6).standard_normal((64, 3)).astype(np.float32)
    clean = np.asarray(quantize_weight(weight, format=format, group=32).dequantize())
    weight[3, 0], weight[40, 1] = np.nan, -np.inf
    got = np.asarray(quantize_weight(weight, format=format, group=32).dequantize())
    assert np.isnan(got[:32, 0]).all()
    assert np.isfinite(got[:, 1]).all()
    assert got[40, 1] < 0
    np.testing.assert_array_equal(got[32:, 0], clean[32:, 0])
    np.testing.assert_array_equal(got[:32, 1:], clean[:32, 1:])
    assert got[40, 1] == got[32:, 1].min() or format == "mxfp4"


@pytest.mark.parametrize("spread", [14, 30])
def test_e4m3_of_mxfp4(spread: int):
    random = np.random.default_rng(7)
    k, n = 192, 130
    exponents = random.integers(127, 128 + spread, (n, k // 32)).astype(np.uint8)
    exponents[0, 0], exponents[1, :2] = 255, (127, 127 + spread)
    weight = from_mxfp4(random.integers(0, 256, (n, k // 32, 16), np.uint8), exponents)
    found = mxfp4_to_e4m3(weight)
    want, scales = np.asarray(weight.dequantize(), np.float64), np.asarray(found.scales, np.float64)
    assert found.values.dtype == jnp.float8_e4m3fn
    assert scales.shape == (2, 2)
    of_element = scales.repeat(128, 0)[:k].repeat(128, 1)[:, :n]
    np.testing.assert_array_equal(np.frexp(scales)[0], 0.5)
    codes = (want / of_element).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(found.values, np.float32), codes.astype(np.float32))
    assert np.isfinite(np.asarray(found.values, np.float32)[32:]).all()
    exact = np.asarray(found.dequantize(), np.float64) == want
    exact |= np.isnan(want)
    assert exact.all() == (spread == 14)


def test_a_weight_is_a_pytree_of_its_arrays():
    weight = quantize_weight(np.random.default_rng(8).standard_normal((3, 64, 8)), group=32, symmetric=False)
    assert weight.shape == (3, 64, 8)
    assert weight.nbytes == 3 * (64 * 8 // 2 + 2 * 8 * (4 + 2))
    one = jax.tree.map(lambda x: x[1], weight)
    assert isinstance(one, PackedWeight)
    assert one.shape == (64, 8)
    np.testing.assert_array_equal(one.dequantize(), weight.dequantize()[1])
    np.testing.assert_array_equal(
        jax.jit(lambda w: w.dequantize(jnp.bfloat16))(weight), weight.dequantize(jnp.bfloat16)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight": np.ones(8, np.float32)}, "weight must be"),
        ({"weight": np.ones((8, 8), np.int32)}, "weight must be"),
        ({"format": "fp4"}, "format must be"),
        ({"group": 0}, "group must be"),
        ({"scale_dtype": "int8"}, "scale_dtype must be"),
    ],
)
def test_wrong_calls(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        quantize_weight(**({"weight": np.ones((8, 8), np.float32)} | given))
    with pytest.raises(ValueError, match="must be a PackedWeight in mxfp4"):
        mxfp4_to_e4m3(quantize_weight(np.ones((32, 2), np.float32)))
