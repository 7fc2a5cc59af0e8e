"""The launch of kernels for TPUs, beside what is around a call."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import tilewright
from tests.support.tpu_interpret import interpret_tpu
from tilewright.kernels.tpu.launch import run_kernel


def _scale(factor_ref, x_ref, out_ref, twice_ref):
    out_ref[...] = factor_ref[...] * x_ref[...]
    twice_ref[...] = 2 * out_ref[...]


def scaled(factor: jax.Array, x: jax.Array) -> list[jax.Array]:
    """The product of a row with every row of an array, in blocks, and its double."""
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    results: list[jax.Array] = run_kernel(
        _scale, factor, x,
        role="scale", grid=(x.shape[0] // 8,), orders=("parallel",),
        in_specs=[pl.BlockSpec((1, 128), lambda i: (0, 0)), block],
        out_specs=[block, block],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
    )  # fmt: skip
    return results


def test_results_are_those_of_the_blocks() -> None:
    rng = np.random.default_rng(0)
    factor, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 128), (24, 128)))
    with interpret_tpu(detect_races=True, seed=1):
        out, twice = jax.jit(scaled)(factor, x)
    np.testing.assert_allclose(out, factor * x, rtol=1e-6)
    np.testing.assert_allclose(twice, 2 * factor * x, rtol=1e-6)


def test_inside_of_shard_map_results_vary_as_operands_do() -> None:
    """``shard_map`` checks by default over which axes a value varies; a kernel must say so of its results."""
    with tilewright.target_device("TPU v6e", count=4) as target:
        mesh = target.make_mesh((2, 2), ("x", "y"))
        split = jax.shard_map(scaled, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
        structs = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
            for shape, spec in (((1, 128), P()), ((32, 128), P("x")))
        ]
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(split).trace(*structs)
    assert [x.shape for x in traced.out_info] == [(32, 128)] * 2
