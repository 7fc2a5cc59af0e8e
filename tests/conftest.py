"""What must stand before jax is imported, the hypothesis profiles, and a limit to what JAX keeps."""

import itertools
import os
import pathlib
import shutil
import tempfile

# Eight devices let a CPU run what is sharded; jax reads the flag once, when its backend starts.
_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each process has its own: the user's tuned configs must not decide a test, nor a test write among them. What the user
# said is for the processes that pytest starts, too.
os.environ.setdefault("TILEWRIGHT_USERS_CACHE_DIR", os.environ.get("TILEWRIGHT_CACHE_DIR", ""))
_CACHE_DIRECTORY = tempfile.mkdtemp(prefix="tilewright-tests-")
os.environ["TILEWRIGHT_CACHE_DIR"] = _CACHE_DIRECTORY
for _name in ("TILEWRIGHT_AUTOTUNE", "TILEWRIGHT_LOCK", "TILEWRIGHT_LOCK_MISS"):
    os.environ.pop(_name, None)

import jax  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# A first example compiles, which is slow for reasons that are not the test's.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=500, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("TILEWRIGHT_HYPOTHESIS_PROFILE", "dev"))


# A compiled program is several mappings of memory, of which Linux gives a process 65530; at the next one LLVM ends it.
# The caches of JAX keep every program, and these tests make enough of them.
_MOST_MAPPINGS = 25_000
_TESTS_BETWEEN_LOOKS = 20
_tests = itertools.count(1)


def pytest_runtest_teardown() -> None:
    mappings = pathlib.Path("/proc/self/maps")
    if next(_tests) % _TESTS_BETWEEN_LOOKS == 0 and mappings.exists():
        with mappings.open("rb") as lines:
            full = sum(1 for _ in lines) > _MOST_MAPPINGS
        if full:
            jax.clear_caches()


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE_DIRECTORY, ignore_errors=True)
