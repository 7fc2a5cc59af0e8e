"""The split of calls of a lowered program as Shardy will choose it, without compiling, also for absent devices."""

import dataclasses
import math
from typing import Any

import jax
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from tilewright.ops.lowering import partitioned
from tilewright.ops.lowering.found_calls import FoundCall, found_calls
from tilewright.ops.lowering.occurrences import walk
from tilewright.ops.lowering.partitioned import TARGET, Parts, Tiling

_PIPELINE = "builtin.module(sdy-propagation-pipeline)"


@dataclasses.dataclass(frozen=True)
class SplitPlace:
    """One place of a program with a call that is split.

    Attributes:
      name: the operation's name, which begins with that of the whole call.
      times: the number of times that a run comes there.
      parts: the split.
      calls: those of a device's part, with the calls that their configs make.
    """

    name: str
    times: int
    parts: Parts
    calls: tuple[FoundCall, ...]


def split_places(lowered: jax.stages.Lowered) -> list[SplitPlace]:
    """The split calls of a program."""
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(jax_mlir.module_to_bytecode(module))
        passmanager.PassManager.parse(_PIPELINE).run(copy.operation)
        meshes = _meshes(copy)
        devices = max(math.prod(axis.size for axis in map(sdy.MeshAxisAttr, x.axes)) for x in meshes.values())
        return [_place(op, times, meshes, devices) for op, times in walk(copy) if _is_split(op)]


def _meshes(module: Any) -> dict[str, Any]:
    found = (op.operation.attributes for op in module.body.operations if op.operation.name == "sdy.mesh")
    return {each["sym_name"].value: sdy.MeshAttr(each["mesh"]) for each in found}


def _is_split(operation: Any) -> bool:
    return bool(operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == TARGET)


def _place(operation: Any, times: int, meshes: dict[str, Any], devices: int) -> SplitPlace:
    name = operation.attributes["backend_config"].value
    values = [*operation.operands, *operation.results]
    tilings = [_tiling(_sharding(value), meshes) for value in values]
    shapes = [tuple(value.type.shape) for value in values]
    mesh, specs = partitioned.decoded(tilings, [len(shape) for shape in shapes], devices)
    call = partitioned.call_named(name)
    count = len(operation.operands)
    parts = call.parts(mesh, specs[:count], specs[count:])
    with partitioned.on_device(mesh):
        return SplitPlace(
            name, times, parts, tuple(found_calls(parts.function, partitioned.part_structs(call, parts, mesh)))
        )


def _sharding(value: Any) -> Any:
    """The sharding of a value, where it is defined; ``None`` if it is whole."""
    parent: Any
    if isinstance(value, ir.BlockArgument):
        parent, index = value.owner.owner.operation, value.arg_number
        if parent.name == "func.func":
            attributes: Any = parent.attributes["arg_attrs"][index] if "arg_attrs" in parent.attributes else {}
            return sdy.TensorShardingAttr(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None
    else:
        parent, index = value.owner.operation, value.result_number
    if "sdy.sharding" not in parent.attributes:  # the arguments of a loop's body are split like its results
        return None
    shardings = sdy.TensorShardingPerValueAttr(parent.attributes["sdy.sharding"]).shardings
    return sdy.TensorShardingAttr(shardings[index]) if index < len(shardings) else None


def _tiling(sharding: Any, meshes: dict[str, Any]) -> Tiling:
    if sharding is None:
        return []
    name = str(sharding.mesh_or_ref).removeprefix("@")
    mesh = meshes[name] if name in meshes else sdy.MeshAttr(sharding.mesh_or_ref)
    sizes = {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, mesh.axes)}
    names = list(sizes)
    strides = {name: math.prod(sizes[other] for other in names[i + 1 :]) for i, name in enumerate(names)}

    def axis(reference: Any) -> tuple[int, int]:
        reference = sdy.AxisRefAttr(reference)
        name, part = reference.name, reference.sub_axis_info
        if part is None:
            return sizes[name], strides[name]
        part = sdy.SubAxisInfoAttr(part)
        return part.size, strides[name] * sizes[name] // (part.pre_size * part.size)

    return [
        [axis(each) for each in sdy.DimensionShardingAttr(dimension).axes] for dimension in sharding.dimension_shardings
    ]
