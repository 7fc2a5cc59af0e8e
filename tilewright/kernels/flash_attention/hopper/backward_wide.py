"""The backward pass on Hopper where a head dim is beyond 128: dK and dV of one tile of keys in two warpgroups.

At head_dim 256 an accumulator of 64 rows takes 128 registers of a thread, so one warpgroup holds either dK or dV.
``wide_key_value_kernel`` splits its two consumers by role: one computes the probabilities and dV, the other the
gradients of the scores and dK; what they need of each other goes through rings in shared memory. dQ is added up in
global memory by both, a part of the columns each, or (``deterministic``) computed by ``wide_query_kernel``.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.d_query import ROW, STRIP, store_strips
from tilewright.kernels.flash_attention.hopper.delta import (
    BackwardParams,
    completed,
    statistic_of_rows,
    sums_of_products,
)
from tilewright.kernels.flash_attention.hopper.schedule import Steps, Walk
from tilewright.kernels.flash_attention.hopper.scores import (
    Place,
    ScoreArrays,
    ScoreOptions,
    biased_and_capped,
    kept,
    masked_logits,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import RingPlan, bind_rings, ring_scratch
from tilewright.kernels.hopper.schedule import decode_tile_index
from tilewright.kernels.hopper.shared import SharedTile, aligned_bytes
from tilewright.kernels.hopper.tiles import ROWS, opaque_zero, store_unoptimised, tile_layout
from tilewright.ops.utils.stable_ids import stable_id

BLOCK = ROWS
"""Keys, and queries, of a step: the M of a warpgroup's matrix instruction and the N of the products for scores."""

CONSUMERS = 2
_SHAPE = (BLOCK, BLOCK)


@stable_id(
    "tilewright/flash_attention.WideBackwardParams",
    formerly=("tilewright.kernels.flash_attention.pallas_gpu_backward_wide:WideBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class WideBackwardParams(BackwardParams):
    """How the backward kernels for wide heads are cut.

    Attributes:
      deterministic: bitwise repeatable: dQ by a kernel of its own, two matrix products more.
      query_stages: tiles of queries in shared memory at once in the kernel for dK and dV.
      d_out_stages: the same of output gradients; with two, their product with the values runs a step ahead.
      d_query_columns: columns of dQ that one reduction adds up; unused if deterministic.
      d_query_buffers: reductions of a warpgroup that may be under way; unused if deterministic.
      key_stages, value_stages: tiles of keys and of values in the kernel for dQ; used only if deterministic.
    """

    deterministic: bool = True
    query_stages: int = 2
    d_out_stages: int = 2
    d_query_columns: int = 32
    d_query_buffers: int = 1
    key_stages: int = 2
    value_stages: int = 1

    def __post_init__(self) -> None:
        if self.query_stages < 2 or self.d_out_stages < 1:
            raise ValueError(f"queries want 2 stages, d_out 1, got {self.query_stages=}, {self.d_out_stages=}")
        if self.key_stages < 2 or self.value_stages < 1:
            raise ValueError(f"keys want 2 stages, values 1, got {self.key_stages=}, {self.value_stages=}")
        if self.d_query_columns not in (16, 32, 64):
            raise ValueError(f"a reduction takes 16, 32 or 64 columns, got {self.d_query_columns=}")
        if self.d_query_buffers < 1:
            raise ValueError(f"a reduction needs a buffer, got {self.d_query_buffers=}")

    @property
    def block_q(self) -> int:
        """Queries per step of the kernel for dK and dV."""
        return BLOCK

    @property
    def block_k(self) -> int:
        """Keys per program of the kernel for dK and dV, and per step of the kernel for dQ."""
        return BLOCK

    @property
    def query_rows(self) -> int:
        """Queries per program of the kernel for dQ."""
        return CONSUMERS * BLOCK


@dataclasses.dataclass(frozen=True, slots=True)
class WideBackwardPlan:
    """The shared memory of the kernels; ``head_dim`` and ``value_dim`` are padded ones."""

    params: WideBackwardParams
    head_dim: int
    value_dim: int
    dtype: Any
    bias_gradient: BiasGradient | None = None

    @property
    def tiles(self) -> tuple[SharedTile, SharedTile]:
        """Of queries and keys; of values and d_out."""
        return SharedTile((BLOCK, self.head_dim), self.dtype), SharedTile((BLOCK, self.value_dim), self.dtype)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        """Keys, values, queries, d_out, both rows of the statistics, what dP is multiplied by; if not deterministic
        gradients of scores."""
        params, (of_head, of_value), of_rows = self.params, self.tiles, SharedTile((BLOCK,), jnp.float32)
        exchanged = (of_value,) if params.deterministic else (of_value, of_head)
        return (
            RingPlan(of_head, 1, 1),
            RingPlan(of_value, 1, 1),
            RingPlan(of_head, params.query_stages, 1),
            RingPlan(of_value, params.d_out_stages, CONSUMERS),
            RingPlan(of_rows, params.query_stages, 1),
            RingPlan(of_rows, params.d_out_stages, 1),
            *(RingPlan(SharedTile(_SHAPE, self.dtype, tile.swizzle), 1, 1, writers=1) for tile in exchanged),
        )

    @property
    def query_rings(self) -> tuple[RingPlan, ...]:
        """Of the kernel for dQ: queries and d_out, a stage for each warpgroup; keys; values."""
        of_head, of_value = self.tiles
        return (
            RingPlan(of_head, CONSUMERS, 1),
            RingPlan(of_value, CONSUMERS, 1),
            RingPlan(of_head, self.params.key_stages, CONSUMERS),
            RingPlan(of_value, self.params.value_stages, CONSUMERS),
        )

    @property
    def d_query_split(self) -> int:
        """The column of dQ where the second warpgroup's part begins: operands can be cut where a swizzle repeats."""
        width = (self.tiles[0].swizzle or 2) // 2
        return -(-self.head_dim // (2 * width)) * width

    @property
    def weights(self) -> SharedTile:
        """What d_out is multiplied by, where dP is multiplied by something else."""
        return SharedTile(_SHAPE, self.dtype, self.tiles[1].swizzle)

    @property
    def staging_shape(self) -> tuple[int, ...]:
        params = self.params
        return CONSUMERS, params.d_query_buffers, params.d_query_columns // STRIP, BLOCK, STRIP

    @property
    def reason(self) -> str:
        """Why a warpgroup's part of dQ cannot be cut into reductions; empty if it can."""
        if self.params.deterministic:
            return ""
        split, width = self.d_query_split, self.params.d_query_columns
        for part in (split, self.head_dim - split):
            # Which buffer is the oldest must be known while a program is written.
            if part % (width * self.params.d_query_buffers):
                return f"cannot cut {part} columns of dQ into {self.params.d_query_buffers} buffers of {width} in turn"
        return ""

    @property
    def shared_bytes(self) -> int:
        """Of the kernel that takes more, with what soft caps and dropout add, barriers and alignment."""
        size = sum(ring.shared_bytes for ring in self.rings) + self.weights.stack_bytes(1)
        if self.bias_gradient is not None:
            size += self.bias_gradient.staging_bytes(1)
        if self.params.deterministic:
            size = max(size, sum(ring.shared_bytes for ring in self.query_rings))
        else:
            size += aligned_bytes(self.staging_shape, jnp.float32)
        return size + 512


@dataclasses.dataclass(frozen=True, slots=True)
class _Visits:
    """The query tiles that a program of dK and dV visits, over all heads of its group, as one sequence.

    A visit is a pair (member of the group, its number among that head's visits).
    """

    walk: Walk
    tables: Any
    batch: Any
    first_head: Any
    group: int
    row_tile: Any
    shared: Steps | None
    nothing: Any

    @classmethod
    def of(
        cls, walk: Walk, tables: Any, batch: Any, first_head: Any, group: int, row_tile: Any, nothing: Any
    ) -> "_Visits":
        alike = group == 1 or not tables or tables[0].shape[1] == 1
        shared = walk.steps(tables, batch, first_head, row_tile) if alike else None
        return cls(walk, tables, batch, first_head, group, row_tile, shared, nothing)

    def steps(self, member: Any) -> Steps:
        """The visits of one head."""
        if self.shared is not None:
            return self.shared
        return self.walk.steps(self.tables, self.batch, self.first_head + member, self.row_tile)

    @property
    def total(self) -> Any:
        if self.shared is not None:
            # A loop whose length the compiler knows may be unrolled or dropped, and ``opaque_zero`` with it.
            return self.shared.total * self.group + self.nothing
        return lax.fori_loop(0, self.group, lambda member, total: total + self.steps(member).total, jnp.int32(0))

    @property
    def first(self) -> tuple[Any, Any]:
        return jnp.int32(0), jnp.int32(0)

    def after(self, visit: tuple[Any, Any]) -> tuple[Any, Any]:
        member, number = visit
        if self.group == 1:
            return member, number + 1
        last = number + 1 == self.steps(member).total
        return jnp.where(last, member + 1, member), jnp.where(last, 0, number + 1)

    def head(self, visit: tuple[Any, Any]) -> Any:
        return self.first_head if self.group == 1 else self.first_head + visit[0]

    def q_start(self, visit: tuple[Any, Any]) -> Any:
        return self.steps(visit[0]).tile(visit[1]) * BLOCK

    def masked(self, visit: tuple[Any, Any]) -> Any:
        return visit[1] < self.steps(visit[0]).masked


def _apart(options: ScoreOptions) -> bool:
    """Whether d_out and dP are multiplied by different things: see ``_probabilities``."""
    return options.soft_cap is not None or options.dropout_prob > 0


def _probabilities(
    logits: Any, shift: Any, options: ScoreOptions, arrays: ScoreArrays, place: Place, masked: Any, dtype: Any
) -> tuple[Any, Any]:
    """``(weights, factors)``: what d_out is multiplied by for dV, short of dropout's scale, and what dP is for dS.

    Factors have the derivative of the soft cap in them, and a negative sign where dropout drops.

    Args:
      shift: what is added in the exponent of two; None if it is in the logits.
      masked: a bool, or a scalar that is decided on the device.
    """
    if not options.plain:
        logits, _ = biased_and_capped(logits, options, arrays, place)
    logits = masked_logits(logits, masked, options, arrays, place)
    exponents = logits * options.multiplier
    weights = factors = jnp.exp2(exponents if shift is None else exponents + shift)
    if options.soft_cap is not None:
        # Had from the capped logits, of which −∞ is a masked one: a second tile of registers over the mask is spilled.
        tanh = jnp.maximum(logits * (1 / options.soft_cap), -1.0)
        factors = factors * (1 - tanh * tanh)
    if options.dropout_prob:
        # Narrowed first: the generator takes the registers.
        weights, factors = weights.astype(dtype), factors.astype(dtype)
        keep = kept(options, arrays, place)
        weights, factors = jnp.where(keep, weights, jnp.zeros((), dtype)), jnp.where(keep, factors, -factors)
    return weights, factors


def _score_gradients(factors: Any, d_probabilities: Any, minus_delta: Any, options: ScoreOptions) -> Any:
    """dS; ``minus_delta`` is None if the product for dP started from it, which dropout's scale does not allow."""
    if minus_delta is None:
        return factors * d_probabilities
    factors = factors.astype(jnp.float32)
    dropped = jnp.where(factors < 0, 0.0, d_probabilities * (1 / (1 - options.dropout_prob)))
    return jnp.abs(factors) * (dropped + minus_delta)


def _again(item: Any, step: Any) -> Any:
    """The item as if it were another in each step, so that what follows from it takes no registers over the loop."""
    return item + opaque_zero(step + item)


def wide_key_value_kernel(
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    statistics: Any,
    d_query: Any,
    order: Any,
    tables: Any,
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    walk: Walk,
    params: WideBackwardParams,
    d_bias: Any = None,
    bias_gradient: BiasGradient | None = None,
) -> tuple[Any, Any]:
    """``(d_key, d_value)``; adds to ``d_query``, a float32 reference of ``d_query_shape``, or None if deterministic.

    Args:
      d_bias: a reference to zeros as ``bias_gradient`` wants them.
      statistics: ``[batch, heads, 2, padded q_length]`` float32, what scores and the gradients of probabilities start
        from, so that to subtract it costs nothing: lse in the unit of ``ScoreOptions.multiplier``, −∞ where a row sees
        nothing or does not exist; and the row sums of ``d_out · out`` less the gradient of lse. Both negated.
    """
    batch, _, heads, head_dim = query.shape
    kv_length, kv_heads, value_dim = value.shape[1:]
    group = heads // kv_heads
    dtype = query.dtype
    plan = WideBackwardPlan(params, head_dim, value_dim, dtype, bias_gradient)
    if params.deterministic != (d_query is None):
        raise ValueError(f"{params.deterministic=} and a place for dQ exclude each other")
    if plan.reason:
        raise ValueError(f"{params} {plan.reason}")
    fused, ahead, apart = not params.deterministic, params.d_out_stages > 1, _apart(options)
    # Where it may be, an operand made on the way is one in registers, which the shared memory need not feed.
    in_registers = not fused and not apart
    split = plan.d_query_split
    kv_tiles = walk.extent.row_tiles
    of_columns = tile_layout().reduce(0)
    accumulator = plgpu.ACC(_SHAPE, jnp.float32)
    operands = (query, key, value, d_out, statistics, d_query, d_bias, order, tables, arrays)
    leaves, structure = jax.tree.flatten(operands)

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, stat_ref, dq_ref, d_bias_ref, order_ref, table_refs, array_refs = (
            jax.tree.unflatten(structure, refs[: len(leaves)])
        )
        dk_ref, dv_ref, *scratch = refs[len(leaves) :]
        rings, others = bind_rings(plan.rings, scratch)
        k_ring, v_ring, q_ring, do_ring, shift_ring, delta_ring, factor_ring = rings[:7]
        ds_ring = rings[-1]
        more = list(others)
        weights_smem = more.pop(0) if apart else factor_ring.smem
        staging_smem: Any = more.pop(0) if fused else None
        bias_smem: Any = more.pop(0) if bias_gradient is not None and bias_gradient.added else None

        def current_item() -> Any:
            return order_ref[lax.axis_index("program")]

        def program(item: Any) -> tuple[Any, Any, Any, _Visits]:
            """Batch element, kv head, first key and visits.

            Worked out anew by each role, and by the consumers in each step, where they would be spilled otherwise.
            """
            b, kv_head, kv_tile = decode_tile_index(item, kv_tiles, kv_heads)
            nothing = opaque_zero(jnp.int32(0) + item)
            visits = _Visits.of(walk, table_refs, b, kv_head * group, group, kv_tile, nothing)
            return b, kv_head, kv_tile * BLOCK, visits

        def row_statistic(ring: Any, step: Any) -> Any:
            """A step's statistic of its queries, spread over the tile.

            Between reading it and its release comes a commit: TMA writes the stage next, and knows no other order.
            """
            ring.load_from_shared(step)
            values = plgpu.load(ring.smem.at[ring.slot(step)], layout=of_columns)
            return lax.broadcast_in_dim(values, _SHAPE, [1])

        def add_to_d_query(part: Any, item: Any, visit: Any, role: int, begin: int) -> None:
            b, _, _, visits = program(item)
            head, strips = visits.head(visit), params.d_query_columns // STRIP
            # Of the tile's rows of sums: a strip is two.
            first, count = lax.div(visits.q_start(visit) * head_dim, jnp.int32(ROW)), strips * STRIP * BLOCK // ROW
            for column in range(begin, begin + part.shape[1], params.d_query_columns):
                buffer = column // params.d_query_columns % params.d_query_buffers
                staging = staging_smem.at[role, buffer]
                plgpu.wait_smem_to_gmem(params.d_query_buffers - 1, wait_read_only=True)
                store_strips(staging, part[:, column - begin : column - begin + strips * STRIP])
                plgpu.commit_smem()
                target = dq_ref.at[b, head, pl.ds(first + column * BLOCK // ROW, count)]
                plgpu.copy_smem_to_gmem(staging.reshape(count, ROW), target, reduction_op="add")

        def value_role() -> None:
            """Scores, probabilities, dV and the first columns of dQ."""
            plgpu.set_max_registers(REGISTERS[CONSUMERS][0], action="increase")
            item = current_item()
            _, _, _, visits = program(item)
            steps = visits.total

            def issue_scores(scores: Any, step: Any) -> None:
                if options.plain:
                    scores[...] = row_statistic(shift_ring, step)
                q_ring.load_from_shared(step)
                keys = k_ring.smem.at[opaque_zero(step + item)]
                plgpu.wgmma(scores, keys, q_ring.get_mma_tile(step, transposed=True))

            def weigh(scores: Any, step: Any, visit: Any) -> tuple[Any, Any]:
                shift = None if options.plain else row_statistic(shift_ring, step) * options.multiplier
                b, _, kv_start, visits = program(_again(item, step))
                place = Place(b, visits.head(visit), visits.q_start(visit), kv_start, _SHAPE, 1)
                masked = visits.masked(visit) if walk.may_mask else False
                weights, factors = _probabilities(scores, shift, options, array_refs, place, masked, dtype)
                # Registers that are an operand must not be written while a product runs: see below.
                return weights if in_registers else weights.astype(dtype), factors.astype(dtype)

            def publish(step: Any, weights: Any, factors: Any) -> Any:
                """Hands over the factors; returns what the loop carries to the product for dV."""
                weights = weights.astype(dtype)
                if apart:
                    weights_smem[0] = weights
                factor_ring.copy_to_shared(step, factors if apart else weights)
                shift_ring.release(step)
                return weights if in_registers else jnp.int32(0)

            def accumulate(dv: Any) -> Any:
                def issue_dv(step: Any, weights: Any) -> None:
                    do_ring.load_from_shared(step)
                    plgpu.wgmma(dv, weights if in_registers else weights_smem.at[0], do_ring.get_mma_tile(step))

                def first(scores: Any) -> tuple[Any, Any]:
                    issue_scores(scores, jnp.int32(0))
                    return weigh(scores[...], jnp.int32(0), visits.first)

                def d_query_part(step: Any, dq: Any) -> Any:
                    keys = k_ring.smem.at[opaque_zero(step + item), :, pl.ds(0, split)]
                    plgpu.wgmma(dq, ds_ring.get_mma_tile(step, True), keys)
                    return dq[...]

                def add_own_columns(step: Any, visit: Any) -> None:
                    if not fused:
                        return
                    ds_ring.load_from_shared(step)
                    part = functools.partial(d_query_part, step)
                    dq = pl.run_scoped(part, plgpu.ACC((BLOCK, split), jnp.float32))
                    ds_ring.release(step)
                    add_to_d_query(dq, _again(item, step), visit, 0, 0)

                def one(step: Any, carry: Any) -> Any:
                    visit, weights = carry
                    following = program(_again(item, step))[-1].after(visit)

                    def products(scores: Any) -> Any:
                        if ahead:
                            issue_scores(scores, step + 1)
                            issue_dv(step, weights)
                            logits = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                        else:
                            # The only stage of d_out is wanted back.
                            issue_dv(step, weights)
                            issue_scores(scores, step + 1)
                            plgpu.wgmma_wait(1)
                            do_ring.release(step)
                            logits = scores[...]
                        return weigh(logits, step + 1, following)

                    made = pl.run_scoped(products, accumulator)
                    plgpu.wgmma_wait(0)
                    if ahead:
                        do_ring.release(step)
                    # Not before that wait: ptxas serialises wgmma where a later one's operand in registers is made
                    # while one is in flight (C7513).
                    weights = publish(step + 1, *made)
                    add_own_columns(step, visit)
                    return following, weights

                k_ring.load_from_shared(0)
                weights = publish(jnp.int32(0), *pl.run_scoped(first, accumulator))
                last, weights = lax.fori_loop(0, steps - 1, one, (visits.first, weights))
                issue_dv(steps - 1, weights)
                add_own_columns(steps - 1, last)
                plgpu.wgmma_wait(0)
                do_ring.release(steps - 1)
                return dv[...]

            dv = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, value_dim), jnp.float32))
            if options.dropout_prob:
                dv = dv * (1 / (1 - options.dropout_prob))
            # The other role has taken the last factors, so its last product with d_out is over.
            factor_ring.drain(steps - 1)
            b, kv_head, kv_start, _ = program(_again(item, steps))
            store(do_ring, steps - 1, dv, dv_ref.at[b, pl.ds(kv_start, BLOCK), kv_head])

        def key_role() -> None:
            """Gradients of probabilities and scores, dK and the rest of dQ's columns."""
            plgpu.set_max_registers(REGISTERS[CONSUMERS][0], action="increase")
            item = current_item()
            _, _, _, visits = program(item)
            steps = visits.total
            d_query_part = plgpu.ACC((BLOCK, max(head_dim - split, 8)), jnp.float32)
            own_columns = fused and split < head_dim

            def issue_dp(dp: Any, step: Any) -> None:
                if not options.dropout_prob:
                    dp[...] = row_statistic(delta_ring, step)
                do_ring.load_from_shared(step)
                plgpu.wgmma(dp, v_ring.smem.at[opaque_zero(step + item)], do_ring.get_mma_tile(step, transposed=True))

            def store_bias(ds: Any, step: Any, visit: Any) -> None:
                if bias_gradient is None:
                    return
                b, _, kv_start, visits = program(_again(item, step))
                place = Place(b, visits.head(visit), visits.q_start(visit), kv_start, _SHAPE, 1)
                bias_gradient.store(d_bias_ref, None if bias_smem is None else bias_smem.at[0], ds, place)

            def finish(dp: Any, step: Any, visit: Any) -> Any:
                """dS from dP, whose product is over."""
                do_ring.release(step)
                minus_delta = row_statistic(delta_ring, step) if options.dropout_prob else None
                if not fused:
                    plgpu.commit_smem()
                    delta_ring.release(step)
                factor_ring.load_from_shared(step)
                factors = plgpu.load(factor_ring.smem.at[factor_ring.slot(step)], layout=tile_layout()).astype(
                    jnp.float32
                )
                ds = _score_gradients(factors, dp, minus_delta, options)
                factor_ring.release(step)
                if not fused:
                    return ds
                store_bias(ds, step, visit)
                return ds.astype(dtype)

            def alone(step: Any, visit: Any, dp: Any) -> Any:
                issue_dp(dp, step)
                return finish(dp[...], step, visit)

            def publish(step: Any, ds: Any, visit: Any) -> Any:
                """Hands dS to both products for dQ; returns what the loop carries to the one for dK."""
                if not fused:
                    # Here, where no product is in flight: rounded for the bias, dS is the next one's operand too.
                    store_bias(ds, step, visit)
                    return ds.astype(dtype)
                ds = ds.astype(dtype)
                ds_ring.copy_to_shared(step, ds)
                delta_ring.release(step)
                return jnp.int32(0)

            def issue_own_columns(dq: Any, step: Any) -> None:
                rest = pl.ds(split, head_dim - split)
                plgpu.wgmma(dq, ds_ring.get_mma_tile(step, True), k_ring.smem.at[opaque_zero(step + item), :, rest])

            def accumulate(dk: Any) -> Any:
                def issue_dk(step: Any, ds: Any) -> None:
                    q_ring.load_from_shared(step)
                    plgpu.wgmma(dk, ds_ring.get_mma_tile(step) if fused else ds, q_ring.get_mma_tile(step))

                def one_ahead(step: Any, carry: Any) -> Any:
                    """dP of the next step and dK of this one; the next dS is made under the latter."""
                    visit, ds = carry

                    def products(dp: Any) -> Any:
                        issue_dp(dp, step + 1)
                        issue_dk(step, ds)
                        next_visit = None if bias_gradient is None else program(_again(item, step))[-1].after(visit)
                        return finish(plgpu.wgmma_accumulator_load(dp, wait_n=1), step + 1, next_visit)

                    def own(dq: Any) -> Any:
                        issue_own_columns(dq, step)
                        return dq[...]

                    made = pl.run_scoped(products, accumulator)
                    plgpu.wgmma_wait(0)
                    q_ring.release(step)
                    dq = pl.run_scoped(own, d_query_part) if own_columns else None
                    next_visit = None if bias_gradient is None else program(_again(item, step))[-1].after(visit)
                    following = publish(step + 1, made, next_visit)
                    if own_columns:
                        add_to_d_query(dq, _again(item, step), visit, 1, split)
                    return program(_again(item, step))[-1].after(visit), following

                def one(step: Any, carry: Any) -> Any:
                    """dP, then dQ and dK of one step."""
                    visit, _ = carry
                    ds = publish(step, pl.run_scoped(functools.partial(alone, step, visit), accumulator), visit)
                    last_products(step, visit, ds)
                    q_ring.release(step)
                    return program(_again(item, step))[-1].after(visit), jnp.int32(0)

                def last_products(step: Any, visit: Any, ds: Any) -> None:
                    def products(dq: Any) -> Any:
                        issue_own_columns(dq, step)
                        issue_dk(step, ds)
                        return plgpu.wgmma_accumulator_load(dq, wait_n=1)

                    if own_columns:
                        add_to_d_query(pl.run_scoped(products, d_query_part), _again(item, step), visit, 1, split)
                    else:
                        issue_dk(step, ds)
                    plgpu.wgmma_wait(0)

                v_ring.load_from_shared(0)
                if fused:
                    k_ring.load_from_shared(0)
                if not ahead:
                    lax.fori_loop(0, steps, one, (visits.first, jnp.int32(0)))
                    return dk[...]
                first = functools.partial(alone, jnp.int32(0), visits.first)
                ds = publish(jnp.int32(0), pl.run_scoped(first, accumulator), visits.first)
                last, ds = lax.fori_loop(0, steps - 1, one_ahead, (visits.first, ds))
                last_products(steps - 1, last, ds)
                q_ring.release(steps - 1)
                return dk[...]

            dk = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, head_dim), jnp.float32)) * options.scale
            b, kv_head, kv_start, _ = program(_again(item, steps))
            # The last scores came before the last dS: nothing reads queries any more.
            store(q_ring, steps - 1, dk, dk_ref.at[b, pl.ds(kv_start, BLOCK), kv_head])

        def store(ring: Any, step: Any, gradient: Any, target: Any) -> None:
            """Writes a gradient by way of a stage that is no longer needed."""
            stage = ring.smem.at[ring.slot(step)]
            stage[...] = gradient.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, target)
            plgpu.wait_smem_to_gmem(0)

        def producer_role() -> None:
            plgpu.set_max_registers(REGISTERS[CONSUMERS][1], action="decrease")
            b, kv_head, kv_start, visits = program(current_item())
            kv_rows = pl.ds(kv_start, BLOCK)
            k_ring.load_from_dram(0, k_ref.at[b, kv_rows, kv_head])

            def load(step: Any, visit: Any) -> Any:
                head, rows = visits.head(visit), pl.ds(visits.q_start(visit), BLOCK)
                shift_ring.load_from_dram(step, stat_ref.at[b, head, 0, rows])
                q_ring.load_from_dram(step, q_ref.at[b, rows, head])

                @pl.when(step == 0)
                def _() -> None:
                    v_ring.load_from_dram(0, v_ref.at[b, kv_rows, kv_head])

                delta_ring.load_from_dram(step, stat_ref.at[b, head, 1, rows])
                do_ring.load_from_dram(step, do_ref.at[b, rows, head])
                return visits.after(visit)

            lax.fori_loop(0, visits.total, load, visits.first)

        for warpgroup, role in enumerate((value_role, key_role, producer_role)):
            pl.when(lax.axis_index("warpgroup") == warpgroup)(role)

    scratch = ring_scratch(plan.rings)
    if apart:
        scratch.append(plan.weights.scratch(1))
    if fused:
        scratch.append(plgpu.SMEM(plan.staging_shape, jnp.float32))
    if bias_gradient is not None and bias_gradient.added:
        scratch.append(bias_gradient.staging(1))
    kernel = warpgroup_kernel(
        body,
        (
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, kv_length, kv_heads, value_dim), dtype),
        ),
        scratch,
        batch * kv_heads * kv_tiles,
        CONSUMERS + 1,
    )
    return kernel(*leaves)


def wide_query_kernel(
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    out: Any,
    statistics: Any,
    order: Any,
    tables: Any,
    arrays: ScoreArrays,
    *,
    options: ScoreOptions,
    walk: Walk,
    params: WideBackwardParams,
) -> Any:
    """``d_query`` by a walk over the keys, in a fixed order; arguments as for ``query_kernel``.

    Each of two warpgroups holds 64 rows of dQ. The walk has rows of ``query_rows`` and columns of ``block_k``.
    """
    batch, q_length, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    group = heads // kv_heads
    dtype, block_q = query.dtype, params.query_rows
    plan = WideBackwardPlan(params, head_dim, value_dim, dtype)
    q_tiles = walk.extent.row_tiles
    # What else is done to a tile takes the registers that a second tile in flight would need.
    light = options.plain and not options.dropout_prob
    accumulator = plgpu.ACC(_SHAPE, jnp.float32)
    leaves, structure = jax.tree.flatten((query, key, value, d_out, out, statistics, order, tables, arrays))

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, do_ref, out_ref, stat_ref, order_ref, table_refs, array_refs = jax.tree.unflatten(
            structure, refs[: len(leaves)]
        )
        dq_ref, *scratch = refs[len(leaves) :]
        (q_ring, do_ring, k_ring, v_ring), _ = bind_rings(plan.query_rings, scratch)
        # The rows of ``out`` come first, by a ring that has both stages at once where they fit.
        if head_dim == value_dim:
            out_ring, k_ring = k_ring, dataclasses.replace(k_ring, offset=CONSUMERS)
        else:
            out_ring, v_ring = v_ring, dataclasses.replace(v_ring, offset=CONSUMERS)
        warpgroup = lax.axis_index("warpgroup")

        def current_item() -> Any:
            return order_ref[lax.axis_index("program")]

        def program(item: Any) -> tuple[Any, Any, Any, Steps]:
            """Batch element, head, first query and visits."""
            b, h, q_tile = decode_tile_index(item, q_tiles, heads)
            return b, h, q_tile * block_q, walk.steps(table_refs, b, h, q_tile)

        def consume() -> None:
            plgpu.set_max_registers(REGISTERS[CONSUMERS][0], action="increase")
            item = current_item()
            steps = program(item)[-1]

            def needs_mask(step: Any) -> Any:
                return step < program(_again(item, step))[-1].masked if walk.may_mask else False

            def statistic(row: int, item: Any) -> Any:
                b, h, q_start, _ = program(item)
                rows = pl.ds(q_start + warpgroup * BLOCK, BLOCK)
                return statistic_of_rows(stat_ref, b, h, row, rows)

            def spread(x: Any) -> Any:
                return lax.broadcast_in_dim(x, _SHAPE, [0])

            def complete_statistics() -> None:
                """Stores the gradient of lse less the row sums of this warpgroup."""
                do_ring.load_from_shared(warpgroup)
                for i in range(CONSUMERS):
                    out_ring.load_from_shared(i)

                    def store(i: int = i) -> None:
                        b, h, q_start, _ = program(item)
                        outs = out_ring.smem.at[out_ring.slot(i)]
                        sums = sums_of_products(outs, do_ring.smem.at[i], do_ring.plan.tile)
                        minus_delta = completed(statistic(0, item), statistic(1, item), sums)
                        store_unoptimised(stat_ref.at[b, h, 1, pl.ds(q_start + i * BLOCK, BLOCK)], minus_delta)

                    pl.when(warpgroup == i)(store)
                    plgpu.commit_smem()  # threads have read what TMA writes next
                    out_ring.release(i)

            complete_statistics()
            # Read again in each step where registers are short.
            of_rows = (statistic(0, item) * options.multiplier, statistic(1, item)) if light else None

            def shift(step: Any) -> Any:
                return spread(of_rows[0] if of_rows else statistic(0, _again(item, step)) * options.multiplier)

            def minus_delta(step: Any) -> Any:
                return spread(of_rows[1] if of_rows else statistic(1, _again(item, step)))

            def issue_scores(scores: Any, step: Any) -> None:
                k_ring.load_from_shared(step)
                queries = q_ring.smem.at[warpgroup + opaque_zero(step + item)]
                plgpu.wgmma(scores, queries, k_ring.get_mma_tile(step, transposed=True))

            def issue_dp(dp: Any, step: Any) -> None:
                v_ring.load_from_shared(step)
                d_outs = do_ring.smem.at[warpgroup + opaque_zero(step + item)]
                plgpu.wgmma(dp, d_outs, v_ring.get_mma_tile(step, transposed=True))

            def weigh(logits: Any, step: Any, masked: Any) -> Any:
                b, h, q_start, steps = program(_again(item, step))
                place = Place(b, h, q_start + warpgroup * BLOCK, steps.tile(step) * BLOCK, _SHAPE, 0)
                return _probabilities(logits, shift(step), options, array_refs, place, masked, dtype)[1]

            def together(step: Any, scores: Any, dp: Any, *, masked: Any, other: Any = None) -> Any:
                """dS with both products at once; ``other`` issues one that is still in flight afterwards."""
                dp[...] = minus_delta(step)
                issue_scores(scores, step)
                issue_dp(dp, step)
                if other is not None:
                    other()
                behind = 0 if other is None else 1
                factors = weigh(plgpu.wgmma_accumulator_load(scores, wait_n=behind + 1), step, masked)
                d_probabilities = plgpu.wgmma_accumulator_load(dp, wait_n=behind)
                v_ring.release(step)
                return factors * d_probabilities

            def in_turn(step: Any, masked: Any) -> Any:
                def first(scores: Any) -> Any:
                    issue_scores(scores, step)
                    return weigh(scores[...], step, masked)

                def second(dp: Any) -> Any:
                    if not options.dropout_prob:
                        dp[...] = minus_delta(step)
                    issue_dp(dp, step)
                    d_probabilities = dp[...]
                    v_ring.release(step)
                    return d_probabilities

                factors = pl.run_scoped(first, accumulator)
                dp = pl.run_scoped(second, accumulator)
                return _score_gradients(factors, dp, minus_delta(step) if options.dropout_prob else None, options)

            def accumulate(dq: Any) -> Any:
                def issue_dq(step: Any, ds: Any) -> None:
                    plgpu.wgmma(dq, ds, k_ring.get_mma_tile(step))

                def alone(step: Any, masked: Any) -> Any:
                    # Two products at once want more registers than a mask leaves.
                    if not light or masked:
                        return in_turn(step, masked).astype(dtype)
                    both = functools.partial(together, step, masked=masked)
                    return pl.run_scoped(both, accumulator, accumulator).astype(dtype)

                def one(step: Any, _: Any, masked: Any) -> None:
                    issue_dq(step, alone(step, masked))
                    plgpu.wgmma_wait(0)
                    k_ring.release(step)

                def one_ahead(step: Any, ds: Any) -> Any:
                    other = functools.partial(issue_dq, step, ds)
                    both = functools.partial(together, step + 1, masked=False, other=other)
                    following = pl.run_scoped(both, accumulator, accumulator)
                    plgpu.wgmma_wait(0)
                    k_ring.release(step)
                    # Not before that wait: ptxas serialises wgmma where a later one's operand in registers is made
                    # while one is in flight (C7513).
                    return following.astype(dtype)

                q_ring.load_from_shared(warpgroup)
                if not light:
                    lax.fori_loop(0, steps.total, lambda step, _: one(step, _, needs_mask(step)), None)
                    return dq[...]
                begin: Any = jnp.int32(0)
                if walk.may_mask:
                    # One after another: overlapped, they would need more registers than there are.
                    begin = jnp.maximum(steps.masked - 1, 0)
                    lax.fori_loop(0, begin, functools.partial(one, masked=True), None)
                ds = alone(begin, walk.may_mask)
                ds = lax.fori_loop(begin, steps.total - 1, one_ahead, ds)
                issue_dq(steps.total - 1, ds)
                plgpu.wgmma_wait(0)
                k_ring.release(steps.total - 1)
                return dq[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((BLOCK, head_dim), jnp.float32)) * options.scale
            stage = q_ring.smem.at[warpgroup]
            stage[...] = dq.astype(dtype)
            plgpu.commit_smem()
            b, h, q_start, _ = program(_again(item, steps.total))
            rows = pl.ds(q_start + warpgroup * BLOCK, BLOCK)
            plgpu.copy_smem_to_gmem(stage, dq_ref.at[b, rows, h])
            plgpu.wait_smem_to_gmem(0)

        def produce() -> None:
            plgpu.set_max_registers(REGISTERS[CONSUMERS][1], action="decrease")
            b, h, q_start, steps = program(current_item())
            kv_head = lax.div(h, jnp.int32(group))

            def load_rows(ring: Any, ref: Any) -> None:
                for i in range(CONSUMERS):
                    ring.load_from_dram(i, ref.at[b, pl.ds(q_start + i * BLOCK, BLOCK), h])

            def load(step: Any, _: Any) -> None:
                columns = pl.ds(steps.tile(step) * BLOCK, BLOCK)
                k_ring.load_from_dram(step, k_ref.at[b, columns, kv_head])
                v_ring.load_from_dram(step, v_ref.at[b, columns, kv_head])

            load_rows(do_ring, do_ref)
            load_rows(out_ring, out_ref)
            load_rows(q_ring, q_ref)
            lax.fori_loop(0, steps.total, load, None)

        pl.when(warpgroup < CONSUMERS)(consume)
        pl.when(warpgroup == CONSUMERS)(produce)

    out_type, programs = jax.ShapeDtypeStruct((batch, q_length, heads, head_dim), dtype), batch * heads * q_tiles
    kernel = warpgroup_kernel(body, out_type, ring_scratch(plan.query_rings), programs, CONSUMERS + 1)
    return kernel(*leaves)
