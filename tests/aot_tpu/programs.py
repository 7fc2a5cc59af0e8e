"""Programs of ops, as `report` has them made: calls in both directions, and calls split over a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.aot_tpu import kernels
from tests.every_op.matrix import OpCall
from tilewright.kernels import kernel
from tilewright.modules import (
    all_gather_matmul,
    context_parallel_attention,
    context_parallel_page_attention,
    flash_attention,
    gated_grouped_matmul,
    glu,
    grouped_matmul,
    linear_cross_entropy,
    matmul_reduce_scatter,
    moe_mlp,
    page_attention,
)
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.target import Target


def call(op: str) -> tuple[Any, Any]:
    """An op's small call in bfloat16, with all gradients if it has any."""
    case = dataclasses.replace(kernel(op).cases.small, dtype="bfloat16")
    return OpCall(op, *case.abstract_arguments()).training()


def devices_of_slice(tpu: str) -> int:
    """Devices of four chips: two of each chip of v7x."""
    return 8 if tpu == "TPU7x" else 4


@dataclasses.dataclass(frozen=True)
class Split:
    """A call whose operands are split over the axis "x", over "y" of two devices, or over both.

    Attributes:
      axis_type: Explicit: types split the call; Auto: the partitioner does; Manual: ``function`` runs in ``shard_map``.
      out: the spec of the result inside ``shard_map``.
      dtype: of floating-point operands; those with one dimension are int32.
      inference: True if there is no backward pass.
    """

    function: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], P], ...]
    axis_type: AxisType = AxisType.Manual
    out: Any = None
    integers: tuple[tuple[tuple[int, ...], P], ...] = ()
    inference: bool = False

    def program(self, target: Target) -> tuple[Any, Any, Any]:
        """The call with its gradients, its operands and its mesh."""
        is_manual = self.axis_type == AxisType.Manual
        kind = AxisType.Explicit if is_manual else self.axis_type
        mesh = target.make_mesh((2, target.count // 2), ("y", "x"), (kind,) * 2)
        structs = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for dtype, operands in ((jnp.bfloat16, self.operands), (jnp.int32, self.integers))
            for shape, spec in operands
        ]
        count = len(self.operands)

        def both(*arrays: Any) -> Any:
            out, pull = jax.vjp(lambda *floats: self.function(*floats, *arrays[count:]), *arrays[:count])
            return out, pull(jax.tree.map(jnp.cos, out))

        function = self.function if self.inference else both
        if is_manual:
            specs = (*(spec for _, spec in self.operands), *(spec for _, spec in self.integers))
            out = self.out if self.inference else (self.out, specs[:count])
            function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)
        return function, structs, mesh


def split(name: str, tpu: str) -> tuple[Any, Any, Any]:
    """One of ``SPLIT`` for the devices of four chips."""
    return SPLIT[name].program(Target(find_device(tpu), devices_of_slice(tpu)))


def causal(query: Any, key: Any, value: Any) -> Any:
    return flash_attention(query, key, value, causal=True)


def over_length(strategy: str) -> Split:
    attend = functools.partial(context_parallel_attention, axis_name="x", strategy=strategy, causal=True)
    rows = P("y", "x")
    return Split(attend, (((2, 512, 8, 128), rows),) * 3, out=rows)


def loss(x: Any, weight: Any, labels: Any) -> Any:
    return linear_cross_entropy(x, weight, labels)


def experts(x: Any, weights: Any, *matrices: Any, **options: Any) -> Any:
    return moe_mlp(x, weights, jnp.argsort(weights, axis=1), *matrices, **options)


QKV = (((2, 256, 8, 128), P("y", None, "x")),) * 3
ROWS, COLUMNS = P("x"), P(None, "x")
PAGES = ((256, 16, 8, 128), P(None, None, "x"))
GROUPS = (((512, 256), P()), *[((8, 256, 512), ROWS)] * 2)
SPLIT = {
    "attention, explicit axes": Split(causal, QKV, AxisType.Explicit),
    "attention, automatic axes": Split(causal, QKV, AxisType.Auto),
    "a kernel in shard_map": Split(
        kernels.matmul(256, 128)[0], (((1024, 256), ROWS), ((256, 256), P())), out=ROWS, inference=True
    ),
    "ring attention": over_length("ring"),
    "all-gather attention": over_length("all_gather"),
    "ulysses attention": over_length("ulysses"),
    "ring of a matmul's rows": Split(
        functools.partial(all_gather_matmul, axis_name="x", strategy="ring"),
        (((1024, 256), ROWS), ((256, 1024), COLUMNS)), out=COLUMNS,
    ),
    "ring of a matmul's sums": Split(
        functools.partial(matmul_reduce_scatter, axis_name="x", strategy="ring"),
        (((1024, 1024), COLUMNS), ((1024, 256), ROWS)), out=ROWS,
    ),
    "matmuls of groups by groups": Split(
        grouped_matmul, GROUPS[:2], AxisType.Explicit, integers=(((8,), P()),)
    ),
    "gated matmuls of groups by groups": Split(
        gated_grouped_matmul, GROUPS, AxisType.Explicit, integers=(((8,), P()),)
    ),
    "gated matmuls of groups, automatic axes": Split(
        gated_grouped_matmul, GROUPS, AxisType.Auto, integers=(((8,), P()),)
    ),
    "experts over devices": Split(
        functools.partial(experts, axis_name="x"),
        (((512, 256), ROWS), ((512, 2), ROWS), *[((8, 256, 512), ROWS)] * 2, ((8, 512, 256), ROWS)), out=ROWS,
    ),
    "glu by columns": Split(glu, (((512, 256), P("y")), *[((256, 1024), COLUMNS)] * 2), AxisType.Explicit),
    "loss by tokens and vocabulary": Split(
        loss, (((512, 256), P("y")), ((256, 8192), COLUMNS)), AxisType.Explicit, integers=(((512,), P("y")),)
    ),
    "decoding by heads": Split(
        page_attention, (((16, 8, 128), P("y", "x")), PAGES, PAGES), AxisType.Explicit,
        integers=(((16, 16), P("y")), ((16,), P("y"))), inference=True,
    ),
    "decoding by pages": Split(
        functools.partial(context_parallel_page_attention, axis_name="x"),
        (((16, 8, 128), P()), ((256, 16, 8, 128), ROWS), ((256, 16, 8, 128), ROWS)),
        integers=(((16, 16), P()), ((16,), P())), out=P(), inference=True,
    ),
}  # fmt: skip
"""Calls over four chips."""
