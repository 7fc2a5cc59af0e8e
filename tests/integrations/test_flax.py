"""The attention_fn inside Flax's own layers, Linen's and NNX's, beside Flax's own function."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import attention as linen_attention
from flax.nnx.nn import attention as nnx_attention

from tilewright.integrations.flax import dot_product_attention
from tilewright.modules import flash_attention

THEIRS = {"linen": linen_attention.dot_product_attention, "nnx": nnx_attention.dot_product_attention}
SHAPES = {"plain": (2,), "two batch dimensions": (2, 3), "no batch dimension": ()}


def arrays(
    batch: tuple[int, ...] = (2,), q_length: int = 6, kv_length: int = 9, kv_heads: int = 4, value_dim: int = 16
) -> list[Any]:
    shapes = (*batch, q_length, 4, 16), (*batch, kv_length, kv_heads, 16), (*batch, kv_length, kv_heads, value_dim)
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def scores(batch: tuple[int, ...], seed: int = 9) -> Any:
    return jax.random.normal(jax.random.key(seed), (*batch, 4, 6, 9))


def seen(array: Any) -> Any:
    """A mask from any array, by which every query sees a key."""
    return (array > 0).at[..., 0].set(True)


OPTIONS: dict[str, Any] = {
    "none": lambda batch: {},
    "bias": lambda batch: {"bias": scores(batch)},
    "bias of one head": lambda batch: {"bias": scores(batch)[..., :1, :, :]},
    "mask": lambda batch: {"mask": seen(scores(batch))},
    "mask of floats": lambda batch: {"mask": seen(scores(batch)).astype(jnp.float32)},
    "mask of all batch elements": lambda batch: {"mask": seen(scores((1,) * len(batch)))},
    "bias and mask": lambda batch: {"bias": scores(batch), "mask": seen(scores(batch, 8))},
    "precision": lambda batch: {"precision": "highest"},
    "dtype": lambda batch: {"dtype": jnp.float32},
}


@pytest.mark.parametrize(
    ("option", "shape", "theirs"),
    list(itertools.product(OPTIONS, SHAPES, THEIRS)),
)
def test_results_and_gradients_are_flaxs(option: str, shape: str, theirs: str):
    batch = SHAPES[shape]
    # Without dropout NNX calls jax.nn's function, which wants values of the keys' width.
    options, operands = OPTIONS[option](batch), arrays(batch, value_dim=16 if theirs == "nnx" else 8)

    def both(function: Any) -> Any:
        loss = lambda *x: jnp.sum(jnp.sin(function(*x, **options, deterministic=True)))
        return function(*operands, **options, deterministic=True), jax.grad(loss, argnums=(0, 1, 2))(*operands)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), both(dot_product_attention), both(THEIRS[theirs])
    )


def test_causality_and_grouped_heads_are_nnxs():
    query, key, value = arrays(q_length=9, kv_heads=2)
    got = dot_product_attention(query, key, value, is_causal=True, promote_dtype=nnx_attention.dtypes.promote_dtype)
    want = nnx_attention.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.int8])
def test_dtypes_are_promoted_as_flax_promotes_them(given: Any):
    query, key, value = arrays(value_dim=8)
    query = query.astype(given)
    for dtype in (None, jnp.float16):
        theirs = linen_attention.dot_product_attention(query, key, value, dtype=dtype, deterministic=True)
        assert dot_product_attention(query, key, value, dtype=dtype).dtype == theirs.dtype


def layer(kind: str, attention_fn: Any, **options: Any) -> Any:
    """A call ``(inputs, **kwargs)`` of a layer with fixed parameters, and the same again with other options."""
    if kind == "linen":
        module = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, attention_fn=attention_fn, **options)
        start = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32)
        params = start.init(jax.random.key(0), jnp.ones((2, 6, 24)))
        return lambda x, rng=None, **kw: module.apply(params, x, rngs={"dropout": rng} if rng is not None else {}, **kw)
    sizes = {"num_heads": 4, "in_features": 24, "qkv_features": 32}
    module = nnx.MultiHeadAttention(**sizes, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0), **options)
    return lambda x, rng=None, **kw: module(x, rngs=nnx.Rngs(dropout=rng) if rng is not None else None, **kw)


X = jax.random.normal(jax.random.key(5), (2, 6, 24))
CAUSAL = nn.make_causal_mask(jnp.ones((2, 6)))  # of float32, as Flax makes them

layers = pytest.mark.parametrize("kind", ["linen", "nnx"])


@layers
def test_inside_flaxs_layers(kind: str):
    got = layer(kind, dot_product_attention)(X, mask=CAUSAL)
    want = layer(kind, THEIRS[kind])(X, mask=CAUSAL)
    assert CAUSAL.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-5)


@layers
def test_the_layers_dropout_is_drawn_from_their_rngs(kind: str):
    call = layer(kind, dot_product_attention, dropout_rate=0.5, broadcast_dropout=True)
    without = layer(kind, dot_product_attention)(X)
    np.testing.assert_array_equal(call(X, deterministic=True), without)
    once, again, other = (call(X, jax.random.key(seed), deterministic=False) for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, without, atol=1e-3)
    assert not np.allclose(once, other, atol=1e-3)
    jitted = jax.jit(lambda x, key: call(x, key, deterministic=False)) if kind == "linen" else None
    if jitted is not None:
        np.testing.assert_allclose(jitted(X, jax.random.key(1)), once, atol=1e-6)


def test_dropout_keeps_the_mean_and_drops_the_share():
    query, key, _ = arrays((64,), 32, 32)
    value = jnp.ones((64, 32, 4, 8))
    out = dot_product_attention(0 * query, 0 * key, value, dropout_rng=jax.random.key(0), dropout_rate=0.25)
    kept = out[..., 0] * 32 * 0.75  # the number of keys kept, of 32 with equal weights
    np.testing.assert_allclose(kept, jnp.round(kept), atol=1e-3)
    assert abs(float(kept.mean()) / 32 - 0.75) < 0.01
    assert not np.allclose(out[0], out[1])  # each batch element draws for itself
    assert not np.allclose(out[:, :, 0], out[:, :, 1])


@layers
def test_dropout_under_grad_drops_the_same_in_both_passes(kind: str):
    call = layer(kind, dot_product_attention, dropout_rate=0.5)
    loss = lambda x: jnp.sum(jnp.sin(call(x, jax.random.key(1), deterministic=False)))
    gradient = jax.grad(loss)(X)
    step = 1e-2 * jax.random.normal(jax.random.key(7), X.shape)
    np.testing.assert_allclose(jnp.vdot(gradient, step), (loss(X + step) - loss(X - step)) / 2, rtol=2e-3)


def test_a_linen_decode_cache():
    def run(attention_fn: Any) -> Any:
        module = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, attention_fn=attention_fn, decode=True)
        variables = module.init(jax.random.key(0), X)
        cache, outs = variables["cache"], []
        for position in range(6):
            out, changed = module.apply(
                {"params": variables["params"], "cache": cache}, X[:, position : position + 1], mutable=["cache"]
            )
            cache = changed["cache"]
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    np.testing.assert_allclose(run(dot_product_attention), run(THEIRS["linen"]), atol=1e-5)


def test_an_nnx_decode_cache():
    def run(attention_fn: Any) -> Any:
        module = nnx.MultiHeadAttention(
            num_heads=4, num_kv_heads=2, in_features=24, qkv_features=32, decode=True, attention_fn=attention_fn,
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        module.init_cache(X.shape)
        return jnp.concatenate([module(X[:, i : i + 1]) for i in range(6)], axis=1)

    np.testing.assert_allclose(run(dot_product_attention), run(THEIRS["nnx"]), atol=1e-5)


def test_a_query_that_attends_to_nothing_gives_zeros_where_flax_averages():
    query, key, value = arrays()
    mask = jnp.ones((2, 1, 6, 9), bool).at[:, :, 2].set(False)
    got = dot_product_attention(query, key, value, mask=mask)
    theirs = linen_attention.dot_product_attention(query, key, value, mask=mask, deterministic=True)
    np.testing.assert_array_equal(got[:, 2], jnp.zeros_like(got[:, 2]))
    np.testing.assert_allclose(theirs[:, 2], value.mean(1), atol=1e-5)
    np.testing.assert_allclose(jnp.delete(got, 2, 1), jnp.delete(theirs, 2, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 6, 4, 16), (6, 4, 16), (6, 4, 16)), "same rank"),
        (((2, 3, 6, 4, 16), (2, 4, 6, 4, 16), (2, 4, 6, 4, 16)), r"batch dims .*key\.shape=\(2, 4, 6, 4, 16\)"),
        (((2, 6, 4, 16), (2, 6, 4, 16), (2, 5, 4, 16)), "lengths must match"),
        (((2, 6, 4, 16), (2, 6, 4, 8), (2, 6, 4, 16)), "depths must match"),
        (((2, 6, 4, 16), (2, 6, 3, 16), (2, 6, 3, 16)), "must be a multiple"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error_in_the_callers_shapes(shapes: Any, message: str):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*(jnp.ones(shape) for shape in shapes))


IDS = jnp.array([[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]])
LENGTHS = jnp.array([4, 6])


@layers
def test_lengths_inside_flaxs_layers_are_a_padding_mask(kind: str):
    ours = functools.partial(dot_product_attention, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS)
    inside = jnp.arange(6) < LENGTHS[:, None]
    mask = nn.make_attention_mask(inside, inside)
    got = layer(kind, ours)(X)
    want = layer(kind, THEIRS[kind])(X, mask=mask)
    np.testing.assert_allclose(got[inside], want[inside], atol=1e-5)
    # What is behind the lengths reaches nothing.
    poisoned = jnp.where(inside[..., None], X, 1e4)
    np.testing.assert_allclose(layer(kind, ours)(poisoned)[inside], got[inside], atol=1e-6)
    loss = lambda function, **options: jax.grad(
        lambda x: jnp.sum(jnp.sin(layer(kind, function)(x, **options)[inside]))
    )(X)
    np.testing.assert_allclose(loss(ours)[inside], loss(THEIRS[kind], mask=mask)[inside], atol=2e-5)


@layers
def test_segment_ids_inside_flaxs_layers_are_a_block_mask(kind: str):
    ours = functools.partial(dot_product_attention, q_segment_ids=IDS, kv_segment_ids=IDS)
    same = nn.make_attention_mask(IDS, IDS, jnp.equal)
    got, want = layer(kind, ours)(X), layer(kind, THEIRS[kind])(X, mask=same)
    np.testing.assert_allclose(got, want, atol=1e-5)
    both = nn.combine_masks(same, CAUSAL)
    np.testing.assert_allclose(layer(kind, ours)(X, mask=CAUSAL), layer(kind, THEIRS[kind])(X, mask=both), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_and_segment_ids_have_the_batch_dimensions_of_the_query(shape: str):
    batch = SHAPES[shape]
    size = int(np.prod(batch))
    lengths = jnp.arange(3, 3 + size).reshape(batch)
    q_ids, kv_ids = (jnp.repeat(jnp.arange(3), each)[: each * 3] for each in (2, 3))
    q_ids, kv_ids = (jnp.broadcast_to(ids, (*batch, ids.size)) for ids in (q_ids, kv_ids))
    got = dot_product_attention(
        *arrays(batch), key_value_seq_lengths=lengths, q_segment_ids=q_ids, kv_segment_ids=kv_ids
    )
    visible = (jnp.arange(9) < lengths[..., None])[..., None, :] & (q_ids[..., :, None] == kv_ids[..., None, :])
    want = dot_product_attention(*arrays(batch), mask=visible[..., None, :, :])
    np.testing.assert_allclose(got, want, atol=1e-5)


WRONG = {
    "weights of lengths": (
        {"module": nn.Module(), "query_seq_lengths": jnp.ones(2, int)},
        ValueError,
        "for sow_weights=True Flax's own dot_product_attention is called, which has no query_seq_lengths",
    ),
    "Linen's weights, causal": ({"module": nn.Module(), "is_causal": True}, ValueError, "has no is_causal"),
    "an einsum on a platform": (
        {"qk_attn_weights_einsum": jnp.einsum, "platform": "xla"},
        ValueError,
        "for qk_attn_weights_einsum .* has no platform",
    ),
    "dropout without a generator": (
        {"dropout_rate": 0.1, "deterministic": False},
        ValueError,
        "dropout_rng is required",
    ),
    "a rate of one": ({"dropout_rate": 1.0, "dropout_rng": jax.random.key(0)}, ValueError, "dropout_rate must be in"),
    "a rate below zero": ({"dropout_rate": -0.5}, ValueError, r"dropout_rate must be in the range \[0, 1\)"),
    "a rate that is no number": ({"dropout_rate": float("nan")}, ValueError, "dropout_rate=nan"),
    "a rate that is wrong where nothing drops": ({"dropout_rate": 2.0, "deterministic": True}, ValueError, "rate=2.0"),
    "lengths of another batch": ({"query_seq_lengths": jnp.ones(3, int)}, ValueError, r"shape \(2,\), got query_seq"),
    "ids of another length": (
        {"q_segment_ids": jnp.ones((2, 6), int), "kv_segment_ids": jnp.ones((2, 6), int)},
        ValueError,
        r"\(2, 9\)",
    ),
    "ids of the queries alone": ({"q_segment_ids": jnp.ones((2, 6), int)}, ValueError, "kv_segment_ids"),
    "a mask that does not fit": ({"mask": jnp.ones((2, 1, 5, 9))}, ValueError, "mask must be broadcastable"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_served_is_one_clear_error(name: str):
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        dot_product_attention(*arrays(), **options)


def sown(kind: str, attention_fn: Any, **options: Any) -> Any:
    """The result of a layer and the weights that it has sown."""
    sizes = {"num_heads": 4, "qkv_features": 32, "attention_fn": attention_fn, **options}
    if kind == "linen":
        module = nn.MultiHeadDotProductAttention(**sizes)
        params = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32).init(jax.random.key(0), X)
        return module.apply(params, X, mask=CAUSAL, sow_weights=True, mutable="intermediates")
    layer = nnx.MultiHeadAttention(in_features=24, decode=False, rngs=nnx.Rngs(0), **sizes)
    out = layer(X, is_causal=True, sow_weights=True, deterministic="dropout_rate" not in options)
    return out, nnx.pop(layer, nnx.Intermediate)


@pytest.mark.parametrize(("kind", "options"), [("linen", {}), ("nnx", {}), ("nnx", {"dropout_rate": 0.5})])
def test_weights_are_sown_by_flaxs_own_function(kind: str, options: Any, monkeypatch: pytest.MonkeyPatch):
    want = sown(kind, THEIRS[kind], **options)
    theirs = {"linen": linen_attention, "nnx": nnx_attention}[kind]
    # A program that puts ours in the place of theirs gets no recursion.
    monkeypatch.setattr(theirs, "dot_product_attention", dot_product_attention)
    got = sown(kind, dot_product_attention, **options)
    weights = jax.tree.leaves(got[1])
    assert weights
    assert weights[0].shape == (2, 4, 6, 6)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves(want))


@pytest.mark.parametrize("kind", ["einsums", "complex"])
def test_einsums_and_complex_numbers_are_computed_by_linens_own_function(kind: str):
    operands, options = arrays(), {"mask": seen(scores((2,))), "deterministic": True}
    if kind == "einsums":
        options |= {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}
    else:
        operands[0] = operands[0] + 1j * operands[0][..., ::-1]
    want = THEIRS["linen"](*operands, **options)
    np.testing.assert_array_equal(dot_product_attention(*operands, **options), want)
    assert want.dtype == operands[0].dtype


@layers
def test_flash_attention_itself_names_the_adapter(kind: str):
    with pytest.raises(TypeError, match=r"tilewright\.integrations\.flax\.dot_product_attention"):
        layer(kind, flash_attention, dropout_rate=0.5)(X, jax.random.key(0), deterministic=False)
