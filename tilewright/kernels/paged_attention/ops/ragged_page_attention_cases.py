"""Named calls of ``ragged_page_attention``."""

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
class RaggedPageCase(ServingCase):
    """A call over pages, which writes the new tokens first with ``write``."""

    write: bool = False

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (
            drawn.query(), cache.key, cache.value, drawn.table(), drawn.lengths(), drawn.boundaries()
        )  # fmt: skip
        new = dict(zip(("new_key", "new_value"), drawn.new(), strict=True)) if self.write else {}
        return positional, {"causal": self.causal, **new, **self.scales(cache), **self.options(drawn)}


CPU_CASES = named(RaggedPageCase, packed(CPU_SIZES, PACKED))
GPU_CASES = named(RaggedPageCase, packed(GPU_SIZES, GPU_PACKED))
