"""Decoding steps by the names of models: from any states they give what the functions of whole sequences give."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.unoptimised import unoptimised
from tilewright import modules
from tilewright.kernels.linear_attention.step_functions import SlotOptions, StepOptions

BATCH, LENGTH, HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 2, 4, 8, 6
KEYS, VALUES = (HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM)
HEAD, CHANNEL = (VALUE_HEADS,), (VALUE_HEADS, KEY_DIM)
QKV = {"q": KEYS, "k": KEYS, "v": VALUES}
RKV = {"r": KEYS, "k": KEYS, "v": VALUES}
DELTA = {"qk_l2norm": True}
RAW = {"A_log": HEAD, "dt_bias": HEAD}

CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gated_delta_rule": ("gated_delta_rule", QKV | {"g": HEAD, "beta": HEAD}, {}, DELTA),
    "raw gates": ("gated_delta_rule", QKV | {"a": HEAD, "b": HEAD}, RAW, DELTA | {"allow_neg_eigval": True}),
    "kimi": ("kimi_delta_attention", QKV | {"g": CHANNEL, "beta": HEAD}, {}, DELTA | {"l2norm_eps": 0.1}),
    "raw kimi": (
        "kimi_delta_attention", QKV | {"a": CHANNEL, "b": HEAD}, {"A_log": HEAD, "dt_bias": CHANNEL},
        DELTA | {"lower_bound": -5.0},
    ),
    "delta_rule": ("delta_rule", QKV | {"beta": HEAD}, {}, DELTA | {"scale": 0.5}),
    "gated_linear_attention": ("gated_linear_attention", QKV | {"g": CHANNEL}, {}, {}),
    "retention": ("retention", QKV, {}, {}),
    "slopes": ("retention", QKV, {"slopes": HEAD}, {}),
    "lightning_attention": ("lightning_attention", QKV, {"slopes": HEAD}, {}),
    "rwkv6": ("rwkv6", RKV | {"w": CHANNEL}, {"u": CHANNEL}, {}),
    "rwkv7": ("rwkv7", RKV | {"w": CHANNEL, "a": CHANNEL, "b": CHANNEL}, {}, {}),
    "ssd": (
        "ssd", {"x": VALUES, "dt": HEAD, "B": KEYS, "C": KEYS, "z": VALUES}, {"A": HEAD, "D": HEAD, "dt_bias": HEAD},
        {"dt_softplus": True, "dt_limit": (0.1, 2.0)},
    ),
    "plain ssd": ("ssd", {"x": VALUES, "dt": HEAD, "B": KEYS, "C": KEYS}, {"A": HEAD, "D": VALUES}, {}),
}  # fmt: skip
"""The function, its arrays of tokens and of layers by the shapes behind their leading dimensions, and its options."""


def arrays_of(call: str) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Arrays of tokens; arrays of layers with the options."""
    _, of_tokens, of_layers, options = CALLS[call]
    random = np.random.default_rng(0)

    def draw(name: str, *shape: int) -> jax.Array:
        x = random.standard_normal(shape).astype(np.float32) * (0.3 if name in ("a", "b") else 1.0)
        if name in ("g", "w", "A"):
            x = -np.abs(x)
        elif name in ("beta", "dt", "slopes"):
            x = np.abs(x) % 1.0
        return jnp.asarray(x)

    tokens = {name: draw(name, BATCH, LENGTH, *shape) for name, shape in of_tokens.items()}
    return tokens, options | {name: draw(name, *shape) for name, shape in of_layers.items()}


def pool_of(states: jax.Array) -> jax.Array:
    """A pool of four slots, of which rows 0 and 1 have 3 and 1."""
    return jnp.full((4, *states.shape[1:]), jnp.nan).at[jnp.array([3, 1])].set(states)


@pytest.mark.parametrize("call", CALLS)
def test_steps_and_whole_sequences(call: str):
    """A step of one token, and then one of several."""
    name = CALLS[call][0]
    tokens, others = arrays_of(call)
    shape = (VALUE_DIM, KEY_DIM) if name == "ssd" else (KEY_DIM, VALUE_DIM)
    states = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, VALUE_HEADS, *shape)), jnp.float32)
    whole, step = (getattr(modules, each) for each in (name, f"{name}_step"))
    pool, slots = pool_of(states), jnp.array([3, 1])
    with unoptimised():
        want, last = whole(**tokens, **others, initial_state=states, return_state=True)
        first, rest = ({n: x[:, part] for n, x in tokens.items()} for part in (0, slice(1, None)))
        one, pool = step(**first, **others, state_pool=pool, state_indices=slots)
        more, pool = step(**rest, **others, state_pool=pool, state_indices=slots)
    np.testing.assert_allclose(one, want[:, 0], atol=1e-5)
    np.testing.assert_allclose(more, want[:, 1:], atol=1e-5)
    np.testing.assert_allclose(pool[slots], last, atol=1e-5)
    assert np.isnan(pool[jnp.array([0, 2])]).all()


def test_padding_of_a_state_space_model_is_zero():
    """Beside the state there is a skip, which padding has, too."""
    tokens, others = arrays_of("ssd")
    token = {n: x[:, 0].at[1].set(jnp.nan) for n, x in tokens.items()}
    pool = jnp.zeros((4, VALUE_HEADS, VALUE_DIM, KEY_DIM))
    out, after = modules.ssd_step(**token, **others, state_pool=pool, state_indices=[2, -1])
    assert not np.any(out[1])
    assert np.all(np.isfinite(out))
    assert np.any(out[0])
    np.testing.assert_array_equal(after[jnp.array([0, 1, 3])], 0)


def test_a_state_space_model_in_bfloat16_rounds_its_output_alone():
    tokens, others = arrays_of("ssd")
    token = {n: x[:, 0].astype(jnp.bfloat16) for n, x in tokens.items()}
    pool = pool_of(jnp.ones((2, VALUE_HEADS, VALUE_DIM, KEY_DIM)))
    out, after = modules.ssd_step(**token, **others, state_pool=pool, state_indices=[3, 1])
    exact, wanted = modules.ssd_step(
        **{n: x.astype(jnp.float32) for n, x in token.items()}, **others, state_pool=pool, state_indices=[3, 1]
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(after, wanted)


def test_values_before_keys():
    tokens, others = arrays_of("gated_delta_rule")
    token = {n: x[:, 0] for n, x in tokens.items()}
    pool = jnp.ones((BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM))
    pool = pool * jnp.arange(KEY_DIM)[:, None]
    want = modules.gated_delta_rule_step(**token, **others, state_pool=pool)
    got = modules.gated_delta_rule_step(**token, **others, state_pool=jnp.swapaxes(pool, 2, 3), state_layout="vk")
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_allclose(jnp.swapaxes(got[1], 2, 3), want[1], atol=1e-6)


@pytest.mark.parametrize("name", sorted({f"{name}_step" for name, *_ in CALLS.values()}))
def test_arguments_are_those_of_the_whole_function(name: str):
    """In its order, but for states and sequences."""
    ours = inspect.signature(getattr(modules, name)).parameters
    theirs = inspect.signature(getattr(modules, name.removesuffix("_step"))).parameters
    of_sequences = {"initial_state", "return_state", "cum_seqlens", "segment_ids", "seq_lengths"}
    of_steps = {"state_pool", *SlotOptions.__annotations__, *StepOptions.__annotations__} - {"platform", "cfg"}
    positional = lambda found: [p.name for p in found.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [each for each in ours if each not in of_steps] == [each for each in theirs if each not in of_sequences]
    assert positional(ours) == [each for each in positional(theirs) if each not in of_sequences]
    assert {n: p.default for n, p in ours.items() if n not in of_steps} == {
        n: p.default for n, p in theirs.items() if n not in of_sequences
    }


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    [
        ("gated_delta_rule", {"g": None}, ValueError, "gated_delta_rule_step: the decay is given as g"),
        ("gated_delta_rule", {"g": np.zeros((2, 3), np.float32)}, ValueError, r"g must have the shape \[batch, value"),
        ("kimi", {"lower_bound": -1.0}, ValueError, "lower_bound turn a raw gate"),
        ("retention", {"slopes": np.zeros(3, np.float32)}, ValueError, "slopes must have the shape"),
        ("retention", {"state_layout": "kx"}, ValueError, "state_layout must be one of"),
        ("rwkv7", {"a": np.zeros((2, 4), np.float32)}, ValueError, r"a must have the shape"),
        ("ssd", {"state_pool": np.zeros((2, 4, 8, 6), np.float32)}, ValueError, "state_pool must have the shape"),
        ("ssd", {"state_layout": "vk"}, TypeError, "has no argument 'state_layout'"),
        ("lightning_attention", {"cum_seqlens": np.zeros(2, int)}, TypeError, "has no argument 'cum_seqlens'"),
    ],
)
def test_wrong_arguments(call: str, changes: dict[str, Any], error: type[Exception], message: str):
    tokens, others = arrays_of(call)
    state = (VALUE_DIM, KEY_DIM) if "ssd" in call else (KEY_DIM, VALUE_DIM)
    given = {n: x[:, 0] for n, x in tokens.items()} | others | {"state_pool": jnp.zeros((2, VALUE_HEADS, *state))}
    with pytest.raises(error, match=message):
        getattr(modules, f"{CALLS[call][0]}_step")(**given | changes)
