"""Named calls of the norms: what tests, tuning and benchmarks run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.norms.inputs import Kind, NormInputs, NormOptions


@dataclasses.dataclass(frozen=True, slots=True)
class NormCase:
    """The sizes and options of one call, from which its arrays can be drawn.

    Attributes:
      rows: the leading dimensions of x.
      weight_dtype: of weight and bias; that of x where it is ``None``.
      shift: what the rows of x have as their mean.
    """

    name: str
    kind: Kind = "rms"
    rows: tuple[int, ...] = (8,)
    columns: int = 128
    dtype: str = "float32"
    weight_dtype: str | None = None
    residual: bool = False
    weight: bool = True
    bias: bool = False
    eps: float = 1e-6
    weight_offset: float = 0.0
    shift: float = 0.0

    @property
    def options(self) -> NormOptions:
        return NormOptions(self.kind, self.eps, self.weight_offset)

    @property
    def structs(self) -> NormInputs:
        """Shapes and dtypes in the place of arrays."""
        shape, dtype = (*self.rows, self.columns), jnp.dtype(self.dtype)
        x: Any = jax.ShapeDtypeStruct(shape, dtype)
        vector: Any = jax.ShapeDtypeStruct((self.columns,), jnp.dtype(self.weight_dtype or self.dtype))
        return NormInputs(
            x,
            x if self.residual else None,
            vector if self.weight else None,
            vector if self.bias else None,
            self.options,
        )

    def inputs(self, seed: int = 0) -> NormInputs:
        """Normal arrays."""
        random = np.random.default_rng(seed)
        drawn = jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape, np.float32), x.dtype), self.structs)
        return dataclasses.replace(drawn, x=(drawn.x + self.shift).astype(self.dtype)) if self.shift else drawn

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the op."""
        inputs = self.inputs(seed)
        arrays = (inputs.x, inputs.weight) if self.kind == "rms" else (inputs.x, inputs.weight, inputs.bias)
        options: dict[str, Any] = {"residual": inputs.residual, "eps": self.eps}
        if self.kind == "rms":
            options["weight_offset"] = self.weight_offset
        return arrays, options


def _named(*cases: NormCase) -> dict[str, NormCase]:
    return {case.name: case for case in cases}


GPU_SHAPES = (
    (1, 4096), (1, 16384), (8, 8192), (128, 128), (2048, 5120), (4096, 4096), (65536, 128), (65536, 256),
    (65536, 1024), (32768, 2048), (16384, 8192), (8192, 16384),
)  # fmt: skip
"""From the decoding of one token to the largest activations; norms of heads have 128 or 256 columns."""

GPU_CASES = _named(
    *(NormCase(f"{rows}x{columns}", "rms", (rows,), columns, "bfloat16") for rows, columns in GPU_SHAPES),
    *(
        NormCase(f"layer_{rows}x{columns}", "layer", (rows,), columns, "bfloat16", bias=True)
        for rows, columns in ((1, 4096), (65536, 256), (4096, 4096), (2048, 5120), (16384, 8192))
    ),
    NormCase("float32_8192x4096", "rms", (8192,), 4096, "float32"),
    NormCase("wide_1024x65536", "rms", (1024,), 65536, "bfloat16"),
)

CPU_CASES = _named(
    NormCase("rms", rows=(2, 3), columns=64, residual=True),
    NormCase("layer", "layer", rows=(5,), columns=64, bias=True),
)
