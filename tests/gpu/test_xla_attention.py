"""The XLA backend and the framework on a GPU."""

from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.kernels.flash_attention.conformance import Conformance
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.modules import FlashAttention, base, flash_attention
from tilewright.ops import (
    ConfigSelectorChain,
    Executor,
    Tuner,
    device_fingerprint,
    device_kind,
    find_labels_in_lowered,
    get_device_platform,
)
from tilewright.ops.types import Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@pytest.fixture
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.usefixtures("exact_products")
class TestXlaOnGpu(Conformance):
    backend: ClassVar[Backend] = XlaFlashAttention()

    def params(self, inputs: AttentionInputs, direction: Direction) -> FwdParams | BwdParams:
        kind = FwdParams if direction == "forward" else BwdParams
        return kind(q_blocksize=16, kv_blocksize=32)


def operands(dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, 1024, 8, 64), (2, 1024, 2, 64), (2, 1024, 2, 64)]
    return tuple(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))


def test_the_device_is_known() -> None:
    assert device_kind() == "gpu"
    assert get_device_platform() == "triton"
    capability = jax.devices()[0].compute_capability
    assert device_fingerprint() == f"gpu:{jax.devices()[0].device_kind}:{capability}"
    assert base.detect_platform("flash_attention") in (Platform.TRITON, Platform.XLA)


def test_a_training_step_is_tuned_and_then_runs_on_the_winners() -> None:
    chain = ConfigSelectorChain()
    executor = Executor(chain)

    @jax.jit
    def step(*qkv: Any) -> Any:
        return jax.grad(lambda *x: executor(FlashAttention(), *x, causal=True).astype(jnp.float32).sum(), (0, 1, 2))(
            *qkv
        )

    def plain(*qkv: Any) -> Any:
        attention = lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, implementation="xla")
        return jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), (0, 1, 2))(*qkv)

    result = tilewright.tune(step, *operands(), tuner=Tuner(1, 3), chooser=chain)
    assert [call.direction for call in result] == ["forward", "backward"]
    for call in result:
        assert call.winner.check == "passed", [(str(c.config), c.error) for c in call.candidates]
    for got, want in zip(step(*operands()), plain(*operands()), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.1, rtol=0.1)


def test_float32_passes_its_check_whatever_the_default_precision_is() -> None:
    result = tilewright.tune(
        lambda *x: flash_attention(*x, causal=True),
        *operands(jnp.float32),
        tuner=Tuner(1, 2),
        chooser=ConfigSelectorChain(),
    )
    assert {c.check for c in result.entries[0].candidates} == {"passed"}


def test_a_program_for_the_other_platform_names_its_own_choice() -> None:
    lowered = jax.jit(lambda *x: flash_attention(*x, causal=True)).trace(*operands()).lower(lowering_platforms=("cpu",))
    assert len(find_labels_in_lowered(lowered)) == 1
