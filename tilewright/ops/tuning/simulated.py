"""Ranks the configs of calls for a TPU that is not here by cycles of libtpu's simulator; nothing runs.

What it finds is kept under keys of its own, and decides a call only where nothing was measured.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.config.context import current_overrides
from tilewright.ops.config.persistent import PersistentCache
from tilewright.ops.config.selection import default_chain, simulated_key
from tilewright.ops.kernel.arrays import split
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.lowering.call import Call, Selector, code_of
from tilewright.ops.tuning.libtpu import TpuReport, estimated_seconds, report
from tilewright.ops.tuning.workload import backward_stage, forward_of, forward_stage, results_and_residuals
from tilewright.ops.utils.target import target_device


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """One config of a call.

    Attributes:
      seconds: that it may take; ``None`` if that cannot be told.
      why_not: the reason for that.
    """

    config: Any
    report: TpuReport
    seconds: float | None
    why_not: str = ""


def program(inv: Invocation[Any, Any], config: object) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """One direction of a call with a config, and its operands; a backward pass gets residuals as operands."""
    with target_device(inv.target.name):
        chain = default_chain()
        arrays, structure = split((inv.abstract_args, inv.abstract_kwargs))
        call = Call(inv.kernel, Selector(chain, None, current_overrides()), structure, (None,) * len(arrays))
        operands = [
            jax.ShapeDtypeStruct((*(axis.size for axis in inv.mapped if axis.mapped[i]), *x.shape), x.dtype)
            for i, x in enumerate(arrays)
        ]
        mapped = inv.mapped
        if inv.direction == "backward":
            _, results = forward_stage(inv, call, operands, chain.lookup(forward_of(inv)).config)
            structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), results)
            out, residuals = results_and_residuals(inv, structs)
            cotangents = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, out)
            call, mapped, rest = backward_stage(inv, call, operands, residuals, cotangents)
            operands += rest

    def function(*given: jax.Array) -> list[Any]:
        found: list[Any] = code_of(call, config, [jax.typeof(x) for x in given], mapped, inv.target)(*given)
        return found

    return function, operands


def simulated(inv: Invocation[Any, Any], config: object, flops: float, bytes_accessed: float) -> Simulated:
    """The time that a call may take with a config.

    Args:
      flops, bytes_accessed: of the call, whatever its config.
    """
    plain = dataclasses.replace(inv.abstract(), metadata=None)
    found = report(inv.target.name, f"{__name__}:{program.__name__}", plain, config, simulate=True)
    return estimated(config, found, inv.target.name, flops, bytes_accessed)


def estimated(config: object, found: TpuReport, tpu: str, flops: float, bytes_accessed: float) -> Simulated:
    """The time that a simulated program with a config may take.

    Args:
      flops, bytes_accessed: those that it cannot do without.
    """
    seconds = estimated_seconds(tpu, found.kernel_cycles, flops, bytes_accessed)
    why_not = ""
    if found.error:
        why_not = found.error.partition("\n")[0]
    elif not found.kernel_cycles:
        why_not = f"the simulator fails: {found.unsimulated}" if found.unsimulated else "it has no kernel of ours"
    elif seconds is None:
        why_not = f"{found.kernel_cycles} cycles are fewer than its matmuls take: its loops depend on data"
    return Simulated(config, found, seconds, why_not)


def ranked(
    inv: Invocation[Any, Any], configs: Iterable[Any], *, flops: float, bytes_accessed: float
) -> list[Simulated]:
    """Every config of a call, fastest first, those without a time last."""
    found = [simulated(inv, config, flops, bytes_accessed) for config in configs]
    return sorted(found, key=lambda each: (each.seconds is None, each.seconds or 0.0))


def store(inv: Invocation[Any, Any], found: list[Simulated]) -> bool:
    """Keeps the best config of a call as simulated; returns False if none has a time, or it could not be written."""
    best = found[0]
    if best.seconds is None:
        return False
    measurements = [
        {"config": x.config, "estimated_s": x.seconds, "cycles": x.report.kernel_cycles, "why_not": x.why_not}
        for x in found
    ]
    return PersistentCache().put(
        simulated_key(inv),
        best.config,
        measurements=measurements,
        metadata={"op": inv.kernel.name, "direction": inv.direction, "estimated_s": best.seconds},
        source=inv.kernel.source(best.config),
    )
