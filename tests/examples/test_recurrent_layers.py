"""Layers of the model families beside those of transformers and of the rwkv package, packed, and from pools."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_layers as layers

FOUND = np.load(Path(__file__).with_name("recurrent_layers.npz"))
"""Made by make_recurrent_layers.py."""

OF_RWKV = {
    "hidden_size": 16, "head_dim": 8, "decay_low_rank_dim": 5, "a_low_rank_dim": 4, "v_low_rank_dim": 3,
    "gate_low_rank_dim": 6, "norm_eps": 64e-5 / 8,
}  # fmt: skip

LAYERS = {
    "qwen3_next": layers.GatedDeltaNet(
        hidden_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    ),
    "kimi_linear": layers.KimiDeltaAttention(hidden_size=16, num_heads=3, head_dim=8),
    "mamba2": layers.Mamba2(hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=2),
    "rwkv7_first": layers.RWKV7(**OF_RWKV),
    "rwkv7": layers.RWKV7(**OF_RWKV),
    "rwkv7_channel_mix": layers.RWKV7ChannelMix(hidden_size=16, intermediate_size=24),
}

names = pytest.mark.parametrize("name", LAYERS)


def found(name, dtype=np.float32):
    arrays = {key.partition("/")[2]: value for key, value in FOUND.items() if key.partition("/")[0] == name}
    weights = {key[2:]: jnp.asarray(arrays.pop(key), dtype) for key in list(arrays) if key.startswith("w.")}
    return weights, jnp.asarray(arrays.pop("x"), dtype), arrays


def call(name, w, x, *args, tokens=slice(None), **sequences):
    """The output and the states; ``tokens`` are those of x, for what the layer takes from the first layer."""
    if name == "rwkv7":
        sequences["value_first"] = jnp.asarray(found(name)[2]["value_first"][:, tokens], x.dtype)
    return LAYERS[name](w, x, *args, **sequences)[:2]


@names
def test_as_other_implementations(name):
    w, x, wanted = found(name)
    out, state = call(name, w, x)
    np.testing.assert_allclose(out, wanted["y"], atol=2e-5)
    width = state.inputs.shape[-1]  # transformers keeps an input more.
    np.testing.assert_allclose(state.inputs, wanted["conv_state"][..., -width:], atol=1e-6)
    if state.memory is not None:
        np.testing.assert_allclose(state.memory, wanted["memory"], atol=2e-5)


def test_bounded_decays_as_in_another_implementation():
    w, x, wanted = found("kimi_linear")
    layer = layers.KimiDeltaAttention(hidden_size=16, num_heads=3, head_dim=8, lower_bound=-5.0)
    np.testing.assert_allclose(layer(w, x)[0], wanted["y_of_lower_bound"], atol=2e-5)


@names
def test_own_parameters_have_the_shapes_of_checkpoints(name):
    first = {"first": True} if name == "rwkv7_first" else {}
    own = LAYERS[name].parameters(jax.random.key(0), **first)
    assert {key: value.shape for key, value in own.items()} == {key: w.shape for key, w in found(name)[0].items()}


@names
@pytest.mark.parametrize("tokens", [1, 3])
def test_prefill_then_steps_from_a_pool(name, tokens):
    w, x, wanted = found(name)
    prompt, slots = 60, jnp.array([4])
    out, state = call(name, w, x[:, :prompt], tokens=slice(0, prompt))
    pool = layers.pool_of(state, slots, 7)
    outs = [out]
    for start in range(prompt, x.shape[1], tokens):
        part = slice(start, start + tokens)
        out, pool = call(name, w, x[:, part], pool, slots, tokens=part)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), wanted["y"], atol=3e-5)
    for array in jax.tree.leaves(pool):
        assert not np.delete(array, 4, axis=0).any()


@names
def test_packed_rows_are_their_sequences(name):
    w, x, _ = found(name)
    bounds = [0, 33, 33, 66]
    out, states = call(name, w, x, cum_seqlens=jnp.array(bounds))
    by_ids, none = call(name, w, x, segment_ids=np.repeat(np.arange(3), np.diff(bounds))[None])
    np.testing.assert_allclose(by_ids, out, atol=3e-5)
    assert not jax.tree.leaves(none)
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            part = slice(start, stop)
            alone, state = call(name, w, x[:, part], tokens=part)
            np.testing.assert_allclose(out[:, part], alone, atol=3e-5)
            for packed, own in zip(jax.tree.leaves(states), jax.tree.leaves(state), strict=True):
                np.testing.assert_allclose(packed[number], own[0], atol=3e-5)


@names
def test_the_next_part_of_a_sequence_beside_a_new_one(name):
    w, x, wanted = found(name)
    state = call(name, w, x[:, :33], tokens=slice(0, 33))[1]
    starts = jax.tree.map(lambda array: jnp.concatenate([jnp.zeros_like(array), array]), state)
    out, states = call(name, w, x, starts, cum_seqlens=jnp.array([0, 33, 66]))
    np.testing.assert_allclose(out, wanted["y"], atol=3e-5)
    np.testing.assert_allclose(states.inputs[0], state.inputs[0], atol=1e-6)


@names
def test_bfloat16(name):
    w, x, wanted = found(name, jnp.bfloat16)
    w |= {key: value.astype(np.float32) for key, value in found(name)[0].items() if key in ("A_log", "dt_bias")}
    out, state = call(name, w, x)
    assert out.dtype == jnp.bfloat16
    error = np.asarray(out, np.float32) - wanted["y"]
    assert np.sqrt((error**2).mean()) < 2e-2 * np.sqrt((wanted["y"] ** 2).mean())
    slots = jnp.array([1])
    token, _ = call(name, w, x[:, -1:], layers.pool_of(state, slots, 2), slots, tokens=slice(-1, None))
    assert token.dtype == jnp.bfloat16


def test_slots_without_a_pool():
    w, x, _ = found("qwen3_next")
    with pytest.raises(TypeError, match="conv_pool"):
        call("qwen3_next", w, x[:, :1], None, jnp.array([0]))
