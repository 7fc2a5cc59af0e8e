"""The forward pass on Hopper: warp-specialised, two matrix products in flight while a warpgroup computes its softmax.

One producer warpgroup brings queries, keys and values by TMA through rings of shared-memory stages; each of the other
warpgroups owns 64 query rows. Inside a warpgroup the product QKᵀ of the next tile and PV of this one run while the
exponentials of the next are computed (Shah et al., "FlashAttention-3", 2024, section 3.2); between warpgroups
``ping_pong`` makes them take turns at the tensor cores (section 3.1).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.params import HopperForwardParams
from tilewright.kernels.flash_attention.hopper.plans import ForwardPlan
from tilewright.kernels.flash_attention.hopper.schedule import BandSchedule, Tables, TileSchedule, row_steps
from tilewright.kernels.flash_attention.hopper.scores import (
    ScoreArrays,
    ScoreOptions,
    TileCoord,
    biased_and_capped,
    kept,
    masked_logits,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import Ring, bind_rings, ring_scratch
from tilewright.kernels.hopper.schedule import decode_tile_index, item_by_arithmetic, program_lists, program_order
from tilewright.kernels.hopper.softmax import LOG2E, initial_statistics, online_softmax
from tilewright.kernels.hopper.tiles import ROWS, across, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar

CACHED_KEYS_AND_VALUES = 24 << 20
"""Bytes of keys and values that are worked on at a time: about half of the L2 cache."""

type RowState = tuple[jax.Array, jax.Array, jax.Array]
"""Probabilities of a tile, and the maximum and the sum of its rows."""


def masked_visits(schedule: TileSchedule) -> tuple[bool | None, bool | None]:
    """Whether an item's first visit and whether the later ones need the mask; None where it depends on the visit.

    Causal tiles as wide as they are high need it in the first alone, and a loop without the branch is faster.
    """
    if not isinstance(schedule, BandSchedule):
        return None, None
    most = int(schedule.counts()[0].max())
    return most > 0, None if most > 1 else False


def heads_at_once(kv_length: int, dims: int, dtype: DTypeLike, group: int) -> int:
    """Query heads that are worked on at a time: ``group`` for each one whose keys and values, ``dims`` wide together,
    find room in the cache."""
    per_head = kv_length * dims * np.dtype(dtype).itemsize
    return max(CACHED_KEYS_AND_VALUES // per_head, 1) * group


def forward_kernel(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array,
    tables: Tables | tuple[()],
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    schedule: TileSchedule,
    params: HopperForwardParams,
    num_sms: int,
) -> tuple[Any, Any]:
    """``(out, lse)``: ``[batch, q_length, heads, value_dim]`` and float32 ``[batch, heads, padded q_length]``.

    Args:
      sinks: ``[heads]`` float32, the log of the sinks' summed exponentials, or None.
      tables: of ``schedule``.
      num_sms: multiprocessors of the device.
    """
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads, value_dim = value.shape[1:]
    group = heads // kv_heads
    dtype, block_q, block_k, consumers = query.dtype, params.block_q, params.block_k, params.consumers
    plan = ForwardPlan(params, head_dim, value_dim, dtype)
    q_tiles = schedule.extent.row_tiles
    items = batch * heads * q_tiles
    programs = min(num_sms, items) if params.persistent else items
    ahead, own_output = plan.ahead, plan.own_output
    first_masked, later_masked = masked_visits(schedule)
    guarded = schedule.may_mask or options.has_bias  # a bias of −∞ hides, too
    # What decides about a wide tile wants the registers of the probabilities that a product under way reads.
    in_turn = value_dim > 128 and arrays.mask is not None and (options.dropout_prob > 0 or not options.plain)

    queue = row_steps(schedule), batch * heads, heads_at_once(kv_length, head_dim + value_dim, dtype, group)
    item_at: Any = None
    starts: Any = None
    order: Any = None
    if params.persistent:
        starts, order = program_lists(program_order(*queue), queue[0], programs)
    else:
        item_at = item_by_arithmetic(*queue)
        order = None if item_at else program_order(*queue)
    operands = (query, key, value, sinks, starts, order, tables, arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Ref) -> None:
        q_ref, k_ref, v_ref, sinks_ref, starts_ref, order_ref, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        out_ref, lse_ref, *scratch = refs[len(leaves) :]
        (q_ring, k_ring, v_ring), (lse_smem, turns, *rest) = bind_rings(plan.rings, scratch)
        own_smem: Any = rest[0] if own_output else None
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")

        def work(item: Scalar) -> tuple[Any, Any, Any, Any]:
            b, h, q_tile = decode_tile_index(item, q_tiles, heads)
            return b, h, q_tile, schedule.steps(table_refs, b, h, q_tile)

        def over_items(one: Callable[..., Any], first: Callable[[Scalar], Any]) -> None:
            """``carry = one(index, item, next item or -1, carry)``, from ``first(item)``, over the program's items."""
            if starts_ref is None:
                item = item_at(program) if item_at else order_ref[program]
                one(jnp.int32(0), item, jnp.int32(-1), first(item))
                return
            start, stop = starts_ref[program], starts_ref[program + 1]

            def item_index(index: Scalar, carry: Any) -> Any:
                item, rest = carry
                after = index + 1
                following = jnp.where(after < stop, order_ref[lax.min(after, stop - 1)], -1)
                return following, one(index - start, item, following, rest)

            item = order_ref[start]
            lax.fori_loop(start, stop, item_index, (item, first(item)))

        def produce(item_index: Scalar, item: Scalar, following: Scalar, first: Scalar) -> Any:
            b, h, q_tile, steps = work(item)
            kv_head = lax.div(h, jnp.int32(group))

            def load(ring: Ring, ref: Ref, visit: Scalar) -> None:
                rows = pl.ds(steps.tile(visit) * block_k, block_k)
                ring.load_from_dram(first + visit, ref.at[b, rows, kv_head])

            def load_both(visit: Scalar, _: None) -> None:
                # In the order in which the consumers hand slots back.
                load(k_ring, k_ref, visit)
                load(v_ring, v_ref, visit - 1)

            # Not a constant: JAX 0.12 refuses a slice that it sees to hang over the end of a short array.
            load(k_ring, k_ref, program * 0)
            q_ring.load_from_dram(item_index, q_ref.at[b, pl.ds(q_tile * block_q, block_q), h])
            lax.fori_loop(1, steps.total, load_both, None)
            load(v_ring, v_ref, program * 0 + (steps.total - 1))
            return first + steps.total

        my_rows = pl.ds(warpgroup * ROWS, ROWS)

        def softmax(
            products: jax.Array, item: Scalar, visit: Scalar, m: jax.Array, total: jax.Array, masked: bool | None
        ) -> Any:
            """Probabilities, what scales earlier ones, and the new statistics; ``masked`` None looks at the visit."""
            b, h, q_tile, steps = work(item)
            place = TileCoord(
                b, h, q_tile * block_q + warpgroup * ROWS, steps.tile(visit) * block_k, (ROWS, block_k), 0
            )
            logits = products
            if not options.plain:
                logits, _ = biased_and_capped(products, options, array_refs, place)
            # One loop with a branch: of two loops ptxas serialises the matrix products (C7513).
            needs_mask = visit < steps.masked if masked is None else masked
            logits = masked_logits(logits, needs_mask, options, array_refs, place)
            p, scale, maximum, total = online_softmax(logits, options.multiplier, m, total, guarded)
            if options.dropout_prob:
                # Nothing may run beside it: ptxas would serialise the matrix products (C7513).
                plgpu.wgmma_wait(0)
                p = jnp.where(kept(options, array_refs, place), p, 0.0)
            return p.astype(dtype), scale, maximum, total

        def ping_pong_wait() -> None:
            if params.ping_pong:
                plgpu.barrier_wait(turns.at[warpgroup])

        def ping_pong_arrive() -> None:
            if params.ping_pong:
                plgpu.barrier_arrive(turns.at[lax.rem(warpgroup + 1, jnp.int32(consumers))])

        def scores_of(q_smem: Ref, step: Scalar, scores: Ref) -> None:
            plgpu.wgmma(scores, q_smem.at[my_rows], k_ring.get_mma_tile(step, transposed=True))

        def first_scores(item_index: Scalar, item: Scalar, step: Scalar) -> tuple[Any, Any, Any]:
            """Probabilities of an item's first tile, with no product of values to run beside."""

            def alone(scores: Ref) -> Any:
                ping_pong_wait()
                q_ring.load_from_shared(item_index)
                k_ring.load_from_shared(step)
                scores_of(q_ring.get_mma_tile(item_index), step, scores)
                ping_pong_arrive()
                return scores[...]

            products = pl.run_scoped(alone, plgpu.ACC((ROWS, block_k), jnp.float32))
            k_ring.release(step)
            p, _, m, total = softmax(products, item, jnp.int32(0), *initial_statistics(), first_masked)
            return p, m, total

        def values_of(acc: Ref, p: jax.Array, step: Scalar) -> None:
            v_ring.load_from_shared(step)
            plgpu.wgmma(acc, p, v_ring.get_mma_tile(step))

        def visit_rest(
            acc: Ref, item_index: Scalar, item: Scalar, first: Scalar, carry: RowState
        ) -> tuple[Any, Any, Any]:
            """All steps of an item but the first, whose probabilities ``carry`` has, without the last PV product."""
            q_smem = q_ring.get_mma_tile(item_index)

            def visit_one(visit: Scalar, carry: RowState) -> RowState:
                p, m, total = carry
                step = first + visit

                def overlapped(scores: Ref) -> Any:
                    ping_pong_wait()
                    k_ring.load_from_shared(step)
                    scores_of(q_smem, step, scores)
                    values_of(acc, p, step - 1)
                    ping_pong_arrive()
                    products = plgpu.wgmma_accumulator_load(scores, wait_n=0 if in_turn else 1)
                    k_ring.release(step)
                    after = softmax(products, item, visit, m, total, later_masked)
                    plgpu.wgmma_wait(0)
                    v_ring.release(step - 1)
                    acc[...] = acc[...] * across(after[1], value_dim)
                    return after[0], after[2], after[3]

                return pl.run_scoped(overlapped, plgpu.ACC((ROWS, block_k), jnp.float32))

            return lax.fori_loop(1, work(item)[3].total, visit_one, carry)

        def store(item: Scalar, out: jax.Array, m: jax.Array, total: jax.Array, out_smem: Ref) -> None:
            b, h, q_tile, _ = work(item)
            q_start = q_tile * block_q + warpgroup * ROWS
            if sinks_ref is not None:
                sink = sinks_ref[h] * LOG2E
                largest = jnp.maximum(m, sink)
                largest = jnp.where(largest == -jnp.inf, 0.0, largest)
                scale = jnp.exp2(m - largest)
                total = total * scale + jnp.exp2(sink - largest)
                m = largest
            else:
                scale = None
            weight = jnp.where(total == 0.0, 0.0, 1 / (total * (1 - options.dropout_prob)))
            weight = weight if scale is None else weight * scale
            lse = (m + jnp.log2(total)) * (1 / LOG2E)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
            target = out_smem.at[my_rows]
            target[...] = (out * across(weight, value_dim)).astype(dtype)
            lse_smem[warpgroup, :] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(target, out_ref.at[b, pl.ds(q_start, ROWS), h])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[b, h, pl.ds(q_start, ROWS)])

        def consume(item_index: Scalar, item: Scalar, following: Scalar, first: Scalar) -> Any:
            after = first + work(item)[3].total

            def attend(acc: Ref) -> tuple[Any, Any, Any]:
                p, m, total = visit_rest(acc, item_index, item, first, first_scores(item_index, item, first))
                if own_output:
                    q_ring.release(item_index)
                values_of(acc, p, after - 1)
                out = acc[...]
                v_ring.release(after - 1)
                return out, m, total

            out, m, total = pl.run_scoped(attend, plgpu.ACC((ROWS, value_dim), jnp.float32))
            store(item, out, m, total, own_smem if own_output else q_ring.get_mma_tile(item_index))
            if not own_output:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                q_ring.release(item_index)
            return after

        def consume_ahead(acc: Ref) -> Any:
            """As ``consume``, but an item's first scores run beside the last product of the item before."""

            def one(item_index: Scalar, item: Scalar, following: jax.Array, carry: Any) -> Any:
                first, *rest = carry
                p, m, total = visit_rest(acc, item_index, item, first, tuple(rest))
                q_ring.release(item_index)
                after = first + work(item)[3].total
                more = following >= 0
                # Behind the last item run scores of what is in shared memory; they are thrown away.
                next_turn, step = item_index + more.astype(jnp.int32), after - 1 + more.astype(jnp.int32)
                next_item = lax.max(following, jnp.int32(0))

                def overlapped(scores: Ref) -> Any:
                    ping_pong_wait()

                    @pl.when(more)
                    def _() -> None:
                        q_ring.load_from_shared(next_turn)
                        k_ring.load_from_shared(step)

                    scores_of(q_ring.get_mma_tile(next_turn), step, scores)
                    values_of(acc, p, after - 1)
                    ping_pong_arrive()
                    products = plgpu.wgmma_accumulator_load(scores, wait_n=1)

                    @pl.when(more)
                    def _() -> None:
                        k_ring.release(step)

                    ahead = softmax(products, next_item, jnp.int32(0), *initial_statistics(), first_masked)
                    plgpu.wgmma_wait(0)
                    v_ring.release(after - 1)
                    return ahead[0], ahead[2], ahead[3]

                ahead = pl.run_scoped(overlapped, plgpu.ACC((ROWS, block_k), jnp.float32))
                store(item, acc[...], m, total, own_smem)
                acc[...] = plgpu.layout_cast(jnp.zeros((ROWS, value_dim), jnp.float32), tile_layout())
                return after, *ahead

            def start(item: Scalar) -> Any:
                return jnp.int32(0), *first_scores(jnp.int32(0), item, jnp.int32(0))

            over_items(one, start)

        @pl.when(warpgroup < consumers)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[consumers][0], action="increase")
            if ahead:
                pl.run_scoped(consume_ahead, plgpu.ACC((ROWS, value_dim), jnp.float32))
            else:
                over_items(consume, lambda _: jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if params.ping_pong:
                # What the last item passed on.
                @pl.when(warpgroup == 0)
                def _() -> None:
                    plgpu.barrier_wait(turns.at[0])

        @pl.when(warpgroup == consumers)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[consumers][1], action="decrease")
            if params.ping_pong:
                plgpu.barrier_arrive(turns.at[0])
            over_items(produce, lambda _: jnp.int32(0))

    scratch = ring_scratch(plan.rings)
    scratch.append(plgpu.SMEM((consumers, ROWS), jnp.float32))
    scratch.append(plgpu.Barrier(num_barriers=consumers))
    if own_output:
        scratch.append(plan.output.scratch())
    out_type = (
        jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), dtype),
        jax.ShapeDtypeStruct((batch, heads, q_tiles * block_q), jnp.float32),
    )
    kernel = warpgroup_kernel(body, out_type, scratch, programs, consumers + 1)
    return kernel(*leaves)
