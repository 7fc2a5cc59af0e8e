"""Environment to set before importing jax, the suites, the hypothesis profiles, and a cap on JAX's caches."""

import gc
import itertools
import os
import pathlib
import shutil
import sys
import tempfile


def _environment(full: bool) -> None:
    """Sets what jax reads once, when it is imported or its backend starts; the processes of xdist inherit it."""
    flags = ["--xla_force_host_platform_device_count=8"]  # let a CPU run what is sharded
    if not full:
        # Most of a test's time is LLVM's, a third of that its optimisations: `make test-full` has them, as users do.
        flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
        # Programs are compiled once for all processes of a run, and not again by the next run: all but those with
        # callbacks, which are what is interpreted.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / ".jax_cache"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    given = os.environ.get("XLA_FLAGS", "").split()
    known = {flag.partition("=")[0] for flag in given}
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in flags if flag.partition("=")[0] not in known)])


if "PYTEST_XDIST_WORKER" not in os.environ:
    # pytest has not parsed its arguments yet.
    _environment(any("=".join(pair).startswith("--suite=full") for pair in itertools.pairwise([*sys.argv, ""])))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each process has its own: the user's tuned configs must not decide a test, nor a test write among them. What the user
# said is for the processes that pytest starts, too.
os.environ.setdefault("TILEWRIGHT_USERS_CACHE_DIR", os.environ.get("TILEWRIGHT_CACHE_DIR", ""))
_CACHE_DIRECTORY = tempfile.mkdtemp(prefix="tilewright-tests-")
os.environ["TILEWRIGHT_CACHE_DIR"] = _CACHE_DIRECTORY
for _name in ("TILEWRIGHT_AGREE", "TILEWRIGHT_AUTOTUNE", "TILEWRIGHT_LOCK", "TILEWRIGHT_LOCK_MISS"):
    os.environ.pop(_name, None)

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support.progress import Progress  # noqa: E402
from tests.support.suites import SUITES, runs  # noqa: E402

# A first example compiles, which is slow for reasons that are not the test's.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, database=None, **_COMMON)
settings.register_profile("full", max_examples=100, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("TILEWRIGHT_HYPOTHESIS_PROFILE", "dev"))


# A compiled program takes several memory mappings. Linux allows a process 65530; at the next one LLVM ends it. The
# caches of JAX keep every program, and these tests make enough of them.
_MAX_MAPPINGS = 25_000
_TESTS_BETWEEN_LOOKS = 20
_tests = itertools.count(1)


def pytest_runtest_teardown() -> None:
    # Tests have kernels of one name that no program would have beside each other.
    if (names := sys.modules.get("tilewright.ops.kernel.names")) is not None:
        names._OWNERS.clear()
    # And some change the code of a kernel, or what it is lowered with.
    if (memory := sys.modules.get("tilewright.ops.utils.memory")) is not None:
        memory.clear_all()
    mappings = pathlib.Path("/proc/self/maps")
    if next(_tests) % _TESTS_BETWEEN_LOOKS == 0 and mappings.exists():
        with mappings.open("rb") as lines:
            full = sum(1 for _ in lines) > _MAX_MAPPINGS
        if full:
            jax.clear_caches()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", choices=SUITES, help="which tests run; all of those given if none is named")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.get_verbosity() <= 0:
        config.pluginmanager.register(Progress(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (suite := config.getoption("--suite")) is not None:
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[runs(item.nodeid, suite)].append(item)
        config.hook.pytest_deselected(items=parts[False])
        items[:] = parts[True]
    items[:] = _cases_together(items)


def _cases_together(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same order, but a case of a conformance suite comes for all backends at once.

    One process then runs it for all, which compiles its oracle once: the first that meets it keeps it.
    """
    first: dict[tuple[str, str, str], int] = {}
    place = {}
    for index, item in enumerate(items):
        function, callspec = getattr(item, "function", None), getattr(item, "callspec", None)
        place[item] = index
        if callspec is not None and function is not None:
            place[item] = first.setdefault((function.__module__, function.__qualname__, callspec.id), index)
    return sorted(items, key=place.__getitem__)


def pytest_collection_finish() -> None:
    """Collects garbage seldom, and never what is imported: a tenth of the time of tests that trace a lot."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or nanobind would report what is left at the interpreter's end


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE_DIRECTORY, ignore_errors=True)
