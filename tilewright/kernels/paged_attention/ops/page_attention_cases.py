"""Named calls of ``page_attention``."""

import dataclasses
from typing import Any

from tilewright.kernels.paged_attention.cases import CPU_SIZES, GPU_SIZES, ServingCase, named


@dataclasses.dataclass(frozen=True, slots=True)
class PageCase(ServingCase):
    """A call over pages."""

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (drawn.query(self.sequences), cache.key, cache.value, drawn.table(), drawn.lengths())
        return positional, {**self.scales(cache), **self.options(drawn)}


CPU_CASES = named(PageCase, CPU_SIZES)
GPU_CASES = named(PageCase, GPU_SIZES)
