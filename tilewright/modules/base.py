"""Configuration that all ops share, and the platform that an op runs on."""

import warnings
from typing import Any, Literal

from tilewright.kernels import kernel
from tilewright.kernels.op.choice import Backend, KernelConfig, Platform
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    Tuner,
    device_kind,
)

__all__ = ["Backend", "KernelConfig", "Platform", "create_default_executor", "detect_platform"]


def detect_platform(
    algorithm: str,
    platform: Platform | Literal["triton", "pallas", "cuda", "xla", "auto"] | None = "auto",
    maybe_pallas: bool = False,
) -> Platform:
    """The platform that an op would run on here.

    On a GPU Triton, where it is available, then XLA; on a TPU Pallas, then XLA; on a CPU XLA. Which config a call
    really runs with is up to its shapes: ``Executor.explain`` tells.

    Args:
      algorithm: the name of an op, such as "flash_attention".
      platform: a platform to insist on.
      maybe_pallas: on a GPU prefer Pallas, where it is available.

    Raises:
      ValueError: there is no such op, or it has no implementation for the platform that was asked for.
    """
    available = _available(kernel(algorithm))
    if platform is not None and platform != "auto":
        if platform not in available:
            names = sorted(map(str, available))
            raise ValueError(f"{algorithm} has no implementation for {platform=}; available: {names}")
        return Platform(platform)
    order = {
        "gpu": (Platform.PALLAS,) * maybe_pallas + (Platform.TRITON,),
        "tpu": (Platform.PALLAS,),
    }.get(device_kind(), ())
    return next((each for each in order if each in available), Platform.XLA)


def _available(op: Portfolio[Any, Any]) -> set[Platform]:
    """The platforms of an op's implementations that can be loaded here."""
    return {each.platform for each in op.backends.usable}


def create_default_executor(
    persistent_cache_path: str | None = None,
    enable_autotuning: bool = True,
    warmup_iterations: int = 2,
    timing_iterations: int = 5,
) -> Executor[KernelConfig, Any]:
    """An executor with a memory cache and, given a path, a disk cache.

    Deprecated: build ``Executor(ConfigSelectorChain(...))`` yourself.

    Args:
      persistent_cache_path: folder of the disk cache; ``None`` for none.
      enable_autotuning: measure candidates when no cache knows a call.
      warmup_iterations: untimed calls of each candidate.
      timing_iterations: samples of each candidate.
    """
    warnings.warn(
        "create_default_executor is deprecated; use Executor(ConfigSelectorChain(...)) instead",
        DeprecationWarning,
        stacklevel=2,
    )
    return Executor(
        ConfigSelectorChain(
            cache=ConfigCache(),
            persistent=None if persistent_cache_path is None else PersistentCache(persistent_cache_path),
            policy=AutotunePolicy(allow_autotune=enable_autotuning),
            tuner=Tuner(warmup=warmup_iterations, iters=timing_iterations),
        )
    )
