"""Operands and context of the roles of the kernel for dK and dV of wide heads on Hopper."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from tilewright.kernels.flash_attention.hopper.call import GroupParts, KeyValueResults
from tilewright.kernels.flash_attention.hopper.params import BLOCK
from tilewright.kernels.flash_attention.hopper.schedule import TileSchedule
from tilewright.kernels.flash_attention.hopper.scores import BiasTiles, ScoreArrays, ScoreOptions, TileCoord
from tilewright.kernels.flash_attention.hopper.wide.plans import WIDE_TILE, WideBackwardPlan, WideKeyValueScratch
from tilewright.kernels.flash_attention.hopper.wide.scores import (
    QueryIteration,
    QueryIterations,
    has_separate_ds_factor,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.schedule import ItemLists, decode_tile_index
from tilewright.kernels.hopper.tiles import opaque_zero
from tilewright.kernels.pallas_types import Ref, Scalar


class WideKeyValueOperands[Operand](NamedTuple):
    """Operands of the kernel, as arrays or references.

    Attributes:
      statistics: as in ``BackwardCall``, complete.
      dq_accumulator: None if deterministic.
      d_bias: the array of a `BiasGradient`; None without one, and where it is a result.
      item_lists: over tiles of keys.
      tables: of the tile schedule.
      arrays: for tiles ``[keys, queries]``.
    """

    query: Operand
    key: Operand
    value: Operand
    d_out: Operand
    statistics: Operand
    dq_accumulator: Operand | None
    d_bias: Operand | None
    item_lists: ItemLists[Operand]
    tables: tuple[Operand, ...]
    arrays: ScoreArrays


class WideItem(NamedTuple):
    """A decoded work item: a tile of 64 keys of a key head.

    Attributes:
      key_part: a part of a key head's query heads (`GroupParts`), or the key head if there is one part.
    """

    batch: Scalar
    key_part: Scalar
    kv_start: Scalar
    iterations: QueryIterations

    def coord(self, iteration: QueryIteration) -> TileCoord:
        """Coordinates of the tile of S of a step."""
        head, q_start = self.iterations.head(iteration), self.iterations.q_start(iteration)
        return TileCoord(self.batch, head, q_start, self.kv_start, WIDE_TILE, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class WideContext:
    """All that the roles of the kernel share.

    Attributes:
      parts: of the query heads of a key head, all of one size.
    """

    plan: WideBackwardPlan
    options: ScoreOptions
    schedule: TileSchedule
    kv_heads: int
    parts: GroupParts
    operands: WideKeyValueOperands[Ref]
    results: KeyValueResults[Ref]
    scratch: WideKeyValueScratch[Ring, Ref]

    @property
    def overlaps_next_step(self) -> bool:
        """True if dP of the next step is computed beside dK, and S beside dV without waiting for the stage of dO."""
        # With one stage dO of a step must be released before that of the next can arrive.
        return self.plan.params.d_out_stages > 1

    @property
    def p_in_registers(self) -> bool:
        """True if operand A of dV stays in registers, so that shared memory need not feed it."""
        # With another factor of dS there are two tiles of P, and where dQ is added up its columns are in registers
        # besides.
        return not self.plan.fuses_dq and not has_separate_ds_factor(self.options)

    @property
    def d_bias(self) -> Ref | None:
        """The array of the `BiasGradient`."""
        return self.results.d_bias if self.operands.d_bias is None else self.operands.d_bias

    @property
    def bias_tiles(self) -> BiasTiles | None:
        """The tiles of a bias that passes through shared memory."""
        return None if self.scratch.bias is None else BiasTiles(self.scratch.bias, 1)

    @property
    def s_accumulator(self) -> object:
        """The type of the accumulator of S or dP."""
        return plgpu.ACC(WIDE_TILE, jnp.float32)

    def in_item(self, item_index: Scalar, first: Scalar) -> "WideContext":
        """The context in which the rings' step 0 is that of an item, as each role has it.

        Args:
          item_index: items of the CTA before this one.
          first: their steps.
        """
        # K and V are loaded once an item, the rest once a step. A ring without an offset would wait for the phase of
        # another item.
        rings = self.scratch
        scratch = rings._replace(
            k=rings.k.after(item_index),
            v=rings.v.after(item_index),
            q=rings.q.after(first),
            d_out=rings.d_out.after(first),
            minus_lse=rings.minus_lse.after(first),
            minus_delta=rings.minus_delta.after(first),
            p=rings.p.after(first),
            ds=None if rings.ds is None else rings.ds.after(first),
            bias=None if rings.bias is None else rings.bias.after(first),
        )
        return dataclasses.replace(self, scratch=scratch)

    def decode(self, item: Scalar) -> WideItem:
        """Decodes a work item: anew in each role, and in the consumers in each step (`item_in_step`)."""
        key_parts, size = self.kv_heads * self.parts.parts, self.parts.size
        b, key_part, kv_tile = decode_tile_index(item, self.schedule.extent.row_tiles, key_parts)
        # What follows from the item is computed again in each step: kept over the loop, it would be spilled.
        zero = opaque_zero(jnp.int32(0) + item)
        iterations = QueryIterations.of(self.schedule, self.operands.tables, b, key_part * size, size, kv_tile, zero)
        return WideItem(b, key_part, kv_tile * BLOCK, iterations)
