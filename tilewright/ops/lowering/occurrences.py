"""The operations of a lowered program with the number of times that they run."""

from collections.abc import Iterator
from typing import Any

_CONSTANTS = ("stablehlo.constant", "sdy.constant")


def walk(module: Any) -> Iterator[tuple[Any, int]]:
    """The operations that a run of a program comes to, in its order, each with how often it does at this place.

    The steps of a loop count if their number is a constant, as of ``scan``; those of another loop count as one, and
    each branch of a condition as taken.
    """
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations if "sym_name" in op.attributes}
    return _walk(functions["main"].operation, 1, functions)


def _walk(operation: Any, times: int, functions: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    for region in operation.regions:
        for block in region:
            for each in block.operations:
                inner = each.operation
                yield inner, times
                steps = _steps(inner) if inner.name == "stablehlo.while" else 1
                called = functions[inner.attributes["callee"].value] if inner.name == "func.call" else each
                yield from _walk(called.operation, times * steps, functions)


def _steps(loop: Any) -> int:
    """The number of steps of a loop that counts from zero to a constant, as JAX writes one; 1 of any other."""
    condition = list(loop.regions[0].blocks[0].operations)
    compared = condition[-1].operands[0].owner
    if getattr(compared, "name", "") != "stablehlo.compare":
        return 1
    if "LT" not in str(compared.attributes["comparison_direction"]):
        return 1
    bound: Any = compared.operands[1].owner
    value = str(bound.attributes["value"]) if getattr(bound, "name", "") in _CONSTANTS else ""
    digits = value.partition("<")[2].partition(">")[0]
    return max(int(digits), 1) if digits.isdecimal() else 1
