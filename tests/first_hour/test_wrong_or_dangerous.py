"""What a newcomer met in the first hour that was wrong or dangerous, each in the words of a program that met it."""

import _thread
import dataclasses
import re
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.support.draws import draw
from tilewright.kernels.flash_attention.cudnn import jax_calls
from tilewright.modules import dot_product_attention, flash_attention, page_attention
from tilewright.ops import Invocation, Kernel, PersistentCache, default_executor
from tilewright.ops.tuning.events import CallTuned

Q = draw(2, 8, 4, 16)


@dataclasses.dataclass(frozen=True)
class Unroll:
    times: int


class Scale(Kernel):
    def __init__(self, name):
        super().__init__(name)

    def run(self, x, *, cfg):
        return 3 * x

    def heuristic_cfg(self, inv):
        return Unroll(1)

    def config_space(self, inv):
        return [Unroll(1), Unroll(2)]


def test_ctrl_c_ends_the_script_and_keeps_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    first, second = Scale("tests.first"), Scale("tests.second")
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it

    def interrupt(event):
        if isinstance(event, CallTuned):
            _thread.interrupt_main()

    try:
        with pytest.raises(KeyboardInterrupt):
            tilewright.tune(lambda x: second(first(x)), jnp.ones(4), on_event=interrupt)
    finally:
        signal.signal(signal.SIGINT, heeded)
    key = Invocation(first, (jax.ShapeDtypeStruct((4,), jnp.float32),)).key
    assert key in default_executor().chooser.cache or key in PersistentCache(tmp_path)


@pytest.fixture
def without_cudnn(monkeypatch):
    """A CUDA plugin beside which there is no cuDNN, as JAX says it."""

    def missing():
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(jax_calls, "cudnn_version", missing)


def test_a_machine_without_cudnn_runs_every_other_backend(without_cudnn):
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        structs = [jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)] * 3
        explained = default_executor().explain(tilewright.modules.FlashAttention(), *structs, quiet=True)
    assert explained.config.backend == "hopper"
    assert explained.rejected["cudnn"] == ("its probe failed: RuntimeError: cuDNN not found.",)


def test_the_drop_in_for_jax_hands_calls_of_integers_to_jax_and_not_to_itself(monkeypatch):
    integers = Q.astype(jnp.int32)
    want = jax.nn.dot_product_attention(integers, integers, integers)
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    np.testing.assert_array_equal(jax.nn.dot_product_attention(integers, integers, integers), want)


def linen_layer(**options):
    layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=flash_attention, **options)
    x = jnp.ones((2, 8, 64))
    return layer, layer.init(jax.random.key(0), x, deterministic=True), x


def test_linen_layers_with_dropout_name_the_adapter_instead_of_dropping_nothing():
    layer, parameters, x = linen_layer(dropout_rate=0.5)
    with pytest.raises(TypeError, match=re.escape("tilewright.integrations.flax.dot_product_attention")):
        layer.apply(parameters, x, deterministic=False, rngs={"dropout": jax.random.key(1)})


def test_linen_layers_without_dropout_run_as_they_are():
    layer, parameters, x = linen_layer()
    plain = nn.MultiHeadDotProductAttention(num_heads=4)
    np.testing.assert_allclose(layer.apply(parameters, x), plain.apply(parameters, x), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: flash_attention(Q, Q, Q, is_causal=True), "flash_attention.* 'is_causal'; did you mean 'causal'"),
        (lambda: flash_attention(Q, Q, Q, casual=True), "flash_attention.* 'casual'; did you mean 'causal'"),
        (lambda: flash_attention(Q, Q, Q, sm_scale=1.0), "did you mean 'softmax_scale'"),
        (lambda: flash_attention(Q, Q, Q, zzz=1), "flash_attention.* 'zzz'.*it has .*causal"),
        (lambda: page_attention(Q, soft_cap=1.0), "page_attention.* 'soft_cap'; did you mean 'logits_soft_cap'"),
        (lambda: flash_attention(Q, Q), r"flash_attention\(\): missing .*'value'; it is flash_attention\(query, key"),
        (lambda: flash_attention(Q, Q, Q, deterministic=True, dropout_rate=0.1), "integrations.flax"),
        (lambda: flash_attention(Q, Q[..., :8], Q), "^flash_attention: query and key must have the same head_dim"),
        (lambda: flash_attention(Q, Q, Q, causal=1), "^flash_attention: causal must be True or False"),
        (
            lambda: dot_product_attention(Q, Q, Q, is_causal=1),
            "^dot_product_attention: is_causal must be True",
        ),
        (lambda: dot_product_attention(Q, Q, Q, scale="big"), "^dot_product_attention: scale must be a number"),
        (
            lambda: dot_product_attention(Q, Q, Q, local_window_size=0.5),
            "^dot_product_attention: local_window_size must be an int",
        ),
    ],
)
def test_errors_name_the_function_and_the_argument_that_were_called(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()
