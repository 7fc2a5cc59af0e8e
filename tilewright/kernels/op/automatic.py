"""Splits an op over the automatic axes of a mesh, along whatever it may be split by its types on explicit axes.

Which dimensions of a call's arrays go together is read off the op's partitioning: one dimension at a time is typed as
split, and the partitioning says which dimensions of the others follow, or that this one must be whole.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Never

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    argument_of,
    axis_names,
    backward_on_part,
    forward_on_part,
)
from tilewright.ops.kernel.arrays import Structure, split
from tilewright.ops.kernel.splitting import AUTOMATIC, BIND_SPLIT, Dimensions, PartOfCall, RunStage
from tilewright.ops.types import Device, Direction

_WHOLE = GradientParts(PartitionSpec(), (), PartitionSpec())


class Automatic(Backend[OpInputs, Any, Any, Any]):
    """Stands for the backend of a call that XLA's partitioner splits; its params are what chooses a part's config."""

    name: ClassVar[str] = AUTOMATIC
    platform: ClassVar[Platform] = Platform.XLA

    def __init__(self, op: Any) -> None:
        self._op = op

    def forward(self, inputs: OpInputs, params: Any) -> Any:
        return self._run("forward", params, inputs, None, None)

    def backward(self, inputs: OpInputs, results: Any, cotangents: Any, params: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._run("backward", params, inputs, results, cotangents)
        return found

    def _run(self, direction: Direction, selector: Any, *operands: Any) -> Any:
        arrays, structure = split(operands)
        call = SplitCall(self._op, structure, direction)
        tree: Any = jax.tree.structure(call.tree_of_results(operands[0].structs))
        return tree.unflatten(BIND_SPLIT.function(call, selector, arrays))

    def reasons(self, inputs: OpInputs, device: Device, direction: Direction) -> list[str]:
        return ["it is no backend"]

    def candidates(self, inputs: OpInputs, device: Device, direction: Direction) -> tuple[Never, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class SplitCall:
    """One direction of a call of an op, as the lowering splits it (`Splitting`).

    Attributes:
      kernel: the op.
      structure: of the inputs, and of the residuals and the cotangents, which are ``None`` forward.
    """

    kernel: Any
    structure: Structure
    direction: Direction

    def tree_of_results(self, inputs: OpInputs) -> Any:
        """The abstract results of the whole call or, by shapes of a part, of that."""
        return self.kernel.results(inputs) if self.direction == "forward" else inputs.gradients

    def inputs(self, operands: Sequence[Any]) -> Any:
        return self.structure.join(operands)[0]

    def results(self, operands: Sequence[Any]) -> Sequence[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(self.tree_of_results(self.inputs(operands)))

    def names(self, operands: Sequence[Any]) -> Sequence[str]:
        leaves = jax.tree_util.tree_leaves_with_path(self.inputs(operands))
        names = [argument_of(path) for path, _ in leaves]
        return names + [""] * (len(operands) - len(names))

    def identity(self, operands: Sequence[Any]) -> str:
        inputs, *rest = self.structure.join(operands)
        return repr((None if inputs.wanted is None else sorted(inputs.wanted), rest))

    def priority(self, operands: Sequence[Any]) -> Sequence[int]:
        """Results come first; of gradients, cotangents do, and they themselves last.

        So where an axis splits rows of activations and a parameter, too, the parameter is gathered, and its gradient
        is summed.
        """
        count = len(operands)
        indices = range(count + len(self.results(operands)))
        if self.direction == "forward":
            return [*indices[count:], *indices[:count]]
        own = len(jax.tree.leaves(self.inputs(operands)))
        return [*reversed(indices[own:count]), *indices[:own], *indices[count:]]

    def dimensions(self, operands: Sequence[Any]) -> tuple[Sequence[Dimensions], Sequence[Dimensions]]:
        return _dimensions(self, tuple((x.shape, x.dtype) for x in operands))

    def find_dimensions(self, operands: Sequence[Any]) -> tuple[Sequence[Dimensions], Sequence[Dimensions]]:
        """`dimensions`, from the op's partitioning."""
        named: dict[tuple[int, int], str] = {}
        for together in self._together(operands):
            known = next((named[each] for each in together if each in named), f"split{len(named)}x")
            named.update(dict.fromkeys(together, known))
        shapes = [x.shape for x in (*operands, *self.results(operands))]
        found = [tuple(named.get((i, axis)) for axis in range(len(shape))) for i, shape in enumerate(shapes)]
        return found[: len(operands)], found[len(operands) :]

    def part(
        self, operands: Sequence[Any], mesh: AbstractMesh, axes: Mapping[str, tuple[str, ...]], run: RunStage
    ) -> PartOfCall:
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(self.inputs(operands))
        of_leaves = self.dimensions(operands)[0]
        typed = [
            _typed(
                x, mesh, [_divided(size, axes.get(f or "", ()), mesh) for size, f in zip(x.shape, dims, strict=True)]
            )
            for x, dims in zip(leaves, of_leaves, strict=False)
        ]
        partitioning = self.kernel.partitioning(tree.unflatten(typed))
        if partitioning is None:
            gradients = dict.fromkeys(self.inputs(operands).gradients, _WHOLE)
            partitioning = Partitioning(mesh, PartitionSpec(), PartitionSpec(), gradients)
        specs = self._specs(partitioning, operands)
        return PartOfCall(*specs, functools.partial(self._on_part, partitioning, run))

    def _on_part(self, partitioning: Partitioning, run: RunStage, *arrays: jax.Array) -> list[Any]:
        """One element of a device's part."""
        inputs, residuals, cotangents = self.structure.join(arrays)
        if self.direction == "forward":
            return jax.tree.leaves(forward_on_part(functools.partial(run, "results"), partitioning, inputs))
        dtypes = {name: struct.dtype for name, struct in inputs.gradients.items()}
        # XLA sums the gradients of its own matmuls in their dtype, and so does JAX inside of a shard_map.
        found = backward_on_part(
            functools.partial(run, "gradients"), partitioning, dtypes, inputs, residuals, cotangents, narrow=True
        )
        return jax.tree.leaves(found)

    def _specs(
        self, partitioning: Partitioning, operands: Sequence[Any]
    ) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """The specs of a call's operands and of its results."""
        inputs, residuals, cotangents = self.structure.join(operands)
        found = _leaf_specs(partitioning.inputs, inputs)
        if self.direction == "forward":
            return found, _leaf_specs(partitioning.results, self.kernel.results(inputs))
        found += [spec for rest in (residuals, cotangents) for spec in _leaf_specs(partitioning.results, rest)]
        return found, [partitioning.gradients[name].spec for name in sorted(inputs.gradients)]  # as JAX flattens

    def _together(self, operands: Sequence[Any]) -> Iterator[list[tuple[int, int]]]:
        """The dimensions that are split if one of the inputs' is: the index of an array, and that of a dimension."""
        inputs = self.inputs(operands)
        names, shapes = self.names(operands), [leaf.shape for leaf in jax.tree.leaves(inputs)]
        groups = self.kernel.split_alike(inputs)
        alike = [{names.index(name): axis for name, axis in group.items()} for group in groups]
        alone = ({i: axis} for i, shape in enumerate(shapes) for axis, size in enumerate(shape) if size > 1)
        for dimensions in (*alike, *alone):
            yield self._following(operands, dimensions)

    def _following(self, operands: Sequence[Any], dimensions: Mapping[int, int]) -> list[tuple[int, int]]:
        """The dimensions that are split if those of some inputs are; empty if they cannot be."""
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(self.inputs(operands))
        size = math.gcd(*(leaves[i].shape[axis] for i, axis in dimensions.items()))
        parts = next((n for n in range(2, size + 1) if size % n == 0), 0)
        if not parts:
            return []
        mesh = AbstractMesh((parts,), ("probe",), axis_types=(AxisType.Explicit,))
        for i, axis in dimensions.items():
            leaves[i] = _typed(leaves[i], mesh, ["probe" if j == axis else None for j in range(leaves[i].ndim)])
        try:
            partitioning = self.kernel.partitioning(tree.unflatten(leaves))
        except ValueError:
            return []
        if partitioning is None:
            return []
        specs = [spec for each in self._specs(partitioning, operands) for spec in each]
        return [(i, j) for i, spec in enumerate(specs) for j, axes in enumerate(spec) if "probe" in axis_names(axes)]


@functools.lru_cache(maxsize=1024)
def _dimensions(
    call: SplitCall, types: tuple[tuple[tuple[int, ...], Any], ...]
) -> tuple[Sequence[Dimensions], Sequence[Dimensions]]:
    return call.find_dimensions([jax.ShapeDtypeStruct(*each) for each in types])


def _divided(size: int, names: tuple[str, ...], mesh: AbstractMesh) -> tuple[str, ...] | None:
    """The entry of a spec for a dimension: the axes if they divide it, since some would be another array's split."""
    return names if names and size % math.prod(mesh.shape[name] for name in names) == 0 else None


def _typed(leaf: Any, mesh: AbstractMesh, spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def _leaf_specs(specs: object, operands: object) -> list[PartitionSpec]:
    """The spec of each leaf of operands, from a tree of specs that may end above the leaves."""
    spread = jax.tree.broadcast(specs, operands, is_leaf=_is_spec)
    return jax.tree.leaves(spread, is_leaf=_is_spec)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)
