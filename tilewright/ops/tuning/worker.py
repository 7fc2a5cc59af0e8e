"""The worker process of `isolation`: ``python -m tilewright.ops.tuning.worker FD``."""

import dataclasses
import gc
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.config.memory import ConfigCache
from tilewright.ops.config.persistent import PersistentCache
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.tuning.bench import CandidateError, LocalBench, failure, local_bench
from tilewright.ops.tuning.isolation import Task
from tilewright.ops.tuning.workload import forward_of


def main() -> None:
    # The parent has selected already, and the environment's lock may be the one that is being made.
    for name in ("TILEWRIGHT_LOCK", "TILEWRIGHT_LOCK_MISS"):
        os.environ.pop(name, None)
    connection = Connection(int(sys.argv[1]))
    is_healthy()  # the first program on the device takes seconds, in which the parent does other work
    bench: LocalBench | None = None
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        if name != "begin":
            assert bench is not None
            connection.send(("ok", answer(bench, name, *arguments), held_bytes()))
            continue
        try:
            if bench is not None:
                bench.close()
                bench = None  # drop its arrays before those of the next task are made
                jax.clear_caches()
                gc.collect()
            bench = bench_of(pickle.loads(arguments[0]))
        except Exception as error:  # the parent reports any error
            connection.send(("broken", failure(error), held_bytes()))
            return
        connection.send(("ok", None, held_bytes()))


def bench_of(task: Task) -> LocalBench:
    for name, value in task.settings.items():
        jax.config.update(name, value)
    device = task.inv.target
    device_name = jax.devices()[0].device_kind
    if device.present and device.name not in (device_name, "cpu"):
        raise RuntimeError(f"the call is for {device.name}, and this process has {device_name}")
    cache = ConfigCache()
    chain = ConfigSelectorChain(cache, PersistentCache())
    if task.forward is not None:
        cache.put(forward_of(task.inv).key, task.forward, origin="autotune")
    return local_bench(
        task.inv, chain, task.configs, inputs=task.inputs, timer=task.timer, warmup=task.warmup, verify=task.verify
    )


def answer(bench: LocalBench, name: str, *arguments: Any) -> Any:
    match name:
        case "expect":
            return bench.expect(*arguments)
        case "start":
            trial = bench.start(*arguments)
            # An exception may hold anything and may not survive pickling; its message is kept.
            return dataclasses.replace(trial, exception=None)
        case "sample_ms" | "recheck":
            try:
                return "", getattr(bench, name)(*arguments)
            except CandidateError as error:
                return str(error), None
        case "healthy":
            return is_healthy()
    raise ValueError(f"{name=} is no request")


def is_healthy() -> bool:
    """True if the device still computes, which it does not in a process after an illegal address."""
    try:
        return float(jax.jit(lambda x: (x + 1).sum())(jnp.arange(4.0))) == 10.0
    except Exception:  # an error means no
        return False


def held_bytes() -> int:
    """Memory of this process, plus that of the device if it is reported."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    statistics = jax.devices()[0].memory_stats() or {}
    return held + int(statistics.get("bytes_in_use", 0))


if __name__ == "__main__":
    main()
