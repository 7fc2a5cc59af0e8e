"""The Triton kernel of a decoding step on a GPU: every candidate against float64, in place, and the same every time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.test_step import check, recurrence
from tilewright.kernels import kernel
from tilewright.kernels.linear_attention.step_cases import CASES, StepCase
from tilewright.kernels.linear_attention.triton.step import TritonLinearAttentionStep
from tilewright.modules import linear_attention_step
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

OP, BACKEND = kernel("linear_attention_step"), TritonLinearAttentionStep()
SHAPES: dict[str, dict[str, Any]] = {
    "gated delta": {"value_heads": 8, "key_dim": 128, "value_dim": 128, "qk_l2norm": True},
    "vk": {"key_dim": 128, "value_dim": 128, "state_layout": "vk", "qk_l2norm": True},
    "bfloat16": {"key_dim": 128, "value_dim": 128, "dtype": "bfloat16", "pool_dtype": "bfloat16", "qk_l2norm": True},
    "bfloat16 vk": {"dtype": "bfloat16", "pool_dtype": "bfloat16", "state_layout": "vk"},
    "channels": {"gate": "channel", "key_dim": 256, "value_dim": 64},
    "removal": {"gate": "channel", "update": "removal"},
    "removal vk": {"gate": "none", "update": "removal", "state_layout": "vk"},
    "bonus": {"gate": "channel", "update": "bonus"},
    "state space": {"heads": 1, "value_heads": 5, "key_dim": 128, "update": "add", "state_layout": "vk"},
    "odd": {"heads": 1, "value_heads": 3, "key_dim": 60, "value_dim": 100, "qk_l2norm": True},
    "odd vk": {"key_dim": 33, "value_dim": 7, "state_layout": "vk", "qk_l2norm": True},
    "tokens": {"tokens": 4, "key_dim": 128, "value_dim": 128, "qk_l2norm": True},
    "most tokens": {"tokens": 8, "gate": "channel", "state_layout": "vk", "qk_l2norm": True},
    "tokens of removal": {"tokens": 3, "gate": "channel", "update": "removal"},
}


def case(name: str, **fields: Any) -> StepCase:
    return StepCase("", **{"batch": 5, "heads": 2, "value_heads": 4, "slots": 9} | SHAPES[name] | fields)


@functools.cache
def jitted(params: Any) -> Any:
    return jax.jit(lambda inputs: OP.outputs(inputs, BACKEND.forward(inputs, params)))


@pytest.mark.parametrize("name", SHAPES)
def test_every_candidate(name: str):
    args, options = case(name).arguments()
    inputs = OP.prepare(*args, **options)
    want = recurrence(*args, **options)
    for params in BACKEND.candidates(inputs.structs, current_device(), "forward"):
        # The exponential of the device is approximate.
        check(jitted(params)(inputs), want, 2e-5)


@pytest.mark.parametrize("name", ["gated delta", "odd vk", "bfloat16", "tokens"])
def test_padding_and_slots_that_no_row_writes(name: str):
    (query, key, value, pool), options = case(name).arguments()
    pool = pool.at[jnp.array([0, 2])].set(jnp.nan)
    padding = np.array([1, 3])
    query, key, value = (x.at[padding].set(jnp.nan) for x in (query, key, value))
    options["state_indices"] = jnp.array([8, -1, 3, 9, 6], jnp.int32)
    step = jax.jit(functools.partial(linear_attention_step, platform="triton", scale=0.5, **{
        n: v for n, v in options.items() if n != "scale"}), donate_argnums=3)  # fmt: skip
    before = np.asarray(pool.astype(jnp.float32))
    out, after = step(query, key, value, pool)
    assert not np.any(np.asarray(out[padding], np.float32))
    kept = np.array([0, 1, 2, 4, 5, 7])
    np.testing.assert_array_equal(np.asarray(after.astype(jnp.float32))[kept], before[kept])
    written = np.array([8, 3, 6])
    assert np.isfinite(np.asarray(after.astype(jnp.float32))[written]).all()
    assert not np.array_equal(np.asarray(after.astype(jnp.float32))[written], before[written])


def test_a_donated_pool_stays_where_it_is():
    args, options = case("gated delta").arguments()
    step = jax.jit(lambda pool, *new: linear_attention_step(*new, pool, **options, platform="triton"), donate_argnums=0)
    pool = args[3] + 0
    address = pool.unsafe_buffer_pointer()
    assert step(pool, *args[:3])[1].unsafe_buffer_pointer() == address


@pytest.mark.parametrize("name", ["gated delta", "tokens", "state space", "removal"])
def test_the_same_bits_every_time(name: str):
    args, options = case(name, batch=64, slots=64).arguments()
    step = jax.jit(lambda *args: linear_attention_step(*args, **options, platform="triton"))
    want = jax.tree.map(np.asarray, step(*args))
    for _ in range(100):
        for ours, theirs in zip(step(*args), want, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_rows_do_not_depend_on_each_other():
    args, options = case("gated delta", batch=16, slots=16).arguments()
    step = jax.jit(functools.partial(linear_attention_step, platform="triton"), static_argnames=("qk_l2norm",))
    gates = {name: options[name] for name in ("log_decay", "beta", "state_indices")}
    out, pool = step(*args, **gates, qk_l2norm=True)
    config = BACKEND.heuristic(OP.prepare(*args, **options).structs, current_device(), "forward")
    for row in (0, 7, 15):
        one = slice(row, row + 1)
        alone = {name: x[one] for name, x in gates.items()}
        inputs = OP.prepare(*(x[one] for x in args[:3]), args[3], **alone, qk_l2norm=True)
        own, after = jitted(config)(inputs)
        np.testing.assert_array_equal(own[0], out[row])
        slot = int(gates["state_indices"][row])
        np.testing.assert_array_equal(after[slot], pool[slot])


def test_a_loop_over_stacked_pools():
    args, options = case("gated delta").arguments()
    pools = jnp.stack([args[3], 2 * args[3], -args[3]])
    call = lambda pool: linear_attention_step(*args[:3], pool, **options, platform="triton")
    got = jax.jit(lambda pools: jax.lax.map(call, pools))(pools)
    for i in range(3):
        for ours, theirs in zip(got, jax.jit(call)(pools[i]), strict=True):
            np.testing.assert_array_equal(ours[i], theirs)


@pytest.mark.parametrize("name", CASES.by_device["gpu"])
def test_named_cases_against_xla(name: str):
    args, options = CASES.by_device["gpu"][name].arguments()
    got, want = (
        jax.jit(lambda *args, p=platform: linear_attention_step(*args, **options, platform=p))(*args)
        for platform in ("triton", "xla")
    )
    for ours, theirs in zip(got, want, strict=True):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=1e-3 * np.abs(theirs).max())
