"""The gradients of queries and keys on Hopper, behind both passes over states, with a delta rule.

A CTA takes one chunk and head of keys after another: items. Three consumers sum over its heads of values, whose states
come in blocks of 64 columns of V; a producer loads. Symbols are those of ``backward`` and of ``gradient_kernels``; hats
are of queries and keys with their norms.

========  =====================================================  ============  =========================================
symbol    meaning                                                shape         where it lives
========  =====================================================  ============  =========================================
K, Q      of the chunk, not normalized                           [64, K]       SMEM, ring ``keys``
S, D      state before the chunk, gradient of that behind it     [64 of V, K]  SMEM, ring ``blocks``, as the next ones
dO, U,    gradient of the output, what tokens write, and its     [64, 64 of    SMEM
dR        gradient                                               V]
Y         scale Γ ⊙ dO Uᵀ below the diagonal                     [64, 64]      accumulator of the first; for the third
                                                                               SMEM, ``pairs``
X / β     −Γ ⊙ dR Uᵀ below the diagonal                          [64, 64]      of the second; for the third ``erasing``
E / β     −2^γ dR S + X K̂ / β                                    [64, K]       accumulator of the second; ``erased``
dQ̂        scale 2^γ dO S + Y K̂, and the diagonal of Y times K̂    [64, K]       accumulator of the first
dK̂        2^(γ_C − γ) U D + Yᵀ Q̂ + Xᵀ K̂ + E, and the diagonal    [64, K]       accumulator of the third
          of Y times Q̂
========  =====================================================  ============  =========================================

What the gradients of decays and of β take from them are sums over channels, ``sums``, by token. The diagonal of Y is
left out there, as what it adds cancels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import BARRIER_BYTES, WARPGROUP_THREADS
from tilewright.kernels.hopper.matmul import mask
from tilewright.kernels.hopper.matmul.store import store_rows
from tilewright.kernels.hopper.panels import PanelRef, mma
from tilewright.kernels.hopper.ring import Ring, RingPart, RingPlan
from tilewright.kernels.hopper.shared import SharedTile, TileStack
from tilewright.kernels.hopper.tiles import ROWS, row_constants, row_layout, spread, store_unoptimised, tile_layout
from tilewright.kernels.linear_attention.chunks import CHUNK
from tilewright.kernels.linear_attention.hopper.forward import ROWS_OF_K, ROWS_OF_Q, of_columns
from tilewright.kernels.linear_attention.hopper.plan import BETA, GAMMA, GATES, KEY, QUERY, TO_END
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.pallas_types import Ref, Scalar

OF_QUERY, BY_KEY, OF_LAST, OF_KEY, OVERLAP = range(SUMS := 5)
"""Sums by token: of dQ̂ ⊙ Q̂; of E / β ⊙ K̂; of 2^(γ_C − γ) U D ⊙ K̂; of dK̂ ⊙ K̂ without E; and by channel of V S ⊙ D."""

STATE, D_STATE, D_OUT, UPDATE, D_UPDATE, OF_HEAD = range(6)
"""Parts of a stage of the ring ``blocks``; the last one are the gates of the chunk."""

CONSUMERS, STAGES = 3, 2

REGISTERS = 160, 32
"""Registers of a consumer and of the producer: 3 · 160 + 32 = 4 · 128."""

SHAPE = ROWS, CHUNK


@dataclasses.dataclass(frozen=True, slots=True)
class TokenCall:
    """The static half of a call.

    Attributes:
      chunks: of all sequences, those of padding among them.
      norm: whether queries and keys are normalized.
      ctas: at most, each of which takes every so many items.
    """

    chunks: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    scale: float
    norm: bool
    ctas: int

    @property
    def items(self) -> int:
        return self.chunks * self.heads

    @property
    def num_ctas(self) -> int:
        return min(self.items, self.ctas)

    @property
    def group(self) -> int:
        """Heads of values of a head of keys."""
        return self.value_heads // self.heads

    @property
    def blocks(self) -> int:
        """Blocks of V."""
        return self.value_dim // ROWS


class TokenOperands[Operand](NamedTuple):
    """Operands of `token_gradients`: arrays of ``PassOperands`` and ``PassResults``, and the table of chunks."""

    query: Operand
    key: Operand
    d_out: Operand
    updates: Operand
    d_updates: Operand
    states: Operand
    d_states: Operand
    gates: Operand
    chunks: Operand


class TokenResults[Result](NamedTuple):
    """Results of `token_gradients`.

    Attributes:
      d_query, d_key: ``[rows, heads, K]``, zeros where a token belongs to no sequence.
      sums: ``[chunks, value_heads, SUMS, 64]`` float32.
    """

    d_query: Result
    d_key: Result
    sums: Result


class TokenScratch[Rings, Memory, Barrier](NamedTuple):
    """Shared memory of a CTA, as plans or as what is bound to them."""

    keys: Rings
    blocks: Rings
    pairs: Rings
    erasing: Rings
    erased: Rings
    same: Rings
    d_query: Memory
    d_key: Memory
    cleared: Barrier


def scratch_plan(call: TokenCall, dtype: DTypeLike) -> TokenScratch[RingPlan, TileStack, None]:
    """Rings and buffers of a CTA."""
    state = RingPart(SharedTile((ROWS, call.key_dim), dtype, 128, panelled=True))
    tile = SharedTile(SHAPE, dtype, 128, panelled=True)
    gates = RingPart(SharedTile((GATES, CHUNK), jnp.float32, 0))
    keys = RingPart(SharedTile((2 * CHUNK, call.key_dim), dtype, 128, panelled=True), copies=2)
    of_values = RingPart(tile)
    staging = SharedTile((CHUNK, call.key_dim), dtype, 128, panelled=True).stack()
    return TokenScratch(
        keys=RingPlan((keys,), 1, CONSUMERS),
        blocks=RingPlan((state, state, of_values, of_values, of_values, gates), STAGES, CONSUMERS),
        pairs=RingPlan(tile, 1, 1, writers=1),
        erasing=RingPlan(tile, 1, 1, writers=1),
        erased=RingPlan(SharedTile((CHUNK, call.key_dim), dtype), 1, 1, writers=1),
        same=RingPlan(SharedTile((CHUNK,), jnp.float32), 1, 1, writers=1),
        d_query=staging,
        d_key=staging,
        cleared=None,
    )


def footprint(call: TokenCall, dtype: DTypeLike) -> Footprint:
    """Blocks, threads and shared memory of a call."""
    plan = scratch_plan(call, dtype)
    rings = plan.keys, plan.blocks, plan.pairs, plan.erasing, plan.erased, plan.same
    stores = plan.d_query.tile.stack_bytes(1) + plan.d_key.tile.stack_bytes(1)
    shared = sum(ring.shared_bytes for ring in rings) + stores + BARRIER_BYTES
    return Footprint(blocks=call.num_ctas, threads=(CONSUMERS + 1) * WARPGROUP_THREADS, shared_bytes=shared)


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A chunk and a head of keys.

    Attributes:
      number: of the item among those of the CTA.
      row, rows, count: the first row of the chunk, how many it has, and how many of these are tokens of a sequence.
    """

    number: Scalar
    chunk: jax.Array
    head: jax.Array
    row: jax.Array
    rows: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class TokenContext:
    """Everything that a warpgroup needs."""

    call: TokenCall
    dtype: DTypeLike
    operands: TokenOperands[Ref]
    results: TokenResults[Ref]
    scratch: TokenScratch[Ring, Ref, Ref]

    @property
    def items(self) -> jax.Array:
        """Items of this CTA."""
        ctas = jnp.int32(self.call.num_ctas)
        return lax.div(jnp.int32(self.call.items) - lax.axis_index("program") + (ctas - 1), ctas)

    def item(self, number: Scalar) -> Item:
        place = lax.axis_index("program") + number * self.call.num_ctas
        chunk, head = lax.div(place, jnp.int32(self.call.heads)), lax.rem(place, jnp.int32(self.call.heads))
        table = self.operands.chunks
        return Item(number, chunk, head, table[chunk, 0], table[chunk, 1], table[chunk, 2])

    def keys(self, item: Item, rows: pl.Slice) -> PanelRef:
        """K or Q of an item."""
        tile = self.scratch.keys.get_mma_tile(item.number).at[rows]
        assert isinstance(tile, PanelRef)  # by the plan of shared memory
        return tile

    def member(self, item: Item, member: Scalar) -> Scalar:
        """The number of a head of values among those of this CTA."""
        return item.number * self.call.group + member

    def step(self, item: Item, member: Scalar, block: int) -> Scalar:
        return self.member(item, member) * self.call.blocks + block

    def tile(self, step: Scalar, part: int) -> PanelRef:
        tile = self.scratch.blocks.get_mma_tile(step, part=part)
        assert isinstance(tile, PanelRef)  # by the plan of shared memory
        return tile

    def gates(self, step: Scalar) -> Ref:
        blocks = self.scratch.blocks
        return blocks.stages[OF_HEAD].at[blocks.slot(step)]


# The producer.


def run_producer(ctx: TokenContext) -> None:
    """Loads all blocks, and the keys of an item behind the blocks of its first head of values."""
    plgpu.set_max_registers(REGISTERS[1], action="decrease")

    def load_item(number: Scalar, _: None) -> None:
        item = ctx.item(number)
        rows = pl.ds(item.row, CHUNK)

        def load_keys() -> None:
            key, query = (x.at[rows, item.head] for x in (ctx.operands.key, ctx.operands.query))
            ctx.scratch.keys.load_from_dram(number, key, query)

        def load_member(member: Scalar, _: None) -> None:
            for block in range(ctx.call.blocks):
                load_block(ctx, item, member, block)
            # Behind the blocks, as it waits until the item before has been finished.
            pl.when(member == 0)(load_keys)

        lax.fori_loop(0, ctx.call.group, load_member, None)

    lax.fori_loop(0, ctx.items, load_item, None)


def load_block(ctx: TokenContext, item: Item, member: Scalar, block: int) -> None:
    """Starts the copies of a block of V of a head of values."""
    head, operands = item.head * ctx.call.group + member, ctx.operands
    rows, columns = pl.ds(item.row, CHUNK), pl.ds(block * ROWS, ROWS)
    ctx.scratch.blocks.load_from_dram(
        ctx.step(item, member, block),
        operands.states.at[item.chunk, head, columns],
        operands.d_states.at[item.chunk, head, columns],
        *(x.at[rows, head, columns] for x in (operands.d_out, operands.updates, operands.d_updates)),
        operands.gates.at[item.chunk, head],
    )


# The consumers.

type Role = Callable[[TokenContext, Item, Ref], None]


def run_consumer(ctx: TokenContext, role: Role) -> None:
    """Goes through all items with a role of their gradients."""
    plgpu.set_max_registers(REGISTERS[0], action="increase")

    def one_item(number: Scalar, _: None) -> None:
        acc = plgpu.ACC((CHUNK, ctx.call.key_dim), jnp.float32)
        pl.run_scoped(functools.partial(role, ctx, ctx.item(number)), acc)

    lax.fori_loop(0, ctx.items, one_item, None)
    plgpu.wait_smem_to_gmem(0)


def load_keys(ctx: TokenContext, item: Item, member: Scalar, *, clears: bool = False) -> None:
    """Waits, with the first head of values, for K and Q; their rows behind the last token are zeros then."""

    @pl.when(member == 0)
    def _() -> None:
        ctx.scratch.keys.load_from_shared(item.number)

        @pl.when(item.count < CHUNK)
        def _() -> None:
            if not clears:
                plgpu.barrier_wait(ctx.scratch.cleared)
                return
            # They may be NaN, and zero times NaN is NaN.
            for rows in (ROWS_OF_K, ROWS_OF_Q):
                mask.zero_rows(ctx.keys(item, rows), item.count)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ctx.scratch.cleared)


def query_role(ctx: TokenContext, item: Item, acc: Ref) -> None:
    """The gradient of queries; ``acc`` is dQ̂."""
    call, zero = ctx.call, row_constants(0.0)

    def one_head(member: Scalar, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        same, before, _, _ = carry

        last = ctx.step(item, member, call.blocks - 1)
        gates = ctx.gates(last)

        def blocks(y: Ref) -> jax.Array:
            for block in range(call.blocks):
                step = ctx.step(item, member, block)
                ctx.scratch.blocks.load_from_shared(step)
                above = load_panel(ctx.tile(step, D_OUT)).astype(jnp.float32)
                power = jnp.exp2(load_row(ctx.gates(step), GAMMA)) * call.scale
                scaled = lax.optimization_barrier((above * spread(power, SHAPE, 0)).astype(ctx.dtype))
                mma(acc, scaled, ctx.tile(step, STATE))
                mma(y, ctx.tile(step, D_OUT), ctx.tile(step, UPDATE).T)
                plgpu.wgmma_wait(0)
                if block < call.blocks - 1:
                    release_block(ctx, step)
            return y[...]

        y = pl.run_scoped(blocks, plgpu.ACC(SHAPE, jnp.float32))
        same = same + call.scale * jnp.sum(jnp.where(positions(0) == positions(1), y, 0.0), axis=1)
        y = call.scale * earlier_pairs(y, gates, item.count)
        key, query = load_row(gates, KEY), load_row(gates, QUERY) * (1.0 / call.scale)
        ctx.scratch.pairs.copy_to_shared(ctx.member(item, member), (y * spread(query, SHAPE, 0)).astype(ctx.dtype))
        y = (y * spread(of_columns(gates, KEY), SHAPE, 1)).astype(ctx.dtype)
        release_block(ctx, last)
        load_keys(ctx, item, member, clears=True)
        mma(acc, y, ctx.keys(item, ROWS_OF_K))
        plgpu.wgmma_wait(0)
        after = query * row_products(acc[...], ctx.keys(item, ROWS_OF_Q))
        store_sum(ctx, item, member, OF_QUERY, after - before)
        return same, after, key, query

    same, _, key, query = lax.fori_loop(0, call.group, one_head, (zero, zero, zero, zero))
    ctx.scratch.same.copy_to_shared(item.number, same)
    factors = same * key, query
    finish(ctx, item, acc, (ROWS_OF_K, ROWS_OF_Q), factors, ctx.scratch.d_query, ctx.results.d_query)


def erasing_role(ctx: TokenContext, item: Item, acc: Ref) -> None:
    """The part of the gradient of keys that goes through what they read; ``acc`` is E / β of a head of values."""
    call = ctx.call

    def one_head(member: Scalar, _: None) -> None:
        acc[...] = jnp.zeros_like(acc[...])
        number, last = ctx.member(item, member), ctx.step(item, member, call.blocks - 1)
        gates = ctx.gates(last)

        def blocks(x: Ref) -> jax.Array:
            for block in range(call.blocks):
                step = ctx.step(item, member, block)
                ctx.scratch.blocks.load_from_shared(step)
                mma(acc, ctx.tile(step, D_UPDATE), ctx.tile(step, STATE))
                mma(x, ctx.tile(step, D_UPDATE), ctx.tile(step, UPDATE).T)
                plgpu.wgmma_wait(0)
                if block < call.blocks - 1:
                    release_block(ctx, step)
            return x[...]

        x = -earlier_pairs(pl.run_scoped(blocks, plgpu.ACC(SHAPE, jnp.float32)), gates, item.count)
        key = load_row(gates, KEY)
        factors = load_row(gates, BETA) * key
        ctx.scratch.erasing.copy_to_shared(number, (x * spread(factors, SHAPE, 0)).astype(ctx.dtype))
        x = (x * spread(of_columns(gates, KEY), SHAPE, 1)).astype(ctx.dtype)
        acc[...] = acc[...] * spread(-jnp.exp2(load_row(gates, GAMMA)), (CHUNK, call.key_dim), 0)
        release_block(ctx, last)
        load_keys(ctx, item, member)
        mma(acc, x, ctx.keys(item, ROWS_OF_K))
        plgpu.wgmma_wait(0)
        erased = acc[...]
        ctx.scratch.erased.copy_to_shared(number, erased.astype(ctx.dtype))
        store_sum(ctx, item, member, BY_KEY, key * row_products(erased, ctx.keys(item, ROWS_OF_K)))

    lax.fori_loop(0, call.group, one_head, None)
    plgpu.commit_smem()
    ctx.scratch.keys.release(item.number)


def key_role(ctx: TokenContext, item: Item, acc: Ref) -> None:
    """The gradient of keys; ``acc`` is dK̂."""
    call, zero = ctx.call, row_constants(0.0)
    pairs, erasing, erased_of = ctx.scratch.pairs, ctx.scratch.erasing, ctx.scratch.erased

    def one_head(member: Scalar, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before, overlap = carry[0], zero
        for block in range(call.blocks):
            step = ctx.step(item, member, block)
            ctx.scratch.blocks.load_from_shared(step)
            gates = ctx.gates(step)
            key = load_row(gates, KEY)
            update = load_panel(ctx.tile(step, UPDATE)).astype(jnp.float32)
            update = (update * spread(load_row(gates, TO_END) / key, SHAPE, 0)).astype(ctx.dtype)
            mma(acc, lax.optimization_barrier(update), ctx.tile(step, D_STATE))
            state, d_state = ctx.tile(step, STATE), ctx.tile(step, D_STATE)
            for first, second in zip(state.operands, d_state.operands, strict=True):
                product = load_tile_of(first).astype(jnp.float32) * load_tile_of(second).astype(jnp.float32)
                overlap = overlap + jnp.sum(product, axis=1)
            plgpu.wgmma_wait(0)
            query, beta = load_row(gates, QUERY) * (1.0 / call.scale), load_row(gates, BETA)
            release_block(ctx, step)
        load_keys(ctx, item, member)
        keys, number = ctx.keys(item, ROWS_OF_K), ctx.member(item, member)
        with_end = key * row_products(acc[...], keys)
        store_sum(ctx, item, member, OF_LAST, with_end - before)
        store_sum(ctx, item, member, OVERLAP, overlap)
        pairs.load_from_shared(number)
        mma(acc, pairs.get_mma_tile(number), ctx.keys(item, ROWS_OF_Q), transpose_a=True)
        erasing.load_from_shared(number)
        mma(acc, erasing.get_mma_tile(number), keys, transpose_a=True)
        plgpu.wgmma_wait(0)
        pairs.release(number)
        erasing.release(number)
        store_sum(ctx, item, member, OF_KEY, key * row_products(acc[...], keys) - before)
        erased_of.load_from_shared(number)
        erased = load_tile_of(erased_of.get_mma_tile(number)).astype(jnp.float32)
        erased_of.release(number)
        acc[...] = acc[...] + erased * spread(beta, (CHUNK, call.key_dim), 0)
        return key * row_products(acc[...], keys), key, query

    _, key, query = lax.fori_loop(0, call.group, one_head, (zero, zero, zero))
    ctx.scratch.same.load_from_shared(item.number)
    same = plgpu.load(ctx.scratch.same.smem.at[0], layout=row_layout(), optimized=False)
    ctx.scratch.same.release(item.number)
    factors = same * query, key
    finish(ctx, item, acc, (ROWS_OF_Q, ROWS_OF_K), factors, ctx.scratch.d_key, ctx.results.d_key)


def finish(
    ctx: TokenContext,
    item: Item,
    acc: Ref,
    rows: tuple[pl.Slice, pl.Slice],
    factors: tuple[jax.Array, jax.Array],
    staging: Ref,
    target: Ref,
) -> None:
    """Adds what a token has of itself, goes back through the norm, and starts the store of the gradient.

    Args:
      rows: of the other operand, and of the own one, in the ring of keys.
      factors: of rows of the other one, and the inverse of the norms of the own one.
    """
    other, own = (ctx.keys(item, each) for each in rows)
    same, inverse = factors
    assert isinstance(staging, PanelRef)  # by the plan of shared memory
    found, along = [], row_constants(0.0)
    for start, tile, of_own in zip(staging.starts, other.operands, own.operands, strict=True):
        part = acc[...][:, start : start + staging.width]
        part = part + load_tile_of(tile).astype(jnp.float32) * spread(same, SHAPE, 0)
        along = along + jnp.sum(part * load_tile_of(of_own).astype(jnp.float32), axis=1)
        found.append(part)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, buffer, of_own in zip(found, staging.operands, own.operands, strict=True):
        if ctx.call.norm:
            projected = load_tile_of(of_own).astype(jnp.float32) * spread(along * inverse * inverse, SHAPE, 0)
            part = (part - projected) * spread(inverse, SHAPE, 0)
        buffer[...] = jnp.where(positions(0) < item.count, part, 0.0).astype(ctx.dtype)
    # Threads have read K and Q, too: a fence before TMA may write there.
    plgpu.commit_smem()
    ctx.scratch.keys.release(item.number)
    for start, memory in zip(staging.starts, staging.memory, strict=True):
        store_rows(memory, target.at[:, item.head], item.row, start, item.rows)


def release_block(ctx: TokenContext, step: Scalar) -> None:
    """Releases a block that threads have read, too."""
    plgpu.commit_smem()
    ctx.scratch.blocks.release(step)


def earlier_pairs(x: jax.Array, gates: Ref, count: jax.Array) -> jax.Array:
    """Γ ⊙ x below the diagonal, and zeros above it and in the rows behind the last token."""
    row, column = positions(0), positions(1)
    distance = spread(load_row(gates, GAMMA), SHAPE, 0) - spread(of_columns(gates, GAMMA), SHAPE, 1)
    # The exponent is masked, too: above the diagonal it may overflow.
    power = jnp.exp2(jnp.where(row > column, distance, 0.0))
    return jnp.where(row < count, jnp.where(row > column, x * power, 0.0), 0.0)


def positions(axis: int) -> jax.Array:
    """The row or the column of each element."""
    return plgpu.broadcasted_iota(jnp.int32, SHAPE, axis, layout=tile_layout())


def row_products(values: jax.Array, tile: PanelRef) -> jax.Array:
    """The sums over the columns of the product with a tile."""
    total = row_constants(0.0)
    for start, panel in zip(tile.starts, tile.operands, strict=True):
        part = values[:, start : start + tile.width]
        total = total + jnp.sum(part * load_tile_of(panel).astype(jnp.float32), axis=1)
    return total


def store_sum(ctx: TokenContext, item: Item, member: Scalar, number: int, values: jax.Array) -> None:
    """Stores sums of a head of values."""
    target = ctx.results.sums.at[item.chunk, item.head * ctx.call.group + member, number]
    store_unoptimised(target, values)


def load_row(gates: Ref, number: int) -> jax.Array:
    """A row of the gates, one value for each row of an accumulator."""
    # `optimized`, unlike those of columns: otherwise Mosaic's inference of layouts takes minutes.
    return plgpu.load(gates.at[number], layout=row_layout())


def load_panel(tile: PanelRef) -> jax.Array:
    """The only panel of a tile, in registers."""
    (panel,) = tile.operands
    return load_tile_of(panel)


def load_tile_of(ref: Ref) -> jax.Array:
    return plgpu.load(ref, layout=tile_layout())


ROLES: tuple[Role, ...] = (query_role, erasing_role, key_role)


def token_gradients(operands: TokenOperands[jax.Array], call: TokenCall) -> TokenResults[jax.Array]:
    """Computes the gradients of queries and keys, and the sums of those of gates."""
    dtype = operands.query.dtype

    def body(operands: TokenOperands[Ref], results: TokenResults[Ref], scratch: TokenScratch[Ring, Ref, Ref]) -> None:
        ctx = TokenContext(call, dtype, operands, results, scratch)
        warpgroup = lax.axis_index("warpgroup")
        for number, role in enumerate(ROLES):
            pl.when(warpgroup == number)(functools.partial(run_consumer, ctx, role))
        pl.when(warpgroup == CONSUMERS)(functools.partial(run_producer, ctx))

    rows = operands.query.shape[0]
    results = TokenResults(
        jax.ShapeDtypeStruct((rows, call.heads, call.key_dim), dtype),
        jax.ShapeDtypeStruct((rows, call.heads, call.key_dim), dtype),
        jax.ShapeDtypeStruct((call.chunks, call.value_heads, SUMS, CHUNK), jnp.float32),
    )
    return run_kernel(
        body,
        operands,
        results,
        scratch_plan(call, dtype)._replace(cleared=plgpu.Barrier(num_arrivals=1)),
        role="tokens",
        num_ctas=call.num_ctas,
        warpgroups=CONSUMERS + 1,
    )
