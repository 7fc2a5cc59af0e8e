"""Configs of linear attention in Triton: params, and those worth measuring."""

import dataclasses
from typing import Any

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/linear_attention.TritonPass")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonPass:
    """The launch of a pass.

    Attributes:
      block_v: channels of values of a program, or of a step.
      num_warps: warps of a program.
      num_stages: stages of its pipelined loop.
    """

    block_v: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name, minimum, maximum in (("block_v", MIN_DOT, 256), ("num_warps", 1, 16)):
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not minimum <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from {minimum} to {maximum}, got {self}")
        if type(self.num_stages) is not int or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self}")


@stable_id("tilewright/linear_attention.TritonLinearAttentionParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonLinearAttentionParams:
    """Config of either direction.

    Attributes:
      states: the pass from chunk to chunk, over states or over their gradients.
      tokens: the passes that are parallel over chunks.
    """

    states: TritonPass
    tokens: TritonPass

    def __post_init__(self) -> None:
        for name in ("states", "tokens"):
            if not isinstance(getattr(self, name), TritonPass):
                raise TypeError(f"{name} must be a TritonPass, got {getattr(self, name)!r}")


def listed_params(inputs: LinearAttentionInputs, device: Device, direction: Direction) -> list[Any]:
    """Params worth measuring, best guess first."""
    narrow = inputs.value.dtype.name == "bfloat16"
    most = power_of_two(inputs.value_dim, MIN_DOT)
    chains = inputs.sequences * inputs.value_heads
    widths = [width for width in ((64, 32, 16) if narrow and inputs.key_dim <= 128 else (32, 16)) if width <= most]
    # The wide block reads keys and inverses less often; the narrow one has more programs.
    enough = [width for width in widths if chains * -(-inputs.value_dim // width) >= device.cores]
    best = (enough or widths[-1:])[0]
    widths = sorted(widths, key=lambda width: width != best)
    tokens = TritonPass(min(most, 64 if narrow else 32), 4, 2)
    stages = (2, 3, 1) if narrow else (1, 2)
    listed = [
        TritonLinearAttentionParams(TritonPass(width, warps, count), tokens)
        for width in widths for warps in (4, 8) for count in stages
    ]  # fmt: skip
    others = [TritonPass(min(most, 128), 8, 2), TritonPass(min(most, 32), 4, 3)]
    return [
        *listed,
        *(TritonLinearAttentionParams(listed[0].states, each) for each in others if direction == "forward"),
    ]
