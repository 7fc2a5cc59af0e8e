"""Conformance of the Hopper backend of linear attention, by interpreters of Mosaic GPU and Triton; hostile cases."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100, H100
from tests.kernels.linear_attention.conformance import exact, inputs_of
from tests.kernels.linear_attention.gpu_conformance import SMALL, TOLERANCES, GpuConformance, relative_error
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.hopper.backend import HopperLinearAttention
from tilewright.kernels.linear_attention.hopper.params import (
    HopperLinearAttentionGradientParams,
    HopperLinearAttentionParams,
    listed_gradient_params,
    listed_params,
)
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.passes.chunks import TritonPass
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Direction

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = HopperLinearAttention()
TOKENS = TritonPass(64, 4, 1)
GRADIENT_PARAMS = HopperLinearAttentionGradientParams(1, 2, TOKENS, ctas=2)
FULL = dataclasses.replace(SMALL, key_dim=64, value_dim=64, dtype="bfloat16")


@contextlib.contextmanager
def machine(*, races: bool = False) -> Iterator[None]:
    """Both interpreters."""
    with interpret_triton(), interpret_mosaic(detect_races=races):
        yield


class TestHopper(GpuConformance):
    backend = BACKEND
    device = H100
    machine = staticmethod(machine)
    # The gradient of the only β is one number, of rounded factors.
    tolerances: ClassVar[dict[str, float]] = TOLERANCES | {"bfloat16": 1e-2}

    def adapted(self, case: LinearAttentionCase) -> LinearAttentionCase:
        return dataclasses.replace(case, dtype="bfloat16", key_dim=64, value_dim=64)

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return HopperLinearAttentionParams(1, 2), GRADIENT_PARAMS


run = TestHopper()


def outputs(
    inputs: LinearAttentionInputs, consumers: int = 1, stages: int = 2, segment: int = 0, *, races: bool = False
) -> Any:
    params = HopperLinearAttentionParams(consumers, stages, segment)
    with machine(races=races):
        return jax.block_until_ready(jax.jit(lambda inputs: BACKEND.forward(inputs, params))(inputs))


def check(inputs: LinearAttentionInputs, results: Any, limit: float = 5e-3) -> None:
    want = exact(inputs, run.cotangents(inputs))
    assert relative_error(results.out, want["out"]) < limit
    if results.state is not None:
        assert relative_error(results.state, want["state"]) < limit


def gradients(
    inputs: LinearAttentionInputs,
    consumers: int = 1,
    stages: int = 2,
    segment: int = 0,
    ctas: int = 2,
    *,
    races: bool = False,
) -> Any:
    params = HopperLinearAttentionGradientParams(consumers, stages, TOKENS, segment, ctas)
    cotangents = run.cotangents(inputs)
    with machine(races=races):
        return jax.block_until_ready(
            jax.jit(lambda inputs, given: BACKEND.backward(inputs, None, given, params))(inputs, cotangents)
        )


def check_gradients(inputs: LinearAttentionInputs, found: Any, limit: float = 8e-3) -> None:
    want = exact(inputs, run.cotangents(inputs))
    errors = {name: relative_error(x, want[f"d_{name}"]) for name, x in found.items()}
    assert found.keys() == set(inputs.gradients)
    assert all(error < limit for error in errors.values()), errors


@pytest.mark.parametrize("update", ["add", "delta"])
@pytest.mark.parametrize("case", ["rows", "cum_seqlens", "seq_lengths"])
def test_two_consumers(update: Any, case: Any):
    """Wide keys and values, more chunks than stages, two value heads of a key head; nothing races."""
    batch = 1 if case == "cum_seqlens" else 2
    inputs = inputs_of(
        dataclasses.replace(
            FULL, batch=batch, length=200, value_heads=2, key_dim=128, value_dim=128, update=update, sequences=case,
            state=True, qk_l2norm=True,
        )
    )  # fmt: skip
    check(inputs, outputs(inputs, 2, 2, races=True))


@pytest.mark.parametrize(("update", "case"), [("add", "seq_lengths"), ("delta", "cum_seqlens")])
def test_gradients_of_two_consumers(update: Any, case: Any):
    """Three chunks, the last of which is not full, in two stages; nothing races."""
    inputs = inputs_of(
        dataclasses.replace(
            FULL, length=150, value_heads=2, key_dim=128, value_dim=128, update=update, sequences=case, state=True,
            qk_l2norm=True,
        )
    )  # fmt: skip
    check_gradients(inputs, gradients(inputs, 2, 2, races=True))


def test_each_consumer_has_channels_of_its_own():
    inputs = inputs_of(dataclasses.replace(FULL, length=20, value_dim=128, update="add", gate="none"))
    check(inputs, outputs(inputs, 2))
    check_gradients(inputs, gradients(inputs, 2))


@pytest.mark.parametrize("segment", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"length": 200, "qk_l2norm": True, "state": True},
        {"length": 330, "sequences": "cum_seqlens", "qk_l2norm": True, "state": True},
        {"length": 200, "gate": "none", "batch": 2, "sequences": "seq_lengths"},
        {"length": 330, "update": "add", "sequences": "cum_seqlens", "state": True},
        {"length": 200, "update": "add", "gate": "head", "state": True},
        {"length": 200, "update": "add", "gate": "none"},
    ],
    ids=lambda fields: "-".join(str(each) for each in fields.values()),
)
def test_split_sequences(fields: Any, segment: int):
    """Segments of a chunk, and of two with a shorter one behind them, have the states that a whole pass has."""
    inputs = inputs_of(dataclasses.replace(FULL, value_heads=2, **fields))
    check(inputs, outputs(inputs, segment=segment))


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 200, "qk_l2norm": True, "state": True},
        {"length": 200, "batch": 2, "sequences": "seq_lengths"},
        {"length": 200, "update": "add", "sequences": "cum_seqlens", "state": True},
    ],
    ids=lambda fields: "-".join(str(each) for each in fields.values()),
)
def test_gradients_of_split_sequences(fields: Any):
    """They go back through the maps of segments, the last one's only if there is a gradient behind it."""
    inputs = inputs_of(dataclasses.replace(FULL, **fields))
    check_gradients(inputs, gradients(inputs, segment=2, ctas=0))


@pytest.mark.parametrize("update", ["add", "delta"])
def test_split_sequences_of_two_consumers(update: Any):
    """What a segment makes of its state is computed by CTAs of values and by others of keys; nothing races."""
    inputs = inputs_of(
        dataclasses.replace(
            FULL, length=300, sequences="cum_seqlens", key_dim=128, value_dim=128, update=update, state=True,
            qk_l2norm=True,
        )
    )  # fmt: skip
    check(inputs, outputs(inputs, 2, 3, 2, races=True))


def test_empty_sequences_pass_states_on():
    for segment in (0, 1):
        inputs = inputs_of(dataclasses.replace(FULL, length=90, sequences="cum_seqlens", state=True))
        inputs = inputs.replace(cum_seqlens=jnp.asarray([9, 9, 40, 40, 40], jnp.int32))
        got = outputs(inputs, segment=segment)
        for empty in (0, 2, 3):
            np.testing.assert_array_equal(got.state[empty], inputs.initial_state[empty])
        assert not np.any(got.out[:, :9])
        assert not np.any(got.out[:, 40:])
        found = gradients(inputs, segment=segment)["initial_state"]
        for empty in (0, 2, 3):
            np.testing.assert_array_equal(found[empty], run.cotangents(inputs).state[empty])


def test_blocks_of_values():
    """Three CTAs share a head of 192 channels; keys without norms are inverted in float32."""
    inputs = inputs_of(dataclasses.replace(FULL, value_dim=192, gate="none", length=80))
    check(inputs, outputs(inputs))


@pytest.mark.parametrize("pattern", ["resets", "alternating", "strong", "none"])
@pytest.mark.parametrize("update", ["add", "delta"])
def test_gates(pattern: str, update: Any):
    """Those that forget all: nothing overflows."""
    inputs = inputs_of(dataclasses.replace(FULL, update=update, state=True))
    decay = np.asarray(inputs.log_decay).copy()
    if pattern == "resets":
        decay[:, [0, 13, 63, 64]] = -1000.0
    elif pattern == "alternating":
        decay[:, ::2], decay[:, 1::2] = 0.0, -1000.0
    else:
        decay[:] = -6.0 if pattern == "strong" else 0.0
    inputs = inputs.replace(log_decay=jnp.asarray(decay))
    check(inputs, outputs(inputs))


@pytest.mark.parametrize(("strength", "noise"), [(1.0, 0.0), (2.0, 0.0), (2.0, 0.05)])
def test_keys_alike(strength: float, noise: float):
    """With β = 2 every token undoes the one before, but for the decay."""
    inputs = inputs_of(dataclasses.replace(FULL, length=128, qk_l2norm=True))
    key = inputs.key[:, :1].astype(jnp.float32) + noise * inputs.key.astype(jnp.float32)
    inputs = inputs.replace(
        key=key.astype(jnp.bfloat16),
        beta=jnp.full_like(inputs.beta, strength),
        log_decay=jnp.full_like(inputs.log_decay, -0.01),
    )
    check(inputs, outputs(inputs), 0.05)


@pytest.mark.parametrize("total", [-9.0, -14.0, -30.0])
def test_old_history_is_not_dropped(total: float):
    """What is left of one early value counts, relative to itself: an exact inverse has up to 7 % with some keys."""
    inputs = inputs_of(dataclasses.replace(FULL, length=130, qk_l2norm=True))
    value = jnp.zeros_like(inputs.value).at[:, 0].set(1e4)
    inputs = inputs.replace(value=value, log_decay=jnp.full_like(inputs.log_decay, total / 130))
    got, want = outputs(inputs).out, exact(inputs, run.cotangents(inputs))["out"]
    assert relative_error(got[:, -1], want[:, -1]) < 2e-2


def test_zero_keys():
    inputs = inputs_of(dataclasses.replace(FULL, qk_l2norm=True, state=True))
    inputs = inputs.replace(key=inputs.key.at[:, ::3].set(0.0), query=inputs.query.at[:, 1::3].set(0.0))
    check(inputs, outputs(inputs))


@pytest.mark.parametrize("at", [1, 37, 64])
def test_causal_to_the_bit(at: int):
    """Whatever follows, be it a decay of 0 or a large value."""
    inputs = inputs_of(FULL)
    changed = inputs.replace(
        query=inputs.query.at[:, at:].mul(-3.0),
        key=inputs.key.at[:, at:].mul(2.0),
        value=inputs.value.at[:, at:].set(1e4),
        log_decay=inputs.log_decay.at[:, at:].set(-1000.0),
        beta=inputs.beta.at[:, at:].set(1.5),
    )
    first, second = (np.asarray(outputs(each).out)[:, :at] for each in (inputs, changed))
    np.testing.assert_array_equal(first, second)


def test_a_sequence_has_the_same_bits_anywhere():
    """Alone, behind others, and before others."""
    alone, noise = inputs_of(FULL), inputs_of(dataclasses.replace(FULL, length=100))
    want = outputs(alone).out
    for begin in (5, 30):
        names = ("query", "key", "value", "log_decay", "beta")
        place = {name: getattr(noise, name).at[:, begin : begin + 70].set(getattr(alone, name)) for name in names}
        bounds = jnp.asarray([0, begin, begin + 70, 100], jnp.int32)
        got = outputs(noise.replace(**place, cum_seqlens=bounds)).out
        np.testing.assert_array_equal(got[:, begin : begin + 70], want)


@pytest.mark.parametrize("update", ["add", "delta"])
def test_two_parts_are_one(update: Any):
    """At the border of a chunk to the bit: states are float32."""
    whole = inputs_of(dataclasses.replace(FULL, length=100, update=update, state=True))
    want, state, outs = outputs(whole), whole.initial_state, []
    for part in (slice(0, 64), slice(64, 100)):
        names = ("query", "key", "value", "log_decay", *(("beta",) if update == "delta" else ()))
        half = whole.replace(initial_state=state, **{name: getattr(whole, name)[:, part] for name in names})
        out, state = outputs(half)
        outs.append(out)
    np.testing.assert_array_equal(np.concatenate(outs, 1), want.out)
    np.testing.assert_array_equal(state, want.state)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32"}, {"dtype": "float16"}, {"key_dim": 96}, {"value_dim": 80}, {"gate": "channel"},
        {"sequences": "segment_ids", "batch": 2}, {"length": 0},
    ],
)  # fmt: skip
def test_what_it_does_not_serve(fields: Any):
    structs = inputs_of(dataclasses.replace(FULL, **fields)).structs
    assert BACKEND.not_supported_reasons(structs, H100, "forward")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_it_is_for_hopper(direction: Any):
    structs = inputs_of(FULL).structs
    assert not BACKEND.not_supported_reasons(structs, H100, direction)
    assert BACKEND.not_supported_reasons(structs, A100, direction)


def test_params():
    """Two consumers where all SMs have work; with few heads two CTAs share one, and a long sequence is split."""
    one = inputs_of(dataclasses.replace(FULL, length=8192, key_dim=128, value_dim=128, value_heads=8)).structs
    many = inputs_of(dataclasses.replace(FULL, batch=8, length=64, value_heads=16, heads=4, value_dim=128)).structs
    few = inputs_of(dataclasses.replace(FULL, value_heads=4, value_dim=128)).structs
    assert listed_params(many, 132)[0].consumers == 2
    assert listed_params(few, 132)[0].consumers == 1
    assert listed_params(one, 132)[0].segment
    assert not listed_params(many, 132)[0].segment
    assert listed_gradient_params(one, 132)[0].segment
    directions: tuple[Direction, ...] = ("forward", "backward")
    for inputs, direction in itertools.product((one, many, few), directions):
        candidates = list(BACKEND.candidates(inputs, H100, direction))
        assert len(candidates) > 1
        for each in candidates:
            assert not BACKEND.config_reasons(inputs, H100, direction, each)
    for wrong in ({"consumers": 3}, {"segment": -1}, {"stages": 1}, {"consumers": True}):
        with pytest.raises(ValueError, match="must"):
            HopperLinearAttentionParams(**{"consumers": 1, "stages": 2, **wrong})
        with pytest.raises(ValueError, match="must"):
            HopperLinearAttentionGradientParams(**{"consumers": 1, "stages": 2, "tokens": TOKENS, **wrong})
    with pytest.raises(TypeError, match="tokens must be"):
        HopperLinearAttentionGradientParams(1, 2, cast(Any, 64))
