"""cuDNN's attention on a GPU: conformance, its residuals with other backends' halves, real lengths, transformations."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.real_lengths import check_at_real_lengths, check_in_a_command_buffer, check_on_every_device, long_case
from tests.kernels.flash_attention.conformance import Conformance, cotangents, judge, oracles
from tests.kernels.flash_attention.cudnn_cases import BACKEND, CASES, PAIRWISE, case_of, check_residuals, inputs_for
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cuda.backend import CudaFlashAttention
from tilewright.kernels.flash_attention.cudnn.backend import CudnnBackwardParams, CudnnForwardParams
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.xla.backend import XlaFlashAttention
from tilewright.kernels.masks import LengthMask
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

FORWARD, BACKWARD = CudnnForwardParams(), CudnnBackwardParams()
BOTH = PerDirection(Choice("cudnn", FORWARD), Choice("cudnn", BACKWARD))


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


class TestCudnn(Conformance):
    backend: ClassVar[Backend] = BACKEND
    low_bias = False
    deterministic: ClassVar[bool] = False
    cases = PAIRWISE


def skip_unless_served(inputs: AttentionInputs) -> None:
    structs = inputs.structs.replace(return_lse=True)
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        if why := BACKEND.not_supported_reasons(structs, current_device(), direction):
            pytest.skip("; ".join(why))


MORE = {
    "bias at length": case_of(q_length=512, kv_length=768, head_dim=64, bias="hqk", causal=True),
    "bias beside lengths": case_of(q_length=256, head_dim=64, bias="bhqk", lengths=True),
    "rows of a bias": case_of(q_length=256, head_dim=128, bias="q", dtype="float16"),
    "one query": case_of(q_length=1, kv_length=300, causal=True, causal_alignment="bottom_right"),
    "the first query": case_of(q_length=1, kv_length=300, causal=True),
    "one head": case_of(heads=1, kv_heads=1, q_length=130, head_dim=8, causal=True),
    "odd": case_of(q_length=127, kv_length=301, head_dim=65, causal=True),
    "many groups": case_of(heads=12, kv_heads=1, q_length=200, head_dim=80, causal=True, dtype="float16"),
    **{f"head_dim {dim}": case_of(q_length=256, head_dim=dim, causal=True) for dim in (32, 64, 96, 125, 128, 192, 253)},
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_residuals_are_those_of_every_backend(name: str):
    inputs = inputs_for((CASES | MORE)[name])
    skip_unless_served(inputs)
    check_residuals(inputs, current_device(), [XlaFlashAttention()])


@pytest.mark.parametrize("other", [PallasGpuFlashAttention(), CudaFlashAttention()], ids=["pallas", "cuda"])
@pytest.mark.parametrize("name", ["causal", "lengths in a window", "shared bias"])
def test_pairs_with_kernels_of_ours(name: str, other: Backend):
    inputs = inputs_for(dataclasses.replace(CASES[name], head_dim=64, q_length=192))
    skip_unless_served(inputs)
    structs = inputs.structs.replace(return_lse=True)
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        if why := other.not_supported_reasons(structs, current_device(), direction):
            pytest.skip("; ".join(why))
    check_residuals(inputs, current_device(), [other])


def judge_both(inputs: AttentionInputs) -> tuple[Any, dict[str, Any]]:
    """Compares both directions with the oracle and returns what they gave."""
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    results = jax.jit(lambda inputs: BACKEND.forward(inputs, FORWARD))(inputs)
    run = jax.jit(lambda inputs, results, d: BACKEND.backward(inputs, results, d, BACKWARD))
    gradients = run(inputs, results, (d_out, d_lse))
    judge({"out": results[0], "lse": results[1], **gradients}, exact.arrays, low.arrays, 2.0)
    return results, gradients


def test_lengths_of_nothing_and_beyond():
    inputs = inputs_for(case_of(q_length=200, head_dim=64))
    skip_unless_served(inputs)
    lengths = LengthMask(jnp.array([250, 17]), jnp.array([0, 999])) & LengthMask(jnp.array([133]), None)
    (_, lse), gradients = judge_both(inputs.replace(mask=lengths))
    assert np.all(np.isneginf(np.asarray(lse)[0]))
    assert not np.any(np.asarray(gradients["value"][0], np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_of_minus_infinity_masks(dtype: str):
    bias = np.zeros((2, 1, 160, 160), np.float32)
    bias[:, :, :, 130:] = bias[:, :, 5] = bias[1, :, 7:80] = bias[0, :, 20:, :80] = -np.inf
    inputs = inputs_for(case_of(q_length=160, head_dim=64, dtype=dtype, causal=True))
    skip_unless_served(inputs)
    judge_both(inputs.replace(bias=jnp.asarray(bias, dtype)))


LONG = {
    "causal": long_case(1400, batch=2, causal=True),
    "narrow": long_case(1408, head_dim=64, causal=True),
    "wide": long_case(1280, head_dim=248, causal=True),
    "full": long_case(2048),
    "grouped": long_case(1024, heads=4, kv_heads=2, causal=True),
    "more_queries": long_case(1300, 700, causal=True),
    "more_keys": long_case(700, 1300, dtype="float16", causal=True),
    "ragged": long_case(1399, 1277, head_dim=72, dtype="float16", causal=True),
    "window": long_case(1500, head_dim=64, causal=True, sliding_window=300),
    "lengths": long_case(1024, batch=2, head_dim=96, lengths=True),
    "lengths_causal": long_case(1024, batch=2, head_dim=64, lengths=True, causal=True, sliding_window=200),
    "values": long_case(1024, head_dim=64, value_dim=128),
}


@pytest.mark.parametrize("name", LONG)
def test_at_real_lengths(name: str):
    case: AttentionCase = LONG[name]
    skip_unless_served(inputs_for(case))

    def configs(inputs: AttentionInputs, direction: Direction) -> list[Any]:
        return [FORWARD] if direction == "forward" else [BACKWARD]

    check_at_real_lengths(BACKEND, case, configs)


def test_vmap_and_gradients():
    query, key, value = (jnp.stack([jnp.asarray(a)] * 2) for a in LONG["window"].arguments()[0])

    def loss(*arrays: Any) -> Any:
        out, lse = flash_attention(*arrays, causal=True, return_lse=True, cfg=BOTH)
        return out.astype(jnp.float32).sum() + lse.sum()

    one = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query[0], key[0], value[0])
    both = jax.jit(jax.grad(lambda *a: jax.vmap(loss)(*a).sum(), argnums=(0, 1, 2)))(query, key, value)
    for alone, mapped in zip(one, both, strict=True):
        want = np.asarray(alone, np.float32)
        for got in np.asarray(mapped, np.float32):  # from a larger batch, for which cuDNN may have another kernel
            assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()


def test_inside_a_command_buffer():
    check_in_a_command_buffer(LONG["narrow"], cfg=BOTH)


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
def test_on_every_device_of_a_process():
    check_on_every_device(LONG["causal"], cfg=BOTH)
