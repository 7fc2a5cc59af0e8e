"""The forward pass over chunks of 64 tokens on Hopper, with a gate for each head and token, with or without delta rule.

A CTA (a Pallas program) goes through the chunks of one sequence with one value head and 64 or 128 of its columns, 64
for each consumer. The state is transposed, Sᵀ ``[columns, K]``: it stays in a consumer's accumulator, and its rounded
copy is the register operand of the MMAs that read it, so that it never goes through shared memory. The producer loads,
and prepares P of the next chunk. What neither depends on the state nor on V is computed before, by ``prepare_kernels``.

=======  =====================================================  ==============  ========================================
symbol   meaning                                                shape           where it lives
=======  =====================================================  ==============  ========================================
Q, K, V  a chunk of the operands                                [64, dim]       SMEM, ring ``tokens``
γ        cumulative log decay of the chunk, in base 2           [64] float32    SMEM, with others, in ``tokens``
Γ        2^(γ_i − γ_j) where i ≥ j, else 0                      [64, 64]        registers of the producer
T        Γ (I + tril(β KKᵀ, −1))⁻¹ β below the diagonal         [64, 64]        SMEM, ring ``solve``, in two parts:
                                                                                rounded, and the rest
P        scale Γ QKᵀ                                            [64, 64]        SMEM, ring ``scores``
S        state, float32                                         [64 of V, K]    accumulator of a consumer, transposed
R        V − 2^γ KS                                             [64 of V, 64]   registers, transposed
U        β R + T R: what the chunk writes                       [64 of V, 64]   accumulator, transposed
O        scale 2^γ QS + P U                                     [64 of V, 64]   accumulator, transposed; before its
                                                                                TMA store SMEM, ``out``
=======  =====================================================  ==============  ========================================

A step; time runs to the right::

    producer     QKᵀ of the next step · P to shared memory · loads of the step after it
    consumer     S·[K; Q]ᵀ | R | R·Tᵀ | U | U·Pᵀ and S ← 2^γ_C S + (2^(γ_C − γ) U)·K | O -> store
    the other    the same of other columns: they do not wait for each other

The diagonal of T is not in its operand: β R stays in float32, as equal keys leave little of it. Without the delta rule
U is V.

With ``maps`` the same kernel computes what a sequence makes of any state, M S + S_0: S_0 of its values from a state of
0 and, for a delta rule, M without values from the identity, in K more columns. There is no output then.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import WARPGROUP_THREADS, RegisterSplit
from tilewright.kernels.hopper.matmul import mask
from tilewright.kernels.hopper.matmul.store import store_rows
from tilewright.kernels.hopper.panels import PanelRef, mma
from tilewright.kernels.hopper.ring import Ring, RingPart, RingPlan
from tilewright.kernels.hopper.shared import SharedTile, TileStack
from tilewright.kernels.hopper.tiles import ROWS, across, column_layout, row_layout, spread, tile_layout
from tilewright.kernels.linear_attention.chunks import CHUNK
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.pallas_types import Ref, Scalar

GAMMA, BETA, READ_KEY, TO_END, READ_QUERY, LAST, KEY, QUERY = range(GATES := 8)
"""A chunk's gates, by number: see `ForwardOperands`."""

KQ, V, G = range(3)
"""Parts of a stage of the ring ``tokens``: K above Q, one operand of an MMA with the state; V; the gates."""

ROWS_OF_K, ROWS_OF_Q = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)

REGISTERS = {2: RegisterSplit(208, 88)}
"""By the number of consumers, beside the warpgroup that loads and prepares: 2 · 208 + 88 = 3 · 168, what three start
with. Two warpgroups have as many as a thread may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardCall:
    """The static half of a call.

    Attributes:
      sequences: number of them.
      heads, value_heads: of Q and K, and of V; a multiple.
      key_dim, value_dim: 64 or 128, and a multiple of 64 · ``consumers``.
      delta: True for a delta rule.
      return_state: whether the states behind the last tokens are stored.
      maps: whether what the sequences make of any state is computed, and no output.
      consumers: warpgroups of a CTA with 64 columns of V each.
      stages: of the ring ``tokens``.
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
    maps: bool = False

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


class ForwardOperands[Operand](NamedTuple):
    """Operands of `chunk_forward`, as arrays or references.

    Attributes:
      query, key, value: ``[rows, heads, dim]``: the tokens of all sequences, one behind the other.
      gates: ``[chunks, value_heads, GATES, 64]`` float32, by token: γ; β; what K S, U in the update of S, and Q S are
        multiplied by; what S is, 64 times; and what the columns and rows of Q Kᵀ are, besides Γ.
      solve: T, ``[chunks, value_heads, 128, 64]``: rounded, and below it the rest; None without delta rule.
      state: before the first token, ``[sequences, value_heads, V, K]`` float32; None for zeros.
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


class ForwardResults[Result](NamedTuple):
    """Results of `chunk_forward`.

    Attributes:
      out: ``[rows, value_heads, V]``; rows that belong to no sequence are not written. None of maps.
      state: after the last token, like that of the operands, if it is returned. Of maps ``[sequences, value_heads,
        V + K, K]`` with a delta rule, of sequences whose length is a multiple of 64: S_0 and below it M, transposed.
    """

    out: Result | None
    state: Result | None


class ForwardScratch[Rings, Memory](NamedTuple):
    """Shared memory of a CTA, as plans or as what is bound to them."""

    tokens: Rings
    solve: Rings | None
    scores: Rings | None
    out: Memory | None


def scratch_plan(call: ForwardCall, dtype: DTypeLike) -> ForwardScratch[RingPlan, TileStack]:
    """Rings and buffers of a CTA."""
    operands = 1 if call.maps else 2
    key_tile = SharedTile((operands * CHUNK, call.key_dim), dtype, 128, panelled=True)
    # Of a single panel each, which a consumer takes by its index.
    value_tile = SharedTile((CHUNK, ROWS), dtype, 128, panelled=True)
    gates = SharedTile((GATES, CHUNK), jnp.float32, 0)
    parts = RingPart(key_tile, copies=operands), RingPart(value_tile, call.consumers), RingPart(gates)
    return ForwardScratch(
        tokens=RingPlan(parts, call.stages, call.consumers + (not call.maps)),
        solve=RingPlan(SharedTile((2 * CHUNK, CHUNK), dtype), 2, call.consumers) if call.delta else None,
        scores=None if call.maps else RingPlan(SharedTile((CHUNK, CHUNK), dtype), 2, call.consumers, writers=1),
        out=None if call.maps else SharedTile((CHUNK, ROWS), dtype, 128, panelled=True).stack(call.consumers),
    )


def footprint(call: ForwardCall, dtype: DTypeLike) -> Footprint:
    """Blocks, threads and shared memory of a call."""
    plan = scratch_plan(call, dtype)
    rings = (ring.shared_bytes for ring in (plan.tokens, plan.solve, plan.scores) if ring is not None)
    shared = sum(rings) + (0 if plan.out is None else plan.out.tile.stack_bytes(call.consumers))
    return Footprint(blocks=call.num_ctas, threads=call.warpgroups * WARPGROUP_THREADS, shared_bytes=shared)


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything that a warpgroup needs: static facts, references, and the work of its CTA."""

    call: ForwardCall
    dtype: DTypeLike
    operands: ForwardOperands[Ref]
    results: ForwardResults[Ref]
    scratch: ForwardScratch[Ring, Ref]

    @property
    def value_head(self) -> jax.Array:
        # Heads run fastest: those that share a key head run side by side, and read the same Q and K.
        return lax.rem(lax.div(lax.axis_index("program"), jnp.int32(self.call.value_blocks)), self._value_heads)

    @property
    def sequence(self) -> jax.Array:
        return lax.div(lax.axis_index("program"), jnp.int32(self.call.value_blocks) * self._value_heads)

    @property
    def _value_heads(self) -> jax.Array:
        return jnp.int32(self.call.value_heads)

    @property
    def key_head(self) -> jax.Array:
        return lax.div(self.value_head, jnp.int32(self.call.value_heads // self.call.heads))

    @property
    def first_column(self) -> jax.Array:
        """The first column of V of this CTA."""
        block = lax.rem(lax.axis_index("program"), jnp.int32(self.call.value_blocks))
        return block * (ROWS * self.call.consumers)

    @property
    def length(self) -> jax.Array:
        return self.operands.length[self.sequence]

    @property
    def steps(self) -> jax.Array:
        return lax.div(self.length + (CHUNK - 1), jnp.int32(CHUNK))

    def count(self, step: Scalar) -> jax.Array:
        """Tokens of a chunk, from 1 to 64."""
        return lax.min(self.length - step * CHUNK, jnp.int32(CHUNK))


# The warpgroup that loads and prepares.


def run_producer(ctx: ForwardContext) -> None:
    """Loads all chunks, computes P of them, and clears what K and V hold behind the last token."""
    if ctx.call.consumers in REGISTERS:
        plgpu.set_max_registers(REGISTERS[ctx.call.consumers].producer, action="decrease")
    steps, ahead = ctx.steps, ctx.call.stages - 1
    for step in range(ahead):
        pl.when(step < steps)(functools.partial(load_chunk, ctx, step))

    def one_step(step: Scalar, _: None) -> None:
        if ctx.scratch.scores is not None:
            prepare_chunk(ctx, ctx.scratch.scores, step)
        # Behind the scores, for it waits until the consumers are done with the chunk before.
        pl.when(step + ahead < steps)(functools.partial(load_chunk, ctx, step + ahead))

    lax.fori_loop(0, steps, one_step, None)


def load_chunk(ctx: ForwardContext, step: Scalar) -> None:
    """Starts the copies of a chunk."""
    operands, head = ctx.operands, ctx.value_head
    chunk = operands.first_chunk[ctx.sequence] + step
    rows = pl.ds(operands.first_row[ctx.sequence] + step * CHUNK, CHUNK)
    # Maps have columns without values.
    columns = (ctx.first_column + number * ROWS for number in range(ctx.call.consumers))
    columns = (lax.rem(each, jnp.int32(ctx.call.value_dim)) if ctx.call.maps else each for each in columns)
    blocks = [pl.ds(each, ROWS) for each in columns]
    ctx.scratch.tokens.load_from_dram(
        step,
        operands.key.at[rows, ctx.key_head],
        *(() if ctx.call.maps else (operands.query.at[rows, ctx.key_head],)),
        *(operands.value.at[rows, head, block] for block in blocks),
        operands.gates.at[chunk, head],
    )
    if ctx.scratch.solve is not None and operands.solve is not None:
        ctx.scratch.solve.load_from_dram(step, operands.solve.at[chunk, head])


def prepare_chunk(ctx: ForwardContext, scores: Ring, step: Scalar) -> None:
    """Writes P of a chunk, and clears what K and V hold behind the last token."""
    tokens, shape, count = ctx.scratch.tokens, (CHUNK, CHUNK), ctx.count(step)
    tokens.load_from_shared(step)

    @pl.when(count < CHUNK)
    def _() -> None:
        # It may be NaN, and zero times NaN is NaN.
        mask.zero_rows(_rows(tokens, step, ROWS_OF_K), count)
        for number in range(ctx.call.consumers):
            mask.zero_rows(tokens.get_mma_tile(step, part=V, number=number), count)
        plgpu.commit_smem()

    gates = _gates(tokens, step)
    products = pl.run_scoped(functools.partial(_products, tokens, step), plgpu.ACC(shape, jnp.float32))
    products = products * spread(plgpu.load(gates.at[QUERY], layout=row_layout()), shape, 0)
    products = lax.optimization_barrier(products * spread(_of_columns(gates, KEY), shape, 1))
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=tile_layout()) for axis in (0, 1))
    of_row, of_column = plgpu.load(gates.at[GAMMA], layout=row_layout()), _of_columns(gates, GAMMA)
    # The exponent is masked, not the power: of later tokens it may overflow. 2^-inf is 0.
    distance = jnp.where(row >= column, spread(of_row, shape, 0) - spread(of_column, shape, 1), -jnp.inf)
    scores.copy_to_shared(step, (products * jnp.exp2(distance)).astype(ctx.dtype))
    tokens.release(step)


def _products(tokens: Ring, step: Scalar, acc: Ref) -> jax.Array:
    """QKᵀ of a chunk."""
    mma(acc, _rows(tokens, step, ROWS_OF_Q), _rows(tokens, step, ROWS_OF_K).T)
    return acc[...]


# The consumers.


def run_consumer(ctx: ForwardContext) -> None:
    """Computes the state and the output of 64 columns of V."""
    if ctx.call.consumers in REGISTERS:
        plgpu.set_max_registers(REGISTERS[ctx.call.consumers].consumer, action="increase")
    columns = pl.ds(ctx.first_column + lax.axis_index("warpgroup") * ROWS, ROWS)

    def compute(state: Ref) -> None:
        if ctx.operands.state is not None:
            before = ctx.operands.state.at[ctx.sequence, ctx.value_head, columns]
            state[...] = plgpu.load(before, layout=tile_layout(), optimized=False)
        elif ctx.call.maps and ctx.call.delta:
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, state.shape, axis, layout=tile_layout()) for axis in (0, 1)
            )
            state[...] = jnp.where(row + (columns.start - ctx.call.value_dim) == column, 1.0, 0.0)
        lax.fori_loop(0, ctx.steps, lambda step, _: consume_chunk(ctx, state, columns, step), None)
        if ctx.results.state is not None:
            ctx.results.state.at[ctx.sequence, ctx.value_head, columns][...] = state[...]
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(compute, plgpu.ACC((ROWS, ctx.call.key_dim), jnp.float32))


def consume_chunk(ctx: ForwardContext, state: Ref, columns: pl.Slice, step: Scalar) -> None:
    """A step of a consumer, whose accumulator ``state`` is Sᵀ."""
    tokens, scores, staging = ctx.scratch.tokens, ctx.scratch.scores, ctx.scratch.out
    if scores is None or staging is None or ctx.results.out is None:
        update_state(ctx, state, columns, step)
        plgpu.commit_smem()
        tokens.release(step)
        return
    out = chunk_output(ctx, scores, state, step)
    staging = staging.at[lax.axis_index("warpgroup")]
    # Threads have read V and the gates: a fence before TMA may write there.
    plgpu.commit_smem()
    tokens.release(step)
    scores.release(step)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the store of the chunk before has read the buffer
    _panel(staging).T[...] = out.astype(ctx.dtype)
    plgpu.commit_smem()
    row = ctx.operands.first_row[ctx.sequence] + step * CHUNK
    store_rows(staging, ctx.results.out.at[:, ctx.value_head], row, columns.start, ctx.count(step))


def update_state(ctx: ForwardContext, state: Ref, columns: pl.Slice, step: Scalar) -> None:
    """Updates the state of a map by a chunk that is full of tokens."""
    tokens, solve, shape = ctx.scratch.tokens, ctx.scratch.solve, (ROWS, CHUNK)
    rounded = state[...].astype(ctx.dtype)
    tokens.load_from_shared(step)
    gates = _gates(tokens, step)
    own, power = lax.optimization_barrier((_values(tokens, step), _of_columns(gates, READ_KEY)))
    if solve is None:
        written, to_end = own.astype(jnp.float32), _of_columns(gates, TO_END)
    else:
        # Columns of M have no values; a tile has columns of one kind.
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout())
        own = jnp.where(row < ctx.call.value_dim - columns.start, own.astype(jnp.float32), 0.0)

        def read(acc: Ref) -> jax.Array:
            mma(acc, rounded, _rows(tokens, step, ROWS_OF_K).T)
            return acc[...]

        rest = own - pl.run_scoped(read, plgpu.ACC(shape, jnp.float32)) * spread(power, shape, 1)
        written, to_end = _solved(solve, gates, rest, step)
    decayed = (written * spread(to_end, shape, 1)).astype(ctx.dtype)
    last = lax.optimization_barrier(plgpu.load(gates.at[LAST], layout=row_layout()))
    state[...] = state[...] * across(last, ctx.call.key_dim)
    mma(state, decayed, _rows(tokens, step, ROWS_OF_K))
    plgpu.wgmma_wait(0)


def chunk_output(ctx: ForwardContext, scores: Ring, state: Ref, step: Scalar) -> jax.Array:
    """Updates the state by a chunk; returns its O, transposed."""
    tokens, solve, shape = ctx.scratch.tokens, ctx.scratch.solve, (ROWS, CHUNK)
    gates, count = _gates(tokens, step), ctx.count(step)
    rounded = state[...].astype(ctx.dtype)
    tokens.load_from_shared(step)
    # Rows behind the last token are cleared before the scores are complete.
    pl.when(count < CHUNK)(lambda: scores.load_from_shared(step))
    # Loaded before the MMA is issued, as all that is combined with its accumulator: ptxas would wait for each MMA.
    own, power = lax.optimization_barrier((_values(tokens, step), _of_columns(gates, READ_KEY)))

    def read(acc: Ref) -> jax.Array:
        """KS beside QS."""
        mma(acc, rounded, tokens.get_mma_tile(step, part=KQ).T)
        return acc[...]

    def read_queries(acc: Ref) -> jax.Array:
        mma(acc, rounded, _rows(tokens, step, ROWS_OF_Q).T)
        return acc[...]

    if solve is not None:
        found = pl.run_scoped(read, plgpu.ACC((ROWS, 2 * CHUNK), jnp.float32))
        found, before = found[:, :CHUNK], found[:, CHUNK:]
        rest = own.astype(jnp.float32) - found * spread(power, shape, 1)
        written, to_end = _solved(solve, gates, rest, step)
    else:
        before = pl.run_scoped(read_queries, plgpu.ACC(shape, jnp.float32))
        written, to_end = own.astype(jnp.float32), _of_columns(gates, TO_END)
    decayed = (written * spread(to_end, shape, 1)).astype(ctx.dtype)
    written = written.astype(ctx.dtype)

    pl.when(count >= CHUNK)(lambda: scores.load_from_shared(step))

    def write(out: Ref) -> jax.Array:
        """O, and the state behind the chunk."""
        last = lax.optimization_barrier(plgpu.load(gates.at[LAST], layout=row_layout()))
        out[...] = before * spread(_of_columns(gates, READ_QUERY), shape, 1)
        state[...] = state[...] * across(last, ctx.call.key_dim)
        plgpu.wgmma(out, written, scores.get_mma_tile(step).T)
        mma(state, decayed, _rows(tokens, step, ROWS_OF_K))
        return out[...]

    return pl.run_scoped(write, plgpu.ACC(shape, jnp.float32))


def _values(tokens: Ring, step: Scalar) -> jax.Array:
    """V of a chunk, transposed."""
    tile = tokens.get_mma_tile(step, part=V, number=lax.axis_index("warpgroup"))
    return plgpu.load(_panel(tile).T, layout=tile_layout())


def _solved(solve: Ring, gates: Ref, rest: jax.Array, step: Scalar) -> tuple[jax.Array, jax.Array]:
    """U = beta R + T R, and the decays to the end of the chunk."""
    low, shape = rest.astype(solve.smem.dtype), (ROWS, CHUNK)

    def update(acc: Ref) -> tuple[jax.Array, jax.Array]:
        to_end = lax.optimization_barrier(_of_columns(gates, TO_END))
        acc[...] = rest * spread(_of_columns(gates, BETA), shape, 1)
        for part in range(2):
            plgpu.wgmma(acc, low, solve.get_mma_tile(step).at[pl.ds(part * CHUNK, CHUNK)].T)
        return acc[...], to_end

    solve.load_from_shared(step)
    found = pl.run_scoped(update, plgpu.ACC(shape, jnp.float32))
    solve.release(step)
    return found


def _gates(tokens: Ring, step: Scalar) -> Ref:
    """The gates of a chunk."""
    return tokens.stages[G].at[tokens.slot(step)]


def _rows(tokens: Ring, step: Scalar, rows: pl.Slice) -> Ref:
    """The tile of K or of Q of a chunk."""
    return tokens.get_mma_tile(step, part=KQ).at[rows]


def _panel(tile: Ref) -> Ref:
    """The only panel of a tile."""
    assert isinstance(tile, PanelRef)  # by the plan of shared memory
    (panel,) = tile.operands
    return panel


def _of_columns(gates: Ref, number: int) -> jax.Array:
    """A row of a chunk's gates, one value for each column of an accumulator."""
    # Not `optimized`: with the same row in both layouts Mosaic's inference of layouts took minutes, and found none.
    return plgpu.load(gates.at[number], layout=column_layout(), optimized=False)


# The launch.


def chunk_forward(operands: ForwardOperands[jax.Array], call: ForwardCall) -> ForwardResults[jax.Array]:
    """Computes out and the final states; see `ForwardOperands` and `ForwardResults` for the arrays."""
    dtype = operands.value.dtype

    def body(operands: ForwardOperands[Ref], results: ForwardResults[Ref], scratch: ForwardScratch[Ring, Ref]) -> None:
        ctx = ForwardContext(call, dtype, operands, results, scratch)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < call.consumers)(functools.partial(run_consumer, ctx))
        pl.when(warpgroup == call.consumers)(functools.partial(run_producer, ctx))

    results = ForwardResults(
        None if call.maps else jax.ShapeDtypeStruct((operands.value.shape[0], call.value_heads, call.value_dim), dtype),
        jax.ShapeDtypeStruct((call.sequences, call.value_heads, call.columns, call.key_dim), jnp.float32)
        if call.return_state
        else None,
    )
    return run_kernel(
        body,
        operands,
        results,
        scratch_plan(call, dtype),
        role="chunks",
        num_ctas=call.num_ctas,
        warpgroups=call.warpgroups,
    )
