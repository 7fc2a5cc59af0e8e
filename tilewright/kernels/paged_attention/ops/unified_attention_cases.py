"""Named calls of ``unified_attention``."""

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

_NAMES = {"logits_soft_cap": "softcap", "softmax_aux": "sinks", "key_scale": "k_descale", "value_scale": "v_descale"}


@dataclasses.dataclass(frozen=True, slots=True)
class UnifiedCase(ServingCase):
    """A call with vLLM's names."""

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        positional = (
            drawn.query(), cache.key, cache.value, drawn.boundaries(), drawn.lengths(), drawn.table()
        )  # fmt: skip
        given = {**self.scales(cache), **self.options(drawn)}
        window = given.pop("sliding_window", None)
        if window is not None:
            left, right = window if isinstance(window, tuple) else (window, 0 if self.causal else window)
            given["window_size"] = (-1 if left is None else left, -1 if right is None else right)
        renamed = {_NAMES.get(name, name): value for name, value in given.items()}
        return positional, {"causal": self.causal, **renamed}


CPU_CASES = named(UnifiedCase, packed(CPU_SIZES, PACKED))
GPU_CASES = named(UnifiedCase, packed(GPU_SIZES, GPU_PACKED))
