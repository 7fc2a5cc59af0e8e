"""The two profilers that time kernels, beside each other."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tilewright.ops import CuptiTimer, XlaTimer
from tilewright.ops.execution.timing import timer_for
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def median_ms(timer: Any, function: Any, args: Any, samples: int = 5) -> float:
    jax.block_until_ready(function(*args))
    return statistics.median(timer.sample_ms(function, args, timer.calls(function, args)) for _ in range(samples))


@pytest.fixture(scope="module")
def product() -> tuple[Any, Any]:
    """Some 5 ms of a Hopper GPU."""
    operand = jax.random.normal(jax.random.key(0), (12288, 12288), jnp.bfloat16)
    return jax.jit(jnp.matmul), (operand, operand)


def test_cupti_is_what_an_nvidia_gpu_gets():
    assert timer_for(current_device()) == CuptiTimer()


def test_both_agree_on_a_matrix_product(product: Any):
    cupti, xla = median_ms(CuptiTimer(), *product), median_ms(XlaTimer(), *product)
    assert cupti > 1.0  # or the kernels' own noise would be compared
    assert xla == pytest.approx(cupti, rel=0.1)


@pytest.mark.parametrize("kind", [CuptiTimer, XlaTimer])
def test_the_flush_is_not_counted(kind: Any, product: Any):
    with_flush, without = median_ms(kind(), *product), median_ms(kind(flushed_bytes=0), *product)
    assert with_flush == pytest.approx(without, rel=0.1)
    # Beside a kernel of some microseconds it would be all that there is.
    little = jax.jit(lambda x: x + 1), (jnp.zeros((1 << 12,)),)
    flush_ms = median_ms(kind(flushed_bytes=0), jax.jit(lambda: jnp.ones((256 << 20,), jnp.uint8)), ())
    assert median_ms(kind(), *little) < 0.5 * flush_ms


def test_a_trace_has_the_kernels_of_every_call(product: Any):
    function, args = jax.jit(lambda x: jnp.sin(x @ x) @ x), product[1][:1]
    jax.block_until_ready(function(*args))
    once, several = XlaTimer().kernels(function, args, 1), XlaTimer().kernels(function, args, 4)
    assert [[name for name, _ in each] for each in several] == [[name for name, _ in once[0]]] * 4
