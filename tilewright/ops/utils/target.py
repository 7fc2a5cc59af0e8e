"""A device that is not here, for which programs are lowered, explained and compiled."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
from jax._src import core as jax_core
from jax._src.config import UserConfig
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tilewright.errors import TargetDeviceError
from tilewright.ops.types import Device
from tilewright.ops.utils.known_devices import KnownDevice, find_device
from tilewright.ops.utils.topology import compile_only_devices

AXIS = "target_device"
"""The axis of the mesh in force; JAX's own errors about what cannot run there name it."""


@dataclasses.dataclass(frozen=True, slots=True)
class TargetDevice(AbstractDevice):
    """The device as JAX sees it on a mesh.

    Attributes:
      compute_capability: read by Mosaic GPU, as that of a real GPU; empty for other devices.
      selected: what selection sees.
    """

    compute_capability: str
    selected: Device


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The value that ``target_device`` yields.

    Attributes:
      known: what is known of the device.
      count: how many of them programs run on.
    """

    known: KnownDevice
    count: int

    @property
    def name(self) -> str:
        """JAX's name of the device."""
        return self.known.name

    @property
    def kind(self) -> Literal["gpu", "tpu"]:
        """The kind of device."""
        return self.known.kind

    @property
    def device(self) -> Device:
        """The device as selection sees it."""
        return self.known.device

    @property
    def abstract_device(self) -> TargetDevice:
        """The device as JAX sees it on a mesh."""
        capability = self.known.capability
        said = "" if capability is None else "{}.{}".format(*capability)
        return TargetDevice(self.known.name, self.known.cores, self.known.platform, said, self.device)

    def make_mesh(
        self, axis_shapes: Sequence[int], axis_names: Sequence[str], axis_types: tuple[AxisType, ...] | None = None
    ) -> AbstractMesh:
        """A mesh of these devices, as ``jax.make_mesh`` makes one of those that are here.

        Enter it with ``jax.sharding.use_abstract_mesh``, give it to ``jax.shard_map``, or put it into the
        ``NamedSharding`` of a ``ShapeDtypeStruct``.

        Raises:
          ValueError: the axes do not multiply to ``count``; JAX lets no program change the size of its mesh.
        """
        shapes = tuple(axis_shapes)
        if math.prod(shapes) != self.count:
            raise ValueError(
                f"a mesh of {self.count} {self.name} needs axes that multiply to that, got {axis_shapes=}; "
                f"target_device(name, count={math.prod(shapes)}) is what fits them"
            )
        return AbstractMesh(shapes, tuple(axis_names), axis_types, abstract_device=self.abstract_device)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """As many devices that can be compiled for and nothing else: ``lowered.compile(device_assignment=...)``.

        Raises:
          TargetDeviceError: the compiler is not installed; says what is missing.
        """
        return compile_only_devices(self.known, self.count)


_making = threading.Lock()
_contexts: list[UserConfig] = []


def _context() -> UserConfig:
    """The target in force in each thread, as part of the keys of JAX's caches.

    Made when it is first needed, for JAX forgets what it has compiled when a context is added.
    """
    with _making:
        if not _contexts:
            _contexts.append(jax.make_user_context(None))
        return _contexts[0]


def target_in_force() -> Target | None:
    """The target of the innermost ``target_device`` of this thread."""
    return _contexts[0].value if _contexts else None


def target_device(name: str, count: int = 1) -> contextlib.AbstractContextManager[Target]:
    """A context in which programs are lowered, explained and compiled for a device that is not here.

    Every choice comes out as on that device, with what is installed here. Nothing is run there, measured, tuned or
    stored: ``jax.jit(f).lower(...)`` and ``tilewright.explain`` work, calls of kernels and of compiled functions raise.
    Arrays are made outside, or ``jax.ShapeDtypeStruct`` stands in their place.

    Args:
      name: JAX's name of the device (``jax.Device.device_kind``), such as "NVIDIA H200" or "TPU v5e".
      count: how many of them; see ``Target.make_mesh``.

    Raises:
      ValueError: no device of this name is known, or ``count`` is less than 1.
      TypeError: ``name`` is no string or ``count`` no integer.
    """
    known = find_device(name)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{count=} must be an integer")
    if count < 1:
        raise ValueError(f"{count=} must be at least 1")
    return _entered(Target(known, count))


@contextlib.contextmanager
def _entered(target: Target) -> Iterator[Target]:
    if not jax_core.trace_state_clean():
        raise TargetDeviceError("target_device stands around jax.jit(f).lower(...), not inside of a traced function")
    mesh = target.make_mesh((target.count,), (AXIS,), (AxisType.Explicit,))
    with contextlib.ExitStack() as stack:
        # JAX changes no mesh for one of another size, and prefers one of real devices: any in force is left first.
        stack.enter_context(jax.set_mesh(None))
        # JAX lowers for the platform of an abstract mesh only if it has axes, and they are explicit.
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        stack.enter_context(_context()(target))
        with contextlib.suppress(TargetDeviceError):  # without a compiler there is still all but compiling
            stack.enter_context(jax.default_device(target.devices[0]))  # the client that compiles what is lowered
        yield target


def traced_as(name: str) -> contextlib.AbstractContextManager[None]:
    """A context for interpreters: programs are traced as for a device that is not here, and run on those that are.

    Raises:
      ValueError: no device of this name is known.
    """
    known = find_device(name)
    device = AbstractDevice(known.name, known.cores, known.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def check_runs_here() -> None:
    """Raises where a target is in force.

    Raises:
      TargetDeviceError: because nothing runs there.
    """
    target = target_in_force()
    if target is not None:
        raise TargetDeviceError(
            f"nothing runs inside of target_device({target.name!r}), which is not here; lower there "
            "(jax.jit(f).lower(...)), explain there (tilewright.explain), and call outside of it"
        )
