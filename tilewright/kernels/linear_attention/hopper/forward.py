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
T        Γ (I + tril(β KKᵀ, −1))⁻¹ below the diagonal           [64, 64]        SMEM, ring ``solve``, in two parts:
                                                                                rounded, and the rest
P        scale Γ QKᵀ                                            [64, 64]        SMEM, ring ``scores``
S        state, float32                                         [64 of V, K]    accumulator of a consumer, transposed
R        β (V − 2^γ KS)                                         [64 of V, 64]   registers, transposed
U        R + T R: what the chunk writes                         [64 of V, 64]   accumulator, transposed
O        scale 2^γ QS + P U                                     [64 of V, 64]   accumulator, transposed; before its
                                                                                TMA store SMEM, ``out``
=======  =====================================================  ==============  ========================================

A step; time runs to the right::

    producer     QKᵀ of the next step · P to shared memory · loads of the step after it
    consumer     S·[K; Q]ᵀ | R | R·Tᵀ | U | U·Pᵀ and S ← 2^γ_C S + (2^(γ_C − γ) U)·K | O -> store
    the other    the same of other columns: they do not wait for each other

The diagonal of T is not in its operand: R stays in float32, as equal keys leave little of it. Without the delta rule
U is V.

The same kernel has other tasks, which leave out P and O: the states before all chunks and U, which the gradients take;
and maps, what a sequence makes of any state, M S + S_0: S_0 of its values from a state of 0 and, for a delta rule, M
without values from the identity, in K more columns. The way back is in ``backward``.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import RegisterSplit
from tilewright.kernels.hopper.matmul import mask
from tilewright.kernels.hopper.matmul.store import store_rows
from tilewright.kernels.hopper.panels import PanelRef, mma
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.tiles import ROWS, across, column_layout, row_layout, spread, tile_layout
from tilewright.kernels.linear_attention.chunks import CHUNK
from tilewright.kernels.linear_attention.hopper.plan import (
    BETA,
    GAMMA,
    KEY,
    KQ,
    LAST,
    QUERY,
    READ_KEY,
    READ_QUERY,
    TO_END,
    G,
    PassCall,
    PassOperands,
    PassResults,
    PassScratch,
    V,
    scratch_plan,
)
from tilewright.kernels.pallas_types import Ref, Scalar

ROWS_OF_K, ROWS_OF_Q = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)

REGISTERS = {2: RegisterSplit(208, 88)}
"""By the number of consumers, beside the warpgroup that loads and prepares: 2 · 208 + 88 = 3 · 168, what three start
with. Two warpgroups have as many as a thread may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassContext:
    """Everything that a warpgroup needs: static facts, references, and the work of its CTA."""

    call: PassCall
    dtype: DTypeLike
    operands: PassOperands[Ref]
    results: PassResults[Ref]
    scratch: PassScratch[Ring, Ref, Ref]

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

    def number(self, step: Scalar) -> Scalar:
        """The chunk of a step, counted from the first one of the sequence."""
        return self.steps - 1 - step if self.call.task == "gradients" else step

    def chunk(self, step: Scalar) -> jax.Array:
        """The chunk of a step among those of all sequences."""
        return self.operands.first_chunk[self.sequence] + self.number(step)

    def row(self, step: Scalar) -> jax.Array:
        """The row of the first token of a step."""
        return self.operands.first_row[self.sequence] + self.number(step) * CHUNK

    def count(self, step: Scalar) -> jax.Array:
        """Tokens of a chunk, from 1 to 64."""
        return lax.min(self.length - self.number(step) * CHUNK, jnp.int32(CHUNK))


# The warpgroup that loads and prepares.


def run_producer(ctx: PassContext) -> None:
    """Loads all chunks, computes P of them, and clears what operands hold behind the last token."""
    if ctx.call.consumers in REGISTERS:
        plgpu.set_max_registers(REGISTERS[ctx.call.consumers].producer, action="decrease")
    steps, ahead = ctx.steps, ctx.call.stages - 1
    for step in range(ahead):
        pl.when(step < steps)(functools.partial(load_chunk, ctx, step))

    def one_step(step: Scalar, _: None) -> None:
        ctx.scratch.tokens.load_from_shared(step)
        clear_padding(ctx, step)
        if ctx.scratch.scores is not None:
            prepare_chunk(ctx, ctx.scratch.scores, step)
        ctx.scratch.tokens.release(step)
        # Behind the scores, for it waits until the consumers are done with the chunk before.
        pl.when(step + ahead < steps)(functools.partial(load_chunk, ctx, step + ahead))

    lax.fori_loop(0, steps, one_step, None)


def load_chunk(ctx: PassContext, step: Scalar) -> None:
    """Starts the copies of a chunk."""
    operands, head = ctx.operands, ctx.value_head
    chunk, rows = ctx.chunk(step), pl.ds(ctx.row(step), CHUNK)
    # Maps have columns without values.
    columns = (ctx.first_column + number * ROWS for number in range(ctx.call.consumers))
    columns = (lax.rem(each, jnp.int32(ctx.call.value_dim)) if ctx.call.maps else each for each in columns)
    blocks = [pl.ds(each, ROWS) for each in columns]
    ctx.scratch.tokens.load_from_dram(
        step,
        operands.key.at[rows, ctx.key_head],
        *((operands.query.at[rows, ctx.key_head],) if ctx.call.scores else ()),
        *(operands.value.at[rows, head, block] for block in blocks),
        operands.gates.at[chunk, head],
    )
    if ctx.scratch.solve is not None and operands.solve is not None:
        ctx.scratch.solve.load_from_dram(step, operands.solve.at[chunk, head])


def clear_padding(ctx: PassContext, step: Scalar) -> None:
    """Clears what operands hold behind the last token of a chunk that has been loaded."""
    tokens, count, cleared = ctx.scratch.tokens, ctx.count(step), ctx.scratch.cleared

    @pl.when(count < CHUNK)
    def _() -> None:
        # It may be NaN, and zero times NaN is NaN.
        mask.zero_rows(rows_of(tokens, step, ROWS_OF_K), count)
        if ctx.call.task == "gradients":
            mask.zero_rows(rows_of(tokens, step, ROWS_OF_Q), count)
        for number in range(ctx.call.consumers):
            mask.zero_rows(tokens.get_mma_tile(step, part=V, number=number), count)
        plgpu.commit_smem()
        if cleared is not None:
            plgpu.barrier_arrive(cleared)


def prepare_chunk(ctx: PassContext, scores: Ring, step: Scalar) -> None:
    """Writes P of a chunk."""
    tokens, shape = ctx.scratch.tokens, (CHUNK, CHUNK)
    gates = gates_of(tokens, step)
    products = pl.run_scoped(functools.partial(_products, tokens, step), plgpu.ACC(shape, jnp.float32))
    products = products * spread(plgpu.load(gates.at[QUERY], layout=row_layout()), shape, 0)
    products = lax.optimization_barrier(products * spread(of_columns(gates, KEY), shape, 1))
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=tile_layout()) for axis in (0, 1))
    of_row, of_column = plgpu.load(gates.at[GAMMA], layout=row_layout()), of_columns(gates, GAMMA)
    # The exponent is masked, not the power: of later tokens it may overflow. 2^-inf is 0.
    distance = jnp.where(row >= column, spread(of_row, shape, 0) - spread(of_column, shape, 1), -jnp.inf)
    scores.copy_to_shared(step, (products * jnp.exp2(distance)).astype(ctx.dtype))


def _products(tokens: Ring, step: Scalar, acc: Ref) -> jax.Array:
    """QKᵀ of a chunk."""
    mma(acc, rows_of(tokens, step, ROWS_OF_Q), rows_of(tokens, step, ROWS_OF_K).T)
    return acc[...]


# The consumers.


type Consume = Callable[[PassContext, Ref, pl.Slice, Scalar], None]
"""A step of a consumer, of its accumulator, its columns of V, and the number of the step."""


def run_consumer(ctx: PassContext, consume: Consume) -> None:
    """Goes through all chunks with the state of 64 columns of V, or its gradient, in the accumulator."""
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
        lax.fori_loop(0, ctx.steps, lambda step, _: consume(ctx, state, columns, step), None)
        if ctx.results.state is not None:
            ctx.results.state.at[ctx.sequence, ctx.value_head, columns][...] = state[...]
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(compute, plgpu.ACC((ROWS, ctx.call.key_dim), jnp.float32))


def consume_chunk(ctx: PassContext, state: Ref, columns: pl.Slice, step: Scalar) -> None:
    """A step of a consumer, whose accumulator ``state`` is Sᵀ."""
    tokens, scores = ctx.scratch.tokens, ctx.scratch.scores
    if scores is None:
        update_state(ctx, state, columns, step)
        plgpu.commit_smem()
        tokens.release(step)
        return
    out = chunk_output(ctx, scores, state, step)
    # Threads have read V and the gates: a fence before TMA may write there.
    plgpu.commit_smem()
    tokens.release(step)
    scores.release(step)
    store_tokens(ctx, out, columns, step)


def store_tokens(ctx: PassContext, values: jax.Array, columns: pl.Slice, step: Scalar) -> None:
    """Starts the store of 64 columns of the tokens of a chunk, from registers that have them transposed."""
    staging, target = ctx.scratch.out, ctx.results.out
    assert staging is not None  # by the plan of shared memory
    assert target is not None
    buffer = staging.at[lax.axis_index("warpgroup")]
    # The store of the chunk before has read the buffer; those of the state may not have read theirs.
    plgpu.wait_smem_to_gmem(_panels(ctx.scratch.kept), wait_read_only=True)
    _panel(buffer).T[...] = values.astype(ctx.dtype)
    plgpu.commit_smem()
    store_rows(buffer, target.at[:, ctx.value_head], ctx.row(step), columns.start, ctx.count(step))


def keep_state(ctx: PassContext, rounded: jax.Array, columns: pl.Slice, step: Scalar) -> None:
    """Starts the store of the state before a chunk, or of the gradient of that behind it, if these are stored."""
    staging, target = ctx.scratch.kept, ctx.results.states
    if staging is None or target is None:
        return
    buffer = staging.at[lax.axis_index("warpgroup")]
    assert isinstance(buffer, PanelRef)  # by the plan of shared memory
    # All stores but the last one, of the tokens of the chunk before.
    plgpu.wait_smem_to_gmem(1 if ctx.call.stores_tokens else 0, wait_read_only=True)
    buffer[...] = rounded
    plgpu.commit_smem()
    for start, memory in zip(buffer.starts, buffer.memory, strict=True):
        place = target.at[ctx.chunk(step), ctx.value_head, columns, pl.ds(start, buffer.width)]
        plgpu.copy_smem_to_gmem(memory, place)


def _panels(tile: Ref | None) -> int:
    """TMA stores of a tile."""
    return len(tile.operands) if isinstance(tile, PanelRef) else 0


def update_state(ctx: PassContext, state: Ref, columns: pl.Slice, step: Scalar) -> None:
    """Updates the state by a chunk, without output; stores the state before it and U, if the call does."""
    tokens, solve, shape, cleared = ctx.scratch.tokens, ctx.scratch.solve, (ROWS, CHUNK), ctx.scratch.cleared
    rounded = state[...].astype(ctx.dtype)
    tokens.load_from_shared(step)
    assert cleared is not None  # there are no scores
    # At most once, for only the last chunk may have fewer tokens.
    pl.when(ctx.count(step) < CHUNK)(lambda: plgpu.barrier_wait(cleared))
    gates = gates_of(tokens, step)
    own, power = lax.optimization_barrier((values_of(tokens, step), of_columns(gates, READ_KEY)))
    if solve is None:
        keep_state(ctx, rounded, columns, step)
        written, to_end = own.astype(jnp.float32), of_columns(gates, TO_END)
    else:
        own = own.astype(jnp.float32)
        if ctx.call.maps:
            # Columns of M have no values; a tile has columns of one kind.
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout())
            own = jnp.where(row < ctx.call.value_dim - columns.start, own, 0.0)

        def read(acc: Ref) -> jax.Array:
            mma(acc, rounded, rows_of(tokens, step, ROWS_OF_K).T)
            keep_state(ctx, rounded, columns, step)
            return acc[...]

        rest = own - pl.run_scoped(read, plgpu.ACC(shape, jnp.float32)) * spread(power, shape, 1)
        written, to_end = _solved(solve, gates, rest, step)
    decayed = (written * spread(to_end, shape, 1)).astype(ctx.dtype)
    last = lax.optimization_barrier(plgpu.load(gates.at[LAST], layout=row_layout()))
    state[...] = state[...] * across(last, ctx.call.key_dim)
    mma(state, decayed, rows_of(tokens, step, ROWS_OF_K))
    if ctx.call.stores_tokens:
        store_tokens(ctx, written, columns, step)
    plgpu.wgmma_wait(0)


def chunk_output(ctx: PassContext, scores: Ring, state: Ref, step: Scalar) -> jax.Array:
    """Updates the state by a chunk; returns its O, transposed."""
    tokens, solve, shape = ctx.scratch.tokens, ctx.scratch.solve, (ROWS, CHUNK)
    gates, count = gates_of(tokens, step), ctx.count(step)
    rounded = state[...].astype(ctx.dtype)
    tokens.load_from_shared(step)
    # Rows behind the last token are cleared before the scores are complete.
    pl.when(count < CHUNK)(lambda: scores.load_from_shared(step))
    # Loaded before the MMA is issued, as all that is combined with its accumulator: ptxas would wait for each MMA.
    own, power = lax.optimization_barrier((values_of(tokens, step), of_columns(gates, READ_KEY)))

    def read(acc: Ref) -> jax.Array:
        """KS beside QS."""
        mma(acc, rounded, tokens.get_mma_tile(step, part=KQ).T)
        return acc[...]

    def read_queries(acc: Ref) -> jax.Array:
        mma(acc, rounded, rows_of(tokens, step, ROWS_OF_Q).T)
        return acc[...]

    if solve is not None:
        found = pl.run_scoped(read, plgpu.ACC((ROWS, 2 * CHUNK), jnp.float32))
        found, before = found[:, :CHUNK], found[:, CHUNK:]
        rest = own.astype(jnp.float32) - found * spread(power, shape, 1)
        written, to_end = _solved(solve, gates, rest, step)
    else:
        before = pl.run_scoped(read_queries, plgpu.ACC(shape, jnp.float32))
        written, to_end = own.astype(jnp.float32), of_columns(gates, TO_END)
    decayed = (written * spread(to_end, shape, 1)).astype(ctx.dtype)
    written = written.astype(ctx.dtype)

    pl.when(count >= CHUNK)(lambda: scores.load_from_shared(step))

    def write(out: Ref) -> jax.Array:
        """O, and the state behind the chunk."""
        last = lax.optimization_barrier(plgpu.load(gates.at[LAST], layout=row_layout()))
        out[...] = before * spread(of_columns(gates, READ_QUERY), shape, 1)
        state[...] = state[...] * across(last, ctx.call.key_dim)
        plgpu.wgmma(out, written, scores.get_mma_tile(step).T)
        mma(state, decayed, rows_of(tokens, step, ROWS_OF_K))
        return out[...]

    return pl.run_scoped(write, plgpu.ACC(shape, jnp.float32))


def values_of(tokens: Ring, step: Scalar) -> jax.Array:
    """V of a chunk, transposed."""
    tile = tokens.get_mma_tile(step, part=V, number=lax.axis_index("warpgroup"))
    return plgpu.load(_panel(tile).T, layout=tile_layout())


def _solved(solve: Ring, gates: Ref, rest: jax.Array, step: Scalar) -> tuple[jax.Array, jax.Array]:
    """U = R + T R of R / β, and the decays to the end of the chunk."""
    shape = ROWS, CHUNK
    rest = rest * spread(of_columns(gates, BETA), shape, 1)
    low = rest.astype(solve.smem.dtype)

    def update(acc: Ref) -> tuple[jax.Array, jax.Array]:
        to_end = lax.optimization_barrier(of_columns(gates, TO_END))
        acc[...] = rest
        for part in range(2):
            plgpu.wgmma(acc, low, solve.get_mma_tile(step).at[pl.ds(part * CHUNK, CHUNK)].T)
        return acc[...], to_end

    solve.load_from_shared(step)
    found = pl.run_scoped(update, plgpu.ACC(shape, jnp.float32))
    solve.release(step)
    return found


def gates_of(tokens: Ring, step: Scalar) -> Ref:
    """The gates of a chunk."""
    return tokens.stages[G].at[tokens.slot(step)]


def rows_of(tokens: Ring, step: Scalar, rows: pl.Slice) -> Ref:
    """The tile of K or of Q of a chunk."""
    return tokens.get_mma_tile(step, part=KQ).at[rows]


def _panel(tile: Ref) -> Ref:
    """The only panel of a tile."""
    assert isinstance(tile, PanelRef)  # by the plan of shared memory
    (panel,) = tile.operands
    return panel


def of_columns(gates: Ref, number: int) -> jax.Array:
    """A row of a chunk's gates, one value for each column of an accumulator."""
    # Not `optimized`: with the same row in both layouts Mosaic's inference of layouts took minutes, and found none.
    return plgpu.load(gates.at[number], layout=column_layout(), optimized=False)


# The launch.


def chunk_forward(operands: PassOperands[jax.Array], call: PassCall) -> PassResults[jax.Array]:
    """Computes out and the final states; see `PassOperands` and `PassResults` for the arrays."""
    return run_chunks(operands, call, consume_chunk)


def run_chunks(operands: PassOperands[jax.Array], call: PassCall, consume: Consume) -> PassResults[jax.Array]:
    """Launches a kernel whose consumers run ``consume`` for each chunk."""
    dtype = operands.value.dtype
    scratch = scratch_plan(call, dtype)

    def body(operands: PassOperands[Ref], results: PassResults[Ref], scratch: PassScratch[Ring, Ref, Ref]) -> None:
        ctx = PassContext(call, dtype, operands, results, scratch)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < call.consumers)(functools.partial(run_consumer, ctx, consume))
        pl.when(warpgroup == call.consumers)(functools.partial(run_producer, ctx))

    rows, chunks, heads = operands.value.shape[0], operands.gates.shape[0], call.value_heads
    of_states = heads, call.columns, call.key_dim
    results = PassResults(
        jax.ShapeDtypeStruct((rows, heads, call.value_dim), dtype) if call.stores_tokens else None,
        jax.ShapeDtypeStruct((call.sequences, *of_states), jnp.float32) if call.return_state else None,
        jax.ShapeDtypeStruct((chunks, *of_states), dtype) if call.stores_states else None,
    )
    return run_kernel(
        body,
        operands,
        results,
        scratch._replace(cleared=None if call.scores else plgpu.Barrier(num_arrivals=1)),
        role="chunks" if call.task == "out" else call.task,
        num_ctas=call.num_ctas,
        warpgroups=call.warpgroups,
    )
