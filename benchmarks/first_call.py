"""The first call of an op in a process: seconds to import it, trace, lower, compile and run its program.

Each call is made in processes of their own: "fresh", where every cache is empty, and "next", which find what that one
left on disk; each without JAX's persistent compilation cache and with it. On a machine without a GPU programs are
lowered for an H100 as a process with one lowers them, compiled if ``make aot`` has installed the compiler, and not run.

    python -m benchmarks.first_call                           # on a GPU
    JAX_PLATFORMS=cpu python -m benchmarks.first_call         # for an H100 that is not there
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The child times these imports: nothing above may import JAX.

H100 = "NVIDIA H100 80GB HBM3"
_PAGES: dict[str, Any] = {"sequences": 16, "kv_length": 2048}
CASES: dict[str, dict[str, Any]] = {
    "page_attention": _PAGES,
    "ragged_page_attention": _PAGES,
    "mla_decode": _PAGES,
    "update_pages": _PAGES,
    "rope_update_pages": _PAGES,
    "sample": {},
    "linear_sample": {"vocab": 32768},
    "rms_norm": {},
}
"""For each op what differs from its first named case for GPUs, whose arrays are large."""

STAGES = ("jax", "import", "trace", "lower", "compile", "run")
OURS = STAGES[1:]
"""Stages that a program would not have without the call."""


@dataclasses.dataclass
class Clock:
    """Seconds of the stages of one call."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def measure(op: str, small: bool) -> dict[str, Any]:
    """The first call in this process, which must not have imported JAX."""
    clock = Clock()
    with clock.stage("jax"):
        import jax
        import jax.numpy as jnp
    has_gpu = jax.default_backend() == "gpu"
    jax.block_until_ready(jnp.ones(8) + 1)  # the device's own start
    with clock.stage("import"):
        from tilewright import modules

        function = getattr(modules, op)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    program, arrays = _program(op, function, small, abstract=not has_gpu and not small)
    if has_gpu or small:
        arrays = jax.block_until_ready(jax.device_put(arrays))
        with clock.stage("trace"):
            traced = jax.jit(program).trace(*arrays)
        with clock.stage("lower"):
            lowered = traced.lower()
        with clock.stage("compile"):
            compiled = lowered.compile()
        with clock.stage("run"):
            jax.block_until_ready(compiled(*arrays))
    else:
        _on_target(clock, program, arrays)
    hits = sum(event.endswith("/cache_hits") for event in events)
    imported = [name for name in ("triton", "jax.experimental.mosaic.gpu") if name in sys.modules]
    return {"seconds": clock.seconds, "imported": imported, "cache_hits": hits}


def _program(op: str, function: Any, small: bool, abstract: bool) -> tuple[Callable[..., Any], list[Any]]:
    """A call as a function of its arrays, and these."""
    import jax

    from tilewright.kernels import kernel

    cases = kernel(op).cases
    case = cases.small
    if not small:
        case = dataclasses.replace(next(iter(cases.of_device("gpu").values())), **CASES[op])
    leaves, tree = jax.tree.flatten(case.abstract_arguments() if abstract else case.arguments())
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)]

    def program(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    return program, [leaves[i] for i in places]


def _on_target(clock: Clock, program: Callable[..., Any], structs: Sequence[Any]) -> None:
    """Lowers as a process with the device does, not as ``target_device``, under which nothing is kept on disk."""
    import jax

    import tilewright
    from tilewright.errors import TargetDeviceError
    from tilewright.ops.utils.target import traced_as

    sharding = None
    with tilewright.target_device(H100) as target, contextlib.suppress(TargetDeviceError):
        sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in structs]
    with traced_as(H100):
        with clock.stage("trace"):
            traced = jax.jit(program).trace(*placed)
        with clock.stage("lower"):
            lowered = traced.lower(lowering_platforms=("cuda",))
    if sharding is not None:
        with clock.stage("compile"):
            lowered.compile()


def in_process(op: str, caches: Path, jax_cache: bool, small: bool) -> dict[str, Any]:
    """``measure`` in an interpreter of its own that keeps its files in a folder."""
    environment = os.environ | {"TILEWRIGHT_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
    environment |= {"CUDA_CACHE_DISABLE": "1", "JAX_ENABLE_COMPILATION_CACHE": str(jax_cache).lower()}
    if jax_cache:
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(caches / "jax")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    command = [sys.executable, "-m", "benchmarks.first_call", "--child", op, *["--small"] * small]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else str(done.returncode)}
    return json.loads(done.stdout.splitlines()[-1])


def cells(op: str, rounds: int, small: bool) -> Iterator[dict[str, Any]]:
    """The call in a fresh process and in those after it, without JAX's cache and with it."""
    for jax_cache in (False, True):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
            for when, count in (("fresh", 1), ("next", rounds)):
                found = [in_process(op, Path(caches), jax_cache, small) for _ in range(count)]
                yield {"op": op, "when": when, "jax_cache": jax_cache, "processes": found}


def line(cell: dict[str, Any]) -> str:
    """The minima of a cell, which other programs disturb least, and their sum without the import of JAX."""
    name = f"{cell['op']:22} {cell['when']:5} {'with' if cell['jax_cache'] else 'without':7}"
    errors = [each["error"] for each in cell["processes"] if "error" in each]
    if errors:
        return f"{name} failed: {errors[0]}"
    rounds = [each["seconds"] for each in cell["processes"]]
    minima = {stage: min(each[stage] for each in rounds) for stage in STAGES if stage in rounds[0]}
    total = sum(seconds for stage, seconds in minima.items() if stage in OURS)
    shown = "  ".join(f"{minima[stage]:7.3f}" if stage in minima else f"{'-':>7}" for stage in STAGES)
    last = cell["processes"][-1]
    notes = [*(f"imports {each}" for each in last["imported"]), *[f"{last['cache_hits']} hits"] * cell["jax_cache"]]
    return f"{name} {shown}  {total:7.3f}  {', '.join(notes)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ops", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3, help="processes that find the caches filled")
    parser.add_argument("--small", action="store_true", help="the calls of the tests, on the device that is here")
    parser.add_argument("--out", type=Path, help="the record; results/<device>/first_call.json by default")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(measure(options.child, options.small)))
        return 0
    print(f"{'op':22} {'':5} {'JAX cache':7} {'  '.join(f'{stage:>7}' for stage in STAGES)}  {'sum':>7}  (without JAX)")
    found = []
    for op in options.ops.split(","):
        for cell in cells(op, options.rounds, options.small):
            found.append(cell)
            print(line(cell), flush=True)
    from benchmarks.common import RESULTS, device_name, environment

    out = options.out or RESULTS / device_name() / "first_call.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": "first_call", "environment": environment(), "cells": found}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {out}")
    return int(any("error" in process for cell in found for process in cell["processes"]))


if __name__ == "__main__":
    sys.exit(main())
