"""Calls in which the sweep found a defect, by what they compute."""

import jax
import numpy as np
import pytest

from tests.every_op.matrix import call_of


@pytest.mark.parametrize(("op", "loss"), [("linear_cross_entropy", np.log(24)), ("linear_kl_divergence", 0.0)])
def test_tokens_of_no_elements_have_equal_logits(op: str, loss: float) -> None:
    function, arrays = call_of(op, d=0, vocab=24).training()
    (_, found), gradients = jax.jit(function)(*arrays)
    np.testing.assert_allclose(found, loss, rtol=1e-6, atol=1e-6)
    assert [x.shape for x in gradients] == [x.shape for x in arrays if x.dtype == np.float32]


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "flash_attention"])
def test_elements_of_8_bits_are_refused_before_any_work(op: str) -> None:
    """They were refused by JAX from within a kernel, which adds none."""
    function, arrays = call_of(op, "float8_e4m3fn").training()
    with pytest.raises((ValueError, TypeError), match=r"floating-point.* of 16 bits or more"):
        jax.eval_shape(function, *arrays)
