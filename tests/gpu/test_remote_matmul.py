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


def test_a_loop_whose_arrays_are_elsewhere_on_one_device():
    """XLA captures a loop in a CUDA graph, and a device whose own arrays have not moved replays what it captured."""
    count = jax.device_count()
    rows, width = P("x", None), P(None, "x")

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(remote(x, up))
        out = matmul_reduce_scatter(hidden, down, axis_name="x", strategy="remote").astype(jnp.float32)
        return (out * lax.rsqrt(jnp.square(out).mean(-1, keepdims=True))).astype(x.dtype)

    loop = lambda x, up, down: lax.fori_loop(0, 3, lambda _, x: step(x, up, down), x)
    specs = rows, width, rows
    call = jax.jit(jax.shard_map(loop, mesh=mesh(), in_specs=specs, out_specs=rows))
    arrays = draw(0, 1024 * count, 512), draw(1, 512, 2048 * count), draw(2, 2048 * count, 512)
    placed = [jax.device_put(x, NamedSharding(mesh(), spec)) for x, spec in zip(arrays, specs, strict=True)]
    first = np.asarray(call(*placed), np.float32)
    held: list[Any] = []
    for number in range(12):
        held.append(jax.device_put(np.zeros(1 << (16 + number), np.int8), jax.devices()[number % count]))
        outs = [call(*placed) for _ in range(4)]
        held.append(outs[0])
        for out in outs:
            np.testing.assert_array_equal(np.asarray(out, np.float32), first)


@pytest.mark.parametrize("reverse", [False, True])
def test_auto_takes_any_order_of_two_devices(reverse: bool):
    if jax.device_count() != 2:
        pytest.skip("more devices have not been measured")
    devices = jax.devices()[::-1] if reverse else jax.devices()
    pair = jax.sharding.Mesh(np.asarray(devices), ("x",))
    lhs, rhs = draw(0, 4096, 2048), draw(1, 2048, 16384)

    def both(lhs: jax.Array, rhs: jax.Array) -> Any:
        product = all_gather_matmul(lhs, rhs, axis_name="x")
        return product, matmul_reduce_scatter(product, rhs, axis_name="x", transpose_rhs=True)

    rows, columns = P("x", None), P(None, "x")
    placed = [jax.device_put(x, NamedSharding(pair, spec)) for x, spec in ((lhs, rows), (rhs, columns))]
    call = jax.shard_map(both, mesh=pair, in_specs=(rows, columns), out_specs=(columns, rows))
    lowered = jax.jit(call).lower(*placed)
    assert ("mosaic_gpu" in lowered.as_text()) == (not reverse)
    product, back = lowered.compile()(*placed)
    near(product, lhs, rhs)
    want = np.asarray(product, np.float32) @ np.asarray(rhs, np.float32).T
    np.testing.assert_allclose(np.asarray(back, np.float32), want, atol=1e-2 * np.abs(want).max())


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
