"""Turns of the consumers at the tensor cores.

What a consumer does besides its MMAs then runs beside the MMAs of the others. Left to themselves consumers would share
the tensor cores until all have done their MMAs, and then do the rest at the same time.

A turn is a phase of the barrier of the consumer that has it, which the one before completes, the first time the
producer. The turn that is passed on last is taken, too: every phase of a barrier has been waited for at the end.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.types import Scalar


def wait_turn(context: Any) -> None:
    """Waits for this consumer's turn."""
    plgpu.barrier_wait(context.scratch.turns.at[context.warpgroup])


def pass_turn(context: Any) -> None:
    """Gives the turn to the next consumer."""
    following = lax.rem(context.warpgroup + 1, jnp.int32(context.plan.params.consumers))
    # On the other's barrier: a consumer waits on its own only, so each parity has a single reader.
    plgpu.barrier_arrive(context.scratch.turns.at[following])


def take_last_turn(context: Any, items: Scalar) -> None:
    """Takes the turn that was passed on last: with items of their own, after so many; else all end a round."""
    params = context.plan.params
    owner = lax.rem(jnp.asarray(items, jnp.int32), jnp.int32(params.consumers)) if params.turns else 0
    pl.when(context.warpgroup == owner)(lambda: wait_turn(context))
