"""What libtpu compiles of the cross-entropy's kernels: every TPU takes their first configs, in little memory."""

from typing import Any

import jax.numpy as jnp
import pytest

from tests.aot_tpu.compiler import TPUS, report
from tests.aot_tpu.cycles import recorded

CALLS: dict[str, dict[str, Any]] = {
    "llama 3": {"tokens": 8192, "d": 4096, "vocab": 128256},
    "qwen": {"tokens": 4096, "d": 8192, "vocab": 151936, "vocab_first": True},
    "gpt 2": {"tokens": 1000, "d": 768, "vocab": 50257, "vocab_first": True, "label_smoothing": 0.1},
    "float32": {"tokens": 2048, "d": 2048, "vocab": 32000, "dtype": "float32", "logits_soft_cap": 30.0},
}

MORE = {("llama 3", "TPU7x"): 3 << 30}
"""Bytes beyond the bound: with the same blocks as elsewhere XLA takes 6.4 GB there."""


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("name", CALLS)
def test_loss_and_gradients(name: str, tpu: str):
    call = CALLS[name]
    found = report(tpu, "tests.aot_tpu.losses:call", **call)
    assert not found.error, found.error
    assert found.bundles  # of our kernels, not of XLA's matmuls
    itemsize = jnp.dtype(call.get("dtype", "bfloat16")).itemsize
    x, weight = (itemsize * call["d"] * call[each] for each in ("tokens", "vocab"))
    # Arguments and results; a block of gradients of logits; x in the order of the tokens, its gradient in float32; and
    # a matrix, with its gradient, that is padded to a multiple of 128 classes.
    padded = 2 * weight if call["vocab"] % 128 else 0
    bound = 2 * (x + weight) + (1 << 29) + 12 * call["tokens"] * call["d"] + padded + (1 << 28)
    assert found.peak_bytes < bound + MORE.get((name, tpu), 0)
    # The sums of a product of several registers' width: they do not fit into registers, and go beside the products.
    assert found.spills < 0.4 * found.bundles


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("kernel", ["statistics", "gradients"])
def test_kernels_keep_the_mxu_busy(kernel: str, tpu: str):
    row = recorded()[tpu][f"loss, {kernel}"]
    if (kernel, tpu) == ("statistics", "TPU7x"):
        assert "FIFO" in row["why"]  # the simulator fails
    else:
        assert row["share"] >= 0.6
