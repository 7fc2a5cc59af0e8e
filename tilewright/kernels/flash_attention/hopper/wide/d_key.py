"""The dK warpgroup of the backward kernel for wide heads: dP, dS, dK, and the rest of the columns of dQ."""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.params import BLOCK
from tilewright.kernels.flash_attention.hopper.scores import TileCoord
from tilewright.kernels.flash_attention.hopper.wide.context import WideContext
from tilewright.kernels.flash_attention.hopper.wide.gradients import (
    DK_WARPGROUP,
    add_to_dq,
    load_statistic,
    release_last_stage,
    store_gradient,
)
from tilewright.kernels.flash_attention.hopper.wide.plans import WIDE_TILE
from tilewright.kernels.flash_attention.hopper.wide.scores import (
    QueryIteration,
    QueryIterations,
    ds_tile,
    item_in_step,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.panels import mma
from tilewright.kernels.hopper.tiles import opaque_zero, tile_layout
from tilewright.kernels.pallas_types import Ref, Scalar


def compute_dk(ctx: WideContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Role of the dK warpgroup: dP, dS, dK and the rest of dQ's columns."""
    ctx = ctx.in_item(item_index, first)
    iterations = ctx.decode(item).iterations
    steps = iterations.total
    accumulate = functools.partial(DkWarpgroup(ctx, item).accumulate, iterations, steps)
    dk = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, ctx.plan.head_dim), jnp.float32)) * ctx.options.scale
    b, key_part, kv_start, _ = ctx.decode(item_in_step(item, steps))
    # The last S was computed before the last dS: nothing reads the stage of Q any more.
    clear_skipped(ctx, item_in_step(item, steps))
    store_gradient(ctx.scratch.q, steps - 1, dk, ctx.results.d_key.at[b, pl.ds(kv_start, BLOCK), key_part])
    return first + steps


def clear_skipped(ctx: WideContext, item: Scalar) -> None:
    """Stores zeros where the gradient of a bias has tiles without a step, unless the array has been cleared."""
    bias_gradient, d_bias, staging = ctx.plan.bias_gradient, ctx.d_bias, ctx.scratch.d_bias
    if not isinstance(bias_gradient, BiasGradient) or ctx.operands.d_bias is not None:
        return
    assert d_bias is not None
    assert staging is not None
    b, _, kv_start, iterations = ctx.decode(item)

    def one(member: Scalar, _: None) -> None:
        coord = TileCoord(b, iterations.first_head + member, 0, kv_start, WIDE_TILE, 1)
        bias_gradient.clear_skipped(d_bias, staging.at[0], ctx.schedule, iterations.row_tile, coord)

    lax.fori_loop(0, iterations.group, one, None)


@dataclasses.dataclass(frozen=True, slots=True)
class DkWarpgroup:
    """The dK warpgroup on its work item.

    Between two steps it keeps ``ds``: dS as operand A of the next dK, or a 0 where the operand is in shared memory.
    """

    ctx: WideContext
    item: Scalar

    @property
    def fuses_dq(self) -> bool:
        return self.ctx.plan.fuses_dq

    @property
    def has_dq_columns(self) -> bool:
        """True if any columns of dQ are left to this warpgroup."""
        return self.fuses_dq and self.ctx.plan.d_query_split < self.ctx.plan.head_dim

    @property
    def dq_accumulator(self) -> object:
        """The type of the accumulator of this warpgroup's columns of dQ."""
        return plgpu.ACC((BLOCK, max(self.ctx.plan.head_dim - self.ctx.plan.d_query_split, 8)), jnp.float32)

    def after(self, step: Scalar, iteration: QueryIteration) -> QueryIteration:
        """The next iteration, from the item decoded anew."""
        return self.ctx.decode(item_in_step(self.item, step)).iterations.after(iteration)

    def after_for_bias(self, step: Scalar, iteration: QueryIteration) -> QueryIteration | None:
        """The next iteration, if the gradient of a bias needs its coordinates."""
        return None if self.ctx.plan.bias_gradient is None else self.after(step, iteration)

    def accumulate(self, iterations: QueryIterations, steps: Scalar, dk: Ref) -> jax.Array:
        """Sums dK over all steps; returns it without the scale, and leaves it the last stage of Q."""
        k_ring, v_ring = self.ctx.scratch.k, self.ctx.scratch.v
        v_ring.load_from_shared(0)
        if self.fuses_dq:
            k_ring.load_from_shared(0)
        if self.ctx.overlaps_next_step:
            first = functools.partial(self.first_ds, iterations)
            ds = self.store_ds_to_smem(jnp.int32(0), pl.run_scoped(first, self.ctx.s_accumulator), iterations.first)
            one_ahead = functools.partial(self.one_step_ahead, dk)
            last, ds = lax.fori_loop(0, steps - 1, one_ahead, (iterations.first, ds))
            v_ring.release(0)  # the last dP is complete
            self.dq_and_dk(steps - 1, last, ds, dk)
        else:
            release_last_stage(self.ctx.scratch.q)
            alone = functools.partial(self.one_step, steps, dk)
            # With one stage of dO the operand of the next dP is still being loaded when dK is issued: nothing could run
            # beside it.
            lax.fori_loop(0, steps, alone, (iterations.first, jnp.int32(0)))
            v_ring.release(0)
        if self.fuses_dq:
            k_ring.release(0)
        return dk[...]

    def first_ds(self, iterations: QueryIterations, dp: Ref) -> jax.Array:
        """dS of the first step, with no other MMA in flight."""
        self.issue_dp(jnp.int32(0), dp)
        dp_tile = dp[...]
        release_last_stage(self.ctx.scratch.q)
        return self.compute_ds(jnp.int32(0), iterations.first, dp_tile)

    def one_step_ahead(
        self, dk: Ref, step: Scalar, carry: tuple[QueryIteration, jax.Array]
    ) -> tuple[QueryIteration, jax.Array]:
        """dP of the next step and dK of this one; the next dS is computed beside the latter."""
        iteration, ds = carry
        overlapped = functools.partial(self.overlapped, step, iteration, ds, dk)
        next_ds = pl.run_scoped(overlapped, self.ctx.s_accumulator)
        plgpu.wgmma_wait(0)
        self.ctx.scratch.q.release(step)
        # Before the next dS is stored: the ring has one stage and waits for the dV warpgroup, not for this MMA.
        dq = pl.run_scoped(functools.partial(self.dq_alone, step), self.dq_accumulator) if self.has_dq_columns else None
        following = self.after_for_bias(step, iteration)
        ds = self.store_ds_to_smem(step + 1, next_ds, following)
        if dq is not None:
            self.add_own_dq(step, iteration, dq)
        return self.after(step, iteration), ds

    def overlapped(self, step: Scalar, iteration: QueryIteration, ds: jax.Array, dk: Ref, dp: Ref) -> jax.Array:
        """Issues dP of the next step and dK of this one, and computes the next dS beside dK."""
        self.issue_dp(step + 1, dp)
        # dP of the next step is the older group: dS waits only for it, and dK runs beside the arithmetic.
        self.issue_dk(step, ds, dk)
        following = self.after_for_bias(step, iteration)
        dp_tile = plgpu.wgmma_accumulator_load(dp, wait_n=1)
        return self.compute_ds(step + 1, following, dp_tile)

    def one_step(
        self, steps: Scalar, dk: Ref, step: Scalar, carry: tuple[QueryIteration, jax.Array]
    ) -> tuple[QueryIteration, jax.Array]:
        """dP, then dQ and dK of one step; the last one leaves its stage of Q to dK."""
        iteration, _ = carry
        ds = pl.run_scoped(functools.partial(self.ds_alone, step, iteration), self.ctx.s_accumulator)
        self.dq_and_dk(step, iteration, self.store_ds_to_smem(step, ds, iteration), dk)
        # The last step's stage stays: dK leaves through it, and it is released in the next item.
        pl.when(step < steps - 1)(functools.partial(self.ctx.scratch.q.release, step))
        return self.after(step, iteration), jnp.int32(0)

    def dq_and_dk(self, step: Scalar, iteration: QueryIteration, ds: jax.Array, dk: Ref) -> None:
        """dQ and dK of a step; columns of dQ are added beside the MMA for dK."""

        def overlapped(dq: Ref) -> jax.Array:
            # dQ before dK: reading dQ leaves the younger group, dK, in flight beside the reductions.
            self.issue_dq(step, dq)
            self.issue_dk(step, ds, dk)
            return plgpu.wgmma_accumulator_load(dq, wait_n=1)

        if self.has_dq_columns:
            self.add_own_dq(step, iteration, pl.run_scoped(overlapped, self.dq_accumulator))
        else:
            self.issue_dk(step, ds, dk)
        plgpu.wgmma_wait(0)

    def issue_dp(self, step: Scalar, dp: Ref) -> None:
        """Issues the MMA dP = VdOᵀ − delta."""
        rings = self.ctx.scratch
        if not self.ctx.options.dropout_prob:
            dp[...] = load_statistic(rings.minus_delta, step)
        rings.d_out.load_from_shared(step)
        v = rings.v.smem.at[opaque_zero(step + self.item)]
        mma(dp, v, rings.d_out.get_mma_tile(step, transposed=True))

    def ds_alone(self, step: Scalar, iteration: QueryIteration, dp: Ref) -> jax.Array:
        """dS of a step, with no other MMA in flight."""
        self.issue_dp(step, dp)
        return self.compute_ds(step, iteration, dp[...])

    def compute_ds(self, step: Scalar, iteration: QueryIteration | None, dp: jax.Array) -> jax.Array:
        """Computes dS from dP, whose MMA is complete, and P; in float32 if deterministic, for the bias."""
        rings, options = self.ctx.scratch, self.ctx.options
        # dP is complete, and the dV warpgroup releases its own use of dO: the ring has two consumers.
        rings.d_out.release(step)
        minus_delta = load_statistic(rings.minus_delta, step) if options.dropout_prob else None
        if not self.fuses_dq:
            plgpu.commit_smem()  # an async-proxy fence between the load of delta and the release of its stage
            rings.minus_delta.release(step)
        # As late as here: P comes from the other warpgroup, and everything above needs dP only.
        rings.p.load_from_shared(step)
        p = plgpu.load(rings.p.smem.at[rings.p.slot(step)], layout=tile_layout()).astype(jnp.float32)
        ds = ds_tile(p, dp, minus_delta, options)
        # No fence: threads have read P, and the dV warpgroup's threads write it next.
        rings.p.release(step)
        if not self.fuses_dq:
            return ds
        self.store_d_bias(step, iteration, ds)
        return ds.astype(self.ctx.plan.dtype)

    def store_ds_to_smem(self, step: Scalar, ds: jax.Array, iteration: QueryIteration | None) -> jax.Array:
        """Stores dS to shared memory, for both MMAs for dQ; returns what the loop carries to dK."""
        ds_ring = self.ctx.scratch.ds
        if ds_ring is None:
            # Here, where no MMA is in flight: rounded for the bias, dS is the next one's operand, too.
            self.store_d_bias(step, iteration, ds)
            return ds.astype(self.ctx.plan.dtype)
        # The ring waits for the dV warpgroup, which reads the stage for its columns of dQ. This warpgroup's MMAs for dQ
        # and dK that read it have been waited for by the callers.
        ds_ring.copy_to_shared(step, ds.astype(self.ctx.plan.dtype))
        self.ctx.scratch.minus_delta.release(step)  # behind the async-proxy fence of that store
        return jnp.int32(0)

    def store_d_bias(self, step: Scalar, iteration: QueryIteration | None, ds: jax.Array) -> None:
        """Stores or adds dS as the gradient of a bias, if there is one."""
        bias_gradient, d_bias, staging = self.ctx.plan.bias_gradient, self.ctx.d_bias, self.ctx.scratch.d_bias
        if bias_gradient is None or iteration is None:
            return
        assert d_bias is not None
        coord = self.ctx.decode(item_in_step(self.item, step)).coord(iteration)
        bias_gradient.store(d_bias, None if staging is None else staging.at[0], ds, coord)

    def issue_dk(self, step: Scalar, ds: jax.Array, dk: Ref) -> None:
        """Issues the MMA dK += dS·Q."""
        q_ring, ds_ring = self.ctx.scratch.q, self.ctx.scratch.ds
        # Q has arrived, as the dV warpgroup has computed S from it. But a thread sees what TMA wrote, and counts
        # phases, by its own waits only.
        q_ring.load_from_shared(step)
        mma(dk, ds if ds_ring is None else ds_ring.get_mma_tile(step), q_ring.get_mma_tile(step))

    def issue_dq(self, step: Scalar, dq: Ref) -> None:
        """Issues the MMA for this warpgroup's columns of dQ = dSᵀ·K."""
        ds_ring, split = self.ctx.scratch.ds, self.ctx.plan.d_query_split
        assert ds_ring is not None
        columns = pl.ds(split, self.ctx.plan.head_dim - split)
        k = self.ctx.scratch.k.smem.at[opaque_zero(step + self.item), :, columns]
        mma(dq, ds_ring.get_mma_tile(step), k, transpose_a=True)

    def dq_alone(self, step: Scalar, dq: Ref) -> jax.Array:
        """This warpgroup's columns of dQ, with no other MMA in flight."""
        self.issue_dq(step, dq)
        return dq[...]

    def add_own_dq(self, step: Scalar, iteration: QueryIteration, dq: jax.Array) -> None:
        """Adds this warpgroup's columns of dQ."""
        split = self.ctx.plan.d_query_split
        add_to_dq(self.ctx, item_in_step(self.item, step), iteration, DK_WARPGROUP, split, dq)
