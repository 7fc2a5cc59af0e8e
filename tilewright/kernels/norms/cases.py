"""Named calls of the norms, for tests, tuning and benchmarks."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.norms.inputs import NormInputs
from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class NormCase(Case, abc.ABC):
    """The sizes and options of one call, from which random arrays can be made.

    Attributes:
      leading: the dimensions before the rows.
      weight_dtype: dtype of weight and bias; that of x if ``None``.
      shift, residual_shift: the means of the rows of x and of the residual.
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

    @property
    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """The inputs that are not arrays."""

    @property
    @abc.abstractmethod
    def has_bias(self) -> bool:
        """True if there is a bias."""

    @property
    def structs(self) -> NormInputs:
        """A backend's inputs, with shapes and dtypes in place of arrays."""
        x: Any = jax.ShapeDtypeStruct((*self.leading, self.rows, self.columns), jnp.dtype(self.dtype))
        vector: Any = jax.ShapeDtypeStruct((self.columns,), jnp.dtype(self.weight_dtype or self.dtype))
        return NormInputs(
            x,
            residual=x if self.residual else None,
            weight=vector if self.weight else None,
            bias=vector if self.has_bias else None,
            **self.options,
        )

    def inputs(self, seed: int = 0) -> NormInputs:
        """A backend's inputs, with normal arrays."""
        random = np.random.default_rng(seed)
        drawn = jax.tree.map(lambda x: normal(random, x.shape, x.dtype.name), self.structs)
        shifted = {
            name: (getattr(drawn, name) + shift).astype(self.dtype)
            for name, shift in (("x", self.shift), ("residual", self.residual_shift))
            if shift
        }
        return dataclasses.replace(drawn, **shifted)


@dataclasses.dataclass(frozen=True, slots=True)
class RmsNormCase(NormCase):
    """A call of ``rms_norm``."""

    weight_offset: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {"kind": "rms", "eps": self.eps, "weight_offset": self.weight_offset}

    @property
    def has_bias(self) -> bool:
        return False

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.inputs(seed)
        options = {"residual": drawn.residual, "eps": self.eps, "weight_offset": self.weight_offset}
        return (drawn.x, drawn.weight), options


@dataclasses.dataclass(frozen=True, slots=True)
class LayerNormCase(NormCase):
    """A call of ``layer_norm``."""

    bias: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {"kind": "layer", "eps": self.eps}

    @property
    def has_bias(self) -> bool:
        return self.bias

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.inputs(seed)
        return (drawn.x, drawn.weight, drawn.bias), {"residual": drawn.residual, "eps": self.eps}


def _named[C: NormCase](base: C, prefix: str, *shapes: tuple[int, int]) -> dict[str, C]:
    return variants(base, {f"{prefix}{rows}x{columns}": {"rows": rows, "columns": columns} for rows, columns in shapes})


def _cases[C: NormCase](base: C, *shapes: tuple[int, int]) -> OpCases[C]:
    return OpCases(
        shape=("rows", "columns"),
        small=dataclasses.replace(base, name="small", rows=4, columns=32, residual=True),
        large=dataclasses.replace(base, name="large", rows=6, columns=48, residual=True),
        by_device={
            "cpu": _named(base, "", (64, 1024), (1024, 4096)),
            "gpu": _named(dataclasses.replace(base, dtype="bfloat16"), "", *shapes)
            | _named(dataclasses.replace(base, dtype="float32"), "float32_", (8192, 4096)),
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
