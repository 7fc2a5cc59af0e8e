"""The two profilers that time kernels, beside each other: each in a process of its own, as tuning has it."""

import concurrent.futures
import functools
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tilewright.ops import CuptiTimer, XlaTimer
from tilewright.ops.tuning.profilers import shares_cupti
from tilewright.ops.tuning.timing import KernelTimer, timer_for
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@functools.cache
def product() -> tuple[Any, Any]:
    """Some 5 ms of a Hopper GPU."""
    operand = jax.random.normal(jax.random.key(0), (12288, 12288), jnp.bfloat16)
    return jax.jit(jnp.matmul), (operand, operand)


def median_ms(timer: KernelTimer, function: Any, args: Any, samples: int = 5) -> float:
    jax.block_until_ready(function(*args))
    return statistics.median(timer.sample_ms(function, args, timer.calls(function, args)) for _ in range(samples))


def product_ms(timer: KernelTimer) -> float:
    return median_ms(timer, *product())


def little_ms(timer: KernelTimer) -> float:
    return median_ms(timer, jax.jit(lambda x: x + 1), (jnp.zeros((1 << 12,)),))


def median_of_little() -> float:
    return little_ms(XlaTimer())


def fill_ms(timer: KernelTimer) -> float:
    return median_ms(timer, jax.jit(lambda: jnp.ones((256 << 20,), jnp.uint8)), ())


def names_of_kernels(calls: int) -> list[list[str]]:
    function, args = jax.jit(lambda x: jnp.sin(x @ x) @ x), product()[1][:1]
    jax.block_until_ready(function(*args))
    return [[name for name, _ in each] for each in XlaTimer().kernels(function, args, calls)]


def cupti_after_xla() -> str:
    """What CUPTI's timer says in a process that XLA's profiler was used in."""
    first = product_ms(XlaTimer())
    try:
        return f"agrees: {product_ms(CuptiTimer()) == pytest.approx(first, rel=0.1)}"
    except RuntimeError as error:
        return str(error)


type Apart = Callable[..., Any]


@pytest.fixture(scope="module")
def apart() -> Iterator[dict[str, Apart]]:
    """What calls a function in the process of a profiler."""
    spawning = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        with (
            concurrent.futures.ProcessPoolExecutor(1, spawning) as cupti,
            concurrent.futures.ProcessPoolExecutor(1, spawning) as xla,
        ):
            yield {
                "cupti": lambda function, *args: cupti.submit(function, *args).result(),
                "xla": lambda function, *args: xla.submit(function, *args).result(),
            }


TIMERS = {"cupti": CuptiTimer, "xla": XlaTimer}


def suited() -> KernelTimer:
    return timer_for(current_device())


def test_cupti_is_what_an_nvidia_gpu_gets_where_nobody_traces(apart: dict[str, Apart]):
    assert apart["cupti"](suited) == CuptiTimer()
    assert apart["xla"](median_of_little) > 0  # which traces
    assert apart["xla"](suited) == (CuptiTimer() if apart["xla"](shares_cupti) else XlaTimer())


def test_both_agree_on_a_matrix_product(apart: dict[str, Apart]):
    times = {name: run(product_ms, TIMERS[name]()) for name, run in apart.items()}
    assert times["cupti"] > 1.0  # or the kernels' own noise would be compared
    assert times["xla"] == pytest.approx(times["cupti"], rel=0.1)


@pytest.mark.parametrize("name", sorted(TIMERS))
def test_the_flush_is_not_counted(name: str, apart: dict[str, Apart]):
    run, timer = apart[name], TIMERS[name]
    assert run(product_ms, timer()) == pytest.approx(run(product_ms, timer(flushed_bytes=0)), rel=0.1)
    # Beside a kernel of some microseconds it would be all that there is.
    assert run(little_ms, timer()) < 0.5 * run(fill_ms, timer(flushed_bytes=0))


def test_a_trace_has_the_kernels_of_every_call(apart: dict[str, Apart]):
    (once,), several = (apart["xla"](names_of_kernels, calls) for calls in (1, 4))
    assert several == [once] * 4


def test_cupti_after_xlas_profiler_never_ends_the_process(apart: dict[str, Apart]):
    said = apart["xla"](cupti_after_xla)
    assert said == "agrees: True" or "XLA's profiler was used in this process" in said


PRELUDE = """
import pathlib, sys, tempfile
import jax, jax.numpy as jnp
if "late" in sys.argv:
    jnp.ones(3) + 1
from jax._src.lib import _profiler
from tests.ops.kernel.samples import Product, operands
from tilewright.ops import Autotuner, ConfigSelectorChain, CuptiTimer, Invocation, Tuner
from tilewright.ops.tuning.timing import gpu_kernels, timer_for
from tilewright.ops.utils.device import current_device

def work():
    return jax.block_until_ready(jax.jit(lambda x: jnp.sin(x @ x) @ x)(jnp.ones((1024, 1024))))

def tune():
    tuner = Tuner(1, 3, isolation=sys.argv[1])
    (call,) = Autotuner(tuner, chooser=ConfigSelectorChain()).tune(Invocation(Product("tests.gpu.timing"), OPERANDS))
    print("timed", timer_for(current_device()), call.winner.time_ms)
    assert call.winner.time_ms > 0

def cupti():
    try:
        print("cupti", CuptiTimer().sample_ms(jax.jit(lambda x: x @ x), (jnp.ones((1024, 1024)),), 1))
    except RuntimeError as error:
        print("refused", error)

def trace(inside=lambda: None):
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
            inside()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        found = gpu_kernels(jax.profiler.ProfileData.from_file(str(file)))
    assert found, "a user's own trace has no kernel"
    print("traced", len(found))

OPERANDS = operands((1024, 1024), (1024, 1024))
"""

BESIDE = {
    "nothing else": "tune(); cupti()",
    "traces, then tunes": "trace(); tune(); cupti()",
    "tunes inside of a trace": "trace(tune); trace(cupti)",
    "tunes, then traces": "tune(); cupti(); trace()",
    "again and again": "trace(); tune(); trace(); tune(); cupti(); trace()",
    "a server": "jax.profiler.start_server(0); tune(); cupti(); jax.profiler.stop_server(); trace()",
    "a session that jax.profiler does not know of": """
session = _profiler.ProfilerSession(jax.profiler.ProfileOptions())
tune(); cupti()
session.stop()
tune(); trace()
""",
}


@pytest.mark.parametrize("imported", ["early", "late"])
@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("case", BESIDE)
def test_beside_a_users_own_profiler(case: str, isolation: str, imported: str):
    """Whatever the user does with XLA's profiler, the process goes on, tuning has a time, and traces have kernels."""
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}\n{BESIDE[case]}\nprint('the end')", isolation, imported],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    print(f"{case}, {isolation}, {imported}: {done.stdout}")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "the end"
