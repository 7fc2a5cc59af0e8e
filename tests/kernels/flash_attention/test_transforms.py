"""Attention under every JAX transformation, against the same transformation of JAX's own attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tilewright.modules import FlashAttention, flash_attention
from tilewright.ops import ConfigSelectorChain, Executor, default_executor, find_labels_in_lowered, labels_to_configs

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 40, 4, 2, 8


@pytest.fixture(scope="module")
def qkv() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(3), 3)
    query = jax.random.normal(keys[0], (BATCH, LENGTH, HEADS, DIM))
    return query, *(jax.random.normal(k, (BATCH, LENGTH, KV_HEADS, DIM)) for k in keys[1:])


def ours(*qkv: Any) -> Any:
    return flash_attention(*qkv, causal=True)


def theirs(*qkv: Any) -> Any:
    return jax.nn.dot_product_attention(*qkv, is_causal=True)


def gradient(attention: Any) -> Any:
    return jax.grad(lambda *qkv: jnp.sin(attention(*qkv)).sum(), argnums=(0, 1, 2))


def in_scan(attention: Any) -> Any:
    def scanned(query: Any, key: Any, value: Any) -> Any:
        step = jax.checkpoint(lambda carry, _: (carry + attention(carry, key, value), None))
        return jax.lax.scan(step, query, None, length=3)[0]

    return scanned


def stacked(qkv: Any) -> Any:
    return [jnp.stack([x, -x, 2 * x]) for x in qkv]


TRANSFORMS: dict[str, Any] = {
    "eager": lambda f, qkv: f(*qkv),
    "jit": lambda f, qkv: jax.jit(f)(*qkv),
    "grad": lambda f, qkv: gradient(f)(*qkv),
    "jit of grad": lambda f, qkv: jax.jit(gradient(f))(*qkv),
    "vmap": lambda f, qkv: jax.vmap(f)(*stacked(qkv)),
    "vmap of some": lambda f, qkv: jax.vmap(f, in_axes=(0, None, None))(stacked(qkv)[0], *qkv[1:]),
    "vmap of jit": lambda f, qkv: jax.vmap(jax.jit(f), in_axes=1, out_axes=1)(*(jnp.stack([x, -x], 1) for x in qkv)),
    "vmap of grad": lambda f, qkv: jax.vmap(gradient(f))(*stacked(qkv)),
    "grad of vmap": lambda f, qkv: gradient(jax.vmap(f, in_axes=(0, None, 0)))(
        stacked(qkv)[0], qkv[1], stacked(qkv)[2]
    ),
    "jacobian": lambda f, qkv: jax.jacrev(lambda q: f(q, *(x[:1, :6] for x in qkv[1:]))[0, :, 0, :2])(qkv[0][:1, :6]),
    "remat": lambda f, qkv: gradient(jax.checkpoint(f))(*qkv),
    "scan": lambda f, qkv: in_scan(f)(*qkv),
    "grad of scan": lambda f, qkv: gradient(in_scan(f))(*qkv),
    "cond": lambda f, qkv: jax.jit(lambda q: jax.lax.cond(q.sum() < jnp.inf, f, lambda q, k, v: q, q, *qkv[1:]))(
        qkv[0]
    ),
}


@pytest.mark.parametrize(
    "name",
    TRANSFORMS,
)
def test_agrees_with_jax(name: str, qkv: Any) -> None:
    got, want = TRANSFORMS[name](ours, qkv), TRANSFORMS[name](theirs, qkv)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, atol=3e-5)


@pytest.mark.parametrize("options", [{"dropout_prob": 0.3}, {"query_seq_lengths": None}], ids=["seeds", "lengths"])
def test_vmap_of_data_that_decides_the_mask(options: dict[str, Any], qkv: Any) -> None:
    name = "dropout_seed" if "dropout_prob" in options else "query_seq_lengths"
    values = jnp.array([[3, 40], [0, 17], [40, 1]], jnp.int32)
    values = values.astype(jnp.uint32) if name == "dropout_seed" else values
    fixed = {n: v for n, v in options.items() if v is not None}
    call = functools.partial(flash_attention, causal=True, **fixed)
    mapped = jax.vmap(lambda q, value: call(q, *qkv[1:], **{name: value}))(stacked(qkv)[0], values)
    for i, query in enumerate(stacked(qkv)[0]):
        np.testing.assert_allclose(mapped[i], call(query, *qkv[1:], **{name: values[i]}), atol=1e-5)


def test_selection_sees_the_mapped_problem(qkv: Any) -> None:
    seen: list[Any] = []
    executor = Executor(ConfigSelectorChain(on_event=seen.append))
    kernel = FlashAttention()
    jax.vmap(lambda *each: executor(kernel, *each, causal=True))(*stacked(qkv))
    (selection,) = seen
    assert '"mapped":[[3,[1,1,1]]]' in selection.key


def test_export_round_trip(qkv: Any) -> None:
    exported = export.export(jax.jit(lambda *x: (ours(*x), gradient(ours)(*x))))(*qkv)
    again = export.deserialize(exported.serialize())
    for got, want in zip(
        jax.tree.leaves(again.call(*qkv)), jax.tree.leaves((ours(*qkv), gradient(ours)(*qkv))), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_every_call_is_named_in_the_program_with_its_config(qkv: Any) -> None:
    lowered = jax.jit(gradient(ours)).lower(*qkv)
    labels = find_labels_in_lowered(lowered)
    assert [label.split(".")[3] for label in labels if label.startswith("tilewright.v1.flash")] == [
        "forward",
        "backward",
    ]
    assert set(labels) == set(find_labels_in_lowered(lowered.compile()))
    configs = labels_to_configs(labels)
    choices = default_executor().explain(FlashAttention(), *qkv, causal=True, quiet=True).choices
    assert list(configs.values()) == [choice.config for choice in choices]


@pytest.mark.parametrize("packed", [False, True])
def test_nan_outside_reaches_no_gradient(qkv: tuple[jax.Array, ...], packed: bool):
    """Eagerly and mapped, of the arrays and of a scale that is one; the loss reads what is inside."""
    if packed:
        bounds = jnp.array([2, 9, 30], jnp.int32)
        arrays, options = tuple(x[:1] for x in qkv), {"cum_seqlens_q": bounds, "cum_seqlens_k": bounds}
        inside = ((jnp.arange(LENGTH) >= 2) & (jnp.arange(LENGTH) < 30))[None, :, None, None]
    else:
        lengths = jnp.array([13, LENGTH], jnp.int32)
        arrays, options = qkv, {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        inside = (jnp.arange(LENGTH) < lengths[:, None])[..., None, None]
    bad = tuple(jnp.where(inside, x, jnp.nan) for x in arrays)

    def loss(scale, *qkv):
        out = flash_attention(*qkv, softmax_scale=scale, causal=True, **options)
        # Without a selection: the gradient of the output is 0 · NaN where the residual is NaN.
        return jnp.sum(jnp.where(inside, out * jax.lax.stop_gradient(bad[0]), 0.0))

    found, want = (jax.grad(loss, (0, 1, 2, 3))(0.3, *each) for each in (bad, arrays))
    found_mapped = jax.vmap(jax.grad(loss, (0, 1, 2, 3)), (0, None, None, None))(jnp.full(2, 0.3), *bad)
    for got, mapped, expected in zip(found, found_mapped, want, strict=True):
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_allclose(mapped[1], expected, rtol=1e-5, atol=1e-6)
    for gradient in found[1:]:
        assert not np.any(np.where(inside, 0.0, gradient))
