"""The oracle against ``jax.nn.dot_product_attention`` where the two overlap, and against loops in float64 elsewhere."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.kernels.flash_attention.conformance import CASES, FACTORS, describe, pairwise
from tilewright.kernels.flash_attention import reference
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.reference import attention_reference, reference_gradients
from tilewright.kernels.numerics.dropout import drawn_probability, keep_mask


def run_reference(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    out, lse = FlashAttention().reference(FlashAttention().prepare(*args, return_lse=True, **kwargs))
    return out, lse


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


JAX_CASES = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"is_causal": True}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "bias": ({"bias": draw(1, 4, 24, 24)}, {"bias": draw(1, 4, 24, 24)}),
    "mask": ({"mask": draw(2, 1, 24, 24) > -1}, {"mask": draw(2, 1, 24, 24) > -1}),
    "window": ({"sliding_window": (3, 5)}, {"local_window_size": (3, 5)}),
    "causal window": ({"sliding_window": 6, "causal": True}, {"local_window_size": 6, "is_causal": True}),
    "lengths": (
        {"query_seq_lengths": [9, 24], "key_value_seq_lengths": [20, 3]},
        {"query_seq_lengths": np.int32([9, 24]), "key_value_seq_lengths": np.int32([20, 3])},
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), JAX_CASES.values(), ids=JAX_CASES)
def test_agrees_with_jax(ours: dict[str, Any], theirs: dict[str, Any]):
    arrays = draw(2, 24, 4, 16), draw(2, 24, 2, 16, seed=1), draw(2, 24, 2, 16, seed=2)
    d_out = draw(2, 24, 4, 16, seed=3)
    out, vjp = jax.vjp(lambda *arrays: run_reference(*arrays, **ours)[0], *arrays)
    want, want_vjp = jax.vjp(lambda *arrays: jax.nn.dot_product_attention(*arrays, **theirs), *arrays)
    np.testing.assert_allclose(out, want, atol=2e-6)
    for got, gradient in zip(vjp(d_out), want_vjp(d_out), strict=True):
        np.testing.assert_allclose(got, gradient, atol=5e-6)


def loops(case: AttentionCase, arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Attention one query at a time in float64, with masks by their definition rather than by ``kernels.masks``."""
    query, key, value = (np.asarray(array, np.float64) for array in arrays)
    batch, heads, q_length, kv_length = case.score_shape
    group = heads // key.shape[2]
    scale = case.softmax_scale or 1 / math.sqrt(case.head_dim)
    if case.position_bias is None:
        bias = np.broadcast_to(np.asarray(options.get("bias", 0.0), np.float64), case.score_shape)
    else:
        bias = bias_of_positions(case, options)
    allowed = np.broadcast_to(np.asarray(options.get("mask", True)), case.score_shape)
    sinks = np.asarray(options.get("softmax_aux", np.zeros((heads, 0))), np.float64)
    options = {name: np.asarray(option) for name, option in options.items() if name != "bias"} | {
        name: option for name, option in options.items() if isinstance(option, int)
    }
    kept = np.ones(case.score_shape, bool)
    drop = drawn_probability(case.dropout_prob)
    if drop:
        seed = options["dropout_seed"]
        words = jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
        kept = np.asarray(keep_mask(words, *case.score_shape, drop))
    out = np.zeros((batch, q_length, heads, value.shape[-1]))
    lse = np.full((batch, heads, q_length), -np.inf)
    seen = np.zeros((batch, q_length, kv_length), bool)
    for b, i, j in np.ndindex(seen.shape):
        seen[b, i, j] = sees(case, options, b, i, j)
    for b, h, i in np.ndindex(batch, heads, q_length):
        visible = seen[b, i] & allowed[b, h, i]
        logits = scale * key[b, :, h // group] @ query[b, i, h] + bias[b, h, i]
        if case.logits_soft_cap is not None:
            logits = case.logits_soft_cap * np.tanh(logits / case.logits_soft_cap)
        logits = np.concatenate([np.where(visible, logits, -np.inf), sinks[h]])
        if not np.any(np.isfinite(logits)):
            continue
        lse[b, h, i] = np.logaddexp.reduce(logits)
        probabilities = np.exp(logits - lse[b, h, i])[:kv_length] * kept[b, h, i] / (1 - drop)
        out[b, i, h] = probabilities @ value[b, :, h // group]
    return out, lse


def sees(case: AttentionCase, options: dict[str, Any], b: int, i: int, j: int) -> bool:
    """Whether query ``i`` sees key ``j`` as far as everything but the explicit mask goes."""
    difference = difference_of(case, options, b, i, j)
    if difference is None:
        return False
    if case.segments and options["q_segment_ids"][b, i] != options["kv_segment_ids"][b, j]:
        return False
    if case.causal and difference > 0:
        return False
    if case.sliding_window is None:
        return True
    window = case.sliding_window
    left, right = (window, window) if isinstance(window, int) else window
    return (left is None or -difference <= left) and (right is None or difference <= right)


def bias_of_positions(case: AttentionCase, options: dict[str, Any]) -> np.ndarray:
    """A bias of positions as an array, pair by pair; 0 where a query or a key is outside of its sequence."""
    batch, _, q_length, kv_length = case.score_shape
    bias, given = np.zeros(case.score_shape), options["bias"]
    zero = q_length - 1 if case.causal_alignment == "top_left" else kv_length - 1
    options = {name: np.asarray(option) for name, option in options.items() if name.startswith(("cum_", "q", "key"))}
    for b, i, j in np.ndindex(batch, q_length, kv_length):
        difference = difference_of(case, options, b, i, j)
        if difference is None:
            continue
        if case.position_bias == "alibi":
            bias[b, :, i, j] = -np.asarray(given.slopes, np.float64) * abs(difference)
        else:
            bias[b, :, i, j] = np.asarray(given.values, np.float64)[:, difference + zero]
    return bias


def difference_of(case: AttentionCase, options: dict[str, Any], b: int, i: int, j: int) -> int | None:
    """The position of key ``j`` less that of query ``i``, None if they are not inside of one sequence."""
    _, _, q_length, kv_length = case.score_shape
    q_start, kv_start, q_end, kv_end = 0, 0, q_length, kv_length
    if case.lengths:
        q_end, kv_end = int(options["query_seq_lengths"][b]), int(options["key_value_seq_lengths"][b])
    if case.packed:
        bounds = list(zip(options["cum_seqlens_q"].tolist(), options["cum_seqlens_k"].tolist(), strict=True))
        own = [(low, high) for low, high in itertools.pairwise(bounds) if low[0] <= i < high[0]]
        if not own:
            return None
        ((q_start, kv_start), (q_end, kv_end)) = own[0]
    if not (q_start <= i < q_end and kv_start <= j < kv_end):
        return None
    bottom_right = case.causal_alignment == "bottom_right"
    return (j - kv_end) - (i - q_end) if bottom_right else (j - kv_start) - (i - q_start)


LOOP_CASES = [case for case in CASES if not case.mask_object]


@pytest.mark.parametrize("conformance_case", LOOP_CASES, ids=describe)
def test_agrees_with_loops(conformance_case: Any):
    case = dataclasses.replace(conformance_case.case, dtype="float32")
    arrays, options = case.arguments()
    run = jax.jit(attention_reference, compiler_options={"xla_backend_optimization_level": 0})
    out, lse = run(FlashAttention().prepare(*arrays, **options))
    want_out, want_lse = loops(case, arrays, options)
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_every_pair_of_levels_occurs():
    rows = pairwise(FACTORS)
    for (a, first), (b, second) in itertools.combinations(FACTORS.items(), 2):
        found = {(repr(row[a]), repr(row[b])) for row in rows}
        assert found == {(repr(x), repr(y)) for x, y in itertools.product(first, second)}, (a, b)


@pytest.mark.parametrize(("soft_cap", "dropout"), [(None, 0.0), (2.0, 0.4)])
def test_gradients_are_the_derivatives(soft_cap: float | None, dropout: float):
    """Finite differences in float64, through both results."""
    with jax.enable_x64(True):
        case = AttentionCase(
            "", batch=2, q_length=5, kv_length=7, heads=2, kv_heads=1, head_dim=3, sinks=2, bias="hqk", mask="bqk",
            logits_soft_cap=soft_cap, dropout_prob=dropout, causal=True, dtype="float64",
        )  # fmt: skip
        arrays, options = case.arguments()
        bias, sinks = options.pop("bias"), options.pop("softmax_aux")

        def results(query, key, value, bias, sinks):
            out, lse = run_reference(query, key, value, bias, softmax_aux=sinks, **options)
            return out, lse

        assert results(*arrays, bias, sinks)[0].dtype == jnp.float64
        check_grads(results, (*arrays, bias, sinks), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bias", ["hqk", "bk", None])
def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, bias: str | None):
    case = AttentionCase(
        "", batch=2, q_length=37, kv_length=29, heads=4, kv_heads=2, head_dim=8, bias=bias, mask="bhqk", sinks=1,
        causal=True, causal_alignment="bottom_right", lengths=True, dropout_prob=0.2,
    )  # fmt: skip
    arrays, options = case.arguments()
    inputs = FlashAttention().prepare(*arrays, **options)
    d_out, d_lse = draw(2, 37, 4, 8), draw(2, 4, 37)

    def run():
        compute = jax.jit(lambda inputs: (attention_reference(inputs), reference_gradients(inputs, d_out, d_lse)))
        return compute(inputs)

    direct = run()
    monkeypatch.setattr(reference, "DIRECT_SCORES", 100)
    monkeypatch.setattr(reference, "ROW_BLOCK_SCORES", 8 * 2 * 4 * 29)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), run(), direct)


def test_memory_at_length_16384():
    """The scores alone would take 8.6 GB."""
    struct = jax.ShapeDtypeStruct((1, 16384, 8, 64), jnp.float32)

    def gradients(query, key, value):
        return reference_gradients(FlashAttention().prepare(query, key, value, causal=True), query)

    memory = jax.jit(gradients).lower(struct, struct, struct).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 30


def test_a_row_that_sees_nothing_has_zero_gradients():
    arrays = [jnp.asarray(draw(1, 4, 2, 8, seed=seed)) for seed in range(3)]
    bias = jnp.zeros((4, 4)).at[2].set(-jnp.inf)

    def loss(query, key, value, bias):
        out, lse = run_reference(query, key, value, bias, query_seq_lengths=[2], logits_soft_cap=None)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays, bias)
    assert all(bool(jnp.all(jnp.isfinite(gradient))) for gradient in gradients)
    assert not np.any(np.asarray(gradients[0])[:, 2:])
    out, lse = run_reference(*arrays, bias, query_seq_lengths=[2])
    assert not np.any(np.asarray(out)[:, 2:])
    assert np.all(np.isneginf(np.asarray(lse)[:, :, 2:]))


def test_narrow_oracle_is_less_exact():
    """The policy measures a backend's error by this one's."""
    arrays, options = AttentionCase("", q_length=64, heads=2, dtype="bfloat16").arguments()
    inputs = FlashAttention().prepare(*arrays, **options)
    exact, narrow = attention_reference(inputs)[0], attention_reference(inputs, jnp.bfloat16)[0]
    assert (exact.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    assert 1e-4 < float(jnp.max(jnp.abs(exact - narrow))) < 0.1
    np.testing.assert_array_equal(FlashAttention().reference(inputs), narrow)
    wide = {name: array.astype(jnp.float32) for name, array in inputs.arrays.items() if array is not None}
    np.testing.assert_array_equal(FlashAttention().reference(inputs.replace(**wide)), exact)
