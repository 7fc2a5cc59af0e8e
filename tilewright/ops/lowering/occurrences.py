"""The operations of a lowered program with the number of times that they run."""

import collections
from collections.abc import Iterator
from typing import Any

_CONSTANTS = ("stablehlo.constant", "sdy.constant")


def walk(module: Any) -> Iterator[tuple[Any, int]]:
    """The operations that a run of a program comes to, each once, with how often it does.

    The steps of a loop count if their number is a constant, as of ``scan``; those of another loop count as one, and
    each branch of a condition as taken.
    """
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations if "sym_name" in op.attributes}
    inside = dict[str, list[tuple[Any, int]]]()  # callees before those that call them, as functions cannot recur

    def visit(name: str) -> None:
        if name not in inside:
            found = list(_inside(functions[name].operation, 1))
            for operation, _ in found:
                if operation.name == "func.call":
                    visit(operation.attributes["callee"].value)
            inside[name] = found

    visit("main")
    runs = collections.Counter({"main": 1})
    for name, found in reversed(inside.items()):
        for operation, times in found:
            yield operation, times * runs[name]
            if operation.name == "func.call":
                runs[operation.attributes["callee"].value] += times * runs[name]


def _inside(operation: Any, times: int) -> Iterator[tuple[Any, int]]:
    """The operations of one function."""
    for region in operation.regions:
        for block in region:
            for each in block.operations:
                inner = each.operation
                yield inner, times
                yield from _inside(inner, times * (_steps(inner) if inner.name == "stablehlo.while" else 1))


def _steps(loop: Any) -> int:
    """The number of steps of a loop that counts from zero to a constant, as JAX writes one; 1 of any other."""
    condition = list(loop.regions[0].blocks[0].operations)
    compared = condition[-1].operands[0].owner
    if getattr(compared, "name", "") != "stablehlo.compare":
        return 1
    if "LT" not in str(compared.attributes["comparison_direction"]):
        return 1
    bound: Any = compared.operands[1].owner
    while getattr(bound, "name", "") == "sdy.sharding_constraint":  # on explicit mesh axes
        bound = bound.operands[0].owner
    value = str(bound.attributes["value"]) if getattr(bound, "name", "") in _CONSTANTS else ""
    digits = value.partition("<")[2].partition(">")[0]
    return max(int(digits), 1) if digits.isdecimal() else 1
