"""The module beside Equinox's own, with the same parameters."""

import io
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.integrations.equinox import MultiheadAttention

KEY = jax.random.key(0)
SIZES: dict[str, dict[str, Any]] = {
    "one size": {"query_size": 32},
    "sizes of their own": {
        "query_size": 20, "key_size": 12, "value_size": 10, "output_size": 14, "qk_size": 8, "vo_size": 6,
    },
    "biases": {
        "query_size": 32, "use_query_bias": True, "use_key_bias": True, "use_value_bias": True, "use_output_bias": True
    },
}  # fmt: skip


def pair(**options: Any) -> tuple[Any, Any]:
    """Ours and Equinox's, by one key."""
    options = {"num_heads": 4, "query_size": 32, "key": KEY} | options
    return MultiheadAttention(**options), eqx.nn.MultiheadAttention(**options)


def operands(options: dict[str, Any], q_length: int = 6, kv_length: int = 9) -> list[Any]:
    size = options["query_size"]
    sizes = (q_length, size), (kv_length, options.get("key_size", size)), (kv_length, options.get("value_size", size))
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(sizes)]


def seen(*shape: int) -> Any:
    """A mask by which every query sees a key."""
    return (jax.random.normal(jax.random.key(9), shape) > 0).at[..., 0].set(True)


MASKS = {"none": None, "of the scores": seen(6, 9), "of each head": seen(4, 6, 9)}


@pytest.mark.parametrize(
    ("sizes", "mask"),
    list(itertools.product(SIZES, MASKS)),
)
def test_results_and_gradients_are_equinoxs(sizes: str, mask: str):
    ours, theirs = pair(**SIZES[sizes])
    arrays = operands(SIZES[sizes])

    def both(layer: Any) -> Any:
        loss = lambda layer, *x: jnp.sum(jnp.sin(layer(*x, mask=MASKS[mask])))
        gradients = eqx.filter_grad(loss)(layer, *arrays)
        return layer(*arrays, mask=MASKS[mask]), jax.tree.leaves(eqx.filter(gradients, eqx.is_array))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), both(ours), both(theirs))


def test_a_batch_by_vmap_under_filter_jit():
    ours, theirs = pair()
    x = jax.random.normal(KEY, (5, 7, 32))
    run = eqx.filter_jit(lambda layer, x: jax.vmap(lambda x: layer(x, x, x))(x))
    np.testing.assert_allclose(run(ours, x), run(theirs, x), atol=1e-5)


def test_causal_is_the_mask_without_an_array():
    ours, theirs = pair(), pair()
    ours = MultiheadAttention(4, 32, causal=True, key=KEY)
    x = jax.random.normal(KEY, (7, 32))
    np.testing.assert_allclose(ours(x, x, x), theirs[1](x, x, x, mask=jnp.tril(jnp.ones((7, 7), bool))), atol=1e-5)


def test_heads_are_processed_as_equinox_processes_them():
    ours, theirs = pair()
    rope = eqx.nn.RotaryPositionalEmbedding(8)
    x = jax.random.normal(KEY, (7, 32))

    def rotated(q: Any, k: Any, v: Any) -> Any:
        return jax.vmap(rope, in_axes=1, out_axes=1)(q), jax.vmap(rope, in_axes=1, out_axes=1)(k), v

    np.testing.assert_allclose(
        ours(x, x, x, process_heads=rotated), theirs(x, x, x, process_heads=rotated), atol=1e-5
    )  # fmt: skip
    with pytest.raises(ValueError, match="process_heads must keep the shapes"):
        ours(x, x, x, process_heads=lambda q, k, v: (q[:3], k, v))


@pytest.mark.parametrize("sizes", SIZES)
def test_of_takes_the_parameters_of_equinoxs_layer(sizes: str):
    layer = eqx.nn.MultiheadAttention(num_heads=4, **SIZES[sizes], dropout_p=0.3, inference=True, key=jax.random.key(7))
    ours, arrays = MultiheadAttention.of(layer), operands(SIZES[sizes])
    np.testing.assert_allclose(ours(*arrays), layer(*arrays), atol=1e-5)
    assert ours.dropout.p == 0.3
    assert ours.query_proj.weight is layer.query_proj.weight


def test_of_takes_one_of_ours_and_gives_it_other_options():
    ours, _ = pair(dropout_p=0.2)
    causal = MultiheadAttention.of(ours, causal=True, platform="xla")
    assert (causal.causal, causal.platform, causal.dropout) == (True, "xla", ours.dropout)
    x = jax.random.normal(KEY, (7, 32))
    want = MultiheadAttention(4, 32, causal=True, key=KEY)(x, x, x)
    np.testing.assert_allclose(causal(x, x, x, inference=True), want, atol=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_field_is_equinoxs(sizes: str):
    ours, theirs = pair(**SIZES[sizes])
    for name in theirs.__dataclass_fields__:
        assert eqx.tree_equal(getattr(ours, name), getattr(theirs, name)), name
    of = MultiheadAttention.of(theirs)
    assert jax.tree.structure(of) == jax.tree.structure(ours)
    assert eqx.tree_equal(of, ours)


def test_a_model_is_changed_layer_by_layer():
    class Block(eqx.Module):
        attention: Any
        norm: eqx.nn.LayerNorm

        def __call__(self, x: Any) -> Any:
            y = jax.vmap(self.norm)(x)
            return x + self.attention(y, y, y)

    model = [Block(eqx.nn.MultiheadAttention(4, 32, key=key), eqx.nn.LayerNorm(32)) for key in jax.random.split(KEY)]
    is_theirs = lambda node: isinstance(node, eqx.nn.MultiheadAttention)
    changed = jax.tree.map(
        lambda node: MultiheadAttention.of(node) if is_theirs(node) else node, model, is_leaf=is_theirs
    )
    x = jax.random.normal(KEY, (5, 32))
    np.testing.assert_allclose(changed[1](changed[0](x)), model[1](model[0](x)), atol=1e-5)
    assert isinstance(changed[0].attention, MultiheadAttention)


def test_a_checkpoint_of_equinoxs_layer_is_read():
    ours, theirs = MultiheadAttention(4, 32, key=jax.random.key(1)), pair()[1]
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, theirs)
    file.seek(0)
    read = eqx.tree_deserialise_leaves(file, ours)
    x = jax.random.normal(KEY, (5, 32))
    np.testing.assert_allclose(read(x, x, x), theirs(x, x, x), atol=1e-5)


def test_dropout_by_key_and_inference():
    ours, _ = pair(dropout_p=0.5)
    x = jax.random.normal(KEY, (7, 32))
    without = eqx.nn.inference_mode(ours)(x, x, x)
    np.testing.assert_array_equal(ours(x, x, x, inference=True), without)
    once, again, other = (ours(x, x, x, key=jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, other, atol=1e-3)
    assert not np.allclose(once, without, atol=1e-3)
    with pytest.raises(RuntimeError, match="needs a key"):
        ours(x, x, x)
    x = jnp.ones((4, 7, 32))
    rows = jax.vmap(lambda x, key: ours(x, x, x, key=key))(x, jax.random.split(KEY, 4))
    assert not np.allclose(rows[0], rows[1], atol=1e-3)


def test_a_training_step_with_optax_lowers_the_loss():
    import optax

    ours = MultiheadAttention(4, 32, causal=True, key=KEY)
    x = jax.random.normal(KEY, (8, 12, 32))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(ours, eqx.is_array))

    @eqx.filter_jit
    def step(layer: Any, state: Any) -> Any:
        loss = lambda layer: jnp.mean((jax.vmap(lambda x: layer(x, x, x))(x) - x) ** 2)
        value, gradients = eqx.filter_value_and_grad(loss)(layer)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(layer, updates), state, value

    losses = []
    for _ in range(20):
        ours, state, loss = step(ours, state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
