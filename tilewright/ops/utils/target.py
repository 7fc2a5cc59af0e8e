"""Lowering, explaining and compiling programs for a device that is not present."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
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
"""The name of the axis of the mesh in force; it appears in JAX's errors about what cannot run on the target."""

EXTRAS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cuda12": frozenset({"cudnn"}),  # its wheels hold no nvcc
        "cuda13": frozenset({"cudnn", "nvcc"}),
        "cudnn": frozenset({"cudnn"}),
        "fa4": frozenset({"fa4"}),
        "nvcc": frozenset({"nvcc"}),
        "triton": frozenset({"triton"}),
    }
)
"""Packages that backends need and a target may have, and extras of this package with those that they bring."""


@dataclasses.dataclass(frozen=True, slots=True)
class TargetDevice(AbstractDevice):
    """The device as JAX sees it on a mesh.

    Attributes:
      compute_capability: read by Mosaic GPU like that of a real GPU; empty for other devices.
      selected: the device as selection sees it.
    """

    compute_capability: str
    selected: Device


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The value that ``target_device`` yields.

    Attributes:
      known: the device's specifications.
      count: the number of devices that programs run on.
      packages: what is taken for installed there, whether it is here or not: "cudnn", "fa4", "nvcc" or "triton".
    """

    known: KnownDevice
    count: int
    packages: frozenset[str] = frozenset()

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
        compute_capability = "" if capability is None else "{}.{}".format(*capability)
        return TargetDevice(self.known.name, self.known.cores, self.known.platform, compute_capability, self.device)

    def make_mesh(
        self, axis_shapes: Sequence[int], axis_names: Sequence[str], axis_types: tuple[AxisType, ...] | None = None
    ) -> AbstractMesh:
        """Makes a mesh of these devices, like ``jax.make_mesh`` for present ones.

        Enter it with ``jax.sharding.use_abstract_mesh``, give it to ``jax.shard_map``, or put it into the
        ``NamedSharding`` of a ``ShapeDtypeStruct``.

        Raises:
          ValueError: the axis sizes do not multiply to ``count``; JAX does not let a program change the size of its
            mesh.
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
        """``count`` compile-only devices, for ``lowered.compile(device_assignment=...)``.

        Raises:
          TargetDeviceError: the compiler is not installed; the message says what is missing.
        """
        return compile_only_devices(self.known, self.count)


_making = threading.Lock()
_contexts: list[UserConfig] = []


def _context() -> UserConfig:
    """The context variable that holds each thread's target, as part of the keys of JAX's caches.

    Created on first use, because adding a context makes JAX discard what it has compiled.
    """
    with _making:
        if not _contexts:
            _contexts.append(jax.make_user_context(None))
        return _contexts[0]


def active_target() -> Target | None:
    """The target of the innermost ``target_device`` of this thread."""
    return _contexts[0].value if _contexts else None


def is_assumed(package: str) -> bool:
    """True if the target in force is said to have a package, so that nobody need look for it here."""
    target = active_target()
    return target is not None and package in target.packages


def check_is_here(package: str, missing: Sequence[str]) -> None:
    """Raises if a package is missing that the target in force is said to have: code can be made only with it.

    Args:
      missing: the reasons why it cannot be used here; empty if it can.

    Raises:
      TargetDeviceError: it is missing.
    """
    target = active_target()
    if target is not None and missing and package in target.packages:
        raise TargetDeviceError(
            f"target_device({target.name!r}, extras=...) says that {package} is installed there, and a call would run "
            f"with it; to lower the call it must be installed here too: {'; '.join(missing)}. tilewright.explain works "
            "without it"
        )


def target_device(
    name: str, count: int = 1, *, extras: Sequence[str] = ()
) -> contextlib.AbstractContextManager[Target]:
    """Context manager: lowers, explains and compiles programs for a device that is not present.

    Every choice is made as on that device, with the packages installed here and with ``extras``. Nothing is run,
    measured, tuned or stored: ``jax.jit(f).lower(...)`` and ``tilewright.explain`` work, calls of kernels and of
    compiled functions raise. Create arrays outside of the context, or use ``jax.ShapeDtypeStruct``.

    Args:
      name: JAX's name of the device (``jax.Device.device_kind``), such as "NVIDIA H200" or "TPU v5e".
      count: the number of devices; see ``Target.make_mesh``.
      extras: what is installed on that machine though it may be missing here: "cudnn", "fa4", "nvcc" or "triton", or
        "cuda12" and "cuda13" for what these extras of this package bring. ``explain`` then says what runs there.
        Lowering a call that would run with such a package needs the package here too.

    Raises:
      ValueError: no device of this name is known, ``count`` is less than 1, or an extra is unknown.
      TypeError: ``name`` is not a string, ``count`` is not an integer, or ``extras`` is a single string.
    """
    known = find_device(name)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{count=} must be an integer")
    if count < 1:
        raise ValueError(f"{count=} must be at least 1")
    return _entered(Target(known, count, packages_of(extras)))


def packages_of(extras: Sequence[str]) -> frozenset[str]:
    """The packages that the ``extras`` of ``target_device`` stand for.

    Raises:
      ValueError: one of them is unknown.
      TypeError: they are a single string.
    """
    if isinstance(extras, str):
        raise TypeError(f"{extras=} must be a tuple of names, such as {(extras,)}")
    unknown = [each for each in extras if each not in EXTRAS]
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise ValueError(f"nothing that backends need is called {names}; extras are names of {', '.join(EXTRAS)}")
    return frozenset().union(*(EXTRAS[each] for each in extras))


@contextlib.contextmanager
def _entered(target: Target) -> Iterator[Target]:
    if not jax_core.trace_state_clean():
        raise TargetDeviceError("target_device stands around jax.jit(f).lower(...), not inside of a traced function")
    mesh = target.make_mesh((target.count,), (AXIS,), (AxisType.Explicit,))
    with contextlib.ExitStack() as stack:
        # JAX cannot replace a mesh by one of another size, and prefers a mesh of real devices: leave any mesh first.
        stack.enter_context(jax.set_mesh(None))
        # JAX lowers for the platform of an abstract mesh only if the mesh has axes and they are explicit.
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        stack.enter_context(_context()(target))
        with contextlib.suppress(TargetDeviceError):  # without a compiler everything but compiling works
            stack.enter_context(jax.default_device(target.devices[0]))  # the client that compiles lowered programs
        yield target


def traced_as(name: str) -> contextlib.AbstractContextManager[None]:
    """Context manager for interpreters: traces programs for an absent device and runs them on those that are present.

    Raises:
      ValueError: no device of this name is known.
    """
    known = find_device(name)
    device = AbstractDevice(known.name, known.cores, known.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def check_runs_here() -> None:
    """Raises if a target is in force.

    Raises:
      TargetDeviceError: nothing can run on the target.
    """
    target = active_target()
    if target is not None:
        raise TargetDeviceError(
            f"nothing runs inside of target_device({target.name!r}), which is not here; lower there "
            "(jax.jit(f).lower(...)), explain there (tilewright.explain), and call outside of it"
        )
