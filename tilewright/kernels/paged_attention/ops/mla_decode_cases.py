"""Named calls of ``mla_decode``."""

import dataclasses
from typing import Any

from tilewright.kernels.paged_attention.cases import ServingCase, named


@dataclasses.dataclass(frozen=True, slots=True)
class MlaCase(ServingCase):
    """A call; ``value_dim`` is the rank of the latent, and ``q_lengths`` has one number, that of every sequence."""

    kv_heads: int | None = 1

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        drawn = self.drawn(seed)
        cache = drawn.pages()
        query = drawn.query(self.sequences, *self.q_lengths) if self.q_lengths != (1,) else drawn.query(self.sequences)
        given = {"kv_lora_rank": self.value_dim or self.head_dim, "causal": self.causal, **self.options(drawn)}
        if cache.key_scale is not None:
            given["scale"] = cache.key_scale
        return (query, cache.key, drawn.table(), drawn.lengths()), given


_CPU = {"heads": 16, "head_dim": 144, "value_dim": 128}
CPU_CASES = named(
    MlaCase,
    {
        "batch_8": {"sequences": 8, "kv_length": 512, **_CPU},
        "two_tokens": {"sequences": 8, "kv_length": 512, "q_lengths": (2,), **_CPU},
    },
)
_GPU = {"heads": 128, "head_dim": 576, "value_dim": 512, "dtype": "bfloat16", "page_size": 64}
GPU_CASES = named(
    MlaCase,
    {
        "64x4096": {"sequences": 64, "kv_length": 4096, "ragged": False, **_GPU},
        "64x8192": {"sequences": 64, "kv_length": 8192, "ragged": False, **_GPU},
        "64x8192_16_heads": {"sequences": 64, "kv_length": 8192, "ragged": False, **_GPU, "heads": 16},
    },
)
