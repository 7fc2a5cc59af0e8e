"""Runs a backend on each device's part if the arrays' types say how they are split."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from tilewright.kernels.op.inputs import OpInputs
from tilewright.ops.kernel.arrays import axis_names as axis_names
from tilewright.ops.kernel.arrays import explicit_sharding, first_sharding
from tilewright.ops.utils.promotion import default_promotion

type AxisName = str | tuple[str, ...]
"""The name of a mesh axis, or those of several."""


@dataclasses.dataclass(frozen=True, slots=True)
class GradientParts:
    """The assembly of one argument's gradient from the devices' parts.

    Attributes:
      spec: the ``PartitionSpec`` of the gradient as the devices compute it.
      summed: mesh axes over which every device has only a partial sum.
      wanted: the ``PartitionSpec`` of the argument's own type, to which the gradient is resharded.
      disjoint: of each element one device has the whole sum and the others zeros, so that nothing is rounded.
    """

    spec: PartitionSpec
    summed: tuple[str, ...]
    wanted: PartitionSpec
    disjoint: bool = False


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """The split of an op over the explicit axes of a mesh.

    Attributes:
      mesh: the mesh of the operands' types.
      inputs: a ``PartitionSpec`` for each leaf of the op's inputs.
      results: the same for each of a backend's results, and for its cotangent.
      gradients: by name, for every argument that may have one.
      on_part: adds to a device's part of the inputs the data that depends on its position; runs under the mesh's axes.
      on_gradients: the same for its part of the gradients, by name and without those that are ``None``, before the
        sums.
      on_results: completes a device's part of the results, such as by a sum over mesh axes.
      forward: in place of these, for an op that computes its results from those of another call on the part: gets a
        function of inputs that runs a backend, and the part of the inputs.
      backward: the same for the gradients: gets a function of inputs, results and cotangents, and their parts.
      shared_with_xla: True if axes of type Auto may stay with XLA, which then splits the operations on a device's part
        over these. It cannot split a kernel, whose operands it gathers, and not well a loop over blocks of rows.
    """

    mesh: AbstractMesh | Mesh
    inputs: object
    results: object
    gradients: dict[str, GradientParts]
    on_part: Callable[[Any], Any] = lambda inputs: inputs
    on_gradients: Callable[[dict[str, Any]], dict[str, Any]] = lambda gradients: gradients
    on_results: Callable[[Any], Any] = lambda results: results
    forward: Callable[[Callable[[Any], Any], Any], Any] | None = None
    backward: Callable[[Callable[[Any, Any, Any], dict[str, Any]], Any, Any, Any], dict[str, Any]] | None = None
    shared_with_xla: bool = True

    @property
    def axes(self) -> frozenset[str]:
        """The axes over which ``shard_map`` is manual; empty for all of them."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if not self.shared_with_xla or not any(kinds[n] == AxisType.Auto and self.mesh.shape[n] > 1 for n in kinds):
            return frozenset()
        return frozenset(name for name, kind in kinds.items() if kind == AxisType.Explicit)


def leading_partitioning(inputs: object, core_dims: Mapping[str, int]) -> Partitioning | None:
    """Splits an op along the leading dimensions that arguments share, as in their types; results begin with them.

    Args:
      inputs: a pytree whose arrays have the names of arguments, as fields or keys.
      core_dims: the number of trailing core dimensions of an argument. One that is not listed is a parameter, of which
        every device needs the whole: if its type splits it, it is gathered, and its gradient is split again.

    Raises:
      ValueError: a core dimension is split, or a shared one is split in two ways.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(inputs)
    arrays = {argument_of(path): leaf for path, leaf in leaves}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None or not core_dims:
        return None
    shared = {name: array.ndim - core_dims.get(name, array.ndim) for name, array in arrays.items()}
    split = common_axes({name: x for name, x in arrays.items() if name in core_dims}, shared)
    used = [name for axes in split for name in axis_names(axes)]

    def spec_of(name: str) -> PartitionSpec:
        # A dimension of size 1 is broadcast, so every device has it whole.
        sizes = zip(split, arrays[name].shape[: shared[name]], strict=False)
        return PartitionSpec(*(axes if size > 1 else None for axes, size in sizes))

    def gradient(name: str) -> GradientParts:
        # An array that is whole over a split axis serves the parts of all devices along it: its gradient is their sum.
        own_axes = [each for axes in spec_of(name) for each in axis_names(axes)]
        summed = tuple(each for each in used if each not in own_axes)
        return GradientParts(spec_of(name), summed, typed_spec(arrays[name]))

    return Partitioning(
        mesh=mesh,
        inputs=jax.tree.unflatten(tree, [spec_of(name) for name in arrays]),
        results=PartitionSpec(*split),
        gradients={name: gradient(name) for name in arrays},
    )


@dataclasses.dataclass(frozen=True)
class SplitDimensions:
    """The dimensions of a call's arrays, each of which explicit axes of a mesh split alike wherever it is not whole.

    Attributes:
      arrays: those of the call, by name.
      layouts: a letter for each dimension of an array, by name.
      axes: the mesh axes by the letter of what they split.
    """

    mesh: AbstractMesh | Mesh
    arrays: Mapping[str, Any]
    layouts: Mapping[str, str]
    axes: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: OpInputs, layouts: Mapping[str, str], allowed: Mapping[str, str]) -> "SplitDimensions | None":
        """The split that the types of the arrays imply; None if they are on no explicit mesh.

        Args:
          allowed: the dimensions that may be split: their names, for errors, by letter.

        Raises:
          ValueError: another dimension is split, one in two ways, or two by one axis.
        """
        arrays = {name: array for name, array in inputs.arrays.items() if array is not None}
        mesh = explicit_mesh(*arrays.values())
        if mesh is None:
            return None
        split: dict[str, Any] = {}
        for name, array in arrays.items():
            for letter, axes in zip(layouts[name], typed_axes(array), strict=True):
                if axes is None:
                    continue
                others = {each for other, found in split.items() if other != letter for each in axis_names(found)}
                if letter not in allowed or split.setdefault(letter, axes) != axes or others & set(axis_names(axes)):
                    text = ", ".join(f"{name}: {typed_spec(array)}" for name, array in arrays.items())
                    raise ValueError(
                        f"arrays must be split alike or be whole, and by {' and '.join(allowed.values())} alone "
                        f"({text}); reshard {name} first"
                    )
        return cls(mesh, arrays, layouts, split)

    def spec(self, letters: str) -> PartitionSpec:
        """The split of an array of such dimensions."""
        return PartitionSpec(*map(self.axes.get, letters))

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """The split of the call's arrays as a device gets them."""
        return {name: self.spec(self.layouts[name]) for name in self.arrays}

    def devices(self, letter: str) -> int:
        """The number of parts of a dimension."""
        return math.prod(self.mesh.shape[name] for name in axis_names(self.axes.get(letter)))

    def partitioning(self, inputs: OpInputs, results: Any) -> Partitioning:
        """The partitioning of the call, whose gradients are summed over the devices that have the same part.

        Args:
          results: the letters of the results' dimensions, in their places.
        """
        used = [name for axes in self.axes.values() for name in axis_names(axes)]

        def gradient(name: str, own: PartitionSpec) -> GradientParts:
            held = [each for axes in own for each in axis_names(axes)]
            return GradientParts(own, tuple(each for each in used if each not in held), typed_spec(self.arrays[name]))

        return Partitioning(
            mesh=self.mesh,
            inputs=inputs.replace(**self.specs),
            results=jax.tree.map(self.spec, results),
            gradients={name: gradient(name, own) for name, own in self.specs.items()},
        )


def argument_of(path: tuple[Any, ...]) -> str:
    """The name of the argument that a leaf belongs to, by its path in the inputs."""
    return str(getattr(path[0], "name", None) or getattr(path[0], "key", None))


def common_axes(
    arrays: Mapping[str, Any], shared: Mapping[str, int], *, whats: str = "arguments", core: str = ""
) -> list[Any]:
    """The mesh axes of every dimension that the arrays share.

    Args:
      arrays: by name.
      shared: the number of leading dimensions of an array that are shared; the others must be whole.
      whats: what is split, for errors.
      core: what the other dimensions are, for errors.

    Raises:
      ValueError: a dimension is split in two ways, or one that is not shared is.
    """
    described = ", ".join(f"{name}: {typed_spec(array)}" for name, array in arrays.items())
    split: list[Any] = [None] * max(shared[name] for name in arrays)
    for name, array in arrays.items():
        axes = typed_axes(array)
        if any(axes[shared[name] :]):
            by_first = f"be split by its first {shared[name]} dimensions alone" if shared[name] else "be whole"
            allowed = f"be whole along {core}" if core else by_first
            raise ValueError(f"{name} must {allowed} ({described}); reshard it first")
        for position, each in enumerate(axes[: shared[name]]):
            if None not in (each, split[position]) and each != split[position]:
                raise ValueError(f"{whats} must be split alike or be whole ({described}); reshard {name} first")
            # A whole array takes the split of the others, along dimensions that they share.
            split[position] = split[position] or each
    return split


def axis_of(name: AxisName | list[str]) -> AxisName:
    """A caller's ``axis_name`` as a value that can be hashed."""
    return tuple(name) if isinstance(name, list) else name


def devices_along(axis: AxisName, parts: str) -> int:
    """The number of devices along an axis of the surrounding ``shard_map``, for a function that needs one.

    Args:
      parts: of what each device passes its part.

    Raises:
      ValueError: there is no such axis, or the ``shard_map`` leaves other axes to explicit types.
    """
    try:
        devices = int(jax.lax.axis_size(axis))
    except NameError:
        raise ValueError(
            f"axis_name={axis!r} is no axis of a surrounding jax.shard_map, inside of which each device calls this "
            f"function with its part of the {parts}"
        ) from None
    check_manual(AxisType.Explicit)
    return devices


def check_manual(left: AxisType) -> None:
    """Raises if the surrounding ``shard_map`` leaves an axis of its mesh, of more than one device, to types or to XLA.

    A device's part of an array is then no array of one device. JAX has no rules for all that is done to one whose type
    splits it over such an axis; and what XLA splits it may send between devices in the branches that only some take.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    names = [name for name, kind, size in sizes if kind == left and size > 1]
    if names:
        raise ValueError(
            f"the surrounding jax.shard_map must be manual over all axes of its mesh, and leaves {', '.join(names)} "
            f"{'to types' if left == AxisType.Explicit else 'to XLA'}; leave out axis_names, and name them in in_specs"
        )


def forward_locally[Inputs, Results](
    forward: Callable[[Inputs], Results], partitioning: Partitioning | None, inputs: Inputs
) -> Results:
    """Runs ``forward(inputs)``, on each device's part if there is a partitioning.

    Inside of ``shard_map`` all inputs get one type, as the carry of a backend's loop must have. It may be manual over
    some axes of the mesh beside the explicit ones.
    """
    axes = varying_axes(inputs)
    inputs = vary_over(axes, inputs)
    if partitioning is None:
        return vary_over(axes, forward(inputs))
    results = jax.shard_map(
        functools.partial(forward_on_part, forward, partitioning),
        mesh=partitioning.mesh,
        in_specs=(partitioning.inputs,),
        out_specs=partitioning.results,
        axis_names=partitioning.axes,
        check_vma=False,
    )(placed(inputs, partitioning.inputs, partitioning.mesh))
    # Without checks the results have lost the axes of a ``shard_map`` around this one.
    return vary_over(axes, results)


def backward_locally[Inputs: OpInputs, Results](
    backward: Callable[[Inputs, Results, Results], dict[str, Any]],
    partitioning: Partitioning | None,
    inputs: Inputs,
    results: Results,
    cotangents: Results,
) -> dict[str, Any]:
    """Runs ``backward(inputs, results, cotangents)`` likewise; gradients of replicated arguments are summed."""
    axes = varying_axes((inputs, results, cotangents))
    inputs, results, cotangents = vary_over(axes, (inputs, results, cotangents))
    if partitioning is None:
        return vary_over(axes, backward(inputs, results, cotangents))
    gradients = partitioning.gradients
    # shard_map needs out_specs before it traces.
    dtypes = {name: struct.dtype for name, struct in inputs.gradients.items()}

    inputs = placed(inputs, partitioning.inputs, partitioning.mesh)
    results, cotangents = (placed(each, partitioning.results, partitioning.mesh) for each in (results, cotangents))
    computed = jax.shard_map(
        functools.partial(backward_on_part, backward, partitioning, dtypes),
        mesh=partitioning.mesh,
        in_specs=(partitioning.inputs, partitioning.results, partitioning.results),
        out_specs={name: gradients[name].spec for name in dtypes},
        axis_names=partitioning.axes,
        check_vma=False,
    )(inputs, results, cotangents)
    return vary_over(axes, placed(computed, {name: gradients[name].wanted for name in dtypes}, partitioning.mesh))


def forward_on_part[Inputs, Results](
    forward: Callable[[Inputs], Results], partitioning: Partitioning, part: Inputs
) -> Results:
    """A device's part of the results, from that of the inputs; runs under the mesh's axes."""
    results: Results
    if partitioning.forward is not None:
        results = partitioning.forward(forward, part)
    else:
        results = partitioning.on_results(forward(partitioning.on_part(part)))
    return results


def backward_on_part[Inputs, Results](
    backward: Callable[[Inputs, Results, Results], dict[str, Any]],
    partitioning: Partitioning,
    dtypes: Mapping[str, np.dtype],
    part: Inputs,
    results: Results,
    cotangents: Results,
    *,
    narrow: bool = False,
) -> dict[str, Any]:
    """A device's part of the gradients whose dtypes are given by name; runs under the mesh's axes.

    Args:
      narrow: bfloat16 gradients are summed over devices as they are, with half of the bytes.
    """
    if partitioning.backward is not None:
        computed = partitioning.backward(backward, part, results, cotangents)
    else:
        computed = backward(partitioning.on_part(part), results, cotangents)
    parts = partitioning.on_gradients({name: computed[name] for name in dtypes})
    return {name: _summed(each, partitioning.gradients[name], dtypes[name], narrow) for name, each in parts.items()}


def over_explicit_axes(
    function: Callable[[dict[str, Any]], Any],
    mesh: AbstractMesh | Mesh,
    operands: dict[str, Any],
    specs: dict[str, PartitionSpec],
    out_specs: Any,
) -> Any:
    """``function(operands)`` of the devices' parts of arrays by name, inside ``shard_map`` with checked types.

    Inside of another ``shard_map``, over other axes of the mesh, the backward pass computes the forward pass again: JAX
    0.12 cannot lower the derivative of a nested one whose residuals vary over the outer axes.
    """
    function = default_promotion()(function)  # JAX may trace it again for derivatives, when the caller has returned
    run = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=out_specs)
    operands = placed(operands, specs, mesh)
    axes = varying_axes(operands)
    if not axes:
        return run(operands)
    names = [name for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def gradients(parts: dict[str, Any], cotangents: Any) -> dict[str, Any]:
        _, pull_back = jax.vjp(lambda floats: function(parts | floats), {name: parts[name] for name in names})
        found: dict[str, Any] = pull_back(cotangents)[0]
        return found

    def backward(operands: dict[str, Any], cotangents: Any) -> tuple[dict[str, Any]]:
        out = {name: specs[name] for name in names}
        computed = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, out_specs), out_specs=out)(operands, cotangents)
        return ({name: computed.get(name) for name in operands},)

    nested = jax.custom_vjp(run)
    nested.defvjp(lambda operands: (run(operands), operands), backward)
    return nested(vary_over(axes, operands))


def varying_as[T](results: T, operands: object) -> T:
    """Gives results a type that varies over every axis of a ``shard_map`` over which an operand varies.

    Pallas types the results of a kernel as equal on all devices, so that the gradients of replicated arguments would
    not be summed.
    """
    return vary_over(varying_axes(operands), results)


def varying_axes(tree: object) -> frozenset[str]:
    """The manual mesh axes over which any leaf varies; empty outside of ``shard_map``."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)))


def vary_over[T](axes: frozenset[str], tree: T) -> T:
    """Makes every leaf vary over ``axes``, as the carry of a loop in ``shard_map`` must."""

    def vary(leaf: ArrayLike) -> ArrayLike:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree) if axes else tree


def gathered(array: jax.Array, axis_name: AxisName) -> jax.Array:
    """The arrays of all devices along a new first axis, equal on all devices, and typed so where types say it."""
    # Typed as different on each device, nothing that follows could be returned as one array.
    return lax.all_gather(array, axis_name, to="invarying" if varying_axes(array) else "varying")


def unvarying(array: jax.Array) -> jax.Array:
    """The array with a type that varies over no axis, as the reference that a kernel updates must have.

    The type of its results must be restored, as ``varying_as`` does for all results of a kernel.
    """
    return _unvarying_p.bind(array) if varying_axes(array) else array


_unvarying_p = Primitive("tilewright_unvarying")
_unvarying_p.def_impl(lambda array: array)
_unvarying_p.def_abstract_eval(lambda aval: aval.update(manual_axis_type=type(aval.manual_axis_type)()))
mlir.register_lowering(_unvarying_p, lambda _, array: [array])
batching.primitive_batchers[_unvarying_p] = lambda arrays, axes: (_unvarying_p.bind(*arrays), *axes)


def placed[T](operands: T, specs: object, mesh: AbstractMesh | Mesh) -> T:
    """Reshards operands to a partitioning's specs; slicing a replicated array moves no data."""
    leaves, tree = jax.tree.flatten(operands)
    leaf_specs = jax.tree.leaves(jax.tree.broadcast(specs, operands, is_leaf=_is_spec), is_leaf=_is_spec)
    moved = [jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, leaf_specs, strict=True)]
    return jax.tree.unflatten(tree, moved)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)


def _summed(part: jax.Array, parts: GradientParts, dtype: np.dtype, narrow: bool) -> jax.Array:
    """The sum over mesh axes, accumulated in float32 or wider where it is rounded, or in bfloat16 if ``narrow``."""
    if not parts.summed:
        return part.astype(dtype)
    wide = dtype if parts.disjoint or (narrow and dtype == jnp.bfloat16) else jnp.promote_types(part.dtype, jnp.float32)
    return lax.psum(part.astype(wide), parts.summed).astype(dtype)


def explicit_mesh(*arrays: ArrayLike | jax.ShapeDtypeStruct) -> AbstractMesh | Mesh | None:
    """The mesh over whose explicit axes the type of one of the arrays is split; ``None`` without such an array."""
    sharding = first_sharding(map(jax.typeof, arrays))
    return None if sharding is None else sharding.mesh


def typed_axes(array: jax.Array | jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    """The mesh axes in an array's type, an entry for each dimension."""
    spec = tuple(typed_spec(array))
    return spec + (None,) * (array.ndim - len(spec))


def typed_spec(array: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
    """The ``PartitionSpec`` in an array's type."""
    sharding = explicit_sharding(jax.typeof(array))
    return PartitionSpec() if sharding is None else sharding.spec
