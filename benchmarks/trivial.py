"""The smallest kernel there is, so that what is timed is the framework."""

import dataclasses
from typing import Any

import jax

from tilewright.ops import Invocation, Kernel


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleConfig:
    factor: int = 2


class Scale(Kernel[ScaleConfig, jax.Array]):
    """``x · factor``."""

    def __init__(self) -> None:
        super().__init__("benchmarks.scale")

    def run(self, *args: Any, cfg: ScaleConfig, **kwargs: Any) -> jax.Array:
        (x,) = args
        return x * cfg.factor

    def heuristic_cfg(self, inv: Invocation[ScaleConfig, jax.Array]) -> ScaleConfig:
        return ScaleConfig()
