"""Platforms, and the configs that name a backend and its params."""

import dataclasses
import enum
from typing import Any, Literal

from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/registry.Platform", formerly=("tilewright.kernels.registry:Platform",))
class Platform(enum.StrEnum):
    """The language or system that a kernel is written in."""

    XLA = "xla"
    PALLAS = "pallas"
    TRITON = "triton"
    CUDA = "cuda"


@stable_id("tilewright/registry.Backend", formerly=("tilewright.kernels.registry:Backend",))
class Backend(enum.StrEnum):
    """The hardware that a config is meant for."""

    ANY = "any"
    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"


@stable_id("tilewright/registry.KernelConfig", formerly=("tilewright.kernels.registry:KernelConfig",))
@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig:
    """A config in terms that many kernels share, for callers who set block sizes by hand.

    Attributes:
      block_q: query rows per tile.
      block_k: keys per tile.
      block_d: head_dim per tile, if it is tiled.
      num_warps: warps of a GPU block.
      num_stages: stages of a GPU pipeline.
      platform: a platform's name, or "auto".
      backend: the hardware that the config is meant for.
      algorithm: one of several implementations on a platform.
      priority: the config with the highest one applies if several match.
    """

    block_q: int = 128
    block_k: int = 128
    block_d: int = 64
    num_warps: int = 4
    num_stages: int = 2
    platform: Platform | Literal["triton", "pallas", "cuda", "xla", "auto"] = "auto"
    backend: Backend | Literal["gpu", "tpu", "cpu", "any"] = Backend.ANY
    algorithm: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "block_d", "num_warps", "num_stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"KernelConfig needs a positive integer, got {name}={value!r}")
        if self.platform != "auto":
            object.__setattr__(self, "platform", Platform(self.platform))
        object.__setattr__(self, "backend", Backend(self.backend))


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


DECLARED = Choice(Platform.XLA, "declared")
"""The config of a call that is traced and has none yet."""


def implementation_name(platform: Platform, algorithm: str | None) -> str:
    return str(platform) if algorithm is None else f"{platform}:{algorithm}"
