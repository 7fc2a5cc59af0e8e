"""Named calls of ``quantize``, for tests, tuning and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.op.cases import Arguments, Case, OpCases, normal, variants


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeCase(Case):
    """The sizes and options of one call.

    Attributes:
      leading: the dimensions before the rows.
    """

    rows: int = 256
    columns: int = 1024
    leading: tuple[int, ...] = ()
    format: str = "e4m3"
    scaling: str = "block"
    axis: int = -1
    block: tuple[int, int] | None = None
    power_of_two: bool = False
    transposed: bool = False

    def arguments(self, seed: int = 0) -> Arguments:
        names = ("format", "scaling", "axis", "block", "power_of_two", "transposed")
        x = normal(seed, (*self.leading, self.rows, self.columns), self.dtype)
        return (x,), {name: getattr(self, name) for name in names}


def cast(case: QuantizeCase) -> Any:
    """A peer that only converts: one read and one write, without scales."""
    if case.transposed:
        return "it writes one orientation"
    dtype = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int8": jnp.int8}[case.format]
    return lambda x, **_: jax.lax.convert_element_type(x, dtype)


_ON_GPUS = QuantizeCase("", rows=8192, columns=4096, dtype="bfloat16")

CASES = OpCases(
    shape=("rows", "columns"),
    small=QuantizeCase("small", rows=4, columns=160),
    large=QuantizeCase("large", rows=6, columns=300),
    by_device={
        "cpu": variants(QuantizeCase(""), {"1k": {}, "row": {"scaling": "row"}, "both": {"transposed": True}}),
        "gpu": variants(
            _ON_GPUS,
            {
                "block": {},
                "row": {"scaling": "row"},
                "tensor": {"scaling": "tensor"},
                "weight": {"block": (128, 128), "columns": 14336, "rows": 4096},
                "both": {"transposed": True},
                "both_wide": {"transposed": True, "columns": 14336},
                "row_both": {"scaling": "row", "transposed": True},
                "int8": {"format": "int8", "scaling": "row"},
            },
        ),
    },
    options=variants(
        QuantizeCase("", rows=256, columns=512, dtype="bfloat16"),
        {
            "tensor": {"scaling": "tensor"},
            "row": {"scaling": "row"},
            "block": {},
            "block of 128 × 128": {"block": (128, 128)},
            "along axis −2": {"axis": -2},
            "both orientations": {"transposed": True},
            "both, row": {"scaling": "row", "transposed": True},
            "e5m2": {"format": "e5m2"},
            "int8": {"format": "int8"},
            "power of two": {"power_of_two": True},
            "float32": {"dtype": "float32"},
        },
    ),
    peers={"cast": cast},
)
