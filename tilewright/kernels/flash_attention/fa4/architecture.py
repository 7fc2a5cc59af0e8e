"""One generation of FlashAttention-4's kernels: its classes and their arguments, what it serves, and its tiles."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams, Fa4Mask
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.ops.types import Direction

type Params = Fa4ForwardParams | Fa4BackwardParams

type Accumulator = Literal["query", "key", "value"]
"""The operand whose gradient an accumulator is for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Modifications of scores, compiled into the kernels.

    Attributes:
      left: number of visible keys before the query's own, with both sequences aligned at their ends; None for all.
      right: number of visible keys after it; negative if the last one is before it.
    """

    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        return self.left is None and self.right == 0

    @property
    def local(self) -> bool:
        return not self.causal and (self.left is not None or self.right is not None)

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The window in the form that the kernels take beside ``local``."""
        return (self.left, self.right) if self.local else (None, None)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a kernel is compiled for beside the shapes of its operands.

    Attributes:
      groups: query heads of a key head.
      params: without None where the architecture has a choice.
      q_lengths: True if queries have lengths.
      one_tile: True if all queries of a head, or of a key head if they are packed, are in one tile.
    """

    dtype: str
    head_dim: int
    value_dim: int
    groups: int
    scores: Scores
    params: Any
    q_lengths: bool
    one_tile: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """The objects used from the packages: kernel classes, score modifiers, dtypes, and the bridge to JAX.

    Attributes:
      classes: by the names of ``Architecture.classes``.
    """

    classes: Mapping[str, Callable[..., Any]]
    utils: Any
    dtypes: Mapping[np.dtype, Any]
    float32: Callable[[float], Any]
    int32: Callable[[int], Any]
    call: Callable[..., Any]
    versions: tuple[str, ...]


def shared_arguments(settings: Settings) -> dict[str, Any]:
    """Arguments that the classes of forward and backward kernels of all generations have."""
    return {
        "head_dim": settings.head_dim,
        "head_dim_v": settings.value_dim,
        "qhead_per_kvhead": settings.groups,
        "is_causal": settings.scores.causal,
        "is_local": settings.scores.local,
    }


def forward_arguments(kernels: Kernels, settings: Settings) -> dict[str, Any]:
    """Arguments that the classes of all forward kernels have."""
    packs = settings.params.pack_groups and settings.groups > 1
    return shared_arguments(settings) | {"pack_gqa": packs, "score_mod": score_mod(kernels, settings.scores)}


def postprocess_arguments(kernels: Kernels, settings: Settings, of: Accumulator) -> dict[str, Any]:
    """Arguments of the kernel that converts an accumulator, which do not depend on its layout."""
    params = settings.params
    return {
        "dtype": dtype_of(kernels, settings),
        "head_dim": settings.value_dim if of == "value" else settings.head_dim,
        "tile_m": params.block_q if of == "query" else params.block_k,
    }


def dtype_of(kernels: Kernels, settings: Settings) -> Any:
    """The package's dtype of a call."""
    return kernels.dtypes[jnp.dtype(settings.dtype)]


def score_mod(kernels: Kernels, scores: Scores) -> Any:
    """The function that caps the scores; None if they have no cap."""
    return None if scores.soft_cap is None else kernels.utils.create_softcap_scoremod(scores.soft_cap)


def score_mod_bwd(kernels: Kernels, scores: Scores) -> Any:
    """The derivative of ``score_mod``."""
    return None if scores.soft_cap is None else kernels.utils.create_softcap_scoremod_bwd(scores.soft_cap)


class Architecture(abc.ABC):
    """FlashAttention-4's kernels for the compute capabilities of one ``name``.

    Every ``*_kernel`` makes a kernel; `cute` knows the arguments of its call, which all generations share.
    """

    name: ClassVar[str]
    """The compute capability for which the package's modules are named, such as "sm90"."""

    classes: ClassVar[Mapping[str, tuple[str, str]]]
    """Module of ``flash_attn.cute`` and class of "forward", "backward" and other kernels of its own."""

    # Choosing.

    @abc.abstractmethod
    def computed_dims(self, inputs: AttentionInputs, direction: Direction) -> tuple[int, int]:
        """The head dims of keys and of values that the kernels compute with, padded with zeros."""

    @abc.abstractmethod
    def reasons(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> list[str]:
        """Reasons why a call with elements, whose mask is expressible, cannot be served."""

    @abc.abstractmethod
    def forward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4ForwardParams:
        """FlashAttention-4's own choice."""

    @abc.abstractmethod
    def backward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4BackwardParams:
        """FlashAttention-4's own choice."""

    @abc.abstractmethod
    def params_reasons(self, inputs: AttentionInputs, mask: Fa4Mask, params: Params) -> list[str]:
        """Reasons why complete params cannot serve a call that the kernels serve."""

    @abc.abstractmethod
    def candidates(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> Iterator[Params]:
        """The defaults, and what is worth measuring beside them, whether it fits or not."""

    # Launching.

    @abc.abstractmethod
    def forward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]: ...

    @abc.abstractmethod
    def backward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]: ...

    @abc.abstractmethod
    def postprocess_kernel(self, kernels: Kernels, settings: Settings, of: Accumulator) -> Callable[..., None]:
        """Converts an accumulator to the gradient of ``of``."""

    @abc.abstractmethod
    def dim_multiple(self, params: Fa4BackwardParams) -> int:
        """The head dim of accumulators is a multiple of this."""

    @abc.abstractmethod
    def accumulates(self, settings: Settings) -> bool:
        """True if dQ, and dK and dV of shared key heads, are accumulated in float32; False if they are results."""

    def key_tiles(self, kv_length: int, params: Fa4BackwardParams) -> int:
        """Tiles of an accumulator of dK or dV: a cluster's are whole."""
        ctas = 2 if params.two_ctas else 1
        return -(-kv_length // (ctas * (params.block_k or 1))) * ctas


def unavailable(params: Params, names: tuple[str, ...], where: str) -> list[str]:
    """Reasons against params that choose what an architecture has no choice of."""
    given = [f"{name}={getattr(params, name)}" for name in names if getattr(params, name) is not None]
    return [f"there is no choice of it {where}, got {', '.join(given)}"] if given else []
