"""The dV warpgroup of the backward kernel for wide heads: S, P, dV, and the first columns of dQ."""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.dropout import draw_kept
from tilewright.kernels.flash_attention.hopper.params import BLOCK
from tilewright.kernels.flash_attention.hopper.scores import TileCoord, initial_scores
from tilewright.kernels.flash_attention.hopper.wide.context import WideContext
from tilewright.kernels.flash_attention.hopper.wide.gradients import (
    DV_WARPGROUP,
    add_to_dq,
    load_statistic,
    release_last_stage,
    store_gradient,
)
from tilewright.kernels.flash_attention.hopper.wide.scores import (
    ProbabilityTiles,
    QueryIteration,
    QueryIterations,
    item_in_step,
    softmax_tile,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.panels import mma
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.tiles import opaque_zero
from tilewright.kernels.pallas_types import Ref, Scalar


def compute_dv(ctx: WideContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Role of the dV warpgroup: S, P, dV and the first columns of dQ."""
    ctx, options = ctx.in_item(item_index, first), ctx.options
    iterations = ctx.decode(item).iterations
    steps = iterations.total
    warpgroup = DvWarpgroup(ctx, item)
    accumulate = functools.partial(warpgroup.accumulate, iterations, steps)
    dv = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, ctx.plan.value_dim), jnp.float32))
    if options.dropout_prob:
        # P lacks the dropout's factor: it is applied to the sum once, not to every tile.
        dv = dv * (1 / (1 - options.dropout_prob))
    # Once the dK warpgroup has released the last P, its last MMA with dO is over, and the stage of dO is free.
    ctx.scratch.p.wait_released(steps - 1)
    b, key_part, kv_start, _ = ctx.decode(item_in_step(item, steps))
    store_gradient(ctx.scratch.d_out, steps - 1, dv, ctx.results.d_value.at[b, pl.ds(kv_start, BLOCK), key_part])
    return first + steps


@dataclasses.dataclass(frozen=True, slots=True)
class DvWarpgroup:
    """The dV warpgroup on its work item.

    Between two steps it keeps ``p``: P as operand A of the next dV, or a 0 where the operand is in shared memory.
    """

    ctx: WideContext
    item: Scalar

    @property
    def hands_over_early(self) -> bool:
        """True if P goes to the dK warpgroup while the MMA for dV is in flight, whose operand is then elsewhere."""
        return self.ctx.p_in_registers or self.ctx.scratch.p_dv is not None

    def accumulate(self, iterations: QueryIterations, steps: Scalar, dv: Ref) -> jax.Array:
        """Sums dV over all steps; returns it without the scale of dropout, and leaves it the last stage of dO."""
        k_ring, fuses_dq = self.ctx.scratch.k, self.ctx.plan.fuses_dq
        k_ring.load_from_shared(0)
        # Step 0 has nothing to run beside. K stays for the item; its barrier has a phase for each item.
        first = pl.run_scoped(functools.partial(self.first_p, iterations), self.ctx.s_accumulator)
        # `compute_dv` has waited for the stage of P in the item before.
        if self.hands_over_early:
            self.hand_over_p(jnp.int32(0), first.ds, released=True)
        p = self.operand_of_dv(jnp.int32(0), first, released=True)
        one = functools.partial(self.one_step, dv)
        last, p = lax.fori_loop(0, steps - 1, one, (iterations.first, p))
        if not fuses_dq:
            k_ring.release(0)  # the last S is complete
        self.issue_dv(steps - 1, p, dv)
        # The last dQ is computed beside the MMA for the last dV.
        self.add_own_dq(steps - 1, last)
        plgpu.wgmma_wait(0)
        if fuses_dq:
            k_ring.release(0)
        return dv[...]

    def one_step(
        self, dv: Ref, step: Scalar, carry: tuple[QueryIteration, jax.Array]
    ) -> tuple[QueryIteration, jax.Array]:
        """dV and dQ of a step, and P of the next one."""
        iteration, p = carry
        # The next tile of queries is needed now: S of the next step is issued before dV of this one.
        following = self.ctx.decode(item_in_step(self.item, step)).iterations.after(iteration)
        next_p = pl.run_scoped(functools.partial(self.overlapped, step, following, p, dv), self.ctx.s_accumulator)
        if self.hands_over_early:
            # While the MMA for dV is in flight: the dK warpgroup waits for P.
            self.hand_over_p(step + 1, next_p.ds)
        # dV is complete: its operand P may be replaced, in registers or in the stage, and its dO is free.
        plgpu.wgmma_wait(0)
        if self.ctx.overlaps_next_step:
            self.ctx.scratch.d_out.release(step)
        p = self.operand_of_dv(step + 1, next_p)
        # Behind the hand-over of P, for which the dK warpgroup waits first; it needs this stage of dS only for its next
        # dS.
        self.add_own_dq(step, iteration)
        return following, p

    def overlapped(self, step: Scalar, following: QueryIteration, p: jax.Array, dv: Ref, s: Ref) -> ProbabilityTiles:
        """Issues S of the next step and dV of this one, and computes the next P beside dV."""
        if self.ctx.overlaps_next_step:
            # S is the older of the two groups: P waits only for it, and dV runs beside the exponentials.
            self.issue_s(step + 1, following, s)
            self.issue_dv(step, p, dv)
            bits = self.draw_bits(step + 1, following)
            s_tile = plgpu.wgmma_accumulator_load(s, wait_n=1)
        else:
            # dV first: its stage of dO is the only one, and the producer waits for it.
            self.issue_dv(step, p, dv)
            self.issue_s(step + 1, following, s)
            bits = self.draw_bits(step + 1, following)
            plgpu.wgmma_wait(1)
            self.ctx.scratch.d_out.release(step)
            s_tile = s[...]
        return self.compute_p(step + 1, following, s_tile, bits)

    def first_p(self, iterations: QueryIterations, s: Ref) -> ProbabilityTiles:
        """P of the first step, with no other MMA in flight."""
        self.issue_s(jnp.int32(0), iterations.first, s)
        bits = self.draw_bits(jnp.int32(0), iterations.first)
        s_tile = s[...]
        # Behind the first MMA, so that the wait for TMA, which reads the dV of the item before, runs beside it.
        release_last_stage(self.ctx.scratch.d_out)
        return self.compute_p(jnp.int32(0), iterations.first, s_tile, bits)

    def draw_bits(self, step: Scalar, iteration: QueryIteration) -> jax.Array | None:
        """The dropout's bits of a step, drawn while an MMA is in flight; None without dropout."""
        item = self.ctx.decode(item_in_step(self.item, step))
        return draw_kept(self.ctx.options, self.ctx.operands.arrays, item.coord(iteration))

    def issue_s(self, step: Scalar, iteration: QueryIteration, s: Ref) -> None:
        """Issues the MMA S = KQᵀ − lse, with a bias of positions."""
        rings, options = self.ctx.scratch, self.ctx.options

        def coord() -> TileCoord:
            return self.ctx.decode(item_in_step(self.item, step)).coord(iteration)

        start = initial_scores(options, self.ctx.operands.arrays, coord)
        if options.plain:
            minus_lse = load_statistic(rings.minus_lse, step)
            start = minus_lse if start is None else start + minus_lse
        if start is not None:
            s[...] = start
        rings.q.load_from_shared(step)
        # The zero keeps wgmma's descriptors of K, which no step changes, out of the loop's registers.
        k = rings.k.smem.at[opaque_zero(step + self.item)]
        mma(s, k, rings.q.get_mma_tile(step, transposed=True))

    def compute_p(
        self, step: Scalar, iteration: QueryIteration, s: jax.Array, bits: jax.Array | None
    ) -> ProbabilityTiles:
        """Computes P from S, possibly with an MMA in flight."""
        ctx, options, dtype = self.ctx, self.ctx.options, self.ctx.plan.dtype
        minus_lse = None
        if not options.plain:
            minus_lse = load_statistic(ctx.scratch.minus_lse, step) * options.multiplier
        item = ctx.decode(item_in_step(self.item, step))
        coord = item.coord(iteration)
        masked = item.iterations.masked(iteration) if ctx.schedule.may_mask else False
        bias = None if ctx.bias_tiles is None else ctx.bias_tiles.read(step, 0, transposed=True)
        p = softmax_tile(s, bits, minus_lse, options, ctx.operands.arrays, coord, masked, dtype, bias)
        # Registers that are an operand must not be written while an MMA is in flight: `one_step` says why.
        return ProbabilityTiles(p.dv if ctx.p_in_registers else p.dv.astype(dtype), p.ds.astype(dtype))

    def hand_over_p(self, step: Scalar, p: jax.Array, released: bool = False) -> None:
        """Stores P to shared memory, for the dK warpgroup.

        Args:
          released: whether the ring's stage is known to be.
        """
        self.ctx.scratch.p.copy_to_shared(step, p, released=released)
        # Behind the async-proxy fence of that store: threads have read −lse, and TMA writes the stage next.
        self.ctx.scratch.minus_lse.release(step)

    def operand_of_dv(self, step: Scalar, p: ProbabilityTiles, released: bool = False) -> jax.Array:
        """Operand A of dV, for the loop to carry; a 0 if it is in shared memory, where it is stored here for both.

        No MMA may be in flight: ptxas serialises wgmma where a later one's operand in registers is made while one is
        in flight (C7513), and in shared memory the one for dV reads what is written here.
        """
        dtype, buffer = self.ctx.plan.dtype, self.ctx.scratch.p_dv
        if self.ctx.p_in_registers:
            # Opaque: else the compiler takes the registers from which P was handed over, before the wait.
            return lax.optimization_barrier(p.dv).astype(dtype)
        if buffer is None:
            # The ring waits only for the dK warpgroup; this one's MMA for dV has read the stage.
            self.hand_over_p(step, p.dv.astype(dtype), released)
        else:
            buffer[0] = p.dv.astype(dtype)
            plgpu.commit_smem()
        return jnp.int32(0)

    def issue_dv(self, step: Scalar, p: jax.Array, dv: Ref) -> None:
        """Issues the MMA dV += P·dO."""
        d_out_ring, p_ring, buffer = self.ctx.scratch.d_out, self.ctx.scratch.p, self.ctx.scratch.p_dv
        d_out_ring.load_from_shared(step)
        # One stage each, so no slot is computed.
        p_smem = (p_ring.smem if buffer is None else buffer).at[0]
        mma(dv, p if self.ctx.p_in_registers else p_smem, d_out_ring.get_mma_tile(step))

    def add_own_dq(self, step: Scalar, iteration: QueryIteration) -> None:
        """Adds the first columns of a step's dQ, unless another kernel computes dQ."""
        ds_ring, split = self.ctx.scratch.ds, self.ctx.plan.d_query_split
        if ds_ring is None:
            return
        ds_ring.load_from_shared(step)
        dq = pl.run_scoped(functools.partial(self.compute_dq, ds_ring, step), plgpu.ACC((BLOCK, split), jnp.float32))
        # Reading dQ has waited for its MMA, which was the reader of dS in this warpgroup.
        ds_ring.release(step)
        add_to_dq(self.ctx, item_in_step(self.item, step), iteration, DV_WARPGROUP, 0, dq)

    def compute_dq(self, ds_ring: Ring, step: Scalar, dq: Ref) -> jax.Array:
        """Computes the first columns of dQ = dSᵀ·K."""
        columns = pl.ds(0, self.ctx.plan.d_query_split)
        k = self.ctx.scratch.k.smem.at[opaque_zero(step + self.item), :, columns]
        mma(dq, ds_ring.get_mma_tile(step), k, transpose_a=True)
        return dq[...]
