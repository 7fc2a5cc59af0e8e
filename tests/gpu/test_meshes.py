"""Ops whose operands are split over two GPUs in ways that need communication: the results are those of one GPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright import context_parallel_attention, unzigzag, zigzag
from tilewright.modules import (
    causal_conv1d,
    context_parallel_causal_conv1d,
    context_parallel_linear_attention,
    context_parallel_mla_decode,
    context_parallel_page_attention,
    context_parallel_update_pages,
    flash_attention,
    gated_grouped_matmul,
    grouped_matmul,
    linear_attention,
    linear_cross_entropy,
    linear_log_probs,
    mla_decode,
    page_attention,
    update_pages,
)

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs of one host"
)

ROWS, WHOLE = P(None, "x"), P()


def two(kind: AxisType) -> Any:
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


def with_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The result of a function, and its gradients with respect to the first operands for fixed cotangents."""

    def both(*operands: Any) -> Any:
        out, pull = jax.vjp(lambda *xs: function(*xs, *operands[count:]), *operands[:count])
        return out, pull(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))

    return both


def alike(got: Any, want: Any, rtol: float = 2.0**-6) -> None:
    """Equal except for the rounding of bfloat16, relative to the largest value of each array."""
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        found, exact = (np.asarray(x, np.float32) for x in (mine, other))
        assert np.isfinite(exact).all()
        assert np.abs(exact).max() > 0
        np.testing.assert_allclose(found, exact, rtol=0, atol=rtol * np.abs(exact).max())


def on_explicit_axes(function: Callable[..., Any], operands: Any, specs: Any) -> Any:
    mesh = two(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
        return jax.jit(function)(*placed)


LENGTH, HEADS, KV_HEADS, DIM = 2048, 8, 4, 128
SEGMENTS = np.repeat(np.arange(6), [100, 700, 48, 513, 487, 200])[None]
LENGTHS = np.array([1500])
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "sliding_window": 300},
    "soft cap": {"causal": True, "logits_soft_cap": 5.0},
    "lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS},
    "segments": {"causal": True},
}


def attention_operands() -> tuple[jax.Array, ...]:
    return tuple(draw(1, LENGTH, heads, DIM, seed=seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))


def attention(function: Callable[..., Any], option: str) -> Callable[..., Any]:
    """A call of query, key, value and segment ids, with the gradients of the first three."""

    def attend(query: Any, key: Any, value: Any, segments: Any) -> Any:
        by_rows = {"q_segment_ids": segments, "kv_segment_ids": segments} if option == "segments" else {}
        return function(query, key, value, **OPTIONS[option], **by_rows)

    return with_gradients(attend, 3)


@functools.cache
def attention_of_one(option: str) -> Any:
    return jax.jit(attention(flash_attention, option))(*attention_operands(), jnp.asarray(SEGMENTS))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("ulysses", "contiguous")],
)
def test_context_parallel_attention(strategy: str, layout: str, option: str):
    call = functools.partial(context_parallel_attention, axis_name="x", strategy=strategy, layout=layout)
    split = jax.shard_map(
        attention(call, option), mesh=two(AxisType.Auto), in_specs=(ROWS,) * 4, out_specs=(ROWS, (ROWS,) * 3)
    )
    operands = (*attention_operands(), jnp.asarray(SEGMENTS))
    reorder, back = (zigzag, unzigzag) if layout == "zigzag" else (lambda x, *_: x,) * 2
    got = jax.jit(split)(*(reorder(x, 1, 2) for x in operands))
    alike(jax.tree.map(lambda x: back(x, 1, 2), got), attention_of_one(option))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("of_query", [WHOLE, ROWS])
def test_attention_with_split_keys(of_query: P, option: str):
    operands = (*attention_operands(), jnp.asarray(SEGMENTS))
    # Segment ids are those of both sides.
    specs = of_query, ROWS, ROWS, of_query
    alike(on_explicit_axes(attention(flash_attention, option), operands, specs), attention_of_one(option))


BOUNDS = np.array([3, 500, 500, 1900, 2040])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("update", ["beta", "add"])
def test_context_parallel_linear_attention(update: str, packed: bool):
    """A delta rule and sums, whose states go from one GPU to the other; a document lies over the border."""
    query, key, value = (draw(1, LENGTH, heads, DIM, seed=seed) for seed, heads in enumerate((4, 4, 8)))
    gates = [jax.nn.sigmoid(draw(1, LENGTH, 8, seed=seed).astype(jnp.float32)) for seed in (5, 6)]
    options = {"cum_seqlens": jnp.asarray(BOUNDS * LENGTH // 2048)} if packed else {}

    def call(function: Callable[..., Any], *arrays: Any) -> Any:
        *qkv, decay, beta = arrays
        beta = beta if update == "beta" else None
        return function(*qkv, log_decay=-0.1 * decay, beta=beta, qk_l2norm=True, **options)

    count = 5 if update == "beta" else 4
    operands = (query, key, value, *gates)
    split = functools.partial(call, functools.partial(context_parallel_linear_attention, axis_name="x"))
    whole = jax.jit(with_gradients(functools.partial(call, linear_attention), count))(*operands)
    run = jax.shard_map(
        with_gradients(split, count), mesh=two(AxisType.Auto), in_specs=(ROWS,) * 5, out_specs=(ROWS, (ROWS,) * count)
    )
    alike(jax.jit(run)(*operands), whole)


def test_context_parallel_causal_conv1d():
    x, weight = draw(2, LENGTH, 512), draw(512, 4, seed=1)
    split = jax.shard_map(
        functools.partial(context_parallel_causal_conv1d, axis_name="x", activation="silu"),
        mesh=two(AxisType.Auto), in_specs=(ROWS, WHOLE), out_specs=ROWS,
    )  # fmt: skip
    whole = jax.jit(with_gradients(functools.partial(causal_conv1d, activation="silu"), 2))(x, weight)
    alike(jax.jit(with_gradients(split, 2))(x, weight), whole)


TOKENS, WIDTH, VOCAB = 1024, 512, 16384


@pytest.mark.parametrize("loss", [linear_cross_entropy, linear_log_probs])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_split_vocabulary(kind: AxisType, loss: Any):
    labels = jnp.asarray(np.random.default_rng(3).integers(VOCAB, size=TOKENS))
    x, weight = draw(TOKENS, WIDTH), draw(WIDTH, VOCAB, seed=1, scale=0.1)
    want = jax.jit(with_gradients(loss, 2))(x, weight, labels)
    if kind == AxisType.Explicit:
        got = on_explicit_axes(with_gradients(loss, 2), (x, weight, labels), (WHOLE, ROWS, WHOLE))
    else:
        split = jax.shard_map(
            functools.partial(loss, axis_name="x"), mesh=two(kind), in_specs=(WHOLE, ROWS, WHOLE), out_specs=WHOLE
        )
        got = jax.jit(with_gradients(split, 2))(x, weight, labels)
    alike(got, want)


BY_GROUP, BY_COLUMN = P("x"), P(None, None, "x")


@pytest.mark.parametrize("spec", [BY_GROUP, BY_COLUMN])
@pytest.mark.parametrize("function", [grouped_matmul, gated_grouped_matmul])
def test_matmuls_of_groups(function: Any, spec: P):
    groups, rows, k, n = 8, 2048, 512, 768
    sizes = jnp.array([300, 0, 700, 1, 255, 400, 128, 200])
    matrices = [draw(groups, k, n, seed=seed, scale=0.1) for seed in range(1, 3)][: 1 + (function != grouped_matmul)]
    operands = (draw(rows, k), *matrices, sizes)
    call = with_gradients(function, 1 + len(matrices))
    specs = WHOLE, *(spec for _ in matrices), WHOLE
    alike(on_explicit_axes(call, operands, specs), jax.jit(call)(*operands), rtol=2.0**-5)


SEQUENCES, PAGE, COLUMNS = 8, 64, 8
CACHED = np.array([1, 500, 64, 0, 333, 128, 512, 77])


def dealt(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pages of a table in the order in which two devices hold them, and the table of their numbers there."""
    order = np.concatenate([table[:, device::2].ravel() for device in range(2)])
    numbers = np.empty_like(table)
    for device in range(2):
        numbers[:, device::2] = np.arange(table.size // 2).reshape(len(table), -1)
    return order, numbers


def test_serving_with_split_pages():
    table = np.random.default_rng(3).permutation(SEQUENCES * COLUMNS).reshape(SEQUENCES, COLUMNS)
    order, numbers = dealt(table)
    lengths = jnp.asarray(CACHED)
    query, keys, values = draw(SEQUENCES, 16, 128), *(draw(64, PAGE, 2, 128, seed=seed) for seed in (1, 2))
    new = [draw(SEQUENCES, 2, 128, seed=seed) for seed in (6, 7)]
    latents, of_latents = draw(64, PAGE, 1, 576, seed=4), draw(SEQUENCES, 16, 576, seed=5)
    split = lambda function, count, **specs: jax.jit(
        jax.shard_map(functools.partial(function, axis_name="x"), mesh=two(AxisType.Auto), **specs)
    )
    whole = jnp.asarray(table), lengths
    parts = jnp.asarray(numbers), lengths
    pages = P("x")

    attend = split(context_parallel_page_attention, 2, in_specs=(WHOLE, pages, pages, WHOLE, WHOLE), out_specs=WHOLE)
    alike(attend(query, keys[order], values[order], *parts), page_attention(query, keys, values, *whole))

    decode = split(context_parallel_mla_decode, 1, in_specs=(WHOLE, pages, WHOLE, WHOLE), out_specs=WHOLE)
    alike(decode(of_latents, latents[order], *parts), mla_decode(of_latents, latents, *whole))

    write = split(
        context_parallel_update_pages, 2,
        in_specs=(pages, pages, WHOLE, WHOLE, WHOLE, WHOLE), out_specs=(pages, pages),
    )  # fmt: skip
    got = write(keys[order], values[order], *new, *parts)
    want = update_pages(keys, values, *new, *whole)
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(other[order], np.float32))
