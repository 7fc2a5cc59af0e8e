"""The inputs of matmuls over the devices of a mesh axis: a device's part of a call."""

import functools
from typing import Any

from jaxtyping import Array, Float

from tilewright.kernels.op.distributed import DistributedInputs
from tilewright.kernels.op.inputs import static


class CollectiveInputs(DistributedInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      lhs: ``[..., m, k]``: some of the rows for a gather, some of k for a sum.
      rhs: ``[k, n]``, or ``[n, k]`` if it is transposed.
      out_dtype: the name of the dtype of the result.
      scatters: the products are summed, and each device gets some rows; else rows are gathered.
      other_axes: the axes of the mesh over which the ``shard_map`` is not manual.
      times: devices of the mesh for each of the axis.
    """

    lhs: Float[Array, "..."]
    rhs: Float[Array, "_ _"]
    out_dtype: str = static()
    scatters: bool = static(default=False, role="call")
    transpose_rhs: bool = static(default=False)
    precision: Any = static(default=None)
    other_axes: tuple[str, ...] = static(default=(), role="call")
    times: int = static(default=1, role="call")

    @functools.cached_property
    def mesh_size(self) -> int:
        return self.devices * self.times

    @functools.cached_property
    def k(self) -> int:
        return self.lhs.shape[-1]

    @functools.cached_property
    def n(self) -> int:
        return self.rhs.shape[0 if self.transpose_rhs else 1]

    @functools.cached_property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of this device's result."""
        *leading, rows, _ = self.lhs.shape
        return (*leading, rows // self.devices if self.scatters else rows * self.devices, self.n)
