"""Named calls of matmuls with weights of few bits, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.cases import Arguments, Case, OpCases, Peer, normal, variants
from tilewright.kernels.weight_only.packing import FORMATS, WeightFormat, dequantized, groups_of


@dataclasses.dataclass(frozen=True, slots=True)
class WeightOnlyCase(Case):
    """The sizes and options of one call.

    Attributes:
      group: rows of the weight that share a scale; ``None`` for all.
      scale_dtype: of int4 and int8.
      zeros: with zero points.
      ordered: the weight's rows are stored in another order.
    """

    rows: int = 16
    k: int = 1024
    n: int = 1024
    format: WeightFormat = "int4"
    group: int | None = 128
    scale_dtype: str = "float32"
    zeros: bool = False
    ordered: bool = False
    preferred_element_type: str | None = None

    def arguments(self, seed: int = 0) -> Arguments:
        random = np.random.default_rng(seed)
        packing, shape = FORMATS[self.format], (groups_of(self.k, self.group), self.n)
        codes = random.integers(0, 256, (packing.units(self.k), self.n, 32), np.uint8)
        if self.format == "mxfp4":
            scales = jnp.asarray(random.integers(124, 128, shape, np.uint8))
        else:
            # Weights of about 1, as x is.
            drawn = random.uniform(0.5, 1.5, shape) / (1 << (packing.bits - 1))
            scales = jnp.asarray(drawn.astype(np.float32), jnp.dtype(self.scale_dtype))
        options: dict[str, Any] = {"scales": scales, "format": self.format, "group": self.group}
        if self.zeros:
            options["zeros"] = jnp.asarray(random.integers(-4, 4, shape), jnp.int16)
        if self.ordered:
            options["order"] = jnp.asarray(random.permutation(self.k), jnp.int32)
        if self.preferred_element_type is not None:
            options["preferred_element_type"] = self.preferred_element_type
        return (normal(random, (self.rows, self.k), self.dtype), jnp.asarray(codes)), options


def jax_dequantized(case: WeightOnlyCase) -> Peer | str:
    """``jnp.matmul`` with the weight that the codes stand for, in the dtype of x, as XLA compiles it."""
    if case.ordered:
        return "rows of a weight in their own order only"

    def matmul(x: Any, codes: Any, *, scales: Any, format: str, group: int | None, zeros: Any = None, **_: Any) -> Any:
        return jnp.matmul(x, dequantized(codes, scales, zeros, format, group, x.shape[-1], x.dtype).T)

    return matmul


_SMALL = WeightOnlyCase("small", rows=4, k=64, n=24, group=32)
_SQUARE = {"k": 8192, "n": 8192}

CASES = OpCases(
    shape=("rows", "k", "n"),
    small=_SMALL,
    large=dataclasses.replace(_SMALL, name="large", rows=6),
    by_device={
        "cpu": variants(WeightOnlyCase(""), {"1k": {}, "rows": {"rows": 256}}),
        "gpu": variants(
            WeightOnlyCase("", dtype="bfloat16", **_SQUARE),  # type: ignore[arg-type]
            {
                "1_row": {"rows": 1},
                "8_rows": {"rows": 8},
                "64_rows": {"rows": 64},
                "512_rows": {"rows": 512},
                "4096_rows": {"rows": 4096},
                "int8_8_rows": {"rows": 8, "format": "int8", "group": None},
                "mxfp4_8_rows": {"rows": 8, "format": "mxfp4", "group": 32},
                "zeros_8_rows": {"rows": 8, "zeros": True},
            },
        ),
    },
    options=variants(
        WeightOnlyCase("", dtype="bfloat16", rows=8, k=256, n=256),
        {
            "float32": {"dtype": "float32"},
            "bfloat16": {},
            "float16": {"dtype": "float16"},
            "one group of all rows": {"group": None},
            "groups of 32": {"group": 32},
            "scales in float16": {"scale_dtype": "float16"},
            "`zeros`": {"zeros": True},
            "`order`": {"ordered": True},
            "int8": {"format": "int8"},
            "mxfp4": {"format": "mxfp4", "group": 32},
            "`preferred_element_type`": {"preferred_element_type": "float32"},
            "k of no multiple of 64": {"k": 200, "group": None},
        },
    ),
    peers={"jnp.matmul, dequantised": jax_dequantized},
    brief={"rows": 8, "k": 256, "n": 256},
)
