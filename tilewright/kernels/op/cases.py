"""Named calls of an op, which are tuned, timed, tested and shown in the capability table."""

import abc
import contextvars
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

type Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""

type Peer = Callable[..., Any]
"""A function of an op's own arguments that computes the same result."""

_NONE: Mapping[str, Any] = MappingProxyType({})
_ABSTRACT = contextvars.ContextVar("_ABSTRACT", default=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Case(abc.ABC):
    """The sizes and options of one call, from which random arguments can be made.

    An op's own class is a frozen dataclass; each of its fields has a default and is an option of the command line.

    Attributes:
      dtype: dtype of the arrays without a dtype field of their own.
    """

    name: str
    dtype: str = dataclasses.field(default="float32", kw_only=True)

    @abc.abstractmethod
    def arguments(self, seed: int = 0) -> Arguments:
        """Arguments of the op's function, with random arrays."""

    def abstract_arguments(self) -> Arguments:
        """The same with ``jax.ShapeDtypeStruct`` in place of arrays; `normal` draws nothing for it."""
        given: list[Any] = []

        def made() -> list[jax.Array]:
            leaves, tree = jax.tree.flatten(self.arguments())
            arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
            given.extend((leaves, tree, list(arrays)))
            return list(arrays.values())

        token = _ABSTRACT.set(True)
        try:
            structs = jax.eval_shape(made)
        finally:
            _ABSTRACT.reset(token)
        leaves, tree, ids = given
        known = dict(zip(ids, structs, strict=True))  # an array that occurs twice stays one
        arguments: Arguments = jax.tree.unflatten(tree, [known.get(id(leaf), leaf) for leaf in leaves])
        return arguments


@dataclasses.dataclass(frozen=True, slots=True)
class OpCases[C: Case]:
    """The cases of one op.

    Attributes:
      shape: the fields that ``--shape`` gives, in order.
      small: the call that the generated tests make.
      large: the same call with other sizes; each size that differs may be a symbolic dimension of ``jax.export``.
      by_device: named cases for each kind of device, "cpu" at least.
      options: the rows of the op's capability table, by their headings; empty for no table.
      peers: functions that the op is compared with: the function for a case or, as text, why it cannot run the case.
      brief: small values for fields whose size does not affect which backend can serve a case.
    """

    shape: tuple[str, ...]
    small: C
    large: C
    by_device: Mapping[str, Mapping[str, C]]
    options: Mapping[str, C] = _NONE
    peers: Mapping[str, Callable[[C], Peer | str]] = _NONE
    brief: Mapping[str, Any] = _NONE

    @property
    def kind(self) -> type[C]:
        """The class of the cases."""
        return type(self.small)

    @property
    def every(self) -> dict[str, C]:
        """The named cases of all kinds of device."""
        return {name: case for table in self.by_device.values() for name, case in table.items()}

    def of_device(self, kind: str) -> Mapping[str, C]:
        """The named cases for a kind of device, or those of CPUs if it has none."""
        return self.by_device.get(kind, self.by_device["cpu"])


def variants[C: Case](base: C, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, C]:
    """Named cases that differ from another one in some fields."""
    return {name: dataclasses.replace(base, name=name, **fields) for name, fields in cases.items()}


def generator_of(key: jax.Array) -> np.random.Generator:
    """A generator on the host, with a seed from a key of JAX's."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.random.default_rng(np.asarray(jax.random.key_data(key) if typed else key).ravel())


def normal(random: int | np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, drawn in float32 on the host from a seed or a generator."""
    if _ABSTRACT.get():
        return jnp.zeros(shape, jnp.dtype(dtype))
    generator = np.random.default_rng(random) if isinstance(random, int) else random
    return jnp.asarray(generator.standard_normal(shape, np.float32), jnp.dtype(dtype))
