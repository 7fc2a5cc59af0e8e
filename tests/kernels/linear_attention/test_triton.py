"""Conformance of the Triton backend of linear attention, by Triton's interpreter; hostile cases, and its params."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check_candidates
from tests.kernels.conftest import A100, H100, RTX5090
from tests.kernels.linear_attention.conformance import check_contained, exact, inputs_of
from tests.kernels.linear_attention.gpu_conformance import CASES, SMALL, GpuConformance, relative_error
from tilewright.kernels.linear_attention.chunks import chunk_table, segment_table
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, with_identity
from tilewright.kernels.linear_attention.passes.chunks import TritonPass
from tilewright.kernels.linear_attention.reference import linear_attention_reference
from tilewright.kernels.linear_attention.triton import channel_calls
from tilewright.kernels.linear_attention.triton.backend import TritonLinearAttention
from tilewright.kernels.linear_attention.triton.params import TritonLinearAttentionParams
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Device

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonLinearAttention()
PARAMS = TritonLinearAttentionParams(TritonPass(16, 4, 1), TritonPass(16, 4, 1))
SPLIT = dataclasses.replace(PARAMS, segment=1)
SPLIT_TOO = [("token", PARAMS), ("token", SPLIT), ("channel", PARAMS)]


class TestTriton(GpuConformance):
    backend = BACKEND
    # It serves more gradients than an H100.
    device = A100
    machine = staticmethod(interpret_triton)

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return PARAMS, PARAMS


run = TestTriton()


class Split(TestTriton):
    """The same with sequences that are split into segments of one chunk."""

    __test__ = False

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return SPLIT, SPLIT


def outputs(inputs: LinearAttentionInputs, params: TritonLinearAttentionParams = PARAMS) -> Any:
    with interpret_triton():
        return jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, params))(inputs))


def check(inputs: LinearAttentionInputs, factor: float = 2.0) -> dict[str, Any]:
    cotangents = run.cotangents(inputs)
    got = run.compiled(inputs)(inputs, cotangents)
    run.check(got, inputs, cotangents, factor)
    return got


@pytest.mark.parametrize("update", ["add", "delta"])
@pytest.mark.parametrize("gate", ["token", "channel"])
@pytest.mark.parametrize("pattern", ["resets", "alternating", "strong", "none of some"])
def test_gates(pattern: str, gate: Any, update: Any):
    """Those that forget all, whose sums are far from 0: nothing overflows, and gradients are finite."""
    inputs = inputs_of(dataclasses.replace(SMALL, value_heads=2, gate=gate, update=update, state=True))
    decay = np.asarray(inputs.log_decay).copy()
    if pattern == "resets":
        decay[:, [0, 13, 63, 64]] = -1000.0
    elif pattern == "alternating":
        decay[:, ::2], decay[:, 1::2] = 0.0, -1000.0
    elif pattern == "strong":
        decay[:] = -6.0
    else:
        decay[..., 0] = 0.0
    # Behind a sum of -1000 a decay has the digits that float32 has of it.
    got = check(inputs.replace(log_decay=jnp.asarray(decay)), factor=40.0)
    assert all(np.all(np.isfinite(x)) for x in got.values())


@pytest.mark.parametrize("update", ["add", "delta", "removal", "bonus"])
@pytest.mark.parametrize("pattern", ["one channel", "every other channel", "one token", "by token and channel"])
def test_gates_of_channels(pattern: str, update: Any):
    """Some of them forget all and the others nothing: no factor of a block of tokens holds both."""
    inputs = inputs_of(dataclasses.replace(SMALL, gate="channel", update=update, state=True))
    decay = np.zeros(inputs.log_decay.shape, np.float32)
    if pattern == "one channel":
        decay[..., 3] = -1000.0
    elif pattern == "every other channel":
        decay[..., ::2] = -1000.0
    elif pattern == "one token":
        decay[:, 21, :, 5] = -1000.0
    else:
        token, channel = np.ogrid[: inputs.length, : inputs.key_dim]
        decay[:] = np.where((token + channel) % 3 == 0, -1000.0, -0.01)[:, None]
    got = check(inputs.replace(log_decay=jnp.asarray(decay)), factor=40.0)
    assert all(np.all(np.isfinite(x)) for x in got.values())


@pytest.mark.parametrize("gate", ["none", "channel"])
def test_equal_keys_in_sixteen_bits(gate: Any):
    """With β = 2 every token undoes the one before: with the inverse rounded to bfloat16 the error is 0.28."""
    inputs = inputs_of(dataclasses.replace(SMALL, length=128, gate=gate, key_dim=32, value_dim=32, dtype="bfloat16"))
    if gate == "channel":
        inputs = inputs.replace(log_decay=0.01 * inputs.log_decay)
    key = inputs.key[:, :1, :1] / jnp.linalg.norm(inputs.key[:, :1, :1].astype(jnp.float32), axis=-1, keepdims=True)
    inputs = inputs.replace(
        key=jnp.broadcast_to(key.astype(jnp.bfloat16), inputs.key.shape), beta=jnp.full_like(inputs.beta, 2.0)
    )
    assert relative_error(outputs(inputs).out, exact(inputs, run.cotangents(inputs))["out"]) < 0.05


@pytest.mark.parametrize(("gate", "params"), SPLIT_TOO)
@pytest.mark.parametrize("total", [-9.0, -14.0, -30.0])
def test_old_history_is_not_dropped(total: float, gate: Any, params: TritonLinearAttentionParams):
    """What is left of one early value counts, relative to itself."""
    inputs = inputs_of(dataclasses.replace(SMALL, gate=gate, length=130))
    value = jnp.zeros_like(inputs.value).at[:, 0].set(1e4)
    inputs = inputs.replace(value=value, log_decay=jnp.full_like(inputs.log_decay, total / 130))
    got, want = outputs(inputs, params).out, exact(inputs, run.cotangents(inputs))["out"]
    assert relative_error(got[:, -1], want[:, -1]) < 1e-4


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_equal_keys(strength: float):
    inputs = inputs_of(dataclasses.replace(SMALL, gate="none", qk_l2norm=True))
    key = jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape)
    check(inputs.replace(key=key, beta=jnp.full_like(inputs.beta, strength)), factor=40.0)


@pytest.mark.parametrize("gate", ["token", "channel"])
def test_no_strength(gate: Any):
    """With β = 0 nothing is written, and β has a gradient."""
    inputs = inputs_of(dataclasses.replace(SMALL, gate=gate, state=True))
    got = check(inputs.replace(beta=jnp.zeros_like(inputs.beta)))
    assert np.any(got["d_beta"])


def test_zero_keys_have_finite_gradients():
    inputs = inputs_of(dataclasses.replace(SMALL, qk_l2norm=True))
    got = check(inputs.replace(key=inputs.key.at[:, ::3].set(0.0)))
    assert all(np.all(np.isfinite(x)) for x in got.values())


@pytest.mark.parametrize(("gate", "params"), SPLIT_TOO)
@pytest.mark.parametrize("at", [1, 16, 37, 64])
def test_causal_to_the_bit(at: int, gate: Any, params: TritonLinearAttentionParams):
    """Whatever follows, be it a decay of 0 or a large value."""
    inputs = inputs_of(dataclasses.replace(SMALL, gate=gate, value_heads=2))
    changed = inputs.replace(
        query=inputs.query.at[:, at:].mul(-3.0),
        key=inputs.key.at[:, at:].mul(2.0),
        value=inputs.value.at[:, at:].set(1e4),
        log_decay=inputs.log_decay.at[:, at:].set(-1000.0),
        beta=inputs.beta.at[:, at:].set(1.5),
    )
    first, second = (np.asarray(outputs(each, params).out)[:, :at] for each in (inputs, changed))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("update", ["delta", "bonus", "removal"])
def test_no_bit_depends_on_how_a_chunk_is_divided(update: Any, dtype: str):
    """By pairs in blocks of 64, 32 or 16 tokens, and of halves of wider ones, or of halves alone."""
    inputs = inputs_of(dataclasses.replace(SMALL, length=64, gate="channel", update=update, dtype=dtype))
    inputs = inputs.replace(log_decay=jnp.full_like(inputs.log_decay, -0.55) + 0.1 * inputs.log_decay)
    results = []
    for most in (120, 40, 20, 2):
        with mock.patch.object(channel_calls, "block_range", return_value=most):
            results.append(np.asarray(outputs(inputs).out.astype(jnp.float32)))
    if dtype == "float32":  # of which sums are on a finer grid, less far away
        results = results[1:]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize(("gate", "params"), SPLIT_TOO)
def test_a_sequence_has_the_same_bits_anywhere(gate: Any, params: TritonLinearAttentionParams):
    """Alone, behind others, and before others."""
    alone = inputs_of(dataclasses.replace(SMALL, gate=gate, length=70))
    noise = inputs_of(dataclasses.replace(SMALL, gate=gate, length=100))
    want = outputs(alone, params).out
    for begin in (0, 5, 30):
        names = ("query", "key", "value", "log_decay", "beta")
        place = {name: getattr(noise, name).at[:, begin : begin + 70].set(getattr(alone, name)) for name in names}
        bounds = jnp.asarray([0, begin, begin + 70, 100], jnp.int32)
        got = outputs(noise.replace(**place, cum_seqlens=bounds), params).out
        np.testing.assert_array_equal(got[:, begin : begin + 70], want)


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 200, "value_heads": 2, "state": True},
        {"length": 300, "value_heads": 2, "sequences": "cum_seqlens", "state": True, "key_dim": 20, "value_dim": 24},
        {"length": 140, "gate": "none"},
        {"length": 200, "value_heads": 2, "dtype": "bfloat16", "qk_l2norm": True, "state": True},
        {"length": 300, "update": "add", "sequences": "cum_seqlens", "state": True},
        {"length": 200, "update": "add", "gate": "head", "batch": 2, "sequences": "seq_lengths", "state": True},
        {"length": 140, "update": "add", "gate": "none"},
    ],
    ids=lambda fields: "-".join(str(each) for each in fields.values()),
)
@pytest.mark.parametrize("segment", [1, 2])
def test_split_sequences(fields: dict[str, Any], segment: int):
    """Segments of one chunk, and of two with a shorter one behind them, have the states that a whole pass has."""
    inputs = inputs_of(dataclasses.replace(SMALL, **fields))
    split, params = Split(), dataclasses.replace(PARAMS, segment=segment)
    split.params = lambda inputs: (params, params)  # type: ignore[method-assign]
    cotangents = split.cotangents(inputs)
    split.check(split.compiled(inputs)(inputs, cotangents), inputs, cotangents)


@pytest.mark.parametrize("segment", [0, 1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "gated delta bfloat16",
        "gated delta lengths",
        "ssd packed",
        "one sequence of a row",
        "decays of channels",
        "removal",
    ],
)
def test_maps_of_states(name: str, segment: int):
    """What tokens make of states of zeros, and the matrix by which they multiply others: those of float64."""
    one = {"length": 330, "value_heads": 2, "value_dim": 24}
    case = dataclasses.replace(SMALL, name=name, **one) if name not in CASES else CASES[name]
    inputs = inputs_of(case).replace(initial_state=None, return_state=False, only_maps=True)
    if name not in CASES:
        inputs = inputs.replace(cum_seqlens=jnp.array([61, 330], jnp.int32))
    found = outputs(inputs, dataclasses.replace(PARAMS, segment=segment)).state
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else x, inputs)
        wanted = linear_attention_reference(with_identity(wide))[1]
    assert found.shape == inputs.map_shape
    assert found.dtype == np.float32
    bound = 1e-2 if inputs.value.dtype == jnp.bfloat16 else 1e-5
    for part in (np.s_[..., : inputs.value_dim], np.s_[..., inputs.value_dim :]):
        if wanted[part].size:
            assert relative_error(found[part], wanted[part]) < bound


@pytest.mark.parametrize("size", [1, 2, 3])
def test_segments_begin_where_sequences_begin(size: int):
    """Each has its chunks in order, and what is spare has none."""
    chunks = chunk_table(1, 1000, cum_seqlens=jnp.asarray([3, 3, 400, 464, 464, 900], jnp.int32))
    table = segment_table(chunks, size)
    segments, found = np.asarray(table.segments), []
    assert np.sum(segments[:, 1]) == np.sum(chunks.sequences[:, 1])
    for (first, count), (begin, number) in zip(np.asarray(table.sequences), np.asarray(chunks.sequences), strict=True):
        of_sequence = [chunk for a, n in segments[first : first + count] for chunk in range(a, a + n)]
        assert of_sequence == list(range(begin, begin + number))
        assert all(n == size for _, n in segments[first : first + count][:-1])
        found += of_sequence
    assert len(found) == np.sum(segments[:, 1])


@pytest.mark.parametrize(
    ("gate", "update"),
    [
        ("token", "add"),
        ("token", "delta"),
        ("channel", "add"),
        ("channel", "delta"),
        ("channel", "bonus"),
        ("channel", "removal"),
    ],
)
def test_two_halves_are_one(update: Any, gate: Any):
    whole = inputs_of(dataclasses.replace(SMALL, length=100, gate=gate, update=update, state=True))
    want, state = outputs(whole), whole.initial_state
    outs = []
    for part in (slice(0, 37), slice(37, 100)):
        of_update = {"delta": ("beta",), "removal": ("removal_read", "removal_write")}.get(update, ())
        names = ("query", "key", "value", "log_decay", *of_update)
        half = whole.replace(initial_state=state, **{name: getattr(whole, name)[:, part] for name in names})
        out, state = outputs(half)
        outs.append(out)
    assert relative_error(np.concatenate(outs, 1), want.out) < 1e-6
    assert relative_error(state, want.state) < 1e-6


@pytest.mark.parametrize("name", ["gated delta packed", "gated delta packed, split", "kimi delta packed"])
def test_empty_sequences_pass_states_on(name: str):
    name, _, split = name.partition(", ")
    inputs = inputs_of(CASES[name]).replace(cum_seqlens=jnp.asarray([9, 9, 40, 40, 40], jnp.int32))
    runner = Split() if split else run
    got = runner.compiled(inputs)(inputs, run.cotangents(inputs))
    run.check(got, inputs, run.cotangents(inputs))
    empty = np.array([0, 2, 3])
    np.testing.assert_array_equal(got["state"][empty], inputs.initial_state[empty])
    np.testing.assert_array_equal(got["d_initial_state"][empty], run.cotangents(inputs).state[empty])


@pytest.mark.parametrize("gate", ["token", "channel"])
def test_gradients_of_one_result_alone(gate: Any):
    inputs = inputs_of(dataclasses.replace(SMALL, gate=gate, state=True))
    cotangents = run.cotangents(inputs)
    for each in (cotangents._replace(out=None), cotangents._replace(state=None)):
        with interpret_triton():
            backward = jax.jit(lambda inputs, each: BACKEND.backward(inputs, None, each, PARAMS))
            got = jax.block_until_ready(backward(inputs, each))
        filled = [jnp.zeros_like(x) if y is None else y for x, y in zip(cotangents, each, strict=True)]
        want = exact(inputs, type(cotangents)(*filled))
        errors = {name: relative_error(x, want[f"d_{name}"]) for name, x in got.items() if np.any(want[f"d_{name}"])}
        assert max(errors.values()) < 5e-6, errors


def test_vmap_is_one_call_after_another():
    inputs = inputs_of(dataclasses.replace(SMALL, length=20))
    mapped = jnp.stack([inputs.value, -2 * inputs.value])
    with interpret_triton():
        forward = lambda value: BACKEND.forward(inputs.replace(value=value), PARAMS).out
        got = jax.block_until_ready(jax.jit(jax.vmap(forward))(mapped))
    want = outputs(inputs).out
    assert relative_error(got, np.stack([want, -2 * want])) < 1e-6


def test_what_it_declines():
    def reasons(name: str, device: Device = A100) -> str:
        inputs = inputs_of(CASES[name]).structs
        return "; ".join(BACKEND.not_supported_reasons(inputs, device, "forward"))

    declined = {"removal with a decay of tokens", "bonus with a decay of tokens", "segments"}
    assert {name for name in CASES if reasons(name)} == declined
    assert "needs a decay of each channel" in reasons("removal with a decay of tokens")
    kimi = inputs_of(CASES["kimi delta"]).structs
    assert BACKEND.not_supported_reasons(kimi, H100, "backward") == []
    assert "needs a decay of each channel" in reasons("bonus with a decay of tokens")
    assert "does not serve segment_ids" in reasons("segments")
    assert "needs a CUDA GPU" in reasons("delta", Device("cpu", "cpu"))
    assert "key_dim must be at most 256, got 257" in "; ".join(
        BACKEND.not_supported_reasons(inputs_of(dataclasses.replace(SMALL, key_dim=257)).structs, A100, "forward")
    )
    empty = inputs_of(dataclasses.replace(SMALL, length=0)).structs
    assert "need tokens" in "; ".join(BACKEND.not_supported_reasons(empty, A100, "forward"))


@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.name)
@pytest.mark.parametrize("name", ["gated delta", "ssd bfloat16", "delta float16", "kimi delta bfloat16", "removal"])
def test_params(device: Device, name: str):
    check_candidates(BACKEND, inputs_of(CASES[name]).structs, device)


@pytest.mark.parametrize(("gate", "update"), [("token", "delta"), ("channel", "delta"), ("channel", "removal")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", [A100, H100, RTX5090], ids=lambda device: device.name)
def test_what_is_chosen_fits_a_block(device: Device, dtype: str, gate: Any, update: Any):
    """With the widest states, too."""
    case = dataclasses.replace(SMALL, gate=gate, update=update, key_dim=256, value_dim=256, dtype=dtype)
    inputs = inputs_of(case).structs
    for listed in check_candidates(BACKEND, inputs, device).values():
        assert len(listed) > 1
    large = TritonLinearAttentionParams(TritonPass(256, 8, 8), TritonPass(16))
    assert "shared" in "; ".join(BACKEND.config_reasons(inputs, device, "backward", large))


@pytest.mark.parametrize("wrong", [(8,), (48,), (32, 3), (32, 4, 0), (True,)])
def test_params_are_checked(wrong: tuple[Any, ...]):
    with pytest.raises(ValueError, match="must be"):
        TritonPass(*wrong)
    with pytest.raises(TypeError, match="tokens must be a TritonPass, got None"):
        TritonLinearAttentionParams(TritonPass(16), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="segment must not be negative, got -1"):
        dataclasses.replace(PARAMS, segment=-1)


@pytest.mark.parametrize(
    ("gate", "update", "params"),
    [
        ("none", "add", PARAMS), ("none", "delta", PARAMS), ("token", "delta", SPLIT), ("channel", "delta", PARAMS),
        ("channel", "removal", PARAMS), ("channel", "bonus", PARAMS),
    ],
)  # fmt: skip
def test_tokens_that_are_not_finite(gate: Any, update: Any, params: TritonLinearAttentionParams):
    length = 40 + 30 * (params is SPLIT)
    case = dataclasses.replace(SMALL, heads=2, length=length, gate=gate, update=update)
    check_contained(lambda inputs: outputs(inputs, params), case, 21)
