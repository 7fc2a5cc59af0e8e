"""The causal convolution over several devices: results and gradients of one device, exactly so in float64."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.draws import zeros
from tilewright.modules import causal_conv1d, context_parallel_causal_conv1d

TOKENS, CHANNELS = P(None, "s"), 3

# Devices, tokens on each, the width, rows, and what describes the sequences.
CALLS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "rows": (4, 5, 4, 2, {}),
    "a window of a token": (2, 5, 1, 2, {}),
    "tokens of a window alone": (8, 3, 4, 1, {}),
    "lengths, devices without tokens": (4, 5, 4, 4, {"seq_lengths": [20, 7, 1, 0]}),
    "packed, over borders and whole devices": (4, 6, 4, 1, {"cum_seqlens": [1, 3, 3, 20, 22]}),
    "packed, begun shortly before a border": (4, 6, 4, 1, {"cum_seqlens": [0, 5, 11, 12, 17, 24]}),
    "packed, at borders": (4, 6, 3, 1, {"cum_seqlens": [6, 6, 12, 24, 24]}),
    "packed, beyond the row": (2, 6, 3, 1, {"cum_seqlens": [4, 9, 15]}),
    "one device": (1, 6, 3, 1, {"cum_seqlens": [1, 4, 5]}),
}


def operands(name: str, states: bool) -> tuple[dict[str, Any], dict[str, P]]:
    devices, length, width, batch, described = CALLS[name]
    rng = np.random.default_rng(3)
    sequences = len(described["cum_seqlens"]) - 1 if "cum_seqlens" in described else batch
    shapes = {"x": (batch, devices * length, CHANNELS), "weight": (CHANNELS, width), "bias": (CHANNELS,)}
    if states:
        shapes["initial_state"] = (sequences, CHANNELS, width - 1)
    arrays = {key: jnp.asarray(rng.standard_normal(shape)) for key, shape in shapes.items()}
    return arrays, {key: TOKENS if key == "x" else P() for key in arrays}


def both_passes(function: Any) -> Any:
    def run(arrays: dict[str, Any]) -> Any:
        found, pull = jax.vjp(function, arrays)
        return found, pull(jax.tree.map(jnp.cos, found))[0]

    return run


def over_devices(name: str, specs: dict[str, P], states: bool, check_vma: bool = True) -> Any:
    devices, *_, described = CALLS[name]
    options = {key: jnp.asarray(each, jnp.int32) for key, each in described.items()}
    mesh = jax.make_mesh((devices,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.shard_map(
        lambda arrays: context_parallel_causal_conv1d(
            **arrays, axis_name="s", activation="silu", return_state=states, **options
        ),
        mesh=mesh, in_specs=(specs,), out_specs=(TOKENS, P()) if states else TOKENS, check_vma=check_vma,
    )  # fmt: skip


def on_one(name: str, states: bool) -> Any:
    options = {key: jnp.asarray(each, jnp.int32) for key, each in CALLS[name][-1].items()}
    return lambda arrays: causal_conv1d(**arrays, activation="silu", return_state=states, **options)


@pytest.mark.parametrize(("name", "states"), [(name, states) for name in CALLS for states in (True, False)])
def test_results_and_gradients_are_those_of_one_device(name: str, states: bool):
    with jax.enable_x64(True):
        arrays, specs = operands(name, states)
        got = jax.jit(both_passes(over_devices(name, specs, states)))(arrays)
        wanted = jax.jit(both_passes(on_one(name, states)))(arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("name", ["rows", "packed, begun shortly before a border"])
def test_types_unchecked(name: str):
    arrays, specs = operands(name, True)
    got = jax.jit(both_passes(over_devices(name, specs, True, check_vma=False)))(arrays)
    wanted = jax.jit(both_passes(on_one(name, True)))(arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["rows", "packed, over borders and whole devices"])
def test_types_that_split_tokens_and_channels(name: str):
    mesh = jax.make_mesh((4, 2), ("s", "c"), axis_types=(AxisType.Explicit,) * 2)
    with jax.enable_x64(True):
        arrays, _ = operands(name, True)
        arrays = {key: jnp.concatenate([x, x + 1], axis=2 if key == "x" else -2 if x.ndim > 1 else 0)
                  for key, x in arrays.items()}  # fmt: skip
        wanted = jax.jit(both_passes(on_one(name, True)))(arrays)
        specs = {"x": P(None, "s"), "weight": P("c")}
        with jax.set_mesh(mesh):
            placed = {key: jax.device_put(x, NamedSharding(mesh, specs.get(key, P()))) for key, x in arrays.items()}
            got = jax.jit(both_passes(on_one(name, True)))(placed)
    assert got[0][0].sharding.spec == P(None, "s", "c")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-13, rtol=1e-13)


def test_segments_over_types_that_split_tokens_are_refused():
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = jax.device_put(zeros((1, 8, 3)), NamedSharding(mesh, TOKENS))
        with pytest.raises(ValueError, match="causal_conv1d: segment_ids cannot be followed"):
            causal_conv1d(x, zeros((3, 2)), segment_ids=zeros((1, 8), np.int32))
        with pytest.raises(ValueError, match="causal_conv1d: arrays must be split alike"):
            causal_conv1d(x, jax.device_put(zeros((3, 2)), NamedSharding(mesh, P(None, "s"))))


def test_a_window_is_sent_to_the_right_and_its_gradient_back():
    arrays, specs = operands("rows", False)
    text = jax.jit(both_passes(over_devices("rows", specs, False))).lower(arrays).compile().as_text()
    sent = re.findall(r"= \(?(\w+\[[\d,]*\])\S* collective-permute", text)
    assert sent == [f"f32[2,{CHANNELS},3]"] * 2
    assert not re.findall(r" (all-gather|all-to-all|reduce-scatter)(?:-start)?\(", text)


def test_padding_of_nan_reaches_nothing():
    name = "packed, over borders and whole devices"
    arrays, specs = operands(name, True)
    poisoned = arrays | {"x": arrays["x"].at[:, jnp.array([0, 22, 23])].set(jnp.nan)}
    run = jax.jit(both_passes(over_devices(name, specs, True)))
    for one, other in zip(jax.tree.leaves(run(poisoned)), jax.tree.leaves(run(arrays)), strict=True):
        np.testing.assert_array_equal(one, other)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "axis": ({"axis_name": "t"}, ValueError, "axis_name='t' is no axis of a surrounding jax.shard_map"),
    "few tokens": ({"weight": zeros((3, 4))}, ValueError, "each device needs 3 tokens at least"),
    "states": ({"initial_state": zeros((1, 3, 2))}, ValueError, "initial_state must"),
    "segments": ({"segment_ids": zeros((1, 2), np.int32)}, TypeError, "has no argument 'segment_ids'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_is_refused(name: str):
    changed, error, message = REFUSED[name]
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    run = jax.shard_map(
        lambda x: context_parallel_causal_conv1d(
            x, **{"weight": zeros((3, 2)), "axis_name": "s", **changed}
        ),
        mesh=mesh, in_specs=P(None, "s"), out_specs=P(None, "s"),
    )  # fmt: skip
    with pytest.raises(error, match=f"context_parallel_causal_conv1d.*{re.escape(message)}"):
        run(zeros((1, 4, 3)))
