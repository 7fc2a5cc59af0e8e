"""The primitive of a call that XLA splits over automatic mesh axes, with mapped axes, and its code for a part."""

import dataclasses
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tilewright.ops.config.chooser import Selection
from tilewright.ops.kernel.arrays import axis_names, result_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.splitting import AUTOMATIC, BIND_SPLIT, Dimensions, Splitting
from tilewright.ops.lowering import partitioned
from tilewright.ops.lowering.call import Selector, apply_stage, batching_rule
from tilewright.ops.lowering.labels import attach, call_label, call_name
from tilewright.ops.lowering.partitioned import Factors, Parts, Settings
from tilewright.ops.lowering.stages import CHOOSING, map_axes
from tilewright.ops.lowering.surroundings import program_devices
from tilewright.ops.types import MappedAxis
from tilewright.ops.utils.describe import describe_key
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.sources import packages_fingerprint

_PROCESS = os.urandom(8).hex()

split_p = Primitive("tilewright_split")
split_p.multiple_results = True
CHOOSING.add(split_p)


def _bind(call: Splitting, selector: Selector, operands: Sequence[Any]) -> list[Any]:
    found: list[Any] = split_p.bind(*operands, call=call, selector=selector, mapped=())
    return found


BIND_SPLIT.fill(_bind)


def _elements(avals: Sequence[Any], mapped: Sequence[MappedAxis]) -> list[jax.ShapeDtypeStruct]:
    """The abstract operands of one element, without mapped axes."""
    depths = [sum(axis.mapped[i] for axis in mapped) for i in range(len(avals))]
    return [jax.ShapeDtypeStruct(x.shape[n:], x.dtype) for x, n in zip(avals, depths, strict=True)]


def _abstract_eval(*avals: Any, call: Splitting, selector: Selector, mapped: tuple[MappedAxis, ...]) -> list[Any]:
    structs = call.results(_elements(avals, mapped))
    shapes = [((*(axis.size for axis in mapped), *x.shape), x.dtype) for x in structs]
    return [result_like(avals, shape, dtype, PartitionSpec(*[None] * len(shape))) for shape, dtype in shapes]


split_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[split_p] = functools.partial(batching_rule, split_p)


def _lowering_rule(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: Splitting, selector: Selector, mapped: tuple[MappedAxis, ...]
) -> Any:
    avals: Any = ctx.avals_in
    settings = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
    bound = BoundCall(call, selector, mapped, tuple((x.shape, x.dtype) for x in avals), settings)
    attach(ctx.module_context.module, bound.label)
    return partitioned.emit(ctx, bound, bound.name, operands, program_devices(ctx))


mlir.register_lowering(split_p, _lowering_rule)


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A call with the shapes of its arrays, which may have mapped axes in front."""

    call: Splitting
    selector: Selector
    mapped: tuple[MappedAxis, ...]
    types: tuple[tuple[tuple[int, ...], Any], ...]
    settings: Settings

    @property
    def operand_types(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the whole operands."""
        return [jax.ShapeDtypeStruct(*each) for each in self.types]

    @functools.cached_property
    def elements(self) -> list[jax.ShapeDtypeStruct]:
        """The abstract operands of one element."""
        return _elements(self.operand_types, self.mapped)

    @functools.cached_property
    def name(self) -> str:
        """A name that tells the call from all others: as of a call with its label, with what a label leaves out."""
        identity = self.call.identity(self.elements)
        text = repr((identity, self.mapped, self.settings, toolchain_fingerprint(), self._state))
        return f"{call_name(self.label, AUTOMATIC)}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @functools.cached_property
    def label(self) -> str:
        """The label of the whole call."""
        return call_label(self._invocation, Selection(self.selector.explicit, AUTOMATIC))

    @functools.cached_property
    def described(self) -> str:
        """The call for people."""
        return f"{self.call.kernel.name} {self.call.direction} {describe_key(self._invocation.key)}"

    @functools.cached_property
    def _invocation(self) -> Invocation[Any, Any]:
        """The whole call."""
        inputs = self.call.inputs(self.elements)
        count = len(jax.tree.leaves(inputs))
        axes = tuple(MappedAxis(axis.size, axis.mapped[:count]) for axis in self.mapped)
        return Invocation(
            self.call.kernel, (inputs,), {}, direction=self.call.direction, mapped=axes, device=current_device()
        )

    @functools.cached_property
    def _state(self) -> Any:
        """All that decides the code of a part beside the call; of this process alone if some of it is unknown."""
        if not jax.config.jax_compilation_cache_dir:
            return _PROCESS
        kernel = self.call.kernel
        chosen = self.selector.chooser.state(kernel.name, self.selector.overrides)
        sources = packages_fingerprint(frozenset({"tilewright", type(kernel).__module__.partition(".")[0]}))
        return (chosen, sources) if chosen and sources else _PROCESS

    @functools.cached_property
    def factors(self) -> Factors:
        """The dimensions that may be split, and which of them together; mapped axes by themselves."""
        operands, results = self.call.dimensions(self.elements)
        sizes = {_mapped_name(i): axis.size for i, axis in enumerate(self.mapped)}
        shapes = [x.shape for x in (*self.elements, *self.call.results(self.elements))]
        for shape, dimensions in zip(shapes, (*operands, *results), strict=True):
            for size, factor in zip(shape, dimensions, strict=True):
                if factor is not None:
                    sizes[factor] = math.gcd(sizes.get(factor, 0), size)
        front = [_mapped_name(i) for i in range(len(self.mapped))]
        return Factors(
            tuple((*self._in_front(front, i), *each) for i, each in enumerate(operands)),
            tuple((*front, *each) for each in results),
            sizes,
        )

    def _in_front[Axis](self, of_mapped: Sequence[Axis], operand: int) -> list[Axis]:
        """The values of those mapped axes that an operand has."""
        return [each for each, axis in zip(of_mapped, self.mapped, strict=True) if axis.mapped[operand]]

    def parts(self, mesh: AbstractMesh, operands: Sequence[PartitionSpec], results: Sequence[PartitionSpec]) -> Parts:
        """The split by the axes of each factor; where the op cannot be split by all of them, by the first ones."""
        arrays = [*zip((*self.factors.operands, *self.factors.results), (*operands, *results), strict=True)]
        axes = _axes_of_factors([arrays[i] for i in self.call.priority(self.elements)])
        kinds = (AxisType.Explicit,) * len(mesh.axis_names)
        explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
        while True:
            try:
                parts = self._parts(explicit, axes)
            except ValueError:
                left = next((factor for factor in reversed(axes) if not _is_mapped(factor)), None)
                if left is None:
                    raise
                axes.pop(left)
            else:
                gathered, repeated = self._gathers(operands, parts.operands, axes)
                return dataclasses.replace(parts, gathered=gathered, repeated=repeated)

    def _parts(self, mesh: AbstractMesh, axes: Mapping[str, tuple[str, ...]]) -> Parts:
        """The split by given axes.

        Raises:
          ValueError: the op cannot be split like that.
        """
        run = functools.partial(apply_stage, self.call.kernel, self.selector)
        part = self.call.part(self.elements, mesh, axes, run)
        of_mapped = [axes.get(_mapped_name(i)) for i in range(len(self.mapped))]
        counts = [math.prod(mesh.shape[name] for name in names or ()) for names in of_mapped]
        local = tuple(MappedAxis(x.size // n, x.mapped) for x, n in zip(self.mapped, counts, strict=True))
        specs = [PartitionSpec(*self._in_front(of_mapped, i), *spec) for i, spec in enumerate(part.operands)]
        named = zip(self.call.names(self.elements), specs, strict=True)
        split = (f"{name} into {_counts(spec, mesh)}" for name, spec in named if name and any(spec))
        results = [PartitionSpec(*of_mapped, *spec) for spec in part.results]
        return Parts(specs, results, map_axes(part.function, local), ", ".join(split))

    def _gathers(
        self,
        proposed: Sequence[PartitionSpec],
        found: Sequence[PartitionSpec],
        axes: Mapping[str, tuple[str, ...]],
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The operands that are gathered, and of these the ones over axes that split nothing."""
        used = {name for names in axes.values() for name in names}
        gathered, repeated = [], []
        for name, before, after in zip(self.call.names(self.elements), proposed, found, strict=True):
            for axis, (had, has) in enumerate(itertools.zip_longest(before, after)):
                lost = set(axis_names(had)) - set(axis_names(has))
                if lost:
                    gathered.append(f"{name or 'a result or cotangent'} along dimension {axis}")
                    if not lost <= used:
                        repeated.append(gathered[-1])
        return tuple(gathered), tuple(repeated)


def _mapped_name(depth: int) -> str:
    return f"mapped{depth}x"


def _is_mapped(factor: str) -> bool:
    return factor.startswith("mapped")


def _counts(spec: PartitionSpec, mesh: AbstractMesh) -> list[int]:
    """The number of parts along each dimension that a spec names."""
    return [math.prod(mesh.shape[name] for name in axis_names(entry)) for entry in spec]


def _axes_of_factors(arrays: Sequence[tuple[Dimensions, PartitionSpec]]) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each factor: those of the first array that has some, unless another factor has them."""
    found: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for dimensions, spec in arrays:
        for factor, axes in itertools.zip_longest(dimensions, spec):
            names = tuple(itertools.takewhile(lambda name: name not in used, axis_names(axes)))
            if factor is not None and factor not in found and names:
                found[factor] = names
                used.update(names)
    return found
