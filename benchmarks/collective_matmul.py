"""Matmuls with a gather before or a sum after, on all devices, by the wall clock beside the same matmul on one device.

Calls are queued, as in a program of many, and each strategy's result is compared with that of plain collectives before
anything is timed. ``python -m benchmarks.collective_matmul``
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import Timing, interleaved, queued, record
from tilewright.modules import all_gather_matmul, matmul, matmul_reduce_scatter

ALONE = "matmul alone"
ROWS, COLUMNS = P("x", None), P(None, "x")
OPS: dict[str, tuple[Callable[..., Any], P, P, P]] = {
    "gather": (all_gather_matmul, ROWS, COLUMNS, COLUMNS),
    "scatter": (matmul_reduce_scatter, COLUMNS, ROWS, ROWS),
}
SHAPES = {
    "gather": [
        (2048, 4096, 4096), (2048, 4096, 14336), (4096, 4096, 14336), (8192, 8192, 28672), (16384, 8192, 28672),
    ],
    "scatter": [
        (2048, 4096, 4096), (2048, 14336, 4096), (4096, 14336, 4096), (8192, 28672, 8192), (16384, 28672, 8192),
    ],
}  # fmt: skip
"""Rows, k and n of the whole."""

LIMIT = 1e-2
"""Difference of two results relative to the largest value: both are rounded to bfloat16 once."""

QUEUED_SECONDS = 0.02
"""Approximate duration of one sample."""

FLOPS = 700e12


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program of one strategy, or of one device without communication, and its operands."""

    op: str
    shape: tuple[int, int, int]
    name: str
    lowered: Any
    operands: list[Any]


def contenders(op: str, shape: tuple[int, int, int], names: Iterable[str], mesh: Mesh) -> list[Contender]:
    """Lowers the programs of a shape."""
    function, *specs = OPS[op]
    m, k, n = shape
    keys = jax.random.split(jax.random.key(m + n), 4)
    whole, shares = [(m, k), (k, n)], mesh.size
    alone = [(m, k), (k, n // shares)] if op == "gather" else [(m, k // shares), (k // shares, n)]
    split = [
        jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, spec))(
            key, size, jnp.bfloat16
        )
        for key, size, spec in zip(keys, whole, specs, strict=False)
    ]
    one = SingleDeviceSharding(mesh.devices[0])
    single = [
        jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=one)(key, size, jnp.bfloat16)
        for key, size in zip(keys[2:], alone, strict=True)
    ]
    found = [Contender(op, shape, ALONE, jax.jit(matmul).lower(*single), single)]
    for name in names:

        def on_device(lhs: jax.Array, rhs: jax.Array, name: str = name) -> Any:
            return function(lhs, rhs, axis_name="x", strategy=name)

        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=tuple(specs[:2]), out_specs=specs[2])
        found.append(Contender(op, shape, name, jax.jit(mapped).lower(*split), split))
    return found


@jax.jit
def difference(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest difference over the largest value."""
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted))


def measured(each: list[Contender], programs: list[Any], rounds: int) -> list[dict[str, Any]]:
    """The rows of one shape."""
    op, shape = each[0].op, each[0].shape
    results = {one.name: program(*one.operands) for one, program in zip(each, programs, strict=True)}
    for name, result in results.items():
        if name != ALONE and not (off := float(difference(result, results["collective"]))) <= LIMIT:
            raise ArithmeticError(f"{name} of {op} is wrong at {shape}: {off}")
    del results
    m, k, n = shape
    flops = 2.0 * m * k * n / jax.device_count()
    calls = max(2, min(40, round(QUEUED_SECONDS * FLOPS / flops)))
    functions = {one.name: queued(program, one.operands, calls) for one, program in zip(each, programs, strict=True)}
    timings = {
        name: Timing(tuple(sample / calls for sample in timing.samples))
        for name, timing in interleaved(functions, rounds).items()
    }
    alone = timings[ALONE].median
    rows = []
    for name, timing in timings.items():
        row = {
            "op": op, "m": m, "k": k, "n": n, "name": name, "ms": 1e3 * timing.median, "queued": calls,
            "of_alone": alone / timing.median, "tflops": flops / timing.median / 1e12, "timing": timing.to_json(),
        }  # fmt: skip
        print(f"{op:8s} {shape!s:22s} {name:14s} {row['ms']:8.3f} ms {row['of_alone']:6.3f} of alone", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--strategies", nargs="+", default=["collective", "ring", "remote"])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = []
    with ThreadPoolExecutor() as pool:
        for op in arguments.ops:
            for shape in SHAPES[op]:
                found = contenders(op, shape, arguments.strategies, mesh)
                rows += measured(found, list(pool.map(lambda one: one.lowered.compile(), found)), arguments.rounds)
    print(record("collective_matmul", {"dtype": "bfloat16", "rows": rows}))


if __name__ == "__main__":
    main()
