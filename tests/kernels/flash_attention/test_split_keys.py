"""``flash_attention`` on explicit axes that split the keys and not the query: beside float64 NumPy and one device."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.context_parallel import oracle
from tilewright.kernels.biases import AlibiBias, RelativeBias
from tilewright.kernels.flash_attention.distributed.explicit import keys_travel
from tilewright.kernels.masks import CausalMask, Mask, TileClass, TileGrid
from tilewright.modules import dot_product_attention, flash_attention

BATCH, Q_LENGTH, KV_LENGTH, HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 16, 48, 8, 4, 16, 8
Q_LENGTHS, KV_LENGTHS = np.array([16, 7, 10, 0]), np.array([3, 48, 30, 20])
Q_IDS, KV_IDS = np.arange(Q_LENGTH) // 5, np.arange(KV_LENGTH) // 13

KEYS = P(None, "x")
SPLITS = {
    "whole query": (P(), KEYS),
    "query by its length over another axis": (P(None, "y"), KEYS),
    "batch, too": (P("y"), P("y", "x")),
    "batch of the query alone": (P("y"), KEYS),
    "heads, too": (P(None, None, "y"), P(None, "x", "y")),
    "keys over both axes": (P(), P(None, ("x", "y"))),
}


def by_element(array: np.ndarray) -> np.ndarray:
    return array[:, None, None, None]


# Options, and the visible pairs of rows i [q, 1] and columns j [1, kv] by their definition.
CALLS: dict[str, tuple[dict[str, Any], Callable[[Any, Any], Any]]] = {
    "everything": ({}, lambda i, j: True),
    "causal": ({"causal": True}, lambda i, j: j <= i),
    "causal from the end": (
        {"causal": True, "causal_alignment": "bottom_right"}, lambda i, j: j <= i + KV_LENGTH - Q_LENGTH
    ),
    "window and soft cap": (
        {"sliding_window": (9, 2), "logits_soft_cap": 2.0}, lambda i, j: (j >= i - 9) & (j <= i + 2)
    ),
    "lengths": (
        {"query_seq_lengths": jnp.array(Q_LENGTHS), "key_value_seq_lengths": jnp.array(KV_LENGTHS)},
        lambda i, j: (i < by_element(Q_LENGTHS)) & (j < by_element(KV_LENGTHS)),
    ),
    "lengths, causal from their ends": (
        {"query_seq_lengths": jnp.array(Q_LENGTHS), "key_value_seq_lengths": jnp.array(KV_LENGTHS), "causal": True,
         "causal_alignment": "bottom_right"},
        lambda i, j: (
            (i < by_element(Q_LENGTHS)) & (j < by_element(KV_LENGTHS))
            & (j <= i + by_element(KV_LENGTHS - Q_LENGTHS))
        ),
    ),
    "segments": (
        {"q_segment_ids": jnp.tile(Q_IDS, (BATCH, 1)), "kv_segment_ids": jnp.tile(KV_IDS, (BATCH, 1))},
        lambda i, j: Q_IDS[i] == KV_IDS[j],
    ),
    "a mask": (
        {"mask": jnp.array((np.arange(Q_LENGTH)[:, None] * 7 + np.arange(KV_LENGTH) * 5) % 11 > 3)},
        lambda i, j: (i * 7 + j * 5) % 11 > 3,
    ),
    "positions of the keys": (
        {"mask": CausalMask(0, None, jnp.arange(KV_LENGTH)[::-1][None])}, lambda i, j: KV_LENGTH - 1 - j <= i
    ),
}  # fmt: skip


def mesh() -> Any:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def operands() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(3), 5)
    query = jax.random.normal(keys[0], (BATCH, Q_LENGTH, HEADS, DIM))
    key = jax.random.normal(keys[1], (BATCH, KV_LENGTH, KV_HEADS, DIM))
    value = jax.random.normal(keys[2], (BATCH, KV_LENGTH, KV_HEADS, VALUE_DIM))
    d_out = jax.random.normal(keys[3], (BATCH, Q_LENGTH, HEADS, VALUE_DIM))
    return query, key, value, d_out, jax.random.normal(keys[4], (BATCH, HEADS, Q_LENGTH))


def both_passes(options: dict[str, Any]) -> Callable[..., Any]:
    def run(sinks: Any, *arrays: Any) -> Any:
        attend = lambda sinks, *qkv: flash_attention(*qkv, softmax_aux=sinks, return_lse=True, **options)
        results, pull = jax.vjp(attend, sinks, *arrays[:3])
        return *results, *pull((arrays[3], arrays[4]))

    return run


def on_mesh(function: Any, specs: Any, *arrays: Any) -> Any:
    with jax.set_mesh(mesh()):
        parts = [jax.device_put(x, NamedSharding(mesh(), spec)) for x, spec in zip(arrays, specs, strict=True)]
        return jax.jit(function)(*parts)


@pytest.mark.parametrize(
    ("call", "split"),
    list(itertools.product(CALLS, SPLITS)),
)
def test_results_are_those_of_all_keys(call: str, split: str) -> None:
    (options, visible), (of_query, of_keys) = CALLS[call], SPLITS[split]
    query, key, value, d_out, d_lse = operands()
    sinks = jnp.linspace(-1.0, 1.0, HEADS)
    of_lse = P(*(tuple(of_query) + (None,) * 3)[:3:2], *tuple(of_query)[1:2])
    specs = (P(), of_query, of_keys, of_keys, of_query, of_lse)
    results = on_mesh(both_passes(options), specs, sinks, query, key, value, d_out, d_lse)
    rows, columns = np.arange(Q_LENGTH)[:, None], np.arange(KV_LENGTH)[None]
    wanted = oracle.attention(
        query, key, value, sinks, visible(rows, columns), d_out, d_lse,
        scale=DIM**-0.5, cap=options.get("logits_soft_cap"),
    )  # fmt: skip
    names = ("out", "lse", "sinks", "query", "key", "value")
    for name, got, spec in zip(names, results, (of_query, of_lse, P(), of_query, of_keys, of_keys), strict=True):
        np.testing.assert_allclose(got, getattr(wanted, name), atol=2e-5, rtol=1e-5, err_msg=name)
        assert tuple(got.sharding.spec)[: len(spec)] == tuple(spec), name


def test_rows_that_see_no_key_at_all() -> None:
    """Without sinks: zeros, −inf and no gradient, where no device has a visible key."""
    query, key, value, d_out, _ = operands()
    options = {"query_seq_lengths": jnp.array(Q_LENGTHS), "key_value_seq_lengths": jnp.array([3, 0, 30, 20])}

    def run(*arrays: Any) -> Any:
        results, pull = jax.vjp(lambda *qkv: flash_attention(*qkv, return_lse=True, **options), *arrays[:3])
        return *results, *pull((arrays[3], jnp.zeros_like(results[1])))

    out, lse, *gradients = on_mesh(run, (P(), KEYS, KEYS, P()), query, key, value, d_out)
    assert not np.asarray(out)[1].any()
    assert np.isneginf(np.asarray(lse)[[1, 3]]).all()
    assert not np.asarray(gradients[0])[[1, 3]].any()
    assert np.isfinite(np.concatenate([np.ravel(x) for x in gradients])).all()


BIASES: dict[str, tuple[Any, Any]] = {
    "of all pairs": (jax.random.normal(jax.random.key(1), (1, HEADS, Q_LENGTH, KV_LENGTH)), lambda x: x),
    "alibi": (jnp.linspace(0.1, 1.0, HEADS), AlibiBias),
    "relative": (jax.random.normal(jax.random.key(2), (HEADS, Q_LENGTH + KV_LENGTH - 1)), RelativeBias),
}


@pytest.mark.parametrize(
    ("bias", "alignment", "of_query"),
    list(itertools.product(BIASES, ["top_left", "bottom_right"], [P(), P(None, "y")])),
)
def test_a_bias_counts_the_columns_of_all_keys(bias: str, alignment: str, of_query: P) -> None:
    values, make = BIASES[bias]
    query, key, value, d_out, _ = operands()

    def run(values: Any, *arrays: Any) -> Any:
        attend = lambda values, *qkv: flash_attention(*qkv, make(values), causal=True, causal_alignment=alignment)
        out, pull = jax.vjp(attend, values, *arrays[:3])
        return out, *pull(arrays[3])

    results = on_mesh(run, (P(), of_query, KEYS, KEYS, of_query), values, query, key, value, d_out)
    for got, want in zip(results, run(values, query, key, value, d_out), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_packed_sequences_in_which_a_device_has_the_keys_of_several(alignment: str) -> None:
    query, key, value, *_ = (x[:1] for x in operands())
    bounds = {"cum_seqlens_q": jnp.array([0, 3, 10, 16]), "cum_seqlens_k": jnp.array([0, 20, 30, 48])}
    attend = lambda *qkv: flash_attention(*qkv, causal=True, causal_alignment=alignment, return_lse=True, **bounds)
    got = on_mesh(attend, (P(), KEYS, KEYS), query, key, value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, attend(query, key, value))


def test_sums_over_devices_are_float32() -> None:
    """bfloat16 over four devices is as near as on one, for the same rounded inputs."""
    query, key, value, d_out, d_lse = operands()
    narrow = [x.astype(jnp.bfloat16) for x in (query, key, value, d_out)]
    sinks = jnp.full(HEADS, -1e9)
    run = both_passes({})
    one = run(sinks, *narrow, d_lse)
    split = on_mesh(run, (P(), P(), KEYS, KEYS, P(), P()), sinks, *narrow, d_lse)
    wanted = oracle.attention(*narrow[:3], sinks, True, narrow[3], d_lse, scale=DIM**-0.5, cap=None)
    for name, alone, together in zip(("out", "lse", "sinks", "query"), one, split, strict=False):
        errors = [np.abs(np.asarray(x, np.float64) - getattr(wanted, name)).max() for x in (alone, together)]
        assert together.dtype == alone.dtype
        assert errors[1] <= 1.5 * errors[0] + 1e-3, name


def struct(length: int, heads: int, spec: P, batch: tuple[int, ...] = (2,)) -> Any:
    shape = (*batch, length, heads, 16)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))


def choice(query: Any, keys: Any, **options: Any) -> bool:
    """True if a traced call splits the rows of its query for the strategies of split sequences."""
    found: list[bool] = []

    def call(query: Any, key: Any) -> Any:
        found.append(keys_travel({"query": query, "key": key, "value": key, **options}))
        return query

    with jax.set_mesh(mesh()):
        jax.eval_shape(call, query, keys)
    return found[0]


def test_a_whole_query_is_split_if_that_moves_less() -> None:
    few_heads = struct(64, 1, KEYS)
    assert choice(struct(64, 8, P()), few_heads)
    assert choice(struct(64, 8, P("y")), few_heads)
    assert choice(struct(64, 8, P(), ()), struct(64, 1, P("x"), ()))
    assert choice(struct(64, 8, KEYS), few_heads)
    assert not choice(struct(4, 8, P()), few_heads)  # results are few beside keys
    assert not choice(struct(64, 8, P()), struct(64, 8, KEYS))
    assert not choice(struct(62, 8, P()), few_heads)  # rows that the devices do not divide
    assert not choice(struct(64, 8, P()), few_heads, mask=jnp.ones((64, 64), bool))
    assert not choice(struct(64, 8, P(None, "y")), few_heads)
    assert not choice(struct(64, 8, P(None, None, "x")), few_heads)


def test_memory_of_a_device_does_not_grow_with_keys_and_devices() -> None:
    sizes = []
    for devices in (2, 4, 8):
        on = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:devices])
        query = jax.ShapeDtypeStruct((1, 8, 4, 16), jnp.float32, sharding=NamedSharding(on, P()))
        keys = jax.ShapeDtypeStruct((1, 256 * devices, 4, 16), jnp.float32, sharding=NamedSharding(on, KEYS))
        loss = lambda *qkv: flash_attention(*qkv, causal=True, causal_alignment="bottom_right").sum()
        with jax.set_mesh(on):
            compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, keys, keys).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert max(sizes) <= 1.1 * min(sizes), sizes


def test_results_of_a_query_that_is_split_for_the_call_are_whole_again() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 64, 8, 16))
    key, value = (jax.random.normal(k, (2, 64, 1, 16)) for k in keys[1:])

    def run(*qkv: Any) -> Any:
        out, pull = jax.vjp(lambda *qkv: flash_attention(*qkv, causal=True, return_lse=True), *qkv)
        return *out, *pull((jnp.cos(out[0]), jnp.cos(out[1])))

    results = on_mesh(run, (P("y"), P(None, "x"), P("y", "x")), query, key, value)
    for got, want in zip(results, run(query, key, value), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5, rtol=1e-5)
    assert [each.sharding.spec[0] for each in results] == ["y", "y", "y", None, "y"]
    assert all("x" not in each.sharding.spec for each in results[:3])


def test_a_cache_that_is_split_by_its_length_eagerly_through_the_drop_in() -> None:
    query, key, value, *_ = operands()
    query, value = query[:, :1], jnp.tile(value, 2)
    with jax.set_mesh(mesh()):
        parts = [jax.device_put(x, NamedSharding(mesh(), KEYS)) for x in (key, value)]
        got = dot_product_attention(query, *parts, key_value_seq_lengths=jnp.array(KV_LENGTHS))
    want = flash_attention(query, key, value, key_value_seq_lengths=jnp.array(KV_LENGTHS))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_derivatives_in_forward_mode_and_under_vmap() -> None:
    query, key, value, *_ = operands()
    sinks = jnp.linspace(-1.0, 1.0, HEADS)

    def run(query: Any, key: Any, value: Any) -> Any:
        attend = lambda *qkv: flash_attention(*qkv, causal=True, softmax_aux=sinks, return_lse=True)
        each = jax.vmap(lambda scale: attend(scale * query, key, value)[0])(jnp.arange(1.0, 3.0))
        return jax.jvp(attend, (query, key, value), (jnp.sin(query), jnp.cos(key), value)), each

    results = on_mesh(run, (P(), KEYS, KEYS), query, key, value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), results, run(query, key, value))


@jax.tree_util.register_static
class Checkers(Mask):
    """A user's own kind of mask, whose arrays could mean anything."""

    tile = pad = take = check = lambda self, *args: self

    def classify(self, grid: TileGrid, **_: Any) -> Any:
        return np.full((1, 1, grid.q_tiles, grid.kv_tiles), TileClass.PARTIAL, np.int32)


@pytest.mark.parametrize(
    ("of_query", "of_key", "of_value", "options", "message"),
    [
        (P(None, None, "x"), KEYS, KEYS, {}, "both split by x, but not by their lengths over the very same axes"),
        (P(None, ("x", "y")), KEYS, KEYS, {}, "both split by x, but not by their lengths"),
        (P(), KEYS, P(), {}, "key and value must be split by length alike"),
        (P(), P("y", "x"), P("y", "x"), {}, "key must be split by batch as the query is, or whole"),
        (P(), KEYS, KEYS, {"dropout_prob": 0.1, "dropout_seed": 0}, "dropout counts the rows and columns"),
        (P(), KEYS, KEYS, {"mask": Checkers()}, "keys that are split by length cannot have a mask of type Checkers"),
    ],
)
def test_what_no_device_can_do_with_its_keys_is_one_error(
    of_query: P, of_key: P, of_value: P, options: dict[str, Any], message: str
) -> None:
    query, key, value, *_ = operands()
    specs = (of_query, of_key, of_value)
    with pytest.raises(ValueError, match=f"^flash_attention: .*{message}"):
        on_mesh(lambda *qkv: flash_attention(*qkv, **options), specs, query, key, value)
