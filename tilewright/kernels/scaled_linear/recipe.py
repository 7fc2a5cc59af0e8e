"""The formats and scales of the matmuls of a layer that trains in eight bits."""

import dataclasses
from typing import Any, get_args

from tilewright.kernels.quantize.quantized import Format, Scaling


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """The formats and scales of the three matmuls of a linear layer; hashable.

    Attributes:
      scaling: what shares a scale. "tensor" is current scaling, of an array as it is in the step; "row" has a scale for
        each row that a sum goes along; "block" one for each 1 × 128 of activations and gradients, and 128 × 128 of
        weights, as DeepSeek-V3 (arXiv 2412.19437).
      format: of activations and weights.
      gradient_format: of the gradients of results; ``None`` is "e5m2" for "tensor" in float8, else ``format``.
      power_of_two: scales are powers of two.

    Raises:
      ValueError: a field is none of these, int8 is mixed with float8, or has scales of blocks.
    """

    scaling: Scaling = "tensor"
    format: Format = "e4m3"
    gradient_format: Format | None = None
    power_of_two: bool = False

    def __post_init__(self) -> None:
        formats = get_args(Format.__value__)
        for name, known in (
            ("scaling", get_args(Scaling.__value__)),
            ("format", formats),
            ("gradient_format", (None, *formats)),
            ("power_of_two", (False, True)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {self}")
        if "int8" in (self.format, self.of_gradients) and (self.format != self.of_gradients or self.scaling == "block"):
            raise ValueError(f"int8 is multiplied by int8, and has scales of rows or one for all, got {self}")

    @property
    def of_gradients(self) -> Format:
        """The format of the gradients of results."""
        if self.gradient_format is not None:
            return self.gradient_format
        return "e5m2" if self.scaling == "tensor" and self.format != "int8" else self.format

    @property
    def of_weights(self) -> dict[str, Any]:
        """The options of ``quantize`` for weights."""
        block = {"block": (128, 128)} if self.scaling == "block" else {}
        return {**self.of_activations, **block}

    @property
    def of_activations(self) -> dict[str, Any]:
        """The options of ``quantize`` for activations, and for gradients but for their format."""
        return {"format": self.format, "scaling": self.scaling, "power_of_two": self.power_of_two}
