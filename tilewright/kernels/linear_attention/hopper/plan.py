"""The static half of a pass over chunks on Hopper: its call, arrays and shared memory; ``forward`` has the symbols."""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.hopper.limits import BARRIER_BYTES, WARPGROUP_THREADS
from tilewright.kernels.hopper.ring import RingPart, RingPlan
from tilewright.kernels.hopper.shared import SharedTile, TileStack
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.linear_attention.chunks import CHUNK
from tilewright.kernels.op.footprint import Footprint

GAMMA, BETA, READ_KEY, TO_END, READ_QUERY, LAST, KEY, QUERY = range(GATES := 8)
"""A chunk's gates, by number: see `PassOperands`."""

KQ, V, G = range(3)
"""Parts of a stage of the ring ``tokens``: K above Q, one operand of an MMA with the state; V; the gates."""

type Task = Literal["out", "states", "gradients"]
"""O; the states before all chunks, and U; or the gradients of both, by ``backward``."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassCall:
    """The static half of a call.

    Attributes:
      sequences: number of them.
      heads, value_heads: of Q and K, and of V; a multiple.
      key_dim, value_dim: 64 or 128, and a multiple of 64 · ``consumers``.
      delta: True for a delta rule.
      return_state: whether the states behind the last tokens are stored, or the gradients of those before the first.
      consumers: warpgroups of a CTA with 64 columns of V each.
      stages: of the ring ``tokens``.
      stored: whether the results of the task are; otherwise only the states at the end, which for "states" are maps.
    """

    sequences: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    delta: bool
    return_state: bool
    consumers: int
    stages: int
    task: Task = "out"
    stored: bool = True

    @property
    def maps(self) -> bool:
        """True for what the sequences make of any state."""
        return self.task == "states" and not self.stored

    @property
    def scores(self) -> bool:
        """True if queries are read, and P is computed."""
        return self.task != "states"

    @property
    def stores_states(self) -> bool:
        return self.task != "out" and self.stored

    @property
    def stores_tokens(self) -> bool:
        """True if a row of each token is stored: O, U or dR."""
        return self.stored and (self.task != "states" or self.delta)

    @property
    def columns(self) -> int:
        """Rows of Sᵀ of a sequence and a value head."""
        return self.value_dim + (self.key_dim if self.maps and self.delta else 0)

    @property
    def value_blocks(self) -> int:
        """CTAs that share a sequence and a value head."""
        return self.columns // (ROWS * self.consumers)

    @property
    def num_ctas(self) -> int:
        return self.sequences * self.value_heads * self.value_blocks

    @property
    def warpgroups(self) -> int:
        return self.consumers + 1


class PassOperands[Operand](NamedTuple):
    """Operands of `run_chunks`, as arrays or references.

    Attributes:
      query, key, value: ``[rows, heads, dim]``: the tokens of all sequences, one behind the other. For gradients
        ``value`` is dO.
      gates: ``[chunks, value_heads, GATES, 64]`` float32, by token: γ; β; what K S, U in the update of S, and Q S are
        multiplied by; what S is, 64 times; and what the columns and rows of Q Kᵀ are, besides Γ.
      solve: T, ``[chunks, value_heads, 128, 64]``: rounded, and below it the rest; None without delta rule.
      state: before the first token, ``[sequences, value_heads, V, K]`` float32; None for zeros. For gradients it is
        that of the state behind the last one.
      first_row, first_chunk, length: ``[sequences]`` int32: of each sequence.
    """

    query: Operand
    key: Operand
    value: Operand
    gates: Operand
    solve: Operand | None
    state: Operand | None
    first_row: Operand
    first_chunk: Operand
    length: Operand


class PassResults[Result](NamedTuple):
    """Results of `run_chunks`.

    Attributes:
      out: ``[rows, value_heads, V]``: O, U or dR (without a delta rule dU); rows that belong to no sequence are not
        written.
      state: after the last token, like that of the operands, if it is returned; for gradients that of the state before
        the first one. Of maps ``[sequences, value_heads, V + K, K]`` with a delta rule: S_0 and below it M, transposed.
      states: ``[chunks, value_heads, V, K]``: before each chunk, or the gradients of those behind it, rounded.
    """

    out: Result | None
    state: Result | None
    states: Result | None


class PassScratch[Rings, Memory, Barrier](NamedTuple):
    """Shared memory of a CTA, as plans or as what is bound to them; ``cleared`` where no ring says that rows are 0."""

    tokens: Rings
    solve: Rings | None
    scores: Rings | None
    out: Memory | None
    kept: Memory | None
    cleared: Barrier | None


def scratch_plan(call: PassCall, dtype: DTypeLike) -> PassScratch[RingPlan, TileStack, None]:
    """Rings and buffers of a CTA."""
    operands = 2 if call.scores else 1
    key_tile = SharedTile((operands * CHUNK, call.key_dim), dtype, 128, panelled=True)
    # Of a single panel each, which a consumer takes by its index.
    value_tile = SharedTile((CHUNK, ROWS), dtype, 128, panelled=True)
    state_tile = SharedTile((ROWS, call.key_dim), dtype, 128, panelled=True)
    gates = SharedTile((GATES, CHUNK), jnp.float32, 0)
    parts = RingPart(key_tile, copies=operands), RingPart(value_tile, call.consumers), RingPart(gates)
    return PassScratch(
        tokens=RingPlan(parts, call.stages, call.consumers + 1),
        solve=RingPlan(SharedTile((2 * CHUNK, CHUNK), dtype), 2, call.consumers) if call.delta else None,
        scores=RingPlan(SharedTile((CHUNK, CHUNK), dtype), 2, call.consumers, writers=1) if call.scores else None,
        out=value_tile.stack(call.consumers) if call.stores_tokens else None,
        kept=state_tile.stack(call.consumers) if call.stores_states else None,
        cleared=None,
    )


def footprint(call: PassCall, dtype: DTypeLike) -> Footprint:
    """Blocks, threads and shared memory of a call."""
    plan = scratch_plan(call, dtype)
    rings = sum(ring.shared_bytes for ring in (plan.tokens, plan.solve, plan.scores) if ring is not None)
    stores = sum(each.tile.stack_bytes(call.consumers) for each in (plan.out, plan.kept) if each is not None)
    shared = rings + stores + (0 if call.scores else BARRIER_BYTES)
    return Footprint(blocks=call.num_ctas, threads=call.warpgroups * WARPGROUP_THREADS, shared_bytes=shared)
