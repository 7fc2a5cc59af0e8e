"""What a Flax, Equinox and Optax user writes: layers scanned and rematerialised, trained, on a mesh."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.integrations.equinox import MultiheadAttention
from tilewright.integrations.flax import dot_product_attention
from tilewright.modules import flash_attention

X = jax.random.normal(jax.random.key(0), (8, 16, 32))
NAMES = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_residuals")


class LinenBlock(nn.Module):
    attention_fn: Any = dot_product_attention
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        layer = nn.MultiHeadDotProductAttention(
            num_heads=4, attention_fn=self.attention_fn, dropout_rate=self.dropout_rate, deterministic=False
        )
        return x + layer(nn.LayerNorm()(x), mask=nn.make_causal_mask(x[..., 0])), None


def linen_model(attention_fn: Any, dropout_rate: float = 0.0) -> Any:
    """Three layers, scanned over and rematerialised except for the results of attention."""
    block = nn.scan(
        nn.remat(LinenBlock, prevent_cse=False, policy=NAMES),
        variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3,
    )  # fmt: skip
    return block(attention_fn, dropout_rate)


def test_linen_layers_scanned_and_rematerialised_train_as_with_flaxs_attention():
    def losses(attention_fn: Any) -> list[float]:
        model = linen_model(attention_fn)
        params = model.init(jax.random.key(1), X, None)
        optimizer = optax.adamw(1e-2)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            loss = lambda params: jnp.mean((model.apply(params, X, None)[0] - jnp.roll(X, 1, 1)) ** 2)
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        state, found = optimizer.init(params), []
        for _ in range(5):
            params, state, value = step(params, state)
            found.append(float(value))
        return found

    np.testing.assert_allclose(losses(dot_product_attention), losses(nn.dot_product_attention), rtol=1e-4)


def test_linen_layers_draw_their_dropout_anew_in_each_layer_and_step():
    model = linen_model(dot_product_attention, 0.5)
    params = model.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, X, None)
    run = jax.jit(lambda key: model.apply(params, X, None, rngs={"dropout": key})[0])
    once, again, other = run(jax.random.key(3)), run(jax.random.key(3)), run(jax.random.key(4))
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, other, atol=1e-3)


def test_nnx_layers_scanned_and_rematerialised():
    def model(attention_fn: Any) -> Any:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: Any) -> Any:
            return nnx.MultiHeadAttention(
                num_heads=4, in_features=32, decode=False, attention_fn=attention_fn, rngs=rngs, keep_rngs=False
            )

        return layers(nnx.Rngs(0))

    @nnx.jit
    def gradients(model: Any, x: Any) -> Any:
        @functools.partial(nnx.scan, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @functools.partial(nnx.remat, policy=NAMES)
        def forward(layer: Any, x: Any) -> Any:
            return x + layer(x, is_causal=True)

        return nnx.grad(lambda model: jnp.sum(jnp.sin(forward(model, x))))(model)

    ours, theirs = gradients(model(dot_product_attention), X), gradients(model(nnx.dot_product_attention), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours, theirs)


def test_equinox_layers_under_filter_vmap_checkpoint_and_scan():
    keys = jax.random.split(jax.random.key(1), 3)
    layers = eqx.filter_vmap(lambda key: MultiheadAttention(4, 32, causal=True, key=key))(keys)
    parameters, static = eqx.partition(layers, eqx.is_array)

    @eqx.filter_jit
    def run(parameters: Any, x: Any) -> Any:
        @eqx.filter_checkpoint
        def one(x: Any, parameters: Any) -> Any:
            layer = eqx.combine(parameters, static)
            return x + jax.vmap(lambda x: layer(x, x, x))(x)

        return jax.lax.scan(lambda x, parameters: (one(x, parameters), None), x, parameters)[0]

    want = X
    for i in range(3):
        layer = eqx.combine(jax.tree.map(lambda leaf, i=i: leaf[i], parameters), static)
        want = want + jax.vmap(lambda x, layer=layer: layer(x, x, x))(want)
    np.testing.assert_allclose(run(parameters, X), want, atol=1e-4)
    gradient = jax.grad(lambda parameters: jnp.sum(run(parameters, X)))(parameters)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_split_over_a_mesh(kind: AxisType):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        split = jax.device_put(X, NamedSharding(mesh, P("data")))
        attention = lambda x: flash_attention(*(x.reshape(8, 16, 4, 8),) * 3, causal=True)
        got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(attention(x)))))(split)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(jnp.sin(attention(x))))(X), atol=1e-5)
