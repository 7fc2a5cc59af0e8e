"""Decoding steps by the names of models, against recurrences by token in float64."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.recurrences import NAMES, draw, of_tokens, oracle, softplus, state_shape
from tilewright import modules
from tilewright.kernels.linear_attention.step_functions import SlotOptions, StepOptions

BATCH = 2


def call_of(name: str, length: int) -> tuple[dict[str, jax.Array], dict[str, Any], jax.Array]:
    """Arrays of tokens, other arguments, and states."""
    drawn = draw(name, batch=BATCH, length=length, heads=2, value_heads=4)
    given = {n: jnp.asarray(x, jnp.float32) if isinstance(x, np.ndarray) else x for n, x in drawn.items()}
    tokens = {n: x for n, x in given.items() if of_tokens(n, x)}
    shape = state_shape(name, drawn)
    states = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, *shape)), jnp.float32)
    return tokens, {n: x for n, x in given.items() if n not in tokens}, states


def token_of(name: str) -> tuple[dict[str, jax.Array], dict[str, Any], jax.Array]:
    tokens, others, states = call_of(name, 1)
    return {n: x[:, 0] for n, x in tokens.items()}, others, states


def pool_of(states: jax.Array) -> jax.Array:
    """A pool of four slots, of which rows 0 and 1 have 3 and 1."""
    return jnp.full((4, *states.shape[1:]), jnp.nan).at[jnp.array([3, 1])].set(states)


@pytest.mark.parametrize("name", NAMES)
def test_steps(name: str):
    """One of one token, and then one of several."""
    tokens, others, states = call_of(name, 4)
    step = getattr(modules, f"{name}_step")
    want, last = oracle(name, tokens | others, None, np.asarray(states))
    pool, slots = pool_of(states), jnp.array([3, 1])
    first, rest = ({n: x[:, part] for n, x in tokens.items()} for part in (0, slice(1, None)))
    one, pool = step(**first, **others, state_pool=pool, state_indices=slots)
    more, pool = step(**rest, **others, state_pool=pool, state_indices=slots)
    np.testing.assert_allclose(one, want[:, 0], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(more, want[:, 1:], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(pool[slots], last, atol=1e-5, rtol=1e-5)
    assert np.isnan(pool[jnp.array([0, 2])]).all()


@pytest.mark.parametrize(("name", "bound"), [("gated_delta_rule", None), ("kimi_delta_attention", None),
                                             ("kimi_delta_attention", -3.0)])  # fmt: skip
@pytest.mark.parametrize("negative", [False, True])
def test_raw_gates(name: str, bound: float | None, negative: bool):
    token, _, states = token_of(name)
    random = np.random.default_rng(2)
    shape = token.pop("g").shape
    token.pop("beta")
    a, b, rate, bias = (random.standard_normal(x).astype(np.float32) for x in (shape, shape[:2], shape[1], shape[1:]))
    factor = np.exp(rate).reshape(-1, *[1] * (len(shape) - 2))
    g = -factor * softplus(a + bias) if bound is None else bound / (1 + np.exp(-factor * (a + bias)))
    beta = (2.0 if negative else 1.0) / (1 + np.exp(-b))
    step = getattr(modules, f"{name}_step")
    options = {} if bound is None else {"lower_bound": bound}
    got = step(
        **token, a=a, b=b, A_log=rate, dt_bias=bias, allow_neg_eigval=negative, state_pool=states, **options
    )  # fmt: skip
    want = step(**token, g=g.astype(np.float32), beta=beta.astype(np.float32), state_pool=states)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_slopes_of_retention():
    token, _, states = token_of("retention")
    slopes = -np.log1p(-(2.0 ** -np.arange(5.0, 9.0))).astype(np.float32)
    token.pop("slopes", None)
    got, want = (modules.retention_step(**token, **each, state_pool=states) for each in ({}, {"slopes": slopes}))
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)


def test_norms():
    token, _, states = token_of("delta_rule")
    options = {"qk_l2norm": True, "l2norm_eps": 0.5, "state_pool": states}
    got = modules.delta_rule_step(**token | {"k": 3 * token["k"]}, **options)
    key, query = (x / np.sqrt(np.sum(np.square(x), -1, keepdims=True) + 0.5) for x in (3 * token["k"], token["q"]))
    want = modules.delta_rule_step(query, key, token["v"], token["beta"], state_pool=states)
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)


def test_padding_of_a_state_space_model_is_zero():
    """Beside the state there is a skip, which padding has, too."""
    token, others, states = token_of("ssd")
    token = {n: x.at[1].set(jnp.nan) for n, x in token.items()}
    out, after = modules.ssd_step(**token, **others, state_pool=pool_of(states), state_indices=[1, -1])
    assert not np.any(out[1])
    assert np.all(np.isfinite(out))
    assert np.any(out[0])
    np.testing.assert_array_equal(after[3], states[0])


def test_a_state_space_model_in_bfloat16_rounds_its_output_alone():
    token, others, states = token_of("ssd")
    token = {n: x.astype(jnp.bfloat16) for n, x in token.items()}
    out, after = modules.ssd_step(**token, **others, state_pool=states)
    exact, wanted = modules.ssd_step(
        **{n: x.astype(jnp.float32) for n, x in token.items()}, **others, state_pool=states
    )  # fmt: skip
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(after, wanted)


def test_values_before_keys():
    token, others, states = token_of("gated_delta_rule")
    want = modules.gated_delta_rule_step(**token, **others, state_pool=states)
    got = modules.gated_delta_rule_step(
        **token, **others, state_pool=jnp.swapaxes(states, 2, 3), state_layout="vk"
    )  # fmt: skip
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_allclose(jnp.swapaxes(got[1], 2, 3), want[1], atol=1e-6)


@pytest.mark.parametrize("name", [f"{name}_step" for name in NAMES])
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
    ("name", "changes", "error", "message"),
    [
        ("gated_delta_rule", {"g": None}, ValueError, "gated_delta_rule_step: the decay is given as g"),
        ("gated_delta_rule", {"g": np.zeros((2, 3), np.float32)}, ValueError, r"g must have the shape \[batch, value"),
        ("kimi_delta_attention", {"lower_bound": -1.0}, ValueError, "lower_bound turn a raw gate"),
        ("retention", {"slopes": np.zeros(3, np.float32)}, ValueError, "slopes must have the shape"),
        ("retention", {"state_layout": "kx"}, ValueError, "state_layout must be one of"),
        ("rwkv7", {"a": np.zeros((2, 4), np.float32)}, ValueError, r"a must have the shape"),
        ("ssd", {"state_pool": np.zeros((2, 4, 8, 6), np.float32)}, ValueError, "state_pool must have the shape"),
        ("ssd", {"state_layout": "vk"}, TypeError, "has no argument 'state_layout'"),
        ("lightning_attention", {"cum_seqlens": np.zeros(2, int)}, TypeError, "has no argument 'cum_seqlens'"),
    ],
)
def test_wrong_arguments(name: str, changes: dict[str, Any], error: type[Exception], message: str):
    token, others, states = token_of(name)
    with pytest.raises(error, match=message):
        getattr(modules, f"{name}_step")(**token | others | {"state_pool": states} | changes)
