"""Platforms, backends, and what one backend of an op gives: the table that selection and documentation read."""

import abc
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Never

from tilewright.kernels.footprint import Footprint
from tilewright.ops.kernel.builds import Build
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/registry.Platform", formerly=("tilewright.kernels.registry:Platform",))
class Platform(enum.StrEnum):
    """By what means a kernel is written."""

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
      block_d: head_dim per tile, where it is tiled.
      num_warps: warps of a GPU block.
      num_stages: stages of a GPU pipeline.
      platform: a platform's name, or "auto".
      backend: the hardware that the config is meant for.
      algorithm: one of several implementations on a platform.
      priority: which config counts when several match; the highest.
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


class Implementation[Inputs, Problem, Results, Forward, Backward](abc.ABC):
    """One backend of one op: final, stateless, without knowledge of selection.

    The first five methods read shapes, dtypes and the device only. ``Inputs``, ``Problem`` and ``Results`` are the op's
    types, ``Forward`` and ``Backward`` those of the params of either direction.

    Attributes:
      algorithm: tells several implementations on one platform apart.
      forward_params: type of the params of ``forward``.
      backward_params: type of the params of ``backward``.
      forward_mode: whether JAX can differentiate ``forward`` in forward mode.
      symbolic_dimensions: whether shapes may have symbolic dimensions, of ``jax.export``.
      late_import: what it imports with its first call, too slow for every program that only has it at hand: a module,
        or ``"module:function"`` where a function imports the rest.
      keeps_lowering: whether what it is lowered to is kept on disk. It is worth that where lowering takes long, and may
        be where nothing of the process that lowered it is needed to run it.
    """

    platform: ClassVar[Platform]
    algorithm: ClassVar[str | None] = None
    forward_params: ClassVar[type] = FwdParams
    backward_params: ClassVar[type] = BwdParams
    forward_mode: ClassVar[bool] = False
    symbolic_dimensions: ClassVar[bool] = False
    late_import: ClassVar[str] = ""
    keeps_lowering: ClassVar[bool] = False

    @abc.abstractmethod
    def not_supported_reasons(self, problem: Problem, device: Device, direction: Direction) -> list[str]:
        """Every reason why this backend cannot serve the problem; empty if it can."""

    @abc.abstractmethod
    def heuristic(self, problem: Problem, device: Device, direction: Direction) -> Forward | Backward:
        """The params to use when nothing was measured."""

    @abc.abstractmethod
    def candidates(self, problem: Problem, device: Device, direction: Direction) -> Iterable[Forward | Backward]:
        """The params worth measuring, best guess first."""

    def config_reasons(
        self, problem: Problem, device: Device, direction: Direction, params: Forward | Backward
    ) -> list[str]:
        """Every reason why params of the right type cannot serve a problem that this backend can; none by default."""
        return []

    def deprioritized(self, problem: Problem, device: Device, direction: Direction) -> bool:
        """Whether, of a problem that this backend can serve, others are likely faster: they go first, unmeasured."""
        return False

    def footprints(
        self, problem: Problem, device: Device, direction: Direction, params: Forward | Backward
    ) -> Sequence[Footprint]:
        """What params that can serve the problem take, of each kernel that multiplies matrices; none if not known."""
        return ()

    def builds(
        self, problem: Problem, device: Device, direction: Direction, params: Forward | Backward
    ) -> Sequence[Build]:
        """Builds that params need before they can run, made already or not; none by default.

        Of several that may be needed in turn, as a compiled variant's facts decide, the first that is not known to do.
        """
        return ()

    def all_builds(self, device: Device) -> Sequence[Build]:
        """Every build that `builds` may return for calls on a device; none by default."""
        return ()

    @abc.abstractmethod
    def forward(self, inputs: Inputs, params: Forward) -> Results:
        """The op's results, in the form that all backends of the op share as residuals."""

    @abc.abstractmethod
    def backward(self, inputs: Inputs, results: Results, cotangents: Results, params: Backward) -> dict[str, Any]:
        """Gradients by argument name, from any backend's forward results."""


class InferenceImplementation[Inputs, Problem, Results, Forward](
    Implementation[Inputs, Problem, Results, Forward, Never], abc.ABC
):
    """A backend of an op that has no gradients."""

    @abc.abstractmethod
    def forward_reasons(self, problem: Problem, device: Device) -> list[str]:
        """Every reason why this backend cannot serve the problem; empty if it can."""

    def not_supported_reasons(self, problem: Problem, device: Device, direction: Direction) -> list[str]:
        if direction == "backward":
            return ["the op is for inference and has no backward pass"]
        return self.forward_reasons(problem, device)

    def backward(self, inputs: Inputs, results: Results, cotangents: Results, params: Never) -> dict[str, Any]:
        raise NotImplementedError("the op is for inference and has no backward pass")
