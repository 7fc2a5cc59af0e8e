"""What ``tilewright info`` shows."""

import platform
from collections.abc import Iterator

import jax

from tilewright import __version__
from tilewright.cli.output import stdout, table
from tilewright.kernels import OPS, kernel
from tilewright.kernels.cuda_build.toolchain import find_compiler, missing
from tilewright.kernels.portfolio import implementation_name
from tilewright.ops import PersistentCache
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.fingerprint import toolchain_fingerprint


def print_inventory() -> None:
    """Prints one table of facts and one of backends."""
    console = stdout()
    facts = table("tilewright", "what", "value")
    for name, value in inventory():
        facts.add_row(name, value)
    console.print(facts)
    backends = table("backends", "op", "backend", "can be loaded")
    for row in backend_rows():
        backends.add_row(*row)
    console.print(backends)


def inventory() -> Iterator[tuple[str, str]]:
    """The device and the versions, by name."""
    device = current_device()
    capability = "" if device.capability is None else " (compute capability {}.{})".format(*device.capability)
    yield "tilewright", __version__
    yield "python", platform.python_version()
    yield "device", f"{device.name}{capability}, {jax.local_device_count()} of kind {device.kind}"
    yield "cache key's device", device.fingerprint
    yield from ((f"toolchain: {name}", version) for name, version in toolchain_fingerprint().items())
    compiler = find_compiler()
    yield "CUDA compiler", "; ".join(missing(None)) or (compiler.identity if compiler else "")
    cache = PersistentCache()
    yield "persistent cache", f"{cache.path} ({len(cache)} entries)"


def backend_rows() -> Iterator[tuple[str, str, str]]:
    """Op, backend, and "yes" or the reason why not."""
    for name in OPS:
        for lazy in kernel(name).implementations:
            if lazy.load_error:
                yield name, lazy.module_name, f"no: {lazy.load_error}"
            else:
                loaded = lazy.load()
                yield name, implementation_name(loaded.platform, loaded.algorithm), "yes"
