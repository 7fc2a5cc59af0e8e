"""The numerics policy against results that are known to be right or wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.ops.tuning import numerics
from tilewright.ops.tuning.numerics import promoted, tree_violations, violations

RNG = np.random.default_rng(0)
WANT = RNG.standard_normal((64, 64)).astype(np.float32)


@pytest.fixture(params=["host", "device"], autouse=True)
def where(request, monkeypatch):
    """Everything here holds wherever the comparison runs."""
    if request.param == "device":

        def narrow(arrays):
            return all(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4 for x in arrays)

        monkeypatch.setattr(numerics, "_compared_on_device", narrow)


def judged(out, want=WANT, **kwargs):
    lowp = jnp.asarray(want).astype(out.dtype)
    return violations(out, jnp.asarray(want), lowp, **kwargs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_rounding_is_right_and_ten_are_wrong(dtype):
    out = jnp.asarray(WANT).astype(dtype)
    assert judged(out) == []
    epsilon = float(jnp.finfo(dtype).eps)
    wrong = (WANT * (1 + 100 * epsilon * RNG.choice([-1, 1], WANT.shape))).astype(np.float32)
    assert judged(jnp.asarray(wrong).astype(dtype))


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_a_wrong_factor_is_seen_at_any_scale_that_is_not_noise(scale):
    assert judged(jnp.asarray(WANT * scale), WANT * scale) == []
    assert bool(judged(jnp.asarray(WANT * scale * 1.1), WANT * scale)) == (scale > 1e-9)


def test_the_factor_widens_what_is_allowed():
    low = jnp.asarray(WANT).astype(jnp.bfloat16)
    out = (low.astype(jnp.float32) + 3 * (low.astype(jnp.float32) - WANT)).astype(jnp.bfloat16)
    assert judged(out)
    assert judged(out, factor=8.0) == []


def test_non_finite_values_must_stand_in_the_same_places():
    want = WANT.copy()
    want[0, 0], want[1, 1], want[2, 2] = np.nan, np.inf, -np.inf
    assert judged(jnp.asarray(want), want) == []
    for place, value in (((0, 0), 1.0), ((1, 1), -np.inf), ((1, 1), 5.0), ((3, 3), np.nan), ((3, 3), np.inf)):
        wrong = want.copy()
        wrong[place] = value
        assert "non-finite" in judged(jnp.asarray(wrong), want)[0]


def test_what_the_input_dtype_cannot_hold_is_no_allowance():
    want = np.full((8, 8), 1.0, np.float32)
    want[0, 0] = 1e6
    low = jnp.asarray(want).astype(jnp.float16)
    assert np.isinf(low[0, 0])
    assert violations(jnp.asarray(want), jnp.asarray(want), low) == []
    assert "largest error" in violations(jnp.asarray(1.01 * want), jnp.asarray(want), low)[0]


def test_squares_beyond_float32_are_compared_all_the_same():
    want = WANT * 1e25
    assert judged(jnp.asarray(want), want) == []
    assert judged(jnp.asarray(want * 1.1), want)


def test_a_direction_is_compared_where_no_element_is_far_off():
    want = np.ones(1 << 14, np.float32)
    out = want.copy()
    out[::2] *= 1.004  # within a rounding of bfloat16 each, and all on one side
    low = jnp.asarray(want, jnp.bfloat16)
    assert violations(jnp.asarray(out), jnp.asarray(want), jnp.asarray(want), 2.0)
    assert violations(jnp.asarray(want), jnp.asarray(want), low, 2.0) == []


def test_shapes_and_structures():
    assert judged(jnp.zeros((2, 3)))[0] == "shape (2, 3) instead of (64, 64)"
    out = {"x": jnp.zeros(3)}
    assert tree_violations(out, out, out) == []
    assert "['x']" in tree_violations(out, {"x": jnp.ones(3)}, {"x": jnp.ones(3)})[0]
    assert "1 arrays, the oracle returned 2" in tree_violations(out, (out, out), (out, out))[0]
    assert judged(jnp.zeros((0,)), np.zeros((0,), np.float32)) == []


def test_other_dtypes():
    ints = jnp.arange(5)
    assert violations(ints, ints, ints) == []
    assert violations(ints + 1, ints, ints)
    flags = ints > 2
    assert violations(flags, flags, flags) == []
    assert violations(~flags, flags, flags)
    waves = jnp.asarray(WANT) + 1j
    assert violations(waves, waves, waves) == []
    assert violations(waves.conj(), waves, waves)
    key = jax.random.key(0)
    assert violations(key, key, key) == []
    assert violations(jax.random.key(1), key, key)


def test_widening():
    values = [jnp.ones(2, d) for d in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float32, jnp.int8, bool)]
    assert [x.dtype for x in promoted(values)] == [jnp.float32] * 4 + [jnp.int8, bool]
    assert promoted([jax.random.key(0)])[0].dtype == jax.random.key(0).dtype
