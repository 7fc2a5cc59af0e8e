"""Exported programs on a GPU: with symbolic dimensions XLA's backend runs, with given ones the kernels do."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.modules import flash_attention

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def arrays(batch: int, length: int) -> list[jax.Array]:
    draw = np.random.default_rng(batch)
    return [jnp.asarray(draw.standard_normal((batch, length, 4, 64), np.float32), jnp.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("symbolic", [True, False])
def test_a_training_step(symbolic: bool):
    def step(*qkv: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda *x: flash_attention(*x, causal=True), *qkv)
        return out, *pull(out)

    batch, length = jax.export.symbolic_shape("b, n") if symbolic else (2, 384)
    struct = jax.ShapeDtypeStruct((batch, length, 4, 64), jnp.bfloat16)
    exported = jax.export.export(jax.jit(step))(struct, struct, struct)
    exported = jax.export.deserialize(exported.serialize())
    for sizes in [(2, 384), (1, 1), (3, 515)] if symbolic else [(2, 384)]:
        given = arrays(*sizes)
        for mine, other in zip(exported.call(*given), step(*given), strict=True):
            other = np.asarray(other, np.float32)
            np.testing.assert_allclose(
                np.asarray(mine, np.float32), other, atol=max(2.0**-6 * np.abs(other).max(), 1e-4)
            )
