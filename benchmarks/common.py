"""What every benchmark shares: the environment's description, side-by-side timing, and the record on disk."""

import dataclasses
import datetime
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The samples of one function, in seconds, in the order they were taken."""

    samples: tuple[float, ...]

    @property
    def minimum(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, Any]:
        """Minimum, median and quartiles, the samples with them."""
        lower, _, upper = statistics.quantiles(self.samples, n=4) if len(self.samples) > 1 else (self.minimum,) * 3
        return {
            "unit": "s",
            "minimum": self.minimum,
            "median": self.median,
            "quartiles": [lower, upper],
            "samples": list(self.samples),
        }


def interleaved(
    functions: Mapping[str, Callable[[], Any]], rounds: int, *, warmup: int = 2, calls: int = 1
) -> dict[str, Timing]:
    """Times the functions in turn, so that whatever else the machine does disturbs all of them alike.

    Every second round goes through them backwards. A sample is the mean of ``calls`` calls in a row; what each call
    returns is waited for.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(warmup):
            jax.block_until_ready(function())
    names = list(functions)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            function = functions[name]
            start = time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(function())
            samples[name].append((time.perf_counter() - start) / calls)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def queued(program: Callable[..., Any], operands: Sequence[Any], calls: int) -> Callable[[], Any]:
    """A function that queues this many calls of a program and returns the last one's result."""

    def run() -> Any:
        for _ in range(calls - 1):
            program(*operands)
        return program(*operands)

    return run


def processor_name() -> str:
    """The processor's name as its vendor writes it, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """The processors this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def device_name() -> str:
    """A folder's name for the device that jax runs on."""
    device = jax.devices()[0]
    name = f"cpu {processor_name()} {usable_cores()} cores" if device.platform == "cpu" else device.device_kind
    return re.sub(r"(\(\w+\)|[^a-z0-9])+", "-", name.lower()).strip("-")


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def memory_rates(size: int, seconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Bytes per second that kernels of XLA read, and read and write, of an array of so many bytes.

    Args:
      seconds: the time of a call.
    """
    x, found = jnp.ones((size >> 16, 1 << 15), jnp.bfloat16), {}
    programs: dict[str, tuple[int, Callable[[Any], Any]]] = {
        "read": (1, lambda x: x.max(1)),
        "copied": (2, lambda x: x + 1),
    }
    for name, (times, function) in programs.items():
        run = functools.partial(jax.jit(function), x)
        jax.block_until_ready(run())
        found[name] = times * x.nbytes / seconds(run)
    return found


def recorded(file: Path) -> Any:
    """A record with the names that backends have now: before version 0.2 platforms were a part of them."""
    return json.loads(file.read_text().replace("cuda:", "").replace('"pallas', '"hopper'))


def environment() -> dict[str, Any]:
    """Where and with what a benchmark ran; JSON values only."""
    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cores": usable_cores(),
        "load_average": list(os.getloadavg()),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "backend_version": device.client.platform_version,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_enable_x64": bool(jax.config.jax_enable_x64),
    }


def record(name: str, data: Mapping[str, Any]) -> Path:
    """Writes ``data`` beside the environment to results/<device>/<name>.json and returns the file's path."""
    file = RESULTS / device_name() / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"benchmark": name, "environment": environment(), **data}, indent=1) + "\n")
    return file
