"""``quantize`` in Triton on a GPU: every candidate at real sizes gives the bits of the definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.quantize import literal
from tests.kernels.quantize.test_quantize import SCALINGS, hostile
from tilewright.kernels import kernel
from tilewright.kernels.quantize.triton.backend import TritonQuantize
from tilewright.modules import grouped_matmul, matmul, quantize
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

BACKEND = TritonQuantize()


def candidates(x, **options):
    """The results of every candidate."""
    inputs = kernel("quantize").prepare(jnp.asarray(x), **options)
    for params in BACKEND.candidates(inputs.structs, current_device(), "forward"):
        yield params, jax.jit(lambda inputs, params=params: BACKEND.forward(inputs, params))(inputs)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("format", literal.LARGEST)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_candidate(name, format, dtype):
    options, extents = SCALINGS[name]
    x = hostile((300, 1000), dtype)
    codes, scales = literal.quantized(x, format, extents[-2:])
    for _, got in candidates(x, format=format, **options):
        literal.same_bits(got, codes, scales)


@pytest.mark.parametrize("name", ["tensor", "row", "block", "weight"])
@pytest.mark.parametrize("shape", [(2, 300, 260), (512, 1024), (1000, 640)])
def test_every_candidate_of_both_orientations(name, shape):
    options, extents = SCALINGS[name]
    x = hostile(shape, "bfloat16")
    wanted = [literal.quantized(each, "e4m3", extents[-x.ndim :]) for each in (x, x.swapaxes(-1, -2))]
    for _, found in candidates(x, transposed=True, **options):
        for got, want in zip(found, wanted, strict=True):
            literal.same_bits(got, *want)


@pytest.mark.parametrize("format", literal.LARGEST)
def test_all_of_sixteen_bits(format):
    """Every bfloat16 as an element, beside a greatest one that makes the scale a power of two."""
    x = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16).reshape(512, 128).copy()
    x[:, 0] = literal.LARGEST[format]
    for options in ({"scaling": "row"}, {"scaling": "block", "power_of_two": True}):
        literal.same_bits(
            quantize(x, format=format, platform="triton", **options),
            *literal.quantized(x, format, (None,), options.get("power_of_two", False)),
        )


@pytest.mark.parametrize("shape", [(256, 512, 384), (1000, 4096, 1024), (16, 7168, 4096)])
def test_matmuls_of_blocks(shape):
    rows, k, n = shape
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(each), jnp.bfloat16) for each in ((rows, k), (n, k)))
    q = quantize(x, scaling="block")
    weight = quantize(w, scaling="block", block=(128, 128))
    left, right = (np.asarray(each.dequantize(), np.float64) for each in (q, weight))
    want = left @ right.T
    bound = 2.0**-7 * np.abs(want) + 2.0**-9 * np.sqrt(k)
    for got in (
        matmul(q, weight, transpose_rhs=True),
        grouped_matmul(q, jax.tree.map(lambda a: a[None], weight), jnp.array([rows]), transpose_rhs=True),
    ):
        assert np.all(np.abs(np.asarray(got, np.float64) - want) <= bound)
