"""``quantize`` on XLA against its definition in NumPy, and what a ``Quantized`` is under transforms."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.quantize import literal
from tilewright.modules import quantize

SCALINGS = {
    "tensor": ({"scaling": "tensor"}, (None, None, None)),
    "row": ({"scaling": "row"}, (None,)),
    "column": ({"scaling": "row", "axis": -2}, (None, 1)),
    "block": ({"scaling": "block"}, (128,)),
    "column block": ({"scaling": "block", "axis": -2}, (128, 1)),
    "weight": ({"scaling": "block", "block": (128, 128)}, (128, 128)),
}


def hostile(shape, dtype="float32", seed=0):
    """Numbers of many magnitudes: zeros, a row of zeros, subnormal ones, infinities and a NaN."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal(shape) * 2.0 ** random.integers(-20, 20, (*shape[:-1], 1))).astype(np.float32)
    flat = x.reshape(-1, shape[-1])
    flat[0] = 0.0
    flat[1, :4] = np.inf, -np.inf, 1e-39, -1e-40
    flat[2, 1] = np.nan
    flat[3] = 3e38 * np.sign(flat[3])
    flat[4] *= np.float32(2.0**-120)
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(
    ("format", "dtype", "power_of_two"),
    [("e4m3", "float32", False), ("e5m2", "bfloat16", True), ("int8", "float16", False), ("e4m3", "bfloat16", True)],
)
def test_bits(format, name, dtype, power_of_two):
    options, extents = SCALINGS[name]
    with np.errstate(over="ignore"):
        x = hostile((2, 9, 150), dtype)
    got = quantize(x, format=format, power_of_two=power_of_two, **options)
    literal.same_bits(got, *literal.quantized(x, format, extents, power_of_two))
    assert got.format == format
    assert got.block == extents


@pytest.mark.parametrize("format", literal.LARGEST)
def test_ties_round_to_even_and_largest_saturates(format):
    codes = np.arange(256, dtype=np.uint8).view(literal.DTYPES[format]).astype(np.float32)
    values = np.unique(codes[np.isfinite(codes)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(9e9))])
    x = np.append(x[np.abs(x) <= literal.LARGEST[format]], np.float32(literal.LARGEST[format]))
    got = quantize(x, format=format, power_of_two=True)
    assert float(got.scales[0]) == 1.0
    literal.same_bits(got, *literal.quantized(x, format, (None,), True))


@pytest.mark.parametrize("format", literal.LARGEST)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_of_extreme_maxima(format, power_of_two):
    largest = np.float32(literal.LARGEST[format])
    amax = np.array([0, 2.0**-149, 2.0**-126, 2.0**-119, 2.0**-118, 1, 3e38, np.finfo(np.float32).max], np.float32)
    amax = np.concatenate([amax, largest * np.float32(2.0) ** np.arange(-100, 100, 25, dtype=np.float32)])
    x = np.concatenate([amax, np.nextafter(amax, 0), np.nextafter(amax[:-1], np.float32(9e9))])[:, None]
    got = quantize(x * np.array([1, -0.5], np.float32), format=format, scaling="row", power_of_two=power_of_two)
    literal.same_bits(got, *literal.quantized(x * np.array([1, -0.5], np.float32), format, (None,), power_of_two))
    assert np.all(np.asarray(got.scales) >= 2.0**-126)


@pytest.mark.parametrize("scaling", ["block", "row", "tensor", "weight"])
def test_both_orientations_are_those_of_the_array_and_of_its_transpose(scaling):
    x = hostile((2, 140, 133), seed=3)
    options = dict(SCALINGS[scaling][0], format="e4m3")
    plain, both = jax.jit(lambda x: (quantize(x, **options), quantize(x, transposed=True, **options)))(x)
    of_transpose = quantize(x.swapaxes(-1, -2), **options)
    for got, want in zip(both, (plain, of_transpose), strict=True):
        literal.same_bits(got, np.asarray(want.values), np.asarray(want.scales))
        assert (got.format, got.block) == (want.format, want.block)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 130), (2, 3, 0)])
def test_empty_arrays(shape):
    for options in ({"scaling": "tensor"}, {"scaling": "row"}, {"scaling": "block"}):
        got = quantize(jnp.zeros(shape), **options)
        literal.same_bits(got, *literal.quantized(np.zeros(shape, np.float32), "e4m3", got.block))


def test_float64_is_rounded_to_float32_first():
    x = np.random.default_rng(0).standard_normal((3, 130)) * 1e3
    with jax.enable_x64(True):
        got = quantize(x, scaling="block")
        assert got.dequantize().dtype == np.float32
        assert got.dequantize(np.float64).dtype == np.float64
    literal.same_bits(got, *literal.quantized(x.astype(np.float32), "e4m3", (128,)))


@pytest.mark.parametrize("name", SCALINGS)
def test_dequantized_numbers_and_their_transpose(name):
    options, extents = SCALINGS[name]
    x = np.random.default_rng(1).standard_normal((2, 150, 140)).astype(np.float32)
    got = quantize(x, format="int8", **options)
    extents = (1,) * (3 - len(extents)) + extents
    scales = np.asarray(got.scales)
    for axis, each in enumerate(extents):
        if each != 1:
            scales = np.repeat(scales, each or x.shape[axis], axis).take(range(x.shape[axis]), axis)
    want = np.asarray(got.values, np.float32) * scales
    np.testing.assert_array_equal(got.dequantize(), want)
    np.testing.assert_array_equal(got.mT.dequantize(), want.swapaxes(-1, -2))
    np.testing.assert_array_equal(got.dequantize(jnp.bfloat16), want.astype(ml_dtypes.bfloat16))
    assert np.abs(want - x).max() <= 0.5 * scales.max() * (1 + 1e-6)
    assert got.mT.mT.shape == got.shape
    assert got.mT.shape == (2, 140, 150)


def test_maps_and_scans_over_leading_axes_keep_the_meaning():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 4, 140)), jnp.float32)
    for options in ({"scaling": "tensor"}, {"scaling": "row"}, {"scaling": "block"}):
        mapped = jax.vmap(lambda x, options=options: quantize(x, **options))(x)
        _, scanned = jax.lax.scan(lambda _, q: (None, q.dequantize()), None, mapped)
        np.testing.assert_array_equal(mapped.dequantize(), scanned)
        literal.same_bits(jax.tree.map(lambda leaf: leaf[1], mapped), *literal.quantized(x[1], "e4m3", mapped.block))


def test_whole_blocks_are_split_over_explicit_axes():
    x = np.random.default_rng(0).standard_normal((256, 384)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    both = jax.jit(lambda x: quantize(x, scaling="block", transposed=True))
    wanted = both(x)
    with jax.set_mesh(mesh):
        rows, columns = (jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("d"), P(None, "d")))
        got = both(rows)
        for each, want in zip(got, wanted, strict=True):
            literal.same_bits(each, np.asarray(want.values), np.asarray(want.scales))
        assert [each.scales.sharding.spec for each in got] == [P("d", None), P(None, "d")]
        with pytest.raises(ValueError, match="128 elements, so dimension 1 of"):
            both(columns)
        with pytest.raises(ValueError, match="must be whole"):
            jax.jit(quantize)(rows)


def test_wrong_calls_are_refused():
    x = jnp.ones((4, 8))
    for options, message in (
        ({"format": "fp8"}, "format must be one of"), ({"scaling": "group"}, "scaling must be one of"),
        ({"axis": 0, "scaling": "row"}, None), ({"axis": 2}, "axis must be one of the last two"),
        ({"block": (128, 128)}, "block is for scaling='block'"),
        ({"block": (64, 64), "scaling": "block"}, "block must be one of"),
        ({"transposed": True, "scaling": "row", "axis": -2}, "leave out axis"),
    ):  # fmt: skip
        if message is None:
            assert quantize(x, **options).block == (None, 1)
            continue
        with pytest.raises(ValueError, match=message):
            quantize(x, **options)
    with pytest.raises(ValueError, match="rank 2"):
        quantize(x[0], transposed=True)
    with pytest.raises(ValueError, match="16 bits or more"):
        quantize(x.astype(jnp.float8_e4m3fn))
    with pytest.raises(TypeError, match="quantised already"):
        quantize(quantize(x))
    with pytest.raises(TypeError, match="no gradient"):
        jax.grad(lambda x: quantize(x).dequantize().sum())(x)
