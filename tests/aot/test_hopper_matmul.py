"""Configs of the Hopper matmuls that selection or tuning can take: no spills, and no serialised wgmmas."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiler import H100, compile_for_h100, missing_packages
from tilewright.kernels.matmul.hopper import products
from tilewright.kernels.matmul.hopper.backend import (
    HopperGatedGroupedMatmul,
    HopperGlu,
    HopperGroupedMatmul,
    HopperMatmul,
)
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages())

DEVICE = find_device(H100).device
GROUPS = 8


def struct(*shape: int, dtype: Any = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def grouped(rows: int, k: int, n: int, *, transposed: bool = False, dtype: str = "bfloat16", scales: str = "") -> Any:
    of_lhs, of_rhs = None, None
    if scales == "blocks":
        of_lhs, of_rhs = struct(rows, k // 128, dtype="float32"), struct(GROUPS, n // 128, k // 128, dtype="float32")
    elif scales == "numbers":
        of_lhs = of_rhs = struct(dtype="float32")
    rhs = struct(GROUPS, *((n, k) if transposed else (k, n)), dtype=dtype)
    inputs = MatmulInputs(
        struct(rows, k, dtype=dtype),
        rhs,
        out_dtype="bfloat16" if scales else dtype,
        group_sizes=struct(GROUPS, dtype="int32"),
        lhs_scale=of_lhs,
        rhs_scale=of_rhs,
        transpose_rhs=transposed,
    )
    return HopperGroupedMatmul(), inputs, struct(rows, n, dtype=inputs.out_dtype), None


def gated(rows: int, k: int, n: int) -> Any:
    matrices, d_out = struct(GROUPS, k, n), struct(rows, n)
    inputs = MatmulInputs(
        struct(rows, k), matrices, "bfloat16", matrices, struct(GROUPS, dtype="int32"), activation="gelu"
    )
    return HopperGatedGroupedMatmul(), inputs, d_out, (d_out, d_out)


def dense(m: int, k: int, n: int, **flags: bool) -> Any:
    lhs = (k, m) if flags.get("transpose_lhs") else (m, k)
    rhs = (n, k) if flags.get("transpose_rhs") else (k, n)
    return HopperMatmul(), MatmulInputs(struct(*lhs), struct(*rhs), "bfloat16", **flags), struct(m, n), None


def glu(m: int, k: int, n: int) -> Any:
    inputs = MatmulInputs(struct(m, k), struct(k, n), "bfloat16", struct(k, n), activation="silu")
    return HopperGlu(), inputs, struct(m, n), (struct(m, n), struct(m, n))


CALLS: dict[str, Callable[[], Any]] = {
    "grouped": functools.partial(grouped, 8192, 4096, 14336),
    "transposed": functools.partial(grouped, 8192, 4096, 2048, transposed=True),
    "decode": functools.partial(grouped, 64, 7168, 2048),
    "odd": functools.partial(grouped, 1000, 136, 1096, dtype="float16"),
    "float8 blocks": functools.partial(
        grouped, 8192, 4096, 2048, transposed=True, dtype="float8_e4m3fn", scales="blocks"
    ),
    "float8 numbers": functools.partial(
        grouped, 8192, 4096, 2048, transposed=True, dtype="float8_e4m3fn", scales="numbers"
    ),
    "gated": functools.partial(gated, 8192, 4096, 14336),
    "NN": functools.partial(dense, 4096, 4096, 4096),
    "TT": functools.partial(dense, 4000, 4088, 4096, transpose_lhs=True, transpose_rhs=True),
    "glu": functools.partial(glu, 8192, 4096, 14336),
}

SPILLS = {"gated": 16}
"""Bytes that the exact GELU may take where a consumer has two accumulators of 128 rows."""


def each_config() -> Iterator[Any]:
    for name, direction in itertools.product(CALLS, ("forward", "backward")):
        backend, inputs, *_ = CALLS[name]()
        if backend.not_supported_reasons(inputs, DEVICE, direction):
            continue
        for number, params in enumerate(backend.candidates(inputs, DEVICE, direction)):
            # Bands differ only in arithmetic: the first config of each call stands for them.
            yield pytest.param(name, direction, params, id=f"{name}-{direction}-{number}")


@pytest.mark.parametrize(("name", "direction", "params"), each_config())
def test_no_spills(name: str, direction: Direction, params: Any):
    backend, inputs, d_out, results = CALLS[name]()

    def call(inputs: Any, d_out: Any, results: Any) -> Any:
        if direction == "forward":
            return backend.forward(inputs, params)
        return backend.backward(inputs, results, d_out, params)

    with mock.patch.object(products, "num_sms", return_value=132):
        reports = compile_for_h100(call, inputs, d_out, results)
    assert reports
    assert not any(report.serialised for report in reports)
    assert max(report.spill_stores for report in reports) <= SPILLS.get(name, 0)
