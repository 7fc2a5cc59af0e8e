"""Splits an op over the automatic axes of a mesh, along whatever it may be split by its types on explicit axes.

Which dimensions of a call's arrays go together is read off the op's partitioning: one dimension at a time is typed as
split, and the partitioning says which dimensions of the others follow, or that this one must be whole.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Never

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.declared import result_like
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    argument_of,
    axis_names,
    backward_on_part,
    forward_on_part,
)
from tilewright.ops.config.chooser import Selection
from tilewright.ops.kernel.arrays import Structure, split
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.lowering import partitioned
from tilewright.ops.lowering.call import Selector, apply_stage, batching_rule
from tilewright.ops.lowering.labels import call_label
from tilewright.ops.lowering.partitioned import AUTOMATIC, Dimensions, Factors, Parts
from tilewright.ops.lowering.stages import CHOOSING, map_axes
from tilewright.ops.lowering.surroundings import program_devices
from tilewright.ops.types import Device, Direction, MappedAxis
from tilewright.ops.utils.describe import describe_key
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.sources import packages_fingerprint

_PROCESS = os.urandom(8).hex()
_WHOLE = GradientParts(PartitionSpec(), (), PartitionSpec())


class Automatic(Backend[OpInputs, Any, Selector, Selector]):
    """Stands for the backend of a call that XLA's partitioner splits."""

    name: ClassVar[str] = AUTOMATIC
    platform: ClassVar[Platform] = Platform.XLA

    def __init__(self, op: Any) -> None:
        self._op = op

    def forward(self, inputs: OpInputs, params: Selector) -> Any:
        return self._bind("forward", params, inputs, None, None)

    def backward(self, inputs: OpInputs, results: Any, cotangents: Any, params: Selector) -> dict[str, Any]:
        found: dict[str, Any] = self._bind("backward", params, inputs, results, cotangents)
        return found

    def _bind(self, direction: Direction, selector: Selector, *operands: Any) -> Any:
        arrays, structure = split(operands)
        call = SplitCall(self._op, selector, structure, direction)
        tree: Any = jax.tree.structure(call.results(operands[0].structs))
        return tree.unflatten(split_p.bind(*arrays, call=call, mapped=()))

    def reasons(self, inputs: OpInputs, device: Device, direction: Direction) -> list[str]:
        return ["it is no backend"]

    def candidates(self, inputs: OpInputs, device: Device, direction: Direction) -> tuple[Never, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class SplitCall:
    """One direction of a call that is split, without its arrays.

    Attributes:
      structure: of the inputs, and of the residuals and the cotangents, which are ``None`` forward.
    """

    op: Any
    selector: Selector
    structure: Structure
    direction: Direction

    def results(self, inputs: OpInputs) -> Any:
        """The abstract results of the whole call or, by shapes of a part, of that."""
        return self.op.results(inputs) if self.direction == "forward" else inputs.gradients


split_p = Primitive("tilewright_split")
split_p.multiple_results = True
CHOOSING.add(split_p)


def _elements(avals: Sequence[Any], mapped: Sequence[MappedAxis]) -> list[jax.ShapeDtypeStruct]:
    """The abstract operands of one element, without mapped axes."""
    depths = [sum(axis.mapped[i] for axis in mapped) for i in range(len(avals))]
    return [jax.ShapeDtypeStruct(x.shape[n:], x.dtype) for x, n in zip(avals, depths, strict=True)]


def _abstract_eval(*avals: Any, call: SplitCall, mapped: tuple[MappedAxis, ...]) -> list[Any]:
    inputs, _, _ = call.structure.join(_elements(avals, mapped))
    structs: list[Any] = jax.tree.leaves(call.results(inputs))
    shapes = [((*(axis.size for axis in mapped), *x.shape), x.dtype) for x in structs]
    return [result_like(avals, shape, dtype, PartitionSpec(*[None] * len(shape))) for shape, dtype in shapes]


split_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[split_p] = functools.partial(batching_rule, split_p)


def _lowering_rule(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: SplitCall, mapped: tuple[MappedAxis, ...]
) -> Any:
    avals: Any = ctx.avals_in
    bound = BoundCall(call, mapped, tuple((x.shape, x.dtype) for x in avals))
    return partitioned.emit(ctx, bound, bound.name, operands, program_devices(ctx))


mlir.register_lowering(split_p, _lowering_rule)


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A call with the shapes of its arrays, which may have mapped axes in front."""

    call: SplitCall
    mapped: tuple[MappedAxis, ...]
    types: tuple[tuple[tuple[int, ...], Any], ...]

    @property
    def operand_types(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the whole operands."""
        return [jax.ShapeDtypeStruct(*each) for each in self.types]

    @functools.cached_property
    def elements(self) -> list[jax.ShapeDtypeStruct]:
        """The abstract operands of one element."""
        return _elements(self.operand_types, self.mapped)

    @functools.cached_property
    def operands(self) -> tuple[Any, Any, Any]:
        """The abstract inputs, residuals and cotangents of one element."""
        found: tuple[Any, Any, Any] = self.call.structure.join(self.elements)
        return found

    @functools.cached_property
    def name(self) -> str:
        """A name that tells the call from all others: its label, with what a label leaves out."""
        inputs, *rest = self.operands
        wanted = None if inputs.wanted is None else sorted(inputs.wanted)
        config = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
        text = repr((wanted, rest, self.mapped, config, toolchain_fingerprint(), self._state))
        label = call_label(self._invocation, Selection(self.call.selector.explicit, AUTOMATIC))
        return f"{label}{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @functools.cached_property
    def _invocation(self) -> Invocation[Any, Any]:
        """The whole call."""
        inputs = self.operands[0]
        count = len(jax.tree.leaves(inputs))
        axes = tuple(MappedAxis(axis.size, axis.mapped[:count]) for axis in self.mapped)
        direction, device = self.call.direction, current_device()
        return Invocation(self.call.op, (inputs,), {}, direction=direction, mapped=axes, device=device)

    @functools.cached_property
    def _state(self) -> Any:
        """What decides the code of a part beside the call: a value of this process alone if some of it is unknown."""
        if not jax.config.jax_compilation_cache_dir:
            return _PROCESS
        selector, op = self.call.selector, self.call.op
        chosen = selector.chooser.state(op.name, selector.overrides)
        sources = packages_fingerprint(frozenset({"tilewright", type(op).__module__.partition(".")[0]}))
        return (chosen, sources) if chosen and sources else _PROCESS

    @functools.cached_property
    def factors(self) -> Factors:
        """The dimensions that may be split, and which of them together."""
        return _factors(self)

    def parts(self, mesh: AbstractMesh, operands: Sequence[PartitionSpec], results: Sequence[PartitionSpec]) -> Parts:
        """The split by the axes of each factor: of several in conflict, those of the array that comes first.

        Results come first, but for gradients: where an axis splits rows of activations and a parameter, too, the
        parameter is gathered, and its gradient is summed.
        """
        arrays = [*zip(self.factors.operands, operands, strict=True)]
        of_results = [*zip(self.factors.results, results, strict=True)]
        if self.call.direction == "backward":
            own = len(jax.tree.leaves(self.operands[0]))
            arrays = [*reversed(arrays[own:]), *arrays[:own], *of_results]
        else:
            arrays = [*of_results, *arrays]
        axes = _axes_of_factors(arrays, mesh, self.factors.sizes)
        explicit = AbstractMesh(
            mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
        )
        while True:
            try:
                parts = self._parts(explicit, axes)
                gathered, idle = self._gathers(operands, parts.operands, axes)
                return dataclasses.replace(parts, gathered=gathered, idle=idle)
            except ValueError:
                if not any(not _is_mapped(factor) for factor in axes):
                    raise
                axes.pop(next(factor for factor in reversed(axes) if not _is_mapped(factor)))

    def _gathers(
        self, proposed: Sequence[PartitionSpec], found: Sequence[PartitionSpec], axes: dict[str, tuple[str, ...]]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The operands that are gathered, and of these the ones over axes that split nothing."""
        used = {name for names in axes.values() for name in names}
        gathered, idle = [], []
        for name, before, after in zip(self._names, proposed, found, strict=True):
            for axis, (had, has) in enumerate(itertools.zip_longest(before, after)):
                lost = set(axis_names(had)) - set(axis_names(has))
                if lost:
                    gathered.append(f"{name} along dimension {axis}")
                    if not lost <= used:
                        idle.append(gathered[-1])
        return tuple(gathered), tuple(idle)

    @functools.cached_property
    def _names(self) -> list[str]:
        """The argument, residual or cotangent that each operand belongs to."""
        inputs, residuals, cotangents = self.operands
        names = [argument_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(inputs)]
        rest = (("a result", residuals), ("a cotangent", cotangents))
        return names + [name for name, tree in rest for _ in jax.tree.leaves(tree)]

    @functools.cached_property
    def described(self) -> str:
        """The call for people."""
        return f"{self.call.op.name} {self.call.direction} {describe_key(self._invocation.key)}"

    def _parts(self, mesh: AbstractMesh, axes: dict[str, tuple[str, ...]]) -> Parts:
        """The split by given axes.

        Raises:
          ValueError: the op cannot be split like that.
        """
        call, (inputs, residuals, cotangents) = self.call, self.operands
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(inputs)
        typed = []
        for i, leaf in enumerate(leaves):
            dimensions = self.factors.operands[i][self._depth(i) :]
            typed.append(
                _typed(
                    leaf,
                    mesh,
                    [_divided(n, axes.get(f or ""), mesh) for n, f in zip(leaf.shape, dimensions, strict=True)],
                )
            )
        partitioning = call.op.partitioning(tree.unflatten(typed))
        if partitioning is None:
            partitioning = Partitioning(mesh, PartitionSpec(), PartitionSpec(), dict.fromkeys(inputs.gradients, _WHOLE))
        specs, of_results = _specs(call, partitioning, inputs, residuals, cotangents)
        mapped_axes = [axes.get(_mapped_name(i)) or None for i in range(len(self.mapped))]
        in_front = [
            [a for a, axis in zip(mapped_axes, self.mapped, strict=True) if axis.mapped[i]] for i in range(len(specs))
        ]
        local = tuple(
            MappedAxis(axis.size // _devices(names or (), mesh), axis.mapped)
            for axis, names in zip(self.mapped, mapped_axes, strict=True)
        )
        return Parts(
            [PartitionSpec(*front, *spec) for front, spec in zip(in_front, specs, strict=True)],
            [PartitionSpec(*mapped_axes, *spec) for spec in of_results],
            map_axes(functools.partial(self._on_part, partitioning), local),
            ", ".join(
                f"{name} into {[_devices(axis_names(entry), mesh) for entry in spec]}"
                for name, spec in zip(self._names, specs, strict=True)
                if any(spec) and not name.startswith("a ")
            ),
        )

    def _on_part(self, partitioning: Partitioning, *arrays: jax.Array) -> list[Any]:
        """One element of a device's part."""
        call = self.call
        inputs, residuals, cotangents = call.structure.join(arrays)
        run = functools.partial(apply_stage, call.op, call.selector)
        if call.direction == "forward":
            return jax.tree.leaves(forward_on_part(functools.partial(run, "results"), partitioning, inputs))
        dtypes = {name: struct.dtype for name, struct in inputs.gradients.items()}
        # XLA sums the gradients of its own matmuls in their dtype, and so does JAX inside of a shard_map.
        found = backward_on_part(
            functools.partial(run, "gradients"), partitioning, dtypes, inputs, residuals, cotangents, narrow=True
        )
        return jax.tree.leaves(found)

    def _depth(self, operand: int) -> int:
        return sum(axis.mapped[operand] for axis in self.mapped)


def _mapped_name(depth: int) -> str:
    return f"mapped{depth}x"


def _is_mapped(factor: str) -> bool:
    return factor.startswith("mapped")


def _axes_of_factors(
    arrays: Sequence[tuple[Dimensions, PartitionSpec]], mesh: AbstractMesh, sizes: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each factor: those of the first array that has some, unless another factor has them."""
    found: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for dimensions, spec in arrays:
        for factor, axes in itertools.zip_longest(dimensions, spec):
            if factor is None or factor in found:
                continue
            names = tuple(itertools.takewhile(lambda name: name not in used, axis_names(axes)))
            if names:
                found[factor] = names
                used.update(names)
    return found


def _divided(size: int, names: tuple[str, ...] | None, mesh: AbstractMesh) -> Any:
    """The entry of a spec for a dimension: as many of the axes as divide it."""
    kept = names or ()
    while kept and size % _devices(kept, mesh):
        kept = kept[:-1]
    # Half of the axes would be another split than that of the other arrays.
    return kept if kept and len(kept) == len(names or ()) else None


def _devices(names: Sequence[str], mesh: AbstractMesh) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _typed(leaf: Any, mesh: AbstractMesh, spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def _specs(
    call: SplitCall, partitioning: Partitioning, inputs: OpInputs, residuals: Any, cotangents: Any
) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    """The specs of a call's operands and of its results."""
    operands = _leaf_specs(partitioning.inputs, inputs)
    if call.direction == "forward":
        return operands, _leaf_specs(partitioning.results, call.results(inputs))
    operands += [spec for rest in (residuals, cotangents) for spec in _leaf_specs(partitioning.results, rest)]
    return operands, [partitioning.gradients[name].spec for name in sorted(inputs.gradients)]  # as JAX flattens


def _leaf_specs(specs: object, operands: object) -> list[PartitionSpec]:
    """The spec of each leaf of operands, from a tree of specs that may end above the leaves."""
    spread = jax.tree.broadcast(specs, operands, is_leaf=_is_spec)
    return jax.tree.leaves(spread, is_leaf=_is_spec)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)


# Which dimensions go together.

type _Dimension = tuple[int, int]
"""An array of a call, as its index among operands and then results, and one of its dimensions."""


def _factors(bound: "BoundCall") -> Factors:
    """The dimensions of a call's arrays that may be split, and which of them together; mapped axes by themselves."""
    call, (inputs, residuals, cotangents) = bound.call, bound.operands
    operands, results = bound.elements, jax.tree.leaves(call.results(inputs))
    named: dict[_Dimension, str] = {}
    shapes = [x.shape for x in (*operands, *results)]
    for dimensions in _together(call, inputs, residuals, cotangents):
        known = next((named[d] for d in dimensions if d in named), f"split{len(named)}x")
        named.update(dict.fromkeys(dimensions, known))
    sizes: dict[str, int] = {}
    for (array, axis), name in named.items():
        sizes[name] = math.gcd(sizes.get(name, 0), shapes[array][axis])
    sizes |= {_mapped_name(i): axis.size for i, axis in enumerate(bound.mapped)}

    def of(array: int) -> Dimensions:
        own = tuple(named.get((array, axis)) for axis in range(len(shapes[array])))
        is_result = array >= len(operands)
        return (*(_mapped_name(i) for i, axis in enumerate(bound.mapped) if is_result or axis.mapped[array]), *own)

    found = [of(i) for i in range(len(shapes))]
    return Factors(tuple(found[: len(operands)]), tuple(found[len(operands) :]), sizes)


def _together(call: SplitCall, inputs: OpInputs, residuals: Any, cotangents: Any) -> Iterator[list[_Dimension]]:
    """The dimensions that the op splits if one of them is split, from each dimension of its inputs."""
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    names, shapes = [argument_of(path) for path, _ in leaves], [leaf.shape for _, leaf in leaves]
    alike = [{names.index(name): axis for name, axis in group.items()} for group in call.op.split_alike(inputs)]
    alone = ({i: axis} for i, shape in enumerate(shapes) for axis, size in enumerate(shape) if size > 1)
    for dimensions in (*alike, *alone):
        yield _following(call, inputs, residuals, cotangents, dimensions)


def _following(
    call: SplitCall, inputs: OpInputs, residuals: Any, cotangents: Any, dimensions: Mapping[int, int]
) -> list[_Dimension]:
    """The dimensions that are split if those of some inputs are; empty if they cannot be."""
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree.flatten(inputs)
    size = math.gcd(*(leaves[i].shape[axis] for i, axis in dimensions.items()))
    parts = next((n for n in range(2, size + 1) if size % n == 0), 0)
    if not parts:
        return []
    mesh = AbstractMesh((parts,), ("probe",), axis_types=(AxisType.Explicit,))
    for i, axis in dimensions.items():
        leaves[i] = _typed(leaves[i], mesh, ["probe" if j == axis else None for j in range(leaves[i].ndim)])
    try:
        partitioning = call.op.partitioning(tree.unflatten(leaves))
    except ValueError:
        return []
    if partitioning is None:
        return []
    specs = itertools.chain(*_specs(call, partitioning, inputs, residuals, cotangents))
    return [(i, j) for i, spec in enumerate(specs) for j, axes in enumerate(spec) if "probe" in axis_names(axes)]
