"""Descriptions of a call by its kernel: the parts that its oracle can compute, and the matmul that it stands for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class OraclePart:
    """One part of a call.

    Attributes:
      arguments: maps the call's prepared arguments to the part's, in the same structure. Given gradients in place of
        the arrays, it returns those that belong to the part.
      results: maps the call's results to the part's.
      shared: names of arguments whose gradients are sums over several parts; these are not compared.
    """

    arguments: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
    results: Callable[[Any], Any]
    shared: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A matmul: what ``jax.lax.dot_general`` would be called with.

    Attributes:
      lhs, rhs: abstract operands.
      contracting, batch: dimensions of lhs and of rhs.
      sources: the arguments of the call that each operand is made of, by name.
    """

    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    contracting: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    sources: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def mapped(self, size: int, lhs: bool, rhs: bool) -> "Product":
        """The matmul with one more axis in front of the operands that are mapped, as ``jax.vmap`` makes it."""
        moved = (int(lhs), int(rhs))
        contracting, batch = (
            (tuple(i + moved[0] for i in of_lhs), tuple(i + moved[1] for i in of_rhs))
            for of_lhs, of_rhs in (self.contracting, self.batch)
        )
        if lhs and rhs:
            batch = ((0, *batch[0]), (0, *batch[1]))
        left, right = (
            jax.ShapeDtypeStruct((size, *x.shape), x.dtype) if is_mapped else x
            for x, is_mapped in ((self.lhs, lhs), (self.rhs, rhs))
        )
        return dataclasses.replace(self, lhs=left, rhs=right, contracting=contracting, batch=batch)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of ``jax.lax.dot_general_p``."""
        numbers = (self.contracting, self.batch)
        return {
            "dimension_numbers": numbers,
            "precision": None,
            "preferred_element_type": None,
            "out_sharding": None,
        }
