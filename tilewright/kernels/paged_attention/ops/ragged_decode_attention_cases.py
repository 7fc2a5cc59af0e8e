"""Named calls of ``ragged_decode_attention``."""

import dataclasses
from typing import Any

from tilewright.kernels.paged_attention.cases import CPU_SIZES, GPU_SIZES, ServingCase, named


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedDecodeCase(ServingCase):
    """A call over ranges that end with the sequences."""

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        cache = drawn.dense()
        ends = drawn.lengths()
        starts = drawn.starts(ends)
        positional = (drawn.query(self.sequences), cache.key, cache.value, starts, ends)
        return positional, {**self.scales(cache), **self.options(drawn)}


CPU_CASES = named(RaggedDecodeCase, CPU_SIZES)
GPU_CASES = named(RaggedDecodeCase, GPU_SIZES)
