"""The inputs of attention over a sequence whose rows are split over devices: one device's part of a call."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int32

from tilewright.kernels.flash_attention.distributed.layout import Layout, LayoutName
from tilewright.kernels.flash_attention.masking import FAR, Band
from tilewright.kernels.op.distributed import DistributedInputs
from tilewright.kernels.op.inputs import static


class ContextInputs(DistributedInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Lengths and boundaries are those of the whole sequences, the same on every device.

    Attributes:
      layout: the rows that a device has.
      lowest, highest: the band of key − query in absolute positions; FAR on a side without a bound.
      moving_ends: the band counts from the ends of each batch element or packed sequence, which only arrays of
        positions describe.
      longest: tokens of the longest packed sequence, if its boundaries are known on the host.
      return_lse: the caller gets the log-sum-exp, and may differentiate it.
      unbatched: the caller's arrays have no batch dimension.
    """

    query: Float[Array, "batch q_length heads head_dim"]
    key: Float[Array, "batch kv_length kv_heads head_dim"]
    value: Float[Array, "batch kv_length kv_heads value_dim"]
    softmax_scale: float = static()
    layout: LayoutName = static()
    softmax_aux: Float[Array, "heads sinks"] | None = None
    q_ids: Int32[Array, "batch q_length"] | None = None
    kv_ids: Int32[Array, "batch kv_length"] | None = None
    q_lengths: Int32[Array, " batch"] | None = None
    kv_lengths: Int32[Array, " batch"] | None = None
    q_bounds: Int32[Array, " q_bounds"] | None = None
    kv_bounds: Int32[Array, " kv_bounds"] | None = None
    lowest: int = static(default=-FAR)
    highest: int = static(default=FAR)
    moving_ends: bool = static(default=False)
    bottom_right: bool = static(default=False)
    longest: int | None = static(default=None)
    logits_soft_cap: float | None = static(default=None)
    precision: Any = static(default=None)
    return_lse: bool = static(default=False, role="call")
    unbatched: bool = static(default=False, role="call")

    @functools.cached_property
    def rows(self) -> Layout:
        """The rows of every device."""
        return Layout(self.layout, self.devices, self.query.shape[1], self.key.shape[1])

    @functools.cached_property
    def band(self) -> Band:
        """The band of the whole call; without bounds if it has neither a causal mask nor a window."""
        return Band(self.lowest, self.highest)

    @functools.cached_property
    def static_band(self) -> Band:
        """The band by which steps are planned: without bounds if positions are arrays."""
        if self.moving_ends:
            return Band()
        if self.longest is None:
            return self.band
        return Band(max(self.lowest, 1 - self.longest), min(self.highest, self.longest - 1))

    @functools.cached_property
    def order_matters(self) -> bool:
        """True if a mask reads positions, so that rows must be in order or their positions be given."""
        positional = (self.q_lengths, self.kv_lengths, self.q_bounds)
        return self.band != Band() or any(each is not None for each in positional)

    @functools.cached_property
    def has_documents(self) -> bool:
        """True if segment ids or packed sequences are part of the mask."""
        return self.q_bounds is not None or self.kv_ids is not None

    @functools.cached_property
    def of_parts(self) -> dict[str, Any]:
        """The options of every call that a device makes, by keyword."""
        names = ("softmax_scale", "logits_soft_cap", "precision", "platform")
        return {name: getattr(self, name) for name in names}
