"""Named calls of ``update_pages``."""

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
class UpdateCase(ServingCase):
    """A call that writes the last tokens of each sequence."""

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (cache.key, cache.value, *drawn.new(), drawn.table(), drawn.lengths(), drawn.boundaries())
        return positional, self.scales(cache)


CPU_CASES = named(UpdateCase, packed(CPU_SIZES, PACKED))
GPU_CASES = named(UpdateCase, packed(GPU_SIZES, GPU_PACKED))
