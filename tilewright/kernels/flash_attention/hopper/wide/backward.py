"""The backward pass on Hopper where a head dim is beyond 128: dK and dV of 64 keys per work item, in two warpgroups.

At head_dim 256 an accumulator of 64 rows takes 128 registers of a thread, so one warpgroup holds either dK or dV. A
work item is a tile of 64 keys of a key head. A CTA (a Pallas program) is persistent, unless it adds up dQ, and has
three warpgroups: one computes S, P and dV, one dP, dS and dK, and one is the producer. P and dS go from one to the
other through rings in shared memory. Each of the first two computes a part of the columns of dQ and adds it in global
memory by TMA reductions; or (``deterministic``) ``wide_query_kernel`` computes dQ. A step is a Q iteration: a tile of
64 queries of one of the heads with these keys.

======  ===============================================  ==========================  ===================================
symbol  meaning                                          shape                       where it lives
======  ===============================================  ==========================  ===================================
K, V    keys and values of an item                       [64, ·_dim]                 shared, ``k``, ``v``
Q, dO   queries and gradient of the output, of a step    [64, ·_dim]                 shared, ``q``, ``d_out``
lse     log-sum-exp of the rows; −lse starts S           [64] float32                shared, ``minus_lse``
delta   rowsum(dO ∘ O) − d_lse; −delta starts dP         [64] float32                shared, ``minus_delta``
S       KQᵀ − lse                                        [64, 64] float32            registers, accumulator
P       exp2(multiplier · S), 0 where masked             [64, 64]                    shared, ``p`` (and ``p_dv``), or
                                                                                     registers; operand A of dV
dP      VdOᵀ − delta                                     [64, 64] float32            registers, accumulator
dS      P ∘ dP                                           [64, 64]                    shared, ``ds``, or registers
                                                                                     (deterministic); operand A of dK
dV      sum of P·dO over the steps                       [64, value_dim] float32     registers of the dV warpgroup
dK      sum of dS·Q over the steps                       [64, head_dim] float32      registers of the dK warpgroup
dQ      dSᵀ·K of a step, a part of the columns           [64, ≤ head_dim] float32    registers; shared, ``dq``
        its sum, the dQ accumulator                      ``dq_accumulator_shape``    global
======  ===============================================  ==========================  ===================================

Step i with two stages of dO; time runs to the right, and what stands below each other overlaps::

    producer       lse Q(i+2)  delta dO(i+2)   (as far ahead as the rings have stages)
    dV warpgroup   MMA  S(i+1)   dV(i)           dQ(i)[:, :split]
                   ALU          P(i+1) -> p                      dQ -> dq, add
    dK warpgroup   MMA  dP(i+1)  dK(i)           dQ(i)[:, split:]
                   ALU           dS(i+1)                         dS(i+1) -> ds; dQ -> dq, add

P(i+1) is computed beside the MMA for dV(i), dS(i+1) beside that for dK(i). With one stage of dO the dK warpgroup does
one step after another, and the dV warpgroup releases dO before it computes P. With a bias or a soft cap −lse is added
behind them instead; with dropout, −delta behind its scale.

dV and dK leave through the stages of dO and Q of an item's last step. Their warpgroups release these in the next item,
beside its first MMA, when TMA has read them; the producer loads K, V and the first Q and dO of that item before.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.flash_attention.hopper.bias_gradient import AnyBiasGradient
from tilewright.kernels.flash_attention.hopper.call import BackwardCall, KeyValueResults
from tilewright.kernels.flash_attention.hopper.delta import MINUS_DELTA, MINUS_LSE
from tilewright.kernels.flash_attention.hopper.params import BLOCK, CONSUMERS, WideBackwardParams
from tilewright.kernels.flash_attention.hopper.schedule import Tables, TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import TileCoord, transposed
from tilewright.kernels.flash_attention.hopper.wide.context import WideContext, WideKeyValueOperands
from tilewright.kernels.flash_attention.hopper.wide.d_key import compute_dk
from tilewright.kernels.flash_attention.hopper.wide.d_value import compute_dv
from tilewright.kernels.flash_attention.hopper.wide.gradients import (
    DK_WARPGROUP,
    DV_WARPGROUP,
    PRODUCER,
    release_last_stage,
)
from tilewright.kernels.flash_attention.hopper.wide.plans import WIDE_TILE, WideBackwardPlan, WideKeyValueScratch
from tilewright.kernels.flash_attention.hopper.wide.scores import (
    QueryIteration,
    has_separate_ds_factor,
)
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import REGISTERS
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.schedule import ItemLists, operands_of, programs_of, run_warpgroup
from tilewright.kernels.pallas_types import Ref, Scalar


def wide_key_value_kernel(
    call: BackwardCall[WideBackwardParams],
    schedule: TileSchedule,
    tables: Tables | tuple[()],
    *,
    lists: ItemLists[np.ndarray],
    dq_accumulator: jax.Ref | None,
    d_bias: jax.Ref | None = None,
    bias_gradient: AnyBiasGradient | None = None,
) -> KeyValueResults[jax.Array]:
    """Computes dK and dV, and adds to ``dq_accumulator``.

    Args:
      lists: over tiles of keys.
      dq_accumulator: float32 of ``dq_accumulator_shape``; None if deterministic.
      d_bias: a reference to zeros, the array of ``bias_gradient``; None if the steps store all of it.
    """
    params, options, dtype = call.params, call.options, call.query.dtype
    batch, head_dim = call.query.shape[0], call.query.shape[3]
    kv_length, kv_heads, value_dim = call.value.shape[1:]
    plan = WideBackwardPlan(params, *call.padded_dims, dtype, bias_gradient, call.panelled, call.bias_dtype)
    if params.deterministic != (dq_accumulator is None):
        raise ValueError(f"a dQ accumulator is for kernels that are not deterministic, got {params.deterministic=}")
    if plan.reason:
        raise ValueError(f"{params} {plan.reason}")
    if call.parts.group % call.parts.parts:
        raise ValueError(f"parts of wide heads are all of one size, got {call.parts}")
    operands = WideKeyValueOperands[object](
        *call.operands,
        call.statistics,
        dq_accumulator,
        d_bias,
        operands_of(lists),
        tables,
        transposed(call.arrays, plan.stages_bias),
    )
    dims, rows = (head_dim, value_dim), kv_length
    if call.parts.parts > 1:
        # Stored from registers, as whole tiles: a stage of the rings has no place for float32.
        dims, rows, dtype = call.padded_dims, schedule.extent.row_tiles * BLOCK, jnp.dtype(jnp.float32)
    d_key, d_value = (jax.ShapeDtypeStruct((batch, rows, kv_heads * call.parts.parts, dim), dtype) for dim in dims)
    results = KeyValueResults(d_key, d_value)
    if bias_gradient is not None and d_bias is None:
        results = results._replace(d_bias=jax.ShapeDtypeStruct(bias_gradient.shape, bias_gradient.dtype))

    def body(
        operands: WideKeyValueOperands[Ref], results: KeyValueResults[Ref], scratch: WideKeyValueScratch[Ring, Ref]
    ) -> None:
        ctx = WideContext(plan, options, schedule, kv_heads, call.parts, operands, results, scratch)
        run, registers = functools.partial(run_warpgroup, operands.item_lists), REGISTERS[CONSUMERS]

        # The last gradient leaves through a stage, too, and no item follows that would release it: it is released at
        # the end, when TMA has read it.
        def consume(role: Callable[..., Scalar], output: Ring) -> None:
            work = functools.partial(role, ctx)
            run(work, registers.consumer, "increase", lambda steps: release_last_stage(output.after(steps)))

        warpgroup, load = lax.axis_index("warpgroup"), functools.partial(load_item, ctx)
        # Each consumer with the ring through whose last stage its gradient leaves.
        pl.when(warpgroup == DV_WARPGROUP)(functools.partial(consume, compute_dv, scratch.d_out))
        pl.when(warpgroup == DK_WARPGROUP)(functools.partial(consume, compute_dk, scratch.q))
        pl.when(warpgroup == PRODUCER)(functools.partial(run, load, registers.producer, "decrease"))

    scratch = plan.scratch(has_separate_ds_factor(options))
    return run_kernel(
        body, operands, results, scratch, role="d_key_value", num_ctas=programs_of(lists), warpgroups=CONSUMERS + 1
    )


# Each role does one work item: ``after = role(ctx, item_index, item, first)`` counts the steps of the CTA.


def load_item(ctx: WideContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Role of the producer: loads K and V of a work item, and Q, dO and the statistics of its steps."""
    ctx, work = ctx.in_item(item_index, first), ctx.decode(item)
    b, iterations, refs, rings = work.batch, work.iterations, ctx.operands, ctx.scratch
    kv_head, kv_rows = ctx.parts.key_head(work.key_part), pl.ds(work.kv_start, BLOCK)
    rings.k.load_from_dram(0, refs.key.at[b, kv_rows, kv_head])

    def load_step(step: Scalar, iteration: QueryIteration) -> QueryIteration:
        head, rows = iterations.head(iteration), pl.ds(iterations.q_start(iteration), BLOCK)
        # In the order of use: −lse and Q for S, then −delta and dO for dP, which comes later.
        rings.minus_lse.load_from_dram(step, refs.statistics.at[b, head, MINUS_LSE, rows])
        rings.q.load_from_dram(step, refs.query.at[b, rows, head])

        @pl.when(step == 0)
        def _() -> None:
            # Behind K and the first Q, which S needs earlier.
            rings.v.load_from_dram(0, refs.value.at[b, kv_rows, kv_head])

        rings.minus_delta.load_from_dram(step, refs.statistics.at[b, head, MINUS_DELTA, rows])
        rings.d_out.load_from_dram(step, refs.d_out.at[b, rows, head])
        if ctx.bias_tiles is not None:
            coord = TileCoord(b, head, iterations.q_start(iteration), work.kv_start, WIDE_TILE, 0)
            ctx.bias_tiles.load(step, 0, refs.arrays.bias, coord)
        return iterations.after(iteration)

    steps = iterations.total
    lax.fori_loop(0, steps, load_step, iterations.first)
    return first + steps
