"""The matmul whose GPUs send their rows to each other, on two of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.kernels.hopper.device import device_reasons
from tilewright.modules import all_gather_matmul, matmul_reduce_scatter
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.device_count() < 2 or bool(device_reasons(current_device())),
    reason="needs two Hopper GPUs of one host",
)

ROWS, COLUMNS = P(None, "x", None), P(None, "x")


def mesh() -> Any:
    return jax.make_mesh((jax.device_count(),), ("x",))


def draw(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def placed(lhs: jax.Array, rhs: jax.Array) -> Any:
    return [jax.device_put(x, NamedSharding(mesh(), spec)) for x, spec in ((lhs, ROWS), (rhs, COLUMNS))]


def over_devices(function: Any, *specs: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=mesh(), in_specs=specs[:-1], out_specs=specs[-1]))


def remote(lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
    return all_gather_matmul(lhs, rhs, axis_name="x", strategy="remote", **options)


def near(got: jax.Array, lhs: jax.Array, rhs: jax.Array) -> None:
    left, right = (np.asarray(x).astype(np.float64) for x in (lhs, rhs))
    want = left @ right
    scale = 2.0 ** -(jnp.finfo(got.dtype).nmant + 1)
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    assert (error <= 1.1 * scale * np.abs(want) + 1e-3).all(), error.max()


@pytest.mark.parametrize(
    ("batches", "rows", "k", "n", "dtype"),
    [(1, 512, 512, 1024, "bfloat16"), (1, 200, 264, 264, "float16"), (3, 136, 1024, 512, "bfloat16")],
)
def test_the_same_as_in_float64(batches: int, rows: int, k: int, n: int, dtype: str):
    count = jax.device_count()
    lhs, rhs = draw(0, batches, rows * count, k, dtype=dtype), draw(1, k, n * count, dtype=dtype)
    got = over_devices(remote, ROWS, COLUMNS, P(None, None, "x"))(*placed(lhs, rhs))
    near(got, lhs, rhs)


@pytest.mark.parametrize(
    ("batches", "rows", "k", "n", "dtype"),
    [(1, 512, 1024, 512, "bfloat16"), (1, 200, 264, 264, "float16"), (3, 136, 64, 512, "bfloat16")],
)
def test_sums_are_the_same_as_in_float64(batches: int, rows: int, k: int, n: int, dtype: str):
    count = jax.device_count()
    lhs, rhs = draw(0, batches, rows * count, k * count, dtype=dtype), draw(1, k * count, n, dtype=dtype)
    specs = P(None, None, "x"), P("x", None)
    arrays = [jax.device_put(x, NamedSharding(mesh(), spec)) for x, spec in zip((lhs, rhs), specs, strict=True)]
    function = lambda *xs: matmul_reduce_scatter(*xs, axis_name="x", strategy="remote")
    call = over_devices(function, *specs, ROWS)
    got = call(*arrays)
    near(got, lhs, rhs)
    for _ in range(5):
        assert jnp.array_equal(call(*arrays), got)


@pytest.mark.parametrize("late", [0, 1])
def test_calls_one_after_another_while_one_device_is_late(late: int):
    """What arrives before a device has begun is of this call, and what it waits for as well."""
    count = jax.device_count()

    def step(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        def work() -> jax.Array:
            square = jnp.zeros((4096, 4096), jnp.bfloat16)
            return lax.fori_loop(0, 4, lambda _, x: x @ x, square)[0, 0]

        busy = lax.cond(lax.axis_index("x") == late, work, lambda: jnp.zeros((), jnp.bfloat16))
        return remote(lhs + busy, rhs)

    call = jax.jit(
        jax.shard_map(step, mesh=mesh(), in_specs=(ROWS, COLUMNS), out_specs=P(None, None, "x"), check_vma=False)
    )
    rhs = draw(1, 1024, 512 * count)
    inputs = [draw(10 + seed, 1, 512 * count, 1024) for seed in range(6)]
    outs = [call(*placed(lhs, rhs)) for _ in range(3) for lhs in inputs]
    for number, out in enumerate(outs):
        near(out, inputs[number % len(inputs)], rhs)


def test_gradients():
    count = jax.device_count()
    lhs, rhs = draw(0, 1, 256 * count, 512), draw(1, 512, 256 * count)
    d_out = draw(2, 1, 256 * count, 256 * count)

    def gradients(strategy: str) -> Any:
        def both(lhs: jax.Array, rhs: jax.Array, d_out: jax.Array) -> Any:
            call = lambda *xs: all_gather_matmul(*xs, axis_name="x", strategy=strategy)
            return jax.vjp(call, lhs, rhs)[1](d_out)

        of_out = P(None, None, "x")
        arrays = *placed(lhs, rhs), jax.device_put(d_out, NamedSharding(mesh(), of_out))
        return over_devices(both, ROWS, COLUMNS, of_out, (ROWS, COLUMNS))(*arrays)

    for mine, other in zip(gradients("remote"), gradients("collective"), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (mine, other)), rtol=2e-2, atol=0.3)
