"""A ring of shared-memory stages between one producer and its consumer warpgroups, as Mosaic GPU primitives.

A stage is a tile, or the tiles of several operands (parts), which are filled and released as a whole. Slot
``step % num_stages`` passes through empty → filling → full → in use → empty. The mbarrier ``full`` is completed by the
TMA copies of all parts (or by the writing warpgroups, where values are converted on the way), ``empty`` by one arrival
of every consumer. Kernels run without automatic barriers: every ordering is written here or in the kernel::

    producer  wait empty[s] · TMA -> slot s, arrives on full[s]     wait empty[s] · TMA -> slot s ...
    consumer                            wait full[s] · wgmma reads slot s · arrive on empty[s]

In a cluster a part that its CTAs share is loaded once, each CTA fetches a share of it for all (TMA multicast). A stage
of any of them is then filled again only when the consumers of all of them have released it.

A consumer waits for every phase of a barrier that it waits for at all, as a thread counts phases by its own waits. So
consumers with steps of their own (owners), which the others do not wait for, also have barriers ``full`` of their own.
"""

import dataclasses
import functools
import itertools
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
from tilewright.kernels.pallas_types import Condition, Ref, Scalar

CLUSTER_AXIS = "cluster"
"""The name of a CTA's index in its cluster."""


def when(condition: Condition, action: Callable[[], None]) -> None:
    """Runs ``action`` if the condition holds; of a static condition no branch is left, as ``pl.when`` would."""
    if isinstance(condition, bool):
        if condition:
            action()
    else:
        pl.when(condition)(action)


@dataclasses.dataclass(frozen=True, slots=True)
class RingPart:
    """The tiles of one operand in a stage.

    Attributes:
      count: tiles, each of which a consumer takes by its index; None is one, without an index.
      copies: TMA copies that fill a tile, of equally many rows each.
      multicast: whether all CTAs of the cluster use the same tiles.
      by_threads: whether threads of the producer copy all tiles at once, for TMA cannot.
    """

    tile: SharedTile
    count: int | None = None
    copies: int = 1
    multicast: bool = False
    by_threads: bool = False

    def __post_init__(self) -> None:
        if self.by_threads and (self.copies > 1 or self.multicast):
            raise ValueError(f"threads copy a part at once, and for their own CTA, got {self}")
        if self.copies < 1 or self.tile.shape[0] % self.copies:
            raise ValueError(f"copies share the rows of a tile, got {self.copies=}, {self.tile=}")

    @property
    def stack(self) -> tuple[int, ...]:
        """The axis of the tiles, if there is one."""
        return () if self.count is None else (self.count,)

    @property
    def targets(self) -> list[tuple[Any, ...]]:
        """The place of each copy, as an index of the stage: tile after tile, and in it one copy below the other."""
        if self.by_threads:
            return [()]
        rows = self.tile.shape[0] // self.copies
        shares = [()] if self.copies == 1 else [(pl.ds(number * rows, rows),) for number in range(self.copies)]
        tiles = [()] if self.count is None else [(number,) for number in range(self.count)]
        return [(*tile, *share) for tile, share in itertools.product(tiles, shares)]

    @property
    def arrivals(self) -> int:
        """Arrivals of the copies on the barrier of the stage: each panel of a tile arrives by itself."""
        # Once for all copies of a thread, whose arrival waits for those that it has started before.
        return 1 if self.by_threads else (self.count or 1) * self.copies * self.tile.copies


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """The static half of a ring: its shared memory, and the arrivals on its barriers.

    Attributes:
      stage: the tile of a stage, or its parts.
      consumers: warpgroups of a CTA that release a slot.
      writers: warpgroups that fill a slot of one tile from registers; 0 where TMA fills it.
      cluster: CTAs of a cluster.
      owners: consumers, or groups of them, that have steps of their own; None where a consumer waits for every step.
    """

    stage: SharedTile | tuple[RingPart, ...]
    num_stages: int
    consumers: int
    writers: int = 0
    cluster: int = 1
    owners: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages * (self.owners or 1) <= MAX_BARRIERS:
            raise ValueError(f"a ring has 1 to {MAX_BARRIERS} barriers, got {self.num_stages=}, {self.owners=}")
        if self.consumers < 1 or self.cluster < 1:
            raise ValueError(f"somebody must release a slot, got {self.consumers=}, {self.cluster=}")
        if self.writers < 0:
            raise ValueError(f"{self.writers=} must not be negative")
        if self.writers and len(self.targets) > 1:
            raise ValueError(f"several copies of a stage need TMA, got {self.parts=}, {self.writers=}")

    @functools.cached_property
    def parts(self) -> tuple[RingPart, ...]:
        """The parts of a stage."""
        return (RingPart(self.stage),) if isinstance(self.stage, SharedTile) else self.stage

    @property
    def tile(self) -> SharedTile:
        """The tile of a ring of one part."""
        (part,) = self.parts
        return part.tile

    @property
    def targets(self) -> list[tuple[int, tuple[Any, ...]]]:
        """The part that each copy of a stage fills, and where in it."""
        return [(number, target) for number, part in enumerate(self.parts) for target in part.targets]

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Shared memory of the stages, aligned as Mosaic does, and of both barrier arrays."""
        stages = sum(part.tile.stack_bytes(self.num_stages * (part.count or 1)) for part in self.parts)
        return stages + (1 + (self.owners or 1)) * self.num_stages * BARRIER_BYTES

    def scratch(self) -> tuple[Any, ...]:
        """Scratch types of the stages of each part, of ``full`` and of ``empty``, in the order that ``bind`` takes."""
        # A TMA copy arrives once, when all of its bytes are there, one that is shared in each CTA; a writer once, when
        # it has stored its part.
        arrivals = self.writers or sum(part.arrivals for part in self.parts)
        # A barrier for each owner and stage: a consumer that takes every other item does not wait for the stages of the
        # items between, and so would lose count of the parity of a barrier that they share. ``empty`` needs none, as
        # the producer waits for every phase.
        full = plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.num_stages * (self.owners or 1))
        empty = {"num_arrivals": self.consumers, "num_barriers": self.num_stages}
        stages = (part.tile.scratch(self.num_stages, *part.stack) for part in self.parts)
        if self.cluster == 1:
            return (*stages, full, plgpu.Barrier(**empty))
        # A consumer arrives on the barriers of all CTAs of the cluster: each may overwrite what it reads.
        return (*stages, full, plgpu.ClusterBarrier(collective_axes=(CLUSTER_AXIS,), **empty))

    def bind(self, *refs: Any) -> "Ring":
        """The ring over the references that the kernel got for ``scratch()``."""
        *stages, full, empty = refs
        bound = tuple(part.tile.bind(ref) for part, ref in zip(self.parts, stages, strict=True))
        return Ring(self, bound, full, empty)


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A ring over its references; the producer and the consumers call the methods of their side.

    ``step`` counts loads over the whole life of a CTA, so a persistent kernel goes on counting from item to item, as
    the barriers' phases do. Every load must be consumed, and every consumer must release every step exactly once.

    Attributes:
      stages: of each part, ``[num_stages, rows, columns]``, or ``[num_stages, count, rows, columns]`` of one with an
        index.
      offset: loads that went through the ring before step 0, which `after` gives to a work item; not in a ring with
        owners, whose steps are those of the items of all of them.
    """

    plan: RingPlan
    stages: tuple[Ref, ...]
    full: Ref
    empty: Ref
    offset: Scalar = 0

    @property
    def smem(self) -> Ref:
        """The stages of a ring of one part."""
        (stages,) = self.stages
        return stages

    def after(self, loads: Scalar) -> "Ring":
        """The ring whose step 0 comes after so many loads."""
        if self.plan.owners is not None:
            raise ValueError(f"items of several owners have one count of steps, got {self.plan.owners=}")
        return dataclasses.replace(self, offset=loads)

    def _position(self, step: Scalar) -> Scalar:
        """The number of a step among all loads of the ring."""
        return step + self.offset if self.plan.owners is None else step

    def slot(self, step: Scalar) -> Scalar:
        """Index of the stage that holds ``step``."""
        position = self._position(step)
        if isinstance(position, int):
            return position % self.plan.num_stages
        # Not `%`: jnp's remainder takes further instructions to be right for negative operands.
        return lax.rem(position, jnp.asarray(self.plan.num_stages, position.dtype))

    def loaded(self, step: Scalar, owner: Scalar) -> Ref:
        """The barrier of a load for one of the owners."""
        return self.full.at[self.slot(step) + owner * self.plan.num_stages]

    def wait_released(self, step: Scalar) -> None:
        """Producer: waits until all consumers have released the slot of ``step``; what fills it next must not wait.

        Of a step that is loaded that is its own release, of one that is to be loaded that of the step before it there.
        """
        # Mosaic keeps the parity that a thread waits for next as a bit in a register, and flips it with every wait. So
        # each phase is waited for exactly once and in order: a second wait, or one left out, would be for another
        # round. A CTA waits for its own ``empty`` only: the consumers of the whole cluster arrive on it, so this is
        # their permission for a multicast copy, which overwrites the stages of all CTAs.
        plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def _wait_empty(self, step: Scalar) -> None:
        # The first round fills slots that have never been in use.
        when(self._position(step) >= self.plan.num_stages, functools.partial(self.wait_released, step))

    def load_from_dram(
        self,
        step: Scalar,
        *sources: Ref | Callable[[Ref, Ref], None],
        owner: Scalar | None = None,
        layout: Any = None,
    ) -> jax.Array | None:
        """Producer: starts the load of a stage, from a sliced reference in global memory for each of its copies.

        Of a part that threads copy it is a function of all tiles and of the barrier, which starts these copies and
        arrives on it when they are complete.

        With TMA it waits until the slot is empty, and starts the copies, in the order of ``RingPlan.targets``. With
        ``writers`` it loads this warpgroup's part into registers, in ``layout``, and waits for nothing: the slot is
        needed by ``copy_to_shared`` only. In a ring with owners the load is for one of them.
        """
        if self.plan.writers:
            (source,) = sources
            return plgpu.load(source, layout=layout, optimized=False)
        if layout is not None:
            raise ValueError(f"a TMA copy passes no registers, got {layout=}")
        self._wait_empty(step)
        slot = self.slot(step)
        loaded = self.full.at[slot] if owner is None else self.loaded(step, owner)
        # Each copy arrives by itself and announces its own bytes, so ``full`` completes when the last one has landed,
        # in whatever order they do.
        for (number, target), source in zip(self.plan.targets, sources, strict=True):
            tile = self.stages[number].at[(slot, *target)]
            if callable(source):
                source(tile, loaded)
                continue
            axis = CLUSTER_AXIS if self.plan.parts[number].multicast and self.plan.cluster > 1 else None
            load_tile(source, tile, loaded, axis)
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

    def load_from_shared(self, step: Scalar, owner: Scalar | None = None) -> None:
        """Consumer: waits until the slot is full; once per step, or per step of its owner."""
        # All threads wait, not one for all: the wait is also what makes the bytes that TMA wrote visible to a thread.
        plgpu.barrier_wait(self.full.at[self.slot(step)] if owner is None else self.loaded(step, owner))

    def get_mma_tile(self, step: Scalar, transposed: bool = False, *, part: int = 0, number: Scalar = 0) -> Ref:
        """Consumer: a tile of the slot as an operand of wgmma; ``transposed`` is a view, nothing moves."""
        index = () if self.plan.parts[part].count is None else (number,)
        tile = self.stages[part].at[(self.slot(step), *index)]
        return tile.T if transposed else tile

    def release(self, step: Scalar) -> None:
        """Consumer: releases the slot; the wgmma that reads it must have been waited for."""
        # Every thread arrives (Mosaic counts 128 for a warpgroup), so a thread's own reads of the slot precede the
        # release. That orders reads with other threads only; against the next TMA write, through the async proxy, the
        # caller fences.
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def drain(self, steps: Scalar) -> None:
        """Producer: waits, after all ``steps`` loads, until the consumers have released them.

        A CTA of a cluster must not exit while another may write to its memory, or arrive on its barriers. Nothing may
        be loaded afterwards.
        """
        # The loads that would come next wait for exactly these phases; here they are waited for without a load.
        for number in range(self.plan.num_stages):
            self._wait_empty(steps + number)
