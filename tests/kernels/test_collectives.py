"""The collectives of each op on split operands, counted in compiled programs: docs/distributed.md has this table."""

import collections
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.suites import sampled
from tilewright.modules import (
    context_parallel_attention,
    flash_attention,
    grouped_matmul,
    linear_cross_entropy,
    rms_norm,
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "distributed.md"
COLLECTIVE = re.compile(
    r"= (\([^=]*?\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
SHARDS, HEADS, ROWS = 4, 8, P(None, "s")


@dataclasses.dataclass(frozen=True)
class Split:
    """A call whose operands are split over four devices.

    Attributes:
      function: of ``operands``; its gradients are taken for those that are floating-point.
      axis_type: Explicit: the types of the operands split the call. Auto: ``function`` runs inside ``shard_map``.
      out: the spec of the result inside ``shard_map``.
    """

    function: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], P], ...]
    axis_type: AxisType = AxisType.Auto
    out: P = ROWS
    integers: tuple[tuple[int, ...], ...] = ()

    def counts(self, backward: bool) -> dict[str, int]:
        """The collectives of the forward pass, or of the backward pass alone."""
        if not backward:
            return self._counted(self.function)

        def both(*operands: Any) -> Any:
            floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

            def of_floats(*values: Any) -> Any:
                given = dict(zip(floats, values, strict=True))
                return self.function(*(given.get(i, x) for i, x in enumerate(operands)))

            out, pull = jax.vjp(of_floats, *(operands[i] for i in floats))
            return out, pull(jnp.ones_like(out))

        total, forward = self._counted(both, tuple(s for _, s in self.operands)), self.counts(False)
        return {name: total[name] - forward.get(name, 0) for name in total if total[name] > forward.get(name, 0)}

    def _counted(self, function: Callable[..., Any], gradients: tuple[P, ...] | None = None) -> dict[str, int]:
        mesh = jax.make_mesh((SHARDS,), ("s",), axis_types=(self.axis_type,), devices=jax.devices()[:SHARDS])
        structs = [
            *(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, s)) for shape, s in self.operands),
            *(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P())) for shape in self.integers),
        ]
        if self.axis_type == AxisType.Auto:
            specs = (*(spec for _, spec in self.operands), *(P() for _ in self.integers))
            out = self.out if gradients is None else (self.out, gradients)
            function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
        with jax.set_mesh(mesh):
            text = jax.jit(function).lower(*structs).compile().as_text()
        found: collections.Counter[str] = collections.Counter()
        for result, name in COLLECTIVE.findall(text):
            # XLA may sum several arrays by one all-reduce, also one of the forward and one of the backward pass.
            found[name] += result.count("[") if name == "all-reduce" else 1
        return dict(found)


def attention_operands(queries: P, keys: P) -> tuple[Any, ...]:
    shape = (1, 32, HEADS, 16)
    return ((shape, queries), (shape, keys), (shape, keys))


def over_axis(strategy: str, **options: Any) -> Split:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return context_parallel_attention(
            query, key, value, axis_name="s", strategy=strategy, layout="contiguous", causal=True, **options
        )

    return Split(attend, attention_operands(ROWS, ROWS))


def causal(query: Any, key: Any, value: Any) -> Any:
    return flash_attention(query, key, value, causal=True)


def split_loss(x: Any, weight: Any, labels: Any) -> Any:
    return linear_cross_entropy(x, weight, labels, axis_name="s")


CALLS = {
    "`flash_attention` | batch or heads": Split(
        causal, attention_operands(P(None, None, "s"), P(None, None, "s")), AxisType.Explicit
    ),
    "`flash_attention` | length of the query, beside whole keys": Split(
        causal, attention_operands(ROWS, P()), AxisType.Explicit
    ),
    "`context_parallel_attention`, ring | length": over_axis("ring"),
    "the same with a window shorter than a shard | length": over_axis("ring", sliding_window=4),
    "`context_parallel_attention`, all_gather | length": over_axis("all_gather"),
    "`context_parallel_attention`, ulysses | length": over_axis("ulysses"),
    "`grouped_matmul` | groups": Split(
        grouped_matmul, (((16, 8), P()), ((8, 8, 4), P("s"))), AxisType.Explicit, integers=((8,),)
    ),
    "`linear_cross_entropy` with `axis_name` | vocabulary": Split(
        split_loss, (((16, 8), P()), ((8, 64), P(None, "s"))), out=P(), integers=((16,),)
    ),
    "`rms_norm` | rows": Split(rms_norm, (((16, 8), P("s")), ((8,), P())), AxisType.Explicit),
}


def described(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


@pytest.mark.parametrize(
    "call", sampled(CALLS, test=CALLS, quick=["the same with a window shorter than a shard | length"])
)
def test_the_page_says_what_each_split_costs(call: str) -> None:
    forward, backward = (described(CALLS[call].counts(backward)) for backward in (False, True))
    assert f"| {call} | {forward} | {backward} |" in PAGE.read_text()


def test_the_page_has_no_other_row() -> None:
    table = PAGE.read_text().partition("| op | split | forward | backward |\n")[2].partition("\n\n")[0]
    assert [line.rsplit(" | ", 2)[0].removeprefix("| ") for line in table.splitlines()[1:]] == list(CALLS)
