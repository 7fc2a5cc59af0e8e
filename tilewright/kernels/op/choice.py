"""Platforms, and the configs that name a backend and its params."""

import abc
import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/registry.Platform", formerly=("tilewright.kernels.registry:Platform",))
class Platform(enum.StrEnum):
    """The language or system that a kernel is written in; or "mesh" for a plan of several devices."""

    XLA = "xla"
    PALLAS = "pallas"
    TRITON = "triton"
    CUDA = "cuda"
    MESH = "mesh"


@stable_id("tilewright/portfolio.Choice", formerly=("tilewright.kernels.portfolio:Choice",))
@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that runs, and its params.

    Attributes:
      params: the implementation's own config: frozen, of its ``forward_params`` or ``backward_params`` type.
    """

    platform: Platform
    algorithm: str | None = None
    params: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "platform", Platform(self.platform))  # accepts and checks a plain name

    @property
    def implementation(self) -> str:
        """The implementation's name, such as "xla" or "cuda:cutlass"."""
        return implementation_name(self.platform, self.algorithm)

    def __str__(self) -> str:
        if not dataclasses.is_dataclass(self.params):
            return self.implementation if self.params is None else f"{self.implementation}({self.params})"
        fields = ((field.name, getattr(self.params, field.name)) for field in dataclasses.fields(self.params))
        return f"{self.implementation}({', '.join(f'{name}={value}' for name, value in fields if value is not None)})"


@stable_id("tilewright/portfolio.PerDirection", formerly=("tilewright.kernels.portfolio:PerDirection",))
@dataclasses.dataclass(frozen=True, slots=True)
class PerDirection:
    """An explicit config for each direction; ``None`` leaves a direction to selection."""

    forward: Any = None
    backward: Any = None


class CommonConfig(abc.ABC):
    """A config in terms that many backends share, of which a `Choice` is made for each call."""

    __slots__ = ()

    @abc.abstractmethod
    def chosen(self, choices: Iterable[tuple[Choice, type]], inv: Invocation[Choice, Any]) -> Choice:
        """The first of the choices that this config fits, with its params.

        Args:
          choices: the heuristic choices of the backends that can serve the call, best first, with the types of their
            params.

        Raises:
          UnsupportedError: it fits none.
        """


DECLARED = Choice(Platform.XLA, "declared")
"""The config of a call that is traced and has none yet."""


def implementation_name(platform: Platform, algorithm: str | None) -> str:
    return str(platform) if algorithm is None else f"{platform}:{algorithm}"
