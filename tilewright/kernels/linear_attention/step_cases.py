"""Named calls of the decoding step, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.linear_attention.cases import Update
from tilewright.kernels.linear_attention.inputs import GateKind
from tilewright.kernels.linear_attention.step_inputs import StateLayout
from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class StepCase(Case):
    """A call of ``linear_attention_step``.

    Attributes:
      tokens: tokens of each row; None for arrays without that axis.
      slots: slots of the pool, of which each row has another one, if there are enough; None if row i has slot i.
      gate, update: as in the cases of ``linear_attention``.
      writes: new states go to other slots, if ``slots`` are given.
      pool_dtype: None for the dtype of the pool of a call in float32 or less.
    """

    batch: int = 8
    heads: int = 4
    value_heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    tokens: int | None = None
    slots: int | None = None
    gate: GateKind = "token"
    update: Update = "delta"
    scale: float | None = None
    qk_l2norm: bool = False
    l2norm_eps: float = 1e-6
    state_layout: StateLayout = "kv"
    writes: bool = False
    pool_dtype: str | None = None

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        rows = (self.batch,) if self.tokens is None else (self.batch, self.tokens)
        of_keys, of_gates = (*rows, self.heads, self.key_dim), (*rows, self.value_heads)
        query, key = normal(random, of_keys, self.dtype), normal(random, of_keys, self.dtype)
        value = normal(random, (*of_gates, self.value_dim), self.dtype)
        wide = "float64" if self.dtype == "float64" else "float32"
        state = (self.key_dim, self.value_dim) if self.state_layout == "kv" else (self.value_dim, self.key_dim)
        slots = self.batch if self.slots is None else self.slots
        pool = normal(random, (slots, self.value_heads, *state), self.pool_dtype or wide)

        def small(shape: tuple[int, ...], dtype: str = wide) -> Any:
            return normal(random, shape, dtype) * 0.5

        keywords: dict[str, Any] = {
            "scale": self.scale, "qk_l2norm": self.qk_l2norm, "l2norm_eps": self.l2norm_eps,
            "state_layout": self.state_layout,
        }  # fmt: skip
        if self.gate != "none":
            of = {"head": (self.value_heads,), "token": of_gates, "channel": (*of_gates, self.key_dim)}
            keywords["log_decay"] = -jnp.abs(small(of[self.gate]))
        if self.update == "delta":
            keywords["beta"] = jnp.abs(small(of_gates))
        if self.update == "removal":
            keywords["removal"] = tuple(small((*of_gates, self.key_dim), self.dtype) for _ in range(2))
        if self.update == "bonus":
            keywords["bonus"] = small((self.value_heads, self.key_dim))
        if self.slots is not None:
            count = self.batch * (2 if self.writes else 1)
            # The last slots first; rows that are left have none.
            chosen = jnp.asarray(np.maximum(slots - 1 - np.arange(count), -1), jnp.int32)
            keywords["state_indices"] = chosen[: self.batch]
            if self.writes:
                keywords["write_indices"] = chosen[self.batch :]
        return (query, key, value, pool), keywords


_GPU = StepCase(
    "", batch=64, heads=16, value_heads=32, key_dim=128, value_dim=128, slots=96, dtype="bfloat16", qk_l2norm=True
)

CASES = OpCases(
    shape=("batch", "value_heads", "key_dim", "value_dim"),
    small=StepCase("small", batch=3, heads=2, value_heads=4, key_dim=16, value_dim=8, slots=3, qk_l2norm=True),
    large=StepCase("large", batch=4, heads=2, value_heads=4, key_dim=16, value_dim=8, slots=4, qk_l2norm=True),
    by_device={
        "cpu": variants(
            StepCase("", slots=12, qk_l2norm=True),
            {
                "delta": {},
                "channels": {"gate": "channel"},
                "tokens": {"tokens": 4},
                "plain": {"gate": "none", "update": "add", "qk_l2norm": False},
            },
        ),
        "gpu": variants(
            _GPU,
            {
                "delta": {},
                "256": {"batch": 256, "slots": 288},
                "one": {"batch": 1, "slots": 8},
                "vk": {"state_layout": "vk"},
                "bfloat16": {"batch": 256, "slots": 288, "pool_dtype": "bfloat16"},
                "tokens": {"tokens": 4},
                "channels": {"heads": 32, "gate": "channel"},
                "ssd": {
                    "batch": 256,
                    "heads": 1,
                    "value_heads": 80,
                    "value_dim": 64,
                    "slots": 288,
                    "update": "add",
                    "qk_l2norm": False,
                    "state_layout": "vk",
                },
                "removal": {
                    "heads": 64,
                    "value_heads": 64,
                    "key_dim": 64,
                    "value_dim": 64,
                    "gate": "channel",
                    "update": "removal",
                    "qk_l2norm": False,
                },
            },
        ),
    },
    options=variants(
        StepCase("", batch=3, heads=2, value_heads=2, key_dim=16, value_dim=16, gate="none", update="add"),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16"},
            "bfloat16 pool": {"pool_dtype": "bfloat16"},
            "more value heads": {"value_heads": 4},
            "several tokens": {"tokens": 3},
            "`scale`": {"scale": 0.5},
            "`log_decay` of heads": {"gate": "head"},
            "`log_decay` of tokens": {"gate": "token"},
            "`log_decay` of channels": {"gate": "channel"},
            "`beta`": {"update": "delta"},
            "`removal`": {"update": "removal"},
            "`bonus`": {"update": "bonus"},
            "`qk_l2norm`": {"qk_l2norm": True, "l2norm_eps": 0.5},
            "`state_indices`": {"slots": 3},
            "`write_indices`": {"slots": 3, "writes": True},
            '`state_layout="vk"`': {"state_layout": "vk"},
        },
    ),
    brief={"batch": 3},
)
