"""Named calls of ``decode_attention``."""

import dataclasses
from typing import Any

from tilewright.kernels.paged_attention.cases import CPU_SIZES, GPU_SIZES, ServingCase, named


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCase(ServingCase):
    """A call over a dense cache, or over pages with ``paged``."""

    paged: bool = False

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        if self.paged:
            cache = drawn.pages()
            table = {"page_table": drawn.table()}
        else:
            cache, table = drawn.dense(), {}
        positional = (drawn.query(self.sequences), cache.key, cache.value, drawn.lengths())
        return positional, {**table, **self.scales(cache), **self.options(drawn)}


CPU_CASES = named(DecodeCase, CPU_SIZES)
GPU_CASES = named(DecodeCase, GPU_SIZES)
