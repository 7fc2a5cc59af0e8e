"""Ops whose parameters are split over all devices, by the wall clock, beside one device with its share of them.

A loss by its vocabulary and a grouped matmul by its groups, forward and in both directions. Results are compared with
those of one device with everything before anything is timed. ``python -m benchmarks.split_parameters``
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import interleaved, queued, record
from tilewright.modules import grouped_matmul, linear_cross_entropy

AXIS = "x"
SHARE, SPLIT = "one device's share", "split"
LIMIT = 2e-2
"""Difference of two results, relative to the largest value."""
QUEUED = 8
"""Calls of a sample; only the last one is waited for."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of two arrays that are differentiated.

    Attributes:
      function: of the two arrays and an array of integers.
      specs: how the two are split.
      whole, share: for a number of devices, the arguments of all, and of one with its share.
    """

    function: Callable[..., jax.Array]
    specs: tuple[P, P]
    whole: Callable[[], tuple[jax.Array, ...]]
    share: Callable[[int], tuple[jax.Array, ...]]


def draw(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def loss(tokens: int, d: int, vocab: int) -> Call:
    """The mean loss over a vocabulary that is split."""

    def arguments(vocab: int) -> tuple[jax.Array, ...]:
        labels = jax.random.randint(jax.random.key(2), (tokens,), 0, vocab)
        return draw(0, tokens, d), draw(1, d, vocab, scale=d**-0.5), labels

    return Call(
        linear_cross_entropy, (P(), P(None, AXIS)), lambda: arguments(vocab), lambda count: arguments(vocab // count)
    )


def groups(rows: int, k: int, n: int, count: int) -> Call:
    """Rows in groups of one size, whose matrices are split."""

    def arguments(share: int) -> tuple[jax.Array, ...]:
        sizes = jnp.full(count // share, rows // count, jnp.int32)
        return draw(0, rows // share, k), draw(1, count // share, k, n, scale=k**-0.5), sizes

    return Call(grouped_matmul, (P(), P(AXIS)), lambda: arguments(1), arguments)


CALLS = {
    "loss 8192 x 4096 x 131072": loss(8192, 4096, 131072),
    "loss 32768 x 2560 x 128256": loss(32768, 2560, 128256),
    "groups 8192 x 4096 x 14336, 8": groups(8192, 4096, 14336, 8),
    "groups 16384 x 7168 x 2048, 64": groups(16384, 7168, 2048, 64),
}


def passes(function: Callable[..., jax.Array], backward: bool, first: Any, second: Any, integers: Any) -> Any:
    """The result, and gradients if ``backward``."""
    if not backward:
        return function(first, second, integers)
    out, pull = jax.vjp(lambda a, b: function(a, b, integers), first, second)
    return out, pull(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))


def measured(name: str, call: Call, mesh: Mesh, rounds: int) -> list[dict[str, Any]]:
    """The rows of a call."""
    # A mesh of one device: without any, a loss is one that XLA may split over the devices there are.
    alone = jax.sharding.Mesh(mesh.devices[:1], (AXIS,), axis_types=(AxisType.Explicit,))
    one, rows = NamedSharding(alone, P()), []
    whole, share = (jax.device_put(x, one) for x in (call.whole(), call.share(mesh.size)))
    specs = (*call.specs, P())
    split = tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(whole, specs, strict=True))
    for direction in ("forward", "both"):
        step = functools.partial(passes, call.function, direction == "both")
        with jax.set_mesh(alone):
            wanted = [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(step)(*whole))]
            of_share = jax.jit(step).lower(*share).compile()
        with jax.set_mesh(mesh):
            over_mesh = jax.jit(step).lower(*split).compile()
        found = [np.asarray(x, np.float32) for x in jax.tree.leaves(over_mesh(*split))]
        off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, wanted, strict=True))
        if not off <= LIMIT:
            raise ArithmeticError(f"{name} is wrong, split: {off}")
        functions = {SHARE: queued(of_share, share, QUEUED), SPLIT: queued(over_mesh, split, QUEUED)}
        timings = interleaved(functions, rounds)
        for kind, timing in timings.items():
            ms = 1e3 * timing.median / QUEUED
            speed = timings[SHARE].median / timing.median
            rows.append({"name": name, "direction": direction, "kind": kind, "ms": ms, "of_share": speed,
                         "queued": QUEUED, "timing": timing.to_json()})  # fmt: skip
            print(f"{name:32s} {direction:8s} {kind:20s} {ms:9.3f} ms {speed:6.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Explicit,))
    rows = [row for name in arguments.calls for row in measured(name, CALLS[name], mesh, arguments.rounds)]
    print(record("split_parameters", {"dtype": "bfloat16", "rows": rows}))


if __name__ == "__main__":
    main()
