"""Attention over a sequence that is split over all devices, by the wall clock, beside one device's time for its share.

The share is the time of one device with the whole sequence over the number of devices. Results are compared with one
device's before anything is timed. With ``--document`` the sequence is packed from documents of random lengths.
``python -m benchmarks.context_parallel``
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tilewright
from benchmarks.common import interleaved, record
from tilewright.modules import context_parallel_attention, flash_attention

ROWS = P(None, "sequence")
WHOLE = "one device's share"
LIMIT = 2e-2
"""Difference of two results, relative to the largest value: both are rounded to bfloat16 in different orders."""


def both_passes(attend: Callable[..., Any]) -> Callable[..., Any]:
    def run(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(cotangent)

    return run


def boundaries(length: int, document: int) -> np.ndarray:
    """Of documents whose mean length is about the given one."""
    cuts = np.random.default_rng(0).choice(np.arange(1, length), max(length // document, 1) - 1, replace=False)
    return np.array([0, *sorted(cuts), length], np.int32)


def causal(strategy: str, bounds: np.ndarray | None, *qkv: jax.Array) -> Any:
    packed: Any = {}
    if bounds is not None:
        ends = jnp.asarray(bounds)
        packed = {"cum_seqlens_q": ends, "cum_seqlens_k": ends}
    if strategy == WHOLE:
        return flash_attention(*qkv, causal=True, **packed)
    split: Any = context_parallel_attention
    return split(*qkv, axis_name="sequence", strategy=strategy, layout="zigzag", causal=True, **packed)


def contender(name: str, mesh: Mesh, backward: bool, bounds: np.ndarray | None) -> Any:
    """The jitted program of a strategy, or of one device with the whole sequence."""
    function: Any = functools.partial(causal, name, bounds)
    function, count = (both_passes(function), 4) if backward else (function, 3)
    if name != WHOLE:
        out = (ROWS,) * 4 if backward else ROWS
        function = jax.shard_map(function, mesh=mesh, in_specs=(ROWS,) * count, out_specs=out)
    return jax.jit(function)


def largest_difference(found: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def on_host(results: Any, shards: int) -> Any:
    """Results as float32 of the whole sequence in order; of one device if ``shards`` is 1."""
    order = (lambda x: tilewright.unzigzag(x, 1, shards)) if shards > 1 else lambda x: x
    return jax.tree.map(lambda x: np.asarray(order(jnp.asarray(np.asarray(x))), np.float32), results)


def measured(length: int, arguments: argparse.Namespace, mesh: Mesh) -> list[dict[str, Any]]:
    """The rows of one length on each device."""
    shards = mesh.size
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads)
    whole_sharding, split_sharding = SingleDeviceSharding(mesh.devices[0]), NamedSharding(mesh, ROWS)
    keys = jax.random.split(jax.random.key(0), 4)
    whole = [
        jax.device_put(
            jax.random.normal(key, (1, shards * length, n, arguments.head_dim), jnp.bfloat16), whole_sharding
        )
        for key, n in zip(keys, heads, strict=True)
    ]
    split = [jax.device_put(tilewright.zigzag(x, 1, shards), split_sharding) for x in whole]
    bounds = boundaries(shards * length, arguments.document) if arguments.document else None
    rows: list[dict[str, Any]] = []
    for direction, count in (("forward", 3), ("both", 4)):
        functions, wanted = {}, None
        for name in (WHOLE, *arguments.strategies):
            operands = (whole if name == WHOLE else split)[:count]
            functions[name] = functools.partial(contender(name, mesh, direction == "both", bounds), *operands)
            found = on_host(functions[name](), 1 if name == WHOLE else shards)
            wanted = found if wanted is None else wanted
            if (difference := largest_difference(found, wanted)) > LIMIT:
                raise ArithmeticError(f"{name} is wrong: {difference=} at {length=}, {direction=}")
        timings = interleaved(functions, arguments.rounds, calls=arguments.calls)
        share = timings[WHOLE].median / shards
        for name, timing in timings.items():
            ms = 1e3 * (share if name == WHOLE else timing.median)
            rows.append(
                {"name": name, "length": length, "direction": direction, "ms": ms, "of_share": 1e3 * share / ms,
                 "timing": timing.to_json()}
            )  # fmt: skip
            print(f"{length:7d} {direction:8s} {name:20s} {ms:9.3f} ms {100 * rows[-1]['of_share']:6.1f} %", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536], help="on each device")
    parser.add_argument("--strategies", nargs="+", default=["ring", "all_gather", "ulysses"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--document", type=int, default=0, help="mean tokens of a document; 0: one sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = [row for length in arguments.lengths for row in measured(length, arguments, mesh)]
    sizes = {name: getattr(arguments, name) for name in ("heads", "kv_heads", "head_dim", "document")}
    name = "context_parallel_packed" if arguments.document else "context_parallel"
    print(record(name, {**sizes, "causal": True, "layout": "zigzag", "rows": rows}))


if __name__ == "__main__":
    main()
