"""A ring of shared-memory stages between one producer and its consumer warpgroups, as Mosaic GPU primitives.

Slot ``step % num_stages`` passes through empty → filling → full → in use → empty. The mbarrier ``full`` is completed by
the TMA copy (or by the writing warpgroups, where values are converted on the way), ``empty`` by one arrival of every
consumer. Kernels run without automatic barriers: every ordering is written here or in the kernel::

    producer  wait empty[s] · TMA -> slot s, arrives on full[s]     wait empty[s] · TMA -> slot s ...
    consumer                            wait full[s] · wgmma reads slot s · arrive on empty[s]
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import BARRIER_BYTES, MAX_BARRIERS
from tilewright.kernels.hopper.panels import load_tile
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.types import Condition, Ref, Scalar


def when(condition: Condition, action: Callable[[], None]) -> None:
    """Runs ``action`` if the condition holds; of a static condition no branch is left, as ``pl.when`` would."""
    if isinstance(condition, bool):
        if condition:
            action()
    else:
        pl.when(condition)(action)


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """The static half of a ring: its shared memory, and the arrivals on its barriers.

    Attributes:
      tile: a stage.
      consumers: warpgroups that release a slot.
      writers: warpgroups that fill a slot from registers; 0 where TMA fills it.
      copies: TMA copies that fill a slot, of equally many rows each.
    """

    tile: SharedTile
    num_stages: int
    consumers: int
    writers: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages <= MAX_BARRIERS:
            raise ValueError(f"a ring has 1 to {MAX_BARRIERS} stages, got {self.num_stages=}")
        if self.consumers < 1:
            raise ValueError(f"somebody must release a slot, got {self.consumers=}")
        if self.writers < 0:
            raise ValueError(f"{self.writers=} must not be negative")
        if self.copies < 1 or self.tile.shape[0] % self.copies or (self.copies > 1 and self.writers):
            raise ValueError(f"copies share the rows, and need TMA, got {self.copies=}, {self.tile=}, {self.writers=}")

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Shared memory of the stages, aligned as Mosaic does, and of both barrier arrays."""
        return self.tile.stack_bytes(self.num_stages) + 2 * self.num_stages * BARRIER_BYTES

    def scratch(self) -> "tuple[Any, plgpu.Barrier, plgpu.Barrier]":
        """Scratch types of the stages, of ``full`` and of ``empty``, in the order that ``bind`` takes them."""
        return (
            self.tile.scratch(self.num_stages),
            # A TMA copy arrives once, when all of its bytes are there; a writer once, when it has stored its part.
            plgpu.Barrier(num_arrivals=max(self.writers, self.copies * self.tile.copies), num_barriers=self.num_stages),
            plgpu.Barrier(num_arrivals=self.consumers, num_barriers=self.num_stages),
        )

    def bind(self, smem: Ref, full: Ref, empty: Ref) -> "Ring":
        """The ring over the references that the kernel got for ``scratch()``."""
        return Ring(self, self.tile.bind(smem), full, empty)


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A ring over its references; the producer and the consumers call the methods of their side.

    ``step`` counts loads over the whole life of a CTA, so a persistent kernel goes on counting from item to item, as
    the barriers' phases do. Every load must be consumed, and every consumer must release every step exactly once.
    ``offset`` is the number of loads that went through the ring before step 0, which `after` gives to a work item.
    """

    plan: RingPlan
    smem: Ref
    full: Ref
    empty: Ref
    offset: Scalar = 0

    def after(self, loads: Scalar) -> "Ring":
        """The ring whose step 0 comes after so many loads."""
        return dataclasses.replace(self, offset=loads)

    def slot(self, step: Scalar) -> Scalar:
        """Index of the stage that holds ``step``."""
        position = step + self.offset
        if isinstance(position, int):
            return position % self.plan.num_stages
        # Not `%`: jnp's remainder takes further instructions to be right for negative operands.
        return lax.rem(position, jnp.asarray(self.plan.num_stages, position.dtype))

    def wait_released(self, step: Scalar) -> None:
        """Producer: waits until the consumers have released a step; what fills the slot next must not wait again."""
        # Mosaic keeps the parity that a thread waits for next as a bit in a register, and flips it with every wait. So
        # each phase is waited for exactly once and in order: a second wait, or one left out, would be for another
        # round.
        plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def _wait_empty(self, step: Scalar) -> None:
        # The first round fills slots that have never been in use.
        when(step + self.offset >= self.plan.num_stages, functools.partial(self.wait_released, step))

    def load_from_dram(self, step: Scalar, *source_refs: Ref, layout: Any = None) -> jax.Array | None:
        """Producer: starts the load of a tile, from a sliced reference in global memory for each of its copies.

        With TMA it waits until the slot is empty, and starts the copies, one below the other. With ``writers`` it loads
        this warpgroup's part into registers, in ``layout``, and waits for nothing: the slot is needed by
        ``copy_to_shared`` only.
        """
        if self.plan.writers:
            (source_ref,) = source_refs
            return plgpu.load(source_ref, layout=layout, optimized=False)
        if layout is not None:
            raise ValueError(f"a TMA copy passes no registers, got {layout=}")
        self._wait_empty(step)
        slot = self.slot(step)
        rows = self.plan.tile.shape[0] // self.plan.copies
        # Each copy arrives by itself and announces its own bytes, so ``full`` completes when the last one has landed,
        # in whatever order they do.
        for number, source_ref in zip(range(self.plan.copies), source_refs, strict=True):
            part = () if self.plan.copies == 1 else (pl.ds(number * rows, rows),)
            load_tile(source_ref, self.smem.at[(slot, *part)], self.full.at[slot])
        return None

    def copy_to_shared(
        self,
        step: Scalar,
        values: jax.Array | Sequence[jax.Array] | None = None,
        *,
        rows: pl.Slice | None = None,
        released: bool = False,
    ) -> None:
        """Producer: makes the tile visible to the consumers.

        With TMA it does nothing, for the copy's completion does that. With ``writers`` it waits until the slot is
        empty, stores ``values`` (converted) to ``rows`` of it (a ``pl.ds``, by default all), and arrives on ``full``.
        Several ``values`` stand side by side. It does not wait if ``released``: after `wait_released`.
        """
        if not self.plan.writers:
            if values is not None:
                raise ValueError(f"TMA fills this ring, {self.plan.writers=} takes no values")
            return
        if values is None:
            raise ValueError(f"{self.plan.writers=} warpgroups fill this ring from registers, got no values")
        # As late as here: the load into registers above does not depend on the slot, so its latency hides the wait.
        if not released:
            self._wait_empty(step)
        slot = self.slot(step)
        target = self.smem.at[slot] if rows is None else self.smem.at[slot, rows]
        if isinstance(values, jax.Array):
            target[...] = values
        else:
            begin = 0
            for part in values:
                target.at[:, pl.ds(begin, part.shape[1])][...] = part
                begin += part.shape[1]
        # wgmma reads shared memory through the async proxy, to which stores of threads are visible only after a fence.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.full.at[slot])

    def load_from_shared(self, step: Scalar) -> None:
        """Consumer: waits until the slot is full; once per step."""
        # All threads wait, not one for all: the wait is also what makes the bytes that TMA wrote visible to a thread.
        plgpu.barrier_wait(self.full.at[self.slot(step)])

    def get_mma_tile(self, step: Scalar, transposed: bool = False) -> Ref:
        """Consumer: the slot as an operand of wgmma; ``transposed`` is a view, nothing moves."""
        tile = self.smem.at[self.slot(step)]
        return tile.T if transposed else tile

    def release(self, step: Scalar) -> None:
        """Consumer: releases the slot; the wgmma that reads it must have been waited for."""
        # Every thread arrives (Mosaic counts 128 for a warpgroup), so a thread's own reads of the slot precede the
        # release. That orders reads with other threads only; against the next TMA write, through the async proxy, the
        # caller fences.
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def drain(self, last_step: Scalar) -> None:
        """Producer: waits until the consumers have released everything up to ``last_step``, the last load; -1 is none.

        A CTA of a cluster must not exit while others may still write to it. Nothing may be loaded afterwards.
        """
        # In the order of the loads: step s reuses the slot of step s − num_stages, whose phase `load_from_dram` waited
        # for, so what is left are the phases of the last num_stages steps, one for each slot.
        for behind in reversed(range(self.plan.num_stages)):
            step = last_step - behind
            when(step + self.offset >= 0, functools.partial(self.wait_released, step))
