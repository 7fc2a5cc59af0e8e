"""Named calls of the selective scan and of its step, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelsCase(Case):
    """The sizes and options that both functions have; by default those of a Mamba-1 layer.

    Attributes:
      groups: groups of channels that share B and C; with 1 these have no such dimension.
    """

    channels: int = 512
    state: int = 16
    groups: int = 1
    skip: bool = True
    gate: bool = True
    delta_bias: bool = True
    delta_softplus: bool = True

    def drawn(self, random: np.random.Generator, leading: tuple[int, ...]) -> tuple[list[Any], dict[str, Any]]:
        """``[u, delta, A, B, C, D]`` and the options; steps are about 0.05 to 1 after softplus."""
        shape, groups = (*leading, self.channels), () if self.groups == 1 else (self.groups,)
        u, delta = normal(random, shape, self.dtype), normal(random, shape, self.dtype)
        b, c = (normal(random, (*leading, *groups, self.state), self.dtype) for _ in range(2))
        a = -jnp.broadcast_to(jnp.arange(1, self.state + 1, dtype=jnp.float32), (self.channels, self.state))
        skip = normal(random, (self.channels,), "float32") if self.skip else None
        options: dict[str, Any] = {"delta_softplus": self.delta_softplus}
        if not self.delta_softplus:
            delta = 0.1 * jnp.abs(delta)
        if self.gate:
            options["z"] = normal(random, shape, self.dtype)
        if self.delta_bias:
            options["delta_bias"] = 0.5 * normal(random, (self.channels,), "float32") - 1
        return [u, delta, a, b, c, skip], options


@dataclasses.dataclass(frozen=True, slots=True)
class SelectiveScanCase(ChannelsCase):
    """A call of ``selective_scan``.

    Attributes:
      packed: sequences that are packed into the one row of a batch; 0 for rows.
      segments: segments of each row, by ids.
      lengths: rows have lengths, and padding behind them.
    """

    batch: int = 1
    length: int = 2048
    initial_state: bool = False
    return_state: bool = False
    packed: int = 0
    segments: int = 0
    lengths: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        arguments, options = self.drawn(random, (self.batch, self.length))
        sequences = self.packed or self.batch
        if self.initial_state:
            options["initial_state"] = normal(random, (sequences, self.channels, self.state), "float32")
        if self.return_state:
            options["return_state"] = True
        if self.packed:
            inner = np.sort(random.integers(0, self.length + 1, self.packed - 1))
            options["cum_seqlens"] = jnp.asarray([0, *inner, self.length], jnp.int32)
        if self.segments:
            drawn = np.sort(random.integers(0, self.segments, (self.batch, self.length)), axis=1)
            options["segment_ids"] = jnp.asarray(drawn, jnp.int32)
        if self.lengths:
            options["seq_lengths"] = jnp.asarray(random.integers(0, self.length + 1, self.batch), jnp.int32)
        return tuple(arguments), options


def associative_scan(case: SelectiveScanCase) -> Peer | str:
    """``jax.lax.associative_scan`` over all states, or the reason why it cannot do the case."""
    if case.packed or case.segments or case.lengths or case.groups > 1 or case.initial_state or case.return_state:
        return "scans whole rows of one group, from a state of zeros"
    if case.batch * case.length * case.channels * case.state > 1 << 31:
        return "has all states in memory, twice"

    def scan(
        u: jax.Array,
        delta: jax.Array,
        a: jax.Array,
        b: jax.Array,
        c: jax.Array,
        skip: jax.Array | None = None,
        **options: Any,
    ) -> Any:
        wide = [x.astype(jnp.float32) for x in (u, delta, b, c)]
        x, step, b, c = wide
        if options.get("delta_bias") is not None:
            step = step + options["delta_bias"]
        if options["delta_softplus"]:
            step = jax.nn.softplus(step)
        pairs = jnp.exp(step[..., None] * a), (step * x)[..., None] * b[:, :, None]
        _, states = jax.lax.associative_scan(
            lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]), pairs, axis=1
        )
        y = jnp.einsum("btdn,btn->btd", states, c)
        if skip is not None:
            y = y + skip * x
        if options.get("z") is not None:
            y = y * jax.nn.silu(options["z"].astype(jnp.float32))
        return y.astype(u.dtype)

    return scan


_MAMBA = SelectiveScanCase("", channels=5120, dtype="bfloat16")
_SMALL = SelectiveScanCase("small", batch=2, length=9, channels=8, state=4)

SCAN_CASES = OpCases(
    shape=("batch", "length", "channels"),
    small=_SMALL,
    large=dataclasses.replace(_SMALL, name="large", batch=3, length=12, channels=12),
    by_device={
        "cpu": variants(SelectiveScanCase(""), {"256": {"length": 256, "channels": 64}, "2048": {"channels": 64}}),
        "gpu": variants(
            _MAMBA,
            {
                "1x2048": {},
                "1x8192": {"length": 8192},
                "1x32768": {"length": 32768},
                "8x4096": {"batch": 8, "length": 4096},
                "8x2048x1536": {"batch": 8, "channels": 1536},
                "packed_16": {"length": 32768, "packed": 16},
            },
        ),
    },
    options=variants(
        SelectiveScanCase("", batch=2, length=128, channels=128),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16"},
            "without D, z, delta_bias": {"skip": False, "gate": False, "delta_bias": False},
            "without `delta_softplus`": {"delta_softplus": False},
            "groups of channels": {"groups": 4},
            "`initial_state`, `return_state`": {"initial_state": True, "return_state": True},
            "`cum_seqlens`": {"batch": 1, "packed": 3},
            "`segment_ids`": {"segments": 3},
            "`seq_lengths`": {"lengths": True},
        },
    ),
    peers={"associative_scan": associative_scan},
    brief={"length": 64, "channels": 64},
)


@dataclasses.dataclass(frozen=True, slots=True)
class SelectiveScanStepCase(ChannelsCase):
    """A call of ``selective_scan_step``.

    Attributes:
      slots: the states of the pool, of which each row has one; 0 for a state for each row, without indices.
      written: new states are written to other slots than those that were read.
      state_dtype: dtype of the pool.
    """

    rows: int = 64
    slots: int = 0
    written: bool = False
    state_dtype: str = "float32"

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        arguments, options = self.drawn(random, (self.rows,))
        slots = self.slots or self.rows
        pool = normal(random, (slots, self.channels, self.state), self.state_dtype)
        order = random.permutation(max(slots, self.rows)).astype(np.int32)
        if self.slots:
            options["state_indices"] = jnp.asarray(order[: self.rows])
        if self.written:
            options["write_indices"] = jnp.asarray(order[::-1][: self.rows])
        return (pool, *arguments), options


_STEP = SelectiveScanStepCase("", channels=5120, dtype="bfloat16")
_SMALL_STEP = SelectiveScanStepCase("small", rows=3, channels=8, state=4, slots=5)

STEP_CASES = OpCases(
    shape=("rows", "channels"),
    small=_SMALL_STEP,
    large=dataclasses.replace(_SMALL_STEP, name="large", rows=4, channels=12, slots=7),
    by_device={
        "cpu": variants(SelectiveScanStepCase(""), {"8": {"rows": 8}, "64": {}}),
        "gpu": variants(_STEP, {"1": {"rows": 1}, "64": {}, "256": {"rows": 256, "slots": 512}}),
    },
    options=variants(
        SelectiveScanStepCase("", rows=8, channels=128),
        {
            "float32": {},
            "bfloat16, float16": {"dtype": "bfloat16"},
            "a bfloat16 pool": {"dtype": "bfloat16", "state_dtype": "bfloat16"},
            "without D, z, delta_bias": {"skip": False, "gate": False, "delta_bias": False},
            "without `delta_softplus`": {"delta_softplus": False},
            "groups of channels": {"groups": 4},
            "`state_indices`": {"slots": 16},
            "`write_indices`": {"slots": 16, "written": True},
        },
    ),
    brief={"rows": 8, "channels": 64},
)
