"""What choosing the config of one call costs, as every trace pays it: from memory, from disk, by heuristic.

``python -m benchmarks.selection_cost``
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import interleaved, record
from benchmarks.trivial import Scale
from tilewright.modules import FlashAttention
from tilewright.ops import ConfigCache, ConfigSelectorChain, Invocation, PersistentCache
from tilewright.ops.kernel.prepared import prepared

CALLS = 20


def invocations() -> dict[str, Invocation[Any, Any]]:
    """The calls whose selection is timed."""
    shape = jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.float32)
    return {
        "trivial kernel": prepared(Scale(), (jax.ShapeDtypeStruct((8,), jnp.float32),), {}, concrete=False)[0],
        "flash_attention": prepared(FlashAttention(), (shape, shape, shape), {"causal": True}, concrete=False)[0],
    }


def subjects(inv: Invocation[Any, Any], folder: str) -> dict[str, Callable[[], Any]]:
    """One function for each source of a config; each starts, as a trace does, from a key that is not built yet."""

    def fresh() -> Invocation[Any, Any]:
        return dataclasses.replace(inv)

    heuristic = inv.kernel.heuristic_cfg(inv)
    in_memory = ConfigSelectorChain(ConfigCache())
    in_memory.cache.put(inv.key, heuristic, origin="autotune")
    on_disk = ConfigSelectorChain(ConfigCache(), PersistentCache(folder))
    on_disk.store(inv, heuristic, (), 1.0, True)
    read = ConfigSelectorChain(ConfigCache(), PersistentCache(folder))
    empty = ConfigSelectorChain(ConfigCache())
    expected = {"memory": in_memory, "disk": read, "heuristic": empty}
    for step, chain in expected.items():
        if chain.lookup(inv).step != step:
            raise RuntimeError(f"{chain.lookup(inv).step=} instead of {step!r} for {inv.kernel!r}")
    # lookup is choose without the remembering, so a disk hit stays one.
    return {
        "key": lambda: fresh().key,
        "memory": lambda: in_memory.lookup(fresh()),
        "disk": lambda: read.lookup(fresh()),
        "heuristic": lambda: empty.lookup(fresh()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    said = {}
    for name, inv in invocations().items():
        with tempfile.TemporaryDirectory() as folder:
            timings = interleaved(subjects(inv, folder), rounds, calls=CALLS)
        for step, timing in timings.items():
            print(f"{name:16} {step:10} median {timing.median * 1e6:8.1f} µs   minimum {timing.minimum * 1e6:8.1f} µs")
        said[name] = {step: timing.to_json() for step, timing in timings.items()}
    print(f"written to {record('selection_cost', {'calls_per_sample': CALLS, 'subjects': said})}")


if __name__ == "__main__":
    main()
