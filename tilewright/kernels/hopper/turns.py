"""Turns of the consumer warpgroups at the tensor cores, which attention calls ping-pong.

What a consumer does besides its MMAs then runs beside the MMAs of the others. Left to themselves consumers would share
the tensor cores until all have done their MMAs, and then do the rest at the same time::

    consumer 0      MMAs | softmax or epilogue | MMAs | ...
    consumer 1             MMAs | softmax or epilogue | MMAs | ...

A turn is a phase of the barrier of the consumer that has it, which the one before completes, the first time the
producer. The turn that is passed on last is taken, too: every phase of a barrier has been waited for at the end.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.pallas_types import Ref, Scalar


@dataclasses.dataclass(frozen=True, slots=True)
class TurnsPlan:
    """The static half of turns, which ``run_kernel`` binds."""

    consumers: int

    def scratch(self) -> tuple[Any]:
        """The scratch type: a barrier for each consumer."""
        # One arrival: each phase is completed by a single warpgroup, which passes its turn on.
        return (plgpu.Barrier(num_arrivals=1, num_barriers=self.consumers),)

    def bind(self, barriers: Ref) -> "Turns":
        """The turns over the reference that the kernel got."""
        return Turns(self.consumers, barriers)


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """Turns over their barriers; consumers are the first warpgroups."""

    consumers: int
    barriers: Ref

    def begin(self) -> None:
        """Producer: gives the first turn to consumer 0."""
        # The producer, which takes no turn, begins the round: a consumer that did would have to be told apart in the
        # loop.
        plgpu.barrier_arrive(self.barriers.at[0])

    def wait(self, consumer: Scalar) -> None:
        """Consumer: waits for its turn."""
        plgpu.barrier_wait(self.barriers.at[consumer])

    def pass_on(self, consumer: Scalar) -> None:
        """Consumer: gives its turn to the next one."""
        following = lax.rem(consumer + 1, jnp.int32(self.consumers))
        # On the other's barrier: a consumer waits on its own only, so each parity has a single reader.
        plgpu.barrier_arrive(self.barriers.at[following])

    def take_last(self, has_it: jax.Array, consumer: Scalar) -> None:
        """Consumer: takes the turn that was passed on last, if it has it."""
        pl.when(has_it)(lambda: self.wait(consumer))
