"""The Triton backend of ``quantize`` by Triton's interpreter: the bits of the definition in NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100, H100
from tests.kernels.quantize import literal
from tests.kernels.quantize.test_quantize import SCALINGS, hostile
from tilewright.kernels import kernel
from tilewright.kernels.quantize.inputs import QuantizeInputs
from tilewright.kernels.quantize.triton.backend import TritonQuantize, TritonQuantizeParams, tiling
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonQuantize()


def forward(x, device=H100, **options):
    inputs = kernel("quantize").prepare(x, **options)
    assert not BACKEND.not_supported_reasons(inputs.structs, device, "forward")
    return BACKEND.forward(inputs, BACKEND.heuristic(inputs.structs, device, "forward"))


def interpreted(x, device=H100, **options):
    with interpret_triton(device.name):
        return jax.block_until_ready(jax.jit(lambda x: forward(x, device, **options))(x))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(
    ("format", "dtype", "power_of_two", "device"),
    [
        ("e4m3", "bfloat16", False, H100), ("e5m2", "float32", True, H100), ("int8", "float16", False, A100),
        ("e4m3", "float32", True, A100), ("e5m2", "bfloat16", False, A100), ("int8", "bfloat16", True, H100),
    ],
)  # fmt: skip
def test_bits(name, format, dtype, power_of_two, device):
    options, extents = SCALINGS[name]
    with np.errstate(over="ignore"):
        x = hostile((2, 9, 150), dtype)
    got = interpreted(x, device, format=format, power_of_two=power_of_two, **options)
    literal.same_bits(got, *literal.quantized(x, format, extents, power_of_two))
    assert got.block == extents


@pytest.mark.parametrize("name", ["tensor", "row", "block", "weight"])
@pytest.mark.parametrize("format", ["e4m3", "int8"])
def test_both_orientations(name, format):
    options, extents = SCALINGS[name]
    x = hostile((2, 135, 140), "bfloat16")
    found = interpreted(x, format=format, transposed=True, **options)
    for got, array in zip(found, (x, x.swapaxes(-1, -2)), strict=True):
        literal.same_bits(got, *literal.quantized(array, format, extents))


@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.name)
@pytest.mark.parametrize("format", literal.LARGEST)
def test_ties_round_to_even(format, device):
    codes = np.arange(256, dtype=np.uint8).view(literal.DTYPES[format]).astype(np.float32)
    values = np.unique(codes[np.isfinite(codes)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(9e9)), [np.nan]])
    x = x[~(np.abs(x) > literal.LARGEST[format])][: None if format != "int8" else -1].astype(np.float32)
    x = np.append(x, np.float32(literal.LARGEST[format]))
    got = interpreted(x, device, format=format, scaling="row", power_of_two=True)
    literal.same_bits(got, *literal.quantized(x, format, (None,), True))


def test_wide_rows_and_many_strips_have_a_pass_for_their_maxima(monkeypatch):
    from tilewright.kernels.quantize.triton import backend

    monkeypatch.setattr(backend, "MOST_COLUMNS", 128)
    monkeypatch.setattr(backend, "MAXIMA", (2, 32))
    monkeypatch.setattr(backend, "MAXIMA_PROGRAMS", 0)
    monkeypatch.setattr(backend, "MAXIMA_STRIP", 3)
    x = hostile((9, 150), "float16", seed=4)
    for name in ("row", "column", "tensor"):
        options, extents = SCALINGS[name]
        got = interpreted(x, **options)
        literal.same_bits(got, *literal.quantized(x, "e4m3", extents[-2:]))


def test_maxima_that_are_subnormal_or_nothing():
    x = np.array([[2.0**-140, 0, -(2.0**-127)], [2.0**-126, 2.0**-127, 0], [np.inf, -np.inf, 2.0**-130]], np.float32)
    for format in literal.LARGEST:
        for power_of_two in (False, True):
            got = interpreted(x, format=format, scaling="row", power_of_two=power_of_two)
            literal.same_bits(got, *literal.quantized(x, format, (None,), power_of_two))


def test_vmap_gives_each_array_scales_of_its_own():
    x = hostile((3, 5, 140), "bfloat16")
    for name in ("tensor", "row", "column", "block"):
        options, extents = SCALINGS[name]
        with interpret_triton():
            got = jax.jit(jax.vmap(lambda x, options=options: forward(x, **options)))(x)
        for i, array in enumerate(x):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], got)
            literal.same_bits(one, *literal.quantized(array, "e4m3", extents[-2:]))


def inputs_of(shape, **options):
    return QuantizeInputs(jax.ShapeDtypeStruct(shape, jnp.bfloat16), **options)


@pytest.mark.parametrize("shape", [(8192, 4096), (3, 5, 70), (1, 30000), (40,), (4096, 14336), (1 << 20, 16)])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_candidates_can_serve_the_call(shape, scaling):
    for options in ({}, {"transposed": True}, {"axis": -2}, {"block": (128, 128)})[: 4 if len(shape) > 1 else 1]:
        inputs = inputs_of(shape, scaling=scaling, **options)
        found = list(BACKEND.candidates(inputs, H100, "forward"))
        assert found
        for params in found:
            assert not BACKEND.config_reasons(inputs, H100, "forward", params), (params, tiling(inputs))


def test_params_round_trip_and_wrong_ones_are_refused():
    params = TritonQuantizeParams(64, 128, 4)
    assert untagged(json.loads(json.dumps(tagged(params)))) == params
    with pytest.raises(ValueError, match="power of two"):
        TritonQuantizeParams(48, 128, 4)
    inputs = inputs_of((256, 256), scaling="block")
    for wrong, message in (
        (TritonQuantizeParams(64, 64, 4), "128 columns"),
        (TritonQuantizeParams(128, 128, 2), "do not fit"),
    ):
        (reason,) = BACKEND.config_reasons(inputs, H100, "forward", wrong)
        assert message in reason
    (reason,) = BACKEND.config_reasons(
        inputs_of((256, 256), scaling="block", transposed=True), H100, "forward", TritonQuantizeParams(64, 128, 4)
    )
    assert "128 rows" in reason


def test_what_it_declines():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float64)
    assert BACKEND.forward_reasons(QuantizeInputs(x), H100) == ["x must be float32, bfloat16 or float16, not float64"]
    assert "too many tiles" in BACKEND.forward_reasons(inputs_of((1 << 31, 8)), H100)[0]
