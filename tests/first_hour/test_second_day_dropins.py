"""The second day: our functions and layers in the place of Equinox's, Flax's and JAX's, and backends by name."""

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tilewright
from tilewright.errors import UnsupportedError
from tilewright.integrations.equinox import MultiheadAttention
from tilewright.integrations.flax import dot_product_attention as flax_attention
from tilewright.modules import dot_product_attention, flash_attention, glu, grouped_matmul

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 6, 16))
Q = jax.random.normal(KEY, (2, 8, 4, 16))


@pytest.fixture
def equinoxs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Equinox's class, while ours is in its place."""
    theirs = eqx.nn.MultiheadAttention
    monkeypatch.setattr(eqx.nn, "MultiheadAttention", MultiheadAttention)
    return theirs


def test_i_replace_equinoxs_layer_for_the_whole_program(equinoxs: Any):
    theirs, ours = (
        kind(2, 16, dropout_p=0.1, inference=True, key=KEY) for kind in (equinoxs, eqx.nn.MultiheadAttention)
    )
    assert type(ours) is MultiheadAttention
    x = X[0]
    np.testing.assert_allclose(ours(x, x, x), theirs(x, x, x), atol=1e-5)
    np.testing.assert_allclose(MultiheadAttention.of(theirs)(x, x, x), theirs(x, x, x), atol=1e-5)
    assert isinstance(MultiheadAttention.of(ours, causal=True), eqx.nn.MultiheadAttention)


def test_a_library_reads_the_layers_sizes(equinoxs: Any):
    options = {"key_size": 5, "value_size": 7, "output_size": 11, "qk_size": 13, "vo_size": 17, "use_key_bias": True}
    theirs, ours = (kind(2, 3, **options, key=KEY) for kind in (equinoxs, eqx.nn.MultiheadAttention))
    for name in equinoxs.__dataclass_fields__:
        value = getattr(theirs, name)
        if isinstance(value, int):
            assert getattr(ours, name) == value, name
        assert hasattr(ours, name)


def test_i_still_write_deterministic(equinoxs: Any):
    layer, x = eqx.nn.MultiheadAttention(2, 16, dropout_p=0.5, key=KEY), X[0]
    with pytest.warns(UserWarning, match="inference"):
        out = layer(x, x, x, deterministic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(out, layer(x, x, x, inference=True))


def test_my_layer_of_shapes_is_converted_too(equinoxs: Any):
    shapes = eqx.filter_eval_shape(lambda key: equinoxs(2, 16, key=key), KEY)
    ours = MultiheadAttention.of(shapes)
    assert ours.query_proj.weight.shape == (16, 16)
    assert isinstance(ours.query_proj.weight, jax.ShapeDtypeStruct)
    with pytest.raises(TypeError, match=r"must be an equinox\.nn\.MultiheadAttention, got Linear"):
        MultiheadAttention.of(ours.query_proj)  # type: ignore[arg-type]


def test_i_ask_jaxs_function_for_cudnn_and_get_ours_or_an_error(monkeypatch: pytest.MonkeyPatch):
    theirs = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    with pytest.raises(UnsupportedError, match="cudnn: needs a CUDA GPU"):
        jax.nn.dot_product_attention(Q, Q, Q, implementation="cudnn")
    ours = jax.nn.dot_product_attention(Q, Q, Q, is_causal=True, implementation="xla")
    np.testing.assert_allclose(ours, theirs(Q, Q, Q, is_causal=True), atol=1e-5)


def test_i_paste_the_names_that_explain_prints():
    rows, matrices, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([4, 2])
    (before,) = tilewright.explain(lambda x: grouped_matmul(x, matrices, sizes), rows)
    for name in before.choice.rejected:
        try:
            grouped_matmul(rows, matrices, sizes, platform=name)
        except UnsupportedError as error:
            assert list(error.reasons) == [name]  # noqa: PT017
    (found,) = tilewright.explain(lambda x: grouped_matmul(x, matrices, sizes, platform="xla:ragged_dot"), rows)
    assert found.choice.config.backend == "ragged_dot"
    with pytest.raises(UnsupportedError, match="cudnn: needs"):
        flash_attention(Q, Q, Q, platform="cuda:cudnn")
    with pytest.raises(ValueError, match=r"platform='cuda:cudn'.*'cuda:cudnn'"):
        flash_attention(Q, Q, Q, platform="cuda:cudn")


def test_my_checkpoint_has_transposed_matrices_and_a_sigmoid():
    gate, up = jax.random.normal(KEY, (2, 12, 16))  # [n, k], as PyTorch's Linear has them
    want = jax.nn.sigmoid(X @ gate.T) * (X @ up.T)
    np.testing.assert_allclose(glu(X, gate, up, activation="sigmoid", transpose_rhs=True), want, atol=1e-5)
    want = jnp.tanh(X @ gate.T) * (X @ up.T)
    np.testing.assert_allclose(glu(X, gate, up, activation="tanh", transpose_rhs=True), want, atol=1e-5)


LENGTHS = jnp.array([4, 6])
IDS = jnp.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])


class Padded(nn.Module):
    """A layer that gets lengths with each batch."""

    @nn.compact
    def __call__(self, x: Any, lengths: Any) -> Any:
        attention = functools.partial(flax_attention, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
        return nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention)(x)


def test_my_padded_batch_in_linen_under_jit():
    model = Padded()
    params = model.init(KEY, X, LENGTHS)
    got = jax.jit(model.apply)(params, X, LENGTHS)
    inside = jnp.arange(6) < LENGTHS[:, None]
    theirs = nn.MultiHeadDotProductAttention(num_heads=4)
    inner = {"params": params["params"]["MultiHeadDotProductAttention_0"]}
    want = theirs.apply(inner, X, mask=nn.make_attention_mask(inside, inside))
    np.testing.assert_allclose(got[inside], want[inside], atol=1e-5)


def test_my_packed_batch_in_nnx_under_jit():
    layer = nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0))
    want = layer(X, mask=nn.make_attention_mask(IDS, IDS, jnp.equal))

    @nnx.jit
    def packed(layer: Any, x: Any, ids: Any) -> Any:
        layer.attention_fn = functools.partial(flax_attention, q_segment_ids=ids, kv_segment_ids=ids)
        y = layer(x)
        layer.attention_fn = flax_attention
        return y

    np.testing.assert_allclose(packed(layer, X, IDS), want, atol=1e-5)


def test_i_look_at_the_weights_of_a_layer_that_calls_ours():
    """``sow_weights`` costs their memory, which I asked for; the result is that of every other call."""
    layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=flax_attention)
    params = layer.init(KEY, X)
    y, sown = layer.apply(params, X, sow_weights=True, mutable="intermediates")
    (weights,) = sown["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights.sum(-1), np.ones((2, 4, 6)), atol=1e-5)
    np.testing.assert_allclose(y, layer.apply(params, X), atol=1e-5)
