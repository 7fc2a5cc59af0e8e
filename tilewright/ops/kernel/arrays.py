"""Separates the arrays of a call from its static values, and describes arrays without reading their values."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

ARRAY_TYPES = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
"""The types that are operands of a call. A NumPy scalar is static, like Python's numbers."""

type Operand = jax.Array | np.ndarray[Any, Any] | jax.ShapeDtypeStruct


class Shaped(Protocol):
    """An array, its abstract value, or a ``ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def is_wrapper(value: object) -> bool:
    """True for what stands for an array by ``__jax_array__``, such as ``flax.nnx.Param``."""
    # Tracers have the attribute, too.
    return getattr(type(value), "__jax_array__", None) is not None and not isinstance(value, ARRAY_TYPES)


def unwrapped[Value](value: Value) -> Value | Any:
    """The array that a wrapper stands for; any other value unchanged."""
    return cast(Any, value).__jax_array__() if is_wrapper(value) else value


def unwrapped_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the arrays of those that are wrappers; a wrapper may be a pytree of its array."""
    if not (any(map(is_wrapper, args)) or any(map(is_wrapper, kwargs.values()))):
        return args, kwargs
    return tuple(map(unwrapped, args)), {name: unwrapped(value) for name, value in kwargs.items()}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StaticLeaf:
    """A value that is not an array, compared by type and value, so that 1, 1.0 and True differ."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, float | np.inexact):
            return repr(self.value) == repr(other.value)  # 0.0 and -0.0 are different constants, and NaN equals itself
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A pytree without its arrays: the tree, and for each leaf its static value, or ``None`` for an array."""

    tree: jax.tree_util.PyTreeDef
    leaves: tuple[StaticLeaf | None, ...]

    def join(self, arrays: Sequence[object]) -> Any:
        """Rebuilds the pytree with ``arrays`` in place of its arrays."""
        rest = iter(arrays)
        return self.tree.unflatten([next(rest) if leaf is None else leaf.value for leaf in self.leaves])


def split(tree: object) -> tuple[list[Any], Structure]:
    """Separates a pytree into its arrays and its structure with everything else.

    Raises:
      TypeError: a leaf is neither an array nor hashable.
    """
    flat, treedef = jax.tree_util.tree_flatten(tree)
    arrays: list[Any] = []
    leaves: list[StaticLeaf | None] = []
    for leaf in flat:
        if isinstance(leaf, ARRAY_TYPES):
            arrays.append(leaf)
            leaves.append(None)
        elif is_wrapper(leaf):
            arrays.append(unwrapped(leaf))
            leaves.append(None)
        else:
            leaves.append(StaticLeaf(leaf))
    structure = Structure(treedef, tuple(leaves))
    try:
        hash(structure)
    except TypeError:
        bad = next(leaf.value for leaf in leaves if leaf is not None and not is_hashable(leaf.value))
        raise TypeError(
            f"an argument that is not an array must be hashable, got {bad!r} of type {type(bad).__name__}"
        ) from None
    return arrays, structure


def is_hashable(value: object) -> bool:
    """True if the value can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def abstract(leaf: object, sharding: jax.sharding.Sharding | None = None) -> Any:
    """The ``ShapeDtypeStruct`` of an array, weak type and sharding kept; any other leaf unchanged."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(leaf, ARRAY_TYPES):
        return leaf
    if sharding is None:
        sharding = meaningful_sharding(leaf)
    return struct_of(jax.typeof(leaf), sharding)


def struct_of(aval: Shaped, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The ``ShapeDtypeStruct`` of an abstract value."""
    weak = bool(getattr(aval, "weak_type", False))  # absent from the abstract values of extended dtypes
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)


def struct_like(array: Shaped) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, and nothing else."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def random_array(key: jax.Array, leaf: object) -> Any:
    """A concrete array for a ``ShapeDtypeStruct``: normal, 0 or 1, or keys; any other leaf unchanged."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, leaf.shape) if leaf.shape else key
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating) or jnp.issubdtype(leaf.dtype, jnp.floating):
        # jax.random does not generate fp8
        sampled_dtype = leaf.dtype if leaf.dtype.itemsize >= 2 else jnp.dtype(jnp.bfloat16)
        return jax.random.normal(key, leaf.shape, sampled_dtype).astype(leaf.dtype)
    if leaf.dtype == jnp.bool_:
        return jax.random.bernoulli(key, 0.5, leaf.shape)
    return jax.random.randint(key, leaf.shape, 0, 2).astype(leaf.dtype)


def is_symbolic(*sizes: object) -> bool:
    """True if a size is a symbolic dimension of ``jax.export``, whose value only a call of the exported program has."""
    return not all(isinstance(size, int) for size in sizes)


def at_most(size: int, limit: int) -> int:
    """A block size for ``size`` elements; ``limit`` for a symbolic dimension, even if the elements fill only a part of
    it.
    """
    return limit if is_symbolic(size) else min(size, limit)


def meaningful_sharding(leaf: object) -> jax.sharding.Sharding | None:
    """The sharding of an array that is spread over several devices, or whose type carries one; else ``None``."""
    if isinstance(leaf, jax.core.Tracer):
        return explicit_sharding(jax.typeof(leaf))
    if not isinstance(leaf, jax.Array):
        return None
    sharding = leaf.sharding
    return sharding if sharding.num_devices > 1 else None


def first_sharding(avals: Iterable[object]) -> jax.sharding.NamedSharding | None:
    """The first sharding in the types of some values; ``None`` if none is sharded over explicit axes."""
    return next((sharding for sharding in map(explicit_sharding, avals) if sharding is not None), None)


def explicit_sharding(aval: object) -> jax.sharding.NamedSharding | None:
    """The sharding in the type of a traced value, which shows explicit axes only; ``None`` if no axis is sharded."""
    # Types that are not arrays have no sharding.
    sharding: jax.sharding.NamedSharding | None = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or all(axes is None for axes in sharding.spec):
        return None
    return sharding


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The entry of a ``PartitionSpec`` for one dimension (``None``, a name or several) as a tuple of names."""
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def result_like(
    operands: Sequence[jax.core.ShapedArray], shape: tuple[int, ...], dtype: Any, spec: PartitionSpec
) -> jax.core.ShapedArray:
    """The type of a result on the mesh of the operands' types, varying over the manual axes over which any does."""
    meshes = (mesh for x in operands if not (mesh := x.sharding.mesh).empty)
    mesh = next(meshes, jax.sharding.get_abstract_mesh())
    varying = frozenset[str]().union(*(x.manual_axis_type.varying for x in operands))
    result = jax.core.ShapedArray(shape, dtype, sharding=NamedSharding(mesh, spec))
    kind = type(result.manual_axis_type)
    return result.update(manual_axis_type=kind(varying=varying)) if varying else result
