"""Named calls of the convolution and of its step, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.causal_conv1d.inputs import ConvActivation
from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants

type Packing = Literal["cum_seqlens", "segment_ids", "seq_lengths"]


def uneven(random: np.random.Generator, length: int, pieces: int) -> np.ndarray:
    """Boundaries of pieces of a length, ``[pieces + 1]`` int32; pieces may be empty."""
    inner = np.sort(random.integers(0, length + 1, max(pieces - 1, 0)))
    return np.concatenate([[0], inner, [length]]).astype(np.int32)[: pieces + 1]


@dataclasses.dataclass(frozen=True, slots=True)
class ConvCase(Case):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      packing: the array that tells which tokens are of one sequence.
      sequences: those of a packed row, and segments of a row.
    """

    batch: int = 1
    length: int = 1024
    channels: int = 512
    width: int = 4
    weight_dtype: str | None = None
    bias: bool = True
    activation: ConvActivation | None = "silu"
    packing: Packing | None = None
    sequences: int = 3
    initial_state: bool = False
    return_state: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        vectors = self.weight_dtype or self.dtype
        x = normal(random, (self.batch, self.length, self.channels), self.dtype)
        weight = normal(random, (self.channels, self.width), vectors) * 0.5
        bias = normal(random, (self.channels,), vectors) if self.bias else None
        options: dict[str, Any] = {"activation": self.activation, "return_state": self.return_state}
        if self.packing is not None:
            options[self.packing] = jnp.asarray(self._described(random))
        if self.initial_state:
            count = self.sequences if self.packing == "cum_seqlens" else self.batch
            options["initial_state"] = normal(random, (count, self.channels, self.width - 1), self.dtype)
        return (x, weight, bias), options

    def _described(self, random: np.random.Generator) -> np.ndarray:
        if self.packing == "seq_lengths":
            return random.integers(0, self.length + 1, self.batch).astype(np.int32)
        if self.packing == "cum_seqlens":
            return uneven(random, self.length, self.sequences)
        rows = [uneven(random, self.length, self.sequences) for _ in range(self.batch)]
        ids = [np.repeat(np.arange(self.sequences), np.diff(row)) for row in rows]
        return np.asarray(ids, np.int32).reshape(self.batch, self.length) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class ConvStepCase(Case):
    """The sizes and options of a step.

    Attributes:
      tokens: of each sequence; ``None`` for one without a dimension of its own.
      slots: of the pool; ``None`` for as many as sequences, and no indices.
      moves: the new states get other slots than those that were read.
    """

    batch: int = 8
    tokens: int | None = None
    channels: int = 512
    width: int = 4
    slots: int | None = None
    moves: bool = False
    weight_dtype: str | None = None
    pool_dtype: str | None = None
    bias: bool = True
    activation: ConvActivation | None = "silu"

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        vectors, slots = self.weight_dtype or self.dtype, self.batch if self.slots is None else self.slots
        tokens = () if self.tokens is None else (self.tokens,)
        x = normal(random, (self.batch, *tokens, self.channels), self.dtype)
        pool = normal(random, (slots, self.channels, self.width - 1), self.pool_dtype or self.dtype)
        weight = normal(random, (self.channels, self.width), vectors) * 0.5
        bias = normal(random, (self.channels,), vectors) if self.bias else None
        options: dict[str, Any] = {"activation": self.activation}
        if self.slots is not None or self.moves:
            # Distinct slots, half of them to read and half to write where states move; -1 beyond what the pool has.
            order = random.permutation(slots).astype(np.int32)
            read, write = (order[: slots // 2], order[slots // 2 :]) if self.moves else (order, order)
            found = [np.full(self.batch, -1, np.int32) for _ in range(2)]
            for into, given in zip(found, (read, write), strict=True):
                into[: len(given)] = given[: self.batch]
            options["state_indices"] = jnp.asarray(found[0])
            if self.moves:
                options["write_indices"] = jnp.asarray(found[1])
        return (x, pool, weight, bias), options


def _grouped(case: ConvCase) -> Peer | str:
    """JAX's own convolution with a group for each channel."""
    if case.packing is not None or case.initial_state or case.return_state:
        return "it knows neither packed sequences nor states"

    def run(x: jax.Array, weight: jax.Array, bias: jax.Array | None, **_: Any) -> jax.Array:
        kernel = weight.astype(x.dtype).T[:, None]
        out: jax.Array = jax.lax.conv_general_dilated(
            x, kernel, (1,), [(case.width - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=case.channels,
        )  # fmt: skip
        out = out if bias is None else out + bias.astype(x.dtype)
        return out if case.activation is None else jax.nn.silu(out)

    return run


_QWEN = ConvCase("", dtype="bfloat16", channels=8192, bias=False, length=32768)
_MAMBA = ConvCase("", dtype="bfloat16", channels=5120, batch=8, length=2048)

CASES = OpCases(
    shape=("batch", "length", "channels"),
    small=ConvCase("small", batch=2, length=6, channels=8),
    large=ConvCase("large", batch=4, length=9, channels=8),
    by_device={
        "cpu": variants(ConvCase(""), {"1k": {}, "packed": {"packing": "cum_seqlens"}}),
        "gpu": variants(_QWEN, {
            "gdn_32k": {},
            "gdn_32k_packed": {"packing": "cum_seqlens", "sequences": 8},
            "gdn_8k": {"length": 8192},
            "gdn_2k_tp8": {"length": 2048, "channels": 1024},
            "gdn_prefill": {
                "length": 4096, "packing": "cum_seqlens", "sequences": 16, "initial_state": True, "return_state": True,
            },
        }) | variants(_MAMBA, {
            "mamba_8x2k": {},
            "mamba_8x2k_no_activation": {"activation": None},
            "mamba_float32_4x2k": {"dtype": "float32", "batch": 4},
            "mamba2_4k": {"batch": 1, "length": 4096, "channels": 5376},
        }),
    },
    options=variants(
        ConvCase("", length=32, channels=16),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16", "weight_dtype": "float32"},
            "no bias": {"bias": False},
            "no activation": {"activation": None},
            "width 1": {"width": 1},
            "width 2 to 8": {"width": 8},
            "width beyond": {"width": 9},
            "`initial_state`": {"initial_state": True},
            "`return_state`": {"return_state": True},
            "`cum_seqlens`": {"packing": "cum_seqlens"},
            "`segment_ids`": {"packing": "segment_ids"},
            "`seq_lengths`": {"packing": "seq_lengths"},
        },
    ),
    peers={"lax.conv": _grouped},
    brief={"length": 8, "channels": 16},
)  # fmt: skip
"""The convolutions before the layers of Qwen3-Next (8192 channels), Mamba (5120) and Mamba-2."""

_DECODE = ConvStepCase("", dtype="bfloat16", channels=8192, bias=False, batch=256, slots=512)

STEP_CASES = OpCases(
    shape=("batch", "channels"),
    small=ConvStepCase("small", batch=2, channels=8, slots=5),
    large=ConvStepCase("large", batch=3, channels=8, slots=7),
    by_device={
        "cpu": variants(ConvStepCase(""), {"8": {}}),
        "gpu": variants(
            _DECODE,
            {
                "gdn_256": {},
                "gdn_1": {"batch": 1},
                "gdn_64": {"batch": 64},
                "gdn_64_speculative": {"batch": 64, "tokens": 4},
            },
        ),
    },
    options=variants(
        ConvStepCase("", batch=4, channels=16),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16", "weight_dtype": "float32"},
            "float32 pool": {"dtype": "bfloat16", "pool_dtype": "float32"},
            "no bias": {"bias": False},
            "no activation": {"activation": None},
            "several tokens": {"tokens": 3},
            "width 1": {"width": 1},
            "width 2 to 8": {"width": 8},
            "width beyond": {"width": 9},
            "`state_indices`": {"slots": 4},
            "`write_indices`": {"slots": 4, "moves": True},
        },
    ),
    brief={"channels": 16},
)
"""The decoding steps of Qwen3-Next, of which a speculative one has several tokens."""
