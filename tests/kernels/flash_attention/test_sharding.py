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

from tests.support.suites import sampled
from tilewright.modules import flash_attention

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
    sampled(
        itertools.product(OPTIONS, [AxisType.Auto, AxisType.Explicit], [BY_BATCH, BY_HEADS, BY_BOTH]),
        test=[
            ("dropout", AxisType.Auto, BY_BOTH),
            ("causal", AxisType.Explicit, BY_HEADS),
            ("window and soft cap", AxisType.Auto, BY_BATCH),
            ("lengths", AxisType.Explicit, BY_BATCH),
            ("bias and sinks", AxisType.Auto, BY_BOTH),
        ],
        quick=[("segments", AxisType.Auto, BY_BATCH), ("dropout", AxisType.Explicit, BY_BOTH)],
    ),
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


def test_a_split_that_needs_communication_is_an_error_that_names_it() -> None:
    query, key, value, _ = operands()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=r"cannot be split by length.*query: .*'x'"):
            flash_attention(put(query, P(None, "x")), key, value)
        with pytest.raises(ValueError, match="must be split alike"):
            flash_attention(put(query, P(None, None, "x")), key, value)


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
