"""Platforms, and the configs that name a backend and its params."""

import abc
import dataclasses
import enum
from collections.abc import Iterable, Mapping
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


def platform_of(word: str) -> str:
    """The platform in a word for what may run a call, such as "cuda" in "cuda:cudnn"."""
    return word.partition(":")[0]


def _by_backend(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a choice, from those of versions before 0.2: a platform and an algorithm, which could be null."""
    if "platform" not in fields:
        return fields
    platform = "hopper" if fields["platform"] == Platform.PALLAS else str(fields["platform"])
    others = {name: value for name, value in fields.items() if name not in ("platform", "algorithm")}
    return {"backend": fields.get("algorithm") or platform, **others}


@stable_id("tilewright/portfolio.Choice", formerly=("tilewright.kernels.portfolio:Choice",), converted=_by_backend)
@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs, and its params.

    Attributes:
      backend: its name, such as "hopper" or "cudnn". In a config that a caller gives it may have its platform before
        it, "cuda:cudnn"; and a platform's name is the op's first backend there that can serve the call.
      params: the backend's own config: frozen, of its ``forward_params`` or ``backward_params`` type.
    """

    backend: str
    params: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", str(self.backend))  # a platform is an enum

    def __str__(self) -> str:
        if not dataclasses.is_dataclass(self.params):
            return self.backend if self.params is None else f"{self.backend}({self.params})"
        fields = ((field.name, getattr(self.params, field.name)) for field in dataclasses.fields(self.params))
        return f"{self.backend}({', '.join(f'{name}={value}' for name, value in fields if value is not None)})"


@stable_id("tilewright/portfolio.PerDirection", formerly=("tilewright.kernels.portfolio:PerDirection",))
@dataclasses.dataclass(frozen=True, slots=True)
class PerDirection:
    """An explicit config for each direction; ``None`` leaves a direction to selection."""

    forward: Any = None
    backward: Any = None


class CommonConfig(abc.ABC):
    """A config in terms that many backends share; each call makes a `Choice` of it."""

    __slots__ = ()

    @abc.abstractmethod
    def chosen(self, choices: Iterable[tuple[Choice, Platform, type]], inv: Invocation[Choice, Any]) -> Choice:
        """The first of the choices that this config fits, with its params.

        Args:
          choices: the heuristic choices of the backends that can serve the call, best first, with the platforms and the
            types of their params.

        Raises:
          UnsupportedError: it fits none.
        """


DECLARED = Choice("declared")
"""The config of a call that is traced and has none yet."""
