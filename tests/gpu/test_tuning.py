"""Tuning on a GPU: what takes a device away from its process, unwritten memory, and a real op beside a bad kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.hostile import Way
from tests.support.hostile_gpu import HostileGpu
from tilewright.kernels.cuda.devices import capability_of
from tilewright.kernels.cuda.toolchain import missing
from tilewright.modules import flash_attention
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, Tuner, tune
from tilewright.ops.config.results import TunedCall
from tilewright.ops.utils.device import current_device

ON_GPU = jax.default_backend() == "gpu"
REASONS = missing(capability_of(current_device())) if ON_GPU else ["needs a GPU"]
pytestmark = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))

ISOLATED = Tuner(1, 3, isolation="process", timeout_s=20.0)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """By a lowering that runs nothing: the compiler may take longer than a candidate."""
    jax.jit(lambda x: HostileGpu().run(x, cfg=Way("illegal"))).lower(jnp.ones((256,)))


def tuned(kernel: HostileGpu, x: jax.Array, tuner: Tuner = ISOLATED) -> TunedCall:
    (call,) = Autotuner(tuner, chooser=ConfigSelectorChain()).tune(Invocation(kernel, (x,)))
    return call


def test_an_illegal_address_and_a_hang_in_the_middle_of_a_sweep():
    x = jax.random.normal(jax.random.key(0), (1024, 1024))
    before, function = np.asarray(x), jax.jit(lambda x: jnp.sin(x).sum())
    expected = float(function(x))
    call = tuned(HostileGpu("slow", "illegal", "right", "hang", "left out", "right:again"), x)
    errors = {candidate.config.name: candidate.error for candidate in call.candidates}
    assert "illegal" in errors["illegal"].lower()
    assert "did not answer within 20 s" in errors["hang"]
    assert not any(errors[name] for name in ("slow", "right", "right:again"))
    assert call.winner.config.name.startswith("right")
    assert call.complete
    # This process has lost nothing: its arrays, its compiled functions and its context still work.
    assert np.array_equal(np.asarray(x), before)
    assert float(function(x)) == expected
    np.testing.assert_array_equal(np.asarray(HostileGpu().run(x, cfg=Way("right"))), 2 * before)


def test_what_is_left_unwritten_never_wins():
    call = tuned(HostileGpu("left out", "slow"), jnp.ones((1024, 1024)))
    assert call.winner.config.name == "slow"
    assert call.candidates[0].error


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_attention_is_tuned_among_all_backends(isolation: Any):
    keys = jax.random.split(jax.random.key(1), 3)
    query, key, value = (jax.random.normal(k, (2, 1024, 8, 64), jnp.bfloat16) for k in keys)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return flash_attention(query, key, value, causal=True).astype(jnp.float32).sum()

    tuner = Tuner(isolation=isolation)
    result = tune(jax.grad(loss), query, key, value, tuner=tuner, budget_s=40.0)
    assert [call.direction for call in result] == ["forward", "backward"]
    for call in result:
        assert {candidate.config.backend for candidate in call.candidates} >= {"hopper", "cuda", "xla"}
        assert call.winner.check == "passed"
        assert call.regret is not None
        assert call.regret < 0.03
        best = min(candidate.time_ms for candidate in call.candidates if candidate.time_ms and candidate.eligible)
        assert best > 0.005
