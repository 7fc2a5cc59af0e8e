"""Named calls of ``chunked_prefill_paged_decode``."""

import dataclasses
from typing import Any

from tilewright.kernels.paged_attention.cases import (
    CPU_SIZES,
    GPU_PACKED,
    GPU_SIZES,
    PACKED,
    ServingCase,
    named,
    packed,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkedCase(ServingCase):
    """A call that writes its tokens."""

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (
            drawn.query(), *drawn.new(), cache.key, cache.value, drawn.table(), drawn.lengths(), drawn.boundaries()
        )  # fmt: skip
        return positional, {**self.scales(cache), **self.options(drawn)}


CPU_CASES = named(ChunkedCase, packed(CPU_SIZES, PACKED))
GPU_CASES = named(ChunkedCase, packed(GPU_SIZES, GPU_PACKED))
