"""Attention split over eight devices: right, split as its inputs are, and without communication nobody asked for."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.modules import dot_product_attention, flash_attention

COLLECTIVE = re.compile(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 96, 8, 4, 16

BY_BATCH, BY_HEADS, BY_BOTH = P("x"), P(None, None, "y"), P("x", None, "y")

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and soft cap": {"sliding_window": (16, 8), "logits_soft_cap": 5.0},
    "segments": {
        "q_segment_ids": jnp.repeat(jnp.arange(3)[None], 32, 1).repeat(BATCH, 0),
        "kv_segment_ids": jnp.repeat(jnp.arange(3)[None], 32, 1).repeat(BATCH, 0),
    },
    "lengths": {"query_seq_lengths": jnp.array([96, 7, 50, 1]), "key_value_seq_lengths": jnp.array([3, 96, 50, 0])},
    "dropout": {"dropout_prob": 0.4, "dropout_seed": 7},
    "bias and sinks": {"bias": jnp.sin(jnp.arange(LENGTH * LENGTH * HEADS)).reshape(1, HEADS, LENGTH, LENGTH)},
}


def operands() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (BATCH, LENGTH, HEADS, DIM))
    key, value = (jax.random.normal(k, (BATCH, LENGTH, KV_HEADS, DIM)) for k in keys[1:3])
    return query, key, value, jax.random.normal(keys[3], query.shape)


def gradients(query: Any, key: Any, value: Any, cotangent: Any, options: Any) -> Any:
    out, pull = jax.vjp(lambda *qkv: flash_attention(*qkv, **options), query, key, value)
    return out, *pull(cotangent)


@pytest.mark.parametrize(
    ("name", "kind", "spec"),
    list(itertools.product(OPTIONS, [AxisType.Auto, AxisType.Explicit], [BY_BATCH, BY_HEADS, BY_BOTH])),
)
def test_split_by_batch_and_heads_without_communication(name: str, kind: AxisType, spec: P) -> None:
    options, whole = OPTIONS[name], operands()
    expected = gradients(*whole, options)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in whole]
        compiled = jax.jit(lambda *xs: gradients(*xs, options)).lower(*split).compile()
        results = compiled(*split)
    assert not COLLECTIVE.findall(compiled.as_text())
    for got, want in zip(results, expected, strict=True):
        assert tuple(got.sharding.spec)[: len(spec)] == tuple(spec)
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-5)


def test_gradients_of_what_all_devices_share_are_summed() -> None:
    query, key, value, cotangent = operands()
    shared = (jnp.ones((1, HEADS, LENGTH, LENGTH)) / 3, jnp.linspace(-1, 1, HEADS)[:, None])

    def both(bias: Any, sinks: Any, *qkv: Any) -> Any:
        _, pull = jax.vjp(lambda b, s: flash_attention(*qkv[:3], b, softmax_aux=s, causal=True), bias, sinks)
        return pull(qkv[3])

    expected = both(*shared, query, key, value, cotangent)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in (query, key, value, cotangent)]
        whole = [jax.device_put(x, NamedSharding(mesh, P())) for x in shared]
        results = jax.jit(both)(*whole, *split)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-4)


SPLITS = {
    "length": (P(None, "x"), P(), 4),
    "length and heads beside whole keys": (P(None, "x", "y"), P(), 4),
    "length and heads": (P(None, "x", "y"), P(None, None, "y"), 4),
    "batch and length": (P("y", "x"), P("y"), 4),
    "a head of keys for two devices": (P(None, None, "x"), P(), 2),
    "one head of keys for eight devices": (P(None, None, ("x", "y")), P(), 1),
    "batch beside whole keys": (P("x"), P(), 4),
}


@pytest.mark.parametrize(
    ("name", "split"),
    [pair for pair in itertools.product(OPTIONS, SPLITS) if pair[0] != "dropout" or "length" not in pair[1]],
)
def test_queries_split_beside_whole_keys(name: str, split: str) -> None:
    """The forward pass moves nothing; the gradients of what devices share are summed."""
    (query_spec, key_spec, kv_heads), options = SPLITS[split], OPTIONS[name]
    query, key, value, cotangent = operands()
    whole = query, key[:, :, :kv_heads], value[:, :, :kv_heads], cotangent
    expected = gradients(*whole, options)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    specs = (query_spec, key_spec, key_spec, query_spec)
    with jax.set_mesh(mesh):
        parts = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(whole, specs, strict=True)]
        forward = jax.jit(lambda *qkv: flash_attention(*qkv, **options)).lower(*parts[:3]).compile()
        results = jax.jit(lambda *xs: gradients(*xs, options))(*parts)
    assert not COLLECTIVE.findall(forward.as_text())
    for got, want, spec in zip(results, expected, (query_spec, *specs[:3]), strict=True):
        assert tuple(got.sharding.spec)[: len(spec)] == tuple(spec)
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=3e-5)


def test_a_head_of_keys_that_serves_parts_of_two_devices() -> None:
    keys = jax.random.split(jax.random.key(1), 2)
    query = jax.random.normal(keys[0], (1, 16, 6, DIM))
    key = jax.random.normal(keys[1], (1, 16, 3, DIM))
    options = {"causal": True, "return_lse": True}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        split = jax.device_put(query, NamedSharding(mesh, P(None, None, "x")))
        got, pull = jax.vjp(lambda q, k: flash_attention(q, k, k, **options), split, key)
        gradient = pull((split, jnp.ones_like(got[1])))
    want, pull = jax.vjp(lambda q, k: flash_attention(q, k, k, **options), query, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, pull((query, jnp.ones((1, 6, 16))))
    )


def test_an_explicit_mask_and_packed_rows_are_split_as_the_query_is() -> None:
    query, key, value, _ = (x[:1] for x in operands())
    bounds = jnp.array([0, 10, 50, LENGTH])
    hidden = jax.random.bernoulli(jax.random.key(2), 0.8, (1, HEADS, LENGTH, LENGTH))
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    for options in (
        {"mask": hidden},
        {"cum_seqlens_q": bounds, "cum_seqlens_k": bounds, "causal": True},
        {"query_seq_lengths": jnp.array([70]), "key_value_seq_lengths": jnp.array([80]), "causal": True,
         "causal_alignment": "bottom_right"},
    ):  # fmt: skip
        want = flash_attention(query, key, value, **options)
        with jax.set_mesh(mesh):
            split = jax.device_put(query, NamedSharding(mesh, P(None, "x", "y")))
            np.testing.assert_allclose(flash_attention(split, key, value, **options), want, atol=2e-5)


LENGTHS_SPLIT = {
    "length": P(None, "x"),
    "batch and length": P("y", "x"),
    "length and heads": P(None, "x", "y"),
    "length over both axes": P(None, ("x", "y")),
}


@pytest.mark.parametrize(
    ("name", "split"),
    list(itertools.product(["causal", "window and soft cap", "segments", "lengths", "ends aligned"], LENGTHS_SPLIT)),
)
def test_queries_and_keys_split_by_length(name: str, split: str) -> None:
    """Splits of query, key and value alike: the call communicates, and its results stay split."""
    aligned = OPTIONS["lengths"] | {"causal": True, "causal_alignment": "bottom_right"}
    options, spec = OPTIONS.get(name, aligned), LENGTHS_SPLIT[split]
    sinks = jnp.linspace(-1, 1, HEADS)
    whole = operands()

    def with_sinks(sinks: Any, *arrays: Any) -> Any:
        def attend(sinks: Any, *qkv: Any) -> Any:
            return flash_attention(*qkv, softmax_aux=sinks, return_lse=True, **options)

        (out, lse), pull = jax.vjp(attend, sinks, *arrays[:3])
        return out, lse, *pull((arrays[3], jnp.sin(jnp.where(jnp.isinf(lse), 0.0, lse))))

    expected = with_sinks(sinks, *whole)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        parts = [jax.device_put(x, NamedSharding(mesh, spec)) for x in whole]
        results = jax.jit(with_sinks)(sinks, *parts)
    of_lse = P(*(tuple(spec) + (None,) * (3 - len(spec)))[::2], tuple(spec)[1])
    specs = (spec, of_lse, P(*tuple(spec)[2:]), spec, spec, spec)
    for got, want, each in zip(results, expected, specs, strict=True):
        assert tuple(got.sharding.spec)[: len(each)] == tuple(each)
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=5e-5, rtol=1e-5)


def test_split_lengths_eagerly_through_the_drop_in_and_packed() -> None:
    query, key, value, _ = (x[:1] for x in operands())
    bounds = jnp.array([0, 10, 50, LENGTH])
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        parts = [jax.device_put(x, NamedSharding(mesh, P(None, "x"))) for x in (query, key, value)]
        got = dot_product_attention(*parts, is_causal=True)
        packed = flash_attention(*parts, cum_seqlens_q=bounds, cum_seqlens_k=bounds, causal=True)
        unbatched = [jax.device_put(x[0], NamedSharding(mesh, P("x"))) for x in (query, key, value)]
        one = flash_attention(*unbatched, causal=True)
        with pytest.raises(ValueError, match=r"^flash_attention: .*takes no mask"):
            flash_attention(*parts, mask=jnp.ones((LENGTH, LENGTH), bool))
    want = flash_attention(query, key, value, causal=True)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(one, want[0], atol=2e-5)
    wanted = flash_attention(query, key, value, cum_seqlens_q=bounds, cum_seqlens_k=bounds, causal=True)
    np.testing.assert_allclose(packed, wanted, atol=2e-5)


def test_a_split_that_needs_communication_is_an_error_that_names_it() -> None:
    query, key, value, _ = operands()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=r"flash_attention: query and keys are both split by x.*key: .*'x'"):
            flash_attention(put(query, P(None, None, "x")), put(key, P(None, "x")), put(value, P(None, "x")))
        with pytest.raises(ValueError, match=r"split by head_dim"):
            flash_attention(put(query, P(None, None, None, "x")), key, value)
        doubled = [jnp.concatenate([x, x]) for x in (query, key, value)]
        split = put(doubled[1], P("x"))
        with pytest.raises(ValueError, match="key must be split by batch as the query is, or whole"):
            flash_attention(doubled[0], split, doubled[2])
        with pytest.raises(ValueError, match="dropout counts the rows"):
            flash_attention(put(query, P(None, "x")), key, value, dropout_prob=0.1, dropout_seed=0)


def test_inside_shard_map() -> None:
    query, key, value, cotangent = operands()
    expected = gradients(query, key, value, cotangent, {"causal": True})
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = P("x", None, "y")
    mapped = jax.shard_map(lambda *xs: gradients(*xs, {"causal": True}), mesh=mesh, in_specs=spec, out_specs=spec)
    compiled = jax.jit(mapped).lower(query, key, value, cotangent).compile()
    assert not COLLECTIVE.findall(compiled.as_text())
    for got, want in zip(jax.jit(mapped)(query, key, value, cotangent), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-5)


def test_gradients_of_what_devices_share_inside_shard_map() -> None:
    """Of a bias, of sinks and of whole keys: the sum over the devices, once."""
    query, key, value, cotangent = operands()
    shared = (jnp.sin(jnp.arange(LENGTH * LENGTH)).reshape(LENGTH, LENGTH), jnp.linspace(-1, 1, 2), key[:1], value[:1])

    def loss(shared: Any, query: Any, cotangent: Any) -> Any:
        bias, sinks, key, value = shared
        key, value = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (key, value))
        heads = query.shape[2] // 2
        out = flash_attention(query, key, value, bias, softmax_aux=jnp.repeat(sinks, heads), causal=True)
        return jnp.sum(out * cotangent)

    expected = jax.grad(loss)(shared, query[:, :, :4], cotangent[:, :, :4])
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P())
    got = jax.jit(split)(shared, query[:, :, :4], cotangent[:, :, :4])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5), got, expected)
