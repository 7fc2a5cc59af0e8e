"""Params whose results have the same bits in every run, where XLA's flags want that."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.xla_flags import wants_repeatable
from tilewright.ops.types import Device, Direction

_REASON = "the same bits in every run, as XLA_FLAGS want"


def first_params(implementation: Implementation, problem: object, device: Device, direction: Direction) -> Any:
    """The heuristic params, or the first candidate if they do not repeat as they should; None: there is none."""
    params = implementation.heuristic(problem, device, direction)
    if not params_reasons(implementation, params):
        return params
    return next(all_params(implementation, problem, device, direction), None)


def all_params(implementation: Implementation, problem: object, device: Device, direction: Direction) -> Iterator[Any]:
    """The candidates, without those that do not repeat if they should."""
    candidates = implementation.candidates(problem, device, direction)
    return (params for params in candidates if not params_reasons(implementation, params))


def params_reasons(implementation: Implementation, params: Any) -> list[str]:
    """A reason against params that do not repeat, if XLA's flags want that."""
    return [f"it does not give {_REASON}"] if wants_repeatable() and not implementation.repeats(params) else []


def backend_reasons(implementation: Implementation, problem: object, device: Device, direction: Direction) -> list[str]:
    """A reason against a backend of which no params for a problem repeat, if XLA's flags want that."""
    if not wants_repeatable() or first_params(implementation, problem, device, direction) is not None:
        return []
    return [f"none of its configs gives {_REASON}"]


def repeating(implementation: Implementation, params: Any) -> Any:
    """Params with their field ``deterministic`` set, if they have one and do not repeat as they should."""
    fields = dataclasses.fields(params) if dataclasses.is_dataclass(params) else ()
    if not params_reasons(implementation, params) or "deterministic" not in {field.name for field in fields}:
        return params
    return dataclasses.replace(params, deterministic=True)
