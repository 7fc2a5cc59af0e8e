"""What linear attention must do by algebra alone, whatever computes it: no oracle is used here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.recurrences import NAMES, Arrays, draw, of_tokens
from tilewright import modules
from tilewright.modules import (
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    kimi_delta_attention,
    lightning_attention,
    linear_attention,
    retention,
    rwkv6,
    rwkv7,
    ssd,
)

LENGTH = 70


def arrays_of(name: str, **sizes: int) -> Arrays:
    drawn = draw(name, 11, **{"length": LENGTH, **sizes})
    return {
        key: jnp.asarray(value, jnp.float32) if isinstance(value, np.ndarray) else value for key, value in drawn.items()
    }


def close(found: Any, wanted: Any, tolerance: float = 3e-6) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = float(jnp.sqrt(jnp.mean(other**2)))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * 10 * scale)


def test_without_a_gate_it_is_the_product_of_masked_scores():
    q, k, v = (arrays_of("retention", heads=2)[key] for key in "qkv")
    scores = jnp.tril(jnp.einsum("bihk,bjhk->bhij", q, k, precision="highest"))
    close(linear_attention(q, k, v, scale=1.0), jnp.einsum("bhij,bjhv->bihv", scores, v, precision="highest"))


def test_a_constant_decay_is_a_product_of_scores_and_powers():
    arrays = arrays_of("lightning_attention", heads=2)
    q, k, v, slopes = (arrays[key] for key in ("q", "k", "v", "slopes"))
    distance = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    powers = np.where(distance >= 0, np.exp(-np.asarray(slopes)[:, None, None] * np.maximum(distance, 0)), 0)
    scores = jnp.einsum("bihk,bjhk->bhij", q, k, precision="highest") * powers
    wanted = jnp.einsum("bhij,bjhv->bihv", scores, v, precision="highest")
    close(lightning_attention(**arrays), wanted)
    close(retention(**arrays), wanted * 8**-0.5)
    of_tokens = jnp.broadcast_to(-slopes, (2, LENGTH, 2))
    close(linear_attention(q, k, v, log_decay=of_tokens, scale=1.0), wanted)


def test_without_a_decay_the_gated_delta_rule_is_the_delta_rule():
    arrays = arrays_of("gated_delta_rule")
    arrays["g"] = jnp.zeros_like(arrays["g"])
    wanted = delta_rule(**{key: arrays[key] for key in ("q", "k", "v", "beta")}, return_state=True)
    close(gated_delta_rule(**arrays, return_state=True), wanted)


def test_with_equal_channels_kimi_delta_attention_is_the_gated_delta_rule():
    arrays = arrays_of("gated_delta_rule")
    channels = jnp.broadcast_to(arrays["g"][..., None], (*arrays["g"].shape, 8))
    wanted = gated_delta_rule(**arrays, return_state=True)
    close(kimi_delta_attention(**arrays | {"g": channels}, return_state=True), wanted)


def test_kimi_delta_attention_is_diagonal_plus_low_rank():
    arrays = arrays_of("kimi_delta_attention", heads=2)
    q, k, v, g, beta = (arrays[key] for key in ("q", "k", "v", "g", "beta"))
    found = rwkv7(q, g, k, v * beta[..., None], jnp.exp(g) * k, -beta[..., None] * k, 8**-0.5, return_state=True)
    close(found, kimi_delta_attention(**arrays, return_state=True))


def test_with_beta_zero_nothing_is_written_and_the_state_decays():
    arrays = arrays_of("gated_delta_rule", heads=2)
    arrays["beta"] = jnp.zeros_like(arrays["beta"])
    state = jax.random.normal(jax.random.key(0), (2, 2, 8, 6))
    sums = jnp.cumsum(arrays["g"], axis=1)
    out, final = gated_delta_rule(**arrays, initial_state=state, return_state=True)
    decayed = jnp.exp(sums)[..., None] * jnp.einsum("bthk,bhkv->bthv", arrays["q"], state, precision="highest")
    close(out, decayed * 8**-0.5)
    close(final, jnp.exp(sums[:, -1])[..., None, None] * state)


def test_with_equal_channels_gated_linear_attention_has_one_gate():
    arrays = arrays_of("gated_linear_attention")
    gate = arrays.pop("g")[..., :1]
    q, k, v = arrays.values()
    wanted = linear_attention(q, k, v, log_decay=gate[..., 0], return_state=True)
    close(gated_linear_attention(q, k, v, jnp.broadcast_to(gate, (*gate.shape[:-1], 8)), return_state=True), wanted)


def test_ssd_is_linear_attention_of_its_own_arrays():
    arrays = arrays_of("ssd")
    sizes = jax.nn.softplus(arrays["dt"] + arrays["dt_bias"])
    attended, state = linear_attention(
        arrays["C"], arrays["B"], arrays["x"] * sizes[..., None], log_decay=sizes * arrays["A"], scale=1.0,
        return_state=True,
    )  # fmt: skip
    wanted = (attended + arrays["D"][:, None] * arrays["x"]) * jax.nn.silu(arrays["z"])
    close(ssd(**arrays, return_state=True), (wanted, jnp.swapaxes(state, 2, 3)))


def test_rwkv6_is_gated_linear_attention_of_the_token_before_and_a_bonus():
    arrays = arrays_of("rwkv6", heads=2)
    r, k, v, w, u = arrays.values()
    # The state that token t reads is the one after token t − 1, which reads it for token t.
    following = jnp.pad(r[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
    before = jnp.pad(gated_linear_attention(following, k, v, w)[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    close(rwkv6(r, k, v, w, u), before + (r * u * k).sum(-1, keepdims=True) * v * 8**-0.5)


@pytest.mark.parametrize("rule", ["delta", "kimi"])
def test_orthonormal_keys_are_an_exact_memory(rule: str):
    random = np.random.default_rng(0)
    basis = np.linalg.qr(random.standard_normal((64, 64)))[0].astype(np.float32)
    keys = np.concatenate([basis, basis])[None, :, None]  # every key twice: the second value replaces the first
    values = random.standard_normal((1, 128, 1, 5)).astype(np.float32)
    asked = random.integers(0, 64, 40)
    queries = np.concatenate([keys, basis[asked][None, :, None]], axis=1)
    silent = lambda x: np.concatenate([x, np.zeros((1, 40, *x.shape[2:]), np.float32)], axis=1)
    beta = silent(np.ones((1, 128, 1), np.float32))
    arguments = (queries, silent(keys), silent(values))
    if rule == "delta":
        out = delta_rule(*arguments, beta, 1.0)
    else:
        out = kimi_delta_attention(*arguments, np.zeros((1, 168, 1, 64), np.float32), beta, 1.0)
    np.testing.assert_allclose(out[0, 128:, 0], values[0, 64 + asked, 0], atol=2e-5)
    np.testing.assert_allclose(out[0, :128, 0], values[0, :, 0], atol=2e-5)  # a token reads what it has written


@pytest.mark.parametrize("name", NAMES)
def test_it_is_linear_in_the_values(name: str):
    arrays = arrays_of(name)
    arrays.pop("z", None)
    value = "x" if name == "ssd" else "v"
    function = getattr(modules, name)
    other = jnp.flip(arrays[value], axis=1)
    one, two, both = (
        function(**arrays | {value: each}, return_state=True)
        for each in (arrays[value], other, 3 * arrays[value] - 0.5 * other)
    )
    close(both, jax.tree.map(lambda x, y: 3 * x - 0.5 * y, one, two), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_heads_do_not_know_each_other(name: str):
    """A permutation of heads permutes the results; and heads in groups are those of repeated keys."""
    arrays = arrays_of(name, heads=2, value_heads=4)
    function = getattr(modules, name)
    grouped = {"q", "k", "r", "B", "C"}
    repeated = {key: jnp.repeat(value, 2, axis=2) if key in grouped else value for key, value in arrays.items()}
    close(function(**repeated), function(**arrays), 1e-6)
    order = np.array([2, 3, 0, 1])

    def permuted(key: str, value: Any) -> Any:
        if key in grouped:
            return value[:, :, ::-1]
        if isinstance(value, bool):
            return value
        return value[:, :, order] if of_tokens(key, value) else value[order]

    found = function(**{key: permuted(key, value) for key, value in arrays.items()}, return_state=True)
    out, state = function(**arrays, return_state=True)
    close(found, (out[:, :, order], state[:, order]), 1e-6)
