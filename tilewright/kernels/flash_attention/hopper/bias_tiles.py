"""Tiles of a dense bias in shared memory on Hopper, brought by TMA a step ahead.

In the layout of the accumulator a warp's load of two elements a thread touches 8 rows of global memory: with a step's
32 of them in each of 8 warps, loads take as long as the matmuls of two steps, and nothing hides their latency. From a
swizzled tile the same registers come by ``ldmatrix``, also those of the transposed tile.

Each consumer warpgroup has stages of its own, with its 64 queries or keys, so that it waits for no other's. A load for
consumer c of step i is load ``i · consumers + c`` of the ring.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.scores import TileCoord
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.ring import Ring, RingPlan, when
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import tile_layout
from tilewright.kernels.hopper.types import Condition, Ref, Scalar
from tilewright.ops.types import Direction

STAGED_ITEMSIZES: dict[Direction, tuple[int, ...]] = {"forward": (2, 4), "backward": (2,)}
"""Bytes of an element of a bias that may pass through shared memory."""


def staged_dtype(bias: jax.Array | jax.ShapeDtypeStruct | None, direction: Direction) -> jnp.dtype | None:
    """The dtype of a bias that may pass through shared memory; None for others, and for none.

    These are matrices, for a vector is a few loads in each step. The backward pass reads tiles transposed, which
    ``ldmatrix`` does with 16-bit elements alone.
    """
    if bias is None or 1 in bias.shape[2:] or jnp.dtype(bias.dtype).itemsize not in STAGED_ITEMSIZES[direction]:
        return None
    return jnp.dtype(bias.dtype)


def bias_ring(rows: int, columns: int, dtype: DTypeLike, stages: int, consumers: int) -> RingPlan:
    """The ring of tiles ``[queries, keys]``, with ``stages`` for each consumer."""
    # Panels, whatever the lengths: TMA clips them at the ends of the bias.
    return RingPlan(SharedTile((rows, columns), dtype, panelled=True), stages * consumers, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class BiasTiles:
    """The tiles of a bias of one warpgroup role.

    Attributes:
      ring: of ``bias_ring``.
      consumers: that have stages in it.
    """

    ring: Ring
    consumers: int

    def load(self, step: Scalar, consumer: int, bias: jax.Array | Ref | None, coord: TileCoord) -> None:
        """Producer: starts the load of a consumer's tile of a step; the shape of ``coord`` has queries first."""
        assert bias is not None
        batch = coord.batch if bias.shape[0] > 1 else 0
        head = coord.head if bias.shape[1] > 1 else 0
        rows, columns = pl.ds(coord.q_start, coord.shape[0]), pl.ds(coord.kv_start, coord.shape[1])
        source: Any = bias.at[batch, head, rows, columns]
        self.ring.load_from_dram(step * self.consumers + consumer, source)

    def read(self, step: Scalar, consumer: Scalar, *, transposed: bool = False, present: Condition = True) -> jax.Array:
        """Consumer: waits for its tile of a step, and moves it into registers, in the layout of the accumulator.

        Args:
          transposed: whether the tile of scores is ``[keys, queries]``.
          present: whether the step exists; if not, what an earlier one left is read.
        """
        index = step * self.consumers + consumer
        when(present, lambda: self.ring.load_from_shared(index))
        tile: Any = self.ring.get_mma_tile(index)
        assert isinstance(tile, PanelRef)
        views = [panel.T if transposed else panel for panel in tile.operands]
        parts = [plgpu.load(view, layout=tile_layout(), optimized=False) for view in views]
        # An async-proxy fence: threads have read the stage, and TMA writes it next.
        plgpu.commit_smem()
        when(present, lambda: self.ring.release(index))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
