"""Platforms, and the interface of one backend of an op."""

import abc
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Never

from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.kernel.builds import Build
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
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


class Implementation[Inputs, Problem, Results, Forward, Backward](abc.ABC):
    """One backend of one op: final, stateless, without knowledge of selection.

    The first five methods read only shapes, dtypes and the device. ``Inputs``, ``Problem`` and ``Results`` are the op's
    types, ``Forward`` and ``Backward`` the types of either direction's params.

    Attributes:
      algorithm: distinguishes several implementations on one platform.
      forward_params: type of the params of ``forward``.
      backward_params: type of the params of ``backward``.
      forward_mode: True if JAX can differentiate ``forward`` in forward mode.
      symbolic_dimensions: True if shapes may have symbolic dimensions of ``jax.export``.
      late_import: a module that is imported with the first call, since that is too slow for programs that do not run
        this backend; or ``"module:function"`` if the function imports the rest.
      keeps_lowering: store the lowering on disk. That is worth it if lowering takes long, and possible if running the
        lowered code needs nothing from the process that lowered it.
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
        """Every reason why this backend cannot serve the problem; empty if it can.

        Each option of the op that the backend does not compute needs one: nothing else declines it.
        """

    @abc.abstractmethod
    def heuristic(self, problem: Problem, device: Device, direction: Direction) -> Forward | Backward:
        """The params to use when nothing was measured; asked about supported problems only, as `candidates` is."""

    @abc.abstractmethod
    def candidates(self, problem: Problem, device: Device, direction: Direction) -> Iterable[Forward | Backward]:
        """The params worth measuring, best guess first."""

    def config_reasons(
        self, problem: Problem, device: Device, direction: Direction, params: Forward | Backward
    ) -> list[str]:
        """Every reason why params of the right type cannot serve a supported problem; none by default."""
        return []

    def repeats(self, params: Forward | Backward) -> bool:
        """True if params give the same bits in every run: by default what their ``deterministic`` says, if any."""
        return bool(getattr(params, "deterministic", True))

    def deprioritized(self, problem: Problem, device: Device, direction: Direction) -> bool:
        """True if other backends are probably faster for the problem: they are preferred without measurements."""
        return False

    def footprints(
        self, problem: Problem, device: Device, direction: Direction, params: Forward | Backward
    ) -> Sequence[Footprint]:
        """The resources of each matmul kernel that the params launch; empty if unknown."""
        return ()

    def builds(
        self, problem: Problem, device: Device, direction: Direction, params: Forward | Backward
    ) -> Sequence[Build]:
        """The builds that params need to run, already made or not; none by default.

        If several may be needed in turn, depending on a compiled variant's facts, the first one not known to be
        unsuitable.
        """
        return ()

    def all_builds(self, device: Device) -> Sequence[Build]:
        """Every build that `builds` may return for calls on a device; none by default."""
        return ()

    @abc.abstractmethod
    def forward(self, inputs: Inputs, params: Forward) -> Results:
        """Computes the op's results, which are also the residuals that all its backends share.

        Shapes, dtypes and rounding are those of the op's ``Results``. On explicit mesh axes ``inputs`` is one device's
        part.
        """

    @abc.abstractmethod
    def backward(self, inputs: Inputs, results: Results, cotangents: Results, params: Backward) -> dict[str, Any]:
        """Computes gradients by argument name, from any backend's forward results.

        One for each floating-point array in ``inputs``, in its shape and dtype. ``cotangents`` has the structure of the
        results, with ``None`` where nothing flows back.
        """


class InferenceImplementation[Inputs, Problem, Results, Forward](
    Implementation[Inputs, Problem, Results, Forward, Never], abc.ABC
):
    """A backend of an op without gradients."""

    @abc.abstractmethod
    def forward_reasons(self, problem: Problem, device: Device) -> list[str]:
        """Every reason why this backend cannot serve the problem; empty if it can."""

    def not_supported_reasons(self, problem: Problem, device: Device, direction: Direction) -> list[str]:
        if direction == "backward":
            return ["the op is for inference and has no backward pass"]
        return self.forward_reasons(problem, device)

    def backward(self, inputs: Inputs, results: Results, cotangents: Results, params: Never) -> dict[str, Any]:
        raise NotImplementedError("the op is for inference and has no backward pass")


def one_line(error: Exception) -> str:
    """An exception's type and message in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
