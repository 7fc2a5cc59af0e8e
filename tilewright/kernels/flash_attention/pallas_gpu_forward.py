"""The forward pass on Hopper: warp-specialised, two matrix products in flight while a warpgroup computes its softmax.

One producer warpgroup brings queries, keys and values by TMA through rings of shared-memory stages; each of the other
warpgroups owns 64 query rows. Inside a warpgroup the product QKᵀ of the next tile and PV of this one run while the
exponentials of the next are computed (Shah et al., "FlashAttention-3", 2024, section 3.2); between warpgroups
``ping_pong`` makes them take turns at the tensor cores (section 3.1).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.flash_attention.pallas_gpu_scores import (
    LOG2E,
    TILE,
    Place,
    ScoreArrays,
    ScoreOptions,
    biased_and_capped,
    kept,
    visible,
)
from tilewright.kernels.flash_attention.pallas_gpu_walk import Walk, item_of_program
from tilewright.kernels.kv_buffer.ring import RingPlan

SHARED_MEMORY = 227 * 1024
"""Shared memory that one block may have on compute capability 9.0, in bytes."""

ROWS = 64
"""Query rows of a warpgroup: the M of its matrix instruction."""

RESERVED = 2048
"""Shared memory for the row statistics, the remaining barriers and alignment, in bytes."""

REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Registers per thread of a consumer and of the producer, by the number of consumer warpgroups."""


@dataclasses.dataclass(frozen=True, slots=True)
class HopperForwardParams:
    """How the forward kernel is cut and scheduled.

    Attributes:
      block_q: query rows per program, 64 for each consumer warpgroup.
      block_k: keys per tile.
      num_stages: tiles of keys, and of values, in shared memory at once.
      persistent: one program per multiprocessor, which goes on to its next tile of queries while the last one's
        output is on its way; otherwise one program per tile.
      ping_pong: whether the consumers take turns at the tensor cores.
    """

    block_q: int = 128
    block_k: int = 128
    num_stages: int = 2
    persistent: bool = True
    ping_pong: bool = False

    def __post_init__(self) -> None:
        if self.block_q not in (128, 192):
            raise ValueError(f"two or three warpgroups of 64 rows each, got {self.block_q=}")
        if self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"a tile has a multiple of 16 keys, 256 at most, got {self.block_k=}")
        if self.num_stages < 2:
            raise ValueError(f"the producer needs a stage ahead of the consumers, got {self.num_stages=}")

    @property
    def consumers(self) -> int:
        return self.block_q // ROWS


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The shared memory of one forward kernel; ``head_dim`` and ``value_dim`` are padded ones."""

    params: HopperForwardParams
    head_dim: int
    value_dim: int
    dtype: Any

    @property
    def queries(self) -> RingPlan:
        return RingPlan((self.params.block_q, self.head_dim), self.dtype, 1, self.params.consumers)

    @property
    def keys(self) -> RingPlan:
        params = self.params
        return RingPlan((params.block_k, self.head_dim), self.dtype, params.num_stages, params.consumers)

    @property
    def values(self) -> RingPlan:
        params = self.params
        # A product over keys goes in steps of the swizzle's width: narrower for odd tile sizes.
        width = math.gcd(params.block_k, self.value_dim, 64)
        return RingPlan(
            (params.block_k, self.value_dim), self.dtype, params.num_stages, params.consumers, swizzle=2 * width
        )

    @property
    def own_output(self) -> bool:
        """Whether the output has shared memory of its own; else it goes where the queries were."""
        return self._bytes(True) <= SHARED_MEMORY or self.head_dim != self.value_dim

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.own_output)

    def _bytes(self, own_output: bool) -> int:
        rings = sum(plan.shared_bytes for plan in (self.queries, self.keys, self.values))
        output = self.params.block_q * self.value_dim * np.dtype(self.dtype).itemsize
        return rings + RESERVED + (output if own_output else 0)


def forward_kernel(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    order: Any,
    tables: Any,
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    walk: Walk,
    params: HopperForwardParams,
    processors: int,
) -> tuple[Any, Any]:
    """``(out, lse)``: ``[batch, q_length, heads, value_dim]`` and float32 ``[batch, heads, padded q_length]``.

    Args:
      sinks: ``[heads]`` float32, the log of the sinks' summed exponentials, or None.
      order: work items in the order in which they start, from ``program_order``.
      tables: of ``walk``.
      processors: multiprocessors of the device.
    """
    batch, q_length, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    group = heads // kv_heads
    dtype, block_q, block_k, consumers = query.dtype, params.block_q, params.block_k, params.consumers
    plan = ForwardPlan(params, head_dim, value_dim, dtype)
    q_tiles = walk.extent.row_tiles
    items = batch * heads * q_tiles
    programs = min(processors, items) if params.persistent else items
    own_output = plan.own_output
    guarded = walk.may_mask or options.has_bias  # a bias of −∞ hides, too
    statistics = TILE.reduce(1)

    operands = (query, key, value, sinks, order, tables, arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, sinks_ref, order_ref, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        out_ref, lse_ref, scratch = refs[len(leaves)], refs[len(leaves) + 1], refs[len(leaves) + 2 :]
        q_ring, k_ring, v_ring = (
            ring.bind(*scratch[3 * i : 3 * i + 3]) for i, ring in enumerate((plan.queries, plan.keys, plan.values))
        )
        lse_smem, turns, *rest = scratch[9:]
        out_smem = rest[0] if own_output else q_ring.smem.at[0]
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")

        def work(turn: Any) -> tuple[Any, Any, Any, Any]:
            item = order_ref[item_of_program(program, turn, programs, items)]
            matrix, q_tile = lax.div(item, jnp.int32(q_tiles)), lax.rem(item, jnp.int32(q_tiles))
            b, h = lax.div(matrix, jnp.int32(heads)), lax.rem(matrix, jnp.int32(heads))
            return b, h, q_tile, walk.steps(table_refs, b, h, q_tile)

        def over_items(one: Any) -> None:
            if programs == items:
                one(jnp.int32(0), jnp.int32(0))
                return
            rounds, left = divmod(items, programs)
            place = program if rounds % 2 == 0 else programs - 1 - program
            lax.fori_loop(0, rounds + jnp.where(place < left, 1, 0), one, jnp.int32(0))

        def produce(turn: Any, first: Any) -> Any:
            b, h, q_tile, steps = work(turn)
            kv_head = lax.div(h, jnp.int32(group))
            q_ring.load_from_dram(turn, q_ref.at[b, pl.ds(q_tile * block_q, block_q), h])

            def load(visit: Any, _: Any) -> None:
                rows = pl.ds(steps.tile(visit) * block_k, block_k)
                k_ring.load_from_dram(first + visit, k_ref.at[b, rows, kv_head])
                v_ring.load_from_dram(first + visit, v_ref.at[b, rows, kv_head])

            lax.fori_loop(0, steps.total, load, None)
            return first + steps.total

        def consume(turn: Any, first: Any) -> Any:
            b, h, q_tile, steps = work(turn)
            my_rows = pl.ds(warpgroup * ROWS, ROWS)
            q_start = q_tile * block_q + warpgroup * ROWS
            q_ring.load_from_shared(turn)
            q_smem = q_ring.get_mma_tile(turn).at[my_rows]

            def across(vector: Any, columns: int) -> Any:
                return lax.broadcast_in_dim(vector, (ROWS, columns), [0])

            def place(visit: Any) -> Place:
                return Place(b, h, q_start, steps.tile(visit) * block_k, (ROWS, block_k), 0)

            def softmax(products: Any, visit: Any, m: Any, total: Any) -> tuple[Any, Any, Any, Any]:
                logits = products
                if not options.plain:
                    logits, _ = biased_and_capped(products, options, array_refs, place(visit))
                if walk.may_mask:
                    # One loop with a branch: of two loops ptxas serialises the matrix products (C7513).
                    logits = lax.cond(
                        visit < steps.masked,
                        lambda logits: jnp.where(visible(options, array_refs, place(visit)), logits, -jnp.inf),
                        lambda logits: logits,
                        logits,
                    )
                largest = jnp.maximum(m, logits.max(axis=1) * options.multiplier)
                # A row that has seen nothing yet is shifted by nothing: −∞ − −∞ is NaN.
                shift = jnp.where(largest == -jnp.inf, 0.0, largest) if guarded else largest
                scale = jnp.exp2(m - shift)
                p = jnp.exp2(logits * options.multiplier - across(shift, block_k))
                total = total * scale + p.sum(axis=1)
                if options.dropout_prob:
                    p = jnp.where(kept(options, array_refs, place(visit)), p, 0.0)
                return p.astype(dtype), scale, largest, total

            def take_turn() -> None:
                if params.ping_pong:
                    plgpu.barrier_wait(turns.at[warpgroup])

            def pass_turn() -> None:
                if params.ping_pong:
                    plgpu.barrier_arrive(turns.at[lax.rem(warpgroup + 1, jnp.int32(consumers))])

            def scores_of(step: Any, scores: Any) -> None:
                k_ring.load_from_shared(step)
                plgpu.wgmma(scores, q_smem, k_ring.get_mma_tile(step, transposed=True))

            def attend(acc: Any) -> tuple[Any, Any, Any]:
                def first_tile(scores: Any) -> Any:
                    take_turn()
                    scores_of(first, scores)
                    pass_turn()
                    return scores[...]

                products = pl.run_scoped(first_tile, plgpu.ACC((ROWS, block_k), jnp.float32))
                k_ring.release(first)
                m = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), statistics)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), statistics)
                p, _, m, total = softmax(products, jnp.int32(0), m, total)

                def visit_one(visit: Any, carry: Any) -> Any:
                    p, m, total = carry
                    step = first + visit

                    def overlapped(scores: Any) -> Any:
                        take_turn()
                        scores_of(step, scores)
                        v_ring.load_from_shared(step - 1)
                        plgpu.wgmma(acc, p, v_ring.get_mma_tile(step - 1))
                        pass_turn()
                        products = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                        k_ring.release(step)
                        after = softmax(products, visit, m, total)
                        plgpu.wgmma_wait(0)
                        v_ring.release(step - 1)
                        acc[...] = acc[...] * across(after[1], value_dim)
                        return after[0], after[2], after[3]

                    return pl.run_scoped(overlapped, plgpu.ACC((ROWS, block_k), jnp.float32))

                p, m, total = lax.fori_loop(1, steps.total, visit_one, (p, m, total))
                last = first + steps.total - 1
                if own_output:
                    q_ring.release(turn)
                v_ring.load_from_shared(last)
                plgpu.wgmma(acc, p, v_ring.get_mma_tile(last))
                out = acc[...]
                v_ring.release(last)
                return out, m, total

            out, m, total = pl.run_scoped(attend, plgpu.ACC((ROWS, value_dim), jnp.float32))
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
            if not own_output:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                q_ring.release(turn)
            return first + steps.total

        @pl.when(warpgroup < consumers)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[consumers][0], action="increase")
            over_items(consume)
            plgpu.wait_smem_to_gmem(0)
            if params.ping_pong:
                # What the last turn passed on.
                @pl.when(warpgroup == 0)
                def _() -> None:
                    plgpu.barrier_wait(turns.at[0])

        @pl.when(warpgroup == consumers)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[consumers][1], action="decrease")
            if params.ping_pong:
                plgpu.barrier_arrive(turns.at[0])
            over_items(produce)

    scratch: list[Any] = [part for ring in (plan.queries, plan.keys, plan.values) for part in ring.scratch()]
    scratch.append(plgpu.SMEM((consumers, ROWS), jnp.float32))
    scratch.append(plgpu.Barrier(num_barriers=consumers))
    if own_output:
        output = RingPlan((block_q, value_dim), dtype, 1, 1)
        scratch.append(plgpu.SMEM((block_q, value_dim), dtype, transforms=output.transforms))
    out_type = (
        jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), dtype),
        jax.ShapeDtypeStruct((batch, heads, q_tiles * block_q), jnp.float32),
    )
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    return kernel(*leaves)
