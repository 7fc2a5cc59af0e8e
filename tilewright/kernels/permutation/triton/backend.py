"""The Triton backends of ``permute`` and ``unpermute``, on NVIDIA GPUs."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.backend import MovingBackend, PermuteBackend, UnpermuteBackend
from tilewright.kernels.permutation.inputs import PermuteInputs, UnpermuteInputs
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.triton.movement import TritonMovement
from tilewright.ops.types import Device, Direction


class _TritonBackend(MovingBackend[Any], abc.ABC):
    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    movement: ClassVar[Movement] = TritonMovement()


class TritonPermute(_TritonBackend, PermuteBackend):
    """Serves float16, bfloat16 and float32."""

    def reasons(self, inputs: PermuteInputs, device: Device, direction: Direction) -> list[str]:
        return _reasons({"x": inputs.x}, inputs.experts.shape, device)


class TritonUnpermute(_TritonBackend, UnpermuteBackend):
    """Serves float16, bfloat16 and float32, with weights of any of these."""

    def reasons(self, inputs: UnpermuteInputs, device: Device, direction: Direction) -> list[str]:
        return _reasons({"rows": inputs.rows, "weights": inputs.weights}, inputs.weights.shape, device)


def _reasons(arrays: Mapping[str, jax.Array], choices: tuple[int, ...], device: Device) -> list[str]:
    tokens, k = choices
    reasons = _TritonBackend.movement.reasons(tokens, k, device)
    for name, array in arrays.items():
        if array.dtype.name not in ("float16", "bfloat16", "float32"):
            reasons.append(f"{name} must be float16, bfloat16 or float32, not {array.dtype}")
        if 0 in array.shape:
            reasons.append(f"its kernels need elements, got {name} of the shape {array.shape}")
    return reasons
