"""Linear attention over a sequence that is split over all devices, by the wall clock, beside one device's share.

The share is the time of one device with the whole sequence over the number of devices. Results are compared with one
device's before anything is timed. With ``--document`` the sequence is packed from documents of random lengths. Heads
are those of Qwen3-Next by default.

  python -m benchmarks.context_parallel_linear_attention [--update add] [--document 4096]
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import interleaved, record
from benchmarks.context_parallel import WHOLE, boundaries, largest_difference, on_host
from tilewright.modules import context_parallel_linear_attention, linear_attention

TOKENS = P(None, "sequence")
SPLIT = "split"
LIMIT = 4e-2
"""Difference of two results, relative to the largest value: gradients of bfloat16 are rounded in different orders."""


def operands(length: int, arguments: argparse.Namespace) -> dict[str, jax.Array]:
    """The arrays of a call and the cotangent of its result, on one device."""

    @jax.jit
    def draw() -> dict[str, jax.Array]:
        keys = iter(jax.random.split(jax.random.key(0), 6))

        def normal(heads: int, *, dtype: Any = jnp.bfloat16, dims: tuple[int, ...] = (arguments.head_dim,)) -> Any:
            return jax.random.normal(next(keys), (1, length, heads, *dims), dtype)

        found = {"query": normal(arguments.heads), "key": normal(arguments.heads)}
        found |= {"value": normal(arguments.value_heads), "cotangent": normal(arguments.value_heads)}
        gates = [normal(arguments.value_heads, dtype=jnp.float32, dims=()) for _ in range(2)]
        found["log_decay"] = -0.1 * gates[0] ** 2
        if arguments.update == "beta":
            found["beta"] = jax.nn.sigmoid(gates[1])
        return found

    return draw()


def program(name: str, mesh: Mesh, backward: bool, bounds: Any, names: tuple[str, ...]) -> Any:
    """The jitted call of one device with the whole sequence, or of all devices."""
    options: dict[str, Any] = {"qk_l2norm": True}
    if bounds is not None:
        options["cum_seqlens"] = jnp.asarray(bounds)
    function: Callable[..., Any] = functools.partial(linear_attention, **options)
    if name == SPLIT:
        function = functools.partial(context_parallel_linear_attention, axis_name="sequence", **options)

    def run(arrays: dict[str, jax.Array]) -> Any:
        given = {name: x for name, x in arrays.items() if name != "cotangent"}
        if not backward:
            return {"out": function(**given)}
        out, pull = jax.vjp(lambda given: function(**given), given)
        return {"out": out, **pull(arrays["cotangent"])[0]}

    if name == SPLIT:
        out = dict.fromkeys(("out", *(each for each in names if each != "cotangent")) if backward else ("out",), TOKENS)
        run = jax.shard_map(run, mesh=mesh, in_specs=(dict.fromkeys(names, TOKENS),), out_specs=out)
    return jax.jit(run)


def measured(length: int, arguments: argparse.Namespace, mesh: Mesh) -> list[dict[str, Any]]:
    """The rows of one length on each device."""
    devices = mesh.size
    whole = jax.device_put(operands(devices * length, arguments), SingleDeviceSharding(mesh.devices[0]))
    split = jax.device_put(whole, NamedSharding(mesh, TOKENS))
    bounds = boundaries(devices * length, arguments.document) if arguments.document else None
    rows: list[dict[str, Any]] = []
    for direction in ("forward", "both"):
        functions, wanted = {}, None
        for name in (WHOLE, SPLIT):
            run = program(name, mesh, direction == "both", bounds, tuple(whole))
            functions[name] = functools.partial(run, whole if name == WHOLE else split)
            found = on_host(functions[name](), 1)
            wanted = found if wanted is None else wanted
            if (difference := largest_difference(found, wanted)) > LIMIT:
                raise ArithmeticError(f"{name} is wrong: {difference=} at {length=}, {direction=}")
        timings = interleaved(functions, arguments.rounds, calls=arguments.calls)
        ms = {WHOLE: 1e3 * timings[WHOLE].median / devices, SPLIT: 1e3 * timings[SPLIT].median}
        for name, timing in timings.items():
            rows.append(
                {"name": name, "length": length, "direction": direction, "ms": ms[name],
                 "speedup": devices * ms[WHOLE] / ms[name], "timing": timing.to_json()}
            )  # fmt: skip
            speedup = f"{rows[-1]['speedup']:.2f} x one device" if name == SPLIT else ""
            print(f"{length:7d} {direction:8s} {name:20s} {ms[name]:9.3f} ms {speedup}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="on each device")
    parser.add_argument("--update", choices=["beta", "add"], default="beta", help="a delta rule, or sums")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--document", type=int, default=0, help="mean tokens of a document; 0: one sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = [row for length in arguments.lengths for row in measured(length, arguments, mesh)]
    sizes = {name: getattr(arguments, name) for name in ("update", "heads", "value_heads", "head_dim", "document")}
    print(record("context_parallel_linear_attention", {**sizes, "devices": mesh.size, "rows": rows}))


if __name__ == "__main__":
    main()
