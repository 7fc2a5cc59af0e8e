"""Named calls of linear attention, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.linear_attention.inputs import GateKind
from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants

type Update = Literal["add", "delta", "removal", "bonus"]
type Sequences = Literal["rows", "cum_seqlens", "segment_ids", "seq_lengths"]

MAX_SEQUENCES = 4
"""Sequences in a packed row, and segments in a row of segments."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearAttentionCase(Case):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      heads: of queries and keys; value_heads are as many if None.
      value_dim: that of keys if None.
      gate: what the decay depends on; "none" for a call without one.
      update: what becomes of the state beside the decay: a sum, a delta rule with beta, a removal (DPLR), or a sum that
        is read before with a bonus (RWKV-6).
      sequences: what a row holds.
      state: the call has an initial state and returns the last one, unless its sequences have none.
    """

    batch: int = 1
    length: int = 1024
    heads: int = 4
    value_heads: int | None = None
    key_dim: int = 64
    value_dim: int | None = None
    gate: GateKind = "token"
    update: Update = "delta"
    sequences: Sequences = "rows"
    state: bool = False
    scale: float | None = None
    qk_l2norm: bool = False
    l2norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.sequences == "cum_seqlens" and self.batch != 1:
            raise ValueError(f"sequences are packed into one row, got {self.batch=}")

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        value_heads, value_dim = self.value_heads or self.heads, self.value_dim or self.key_dim
        tokens = (self.batch, self.length)
        query, key = (normal(random, (*tokens, self.heads, self.key_dim), self.dtype) for _ in range(2))
        if not self.qk_l2norm:
            key = key / max(self.key_dim, 1) ** 0.5
        value = normal(random, (*tokens, value_heads, value_dim), self.dtype)
        kwargs: dict[str, Any] = {"scale": self.scale} if self.scale is not None else {}
        if self.qk_l2norm:
            kwargs |= {"qk_l2norm": True, "l2norm_eps": self.l2norm_eps}
        shapes = {"none": None, "head": (), "token": tokens, "channel": tokens}
        leading = shapes[self.gate]
        if leading is not None:
            last = (self.key_dim,) if self.gate == "channel" else ()
            kwargs["log_decay"] = -0.1 * jnp.square(normal(random, (*leading, value_heads, *last), "float32"))
        per_channel = (*tokens, value_heads, self.key_dim)
        if self.update == "delta":
            kwargs["beta"] = 1 / (1 + jnp.exp(normal(random, (*tokens, value_heads), "float32")))
        if self.update == "removal":
            read, write = (normal(random, per_channel, self.dtype) for _ in range(2))
            kwargs["removal"] = -read / max(self.key_dim, 1) ** 0.5, 0.5 * write / max(self.key_dim, 1) ** 0.5
        if self.update == "bonus":
            kwargs["bonus"] = normal(random, (value_heads, self.key_dim), "float32")
        kwargs |= self._sequences(random)
        if self.state and self.sequences != "segment_ids":
            count = MAX_SEQUENCES if self.sequences == "cum_seqlens" else self.batch
            kwargs["initial_state"] = normal(random, (count, value_heads, self.key_dim, value_dim), "float32")
            kwargs["return_state"] = True
        return (query, key, value), kwargs

    def _sequences(self, random: np.random.Generator) -> dict[str, Any]:
        if self.sequences == "cum_seqlens":
            # Neither the first nor the last token belongs to a sequence, if there are enough of them.
            ends = np.sort(random.integers(0, self.length + 1, MAX_SEQUENCES + 1))
            return {"cum_seqlens": jnp.asarray(ends, jnp.int32)}
        if self.sequences == "segment_ids":
            return {"segment_ids": jnp.asarray(segments(random, self.batch, self.length))}
        if self.sequences == "seq_lengths":
            return {"seq_lengths": jnp.asarray(random.integers(0, self.length + 1, self.batch), jnp.int32)}
        return {}


def segments(random: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """int32 ``[batch, length]``: a few segments in each row, one of them of padding."""
    ends = np.sort(random.integers(0, length + 1, (batch, MAX_SEQUENCES)), axis=1)
    found = (np.arange(length)[None, :, None] >= ends[:, None]).sum(-1)
    return np.where(found == 1, -1, found).astype(np.int32)


_MODELS: dict[str, dict[str, Any]] = {
    "gated_delta_rule": {"heads": 16, "value_heads": 32, "qk_l2norm": True},
    "kimi_delta_attention": {"heads": 32, "gate": "channel", "qk_l2norm": True},
    "ssd": {"heads": 1, "value_heads": 80, "value_dim": 64, "update": "add", "scale": 1.0},
    "retention": {"heads": 16, "gate": "head", "update": "add"},
    "rwkv7": {"heads": 32, "key_dim": 64, "gate": "channel", "update": "removal", "scale": 1.0},
}

CASES = OpCases(
    shape=("batch", "length", "heads", "key_dim"),
    small=LinearAttentionCase("small", batch=2, length=18, heads=2, value_heads=4, key_dim=8, value_dim=6, state=True),
    large=LinearAttentionCase("large", batch=4, length=18, heads=2, value_heads=4, key_dim=8, value_dim=6, state=True),
    by_device={
        "cpu": variants(
            LinearAttentionCase("", length=512, heads=2),
            {
                "gated_delta_rule": {"value_heads": 4, "qk_l2norm": True},
                "kimi_delta_attention": {"gate": "channel", "qk_l2norm": True},
                "ssd": {"heads": 1, "value_heads": 4, "update": "add"},
            },
        ),
        "gpu": variants(LinearAttentionCase("", length=8192, key_dim=128, dtype="bfloat16"), _MODELS),
    },
    options=variants(
        LinearAttentionCase("", length=80, heads=2, key_dim=64),
        {
            "float32": {},
            "bfloat16": {"dtype": "bfloat16"},
            "float16": {"dtype": "float16"},
            "without `log_decay`": {"gate": "none"},
            "`log_decay` of heads": {"gate": "head"},
            "`log_decay` of channels": {"gate": "channel"},
            "without `beta`": {"update": "add"},
            "`removal`": {"gate": "channel", "update": "removal"},
            "`bonus`": {"gate": "channel", "update": "bonus"},
            "`qk_l2norm`": {"qk_l2norm": True, "l2norm_eps": 1e-3},
            "states": {"state": True},
            "`cum_seqlens`": {"sequences": "cum_seqlens"},
            "`segment_ids`": {"sequences": "segment_ids"},
            "`seq_lengths`": {"sequences": "seq_lengths"},
        },
    ),
    brief={"length": 80},
)
"""Layers of published models, and one call for each option."""
