"""Configs of linear attention in XLA."""

import dataclasses
import math

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.types import Device
from tilewright.ops.utils.stable_ids import stable_id

MIN_CHUNK = 16
MAX_CHUNK = 64
"""The longest chunk without measurements: products within a chunk are then as large as those with states."""

MIN_SERIAL_CHUNKS = 32
"""Chunks from which a row is worth splitting into segments: each step of a loop waits for a launch or two."""

MAX_SPLIT_STATES = 64
"""States up to which a step of the loop over chunks is too little work for a device that runs many at a time."""


@stable_id("tilewright/linear_attention.XlaLinearAttentionParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaLinearAttentionParams:
    """Config of either direction.

    Attributes:
      chunk: tokens of a chunk, a power of two.
      segment: chunks of a segment; the segments of a row run at the same time, and then once more with their true
        initial states. 1 for a single loop over all chunks.
    """

    chunk: int = MAX_CHUNK
    segment: int = 1

    def __post_init__(self) -> None:
        if type(self.chunk) is not int or self.chunk < MIN_CHUNK or self.chunk & (self.chunk - 1):
            raise ValueError(f"{self.chunk=} must be a power of two from {MIN_CHUNK} on")
        if type(self.segment) is not int or self.segment < 1:
            raise ValueError(f"{self.segment=} must be a positive integer")


def chunk_tokens(inputs: LinearAttentionInputs) -> int:
    """Tokens of a chunk without measurements: fewer if sequences are shorter."""
    if is_symbolic(inputs.length) or is_symbolic(inputs.sequences):
        return MAX_CHUNK
    mean = inputs.length
    if inputs.cum_seqlens is not None:
        mean = -(-inputs.length // max(inputs.sequences, 1))
    return min(max(MIN_CHUNK, 1 << max(mean - 1, 0).bit_length()), MAX_CHUNK)


def segment_chunks(inputs: LinearAttentionInputs, chunk: int, device: Device) -> int:
    """Chunks of a segment without measurements."""
    sizes = (inputs.length, inputs.batch, inputs.sequences)
    if device.kind == "cpu" or any(map(is_symbolic, sizes)):
        return 1
    count = -(-inputs.length // chunk)
    if count < MIN_SERIAL_CHUNKS or inputs.batch * inputs.value_heads > MAX_SPLIT_STATES:
        return 1
    # Two loops over a segment's chunks and one over segments: 2 m + n / m steps in place of n.
    segment = 1 << round(math.log2(math.sqrt(count / 2)))
    if inputs.cum_seqlens is not None:
        # A segment belongs to one sequence: with longer ones most chunks of short sequences would be empty.
        segment = min(segment, max(1, count // max(inputs.sequences, 1)))
    return segment


def candidate_params(inputs: LinearAttentionInputs, device: Device) -> list[XlaLinearAttentionParams]:
    """Configs that are worth measuring, the heuristic's first."""
    best = chunk_tokens(inputs)
    found = []
    for chunk in (best, max(best // 2, MIN_CHUNK), 2 * best):
        segment = segment_chunks(inputs, chunk, device)
        found += [XlaLinearAttentionParams(chunk, each) for each in (segment, 1)]
    return list(dict.fromkeys(found))
