"""What must stand before jax is imported, and the hypothesis profiles."""

import os
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

from hypothesis import HealthCheck, settings  # noqa: E402

# A first example compiles, which is slow for reasons that are not the test's.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("dev", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=500, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("TILEWRIGHT_HYPOTHESIS_PROFILE", "dev"))


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE_DIRECTORY, ignore_errors=True)
