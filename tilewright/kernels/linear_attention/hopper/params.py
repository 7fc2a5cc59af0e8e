"""Configs of linear attention on Hopper: params, and those worth measuring."""

import dataclasses

from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/linear_attention.HopperLinearAttentionParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperLinearAttentionParams:
    """Config of the forward pass.

    Attributes:
      consumers: warpgroups of a CTA, each with 64 channels of the values.
      stages: chunks in shared memory that are loaded or read.
    """

    consumers: int
    stages: int

    def __post_init__(self) -> None:
        if type(self.consumers) is not int or self.consumers not in (1, 2):
            raise ValueError(f"consumers must be 1 or 2, got {self}")
        if type(self.stages) is not int or not 2 <= self.stages <= 8:
            raise ValueError(f"stages must be from 2 to 8, got {self}")


STEP_TIME = {1: 2.0, 2: 2.3}
"""Microseconds of a CTA for a chunk, by the number of consumers: on an H200, of a delta rule with 128 channels."""


def listed_params(inputs: LinearAttentionInputs, cores: int) -> list[HopperLinearAttentionParams]:
    """Params worth measuring, best guess first."""

    def seconds(consumers: int) -> float:
        """Time of a chunk of all CTAs, in the order in which SMs take them."""
        ctas = inputs.sequences * inputs.value_heads * (inputs.value_dim // (ROWS * consumers))
        return -(-ctas // cores) * STEP_TIME[consumers]

    counts = [count for count in (2, 1) if inputs.value_dim % (ROWS * count) == 0]
    counts.sort(key=seconds)
    return [HopperLinearAttentionParams(count, stages) for count in counts for stages in (3, 2)]
