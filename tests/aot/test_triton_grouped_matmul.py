"""Every config of the grouped matmul in Triton that selection or tuning can take compiles without spills."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.triton.backend import TritonGroupedMatmul
from tilewright.kernels.triton import recorded_launches
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device

pytest.importorskip("triton")

from tilewright.kernels.triton.compiler import report

BACKEND = TritonGroupedMatmul()
CARDS = {
    "a100": find_device("NVIDIA A100-SXM4-80GB").device,
    "rtx4090": find_device("NVIDIA GeForce RTX 4090").device,
    "h100": find_device("NVIDIA H100 80GB HBM3").device,
}
CALLS: dict[str, dict[str, Any]] = {
    "large": {"rows": 8192, "k": 4096, "n": 14336},
    "decode": {"rows": 64, "k": 4096, "n": 14336},
    "float32": {"rows": 8192, "k": 1024, "n": 2048, "dtype": "float32"},
    "float32_decode": {"rows": 64, "k": 1024, "n": 2048, "dtype": "float32"},
    "exact": {"rows": 8192, "k": 1024, "n": 2048, "dtype": "float32", "precision": jax.lax.Precision.HIGHEST},
    "transposed": {"rows": 8192, "k": 1024, "n": 2048, "transposed": True},
    "odd": {"rows": 1000, "k": 130, "n": 77, "dtype": "float16"},
    "odd_decode": {"rows": 64, "k": 130, "n": 77},
}

TUNED = ("large", "decode", "float32", "odd", "odd_decode")
"""Every candidate of these calls is compiled; of the other calls only the first choice."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One config of one call, as shapes, for a card."""

    name: str
    card: str
    inputs: MatmulInputs
    direction: Direction
    params: Any


def inputs_of(
    rows: int, k: int, n: int, dtype: str = "bfloat16", transposed: bool = False, precision: Any = None
) -> MatmulInputs:
    lhs: Any = jax.ShapeDtypeStruct((rows, k), jnp.dtype(dtype))
    rhs: Any = jax.ShapeDtypeStruct((8, n, k) if transposed else (8, k, n), jnp.dtype(dtype))
    sizes: Any = jax.ShapeDtypeStruct((8,), jnp.int32)
    return MatmulInputs(lhs, rhs, dtype, group_sizes=sizes, transpose_rhs=transposed, precision=precision)


def compilations() -> Iterator[Compilation]:
    directions: tuple[Direction, ...] = ("forward", "backward")
    for (name, call), (card, device), direction in itertools.product(CALLS.items(), CARDS.items(), directions):
        inputs = inputs_of(**call)
        candidates = list(BACKEND.candidates(inputs, device, direction))
        for number, params in enumerate(candidates if name in TUNED else candidates[:1]):
            yield Compilation(f"{name}-{card}-{direction}-{number}", card, inputs, direction, params)


def trace(compilation: Compilation) -> None:
    inputs, params = compilation.inputs, compilation.params
    if compilation.direction == "forward":
        jax.eval_shape(lambda inputs: BACKEND.forward(inputs, params), inputs)
        return
    d_out = jax.ShapeDtypeStruct(inputs.out_shape, inputs.out_dtype)
    jax.eval_shape(lambda inputs, d_out: BACKEND.backward(inputs, None, d_out, params), inputs, d_out)


@pytest.mark.parametrize("compilation", list(compilations()), ids=lambda compilation: compilation.name)
def test_compiles_without_spills(compilation: Compilation) -> None:
    device = CARDS[compilation.card]
    with tilewright.target_device(device.name), recorded_launches() as launches:
        trace(compilation)
    assert device.capability is not None
    reports = [report(launch, device.capability) for launch in launches]
    assert len(reports) == (1 if compilation.direction == "forward" else 2)
    faults = [fault for each in reports for fault in each.faults]
    assert faults == [], [(each.name, each.registers) for each in reports]
