"""Small kernels for TPUs that show what the compiler and its simulator say."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.kernels.tpu.launch import run_kernel


def _matmul(x_ref: Any, y_ref: Any, out_ref: Any, sums: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    sums[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        out_ref[...] = sums[...].astype(out_ref.dtype)


def matmul(size: int, block: int) -> Any:
    """A product with a square matrix, of a square one or of other rows, in square blocks."""
    struct = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        rows = x.shape[0]
        found: jax.Array = run_kernel(
            _matmul, x, y,
            role="matmul",
            grid=(rows // block, size // block, size // block),
            orders=("parallel", "parallel", "arbitrary"),
            in_specs=[
                pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
                pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
            flops=2 * rows * size**2,
        )  # fmt: skip
        return found

    return product, (struct, struct)


def _copy(x_ref: Any, out_ref: Any, scratch: Any) -> None:
    scratch[:8] = x_ref[...]
    out_ref[...] = scratch[:8]


def scratch(mebibytes: int) -> Any:
    """A copy by way of scratch memory of a size."""
    struct = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def copy(x: jax.Array) -> jax.Array:
        return run_kernel(
            _copy, x,
            role="copy", grid=(1,), orders=("arbitrary",),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=struct,
            scratch_shapes=[pltpu.VMEM((mebibytes << 11, 128), jnp.float32)],
        )  # fmt: skip

    return copy, (struct,)


def _rounds(count_ref: Any, x_ref: Any, out_ref: Any, *, rounds: int | None) -> None:
    out_ref[...] = x_ref[...]

    def square(_: Any, carry: None) -> None:
        out_ref[...] = jnp.dot(out_ref[...], x_ref[...], preferred_element_type=jnp.float32).astype(out_ref.dtype)

    jax.lax.fori_loop(0, count_ref[0] if rounds is None else rounds, square, None)


def power(rounds: int | None) -> Any:
    """A power of a matrix; ``None`` for an exponent that only the data tell."""
    struct = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

    def powers(count: jax.Array, x: jax.Array) -> jax.Array:
        return run_kernel(
            functools.partial(_rounds, rounds=rounds), count, x,
            role="power", grid=(1,), orders=("arbitrary",), scalars=1,
            in_specs=[pl.BlockSpec((256, 256), lambda i, count: (0, 0))],
            out_specs=pl.BlockSpec((256, 256), lambda i, count: (0, 0)),
            out_shape=struct,
        )  # fmt: skip

    return powers, (jax.ShapeDtypeStruct((1,), jnp.int32), struct)


def refused() -> Any:
    """A function that no compiler gets to see."""

    def function() -> None:
        raise ValueError("this is refused when it is traced")

    return function, ()


def lost() -> Any:
    """Ends the process that compiles, as the simulator does at what it does not know."""
    import os

    os._exit(9)
