"""Inputs that break chunk forms: hard resets, correlated keys, old history, NaN beside sequences, odd lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.recurrences import (
    NAMES,
    Arrays,
    draw,
    normed,
    of_tokens,
    oracle,
    relative_rms,
    state_shape,
)
from tilewright import modules

GATED = {
    "gated_delta_rule": "g",
    "kimi_delta_attention": "g",
    "gated_linear_attention": "g",
    "rwkv6": "w",
    "rwkv7": "w",
}
"""The functions with a log decay of tokens, and its name."""


def call(name: str, arrays: Arrays, **options: Any) -> Any:
    low = {
        key: jnp.asarray(value, jnp.float32) if isinstance(value, np.ndarray) else value
        for key, value in arrays.items()
    }
    return getattr(modules, name)(**low, **options)


def errors_of_rows(found: Any, wanted: np.ndarray) -> list[float]:
    return [relative_rms(one, other) for one, other in zip(found, wanted, strict=True)]


def gates(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """The log decays of one row, ``[length, heads, ...]``."""
    g = np.zeros(shape)
    if kind == "some heads":
        g[:, 1] = -0.3
    elif kind == "a reset":
        g -= 0.01
        g[20] = -1000.0
    elif kind == "one channel":
        g -= 0.01
        g[20, ..., 0] = -1000.0
    elif kind == "alternating":
        g[::2] = -1000.0
    elif kind == "minus five":
        g -= 5.0
    elif kind == "minus six":
        g -= 6.0
    elif kind == "tiny":
        g -= 1e-6
    elif kind == "every size":
        g -= 10.0 ** np.linspace(-6, 3, shape[0]).reshape((-1,) + (1,) * (len(shape) - 1))
    return g


GATES = ("zero", "some heads", "a reset", "one channel", "alternating", "minus five", "minus six", "tiny", "every size")


@pytest.mark.parametrize("name", GATED)
def test_gates_of_every_size(name: str):
    """Each row has gates of another kind."""
    arrays = draw(name, 1, batch=len(GATES), length=67)
    arrays[GATED[name]] = np.stack([gates(kind, arrays[GATED[name]].shape[1:]) for kind in GATES])
    out, state = call(name, arrays, return_state=True)
    wanted, wanted_state = oracle(name, arrays)
    assert max(errors_of_rows(out, wanted)) < 3e-6
    assert max(errors_of_rows(state, wanted_state)) < 3e-6


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "rwkv6"])
def test_gradients_where_a_decay_underflows(name: str):
    kinds = ("alternating", "minus six", "a reset")
    arrays = draw(name, 1, batch=3, length=35, key_dim=4, value_dim=3)
    arrays[GATED[name]] = np.stack([gates(kind, arrays[GATED[name]].shape[1:]) for kind in kinds])
    weights = np.random.default_rng(0).standard_normal(arrays["v"].shape)
    direction = np.random.default_rng(1).standard_normal(arrays[GATED[name]].shape)
    loss = lambda g: (getattr(modules, name)(**arrays | {GATED[name]: g}) * weights).sum()
    with jax.enable_x64(True):
        found = jax.jit(jax.grad(loss))(jnp.asarray(arrays[GATED[name]]))
    ends = [
        (oracle(name, arrays | {GATED[name]: arrays[GATED[name]] + step * direction})[0] * weights).sum(axis=(1, 2, 3))
        for step in (1e-5, -1e-5)
    ]
    along = (np.asarray(found) * direction).reshape(3, -1).sum(axis=1)
    np.testing.assert_allclose(along, (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-8)


def keys(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(4)
    noise = random.standard_normal(shape)
    common = random.standard_normal(shape[-1])
    if kind == "near":
        noise = common + 0.3 * noise
    elif kind == "equal":
        noise = np.broadcast_to(common, shape)
    elif kind == "one-hot":
        return np.eye(shape[-1])[random.integers(0, shape[-1], shape[:-1])]
    return normed(noise, 0.0)


@pytest.mark.parametrize("name", ["delta_rule", "kimi_delta_attention"])
def test_correlated_keys(name: str):
    """Each row has keys of another kind, with beta = 1 and with 2."""
    kinds = ("random", "near", "equal", "one-hot") * 2
    arrays = draw(name, 1, batch=8, length=130, value_heads=1, key_dim=16)
    arrays["k"] = np.stack([keys(kind, arrays["k"].shape[1:]) for kind in kinds])
    arrays["beta"] = np.repeat([1.0, 2.0], 4)[:, None, None] * np.ones_like(arrays["beta"])
    if "g" in arrays:
        arrays["g"] *= 1e-3
    # Rounded first: with beta = 2 the state does not contract, and the rounding of keys is not the chunk form's.
    arrays = {key: np.asarray(value, np.float32).astype(np.float64) for key, value in arrays.items()}
    # 130 tokens of a state that a rounding in float32 enters once each.
    assert max(errors_of_rows(call(name, arrays), oracle(name, arrays)[0])) < 2e-5


def test_keys_of_zeros_and_denormals_have_finite_gradients():
    arrays = draw("gated_delta_rule", 2, length=20)
    arrays["k"] = arrays["k"].copy()
    arrays["k"][:, 3:6] = 0.0
    arrays["k"][:, 9] = 1e-40
    arrays["q"][:, 4] = 0.0
    low = {key: jnp.asarray(value, jnp.float32) for key, value in arrays.items()}
    gradients = jax.grad(lambda x: (modules.gated_delta_rule(**x, qk_l2norm=True) ** 2).sum())(low)
    assert all(bool(jnp.isfinite(each).all()) for each in jax.tree.leaves(gradients))
    exact = arrays | {"q": normed(arrays["q"]), "k": normed(arrays["k"])}
    assert relative_rms(call("gated_delta_rule", arrays, qk_l2norm=True), oracle("gated_delta_rule", exact)[0]) < 2e-6


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "gated_linear_attention"])
def test_old_history_is_not_dropped(name: str):
    """After one large value only zeros follow: what decayed by e^−20 is still all that there is."""
    arrays = draw(name, 3, batch=4, length=129)
    arrays["v"][:, 1:] = 0.0
    arrays["v"][:, 0] *= 1e4
    decays = -np.array([9.0, 11.0, 14.0, 20.0]) / 128
    arrays["g"] = np.broadcast_to(np.expand_dims(decays, tuple(range(1, arrays["g"].ndim))), arrays["g"].shape)
    if "beta" in arrays:
        arrays["beta"] *= 0.05
    out, wanted = call(name, arrays), oracle(name, arrays)[0]
    for tokens in (slice(0, 64), slice(64, 128), slice(128, 129)):
        assert max(errors_of_rows(out[:, tokens], wanted[:, tokens])) < 1e-5


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129)


@pytest.mark.parametrize(
    ("name", "length"),
    [("gated_delta_rule", length) for length in LENGTHS]
    + [(name, length) for name in ("kimi_delta_attention", "ssd") for length in (1, 65)],
)
def test_every_length(name: str, length: int):
    arrays = draw(name, length, batch=1, length=length)
    out, state = call(name, arrays, return_state=True)
    wanted, wanted_state = oracle(name, arrays)
    assert relative_rms(out, wanted) < 3e-6
    assert relative_rms(state, wanted_state) < 3e-6


BOUNDS = {
    "all empty": [0, 0, 0],
    "first and middle empty": [0, 0, 5, 5, 40],
    "last empty": [0, 40, 40],
    "of one token": list(range(41)),
    "inside": [3, 3, 39],
    "of odd lengths": [0, 15, 31, 32, 40],
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gated_delta_rule", kind) for kind in BOUNDS]
    + [("kimi_delta_attention", "of one token"), ("ssd", "first and middle empty")],
)
def test_packed_sequences(name: str, kind: str):
    bounds = BOUNDS[kind]
    arrays = draw(name, 5, batch=1, length=40)
    state = np.random.default_rng(0).standard_normal((len(bounds) - 1, *state_shape(name, arrays)))
    packing = {"cum_seqlens": np.array(bounds)}
    out, final = call(name, arrays, **packing, initial_state=jnp.asarray(state, jnp.float32), return_state=True)
    wanted, wanted_final = oracle(name, arrays, packing, state)
    np.testing.assert_array_equal(np.asarray(out)[wanted == 0], 0)
    if wanted.any():
        assert relative_rms(out, wanted) < 3e-6
    assert relative_rms(final, wanted_final) < 3e-6
    empty = np.diff(bounds) == 0
    np.testing.assert_array_equal(final[empty], state[empty].astype(np.float32))


def test_the_gradient_of_an_empty_sequence_passes_through():
    arrays = draw("gated_delta_rule", 5, batch=1, length=20)
    state = jnp.ones((3, 2, 8, 6))
    weights = jax.random.normal(jax.random.key(0), state.shape)
    final = lambda state: call(
        "gated_delta_rule", arrays, cum_seqlens=jnp.array([0, 9, 9, 18]), initial_state=state, return_state=True
    )[1]
    gradient = jax.grad(lambda state: (final(state) * weights).sum())(state)
    np.testing.assert_array_equal(gradient[1], weights[1])
    assert (np.abs(gradient[0] - weights[0]) > 1e-3).any()


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_changes_no_bit(name: str):
    arrays = draw(name, 6, batch=1, length=90)
    out = call(name, arrays)
    for place, large in ((1, 7.0), (16, 1000.0), (63, 1e4), (70, 1e-6)):
        later = {key: value.copy() if of_tokens(key, value) else value for key, value in arrays.items()}
        for key, value in later.items():
            if of_tokens(key, value):
                value[:, place:] = -large if key in ("g", "w") else large if key in ("x", "v") else 0.3
        np.testing.assert_array_equal(call(name, later)[:, :place], out[:, :place])


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "retention", "rwkv6", "rwkv7", "ssd"])
def test_neighbours_and_places_change_no_bit(name: str):
    """A packed sequence is what it is alone, whatever stands beside it."""
    arrays = draw(name, 7, batch=1, length=100)
    bounds = np.array([0, 13, 50, 71, 100])
    out, states = call(name, arrays, cum_seqlens=bounds, return_state=True)
    others = {
        key: np.where(((np.arange(100) >= 13) & (np.arange(100) < 50)).reshape((1, -1) + (1,) * (value.ndim - 2)),
                      value, np.nan) if of_tokens(key, value) else value
        for key, value in arrays.items()
    }  # fmt: skip
    beside, beside_states = call(name, others, cum_seqlens=bounds, return_state=True)
    np.testing.assert_array_equal(beside[:, 13:50], out[:, 13:50])
    np.testing.assert_array_equal(beside_states[1], states[1])
    moved = {
        key: np.concatenate([value[:, 50:71], value[:, 13:50], value[:, :13], value[:, 71:]], axis=1)
        if of_tokens(key, value) else value
        for key, value in arrays.items()
    }  # fmt: skip
    elsewhere, moved_states = call(name, moved, cum_seqlens=np.array([0, 21, 58, 71, 100]), return_state=True)
    np.testing.assert_array_equal(elsewhere[:, 21:58], out[:, 13:50])
    np.testing.assert_array_equal(moved_states[1], states[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_in_parts_is_the_sequence(name: str):
    """Parts of any length by one program: the second begins a row of its own, and padding follows both."""
    arrays = draw(name, 8, batch=1, length=101)
    state = np.random.default_rng(3).standard_normal((1, *state_shape(name, arrays)))
    flags = {key: arrays.pop(key) for key in ("dt_softplus",) if key in arrays}

    @jax.jit
    def read(begin: Any, length: Any, state: Any) -> Any:
        rows = {key: jnp.roll(value, -begin, axis=1) if of_tokens(key, value) else value for key, value in low.items()}
        return getattr(modules, name)(
            **rows, **flags, initial_state=state, return_state=True, seq_lengths=jnp.reshape(length, 1)
        )

    low = {key: jnp.asarray(value, jnp.float32) for key, value in arrays.items()}
    start = jnp.asarray(state, jnp.float32)
    whole, final = read(0, 101, start)
    wanted, wanted_final = oracle(name, arrays | flags, None, state)
    assert relative_rms(whole, wanted) < 3e-6
    assert relative_rms(final, wanted_final) < 3e-6
    for place in (1, 16, 37, 64, 100):
        first, between = read(0, place, start)
        second, end = read(place, 101 - place, between)
        assert relative_rms(first[:, :place], wanted[:, :place]) < 3e-6
        assert relative_rms(second[:, : 101 - place], wanted[:, place:]) < 3e-6
        assert relative_rms(end, wanted_final) < 3e-6


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "rwkv7"])
def test_gradients_through_the_final_state_only(name: str):
    arrays = draw(name, 9, batch=1, length=21, key_dim=4, value_dim=3)
    random = np.random.default_rng(2)
    state = random.standard_normal((1, 2, 4, 3))
    weights = random.standard_normal(state.shape)
    with jax.enable_x64(True):
        given = {key: jnp.asarray(value) for key, value in arrays.items()} | {"initial_state": jnp.asarray(state)}
        gradients = jax.jit(jax.grad(lambda x: (call_state(name, x) * weights).sum()))(given)
    exact = arrays | {"initial_state": state}
    for key, gradient in gradients.items():
        direction = random.standard_normal(gradient.shape)
        ends = [final_loss(name, exact | {key: exact[key] + step * direction}, weights) for step in (1e-5, -1e-5)]
        along = float((np.asarray(gradient) * direction).sum())
        assert along == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8), key
    np.testing.assert_array_equal(gradients["r" if name == "rwkv7" else "q"], 0)


def call_state(name: str, given: Arrays) -> Any:
    return getattr(modules, name)(**given, return_state=True)[1]


def final_loss(name: str, given: Arrays, weights: np.ndarray) -> float:
    arrays = {key: value for key, value in given.items() if key != "initial_state"}
    return float((oracle(name, arrays, None, given["initial_state"])[1] * weights).sum())
