"""Type variables of the framework, and its description of devices."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with defaults, which typing has from Python 3.13 on
else:
    from typing import TypeVar as _TypeVar

    def TypeVar(name, default):
        return _TypeVar(name)


Cfg = TypeVar("Cfg", default=Any)
"""A kernel's configuration: any frozen, hashable value; a dataclass where it is to be stored."""

Out = TypeVar("Out", default=Any)
"""The return type of a kernel: an array or a pytree of arrays."""

Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The device that a call will run on, as far as selection may look.

    Attributes:
      kind: "cpu", "gpu" or "tpu".
      name: the vendor's name, such as "NVIDIA H100 80GB HBM3" or "cpu"; "unknown" when a program is lowered for a
        platform that this process cannot see.
      capability: compute capability of an NVIDIA GPU, such as (9, 0), else None.
      cores: streaming multiprocessors, TPU cores or CPU threads; 0 where unknown.
      fingerprint: the string that stands for the device in cache keys.
      present: True if this process can run, and so measure, on the device.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    cores: int = 0
    fingerprint: str = ""
    present: bool = True

    @property
    def described(self) -> str:
        """The name, with the compute capability if there is one."""
        return self.name if self.capability is None else "{} ({}.{})".format(self.name, *self.capability)


@dataclasses.dataclass(frozen=True, slots=True)
class MappedAxis:
    """One ``vmap`` around a call: its size, and a flag per operand leaf that it maps (each along its axis 0)."""

    size: int
    mapped: tuple[bool, ...]
