"""Everything besides the call that its trace and lowering depend on: settings, mesh, enclosing program."""

import contextlib
import dataclasses
import enum
import functools
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src import config as jax_config
from jax._src import source_info_util, traceback_util
from jax._src.core import AxisEnv
from jax._src.mesh import get_concrete_mesh
from jax._src.sharding_impls import ShardingContext
from jax._src.source_info_util import _source_info_context, new_source_info
from jax._src.xla_metadata_lib import XlaMetadata
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir

from tilewright.ops.config.context import overrides_key, without_overrides
from tilewright.ops.kernel.arrays import first_sharding

# What JAX prints of a program, and its tracebacks, name the caller's line, not one of this package, as for JAX's own.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
source_info_util.register_exclusion(_PACKAGE)
traceback_util.register_exclusion(_PACKAGE)

# Environment variables that kernels read while they are traced.
_VARIABLES = ("TILEWRIGHT_DEBUG",)


class NotDescribableError(TypeError):
    """A setting has no form by which another process could recognise it."""


def trace_settings() -> Hashable:
    """Everything, besides function and arguments, in the keys of JAX's trace caches, and the variables that kernels
    read.

    Settings that decide only configs are left out, and so are the user's label and checks that ``jax.checkpoint``
    switches on.
    """
    with without_overrides(), without_label(), jax_config.mutable_array_checks(True):
        return jax_config.trace_context(), _pallas_settings(), tuple(os.environ.get(name, "") for name in _VARIABLES)


def choice_settings() -> Hashable:
    """The trace settings and those that decide configs: for traces with calls whose configs are not chosen yet."""
    return trace_settings(), overrides_key()


def _pallas_settings() -> tuple[tuple[str, Any], ...]:
    """Settings that the lowering of Pallas kernels reads and that are not part of JAX's own keys."""
    values = jax.config.values
    return tuple((name, values[name]) for name in _pallas_names(len(values)))


@functools.lru_cache(maxsize=1)
def _pallas_names(count: int) -> tuple[str, ...]:
    """The names of those settings, computed again after modules have defined more."""
    return tuple(sorted(name for name in jax.config.values if name.startswith(("jax_pallas", "jax_mosaic"))))


def without_label() -> AbstractContextManager[Any]:
    """A context without the user's label: a kernel's code is the same under any label, and its call keeps the name."""
    context: AbstractContextManager[Any] = set_xla_metadata(tilewright_label=None)
    return context


@contextlib.contextmanager
def without_source_locations() -> Iterator[None]:
    """A context in which traced and lowered code records no names or lines of the program around it."""
    before = _source_info_context.context
    _source_info_context.context = new_source_info()
    try:
        yield
    finally:
        _source_info_context.context = before


def is_dumping() -> bool:
    """True if the Mosaic GPU compiler was asked to dump its work, so that it must compile every kernel itself."""
    return any(name.startswith("MOSAIC_GPU_DUMP_") or name == "MOSAIC_GPU_LLVM_DEBUG_ONLY" for name in os.environ)


def described(value: object) -> Any:
    """A setting as JSON data.

    Raises:
      NotDescribableError: the setting has no such form.
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return {"enum": [type(value).__qualname__, value.name]}
    if isinstance(value, tuple | list):
        return [described(item) for item in value]
    if isinstance(value, frozenset | set):
        return {"set": sorted((described(item) for item in value), key=repr)}
    if isinstance(value, Mapping):
        return {"map": sorted(([described(k), described(v)] for k, v in value.items()), key=repr)}
    for kind, describe in _DESCRIPTIONS.items():
        if isinstance(value, kind):
            return {kind.__name__: described(describe(value))}
    raise NotDescribableError(f"{value!r} of type {type(value).__qualname__}")


_DESCRIPTIONS: dict[type, Any] = {
    jax.sharding.AbstractMesh: lambda mesh: (
        mesh.axis_names, mesh.axis_sizes, mesh.axis_types, mesh.abstract_device,
    ),
    jax.sharding.AbstractDevice: lambda device: (device.device_kind, device.platform, device.num_cores),
    jax.sharding.Mesh: lambda mesh: (
        mesh.axis_names, mesh.axis_types, mesh.devices.shape, tuple(mesh.devices.flat),
    ),
    jax.Device: lambda device: (device.platform, device.device_kind, device.id),
    AxisEnv: lambda axes: (dict(axes.axis_sizes), axes.spmd_axis_names, axes.explicit_mesh_axis_names),
    XlaMetadata: lambda metadata: metadata.val,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class LoweringContext:
    """Properties of the enclosing program that a call's lowering depends on.

    Attributes:
      platform: the platform that the program is lowered for.
      axes: the devices, and the mesh with its manual axes, as JAX's lowering context holds them.
      parameters: parameters of the lowering, such as whether it is for export.
      forward_compatible: True if older compilers must understand the result.
      default_memory: True if all arrays of the program are in the device's default memory.
    """

    platform: str
    axes: Any
    parameters: Any
    forward_compatible: bool
    default_memory: bool

    def described(self) -> Any:
        """The properties as JSON data.

        Raises:
          NotDescribableError: a property has no such form, such as lowering rules that a caller gave.
        """
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: described(_fields(value)) for name, value in fields}


def _fields(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, **named}
    return value


def program_devices(ctx: mlir.LoweringRuleContext) -> Iterable[jax.Device] | None:
    """The devices that will run the program that is being lowered; ``None`` if JAX does not say.

    JAX lowers for a number of devices. It would name them to primitives that it is told to, but then refuses programs
    with several meshes. One device is this process's own; several are those of ``shard_map`` or of the mesh in force.
    """
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if isinstance(axes, ShardingContext):
        if axes.num_devices == 1 or axes.device_assignment is not None:
            return axes.device_assignment or jax.local_devices()[:1]
        mesh = get_concrete_mesh()
        if mesh.size != axes.num_devices:
            return None
    return tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty else None


def is_automatic(ctx: mlir.LoweringRuleContext) -> bool:
    """True if XLA decides how the operands of an operation are split over several devices, for one platform.

    Not so where types decide it, inside of ``shard_map``, and in a program that another process will compile.
    """
    module = ctx.module_context
    axes = module.axis_context
    if not isinstance(axes, ShardingContext) or axes.num_devices == 1:
        return False
    if not jax.config.jax_use_shardy_partitioner:  # JAX's former partitioner has no rules for these calls
        return False
    if len(ctx.platforms or module.platforms) > 1 or module.lowering_parameters.for_export:
        return False
    meshes = [sharding.mesh for aval in ctx.avals_in if (sharding := getattr(aval, "sharding", None)) is not None]
    return all(mesh.empty or mesh._any_axis_auto for mesh in meshes) and first_sharding(ctx.avals_in) is None


def operand_devices(operands: Iterable[object]) -> Iterable[jax.Device] | None:
    """The devices of concrete arrays; ``None`` if one is traced."""
    arrays = list(operands)
    if not all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    return {device for x in arrays if isinstance(x, jax.Array) for device in x.devices()}


def traced_devices(operands: Iterable[object]) -> Iterable[jax.Device] | None:
    """The devices of concrete arrays, or else those of the mesh in force; ``None`` if there is none."""
    mesh = get_concrete_mesh()
    return operand_devices(operands) or (None if mesh.empty else tuple(mesh.devices.flat))


def lowering_context(ctx: mlir.LoweringRuleContext) -> LoweringContext | None:
    """The properties from a lowering rule's context; ``None`` if a shared lowering would not fit into the program.

    That is the case in a program for several platforms, in one with symbolic dimensions, and on TPUs, where Pallas
    numbers the kernels of a program.
    """
    module = ctx.module_context
    platforms = ctx.platforms or module.platforms
    if len(module.platforms) != 1 or tuple(platforms) != tuple(module.platforms) or platforms[0] == "tpu":
        return None
    if module.shape_poly_state.dim_vars or module.lowering_parameters.override_lowering_rules is not None:
        return None
    axes = module.axis_context
    if isinstance(axes, ShardingContext) and axes.num_devices == 1:
        # the lowering does not depend on which of its devices a process uses
        axes = dataclasses.replace(axes, device_assignment=None)
    return LoweringContext(
        platforms[0],
        axes,
        module.lowering_parameters,
        ctx.is_forward_compat(),
        module.all_default_mem_kind,
    )
