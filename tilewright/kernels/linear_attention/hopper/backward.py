"""The way back through the chunks of 64 tokens on Hopper: the gradients of states and of what tokens write.

It is the mirror of ``forward``, whose symbols and producer it has: a CTA goes from the last chunk of a sequence to the
first one, with the gradient of the state, transposed, in the accumulators of its consumers.

======  ======================================================  ===============  =======================================
symbol  meaning                                                 shape            where it lives
======  ======================================================  ===============  =======================================
dO      gradient of the output                                  [64, 64 of V]    SMEM, in ``tokens`` in place of V; its
                                                                                 transpose in registers
D       gradient of the state behind the chunk, float32         [64 of V, K]     accumulator; rounded in registers and,
                                                                                 for its store, in ``kept``
dU      Pᵀ dO + 2^(γ_C − γ) K D                                 [64 of V, 64]    two accumulators, transposed
dR      dU + Tᵀ dU: the gradient of R                           [64 of V, 64]    accumulator, transposed; for its store
                                                                                 in ``out``
======  ======================================================  ===============  =======================================

A step; time runs to the right::

    producer  QKᵀ of the next step · P to shared memory · loads of the step after it
    consumer  D·Kᵀ and dOᵀ·P | dU | dU·T | dR | D ← 2^γ_C D + (scale 2^γ dO)ᵀ·Q − (β 2^γ dR)ᵀ·K | -> store of D and dR

Without a delta rule dU is the gradient of V, and no product with K is taken from D.

The passes of a call with gradients and a delta rule, with their bytes and floating-point operations for each token and
head of values, where K = V = 128 and a head of keys has two heads of values::

    prepare_kernels    K and Q 256; T 256 and gates 32 written                             16384 and the inverse
    states             K 128, V 256, T 256, gates 32; S 512 and U 256 written              98304
    gradients          K and Q 256, dO 256, T 256, gates 32; D 512 and dR 256 written      163840
    tokens             S, D 1024, dO, U, dR 768, K and Q 256; dK and dQ 256 written        196608
    value_kernels      V and dR 512; dV 256 written                                        few

In all 6.6 KB: 6.9 GB or 1.45 ms at 4.8 TB/s for 32768 tokens of 32 heads, and 0.5 TFLOP, 0.63 ms at 790 TFLOP/s.
"""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.panels import mma
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.tiles import ROWS, across, row_layout, spread
from tilewright.kernels.linear_attention.chunks import CHUNK
from tilewright.kernels.linear_attention.hopper.forward import (
    ROWS_OF_K,
    ROWS_OF_Q,
    PassContext,
    gates_of,
    keep_state,
    of_columns,
    rows_of,
    run_chunks,
    store_tokens,
    values_of,
)
from tilewright.kernels.linear_attention.hopper.plan import (
    BETA,
    LAST,
    READ_KEY,
    READ_QUERY,
    TO_END,
    PassCall,
    PassOperands,
    PassResults,
)
from tilewright.kernels.pallas_types import Ref, Scalar

SHAPE = ROWS, CHUNK


def consume_back(ctx: PassContext, state: Ref, columns: pl.Slice, step: Scalar) -> None:
    """A step of a consumer, whose accumulator ``state`` is Dᵀ."""
    tokens, scores, solve = ctx.scratch.tokens, ctx.scratch.scores, ctx.scratch.solve
    assert scores is not None  # of all passes but that of states
    rounded = state[...].astype(ctx.dtype)
    tokens.load_from_shared(step)
    # It also says that rows behind the last token are cleared.
    scores.load_from_shared(step)
    gates = gates_of(tokens, step)
    above = lax.optimization_barrier(values_of(tokens, step))

    def update(acc: Ref) -> jax.Array:
        """The gradient of U."""
        to_end = lax.optimization_barrier(of_columns(gates, TO_END))
        mma(acc, rounded, rows_of(tokens, step, ROWS_OF_K).T)
        keep_state(ctx, rounded, columns, step)
        acc[...] = acc[...] * spread(to_end, SHAPE, 1)
        plgpu.wgmma(acc, above, scores.get_mma_tile(step))
        return acc[...]

    found = pl.run_scoped(update, plgpu.ACC(SHAPE, jnp.float32))
    scores.release(step)
    if solve is not None:
        found = solved_back(solve, found, step)
    above = (above.astype(jnp.float32) * spread(of_columns(gates, READ_QUERY), SHAPE, 1)).astype(ctx.dtype)
    erased = None
    if solve is not None:
        power = -of_columns(gates, BETA) * of_columns(gates, READ_KEY)
        erased = (found * spread(power, SHAPE, 1)).astype(ctx.dtype)
    found = found.astype(ctx.dtype)
    last = lax.optimization_barrier(plgpu.load(gates.at[LAST], layout=row_layout()))
    state[...] = state[...] * across(last, ctx.call.key_dim)
    mma(state, above, rows_of(tokens, step, ROWS_OF_Q))
    if erased is not None:
        mma(state, erased, rows_of(tokens, step, ROWS_OF_K))
    if ctx.call.stores_tokens:
        store_tokens(ctx, found, columns, step)
    plgpu.wgmma_wait(0)
    # Threads have read dO and the gates: a fence before TMA may write there.
    plgpu.commit_smem()
    tokens.release(step)


def solved_back(solve: Ring, found: jax.Array, step: Scalar) -> jax.Array:
    """The gradient of R, from that of U, both transposed."""
    low = found.astype(solve.smem.dtype)

    def update(acc: Ref) -> jax.Array:
        acc[...] = found
        for part in range(2):
            plgpu.wgmma(acc, low, solve.get_mma_tile(step).at[pl.ds(part * CHUNK, CHUNK)])
        return acc[...]

    solve.load_from_shared(step)
    found = pl.run_scoped(update, plgpu.ACC(SHAPE, jnp.float32))
    solve.release(step)
    return found


def chunk_gradients(operands: PassOperands[jax.Array], call: PassCall) -> PassResults[jax.Array]:
    """Computes the gradients of states and of what tokens write; see `PassOperands` and `PassResults`."""
    return run_chunks(operands, call, consume_back)
