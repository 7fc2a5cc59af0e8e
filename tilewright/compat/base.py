"""Configuration that all ops share, and the platform that an op runs on."""

import dataclasses
import enum
import warnings
from collections.abc import Iterable
from typing import Any, Literal

from tilewright.errors import UnsupportedError
from tilewright.kernels import OPS, kernel
from tilewright.kernels.op.choice import Choice, CommonConfig, Platform, platform_of
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.ops import (
    AutotunePolicy,
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    PersistentCache,
    Tuner,
    device_kind,
    stable_id,
)

__all__ = ["Backend", "KernelConfig", "Platform", "create_default_executor", "detect_platform"]


@stable_id("tilewright/registry.Backend", formerly=("tilewright.kernels.registry:Backend",))
class Backend(enum.StrEnum):
    """The hardware that a config is meant for."""

    ANY = "any"
    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"


_WORDS = ("auto", *(str(platform) for platform in Platform if platform is not Platform.MESH))


def _exists(name: str) -> bool:
    """True if an op has a backend of this name."""
    return any(each.name == name for op in OPS for each in kernel(op).backends)


@stable_id("tilewright/registry.KernelConfig", formerly=("tilewright.kernels.registry:KernelConfig",))
@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig(CommonConfig):
    """A config in terms that many kernels share, for callers who set block sizes by hand.

    Attributes:
      block_q: query rows per tile.
      block_k: keys per tile.
      block_d: head_dim per tile, if it is tiled.
      num_warps: warps of a GPU block.
      num_stages: stages of a GPU pipeline.
      platform: a platform's name, or "auto"; or a backend, "cuda:cudnn" or "cudnn", which sets ``algorithm``.
      backend: the hardware that the config is meant for.
      algorithm: the name of a backend, where a platform has several.
      priority: the config with the highest one applies if several match.
    """

    block_q: int = 128
    block_k: int = 128
    block_d: int = 64
    num_warps: int = 4
    num_stages: int = 2
    platform: Platform | str = "auto"
    backend: Backend | Literal["gpu", "tpu", "cpu", "any"] = Backend.ANY
    algorithm: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "block_d", "num_warps", "num_stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"KernelConfig needs a positive integer, got {name}={value!r}")
        if self.platform not in _WORDS:
            platform, _, name = str(self.platform).rpartition(":")
            if not name or platform not in ("", *_WORDS) or self.algorithm not in (None, name) or not _exists(name):
                raise ValueError(
                    f"KernelConfig needs 'auto', one of {list(_WORDS[1:])}, or a backend of an op, such as "
                    f"'cuda:cudnn', got platform={self.platform!r}, algorithm={self.algorithm!r}"
                )
            object.__setattr__(self, "platform", platform or "auto")
            object.__setattr__(self, "algorithm", name)
        if self.platform != "auto":
            object.__setattr__(self, "platform", Platform(self.platform))
        object.__setattr__(self, "backend", Backend(self.backend))

    def chosen(self, choices: Iterable[tuple[Choice, Platform, type]], inv: Invocation[Choice, Any]) -> Choice:
        kind: type[FwdParams | BwdParams] = FwdParams if inv.direction == "forward" else BwdParams
        params = kind(
            q_blocksize=self.block_q,
            kv_blocksize=self.block_k,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )
        for choice, platform, expected in choices:
            named = self.platform in (None, "auto", platform) and self.algorithm in (None, choice.backend)
            if named and isinstance(params, expected):
                return dataclasses.replace(choice, params=params)
        raise UnsupportedError(
            f"{inv.kernel.name} ({inv.direction})",
            {str(self.platform): [f"no backend that takes the block sizes of {self} can serve the call"]},
        )


def detect_platform(
    algorithm: str,
    platform: Platform | str | None = "auto",
    maybe_pallas: bool = False,
) -> Platform:
    """The platform that an op would run on here.

    On a GPU Triton, where it is available, then XLA; on a TPU Pallas, then XLA; on a CPU XLA. Which config a call
    really runs with is up to its shapes: ``Executor.explain`` tells.

    Args:
      algorithm: the name of an op, such as "flash_attention".
      platform: a platform to insist on; a backend, such as "cuda:cudnn", has one.
      maybe_pallas: on a GPU prefer Pallas, where it is available.

    Raises:
      ValueError: there is no such op, or it has no backend for the platform that was asked for.
    """
    op = kernel(algorithm)
    available = _available(op)
    if platform is not None and platform != "auto":
        found = platform_of(op.backends.word(platform) or "")
        if found not in available:
            names = sorted(map(str, available))
            raise ValueError(f"{algorithm} has no backend for {platform=}; available: {names}")
        return Platform(found)
    order = {
        "gpu": (Platform.PALLAS,) * maybe_pallas + (Platform.TRITON,),
        "tpu": (Platform.PALLAS,),
    }.get(device_kind(), ())
    return next((each for each in order if each in available), Platform.XLA)


def _available(op: Portfolio[Any, Any]) -> set[Platform]:
    """The platforms of an op's backends that can be loaded here."""
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
