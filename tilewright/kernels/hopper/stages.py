"""A ring of shared-memory stages, each of which holds tiles of several operands and is filled and released as a whole.

As ``ring.Ring``, whose verbs it has, but with one pair of mbarriers for all tiles of a stage, and for clusters: a tile
that the CTAs of a cluster share is loaded once, each CTA fetches a part of it for all (TMA multicast). A stage of any
of them is then filled again only when the consumers of all of them have released it::

    producer  wait empty[s] · TMA -> all tiles of slot s, arrives on full[s]
    consumer                            wait full[s] · wgmma reads slot s · arrive on empty[s] of every CTA

A consumer waits for every phase of a barrier that it waits for at all, as a thread counts phases by its own waits. So
consumers with steps of their own, which the others do not wait for, also have barriers ``full`` of their own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import BARRIER_BYTES, MAX_BARRIERS
from tilewright.kernels.hopper.panels import load_tile
from tilewright.kernels.hopper.ring import when
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.types import Ref, Scalar

CLUSTER_AXIS = "cluster"
"""The name of a CTA's index in its cluster."""


@dataclasses.dataclass(frozen=True, slots=True)
class StagePart:
    """The tiles of one operand in a stage.

    Attributes:
      count: tiles, which lie one behind the other; a consumer takes its own by its index.
      multicast: whether all CTAs of the cluster use the same tiles.
    """

    tile: SharedTile
    count: int = 1
    multicast: bool = False

    @property
    def copies(self) -> int:
        """TMA copies, each of which arrives on the stage's barrier."""
        return self.count * self.tile.copies


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan:
    """The static half of the ring.

    Attributes:
      parts: of a stage.
      consumers: warpgroups of a CTA that release a stage.
      cluster: CTAs of a cluster.
      owners: consumers, or groups of them, that have steps of their own.
    """

    parts: tuple[StagePart, ...]
    num_stages: int
    consumers: int
    cluster: int = 1
    owners: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages * self.owners <= MAX_BARRIERS:
            raise ValueError(f"a ring has 1 to {MAX_BARRIERS} barriers, got {self.num_stages=}, {self.owners=}")
        if self.consumers < 1 or self.cluster < 1:
            raise ValueError(f"somebody must release a stage, got {self.consumers=}, {self.cluster=}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the stages and of both barrier arrays."""
        stages = sum(part.tile.stack_bytes(self.num_stages * part.count) for part in self.parts)
        return stages + (1 + self.owners) * self.num_stages * BARRIER_BYTES

    def scratch(self) -> tuple[Any, ...]:
        """Scratch types, in the order that ``bind`` takes their references."""
        empty: Any
        if self.cluster > 1:
            # A consumer arrives on the barriers of both CTAs: either may overwrite what it reads.
            empty = plgpu.ClusterBarrier(
                collective_axes=(CLUSTER_AXIS,), num_barriers=self.num_stages, num_arrivals=self.consumers
            )
        else:
            empty = plgpu.Barrier(num_arrivals=self.consumers, num_barriers=self.num_stages)
        # A barrier for each owner and stage: a consumer that takes every other item does not wait for the stages of the
        # items between, and so would lose count of the parity of a barrier that they share. ``empty`` needs none, as
        # the producer waits for every phase. Every copy arrives by itself; one that is shared arrives in each CTA, when
        # its bytes are there.
        copies = sum(part.copies for part in self.parts)
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=self.num_stages * self.owners)
        return (*(part.tile.scratch(self.num_stages, part.count) for part in self.parts), full, empty)

    def bind(self, *refs: Any) -> "Stages":
        """The ring over the references that the kernel got for ``scratch()``."""
        *tiles, full, empty = refs
        bound = tuple(part.tile.bind(ref) for part, ref in zip(self.parts, tiles, strict=True))
        return Stages(self, bound, full, empty)


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """The ring over its references. ``step`` counts loads over the whole life of a CTA."""

    plan: StagePlan
    smem: tuple[Ref, ...]
    full: Ref
    empty: Ref

    def slot(self, step: Scalar) -> Scalar:
        """Index of the stage that holds ``step``."""
        return lax.rem(step, jnp.int32(self.plan.num_stages))

    def loaded(self, step: Scalar, owner: Scalar) -> Ref:
        """The barrier of a step's load."""
        return self.full.at[self.slot(step) + owner * self.plan.num_stages]

    def load_from_dram(self, step: Scalar, *sources: Sequence[Ref], owner: Scalar = 0) -> None:
        """Producer: waits until the stage is empty, and starts its load, of each part from slices of global memory."""
        # The first round fills stages that have never been in use.
        when(step >= self.plan.num_stages, functools.partial(self.wait_released, step))
        slot, loaded = self.slot(step), self.loaded(step, owner)
        for part, smem, slices in zip(self.plan.parts, self.smem, sources, strict=True):
            # A CTA waits for its own ``empty`` only, on which the consumers of both CTAs arrive: a multicast copy
            # overwrites the stage of the other CTA, too, and this is the permission of both.
            axis = CLUSTER_AXIS if part.multicast and self.plan.cluster > 1 else None
            for number, source in zip(range(part.count), slices, strict=True):
                load_tile(source, smem.at[slot, number], loaded, axis)

    def wait_released(self, step: Scalar) -> None:
        """Producer: waits until the stage that ``step`` takes is released by all that used it before."""
        plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def wait_loaded(self, step: Scalar, owner: Scalar = 0) -> None:
        """Consumer: waits until the stage is full; once per step of the owner."""
        plgpu.barrier_wait(self.loaded(step, owner))

    def tile(self, step: Scalar, part: int, number: Scalar = 0) -> Ref:
        """Consumer: a tile of the stage."""
        return self.smem[part].at[self.slot(step), number]

    def release(self, step: Scalar) -> None:
        """Consumer: releases the stage; the wgmma that reads it must have been waited for."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def drain(self, steps: Scalar) -> None:
        """Producer: waits, after all ``steps`` loads, until the consumers of the whole cluster have released them.

        A CTA must not exit while another may write to its memory, or arrive on its barriers.
        """
        # The loads that would come next wait for exactly these phases; here they are waited for without a load.
        for number in range(self.plan.num_stages):
            step = steps + number
            when(step >= self.plan.num_stages, functools.partial(self.wait_released, step))
