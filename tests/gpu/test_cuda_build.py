"""CUDA C++ kernels on a GPU: the RMSNorm example, and what the launcher does with memory, attributes and errors."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_rms_norm.rms_norm import DTYPES, KERNEL, problem_of, rms_norm, xla_rms_norm

from tests.support.row_sum import row_sum_table
from tilewright.kernels.cuda import BuildCache, CudaKernel
from tilewright.kernels.cuda.devices import capability_of, device_values
from tilewright.kernels.cuda.toolchain import missing
from tilewright.ops.utils.device import current_device

REASONS = ["needs a GPU"] if jax.default_backend() != "gpu" else missing(capability_of(current_device()))
pytestmark = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))


@pytest.fixture(scope="module")
def row_sum(tmp_path_factory: pytest.TempPathFactory) -> CudaKernel:
    folder: Path = tmp_path_factory.mktemp("row_sum")
    return CudaKernel(row_sum_table(folder), BuildCache(folder / "builds"))


def call(kernel: CudaKernel, x: jax.Array, bias: jax.Array, variant: Any = None, **change: Any) -> jax.Array:
    problem = {"rows": x.shape[0], "width": x.shape[1]}
    variant = variant or kernel.select(problem, current_device())[0]
    attributes = {"scale": np.float32(2), "offset": np.int64(5)}
    outputs = [jax.ShapeDtypeStruct((x.shape[0],), np.float32)]
    given = {name: value for name, value in attributes.items() if name not in change.get("without", ())}
    return kernel.call(variant, problem | change.get("problem", {}), current_device(), [x, bias], outputs, given)[0]


@pytest.mark.parametrize("width", [7, 256, 5000, 15 << 10, 16 << 10])
@pytest.mark.parametrize("biased", [False, True])
def test_shared_memory_workspace_attributes_and_absent_arrays(row_sum: CudaKernel, width: int, biased: bool) -> None:
    x = jax.random.normal(jax.random.key(width), (12, width))
    bias = jnp.arange(12.0) if biased else jnp.zeros((0,))
    function = jax.jit(lambda x, bias: call(row_sum, x, bias))
    wanted = 2 * np.asarray(x, np.float64).sum(1) + 5 + (np.arange(12.0) if biased else 0)
    for _ in range(3):
        np.testing.assert_allclose(function(x, bias), wanted, rtol=1e-4, atol=1e-3)


def test_many_calls_in_one_program(row_sum: CudaKernel) -> None:
    """Enough of them for XLA to capture the program as a command buffer."""

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        return sum(call(row_sum, x + i, jnp.zeros((0,))) for i in range(20))  # type: ignore[return-value]

    x = jnp.ones((3, 64))
    for _ in range(4):
        np.testing.assert_allclose(function(x), sum(2 * 64 * (1 + i) + 5 for i in range(20)))


def test_every_device_of_the_process(row_sum: CudaKernel) -> None:
    for device in jax.local_devices():
        x = jax.device_put(jnp.ones((4, 15 << 10)), device)
        got = jax.jit(lambda x, bias: call(row_sum, x, bias))(x, jax.device_put(jnp.zeros((0,)), device))
        assert got.devices() == {device}
        np.testing.assert_allclose(got, 2 * (15 << 10) + 5)


def test_the_launcher_checks_the_requirements_again(row_sum: CudaKernel) -> None:
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"shared1024: width must be at most 256 \(rows=2, width=300\)"
    ):
        call(row_sum, jnp.ones((2, 300)), jnp.zeros((0,)), row_sum.table.variants[0]).block_until_ready()


def test_a_missing_attribute_is_an_error(row_sum: CudaKernel) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match='no attribute "offset"'):
        call(row_sum, jnp.ones((2, 8)), jnp.zeros((0,)), without=("offset",)).block_until_ready()


def test_an_error_of_cuda_is_an_error_of_the_call_and_does_not_stick(row_sum: CudaKernel) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="MaxDynamicSharedMemorySize"):
        call(row_sum, jnp.ones((2, 8)), jnp.zeros((0,)), row_sum.table.variants[-1]).block_until_ready()
    np.testing.assert_allclose(call(row_sum, jnp.ones((2, 8)), jnp.zeros((0,))), 21)


def test_the_table_of_devices_agrees_with_this_one() -> None:
    device = current_device()
    said = getattr(jax.devices()[0], "shared_memory_per_block_optin", None)
    known = device_values(device)
    assert known is not None
    assert known["multiprocessors"] > 0
    if said is not None:
        assert known["shared_memory"] == said


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1024), (2, 3, 1022), (7, 4096), (3, 2048), (300, 16384), (9, 777), (4, 1)])
def test_rms_norm(dtype: str, shape: tuple[int, ...]) -> None:
    x = 3 * jax.random.normal(jax.random.key(0), shape, dtype)
    weight = jax.random.normal(jax.random.key(1), shape[-1:], dtype)
    assert KERNEL.select(problem_of(x), current_device())[0] is not None
    got, wanted = jax.jit(rms_norm)(x, weight), xla_rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32))
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=tolerance, atol=tolerance)


def test_gradients_of_rms_norm() -> None:
    x, weight = jax.random.normal(jax.random.key(0), (6, 256)), jnp.linspace(0.5, 2, 256)
    ours = jax.grad(lambda *a: (rms_norm(*a) ** 2).sum(), (0, 1))(x, weight)
    theirs = jax.grad(lambda *a: (xla_rms_norm(*a) ** 2).sum(), (0, 1))(x, weight)
    for got, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
