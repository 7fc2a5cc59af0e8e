"""The description of a call that quantises an array."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.quantize.quantized import FORMATS, SCALE_BLOCK, Codes, Quantized, scales_shape

type QuantizeResults = Quantized | tuple[Quantized, Quantized]
"""One orientation, or both."""


class QuantizeInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      axis: −1 or −2, along which elements share a scale.
      block: with ``scaling="block"``, elements of the other of the last two axes and of ``axis`` that share a scale.
      transposed: both orientations: of the array, and of its transpose along the last axis of that.
    """

    x: Float[Array, "..."]
    format: str = static(default="e4m3")
    scaling: str = static(default="tensor")
    axis: int = static(default=-1)
    block: tuple[int, int] = static(default=(1, SCALE_BLOCK))
    power_of_two: bool = static(default=False)
    transposed: bool = static(default=False)

    @functools.cached_property
    def codes(self) -> Codes:
        return FORMATS[self.format]

    @functools.cached_property
    def covered(self) -> tuple[int | None, ...]:
        """The elements of the last axes that share a scale, as in ``Quantized``."""
        if self.scaling == "tensor":
            return (None,) * len(self.x.shape)
        across, along = (1, None) if self.scaling == "row" else self.block
        if self.axis == -1 and across == 1:
            return (along,)
        return (across, along) if self.axis == -1 else (along, across)

    @functools.cached_property
    def core_rank(self) -> int:
        """The number of last axes along which elements may share a scale."""
        return max(2 if self.transposed else 1, len(self.covered))

    @functools.cached_property
    def is_uniform(self) -> bool:
        """True if the transposed array has the same codes."""
        return self.scaling == "tensor" or (self.scaling == "block" and self.block[0] == self.block[1])

    def result(self, values: Any, scales: Any) -> Quantized:
        """One orientation's codes and scales with their description."""
        return Quantized(values, scales, self.format, self.covered)

    @functools.cached_property
    def shapes(self) -> QuantizeResults:
        """The results, with ``ShapeDtypeStruct`` in place of arrays."""
        shape = tuple(self.x.shape)
        swapped = (*shape[:-2], *shape[:-3:-1])

        def of(shape: tuple[Any, ...]) -> Quantized:
            scales = jax.ShapeDtypeStruct(scales_shape(self.covered, shape), "float32")
            return self.result(jax.ShapeDtypeStruct(shape, self.codes.dtype), scales)

        return (of(shape), of(swapped)) if self.transposed else of(shape)
