"""Calls that XLA's partitioner splits over the automatic axes of a mesh, with code of their own for a device's part.

How an array is split over automatic axes is decided when a program is compiled. Until then such a call is one operation
of the whole arrays, with a rule by which Shardy splits its results like its operands. When the partitioner comes to it,
it asks here for the code of one device, which is traced and lowered then: so its configs are chosen for the shapes of a
device's part.

JAX's ``custom_partitioning`` is the same mechanism. Its operation is named by the address of an object, so that a
program with one is never found in JAX's cache of compiled programs; and it needs to know the devices when a program is
lowered, which JAX tells only to primitives that it finds in the outermost program.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src import xla_bridge
from jax._src.config import _check_vma
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import SPMDAxisContext
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tilewright.ops.config.agreement import run_by
from tilewright.ops.kernel.splitting import Dimensions
from tilewright.ops.lowering.mlir_modules import Value
from tilewright.ops.utils.promotion import default_promotion

logger = logging.getLogger(__name__)

TARGET = "tilewright.partitioned"
"""The name of the operation in a program."""

type Settings = tuple[bool, str | None]
"""``jax_enable_x64`` and ``jax_default_matmul_precision`` where a call was lowered, under which its parts are, too."""

type Tiling = Sequence[Sequence[tuple[int, int]]]
"""The split of an array over devices in a row: for each dimension the sizes and strides of the axes that split it,
major first."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """The dimensions of a call's arrays that are split together.

    Attributes:
      operands: for each operand.
      results: for each result.
      sizes: of every factor: the number of parts into which it can be split, which divides all of its dimensions.
    """

    operands: tuple[Dimensions, ...]
    results: tuple[Dimensions, ...]
    sizes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The split of a call over a mesh.

    Attributes:
      operands: a spec for each operand.
      results: the same for each result.
      function: the code of a device, of its parts of the operands, under the mesh's axes.
      split: for people: into how many parts each operand is split along each dimension.
      gathered: for people: the operands that were split more than that, and along which dimension.
      repeated: those of them that are gathered over mesh axes over which nothing of the call is split, so that devices
        repeat each other's work.
    """

    operands: Sequence[PartitionSpec]
    results: Sequence[PartitionSpec]
    function: Callable[..., Sequence[Any]]
    split: str = ""
    gathered: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()


class Splittable(Protocol):
    """A call that can be split."""

    @property
    def described(self) -> str:
        """The call for people."""

    @property
    def settings(self) -> Settings:
        """The settings under which the code of a part is traced and lowered."""

    @property
    def operand_types(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the whole operands."""

    @property
    def factors(self) -> Factors:
        """The dimensions that may be split."""

    def parts(self, mesh: AbstractMesh, operands: Sequence[PartitionSpec], results: Sequence[PartitionSpec]) -> Parts:
        """The nearest split to one that the partitioner proposes."""


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A call in a program that is not compiled yet, which so many devices will run."""

    call: Splittable
    count: int
    platforms: tuple[str, ...]
    devices: tuple[jax.Device, ...]


_PENDING: dict[str, _Pending] = {}


def emit(
    ctx: mlir.LoweringRuleContext,
    call: Splittable,
    name: str,
    operands: Sequence[Value],
    devices: Iterable[jax.Device] | None,
) -> Sequence[Value]:
    """Adds a call to a program as one operation that the partitioner splits.

    Args:
      name: that of the call, in the text of the program. JAX keeps compiled programs by their text: what is called
        alike must be compiled alike, in every process.
      devices: those that will run the program, if they are known.
    """
    _register()
    module: Any = ctx.module_context
    platforms = tuple(ctx.platforms or module.platforms)
    pending = _Pending(call, module.axis_context.num_devices, platforms, tuple(devices or ()))
    name = next(each for each in _numbered(name) if _PENDING.setdefault(each, pending) == pending)
    types = [jax_mlir.aval_to_ir_type(module, aval) for aval in ctx.avals_out]
    operation = hlo.CustomCallOp(
        types,
        list(operands),
        call_target_name=ir.StringAttr.get(TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=jax_mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(name),
    )
    rule = _shardy_rule(call.factors, ctx.avals_in, ctx.avals_out)
    operation.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(rule, [x.type for x in operands], types)
    return list(operation.results)


def call_named(name: str) -> Splittable:
    """The call that was lowered under a name in this process."""
    return _PENDING[name].call


def part_structs(call: Splittable, parts: Parts, mesh: AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a device's parts of a call's operands."""
    return [
        jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)
        for x, spec in zip(call.operand_types, parts.operands, strict=True)
    ]


def _numbered(name: str) -> Iterator[str]:
    """The name, and others for calls that it does not tell from this one, such as those of another overlay."""
    return itertools.chain([name], (f"{name}~{i}" for i in itertools.count(1)))


def _shardy_rule(factors: Factors, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """The factors in Shardy's form: each dimension is a factor, or one and the rest of it."""
    whole = (f"whole{i}" for i in itertools.count())
    sizes: dict[str, int] = {}
    inferred: set[str] = set()

    def dimension(size: int, factor: str | None) -> Any:
        if factor is None:
            return next(whole)
        if size == factors.sizes[factor]:
            inferred.add(factor)
            return factor
        rest = size // factors.sizes[factor]
        other = f"{factor}rest{rest}x"
        sizes.update({factor: factors.sizes[factor], other: rest})
        return CompoundFactor(factor, other)

    def mapping(aval: Any, dimensions: Dimensions) -> ArrayMapping:
        return ArrayMapping(*map(dimension, aval.shape, dimensions))

    in_operands = tuple(map(mapping, operands, factors.operands))
    in_results = tuple(map(mapping, results, factors.results))
    kept = {factor for dimensions in factors.results for factor in dimensions}
    used = {factor for dimensions in factors.operands for factor in dimensions if factor is not None}
    needed: dict[str, Any] = {factor: size for factor, size in sizes.items() if factor not in inferred}
    return SdyShardingRule(
        in_operands,
        in_results,
        reduction_factors=tuple(sorted(used - kept)),
        **needed,
    )


# The partitioner's side.


@functools.cache
def _register() -> None:
    """Makes the operation known to XLA, in this process and in its plugins."""
    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name=TARGET,
        prop_user_sharding=lambda sharding, shape, name: sharding,
        partition=_partition,
        infer_sharding_from_operands=_infer,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def _partition(arg_shapes: Any, arg_shardings: Any, result_shape: Any, result_sharding: Any, name: bytes) -> Any:
    """The program of one device, and the shardings that it takes and gives."""
    pending = _PENDING[name.decode()]
    is_tuple = result_shape.is_tuple()
    result_shapes = result_shape.tuple_shapes() if is_tuple else [result_shape]
    result_shardings = result_sharding.tuple_elements() if is_tuple else [result_sharding]
    shapes = [tuple(shape.dimensions()) for shape in (*arg_shapes, *result_shapes)]
    tilings = [_tiling(sharding) for sharding in (*arg_shardings, *result_shardings)]
    mesh, specs = decoded(tilings, [len(shape) for shape in shapes], pending.count)
    parts = pending.call.parts(mesh, specs[: len(arg_shapes)], specs[len(arg_shapes) :])
    shardings = [
        NamedSharding(mesh, spec)._to_xla_hlo_sharding(len(shape))
        for spec, shape in zip((*parts.operands, *parts.results), shapes, strict=True)
    ]
    if parts.repeated:
        _warn(pending.call.described, parts.repeated)
    operands, results = shardings[: len(arg_shapes)], shardings[len(arg_shapes) :]
    x64, precision = pending.call.settings
    devices = pending.devices or None
    with contextlib.ExitStack() as stack:
        for each in (on_device(mesh), jax.enable_x64(x64), jax.default_matmul_precision(precision)):
            stack.enter_context(each)
        stack.enter_context(default_promotion())
        stack.enter_context(run_by(lambda: devices))
        module = jax_mlir.build_mlir_module_helper(
            jax.make_jaxpr(parts.function)(*part_structs(pending.call, parts, mesh)),
            name="part",
            platforms=pending.platforms,
            backend=None,
            axis_context=SPMDAxisContext(cast(Any, mesh), frozenset(mesh.axis_names)),
        )
    packed = xla_client.HloSharding.tuple_sharding(result_shape, results) if is_tuple else results[0]
    return jax_mlir.module_to_bytecode(module), operands, packed


@contextlib.contextmanager
def on_device(mesh: AbstractMesh) -> Iterator[None]:
    """A context for tracing and lowering what a device does: as inside of a ``shard_map`` with unchecked types."""
    around = jax.sharding.get_abstract_mesh()
    manual = AbstractMesh(
        mesh.axis_sizes,
        mesh.axis_names,
        axis_types=(AxisType.Manual,) * len(mesh.axis_names),
        abstract_device=around.abstract_device,
    )
    with jax.sharding.use_abstract_mesh(manual), jax_core.extend_axis_env_nd(mesh.shape.items()), _check_vma(False):
        yield


@functools.lru_cache(maxsize=1024)
def _warn(call: str, repeated: tuple[str, ...]) -> None:
    """Says once that devices do the same work, and what to do."""
    logger.warning(
        "%s: every device gathers %s and computes what the others do, since the call cannot be split there; place it "
        "another way before the call (jax.lax.with_sharding_constraint), or see tilewright.explain",
        call,
        ", ".join(repeated),
    )


def _infer(arg_shapes: Any, arg_shardings: Any, result_shape: Any, name: bytes) -> Any:
    raise NotImplementedError("calls of tilewright are split by Shardy alone (jax_use_shardy_partitioner)")


def decoded(tilings: Sequence[Tiling], ranks: Sequence[int], devices: int) -> tuple[AbstractMesh, list[PartitionSpec]]:
    """Splits of arrays as specs over one mesh of all devices: the coarsest whose axes express all of them.

    Raises:
      ValueError: there is none.
    """
    ends = {1, devices} | {end for t in tilings for dim in t for size, stride in dim for end in (stride, size * stride)}
    bounds = sorted(ends, reverse=True)
    if any(big % small for big, small in itertools.pairwise(bounds)):
        raise ValueError(f"no mesh has axes with all of the strides and ends {bounds}")
    names = {small: f"axis{i}" for i, small in enumerate(bounds[1:])}
    mesh = AbstractMesh(tuple(big // small for big, small in itertools.pairwise(bounds)), tuple(names.values()))

    def axes(dim: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        return tuple(name for size, stride in dim for end, name in names.items() if stride <= end < size * stride)

    specs = [PartitionSpec(*(axes(dim) or None for dim in t[:rank])) for t, rank in zip(tilings, ranks, strict=True)]
    return mesh, specs


def _tiling(sharding: Any) -> Tiling:
    """XLA's form of a split; one that Shardy does not make becomes that of a whole array."""
    if not sharding.is_tiled():
        return []
    sizes = sharding.tile_assignment_dimensions()
    ids = np.array(sharding.tile_assignment_devices()).reshape(sizes)
    found = []
    for i, size in enumerate(sizes):
        along = np.moveaxis(ids, i, 0).reshape(size, -1)[:, 0] - ids.flat[0]
        dim: list[tuple[int, int]] = []
        while size > 1:
            stride = int(along[1])
            length = next((j for j in range(1, size) if along[j] != j * stride), size)
            dim.append((length, stride))
            along, size = along[::length], size // length
        found.append(dim[::-1])
    return found
