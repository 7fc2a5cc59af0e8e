"""The settings of JAX that strict programs and test suites switch on change no result of any op, and refuse none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.every_op.matrix import SETTINGS, call_of, every_op, strict_promotion
from tests.every_op.test_x64 import every_implementation_lowers, lowered_text
from tilewright.ops import Kernel, Tuner
from tilewright.ops.kernel.prepared import prepared

DTYPES = ["bfloat16", "float32"]

every = pytest.mark.parametrize("op", every_op())
in_both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
under_every_setting = pytest.mark.parametrize("setting", SETTINGS)


@under_every_setting
@in_both_dtypes
@every
def test_results_and_gradients_are_those_without(op, dtype, setting):
    function, arrays = call_of(op, dtype).training()
    wanted = jax.jit(function)(*arrays)
    with SETTINGS[setting]():
        for got in (jax.jit(function)(*arrays), function(*arrays)):
            assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(wanted)]
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@under_every_setting
@in_both_dtypes
@every
def test_the_oracle_is_that_without(op, dtype, setting):
    call = call_of(op, dtype)
    _, arguments = prepared(call.kernel, call.args, call.kwargs)
    assert arguments is not None
    wanted = call.kernel.reference(*arguments[0])
    with SETTINGS[setting]():
        _, arguments = prepared(call.kernel, call.args, call.kwargs)
        assert arguments is not None
        got = call.kernel.reference(*arguments[0])
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@in_both_dtypes
@every
def test_on_an_h100_every_implementation_lowers(op, dtype, without_builds):
    call = call_of(op, dtype)
    with tilewright.target_device("NVIDIA H100 80GB HBM3"), strict_promotion():
        assert every_implementation_lowers(call)


@every
def test_on_an_h100_the_same_program_is_lowered(op, without_builds):
    function, arrays = call_of(op, "bfloat16").training()
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        wanted = lowered_text(function, arrays)
        with strict_promotion():
            assert lowered_text(function, arrays) == wanted


@every
def test_it_is_tuned(op, tmp_path, monkeypatch):
    """On sampled arrays, checked against the oracle."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    call = call_of(op, "bfloat16")
    function, arrays = call.on_arrays(platform="xla")
    with strict_promotion():
        assert tilewright.tune(function, *arrays, tuner=Tuner(warmup=0, iters=1)).entries


class Sum(Kernel):
    def run(self, x, y, *, cfg):
        return x + y

    def heuristic_cfg(self, inv):
        return 1


def test_a_users_own_kernel_is_the_users_code():
    x, y = jnp.ones((2, 3)), jnp.ones(3)
    kernel = Sum("tests.users_sum")
    np.testing.assert_array_equal(kernel(x, y), x + y)
    with strict_promotion(), pytest.raises(ValueError, match="rank_promotion"):
        kernel(x, y)
