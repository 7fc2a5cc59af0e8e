"""Configs of linear attention on Hopper: params, and those worth measuring."""

import dataclasses

from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.linear_attention.chunks import CHUNK
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.passes.chunks import TritonPass
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/linear_attention.HopperLinearAttentionParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperLinearAttentionParams:
    """Config of the forward pass.

    Attributes:
      consumers: warpgroups of a CTA, each with 64 channels of the values.
      stages: chunks in shared memory that are loaded or read.
      segment: chunks of a segment; sequences are split into segments that run at once, and what each makes of a state
        is computed first. With 0 they are not split.
    """

    consumers: int
    stages: int
    segment: int = 0

    def __post_init__(self) -> None:
        if type(self.consumers) is not int or self.consumers not in (1, 2):
            raise ValueError(f"consumers must be 1 or 2, got {self}")
        if type(self.stages) is not int or not 2 <= self.stages <= 8:
            raise ValueError(f"stages must be from 2 to 8, got {self}")
        if type(self.segment) is not int or self.segment < 0:
            raise ValueError(f"segment must not be negative, got {self}")


@stable_id("tilewright/linear_attention.HopperLinearAttentionGradientParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperLinearAttentionGradientParams:
    """Config of the backward pass.

    Attributes:
      consumers, stages, segment: of the passes over states, as in `HopperLinearAttentionParams`.
      tokens: the passes that are parallel over chunks, in Triton.
      ctas: of the kernel that takes the place of most of these with a delta rule, at most; 0 for Triton there, too.
    """

    consumers: int
    stages: int
    tokens: TritonPass
    segment: int = 0
    ctas: int = 0

    def __post_init__(self) -> None:
        HopperLinearAttentionParams(self.consumers, self.stages, self.segment)
        if not isinstance(self.tokens, TritonPass):
            raise TypeError(f"tokens must be a TritonPass, got {self.tokens!r}")
        if type(self.ctas) is not int or self.ctas < 0:
            raise ValueError(f"ctas must not be negative, got {self}")


STEP_TIME = {1: 2.0, 2: 2.3}
"""Microseconds of a CTA for a chunk, by the number of consumers: on an H200, of a delta rule with 128 channels."""

MAP_TIME = {1: 1.5, 2: 1.8}
"""The same of maps, which have no output; an estimate."""

FOLD_TIME = 3.0
"""Microseconds in which a state goes through a segment by its map; an estimate."""

MAX_SEGMENTS = 32
"""Segments of a sequence that are considered."""

TOKENS = TritonPass(64, 4, 3), TritonPass(64, 4, 1), TritonPass(64, 8, 3), TritonPass(64, 8, 1)
"""Launches of the gradients of tokens, best guess first."""


def listed_params(inputs: LinearAttentionInputs, cores: int) -> list[HopperLinearAttentionParams]:
    """Params of the forward pass that are worth measuring, best guess first."""
    kept = _splits(inputs, cores, 1)
    return [HopperLinearAttentionParams(count, stages, size) for count, size in kept for stages in (3, 2)]


def listed_gradient_params(inputs: LinearAttentionInputs, cores: int) -> list[HopperLinearAttentionGradientParams]:
    """The same of the backward pass, which goes through states twice, and with segments four times."""
    ctas = cores if inputs.beta is not None else 0
    found = [
        HopperLinearAttentionGradientParams(count, stages, TOKENS[0], size, ctas)
        for count, size in _splits(inputs, cores, 2)
        for stages in (3, 2)
    ]
    if ctas:
        # The first of them that fits shared memory, with the passes of Triton.
        return [*found, *(dataclasses.replace(each, ctas=0) for each in found[:2])]
    return [*found, *(dataclasses.replace(each, tokens=tile) for tile in TOKENS[1:] for each in found[:2])]


def _splits(inputs: LinearAttentionInputs, cores: int, passes: int) -> list[tuple[int, int]]:
    """Consumers, and chunks of a segment."""
    # By shapes alone, as bits of results depend on the segments: of sequences of one length.
    chunks = -(-inputs.batch * inputs.length // (CHUNK * inputs.sequences))
    counts = [count for count in (2, 1) if inputs.value_dim % (ROWS * count) == 0]
    sizes = [0, *dict.fromkeys(-(-chunks // number) for number in range(2, min(chunks // 2, MAX_SEGMENTS) + 1))]
    both = [(count, size) for count in counts for size in sizes if not size or inputs.key_dim % (ROWS * count) == 0]
    both.sort(key=lambda each: _time(inputs, cores, chunks, passes, *each))
    return [*both[:2], *(each for each in both[2:] if not each[1])]


def _time(inputs: LinearAttentionInputs, cores: int, chunks: int, passes: int, consumers: int, size: int) -> float:
    """Estimated microseconds of passes over states, one or there and back; all CTAs of one run as many chunks."""
    chains, channels = inputs.sequences * inputs.value_heads, ROWS * consumers

    def rounds(spans: int, columns: int) -> int:
        return -(-chains * spans * (columns // channels) // cores)

    if not size:
        return passes * rounds(1, inputs.value_dim) * chunks * STEP_TIME[consumers]
    segments = -(-chunks // size)
    columns = inputs.value_dim + (inputs.key_dim if inputs.beta is not None else 0)
    maps = rounds(segments - 1, columns) * size * MAP_TIME[consumers] + passes * segments * FOLD_TIME
    # The way back goes through the segments once more, for what they make of a gradient of 0.
    return maps + (2 * passes - 1) * rounds(segments, inputs.value_dim) * size * STEP_TIME[consumers]
