"""Conformance of the XLA backend of linear attention, in one loop and in segments, and what chunks must not show."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import QUICK, check, check_candidates
from tests.kernels.conftest import H100
from tests.kernels.linear_attention.conformance import (
    CASES,
    LinearAttentionConformance,
    check_contained,
    exact,
    inputs_of,
    named,
    wide,
)
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.xla.backend import XlaLinearAttention
from tilewright.kernels.linear_attention.xla.params import XlaLinearAttentionParams, segment_chunks
from tilewright.kernels.linear_attention.xla.triangular import inverse
from tilewright.ops.utils.device import current_device

TOLERANCE = 2e-5
"""Allowed for float32 with sums in other orders, and for systems that amplify roundings."""

SERIAL, SEGMENTS = XlaLinearAttentionParams(16), XlaLinearAttentionParams(16, 2)


class TestXla(LinearAttentionConformance):
    backend = XlaLinearAttention()

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return SERIAL, SERIAL


class TestSegments(TestXla):
    cases = tuple(each for each in CASES if each.length > 32)

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return SEGMENTS, SEGMENTS


@functools.partial(jax.jit, static_argnums=2, compiler_options=QUICK)
def both(
    inputs: LinearAttentionInputs, cotangents: LinearAttentionResults, params: XlaLinearAttentionParams
) -> tuple[Any, Any]:
    results = XlaLinearAttention().forward(inputs, params)
    return results, XlaLinearAttention().backward(inputs, results, cotangents, params)


@functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
def forward(inputs: LinearAttentionInputs, params: XlaLinearAttentionParams) -> Any:
    return XlaLinearAttention().forward(inputs, params)


def run(inputs: LinearAttentionInputs, params: XlaLinearAttentionParams = SERIAL) -> dict[str, Any]:
    return named(*both(inputs, TestXla().cotangents(inputs), params))


def small(**fields: Any) -> LinearAttentionCase:
    base = LinearAttentionCase("small", length=37, heads=1, value_heads=2, key_dim=8, value_dim=6, state=True)
    return dataclasses.replace(base, **fields)


def checked(inputs: LinearAttentionInputs, params: XlaLinearAttentionParams = SERIAL) -> Any:
    """Compares all results and gradients with the oracle's, by the root mean squares of their differences."""
    cotangents = TestXla().cotangents(inputs)
    got = named(*both(inputs, cotangents, params))
    want = exact(inputs, cotangents)
    assert got.keys() == want.keys()
    for name, x in want.items():
        error = np.sqrt(np.mean((got[name] - x) ** 2))
        assert error <= TOLERANCE * np.sqrt(np.mean(x**2)) + 1e-9, (name, error)
    return got


def test_float64():
    with jax.enable_x64(True):
        inputs = wide(inputs_of(small(gate="channel", sequences="cum_seqlens", length=50)))
        cotangents = TestXla().cotangents(inputs)
        got = named(*both(inputs, cotangents, SEGMENTS))
        want = exact(inputs, cotangents)
        for name, x in want.items():
            assert got[name].dtype == np.float64
            np.testing.assert_allclose(got[name], x, rtol=1e-10, atol=1e-12, err_msg=name)


DECAYS = {
    "none": np.zeros(37),
    "all": np.full(37, -1000.0),
    "infinite": np.where(np.arange(37) == 5, -np.inf, -0.3),
    "one token": np.where(np.arange(37) == 20, -1000.0, -0.1),
    "by turns": np.where(np.arange(37) % 2, -1000.0, -0.37),
    "as strong as allowed": np.full(37, -5.0),
    "tiny": np.full(37, -1e-6),
}


@pytest.mark.parametrize("gate", ["token", "channel"])
@pytest.mark.parametrize("update", ["delta", "removal"])
@pytest.mark.parametrize("decay", DECAYS)
def test_decays_of_any_strength(decay: str, update: Any, gate: Any):
    """A decay of channels is in one channel alone, beside one that does not decay."""
    inputs = inputs_of(small(gate=gate, update=update))
    shape = inputs.log_decay.shape
    values = np.broadcast_to(DECAYS[decay][None, :, None], shape[:3])
    if gate == "channel":
        values = np.where(np.arange(8) == 3, values[..., None], -0.2 * (np.arange(8) != 4))
    # The oracle's derivative of e^−∞ is 0, as ours.
    got = checked(inputs.replace(log_decay=jnp.asarray(values, jnp.float32)))
    assert np.all(np.isfinite(got["d_log_decay"]))


@pytest.mark.parametrize(("beta", "noise"), [(1.0, 0.0), (2.0, 0.0), (1.0, 0.3), (2.0, 0.3), (0.0, 0.3)])
def test_keys_that_are_alike(beta: float, noise: float):
    """The systems of a chunk are then as ill conditioned as they get, and sums of powers overflow."""
    inputs = inputs_of(small(length=64, gate="none", qk_l2norm=True))
    key = jnp.ones((1, 64, 1, 8)) + noise * inputs.key
    inputs = inputs.replace(key=key, beta=jnp.full_like(inputs.beta, beta))
    checked(inputs, XlaLinearAttentionParams(64))


def test_an_early_value_is_never_dropped():
    """A truncated history would lose it: weights of e^−9 to e^−20 of it are all that the results are made of."""
    inputs = inputs_of(small(length=64, gate="token", update="add"))
    value = jnp.zeros_like(inputs.value).at[:, 0].set(1e4)
    inputs = inputs.replace(value=value, log_decay=jnp.full_like(inputs.log_decay, -0.32), initial_state=None)
    cotangents = TestXla().cotangents(inputs)
    got, want = named(*both(inputs, cotangents, SERIAL)), exact(inputs, cotangents)
    np.testing.assert_allclose(got["out"], want["out"], rtol=1e-4, atol=1e-9)
    assert np.abs(want["out"][:, -1]).max() > 1e-9


@pytest.mark.parametrize("params", [SERIAL, SEGMENTS], ids=["serial", "segments"])
@pytest.mark.parametrize(("update", "gate"), [("delta", "channel"), ("delta", "token"), ("removal", "channel")])
def test_results_do_not_depend_on_later_tokens(update: Any, gate: Any, params: XlaLinearAttentionParams):
    inputs = inputs_of(small(update=update, gate=gate, length=80))
    want = forward(inputs, params).out
    for t in (1, 17, 41):
        other = {name: getattr(inputs, name) for name in ("query", "key", "value", "log_decay")}
        other = {name: x.at[:, t:].set(1 - 3 * x[:, t:]) for name, x in other.items()}
        other["log_decay"] = other["log_decay"].at[:, t:].set(-1000.0)
        got = forward(inputs.replace(**other), params).out
        np.testing.assert_array_equal(got[:, :t], want[:, :t])
        assert not np.array_equal(got[:, t:], want[:, t:])


@pytest.mark.parametrize("params", [SERIAL, SEGMENTS], ids=["serial", "segments"])
def test_a_packed_sequence_does_not_show_its_place_or_its_neighbours(params: XlaLinearAttentionParams):
    inputs = inputs_of(small(length=120, sequences="cum_seqlens"))
    names = ("query", "key", "value", "log_decay", "beta")

    def placed(begin: int, ends: list[int], fill: float) -> LinearAttentionInputs:
        arrays = {n: jnp.full_like(getattr(inputs, n), fill) for n in names}
        arrays = {n: x.at[:, begin : begin + 40].set(getattr(inputs, n)[:, :40]) for n, x in arrays.items()}
        return inputs.replace(**arrays, cum_seqlens=jnp.asarray(ends, jnp.int32))

    state = inputs.initial_state
    first = named(*both(placed(0, [0, 40, 60, 60, 120], 0.1), TestXla().cotangents(inputs), params))
    moved = placed(33, [5, 33, 33, 73, 119], 3e3).replace(initial_state=state.at[2].set(state[0]).at[0].set(jnp.inf))
    second = forward(moved, params)
    np.testing.assert_array_equal(first["out"][:, :40], second.out[:, 33:73])
    np.testing.assert_array_equal(first["state"][0], second.state[2])
    np.testing.assert_array_equal(second.state[1], state[1])  # of no token


def test_packed_sequences_are_their_rows():
    """Also where there are more sequences than tokens of most, and all are empty."""
    inputs = inputs_of(small(length=40, sequences="cum_seqlens"))
    for ends in ([0, 1, 2, 3, 40], [7, 7, 7, 7, 7], [40, 40, 40, 40, 40], [0, 0, 40, 40, 40], [3, 19, 19, 35, 38]):
        packed = checked(inputs.replace(cum_seqlens=jnp.asarray(ends, jnp.int32)))
        for i, (begin, end) in enumerate(itertools.pairwise(ends)):
            if begin == end:
                np.testing.assert_array_equal(packed["state"][i], inputs.initial_state[i])
        outside = np.r_[0 : ends[0], ends[-1] : 40]
        assert not np.any(packed["out"][:, outside])


@pytest.mark.parametrize("sequences", ["cum_seqlens", "segment_ids", "seq_lengths"])
@pytest.mark.parametrize("update", ["delta", "removal"])
def test_padding_may_hold_anything(sequences: Any, update: Any):
    inputs = inputs_of(small(sequences=sequences, update=update, gate="channel"))
    if sequences == "cum_seqlens":
        inputs = inputs.replace(cum_seqlens=jnp.asarray([4, 9, 20, 20, 30], jnp.int32))
        padding = (np.arange(37) < 4) | (np.arange(37) >= 30)
    elif sequences == "seq_lengths":
        inputs, padding = inputs.replace(seq_lengths=jnp.asarray([18], jnp.int32)), np.arange(37) >= 18
    else:
        inputs = inputs.replace(segment_ids=jnp.asarray([[-1] * 5 + [3] * 12 + [-7] * 9 + [3] * 11], jnp.int32))
        padding = np.asarray(inputs.segment_ids[0]) < 0
    per_token = [n for n, x in inputs.arrays.items() if x is not None and x.shape[:2] == (1, 37) and n != "segment_ids"]
    poison = {n: getattr(inputs, n).at[:, padding].set(jnp.nan) for n in per_token}
    cotangents = TestXla().cotangents(inputs)
    want = named(*both(inputs, cotangents, SERIAL))
    poisoned = cotangents._replace(out=cotangents.out.at[:, padding].set(jnp.inf))
    got = named(*both(inputs.replace(**poison), poisoned, SERIAL))
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
    for name in ("out", *(f"d_{n}" for n in per_token)):
        assert not np.any(got[name][:, padding]), name


@pytest.mark.parametrize("at", [1, 16, 37, 64])
def test_a_sequence_may_be_computed_in_two_parts(at: int):
    inputs = inputs_of(small(length=70, gate="channel"))
    whole = forward(inputs, SERIAL)

    def part(begin: int, end: int, state: Any) -> Any:
        tokens = {n: x[:, begin:end] for n, x in inputs.arrays.items() if x is not None and n != "initial_state"}
        return forward(inputs.replace(**tokens, initial_state=state), SERIAL)

    first = part(0, at, inputs.initial_state)
    second = part(at, 70, first.state)
    np.testing.assert_allclose(jnp.concatenate([first.out, second.out], 1), whole.out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(second.state, whole.state, rtol=2e-5, atol=2e-6)


def test_gradients_through_the_state_alone():
    inputs = inputs_of(small(sequences="cum_seqlens"))
    cotangents = TestXla().cotangents(inputs)
    cotangents = cotangents._replace(out=jnp.zeros_like(cotangents.out))
    got, want = named(*both(inputs, cotangents, SERIAL)), exact(inputs, cotangents)
    check(got, want)
    assert not np.any(got["d_query"])
    assert np.any(got["d_initial_state"])


def test_forward_mode():
    inputs = inputs_of(small(gate="channel"))
    floats = {name: getattr(inputs, name) for name in inputs.gradients}

    def loss(arrays: Any) -> Any:
        out, state = XlaLinearAttention().forward(inputs.replace(**arrays), SEGMENTS)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state))

    tangents = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), x.dtype), floats)
    _, along = jax.jit(lambda: jax.jvp(loss, (floats,), (tangents,)), compiler_options=QUICK)()
    gradients = jax.jit(jax.grad(loss), compiler_options=QUICK)(floats)
    total = sum(np.vdot(gradients[name], tangents[name]) for name in floats)
    np.testing.assert_allclose(along, total, rtol=1e-4)


def test_no_barrier_in_gradients():
    """XLA for GPUs may write a fusion's results over an operand whose copy behind a barrier it has still to read."""
    inputs = inputs_of(small(gate="channel"))
    run = jax.jit(lambda inputs, cotangents: XlaLinearAttention().backward(inputs, None, cotangents, SEGMENTS))
    assert "optimization_barrier" not in run.lower(inputs, TestXla().cotangents(inputs)).as_text()


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_the_inverse_and_its_derivative(size: int):
    random = np.random.default_rng(size)
    matrix = np.tril(random.standard_normal((3, size, size)), -1) / 4
    with jax.enable_x64(True):
        found, pull_back = jax.vjp(inverse, jnp.asarray(matrix))
        cotangent = random.standard_normal(matrix.shape)
        (gradient,) = pull_back(jnp.asarray(cotangent))
    want = np.linalg.inv(np.eye(size) + matrix)
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-9)
    swapped = np.swapaxes(want, -1, -2)
    np.testing.assert_allclose(gradient, np.tril(-swapped @ cotangent @ swapped, -1), rtol=1e-8, atol=1e-8)


def test_candidates():
    check_candidates(XlaLinearAttention(), inputs_of(small(length=100)).structs, current_device())


def test_long_rows_are_split_where_a_step_is_little_work():
    one = inputs_of(small(length=8192))
    assert segment_chunks(one, 64, H100) == 8
    assert segment_chunks(one, 64, current_device()) == 1
    assert segment_chunks(inputs_of(small(length=8192, batch=64)), 64, H100) == 1
    packed = one.replace(initial_state=None, cum_seqlens=jnp.zeros(65, jnp.int32))
    assert segment_chunks(packed, 64, H100) == 2


@pytest.mark.parametrize(
    ("gate", "update", "params"),
    [
        ("none", "add", SERIAL), ("head", "delta", SERIAL), ("token", "delta", SEGMENTS), ("channel", "delta", SERIAL),
        ("token", "removal", SERIAL), ("channel", "removal", SEGMENTS), ("channel", "bonus", SERIAL),
    ],
)  # fmt: skip
def test_tokens_that_are_not_finite(gate: Any, update: Any, params: XlaLinearAttentionParams):
    case = small(heads=2, value_heads=2, gate=gate, update=update)
    check_contained(lambda inputs: forward(inputs, params), case, 21)


@pytest.mark.parametrize("sequences", ["cum_seqlens", "segment_ids", "seq_lengths"])
def test_a_sequence_that_is_not_finite_is_not_in_others(sequences: Any):
    """Sequences begin in the middle of a chunk, also behind the one that has a NaN, and some are empty."""
    case = small(sequences=sequences, batch=2 if sequences == "seq_lengths" else 1)
    inputs = inputs_of(case)
    packing = {"cum_seqlens": [2, 5, 5, 11, 36], "segment_ids": [[0] * 5 + [4] * 6 + [2] * 26], "seq_lengths": [9, 30]}
    inputs = inputs.replace(**{sequences: jnp.asarray(packing[sequences], jnp.int32)})
    sequence, at, end, state = (0, 7, 9, 0) if sequences == "seq_lengths" else (0, 7, 11, 2)
    clean = forward(inputs, SERIAL)
    found = forward(inputs.replace(beta=inputs.beta.at[sequence, at, 1].set(jnp.nan)), SERIAL)
    reached = np.zeros(clean.out.shape, bool)
    reached[sequence, at:end, 1] = True
    np.testing.assert_array_equal(found.out, np.where(reached, np.nan, clean.out))
    if clean.state is not None:
        ends = np.zeros(clean.state.shape, bool)
        ends[state, 1] = True
        np.testing.assert_array_equal(found.state, np.where(ends, np.nan, clean.state))
