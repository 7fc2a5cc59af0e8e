"""The bridge to Triton on a GPU: in place with and without donation, scalars, TMA's scratch memory, graphs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.triton import launch
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
pytest.importorskip("triton")

from tests.kernels.triton import kernels  # noqa: E402
from tests.kernels.triton.test_triton_bridge import append, scale, struct  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values(dtype: str):
    x = jnp.linspace(-3, 3, 50).astype(dtype)
    for length in (50, 17, 1):
        got = jax.jit(lambda x, length=length: scale(x, length=length))(x)[:length]
        assert np.array_equal(got, (2 * x)[:length])
    assert np.array_equal(scale(x), 2 * x)


@pytest.mark.parametrize("donated", [False, True])
def test_in_place(donated: bool):
    cache, values = jnp.arange(24.0).reshape(3, 8), jnp.full((8,), -1.0)
    run = jax.jit(lambda values, cache: append(values, cache, 2), donate_argnums=(1,) if donated else ())
    mine = cache + 0
    address = mine.unsafe_buffer_pointer()
    before, after = run(values, mine)
    assert np.array_equal(before, cache[2])
    assert np.array_equal(after, cache.at[2].set(-1.0))
    assert mine.is_deleted() == donated
    assert (after.unsafe_buffer_pointer() == address) == donated


def test_in_place_in_a_loop():
    cache = jnp.zeros((4, 8))

    def step(i: Any, cache: Any) -> Any:
        return append(jnp.full((8,), i, jnp.float32), cache, 3)[1] + 1.0

    got = jax.jit(lambda cache: jax.lax.fori_loop(0, 5, step, cache))(cache)
    assert np.array_equal(got, np.full((4, 8), 5.0))


@pytest.mark.parametrize("size", [16, 64, 128])
def test_products(size: int):
    left, right = (jax.random.normal(jax.random.key(i), (size, size)).astype(jnp.bfloat16) for i in range(2))
    (got,) = launch(kernels.product, [left, right], [struct(size, size)], grid=[1], constants={"size": size})
    want = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
    assert np.abs(np.asarray(got) - want).max() < 1e-3


@pytest.mark.skipif((current_device().capability or (0, 0)) < (9, 0), reason="has no TMA")
@pytest.mark.parametrize("times", [1, 12])
def test_scratch_memory(times: int):
    """A TMA descriptor is in memory that the launch provides, also in a graph that XLA makes of many launches."""
    x = jax.random.normal(jax.random.key(0), (300, 64))

    def copied(x: Any) -> Any:
        constants = {"block": 32, "width": 64}
        (got,) = launch(kernels.copied, [x], [struct(300, 64)], grid=[10], scalars={"rows": 300}, constants=constants)
        return got

    def run(x: Any) -> Any:
        for _ in range(times):
            x = copied(x) + 1.0
        return x

    compiled = jax.jit(run).lower(x).compile()
    for _ in range(3):
        assert np.allclose(compiled(x), x + times, atol=1e-4)
