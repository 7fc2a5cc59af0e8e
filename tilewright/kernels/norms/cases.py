"""Named calls of the norms, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.norms.inputs import Kind, NormInputs
from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class NormCase(Case):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      leading: the dimensions before the rows.
      weight_dtype: dtype of weight and bias; that of x if ``None``.
      shift, residual_shift: the means of the rows of x and of the residual.
      vectors, numbers: the names of the op's arguments of these kinds.
    """

    rows: int = 1024
    columns: int = 1024
    leading: tuple[int, ...] = ()
    weight_dtype: str | None = None
    residual: bool = False
    weight: bool = True
    eps: float = 1e-6
    shift: float = 0.0
    residual_shift: float = 0.0

    kind: ClassVar[Kind]
    vectors: ClassVar[tuple[str, ...]]
    numbers: ClassVar[tuple[str, ...]]

    @property
    def options(self) -> dict[str, Any]:
        """The inputs that are not arrays."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.numbers}}

    @property
    def structs(self) -> NormInputs:
        """A backend's inputs, with shapes and dtypes in place of arrays."""
        x: Any = jax.ShapeDtypeStruct((*self.leading, self.rows, self.columns), jnp.dtype(self.dtype))
        vector: Any = jax.ShapeDtypeStruct((self.columns,), jnp.dtype(self.weight_dtype or self.dtype))
        vectors = {name: vector for name in self.vectors if getattr(self, name)}
        return NormInputs(x, residual=x if self.residual else None, **vectors, **self.options)

    def inputs(self, seed: int = 0) -> NormInputs:
        """A backend's inputs, with normal arrays."""
        random = np.random.default_rng(seed)
        drawn = jax.tree.map(lambda x: normal(random, x.shape, x.dtype.name), self.structs)
        shifts = {name: shift for name, shift in (("x", self.shift), ("residual", self.residual_shift)) if shift}
        return drawn.replace(**{name: (getattr(drawn, name) + by).astype(self.dtype) for name, by in shifts.items()})

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.inputs(seed)
        options = {name: getattr(drawn, name) for name in ("residual", *self.numbers)}
        return (drawn.x, *(getattr(drawn, name) for name in self.vectors)), options


@dataclasses.dataclass(frozen=True, slots=True)
class RmsNormCase(NormCase):
    """A call of ``rms_norm``."""

    weight_offset: float = 0.0
    kind, vectors, numbers = "rms", ("weight",), ("eps", "weight_offset")


@dataclasses.dataclass(frozen=True, slots=True)
class LayerNormCase(NormCase):
    """A call of ``layer_norm``."""

    bias: bool = True
    kind, vectors, numbers = "layer", ("weight", "bias"), ("eps",)


def _cases[C: NormCase](base: C, *shapes: tuple[int, int]) -> OpCases[C]:
    def sized(*shapes: tuple[int, int]) -> dict[str, dict[str, Any]]:
        return {f"{rows}x{columns}": {"rows": rows, "columns": columns} for rows, columns in shapes}

    float32 = {"float32_8192x4096": {"dtype": "float32", "rows": 8192, "columns": 4096}}
    return OpCases(
        shape=("rows", "columns"),
        small=dataclasses.replace(base, name="small", rows=4, columns=32, residual=True),
        large=dataclasses.replace(base, name="large", rows=6, columns=48, residual=True),
        by_device={
            "cpu": variants(base, sized((64, 1024), (1024, 4096))),
            "gpu": variants(dataclasses.replace(base, dtype="bfloat16"), sized(*shapes) | float32),
        },
        options=variants(
            dataclasses.replace(base, rows=64, columns=1024),
            {
                "float32": {},
                "bfloat16, float16": {"dtype": "bfloat16", "weight_dtype": "float32"},
                "residual": {"dtype": "bfloat16", "residual": True},
                "no weight": {"weight": False},
            },
        ),
        brief={"rows": 8, "columns": 128},
    )


RMS_CASES = _cases(
    RmsNormCase(""),
    (1, 4096), (1, 16384), (8, 8192), (128, 128), (2048, 5120), (4096, 4096), (65536, 128), (65536, 256),
    (65536, 1024), (32768, 2048), (16384, 8192), (8192, 16384), (1024, 65536),
)  # fmt: skip
"""Sizes from the decoding of one token to the largest activations; norms of heads have 128 or 256 columns."""

LAYER_CASES = _cases(
    LayerNormCase(""), (1, 4096), (65536, 256), (4096, 4096), (2048, 5120), (16384, 8192), (8192, 16384)
)
